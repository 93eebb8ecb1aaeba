import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.language import draw_token, generate, logits_in
from tests.models.samples import bdh


def counting(ids: Tensor) -> Tensor:
    """A model that is sure: the next token is the last one plus one, of 10."""
    return torch.nn.functional.one_hot((ids + 1) % 10, 10).float() * 50


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
