import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.bdh import BDH, PastAttention, attend_to_past
from tests.models.samples import bdh, texts


def test_the_default_size_is_the_published_one() -> None:
    with torch.device("meta"):
        model = BDH()
    assert sum(p.numel() for p in model.parameters()) == 25_296_896
    assert [name for name, _ in model.named_parameters()] == [
        "encoder",
        "encoder_v",
        "decoder",
        "embed.weight",
        "head.weight",
    ]


def test_layers_own_nothing_and_borrow_three_weights() -> None:
    model = bdh()
    assert all(not list(layer.parameters()) for _, layer in model.blocks())
    assert set(model.shared_parameters()) == {"layers.0", "layers.1", "layers.2"}
    assert model.shared_parameters()["layers.1"] == {
        n: n for n in ("encoder", "encoder_v", "decoder")
    }


def by_the_book(model: BDH, ids: Tensor) -> Tensor:
    """The definition, written with [B, H, T, N] and nothing else in mind."""
    norm = lambda x: F.layer_norm(x, x.shape[-1:])  # noqa: E731
    x = norm(model.embed.weight[ids])[:, None]
    neurons = model.encoder.shape[-1]
    length = ids.shape[1]
    i = torch.arange(neurons, dtype=torch.float64)
    angle = torch.arange(length)[:, None] * (2.0**16) ** (-2 * (i // 2) / neurons)
    for _ in model.layers:
        s = torch.relu(x @ model.encoder)
        swapped = torch.stack((-s[..., 1::2], s[..., ::2]), -1).flatten(-2)
        q = s * angle.cos().float() + swapped * angle.sin().float()
        a = norm((q @ q.mT).tril(-1) @ x)
        u = s * torch.relu(a @ model.encoder_v)
        concatenated = u.transpose(1, 2).flatten(2)[:, None]
        x = norm(x + norm(concatenated @ model.decoder))
    return x[:, 0] @ model.head.weight.T


def test_it_computes_its_definition() -> None:
    model = bdh()
    ids = texts()["input_ids"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # away from zero, where every formula is the same
    expected = by_the_book(model, ids)
    found = model(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(found)
    for mine, other in zip(
        torch.autograd.grad((found * weights).sum(), list(model.parameters())),
        torch.autograd.grad((expected * weights).sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def test_the_first_position_sees_nothing() -> None:
    s = torch.rand(2, 3, 5, 8)
    x = torch.randn(3, 5, 4)
    attended = attend_to_past(s, x.expand(s.shape[0], *x.shape), PastAttention())
    assert (attended[:, :, 0] == 0).all()
    assert (attended[:, :, 1] != 0).all()
    assert (F.layer_norm(attended[:, :, 0], (4,)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_over_neurons_do_not_overflow(dtype: torch.dtype) -> None:
    """q qᵀ over 8192 positive neurons passes 65504, fp16's last number."""
    torch.manual_seed(0)
    s = (torch.rand(1, 1, 4, 8192) * 8).to(dtype)
    x = torch.randn(1, 4, 4)
    with torch.autocast("cpu", dtype=dtype):
        attended = attend_to_past(s, x.expand(s.shape[0], *x.shape), PastAttention())
    assert attended.isfinite().all()
    assert attended.abs().max() > 65504
    exact = attend_to_past(s.float(), x.expand(s.shape[0], *x.shape), PastAttention())
    torch.testing.assert_close(
        attended.float(), exact, rtol=0.05, atol=0.02 * exact.abs().max().item()
    )


def test_dropout_acts_on_neurons_in_training() -> None:
    model = bdh(dropout=1.0)
    x = torch.randn(2, 4, 16)
    weights = {name: model.get_parameter(name) for name in ("encoder", "encoder_v", "decoder")}
    assert torch.equal(model.layers[0](x, **weights), F.layer_norm(x, (16,)))
    assert not torch.allclose(model.eval().layers[0](x, **weights), F.layer_norm(x, (16,)))


def test_neurons_must_come_out_whole_and_even() -> None:
    with pytest.raises(
        UsageError, match=r"mlp_multiplier·n_embd=45 is not a multiple of 2·n_head=6"
    ):
        BDH(n_embd=15, n_head=3, mlp_multiplier=3)
