"""What goes wrong around an update is seen, named, and not excused as rounding."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.silent_bugs.faults.models import Net, Taught, Tokens, Vectors, follow_student
from lockstep.config import config_from
from lockstep.strategy import SINGLE
from lockstep.trainer import Trainer
from lockstep.verify import Subject
from lockstep.verify import proof as package
from lockstep.verify.algebra import reduced_relation
from lockstep.verify.causes import cause_of
from lockstep.verify.comparison_result import Difference
from lockstep.verify.comparisons import compare_with_perturbed
from lockstep.verify.differences import Evidence, StepResult, differing_options
from lockstep.verify.experiments import AGAIN
from lockstep.verify.script.observed.observe import schedules_alive
from lockstep.verify.subject import Case
from lockstep.verify.trace import StepObserver, Trace, UpdateFacts
from lockstep.verify.worker import trainer_of

SETTINGS: dict[str, Any] = {
    "training.batch_size": 2,
    "training.global_batch_size": 4,
    "training.max_steps": 9,
    "training.warmup_steps": 0,
    "precision.mode": "fp32",
}


def sound(_trainer: Trainer) -> None:
    """Change nothing."""


def keeps_gradients(trainer: Trainer) -> None:
    # A frozen model keeps its methods; a fault takes one away all the same.
    object.__setattr__(trainer.placed, "clear_gradients", lambda: None)


def loses_state(trainer: Trainer) -> None:
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.state.clear())


def doubles_gradients(trainer: Trainer) -> None:
    def double(*_: object) -> None:
        trainer.placed.parameters["head.bias"].grad.mul_(2)  # type: ignore[union-attr]

    trainer.optimizer.register_step_pre_hook(double)


def clamps_values(trainer: Trainer) -> None:
    bias = trainer.placed.parameters["head.bias"].data
    trainer.optimizer.register_step_post_hook(lambda *_: bias.clamp_(0, 0))


def changes_values_first(trainer: Trainer) -> None:
    def changed() -> None:
        trainer.placed.parameters["head.bias"].data.add_(1.0)

    trainer.placed.finishers.append(changed)


def changes_values_at_the_end(trainer: Trainer) -> None:
    def changed(_skipped: bool) -> None:
        trainer.placed.parameters["head.bias"].data.add_(1.0)

    trainer.placed.update_finishers.append(changed)


def takes_no_step(trainer: Trainer) -> None:
    trainer.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]


def facts_of(subject: Subject, folder: Path) -> UpdateFacts:
    """Of the second step, in this process."""
    spec, _ = package.spec_of(config_from(SETTINGS), lambda: subject, ["ddp:2"], 2)
    with trainer_of(spec, SINGLE, Case(), folder) as (trainer, data, _):
        trainer.loss_check.skip()
        observer = StepObserver(trainer)
        steps = trainer.steps(data)
        next(steps)
        return observer.facts(next(steps)).update


@pytest.mark.parametrize(
    ("prepare", "seen"),
    [
        (sound, {}),
        (keeps_gradients, {"stale": ["head.bias"]}),
        (loses_state, {"state_changed": ["head.bias"]}),
        (doubles_gradients, {"by_hooks": ["head.bias"]}),
        (clamps_values, {"after": ["head.bias"], "unmoved": ["head.bias"]}),
        (changes_values_first, {"before": ["head.bias"]}),
        (changes_values_at_the_end, {"after": ["head.bias"]}),
        (takes_no_step, {"unmoved": ["head.bias"], "called": False, "options": {}}),
    ],
)
def test_what_happens_around_an_update_is_seen(
    prepare: Callable[[Trainer], None], seen: dict[str, Any], tmp_path: Path
) -> None:
    found = vars(facts_of(Subject(Net(), Tokens(), prepare=prepare), tmp_path))
    for what in ("stale", "state_changed", "by_hooks", "before", "after", "unmoved"):
        assert ("head.bias" in found[what]) is (what in seen), what
    assert found["called"] is seen.get("called", True)
    assert bool(found["options"]) is seen.get("called", True)


def test_what_follows_an_update_and_what_is_frozen_is_seen(tmp_path: Path) -> None:
    found = facts_of(Subject(Taught(), Vectors(), prepare=follow_student), tmp_path)
    assert found.after == ["teacher.weight", "teacher.bias"] == found.frozen


def test_options_that_differ_are_named_with_their_parameters() -> None:
    right = UpdateFacts(
        options={"a": {"lr": "0.1", "betas": "(0.9, 0.99)"}, "b": {"lr": "0.1"}}, called=True
    )
    mine = UpdateFacts(
        options={"a": {"lr": "0.2", "betas": "(0.9, 0.99)"}, "b": {"lr": "0.1"}}, called=True
    )
    assert differing_options([right, mine], right) == [
        ("the learning rate (lr) 0.2 instead of 0.1 for a", [1])
    ]


def evidence(found: StepResult, folder: Path, **tried: StepResult) -> Evidence:
    return Evidence(found, {AGAIN: tried["again"]} if tried else {}, {}, folder, config_from({}))


def test_a_gradient_that_is_there_on_one_side_alone_is_no_rounding(tmp_path: Path) -> None:
    save_file(
        {"gradient/a": torch.ones(2), "gradient/b": torch.ones(2)},
        tmp_path / "step-00000000.safetensors",
    )
    with Trace(tmp_path).tensors(0) as stored:
        pieces, why = compare_with_perturbed(["a", "b"], {"a": torch.ones(2)}, stored, stored)
    assert (why, pieces["a"].missing, pieces["b"].missing) == ("", False, True)


def test_a_layer_that_is_frozen_on_ranks_alone_is_named(tmp_path: Path) -> None:
    facts = UpdateFacts(options={"a": {"lr": "0.1"}}, called=True)
    found = StepResult(0, [Difference("gradient", "a", 1.0, ranks=[0, 1], missing=True)])
    found.updates = [UpdateFacts(facts.options, frozen=["a"], called=True)] * 2
    found.right_update = facts
    cause = cause_of(evidence(found, tmp_path))
    assert (cause.kind, cause.is_error) == ("frozen parameter", True)


def test_a_step_that_agrees_in_a_new_process_is_blamed_on_earlier_ones(tmp_path: Path) -> None:
    found = StepResult(1, [Difference("gradient", "a", 0.5, ranks=[1])])
    found.right_update = UpdateFacts(options={"a": {}})
    found.updates = [found.right_update, UpdateFacts(options={"a": {}}, stale=["a"])]
    assert cause_of(evidence(found, tmp_path, again=StepResult(1))).kind == "gradients not zeroed"
    found.updates = [found.right_update] * 2
    assert cause_of(evidence(found, tmp_path, again=StepResult(1))).kind == "earlier steps"


@pytest.mark.parametrize(
    ("was", "left", "agrees"),
    [
        ([("gradient", 0.5, False)], [], True),
        ([("gradient", 0.5, False)], [("gradient", 0.1, False)], False),
        # a gradient that is missing stays missing
        ([("gradient", 0.5, True)], [("gradient", 0.5, True)], False),
        ([("gradient", 40.0, False)], [("gradient", 0.2, False)], False),
        ([("gradient", 0.5, False), ("loss", 0.1, False)], [("loss", 0.1, False)], False),
        ([("norm", 0.5, False)], [], True),
        ([("norm", 0.5, False)], [("norm", 0.5, False)], False),
        ([("samples", 0.0, False)], [], False),
    ],
)
def test_an_experiment_undoes_a_difference_if_nothing_of_it_is_left(
    was: list[Any], left: list[Any], agrees: bool, tmp_path: Path
) -> None:
    found, tried = (
        StepResult(
            0,
            [
                Difference(aspect, "a", relative, missing=missing)
                for aspect, relative, missing in each
            ],
        )
        for each in (was, left)
    )
    assert evidence(found, tmp_path, again=tried).agrees(AGAIN) is agrees


def test_a_step_that_is_replaced_is_not_called_skipped(tmp_path: Path) -> None:
    right = UpdateFacts(options={"a": {}}, called=True)
    found = StepResult(0, [Difference("value", "a", 0.5, ranks=[1])], right_update=right)
    found.updates = [right, UpdateFacts(unmoved=["a"])]
    assert "skipped on rank 1" in cause_of(evidence(found, tmp_path)).text
    found.updates = [right, UpdateFacts()]
    assert "replaced on rank 1" in cause_of(evidence(found, tmp_path)).text


def test_a_gradient_that_is_no_sum_in_the_reference_itself_is_not_blamed_on_ranks() -> None:
    terms = {
        m: torch.randn(8, generator=torch.Generator().manual_seed(m)).double() for m in range(4)
    }
    mine = (terms[1] + terms[3]).float()
    how = reduced_relation(mine, terms[3].float(), terms, [0, 1], 2, 1.0, 1.0)
    others = ", ".join(f"micro-batch {m} by 0" for m in range(3))
    assert how.clause == f"the reference itself weighs {others}, micro-batch 3 by 1"


def test_a_gradient_that_was_rounded_before_it_was_scaled_is_recognised() -> None:
    whole = torch.randn(64, generator=torch.Generator().manual_seed(0))
    mine = (whole * 3).half().float() / 3
    other = whole * (1 + 1e-3 * torch.rand(64))
    assert "rounded to float16" in reduced_relation(mine, whole, {}, [], 2, 1.0, 1 / 3).clause
    assert "rounded" not in reduced_relation(other, whole, {}, [], 2, 1.0, 1 / 3).clause


def test_schedules_are_found_beside_a_proxy_of_what_has_gone() -> None:
    """`torch.compile` leaves such proxies behind."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    gone = weakref.proxy(Net())
    with pytest.raises(ReferenceError):
        isinstance(gone, Net)
    assert schedule in schedules_alive()
