"""Checks the reference itself, on one process: all topologies can agree with one that is wrong.

    the same samples, cut otherwise    half and twice the micro-batch, one plain pass, recomputed
    the second step                    after an evaluation, or from a checkpoint

`take` runs in a process for each check, and writes what it computed; `judge` compares them.

Random numbers are replaced by their means where the cut of a step into micro-batches changes, since
masks have the shape of a micro-batch. A loss that couples the samples of a micro-batch has another
gradient for each cut by its nature, which is not a fault: then the gradient of a whole is not a
weighted sum of those of its parts.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batches import MicroBatch
from lockstep.errors import listed
from lockstep.parallel.execution.passes import ForwardBackward
from lockstep.parallel.loss_accumulator import LossAccumulator
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


_SECOND_STEPS = (EVALUATED, LOADED)


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
    # A cut keeps the gradient of each micro-batch, and that of the step.
    elements = sum(p.numel() for p in model.parameters()) * (global_batch // size + 1)
    names = []
    if indexed and elements <= _LARGEST:
        names += [BASE, NUDGED_BASE]
        if size % 2 == 0:
            names.append(HALF)
        if global_batch % (2 * size) == 0 and global_batch > 2 * size:
            names.append(TWICE)
        if global_batch > size:
            names.append(PLAIN)
        if RECOMPUTATION in switched_off(spec.config):
            names.append(RECOMPUTED)
    if spec.steps > 1:
        names += _SECOND_STEPS
    return names


def take(spec: Spec, name: str, folder: Path) -> None:
    """Take the steps of a check in this process, and write what they computed."""
    computed: _SecondStep | _CutStep
    if name in _SECOND_STEPS:
        computed = _second_step(spec, folder, name)
    else:
        computed = _cut_step(spec, folder, name)
    _result_of(folder, name).write_bytes(pickle.dumps(computed))


def judge(names: Sequence[str], folder: Path, missing: dict[str, str]) -> list[Check]:
    """Return the verdicts on the checks; `missing` has those that failed, with the reason."""
    results = {
        name: pickle.loads(_result_of(folder, name).read_bytes())
        for name in names
        if name not in missing
    }
    checks = []
    for name in names:
        if name not in TITLES:  # what others are compared with
            continue
        needed = (name,) if name in _SECOND_STEPS else (name, BASE)
        lacking = [each for each in needed if each not in results]
        if lacking:
            text = f"not possible: {missing.get(lacking[0])}"
            checks.append(Check(TITLES[name], passed=True, text=text))
        elif name in _SECOND_STEPS:
            checks.append(_judge_second(name, results[name]))
        else:
            checks.append(_judge_cut(name, results[BASE], results[name], results.get(NUDGED_BASE)))
    lacks = _without_optimizer(Trace(folder / MAIN))
    return checks if lacks is None else [*checks, lacks]


def _result_of(folder: Path, name: str) -> Path:
    """Return the file with what a check has computed."""
    return folder / f"check-{name}.pickle"


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


def _cut_step(spec: Spec, folder: Path, cut: str) -> _CutStep:
    """Take the first step with its samples cut in one way; return its gradients.

    What only rounds is switched off, and activation checkpointing, where it is not what is checked.
    """
    training = spec.config.training
    size = training.batch_size
    global_batch = training.global_batch_size or training.batch_size
    sizes = {HALF: size // 2, TWICE: 2 * size, PLAIN: global_batch}
    settings: dict[str, Any] = {}
    for experiment, off in switched_off(spec.config).items():
        if experiment != RECOMPUTATION or cut != RECOMPUTED:
            settings |= off
    settings |= {
        "training.batch_size": sizes.get(cut, size),
        "training.global_batch_size": global_batch,
    }
    switches = frozenset({DRAWS, PERTURB} if cut == NUDGED_BASE else {DRAWS})
    case = Case(cut, settings, switches=switches)
    with worker.trainer_of(spec, SINGLE, case, folder) as prepared:
        trainer = prepared.trainer
        trainer.loss_check.skip()
        observer = StepObserver(trainer)
        parts = _Parts(trainer, plain=cut == PLAIN)
        next(iter(trainer.steps(prepared.data)))
        gradient = parts.plain if parts.plain is not None else parts.row(observer.gradients)
        return _CutStep(gradient, parts.counts, parts.means, parts.batch)


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

    def row(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of all parameters in a row, float64 [elements]; zeros for none."""
        each = [gradients.get(name, torch.zeros_like(p)) for name, p in self._parameters.items()]
        return torch.cat([g.detach().double().flatten().cpu() for g in each])

    def _row_of_grads(self) -> Tensor:
        """Return `row` of the parameters' `.grad`."""
        return self.row(
            {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        )

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
            total = self._row_of_grads() / factor  # of the micro-batches so far
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
        row = self._row_of_grads()
        for parameter in self._parameters.values():
            parameter.grad = None
        return row


def _judge_cut(cut: str, base: _CutStep, other: _CutStep, nudged: _CutStep | None) -> Check:
    """Return the verdict on a step that was cut otherwise, and why it differs.

    Rounding, or last bits of parameters, may explain a difference, and so may a loss that couples
    samples: these are not faults. Else the gradient of a larger micro-batch is a weighted sum of
    those of its parts, and the weights say which fault it is.
    """
    title = TITLES[cut]
    off = distance(other.gradient, base.gradient)
    if off <= AGREES:
        return Check(title, passed=True, relative=off)
    nudge = distance(nudged.gradient, base.gradient) if nudged is not None else 0.0
    if nudge > CEILING:
        text = f"cannot judge: changed last bits of parameters move the gradient by {nudge:.0%}"
        return Check(title, passed=True, text=text, relative=off)
    if off <= SLACK * nudge:
        return Check(title, passed=True, relative=off)
    if cut == RECOMPUTED:
        text = (
            "what is computed again in the backward pass is not what the forward pass computed: the"
            f" gradient differs by {off:.1e}"
        )
        return Check(title, passed=False, kind="recomputation", text=text, relative=off)
    uncut, parts = (base, other) if cut == HALF else (other, base)
    fits = _fits(uncut, parts)
    # A weak term that couples samples, as the balance of experts is, explains a small difference.
    is_coupled = not fits or any(fit.residual > min(ADDS_UP, off / 4) for fit in fits)
    if is_coupled:
        text = (
            "the samples of a micro-batch are coupled (batch normalisation, negatives in the"
            " batch): batch_size is part of what is learned"
        )
        return Check(title, passed=True, text=text, relative=off)
    worst = max(fits, key=lambda fit: fit.distance_to_counts)
    if worst.distance_to_counts <= ADDS_UP:
        return _adds_up_by_counts(cut, off)
    declared = ", ".join(f"{share:.3f}" for share in worst.shares)
    weights = ", ".join(f"{weight:.3f}" for weight in worst.weights)
    text = (
        f"the loss is a mean over something that its count does not say: of {len(worst.weights)}"
        f" parts of micro-batch {worst.number}, its gradient weighs each by {weights}, and the step"
        f" by {declared}; weighed so, the cuts agree\ndo: {_fix(uncut, worst.weights)}"
    )
    return Check(title, passed=False, kind="loss normalisation", text=text, relative=off)


def _adds_up_by_counts(cut: str, off: float) -> Check:
    """Return the fault of a step that is not the sum of its parts, though a micro-batch is."""
    kind = "accumulation"
    step = f"a step of {TITLES[cut]}"
    if cut == PLAIN:
        kind = "plain pass"
        step = (
            "a plain pass over the samples of a step, with the model called as its author wrote it,"
        )
    text = (
        f"{step} has another gradient, although those of its parts add up by their counts: it"
        f" differs by {off:.1e}"
    )
    return Check(TITLES[cut], passed=False, kind=kind, text=text, relative=off)


def _fix(uncut: _CutStep, weights: Sequence[float]) -> str:
    """Return the line to write: which sum over the batch is in the proportion of the weights."""
    leaves, spec = tree_flatten(uncut.batch)
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
    if len(weights) != 2 or size % 2 or not abs(sum(weights) - 1) < ADDS_UP:
        return fix_for_count(counted=True, batch=uncut.batch)

    def rows(begin: int, end: int) -> Any:
        """Return the samples `begin` … `end` − 1 of the batch."""
        return tree_unflatten(
            [
                leaf[begin:end] if isinstance(leaf, Tensor) and leaf.ndim else leaf
                for leaf in leaves
            ],
            spec,
        )

    halves = rows(0, size // 2), rows(size // 2, size)
    return fix_for_count(halves, weights[0], counted=True)


@dataclass(frozen=True)
class _Fit:
    """The gradient of a micro-batch's mean loss as a weighted sum of those of its parts.

    A micro-batch of 6 valid targets in parts of 4 and 2 has the weights (0.667, 0.333) if its loss
    is a mean over targets, which are the `shares` of its counts; a mean over samples has
    (0.5, 0.5), and is 0.167 away from them.
    """

    number: int  # of the micro-batch
    weights: list[float]  # of each part
    residual: float  # what is left of the gradient, relatively
    shares: list[float]  # of each part in the valid targets

    @property
    def distance_to_counts(self) -> float:
        """Largest difference of a weight from the part's share in the targets."""
        pairs = zip(self.weights, self.shares, strict=True)
        return max(abs(weight - share) for weight, share in pairs)


def _fits(uncut: _CutStep, parts: _CutStep) -> list[_Fit]:
    """Describe each micro-batch of `uncut` as a weighted sum of its parts, as far as it has any."""
    parts_each = len(parts.means) // len(uncut.means)
    fits = []
    for number, mean in enumerate(uncut.means):
        its_parts = slice(number * parts_each, (number + 1) * parts_each)
        columns = [values_of(part) for part in parts.means[its_parts]]
        if len(columns) != parts_each or not any(column.any() for column in columns):
            continue
        counts = parts.counts[its_parts]
        shares = [count / max(sum(counts), 1.0) for count in counts]
        fitted = weighted_sum(columns, values_of(mean))
        fits.append(_Fit(number, fitted.weights.tolist(), fitted.residual, shares))
    return fits


# ---- the second step ----


@dataclass(frozen=True)
class _SecondStep:
    """The distance of step 2 from the reference's, and the parameters that are farthest."""

    gradient: float  # difference of all gradients, relative to these
    worst_gradient: str  # the parameter whose gradient differs most
    update: float  # largest difference of a value, relative to how far the step moves it
    worst_update: str  # the parameter that has it


def _second_step(spec: Spec, folder: Path, name: str) -> _SecondStep:
    """Take step 2 after an evaluation, or from a checkpoint, and compare it with the reference's.

    An optimizer that has lost its state has the same gradient, and makes another update of it.
    """
    trace = Trace(folder / MAIN)
    case = Case(MAIN, {"training.eval_batches": 1}, start=1 if name == LOADED else 0)
    with worker.trainer_of(spec, SINGLE, case, folder) as prepared:
        trainer = prepared.trainer
        trainer.loss_check.skip()
        observer = StepObserver(trainer)
        for step_record in islice(trainer.steps(prepared.data), 1 if name == LOADED else 2):
            if name == EVALUATED and step_record.step == 1:
                trainer.evaluate(prepared.data)

        mine: dict[str, Tensor] = {}  # gradients that the reference has, too
        right: dict[str, Tensor] = {}
        updates: dict[str, float] = {}
        with trace.tensors(0) as before, trace.tensors(1) as stored:
            for parameter_name, gradient in observer.gradients.items():
                reference = stored.get(GRADIENT, parameter_name)
                if reference is not None:
                    mine[parameter_name] = gradient.cpu()
                    right[parameter_name] = reference
            for parameter_name, parameter in trainer.placed.parameters.items():
                value = values_of(parameter)
                updates[parameter_name] = _update_off(parameter_name, value, before, stored)
        off = {each: distance(mine[each], right[each]) for each in mine}
        worst_update = max(updates, key=lambda each: updates[each], default="")
        return _SecondStep(
            gradient=distance(_in_a_row(mine), _in_a_row(right)),
            worst_gradient=max(off, key=lambda each: off[each], default=""),
            update=updates.get(worst_update, 0.0),
            worst_update=worst_update,
        )


def _in_a_row(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


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


def _judge_second(name: str, second: _SecondStep) -> Check:
    """Return the check of what lies between two steps: of a checkpoint, or of an evaluation.

    The second step is held against the one of a run in which nothing lies between.
    """
    title = TITLES[name]
    if not second.gradient <= AGREES:  # NaN differs, too
        kind = "evaluation"
        why = (
            "an evaluation changes what the model computes afterwards: training reads what it"
            " writes"
        )
        if name == LOADED:
            kind = "checkpoint"
            why = (
                "the model depends on something that a checkpoint does not hold, as a counter, a"
                " cache or a generator"
            )
        text = f"{why}; the next step's gradient of {second.worst_gradient} is another one"
        return Check(title, passed=False, kind=kind, text=text, relative=second.gradient)
    if not second.update <= AGREES:
        fault = "a checkpoint does not hold all of" if name == LOADED else "an evaluation changes"
        text = (
            f"the next step's gradients are the same, and its update of {second.worst_update}"
            f" differs by {second.update:.1e}: {fault} what the optimizer keeps"
        )
        return Check(title, passed=False, kind="optimizer state", text=text, relative=second.update)
    return Check(title, passed=True, relative=second.gradient)
