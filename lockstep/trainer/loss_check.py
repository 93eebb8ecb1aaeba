"""Whether a loss adds up, compared in the first steps of a run: of a micro-batch whole, and of its two halves.

A mean that is weighted by something else than what it was divided by gives another loss, and another gradient, for
every cut of the same samples. All topologies agree on it, so only another cut shows it. The comparison runs in
evaluation mode, without gradients; it leaves buffers, random numbers and what modules count as they were. Compiled
blocks run as they are written, so that nothing is compiled for the shapes of the halves.

Nothing is compared where an update is made of one micro-batch, for then no cut matters; where the forward pass draws
random numbers even in evaluation mode, or returns no loss there; and in batches that can't be halved.
"""

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.collectives import is_main_process
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError
from lockstep.groups import object_device
from lockstep.models.observed import LossCalls
from lockstep.models.protocol import num_samples
from lockstep.monitor.over_ranks import gather_objects
from lockstep.parallel.compiled import compiled_blocks
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_compat.pytree import tree_flatten, tree_map_only, tree_unflatten
from lockstep.trainer.evaluator import evaluating

STEPS = 3  # of a run, in which it is compared: targets that are left out need not be in the first
_TOLERANCE = 1e-4  # of the loss: rounding of float32 is a hundred times less
_COARSE_TOLERANCE = 1e-2  # in low precision, and on GPUs, whose kernels change with the size of the batch
_REPEATS = 1e-2  # of a difference between cuts: what differs by more when it is computed again draws random numbers


@dataclass(frozen=True)
class _Cut:
    """The same samples whole, and in two halves."""

    whole: Any
    halves: tuple[Any, Any]


@dataclass(frozen=True)
class _Finding:
    """What one rank found.

    Attributes:
        adds_up: None: can't be told.
        told: torch's loss functions tell what the loss is a mean over; None: this rank does not compute it.
        auxiliary: it has a term that no cut keeps, as its author knows.
        text: what it says where it does not add up: (what, fix).
    """

    adds_up: bool | None
    told: bool | None
    auxiliary: bool
    text: tuple[str, str] | None = None


class LossCheck:
    """Compares the loss in the first steps of a run; every rank has one, and calls it before each step.

    Args:
        placed: the model.
        compiled: its blocks are compiled.
        coarse: it computes in low precision.

    Attributes:
        left: steps in which it will compare.
    """

    def __init__(self, placed: ParallelModel, *, compiled: bool, coarse: bool) -> None:
        self._placed, self._compiled, self.left = placed, compiled, STEPS
        self._proportional = True
        coarse = coarse or placed.random_state.device.type != "cpu"
        coarse = coarse or any(p.dtype in (torch.bfloat16, torch.float16) for p in placed.parameters.values())
        self._tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE

    def skip(self) -> None:
        """Compare nothing in this run."""
        self.left = 0

    def before_step(self, micro_batches: Sequence[MicroBatch], micro_batches_per_step: int, step: int) -> None:
        """Compare, if it is time; on rank 0 warn where the loss does not add up, with the line to write.

        Args:
            micro_batches: this rank's of the step that follows.
            micro_batches_per_step: micro-batches in it, over all ranks.

        Raises:
            UsageError: a Hugging Face model's loss does not add up, or nothing tells what it is a mean over.
        """
        placed = self._placed
        models = placed.local_training.total if placed.local_training is not None else 1
        if not self.left or micro_batches_per_step <= models:  # each is updated from one micro-batch, or none
            return
        self.left -= 1
        # The ranks of a pipeline have the same batch already, and those in the middle of it have none.
        if placed.layout.shard > 1 and placed.layout.pipeline == 1:
            micro_batches = [MicroBatch(0, self._of_rank_0(micro_batches[0].batch))]
        self._judge(gather_objects(self._found(micro_batches, step)))

    def _of_rank_0(self, batch: Any) -> Any:
        """Return rank 0's batch, on all ranks: all gather a sharded unit at once, and data may decide which unit."""
        box = [tree_map_only(Tensor, Tensor.cpu, batch) if is_main_process() else None]
        device = self._placed.random_state.device
        dist.broadcast_object_list(box, src=0, device=object_device(device))
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), box[0])

    def _judge(self, findings: list[_Finding]) -> None:
        """Speak of what all ranks found."""
        must_be_told = self._placed.objective.must_be_told
        text = next((f.text for f in findings if f.text and not (f.told and f.auxiliary)), None)
        if text is None and must_be_told and any(f.adds_up is None and f.told is False for f in findings):
            text = ("nothing tells what the model's loss is a mean over", line_to_write())
        if text is None:
            return
        self.left = 0
        what, fix = text
        why = "a step weighs the losses of its micro-batches, so each cut of the same samples gives another step"
        if must_be_told:
            raise UsageError(what, where="the loss", why=why, fix=fix)
        if is_main_process():
            warnings.warn(f"{what}\n  why: {why}\n  do: {fix}", stacklevel=2)

    def _found(self, micro_batches: Sequence[MicroBatch], step: int) -> _Finding:
        """What this rank finds; all ranks run the same forward passes."""
        placed, objective = self._placed, self._placed.objective
        observed = objective.observed
        cut = _halved(micro_batches) if placed.wants_data else None
        batches = [micro_batches[0].batch] * 3 if cut is None else [cut.whole, *cut.halves]
        if not all(gather_objects(cut is not None or not placed.wants_data)):
            batches = batches[:1] if objective.must_be_told else []
        with evaluating(placed), _unchanged(placed), _as_written(placed) if self._compiled else nullcontext():
            losses = self._losses(batches, step, "check the loss")
            adds_up = self._adds_up(losses)
            if not all(found is not False for found in gather_objects(adds_up)):
                again = self._losses(batches[:1], step, "check the loss again")
                if adds_up is False:
                    whole = losses[0][0]
                    least = max(abs(whole - _of_halves(losses)), self._rounding(losses))
                    draws = abs(whole - again[0][0]) > _REPEATS * least
                    adds_up = None if draws else False
        text = None
        if adds_up is False and cut is not None:
            text = _text(cut, losses, counted=observed is None)
        told, auxiliary = (True, False) if observed is None else (observed.told, observed.auxiliary)
        return _Finding(adds_up, told, auxiliary, text)

    def _losses(self, batches: Sequence[Any], step: int, phase: str) -> list[tuple[float, float]]:
        """(mean, count) of each batch; fewer where the model returns no loss in evaluation mode."""
        placed, losses = self._placed, _Losses()
        observed, piped = placed.objective.observed, placed.layout.pipeline > 1
        if observed is not None:
            observed.looks = True
        with placed.random_state.running(phase, step), _LastStage(placed.parts) as last_stage:
            for batch in batches:
                failed = last_stage.reached = False
                try:
                    placed.evaluate([MicroBatch(0, batch)], losses)
                except Exception:  # whatever a model raises where it is not trained; training will raise what matters
                    if piped and not last_stage.reached:
                        raise  # other ranks wait for what this one was to send
                    failed = True
                if any(gather_objects(failed)) if piped else failed:
                    break
                losses.divisors.append(() if observed is None else observed.divisors)
        if observed is not None:
            observed.looks = False
        self._proportional = _proportional(losses.divisors)
        return losses.found

    def _adds_up(self, losses: list[tuple[float, float]]) -> bool | None:
        if len(losses) < 3 or not all(math.isfinite(mean) for mean, _ in losses):
            return None
        if not any(count for _, count in losses[1:]):
            return None
        if self._placed.objective.must_be_told and not self._proportional:
            return False  # though the terms may happen to be as large for the one half as for the other
        return abs(losses[0][0] - _of_halves(losses)) <= self._rounding(losses)

    def _rounding(self, losses: list[tuple[float, float]]) -> float:
        return self._tolerance * max(abs(mean) for mean, _ in losses)


def _of_halves(losses: list[tuple[float, float]]) -> float:
    """Return the mean loss of the whole that the halves make with their counts."""
    _, (one, n), (other, m) = losses
    return (one * n + other * m) / (n + m)


def _proportional(divisors: Sequence[tuple[float, ...]]) -> bool:
    """Whether what the means were divided by has one proportion in all batches: their sum has one weight only then."""
    known = [each for each in divisors if each and all(each)]
    return all(
        len(each) == len(known[0])
        and all(math.isclose(a * known[0][-1], b * each[-1]) for a, b in zip(each, known[0], strict=True))
        for each in known
    )


class _Losses(LossAccumulator):
    """Keeps the mean loss of each micro-batch, and what it counts; of this rank alone."""

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"), shared=False)
        self.found: list[tuple[float, float]] = []
        self.divisors: list[tuple[float, ...]] = []

    def add(self, micro_batch: MicroBatch, loss: Loss) -> None:
        count = float(loss.targets)
        self.found.append((float(loss.summed()) / count if count else 0.0, count))


class _LastStage:
    """Tells whether the last stage of a pipeline has begun: then no other rank waits for this one."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._last = [part for part in parts if getattr(part, "is_last", False)]
        self.reached = False

    def __enter__(self) -> "_LastStage":
        self._handles = [part.register_forward_pre_hook(self._begins) for part in self._last]
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, _part: nn.Module, _args: Any) -> None:
        self.reached = True


@contextmanager
def _as_written(placed: ParallelModel) -> Iterator[None]:
    """Run compiled blocks without their compiled code. Like there, no call of a loss function is noted inside."""
    handles = []
    for block in compiled_blocks(placed.parts):
        inside = LossCalls()
        handles += [
            block.register_forward_pre_hook(partial(_enter, inside)),
            block.register_forward_hook(partial(_leave, inside), always_call=True),
        ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(inside: LossCalls, *_call: Any) -> None:
    inside.__enter__()


def _leave(inside: LossCalls, *_call: Any) -> None:
    inside.__exit__()


@contextmanager
def _unchanged(placed: ParallelModel) -> Iterator[None]:
    """Put back what a forward pass may change besides: buffers, plain numbers in modules, random states."""
    modules = [module for part in placed.parts for module in part.modules()]
    kept = [buffer for part in placed.parts for buffer in part.buffers()]
    if placed.local_training is not None:  # under local updates the common model is evaluated, with buffers of its own
        kept += [value for name, value in placed.kept().items() if name not in placed.parameters]
    buffers = [(buffer, buffer.clone()) for buffer in kept]
    numbers = [{k: v for k, v in vars(m).items() if isinstance(v, bool | int | float | str)} for m in modules]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for module, before in zip(modules, numbers, strict=True):
            for name, value in before.items():
                if name != "training" and vars(module).get(name) != value:
                    setattr(module, name, value)
        for buffer, before_pass in buffers:
            buffer.copy_(before_pass)


def _halved(micro_batches: Sequence[MicroBatch]) -> _Cut | None:
    """A micro-batch and its halves, or where it is one sample, two of them and both; None where that can't be."""
    try:
        batch, size = micro_batches[0].batch, num_samples(micro_batches[0].batch)
    except UsageError:
        return None
    if size > 1:
        one, other = (_sliced(batch, size, part) for part in (slice(size // 2), slice(size // 2, size)))
        return _Cut(batch, (one, other)) if one is not None and other is not None else None
    if len(micro_batches) > 1:
        both = _joined(micro_batches[0].batch, micro_batches[1].batch)
        return _Cut(both, (micro_batches[0].batch, micro_batches[1].batch)) if both is not None else None
    return None


def _sliced(batch: Any, size: int, part: slice) -> Any:
    """Some samples of a batch of tensors; None where it holds something else, or tensors that are not cut so."""
    leaves, spec = tree_flatten(batch)
    if not all(_by_samples(leaf, size) for leaf in leaves):
        return None
    return tree_unflatten([leaf[part] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves], spec)


def _joined(one: Any, other: Any) -> Any:
    """Two samples as one batch; None where their shapes differ."""
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    if spec != other_spec or not all(_by_samples(leaf, 1) for leaf in (*leaves, *others)):
        return None
    pairs = list(zip(leaves, others, strict=True))
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    if not all(isinstance(b, Tensor) and a.shape == b.shape and a.ndim for a, b in tensors):
        return None
    return tree_unflatten([torch.cat(pair) if isinstance(pair[0], Tensor) else pair[0] for pair in pairs], spec)


def _by_samples(leaf: Any, size: int) -> bool:
    return (
        leaf is None
        or isinstance(leaf, bool)
        or (isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] == size))
    )


def _text(cut: _Cut, losses: list[tuple[float, float]], *, counted: bool) -> tuple[str, str]:
    """What a loss that does not add up says, and the line to write."""
    (whole, _), (one, n), (other, m) = losses
    what = (
        f"the loss does not add up: {num_samples(cut.whole)} samples have {whole:.6g}; their halves have {one:.6g} and "
        f"{other:.6g}, which with the counts {n:g} and {m:g} make {_of_halves(losses):.6g}"
    )
    weight = (whole - other) / (one - other) if one != other else -1.0
    return what, line_to_write(cut.halves, weight, counted=counted)


_IGNORED = (-100, -1, 0, 255)  # targets that are commonly left out
_CLOSE = 1e-4


def line_to_write(halves: tuple[Any, Any] | None = None, weight: float = -1.0, *, counted: bool = False) -> str:
    """The fix of a loss that does not add up.

    Args:
        halves: two parts of a batch.
        weight: of the first of them in the loss of both, if it is a mean of the two.
        counted: the model has a `count`, or declares its loss.
    """
    if halves is not None and 0 < weight < 1:
        for text, one, other in _candidates(*halves):
            if one + other and abs(one / (one + other) - weight) < _CLOSE:
                return f"give the model what its loss is a mean over:\ndef count(self, batch):\n    return {text}"
    if halves is not None and not 0 < weight < 1:
        return (
            "a sample's loss depends on the others of its micro-batch (contrastive losses, statistics of the batch), "
            "or the loss is a sum. No count makes the first add up: take it that training.batch_size is part of what "
            'is learned. A sum says so: loss_reduction = "sum", or reduction = "sum" of a loss function'
        )
    what = "its count(batch) is something else than" if counted else "give the model"
    return (
        f"{what} what its loss is divided by, for instance\ndef count(self, batch):\n"
        '    return (batch["labels"] != -100).sum()'
    )


def _candidates(one: Any, other: Any) -> Iterator[tuple[str, float, float]]:
    """(expression, its value for each half) of what a loss may be a mean over."""
    for key in one if isinstance(one, Mapping) else range(len(one) if isinstance(one, tuple | list) else 0):
        a, b = one[key], other[key]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not a.ndim:
            continue
        member = f"batch[{key!r}]".replace("'", '"')
        if a.is_floating_point() or a.dtype.itemsize == 1:
            yield f"{member}.sum()", float(a.sum()), float(b.sum())
            continue
        for ignored in _IGNORED:
            yield f"({member} != {ignored}).sum()", float((a != ignored).sum()), float((b != ignored).sum())
        if a.ndim > 1:
            for ignored in _IGNORED:
                text = f"({member}[..., 1:] != {ignored}).sum()"
                yield text, float((a[..., 1:] != ignored).sum()), float((b[..., 1:] != ignored).sum())
        yield f"{member}.sum()", float(a.sum()), float(b.sum())
