from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models import hf
from lockstep.models.language import draw_token, generate, logits_in
from tests.models.samples import bdh, free_transformer, mixture, transformer


def counting(ids: Tensor) -> Tensor:
    """A model that is sure: the next token is the last one plus one, of 10."""
    return torch.nn.functional.one_hot((ids + 1) % 10, 10).float() * 50


def _gpt2() -> nn.Module:
    args = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    return hf.from_type("gpt2", vocab_size=64, block_size=16, **args)


def _llama() -> nn.Module:
    args = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return hf.from_type("llama", vocab_size=64, block_size=16, **args, **heads)


@pytest.mark.parametrize("build", [bdh, transformer, mixture, _gpt2, _llama])
def test_keys_and_values_are_kept_and_the_text_is_the_same(build: Callable[[], nn.Module]) -> None:
    """Up to the window, of 16 tokens or fewer, a token takes one position; then the window."""
    torch.manual_seed(0)
    model: Any = build().eval()
    window = min(model.block_size, 16)
    ids = torch.randint(0, 8, (1, window))
    expected = logits_in(model(ids))
    with torch.no_grad(), model.keeping_past() as next_logits:
        parts = [logits_in(next_logits(part)) for part in (ids[:, :3], *ids[:, 3:].split(1, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)

    lengths: list[int] = []
    model.register_forward_hook(lambda _model, args, _out: lengths.append(args[0].shape[1]))
    kept = generate(model, ids[:, :3], window, block_size=window, temperature=0)
    whole = generate(lambda ids: model(ids), ids[:, :3], window, block_size=window, temperature=0)
    assert torch.equal(kept, whole)
    if build not in (_gpt2, _llama):  # there the library's own forward pass is called
        assert lengths[:window] == [3, *[1] * (window - 3), window, window]


def test_a_model_that_draws_for_all_positions_keeps_nothing() -> None:
    model: Any = free_transformer().eval()
    with model.keeping_past() as next_logits:
        assert next_logits is None


def test_a_text_is_continued() -> None:
    prompt = torch.tensor([[3]])
    expected = torch.tensor([[3, 4, 5, 6, 7]])
    assert torch.equal(generate(counting, prompt, 4, block_size=8), expected)
    assert torch.equal(generate(counting, prompt, 4, block_size=8, temperature=0), expected)


def test_the_model_sees_no_more_than_a_window() -> None:
    seen: list[int] = []
    generate(
        lambda ids: (seen.append(ids.shape[1]), counting(ids))[1],
        torch.tensor([[1, 2]]),
        5,
        block_size=4,
    )
    assert seen == [2, 3, 4, 4, 4]


def test_the_seed_decides_and_global_random_state_is_left_alone() -> None:
    model = bdh().eval()
    prompt = torch.tensor([[1]])
    state = torch.get_rng_state()
    texts = [generate(model, prompt, 12, block_size=8, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    torch.manual_seed(99)
    assert torch.equal(generate(model, prompt, 12, block_size=8, seed=1), texts[0])


def test_top_k_and_temperature() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(500, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(draw_token(logits, generator, temperature=1.0, top_k=2).flatten().tolist()) == {1, 2}
    assert set(draw_token(logits, generator, temperature=1.0, top_k=9).flatten().tolist()) == {
        0,
        1,
        2,
        3,
    }
    hot, cold = (
        draw_token(logits, generator, temperature=t, top_k=None).eq(1).float().mean()
        for t in (5.0, 0.2)
    )
    assert cold > 0.97
    assert hot < 0.5


def test_logits_are_found_in_what_models_return() -> None:
    logits = torch.zeros(1, 2, 3)
    holder = type("Output", (), {"logits": logits})()
    assert all(logits_in(outputs) is logits for outputs in (logits, (logits, logits + 1), holder))


@pytest.mark.parametrize("setting", [{"temperature": -1.0}, {"top_k": 0}])
def test_settings_without_sense_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        generate(counting, torch.tensor([[1]]), 1, block_size=4, **setting)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        generate(counting, torch.empty(1, 0, dtype=torch.int64), 1, block_size=4)
