"""Gradients that a fused optimizer brings to scale itself: the update is that of gradients that
were scaled before.
"""

from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.step import can_scale_gradients, step_scaled
from lockstep.torch_compat.optimizer_step import pre_hooks
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model

OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


def over(
    kind: type[Optimizer], settings: dict[str, Any], *, fused: bool = True
) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    return model, kind(model.parameters(), fused=fused, **settings)  # type: ignore[call-arg]


def can_scale(optimizer: Optimizer) -> bool:
    return can_scale_gradients(optimizer, pre_hooks(optimizer))


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_the_update_is_that_of_scaled_gradients(
    kind: type[Optimizer], settings: dict[str, Any]
) -> None:
    model, optimizer = over(kind, settings)
    other, usual = over(kind, settings)
    assert can_scale(optimizer)
    for factor in (0.25, 0.3, 7.0):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad * factor
        step_scaled(optimizer, factor)
        usual.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
    assert not hasattr(optimizer, "grad_scale"), "a later step() of the caller's own is as ever"


def test_a_factor_of_nothing_leaves_a_gradient_of_nothing() -> None:
    """A norm that overflows makes the factor of clipping 0."""
    model, optimizer = over(torch.optim.SGD, {"lr": 0.1})
    before = model.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    step_scaled(optimizer, 0.0)
    assert torch.equal(model.weight, before)


def test_plain_optimizers_and_those_with_hooks_are_left_alone() -> None:
    _, plain = over(torch.optim.AdamW, {}, fused=False)
    assert not can_scale(plain)

    class Own(torch.optim.AdamW):
        """May look at gradients in its `step`."""

    assert not can_scale(Own(nn.Linear(2, 2).parameters(), fused=True))
    _, optimizer = over(torch.optim.AdamW, {})
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    assert not can_scale(optimizer)
    hook.remove()
    assert can_scale(optimizer)


def test_an_update_is_a_call_of_the_optimizers_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profiler gets its label, a hook its call, and a `step` that somebody has replaced is the
    one that runs.
    """
    model, optimizer = over(torch.optim.AdamW, {})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.profiler.profile() as profile:
        step_scaled(optimizer, 1.0)
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}

    calls: list[str] = []
    hook = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step_scaled(optimizer, 1.0)
    hook.remove()
    step_scaled(optimizer, 1.0)
    assert calls == ["after"]

    labelled: Any = torch.optim.AdamW.step

    @wraps(labelled)
    def counted(*arguments: Any) -> Any:
        calls.append("class")
        return labelled(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", counted)
        step_scaled(optimizer, 1.0)
    own = optimizer.step
    optimizer.step = lambda: (calls.append("own"), own())[1]  # type: ignore[method-assign, assignment]
    step_scaled(optimizer, 1.0)
    assert calls == ["after", "class", "own"]
    del optimizer.step


def test_hooks_before_an_update_see_the_gradient_of_the_mean_loss() -> None:
    norms: list[float] = []
    trainer = Trainer(
        language_model("transformer"), precision="fp32", max_steps=2, gradient_clip=0.01
    )

    def watch(optimizer: Optimizer, *_: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    trainer.optimizer.register_step_pre_hook(watch)
    assert all(record.clipped for record in trainer.steps(Tokens()))
    assert norms == pytest.approx([0.01, 0.01], rel=1e-4)


def test_clipping_is_the_same_with_and_without_a_pass_of_its_own() -> None:
    def losses(*, hooked: bool) -> list[float]:
        trainer = Trainer(
            language_model("transformer"), precision="fp32", max_steps=4, gradient_clip=0.1
        )
        assert can_scale(trainer.optimizer)
        if hooked:
            trainer.optimizer.register_step_pre_hook(lambda *_: None)
        return [float(record.loss) for record in trainer.steps(Tokens())]

    assert losses(hooked=True) == pytest.approx(losses(hooked=False), rel=1e-6)
