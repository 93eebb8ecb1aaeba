import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from lockstep.errors import UsageError
from lockstep.models import free_transformer as family
from lockstep.models.free_transformer import (
    FreeTransformer,
    _ThroughCodes,
    code_halves,
    draw_codes,
    kl_from_fair_coins,
)
from tests.models.samples import VOCABULARY, free_transformer, texts


def all_probabilities(z_logits: Tensor) -> Tensor:
    """G by its definition: the product over bits, for every code. [..., H] → [..., 2^H]"""
    p = torch.sigmoid(z_logits)
    bits = z_logits.shape[-1]
    columns = []
    for code in range(2**bits):
        chosen = [p[..., h] if code >> h & 1 else 1 - p[..., h] for h in range(bits)]
        columns.append(torch.stack(chosen).prod(0))
    return torch.stack(columns, -1)


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_the_two_halves_make_all_codes(bits: int) -> None:
    z_logits = torch.randn(2, 3, bits) * 3
    low, high = code_halves(z_logits)
    assert low.shape[-1] * high.shape[-1] == 2**bits
    made = (high[..., :, None] * low[..., None, :]).flatten(-2)
    torch.testing.assert_close(made, all_probabilities(z_logits))
    torch.testing.assert_close(made.sum(-1), torch.ones(2, 3))


def test_a_code_is_exact_in_every_dtype() -> None:
    """A sum of powers of two in bf16, which has 8 significant bits, is wrong for nearly all codes
    of 16 bits.
    """
    codes = torch.arange(2**16)
    bits = codes[:, None] >> torch.arange(16) & 1
    for dtype in (torch.float32, torch.bfloat16):
        sure = ((bits * 2 - 1) * 100).to(dtype)[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            drawn = draw_codes(sure)
        assert drawn.dtype == torch.int64
        assert torch.equal(drawn[0], codes)


def test_codes_are_drawn_with_their_probabilities() -> None:
    torch.manual_seed(0)
    z_logits = torch.tensor([0.5, -1.0, 2.0])
    drawn = draw_codes(z_logits.expand(20_000, 3))
    frequencies = torch.bincount(drawn, minlength=8) / 20_000
    torch.testing.assert_close(frequencies, all_probabilities(z_logits), rtol=0, atol=0.015)


@pytest.mark.parametrize("rows_at_once", [1, 4, 1000])
def test_the_gradient_is_that_of_the_straight_through_estimator(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Y + G − stop_gradient(G), built in full."""
    bits = 5
    width = 6
    monkeypatch.setattr(family, "_CHUNK_NUMEL", rows_at_once * 2**bits)
    post = torch.randn(2**bits, width, requires_grad=True)
    z_logits = torch.randn(2, 3, bits, requires_grad=True)
    weights = torch.randn(2, 3, width)
    codes = torch.randint(2**bits, (2, 3))

    g = all_probabilities(z_logits)
    z = torch.nn.functional.one_hot(codes, 2**bits) + g - g.detach()
    expected = z @ post
    r = _ThroughCodes.apply(
        torch.nn.functional.embedding(codes, post), *code_halves(z_logits), post
    )
    torch.testing.assert_close(r, expected)
    assert torch.equal(r, post[codes])

    mine = torch.autograd.grad((r * weights).sum(), (z_logits, post))
    full = torch.autograd.grad((expected * weights).sum(), (z_logits, post))
    torch.testing.assert_close(mine[0], full[0])
    torch.testing.assert_close(mine[1], full[1])
    assert full[0].abs().max() > 0.01


def test_nothing_of_the_size_of_all_codes_is_kept_for_the_backward_pass() -> None:
    model = free_transformer(latent_bits=12)
    batch = texts()
    every_code = batch["input_ids"].numel() * 2**12
    kept: list[int] = []
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(model(batch["input_ids"]), batch)
    assert max(kept) <= every_code / 16
    loss.backward()


def test_the_divergence_is_that_from_fair_coins() -> None:
    z_logits = torch.randn(3, 4, 7) * 4
    fair = Bernoulli(torch.full_like(z_logits, 0.5))
    torch.testing.assert_close(
        kl_from_fair_coins(z_logits), kl_divergence(Bernoulli(logits=z_logits), fair).sum(-1)
    )
    extreme = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    kl = kl_from_fair_coins(extreme)
    torch.testing.assert_close(kl, torch.tensor([2 * math.log(2)]))
    kl.backward()
    assert extreme.grad.isfinite().all()


def test_the_divergence_has_the_mask_and_the_denominator_of_the_cross_entropy() -> None:
    model = free_transformer(beta=0.7, kappa=1.2)
    batch = texts()
    logits = torch.randn(3, 8, VOCABULARY)
    z_logits = (torch.randn(3, 8, 5) * 2).requires_grad_()
    loss = model.loss((logits, z_logits), batch)
    valid = batch["targets"] != -100
    ce = torch.nn.functional.cross_entropy(logits[valid], batch["targets"][valid], reduction="sum")
    excess = (kl_from_fair_coins(z_logits)[valid] - 1.2).clamp(min=0)
    assert (excess == 0).any()
    assert (excess > 0).any()
    torch.testing.assert_close(loss, ce + 0.7 * excess.sum())
    loss.backward()
    assert (z_logits.grad[~valid] == 0).all()
    terms = model.loss_terms((logits, z_logits), batch)
    torch.testing.assert_close(terms["cross_entropy"] + terms["penalty"], loss)
    torch.testing.assert_close(terms["kl"], kl_from_fair_coins(z_logits.detach())[valid].sum())


def test_kappa_is_half_a_bit_in_nats() -> None:
    assert FreeTransformer(n_layer=2, n_embd=8, n_head=2, latent_bits=2).kappa == pytest.approx(
        0.3466, abs=1e-4
    )


def test_the_loss_of_the_latent_reaches_the_encoder_from_the_end_of_the_model() -> None:
    model = free_transformer()
    batch = texts()
    terms = model.loss_terms(model(batch["input_ids"]), batch)
    terms["penalty"].backward(retain_graph=True)
    by_penalty = model.latent.readout.weight.grad.clone()
    assert by_penalty.abs().max() > 0
    terms["cross_entropy"].backward()
    assert not torch.equal(model.latent.readout.weight.grad, by_penalty)


def test_the_encoder_reads_the_whole_text_and_knows_positions() -> None:
    torch.manual_seed(0)
    model = free_transformer()
    ids = texts()["input_ids"]
    _, z_logits = model(ids)
    assert z_logits.dtype == torch.float32
    assert (z_logits.std(1) > 0).all()  # else every position has the same latent
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    assert not torch.allclose(model(changed)[1][:, 0], z_logits[:, 0])


def test_the_latent_enters_behind_the_split_by_keys_and_values_alone() -> None:
    model = free_transformer(split_layer=1).eval()
    ids = texts()["input_ids"]
    names = [name for name, _ in model.segments()]
    assert names == ["embed", "layers.0", "latent", "layers.1", "layers.2", "head"]
    x = torch.randn(1, 4, 16)
    r = torch.randn(1, 4, 16)
    block = model.layers[1]
    assert torch.equal(block(x, torch.zeros_like(r)), super(type(block), block).forward(x))
    moved = block(x, r)
    attended = block.attention(block.attention_norm(x), block.attention_norm(x + r))
    torch.testing.assert_close(moved, block._add(x, attended))
    codes = torch.zeros_like(ids)
    codes[:, 3] = 7
    plain, other = (model(ids, mode="inference", codes=c) for c in (torch.zeros_like(ids), codes))
    assert torch.equal(plain[:, :3], other[:, :3])
    assert not torch.allclose(plain[:, 3:], other[:, 3:])


def test_inference_draws_codes_uniformly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = free_transformer()
    ids = torch.zeros(40, 8, dtype=torch.int64)
    seen: list[Tensor] = []
    forward = model.latent.forward
    monkeypatch.setattr(
        model.latent, "forward", lambda x, codes: (seen.append(codes), forward(x, codes=codes))[1]
    )
    assert isinstance(model(ids, mode="inference"), Tensor)
    assert seen[0].shape == ids.shape
    assert seen[0].unique().numel() == 32


def test_decoding_keeps_the_latent_of_past_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = free_transformer(block_size=5).eval()
    prompt = texts()["input_ids"][:1, :3]
    calls: list[tuple[Tensor, Tensor]] = []
    forward = model.forward

    def recorded(ids: Tensor, mode: str, codes: Tensor) -> Tensor:
        calls.append((ids, codes))
        return forward(ids, mode=mode, codes=codes)

    monkeypatch.setattr(model, "forward", recorded)
    outer = torch.get_rng_state()
    first = model.generate(prompt, 6, seed=4)
    again = model.generate(prompt, 6, seed=4)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), outer)
    assert first.shape == (1, 9)
    latents: dict[int, int] = {}
    for step, (ids, codes) in enumerate(calls[:6]):
        end = 3 + step
        assert ids.shape == codes.shape == (1, min(end, 5))
        for position, code in zip(range(end - ids.shape[1], end), codes[0].tolist(), strict=True):
            assert latents.setdefault(position, code) == code


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"latent_bits": 21}, r"2\^21 = 2,097,152 codes; at most 20"),
        ({"split_layer": 3}, r"split_layer=3 leaves no layer"),
        ({"latent_bits": 0}, r"latent_bits=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(args: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        free_transformer(**args)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="mode='sampling'"):
        free_transformer()(texts()["input_ids"], mode="sampling")
