import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.transformer import Attention, Transformer
from tests.models.samples import tied_transformer, transformer


def by_the_book(attention: Attention, x: Tensor) -> Tensor:
    """Attention head by head and position by position, with angles as complex numbers."""
    width = attention.head_width
    length = x.shape[0]
    angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    turn = torch.polar(torch.ones_like(angle), angle)

    def heads(linear: torch.nn.Linear) -> Tensor:
        return linear(x).view(length, -1, width).transpose(0, 1)

    def turned(y: Tensor) -> Tensor:
        return torch.view_as_real(
            torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2)) * turn
        ).flatten(-2)

    q = turned(heads(attention.query))
    k = turned(heads(attention.key))
    v = heads(attention.value)
    out = torch.empty(length, q.shape[0], width)
    for head in range(q.shape[0]):
        group = head * k.shape[0] // q.shape[0]
        for t in range(length):
            seen = t + 1 if attention.attend.causal else length
            weights = torch.softmax(k[group, :seen] @ q[head, t] / width**0.5, 0)
            out[t, head] = weights @ v[group, :seen]
    return attention.out(out.flatten(1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_attention_is_its_definition(n_kv_head: int, causal: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(16, 4, n_kv_head, causal=causal)
    x = torch.randn(6, 16)
    torch.testing.assert_close(
        attention(x[None], x[None])[0], by_the_book(attention, x), rtol=1e-4, atol=1e-5
    )


def test_trap_19_a_tied_head_has_no_weight_of_its_own() -> None:
    """Tied weights held twice are untied by whoever wraps, moves or fills them apart; here there is
    one parameter.
    """
    tied = tied_transformer()
    untied = transformer()
    sizes = [sum(p.numel() for p in m.parameters()) for m in (untied, tied)]
    assert sizes[0] - sizes[1] == tied.embed.weight.numel()
    assert tied.shared_parameters() == {"head": {"weight": "embed.weight"}}
    with torch.device("meta"):
        filled = tied_transformer()
    filled.to_empty(device="cpu").init_weights()
    hidden = torch.randn(1, 2, 16)
    logits = filled.head(hidden, weight=filled.embed.weight)
    torch.testing.assert_close(logits, filled.head.norm(hidden) @ filled.embed.weight.T)


def test_dropout_acts_on_the_embedding_and_on_both_branches_in_training() -> None:
    model = transformer(dropout=1.0)
    x = torch.randn(2, 4, 16)
    assert torch.equal(model.layers[0](x), x)
    assert (model.embed(torch.zeros(2, 4, dtype=torch.int64)) == 0).all()
    model.eval()
    assert not torch.allclose(model.layers[0](x), x)
    assert (model.embed(torch.zeros(2, 4, dtype=torch.int64)) != 0).any()


def test_branches_start_smaller_in_deeper_models() -> None:
    torch.manual_seed(0)
    deep = Transformer(n_layer=18, n_embd=64, n_head=2)
    torch.testing.assert_close(
        deep.layers[0].mlp.down.weight.std().item(), 0.02 / 6, rtol=0.05, atol=0
    )
    torch.testing.assert_close(deep.layers[0].mlp.up.weight.std().item(), 0.02, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"n_embd": 10, "n_head": 4}, r"n_embd=10 is not a multiple of 2·n_head=8"),
        ({"n_head": 4, "n_kv_head": 3}, r"n_head=4 is not a multiple of n_kv_head=3"),
        ({"n_layer": 0}, r"n_layer=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(args: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Transformer(**args)
