"""Checks the reference itself, on one process: all topologies can agree with one that is wrong.

Random numbers are replaced by their means where the cut of a step into micro-batches changes, since
masks have the shape of a micro-batch. A loss that couples the samples of a micro-batch has another
gradient for each cut by its nature, which is no fault: then the gradient of a whole is no weighted
sum of those of its parts.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batches import MicroBatch
from lockstep.errors import listed
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.passes import ForwardBackward
from lockstep.strategy import SINGLE
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten
from lockstep.trainer import Trainer
from lockstep.trainer.loss_check import fix_for_count
from lockstep.verify import worker
from lockstep.verify.algebra import ADDS_UP, CEILING, Values, distance, values_of, weighted_sum
from lockstep.verify.experiments import (
    DRAWS,
    PERTURB,
    RECOMPUTATION,
    is_indexed,
    switched_off,
)
from lockstep.verify.operation_modes import MeanDraws
from lockstep.verify.recorded_flow import SLACK
from lockstep.verify.subject import MAIN, Case, Spec
from lockstep.verify.trace import GRADIENT, VALUE, StepObserver, Stored, Trace

# relative difference of a step's gradient between two cuts that is rounding in any case
AGREES = 1e-4
_LARGEST = 1 << 28  # elements of gradients that are kept
_LAST_BITS = 1e-6  # relative rounding of a value

BASE = "base"
HALF = "half"
TWICE = "twice"
PLAIN = "plain"
NUDGED_BASE = "nudged"
RECOMPUTED = "recomputed"
EVALUATED = "evaluated"
LOADED = "loaded"
TITLES = {
    HALF: "micro-batches of half the size",
    TWICE: "micro-batches of twice the size",
    PLAIN: "one plain pass over the whole step",
    RECOMPUTED: "with activation checkpointing, and without",
    EVALUATED: "evaluated between two steps",
    LOADED: "saved and loaded between two steps",
}


@dataclass(frozen=True)
class Check:
    """One check of the reference."""

    name: str  # one of `TITLES`
    passed: bool  # False: the reference is wrong
    kind: str = ""  # of the cause, as in `Cause`
    text: str = ""  # what was found, or why nothing could be judged
    relative: float = 0.0  # size of the difference


@dataclass
class _CutStep:
    gradient: Tensor  # of the step's mean loss, all parameters in a row
    counts: list[float]  # valid targets of each micro-batch
    means: list[Tensor]  # gradient of each micro-batch's mean loss
    batch: Any = None  # the first micro-batch


def checks_of(spec: Spec) -> list[str]:
    """Return what can be checked: cuts need samples, and the last two need two steps."""
    _, subject = spec.build({})
    indexed = is_indexed(subject.data)
    model = subject.model
    subject.close()
    training = spec.config.training
    size = training.batch_size
    global_batch = training.global_batch_size or training.batch_size
    wanted = []
    if (
        indexed
        and sum(p.numel() for p in model.parameters()) * (global_batch // size + 1) <= _LARGEST
    ):
        wanted += [BASE, NUDGED_BASE]
        wanted += [HALF] if size % 2 == 0 else []
        wanted += [TWICE] if global_batch % (2 * size) == 0 and global_batch > 2 * size else []
        wanted += [PLAIN] if global_batch > size else []
        wanted += [RECOMPUTED] if RECOMPUTATION in switched_off(spec.config) else []
    return wanted + ([EVALUATED, LOADED] if spec.steps > 1 else [])


def take(spec: Spec, what: str, folder: Path) -> None:
    """Take the steps of a check in this process, and write what they computed."""
    found = (_second_step if what in (EVALUATED, LOADED) else _cut_step)(spec, folder, what)
    (folder / f"check-{what}.pickle").write_bytes(pickle.dumps(found))


def judge(taken: Sequence[str], folder: Path, missing: dict[str, str]) -> list[Check]:
    """Return the verdicts on the checks taken; `missing` has those that failed, with the reason."""
    made = [what for what in taken if what not in missing]
    found = {what: pickle.loads((folder / f"check-{what}.pickle").read_bytes()) for what in made}
    checks = []
    for what in (what for what in taken if what in TITLES):
        if what in missing or (what not in (EVALUATED, LOADED) and BASE not in found):
            text = f"not possible: {missing.get(what, missing.get(BASE))}"
            checks.append(Check(TITLES[what], passed=True, text=text))
        elif what in (EVALUATED, LOADED):
            checks.append(_judge_second(what, found[what]))
        else:
            checks.append(_judge_cut(what, found[BASE], found[what], found.get(NUDGED_BASE)))
    lacks = _without_optimizer(Trace(folder / MAIN))
    return checks if lacks is None else [*checks, lacks]


def _without_optimizer(trace: Trace) -> Check | None:
    """Return a note on parameters that get gradients and are in no optimizer; None without any."""
    try:
        facts = trace.facts(0)
    except FileNotFoundError:  # no step was taken for these checks
        return None
    options = facts.update.options
    lacking = [name for name in facts.norms if options and not options.get(name)]
    if not lacking:
        return None
    text = f"{listed(lacking, 5)} get gradients, and no optimizer has them: they keep their values"
    return Check("parameters and optimizers", passed=True, text=text)


# ---- the same samples, cut otherwise ----


def _cut_step(spec: Spec, folder: Path, what: str) -> _CutStep:
    """Take the first step with its samples cut in one way; return its gradients.

    What only rounds is switched off, and activation checkpointing, where it is not what is checked.
    """
    training = spec.config.training
    size = training.batch_size
    global_batch = training.global_batch_size or training.batch_size
    sizes = {HALF: size // 2, TWICE: 2 * size, PLAIN: global_batch}
    settings = {
        key: value
        for name, off in switched_off(spec.config).items()
        for key, value in off.items()
        if (name, what) != (RECOMPUTATION, RECOMPUTED)
    }
    settings |= {
        "training.batch_size": sizes.get(what, size),
        "training.global_batch_size": global_batch,
    }
    switches = frozenset({DRAWS, PERTURB} if what == NUDGED_BASE else {DRAWS})
    with worker.trainer_of(spec, SINGLE, Case(what, settings, switches=switches), folder) as (
        trainer,
        data,
        _,
    ):
        trainer.loss_check.skip()
        observer = StepObserver(trainer)
        parts = _Parts(trainer, plain=what == PLAIN)
        next(iter(trainer.steps(data)))
        gradient = parts.row(observer.gradients)
        return _CutStep(
            gradient if parts.plain is None else parts.plain, parts.counts, parts.means, parts.batch
        )


class _Parts:
    """Keeps the gradient of each micro-batch's mean loss."""

    def __init__(self, trainer: Trainer, *, plain: bool) -> None:
        self.counts: list[float] = []
        self.means: list[Tensor] = []
        self.batch: Any = None
        self.plain: Tensor | None = None
        self._trainer = trainer
        self._parameters = trainer.placed.parameters
        self._wants_plain = plain
        trainer.placed.around_passes.append(self._observed)

    def row(self, gradients: dict[str, Tensor]) -> Tensor:
        each = [gradients.get(name, torch.zeros_like(p)) for name, p in self._parameters.items()]
        return torch.cat([g.detach().double().flatten().cpu() for g in each])

    def _observed(
        self,
        run: ForwardBackward,
        micro_batches: Sequence[MicroBatch],
        accumulator: LossAccumulator,
        factor: float,
    ) -> None:
        """Run the micro-batches one by one, and keep the gradient of each one's mean loss."""
        self.batch = micro_batches[0].batch
        if self._wants_plain:
            self.plain = self._plain_gradient([micro_batch.batch for micro_batch in micro_batches])
        accumulator.watch(lambda _micro_batch, loss: self.counts.append(float(loss.targets)))
        before: Tensor | float = 0.0
        for micro_batch in micro_batches:
            run([micro_batch], accumulator, factor)
            total = (
                self.row(
                    {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
                )
                / factor
            )
            self.means.append((total - before) / max(self.counts[-1], 1.0))
            before = total

    def _plain_gradient(self, batches: list[Any]) -> Tensor:
        """Return the gradient of the loss as its author wrote it.

        It is computed in a plain pass over a whole step.
        """
        objective = self._trainer.placed.objective
        model = self._trainer.placed.parts[0]
        batch = batches[0]
        if len(batches) > 1:
            flat = [tree_flatten(each) for each in batches]
            leaves = [
                torch.cat(list(each)) for each in zip(*(leaves for leaves, _ in flat), strict=True)
            ]
            batch = tree_unflatten(leaves, flat[0][1])
        args, kwargs = objective.inputs(batch)
        draws = MeanDraws()
        with draws, self._trainer.placed.random_state.running("train", 0):
            self._trainer.placed.random_state.at(0)
            loss = objective.loss(model(*args, **kwargs), batch)
            if not objective.is_mean:
                loss = loss / float(objective.count(batch))
            loss.backward()  # type: ignore[no-untyped-call]  # a model may recompute in it, and draw
        row = self.row({name: p.grad for name, p in self._parameters.items() if p.grad is not None})
        for parameter in self._parameters.values():
            parameter.grad = None
        return row


def _judge_cut(what: str, base: _CutStep, other: _CutStep, nudged: _CutStep | None) -> Check:
    """Return the verdict on a step that was cut otherwise, and why it differs."""
    off = distance(other.gradient, base.gradient)
    if off <= AGREES:
        return Check(TITLES[what], passed=True, relative=off)
    nudge = distance(nudged.gradient, base.gradient) if nudged is not None else 0.0
    if nudge > CEILING:
        text = f"cannot judge: changed last bits of parameters move the gradient by {nudge:.0%}"
        return Check(TITLES[what], passed=True, text=text, relative=off)
    if off <= SLACK * nudge:
        return Check(TITLES[what], passed=True, relative=off)
    if what == RECOMPUTED:
        text = (
            "what is computed again in the backward pass is not what the forward pass computed: the"
            f" gradient differs by {off:.1e}"
        )
        return Check(TITLES[what], passed=False, kind="recomputation", text=text, relative=off)
    uncut, parts = (base, other) if what == HALF else (other, base)
    fits = _fits(uncut, parts)
    # A weak term that couples samples, as the balance of experts is, explains a small difference.
    if any(residual > min(ADDS_UP, off / 4) for *_, residual in fits) or not fits:
        text = (
            "the samples of a micro-batch are coupled (batch normalisation, negatives in the"
            " batch): batch_size is "
        )
        return Check(TITLES[what], passed=True, text=text + "part of what is learned", relative=off)
    per = len(parts.means) // len(uncut.means)
    number, weights, _ = max(fits, key=lambda fit: _unlike(fit, parts, per))
    if _unlike((number, weights, 0.0), parts, per) <= ADDS_UP:
        what_differs = (
            "a plain pass over the samples of a step, with the model called as its author wrote it,"
        )
        kind, who = (
            ("plain pass", what_differs)
            if what == PLAIN
            else ("accumulation", f"a step of {TITLES[what]}")
        )
        text = (
            f"{who} has another gradient, although those of its parts add up by their counts: it"
            " differs by "
        )
        return Check(TITLES[what], passed=False, kind=kind, text=f"{text}{off:.1e}", relative=off)
    counts = parts.counts[number * per : (number + 1) * per]
    declared = ", ".join(f"{n / sum(counts):.3f}" for n in counts)
    text = (
        f"the loss is a mean over something that its count does not say: of {per} parts of"
        f" micro-batch {number}, "
        f"its gradient weighs each by {', '.join(f'{w:.3f}' for w in weights)}, and the step by"
        f" {declared}; "
        f"weighed so, the cuts agree\ndo: {_fix(uncut, weights, per)}"
    )
    return Check(TITLES[what], passed=False, kind="loss normalisation", text=text, relative=off)


def _fix(uncut: _CutStep, weights: Sequence[float], per: int) -> str:
    """Return the line to write: which sum over the batch is in the proportion of the weights."""
    leaves, spec = tree_flatten(uncut.batch)
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
    if per != 2 or size % 2 or not abs(sum(weights) - 1) < ADDS_UP:
        return fix_for_count(counted=True, batch=uncut.batch)
    cut = [slice(0, size // 2), slice(size // 2, size)]
    halves = [
        [leaf[part] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves]
        for part in cut
    ]
    one, two = (tree_unflatten(half, spec) for half in halves)
    return fix_for_count((one, two), weights[0], counted=True)


def _fits(uncut: _CutStep, parts: _CutStep) -> list[tuple[int, list[float], float]]:
    """Return (number, weights, residual) for each micro-batch of `uncut`.

    They describe its gradient as a weighted sum of the gradients of its parts.
    """
    per = len(parts.means) // len(uncut.means)
    found = []
    for number, full in enumerate(uncut.means):
        columns = [values_of(mean) for mean in parts.means[number * per : (number + 1) * per]]
        if len(columns) == per and any(column.any() for column in columns):
            sum_ = weighted_sum(columns, values_of(full))
            found.append((number, sum_.weights.tolist(), sum_.residual))
    return found


def _unlike(fit: tuple[int, list[float], float], parts: _CutStep, per: int) -> float:
    """Return how far a whole's weights are from those that the counts give."""
    number, weights, _ = fit
    counts = parts.counts[number * per : (number + 1) * per]
    return max(abs(w - n / max(sum(counts), 1.0)) for w, n in zip(weights, counts, strict=True))


# ---- the second step ----


@dataclass(frozen=True)
class _SecondStep:
    """Holds the distance of step 2 from the reference's, and the farthest parameters."""

    gradient: float  # difference of all gradients, relative to these
    name: str
    update: float  # difference of the values, relative to how far the step moves them
    updated: str


def _second_step(spec: Spec, folder: Path, what: str) -> _SecondStep:
    """Take step 2 after an evaluation, or from a checkpoint, and compare it with the reference's.

    An optimizer that has lost its state has the same gradient, and makes another update of it.
    """
    trace = Trace(folder / MAIN)
    case = Case(MAIN, {"training.eval_batches": 1}, start=1 if what == LOADED else 0)
    with worker.trainer_of(spec, SINGLE, case, folder) as (trainer, data, _):
        trainer.loss_check.skip()
        observer = StepObserver(trainer)
        for done in islice(trainer.steps(data), 1 if what == LOADED else 2):
            if what == EVALUATED and done.step == 1:
                trainer.evaluate(data)
        now = {name: values_of(p) for name, p in trainer.placed.parameters.items()}
        with trace.tensors(0) as before, trace.tensors(1) as stored:
            right = {name: stored.get(GRADIENT, name) for name in observer.gradients}
            updates = {name: _update_off(name, now[name], before, stored) for name in now}
        pairs = [
            (g.cpu(), r) for name, g in observer.gradients.items() if (r := right[name]) is not None
        ]
        distance_of_all = distance(
            torch.cat([g.flatten() for g, _ in pairs]), torch.cat([r.flatten() for _, r in pairs])
        )
        each = {
            n: distance(g.cpu(), r)
            for n, g in observer.gradients.items()
            if (r := right[n]) is not None
        }
        name = max(each, key=lambda name: each[name], default="")
        updated = max(updates, key=lambda name: updates[name], default="")
        return _SecondStep(distance_of_all, name, updates.get(updated, 0.0), updated)


def _update_off(name: str, now: Values, before: Stored, right: Stored) -> float:
    """Return how far a parameter's new value is off, relative to how far the step moves it.

    Rounding of the value itself is left out.
    """
    old = before.get(VALUE, name)
    new = right.get(VALUE, name)
    if old is None or new is None or now.shape != tuple(new.shape):
        return 0.0
    off = float(np.linalg.norm((now - values_of(new)).ravel()))
    rounding = _LAST_BITS * float(np.linalg.norm(now.ravel()))
    moved = float(np.linalg.norm((values_of(new) - values_of(old)).ravel()))
    return 0.0 if off <= rounding else off / max(moved, rounding, 1e-300)


def _judge_second(what: str, found: _SecondStep) -> Check:
    """Return the check of what lies between two steps: of a checkpoint, or of an evaluation.

    The second step is held against the one of a run in which nothing lies between.
    """
    off = found.gradient
    name = found.name
    if off <= AGREES:
        if found.update <= AGREES:
            return Check(TITLES[what], passed=True, relative=off)
        where = "a checkpoint does not hold all of" if what == LOADED else "an evaluation changes"
        text = (
            f"the next step's gradients are the same, and its update of {found.updated} differs by"
            f" {found.update:.1e}: {where} what the optimizer keeps"
        )
        return Check(
            TITLES[what], passed=False, kind="optimizer state", text=text, relative=found.update
        )
    kind = "evaluation"
    why = "an evaluation changes what the model computes afterwards: training reads what it writes"
    if what == LOADED:
        kind = "checkpoint"
        why = (
            "the model depends on something that a checkpoint does not hold, as a counter, a cache"
            " or a generator"
        )
    text = f"{why}; the next step's gradient of {name} is another one"
    return Check(TITLES[what], passed=False, kind=kind, text=text, relative=off)
