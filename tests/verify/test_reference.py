"""The reference is checked itself: losses that depend on the cut are found, coupled samples are not
blamed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.silent_bugs.faults import data, memory, models, sound
from lockstep.config import config_from
from lockstep.verify import direct_causes, experiments, reference
from lockstep.verify import proof as package
from lockstep.verify.differences import Evidence, StepResult
from lockstep.verify.reference import (
    BASE,
    EVALUATED,
    HALF,
    LOADED,
    NUDGED_BASE,
    PLAIN,
    RECOMPUTED,
    TITLES,
    TWICE,
    Check,
)
from lockstep.verify.subject import Case, Subject
from lockstep.verify.trace import StepFacts, Trace
from lockstep.verify.worker import record
from tests.parity.toy import language_model

COMMON: dict[str, Any] = {
    "training.batch_size": 2,
    "training.global_batch_size": 8,
    "training.warmup_steps": 0,
    "training.max_steps": 20,
    "precision.mode": "fp32",
}


def checked(
    make: Callable[[], Any], wanted: list[str], folder: Path, steps: int = 1, **settings: Any
) -> dict[str, Check]:
    """In this process: what a check leaves behind does not matter to these subjects."""
    spec, _ = package.spec_of(config_from(COMMON | settings), make, ["ddp:2"], steps)
    if steps > 1:
        record(spec, Case(steps=steps), folder)
    assert set(wanted) <= set(reference.checks_of(spec)) or steps > 1
    for what in wanted:
        reference.take(spec, what, folder)
    names = {title: what for what, title in TITLES.items()}
    return {
        names.get(check.name, check.name): check for check in reference.judge(wanted, folder, {})
    }


@pytest.mark.parametrize(
    "make", [data.loss_that_is_a_mean_over_something_else, data.masked_mean_without_a_count]
)
def test_a_mean_over_something_else_than_its_count_is_found(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    found = checked(make, [BASE, NUDGED_BASE, TWICE, PLAIN], tmp_path)
    for what in (TWICE, PLAIN):
        assert not found[what].passed
        assert found[what].kind == "loss normalisation"
        assert "weighed so, the cuts agree" in found[what].text


def test_a_model_with_dropout_agrees_however_it_is_cut(tmp_path: Path) -> None:
    found = checked(
        sound.language_model_with_dropout, [BASE, NUDGED_BASE, HALF, TWICE, PLAIN], tmp_path
    )
    assert all(
        check.passed and not check.text and check.relative < 1e-5 for check in found.values()
    ), found


def experts_in_balance() -> Any:
    """A weak term couples the samples."""
    return models.net(language_model("mixture", bias_rate=0.0, balance_weight=0.001))


@pytest.mark.parametrize(
    "make", [sound.batch_norm, sound.contrastive_in_each_micro_batch, experts_in_balance]
)
def test_samples_that_are_coupled_are_no_fault(make: Callable[[], Any], tmp_path: Path) -> None:
    found = checked(make, [BASE, NUDGED_BASE, TWICE, PLAIN], tmp_path)
    assert all(check.passed and "coupled" in check.text for check in found.values()), found


class RoundedByRows(models.Chaos):
    """Its last bits depend on the rows of a batch, as with kernels of some machines; those of
    others round alike.
    """

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x * (1 + len(x) * torch.finfo(x.dtype).eps))
        return y


def chaotic_net() -> Any:
    return models.vectors(RoundedByRows())


def test_where_last_bits_go_too_far_it_says_that_it_cannot_judge(tmp_path: Path) -> None:
    found = checked(chaotic_net, [BASE, NUDGED_BASE, TWICE], tmp_path)[TWICE]
    assert found.passed
    assert found.text.startswith("cannot judge: ")


def test_a_sound_model_goes_on_after_an_evaluation_and_from_a_checkpoint(tmp_path: Path) -> None:
    assert all(
        c.passed
        for c in checked(
            sound.language_model_with_dropout, [EVALUATED, LOADED], tmp_path, 2
        ).values()
    )


def test_a_counter_that_an_evaluation_moves_and_no_checkpoint_holds_is_found(
    tmp_path: Path,
) -> None:
    memory.STEPS["seen"] = 0
    spec, _ = package.spec_of(config_from(COMMON), memory.counter_of_the_module, ["ddp:2"], 2)
    record(spec, Case(steps=2), tmp_path)
    for what in (EVALUATED, LOADED):
        memory.STEPS["seen"] = 0  # as in a process of its own
        reference.take(spec, what, tmp_path)
    kinds = [
        (check.passed, check.kind) for check in reference.judge([EVALUATED, LOADED], tmp_path, {})
    ]
    assert kinds == [(False, "evaluation"), (False, "checkpoint")]


class Forgetful(torch.optim.Optimizer):
    """Keeps its momentum beside its state, so that no checkpoint holds it."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.kept[p] = 0.9 * self.kept.get(p, torch.zeros_like(p)) + p.grad
            p.data -= self.param_groups[0]["lr"] * self.kept[p]


def forgets() -> Subject:
    return replace(models.net(), optimizer=lambda parameters: Forgetful(list(parameters)))


def test_an_optimizer_that_forgets_has_the_same_gradients_and_another_update(
    tmp_path: Path,
) -> None:
    found = checked(forgets, [LOADED], tmp_path, 2)[LOADED]
    assert not found.passed
    assert found.kind == "optimizer state"
    assert "a checkpoint does not hold all of what the optimizer keeps" in found.text


def without_the_head() -> Subject:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[:-1], lr=0.1)

    return replace(models.net(), optimizer=optimizer)


def test_parameters_without_an_optimizer_are_said(tmp_path: Path) -> None:
    found = checked(without_the_head, [EVALUATED], tmp_path, 2)
    assert found[EVALUATED].passed
    assert "head.bias get gradients, and no optimizer has them" in (
        found["parameters and optimizers"].text
    )


class Counting(models.Block):
    """Computes something else each time it is called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = super().forward(x) * (1 + 0.1 * self.calls)
        return y


def counts_when_it_is_recomputed() -> Subject:
    model = models.Net()
    model.blocks = torch.nn.ModuleList(Counting() for _ in range(2))
    return models.net(model)


def test_what_is_recomputed_is_compared_with_what_was_computed(tmp_path: Path) -> None:
    settings = {"training.gradient_checkpointing": "full"}
    found = checked(
        counts_when_it_is_recomputed, [BASE, NUDGED_BASE, RECOMPUTED], tmp_path, **settings
    )
    assert found[RECOMPUTED].kind == "recomputation"
    assert not found[RECOMPUTED].passed
    found = checked(models.net, [BASE, NUDGED_BASE, RECOMPUTED], tmp_path, **settings)
    assert found[RECOMPUTED].passed


def test_samples_that_vary_are_not_blamed_on_an_operation(tmp_path: Path) -> None:
    for name, sample in ((experiments.AGAIN, "one"), (experiments.AGAIN_TOO, "another")):
        facts = StepFacts(samples={0: sample}, outputs=[("head", hash(sample))])
        Trace(tmp_path / name).write(0, facts, {})
    evidence = Evidence(StepResult(0), {}, {}, tmp_path, config_from(COMMON))
    cause = direct_causes.nondeterminism(evidence)
    assert cause is not None
    assert cause.kind == "samples that vary"
