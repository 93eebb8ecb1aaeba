"""Checks in a run's first steps that the loss of a micro-batch is that of its two halves.

A mean whose weights differ from its divisor gives another loss, and another gradient, for every
split of the same samples. All topologies agree on it, so only another split shows it. The check
runs in evaluation mode and changes no state. Nothing is checked if an update is made from one
micro-batch, since then no split matters; if the forward pass draws random numbers even in
evaluation mode, or returns no loss there; and for batches that cannot be halved. The first step is
checked before it is taken, so that a refusal comes before anything is trained; a loop over data
(`lockstep.trainer.training_run`) checks the next ones after their updates.

Tests: tests/trainer/test_loss_check.py, tests/trainer/test_jagged.py
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError, listed, warn_at_caller
from lockstep.models.batch_parts import num_samples
from lockstep.models.observed import LossCalls
from lockstep.monitor.figures import gather_objects
from lockstep.parallel.forward_effects.buffers import restored_attributes
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.place import compiled_blocks
from lockstep.process_group.collectives import is_main_process, object_device
from lockstep.randomness import preserve_states
from lockstep.torch_compat.compiler_loading import run_eagerly
from lockstep.torch_compat.pytree import tree_flatten, tree_map_only, tree_unflatten
from lockstep.trainer.evaluation import evaluating, restored_buffers

STEPS = 3  # number of steps to check: the first need not contain ignored targets
_TOLERANCE = 1e-4  # relative; rounding of float32 is a hundred times less
# in low precision, and on GPUs, whose kernels depend on the size of the batch
_COARSE_TOLERANCE = 1e-2
# a loss is repeated so often: other random numbers give nearly the same one now and then
_TIMES = 3
# relative to the difference between splits: a repeated loss that differs by more draws random
# numbers
_REPEATS = 1e-2


_Split = tuple[Any, Any, Any]  # the same samples whole, and in two halves


@dataclass(frozen=True)
class _Finding:
    adds_up: bool | None  # None: unknown
    # whether torch's loss functions show it; None: this rank does not compute the loss
    divisor_known: bool | None
    auxiliary: bool  # the loss has a term that depends on the split by design
    text: tuple[str, str] | None  # if it does not add up: (what, fix)
    fix: str  # where the divisor is unknown


class LossCheck:
    """Checks the loss in the first steps of a run; every rank has one.

    `coarse`: it computes in low precision.
    """

    def __init__(self, placed: ParallelModel, *, compiled: bool, coarse: bool) -> None:
        self._placed = placed
        self._compiled = compiled
        self.left = STEPS  # to check
        self._proportional = True
        coarse = coarse or placed.random_state.device.type != "cpu"
        coarse = coarse or any(
            p.dtype in (torch.bfloat16, torch.float16) for p in placed.parameters.values()
        )
        self._tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE

    def skip(self) -> None:
        """Check nothing in this run."""
        self.left = 0

    def check(
        self, micro_batches: Sequence[MicroBatch], micro_batches_per_step: int, step: int
    ) -> None:
        """Check the loss with this rank's micro-batches of a step, if some are left to check.

        Rank 0 warns if it does not add up, with the line to write; a UsageError for a Hugging Face
        model, also where its divisor is unknown.
        """
        placed = self._placed
        models = placed.local_training.total if placed.local_training is not None else 1
        # each model is updated from one micro-batch, or none
        if not self.left or micro_batches_per_step <= models:
            return
        self.left -= 1
        # Ranks that gather units and exchange rows together take rank 0's batch. Those of a
        # pipeline have the same one already, and those in its middle have none.
        if placed.layout.meets_in_passes and not placed.layout.has_stages:
            box = [
                tree_map_only(Tensor, Tensor.cpu, micro_batches[0].batch)
                if is_main_process()
                else None
            ]
            device = placed.random_state.device
            dist.broadcast_object_list(box, src=0, device=object_device(device))
            micro_batches = [
                MicroBatch(0, tree_map_only(Tensor, lambda tensor: tensor.to(device), box[0]))
            ]
        self._conclude(gather_objects(self._finding(micro_batches, step)))

    def _conclude(self, findings: list[_Finding]) -> None:
        """Warn, or refuse the loss, by what all ranks found; each of them concludes the same.

        A loss that does not add up is excused where torch's loss functions show its divisor and
        a term depends on the split by design, such as a load-balancing term.
        """
        must_be_told = self._placed.objective.must_be_told
        text = next(
            (f.text for f in findings if f.text and not (f.divisor_known and f.auxiliary)), None
        )
        if (
            text is None
            and must_be_told
            and any(f.adds_up is None and f.divisor_known is False for f in findings)
        ):
            text = ("nothing tells what the model's loss is a mean over", findings[0].fix)
        if text is None:
            return
        self.left = 0
        what, fix = text
        why = (
            "a step weighs the losses of its micro-batches, so each cut of the same samples gives"
            " another step"
        )
        if must_be_told:
            raise UsageError(what, where="the loss", why=why, fix=fix)
        if is_main_process():
            warn_at_caller(f"{what}\n  why: {why}\n  do: {fix}")

    def _finding(self, micro_batches: Sequence[MicroBatch], step: int) -> _Finding:
        """Return this rank's finding; all ranks run the same forward passes."""
        placed = self._placed
        objective = self._placed.objective
        observed = objective.observed
        cut = _halved(micro_batches) if placed.wants_data else None
        batches = [micro_batches[0].batch] * 3 if cut is None else list(cut)
        if not all(gather_objects(cut is not None or not placed.wants_data)):
            batches = batches[:1] if objective.must_be_told else []
        with (
            evaluating(placed),
            _restored_afterwards(placed),
            _without_compiled_code(placed) if self._compiled else nullcontext(),
        ):
            losses = self._losses(batches, step, "check the loss")
            adds_up = self._compare(losses)
            if not all(agrees is not False for agrees in gather_objects(adds_up)):
                again = [
                    self._losses(batches[:1], step, f"check the loss again, {time}")
                    for time in range(_TIMES)
                ]
                if adds_up is False:
                    whole = losses[0][0]
                    least = max(abs(whole - _mean_of_halves(losses)), self._rounding(losses))
                    draws = any(abs(whole - loss[0][0]) > _REPEATS * least for loss in again)
                    adds_up = None if draws else False
        text = (
            _message(cut, losses, counted=observed is None, function=objective.function)
            if adds_up is False and cut is not None
            else None
        )
        divisor_known, auxiliary = (
            (True, False) if observed is None else (observed.told, observed.auxiliary)
        )
        return _Finding(
            adds_up,
            divisor_known,
            auxiliary,
            text,
            fix_for_count(batch=micro_batches[0].batch, function=objective.function),
        )

    def _losses(self, batches: Sequence[Any], step: int, phase: str) -> list[tuple[float, float]]:
        """Return (mean, count) of each batch.

        Fewer if the model returns no loss in evaluation mode.
        """
        placed = self._placed
        losses = _Losses()
        observed = placed.objective.observed
        piped = placed.layout.has_stages
        last_stage_begun = failed = False

        def begin_last_stage(_part: nn.Module, _args: Any) -> None:
            nonlocal last_stage_begun
            last_stage_begun = True

        with placed.random_state.running(phase, step), ExitStack() as hooks:
            if observed is not None:
                hooks.enter_context(observed.looking())
            for part in placed.parts:
                if getattr(part, "is_last", False):
                    hooks.enter_context(part.register_forward_pre_hook(begin_last_stage))
            for batch in batches:
                failed = last_stage_begun = False
                try:
                    placed.evaluate([MicroBatch(0, batch)], losses)
                except Exception:
                    # any error of a model in evaluation mode; training will raise those that matter
                    if piped and not last_stage_begun:
                        raise  # other ranks wait for this one's message
                    failed = True
                any_failed = any(gather_objects(failed)) if piped else failed
                if any_failed:
                    break
                losses.divisors.append(() if observed is None else observed.divisors)
        self._proportional = _proportional(losses.divisors)
        return losses.means

    def _compare(self, losses: list[tuple[float, float]]) -> bool | None:
        finite = len(losses) == 3 and all(math.isfinite(mean) for mean, _ in losses)
        if not finite or not any(count for _, count in losses[1:]):
            return None
        if self._placed.objective.must_be_told and not self._proportional:
            return False  # even if the terms happen to be equal for both halves
        if all(abs(mean) <= (self._tolerance / 100) ** 2 for mean, _ in losses):
            # what is left of a loss of zero: the squared rounding of outputs of about one
            return None
        return abs(losses[0][0] - _mean_of_halves(losses)) <= self._rounding(losses)

    def _rounding(self, losses: list[tuple[float, float]]) -> float:
        return self._tolerance * max(abs(mean) for mean, _ in losses)


def _mean_of_halves(losses: list[tuple[float, float]]) -> float:
    _, (first, n), (second, m) = losses
    return (first * n + second * m) / (n + m)


def _proportional(divisors: Sequence[tuple[float, ...]]) -> bool:
    """Return whether the means' divisors have the same proportion in all batches.

    Only then the sum of the means has one weight.
    """
    known = [each for each in divisors if each and all(each)]
    return all(
        len(each) == len(known[0])
        and all(
            math.isclose(a * known[0][-1], b * each[-1])
            for a, b in zip(each, known[0], strict=True)
        )
        for each in known
    )


class _Losses(LossAccumulator):
    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"), shared=False)
        self.means: list[tuple[float, float]] = []  # with their counts
        self.divisors: list[tuple[float, ...]] = []

    def add(self, micro_batch: MicroBatch, loss: Loss) -> None:
        count = float(loss.targets)  # host waits for the device, in the first steps of a run
        mean = float(loss.summed()) / count if count else 0.0  # host waits for the device
        self.means.append((mean, count))


@contextmanager
def _without_compiled_code(placed: ParallelModel) -> Iterator[None]:
    """Run compiled blocks without their code, which would be compiled for the halves.

    As there, observe no calls.
    """

    def enter(inside: LossCalls, *_call: Any) -> None:
        inside.__enter__()

    def leave(inside: LossCalls, *_call: Any) -> None:
        inside.__exit__()

    with ExitStack() as hooks, run_eagerly():
        for block in compiled_blocks(placed.parts):
            inside = LossCalls()
            hooks.enter_context(block.register_forward_pre_hook(partial(enter, inside)))
            hooks.enter_context(
                block.register_forward_hook(partial(leave, inside), always_call=True)
            )
        yield


@contextmanager
def _restored_afterwards(placed: ParallelModel) -> Iterator[None]:
    """Restore what a forward pass may change: buffers, plain numbers in modules, random states."""
    modules = [module for part in placed.modules for module in part.modules()]
    with restored_buffers(placed), restored_attributes(modules), preserve_states():
        yield


def _halved(micro_batches: Sequence[MicroBatch]) -> _Split | None:
    """Return a micro-batch and its halves, or for single samples two of them and both.

    None if that is impossible.
    """
    try:
        batch = micro_batches[0].batch
        size = num_samples(micro_batches[0].batch)
    except UsageError:
        return None
    if size > 1:
        first, second = (
            _sliced(batch, size, part) for part in (slice(size // 2), slice(size // 2, size))
        )
        return (batch, first, second) if first is not None and second is not None else None
    if len(micro_batches) > 1:
        first = micro_batches[0].batch
        second = micro_batches[1].batch
        both = _joined(first, second)
        return (both, first, second) if both is not None else None
    return None


def _sliced(batch: Any, size: int, part: slice) -> Any:
    """Return some samples of a batch of tensors.

    None if it holds anything else, or tensors of another length.
    """
    leaves, spec = tree_flatten(batch)
    if not all(_by_samples(leaf, size) for leaf in leaves):
        return None
    return tree_unflatten(
        [_rows(leaf, part) if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves],
        spec,
    )


def _rows(tensor: Tensor, part: slice) -> Tensor:
    if tensor.is_nested:  # has no slices along its samples
        return torch.nested.as_nested_tensor(list(tensor.unbind())[part], layout=tensor.layout)
    return tensor[part]


def _joined(first: Any, second: Any) -> Any:
    """Return two samples as one batch; None if their shapes differ."""
    leaves, spec = tree_flatten(first)
    others, other_spec = tree_flatten(second)
    if spec != other_spec or not all(_by_samples(leaf, 1) for leaf in (*leaves, *others)):
        return None
    pairs = list(zip(leaves, others, strict=True))
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    if not all(isinstance(b, Tensor) and a.shape == b.shape and a.ndim for a, b in tensors):
        return None
    return tree_unflatten(
        [torch.cat(pair) if isinstance(pair[0], Tensor) else pair[0] for pair in pairs], spec
    )


def _by_samples(leaf: Any, size: int) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.ndim == 0 or leaf.shape[0] == size
    return leaf is None or isinstance(leaf, bool)


def _message(
    cut: _Split, losses: list[tuple[float, float]], *, counted: bool, function: str | None
) -> tuple[str, str]:
    (whole, _), (first, n), (second, m) = losses
    what = (
        f"the loss does not add up: {num_samples(cut[0])} samples have {whole:.6g}; their halves"
        f" have {first:.6g} and {second:.6g}, which with the counts {n:g} and {m:g} make"
        f" {_mean_of_halves(losses):.6g}"
    )
    weight = (whole - second) / (first - second) if first != second else -1.0
    return what, fix_for_count(cut[1:], weight, counted=counted, function=function)


_IGNORED = (-100, -1, 0, 255)  # targets that are commonly ignored
_CLOSE = 1e-4


def fix_for_count(
    halves: tuple[Any, Any] | None = None,
    weight: float = -1.0,
    *,
    counted: bool = False,
    batch: Any = None,
    function: str | None = None,
) -> str:
    """Return the fix for a loss that does not add up.

    Of two halves of a batch the first has this `weight` in the loss of both, if it is a mean of the
    two. `counted`: the model has a `count`, or declares its loss. `batch`: one, if it can't be
    halved. `function`: the name of the loss function, if it is a plain one.
    """
    if halves is not None and 0 < weight < 1:
        for text, first, second in _candidates(*halves):
            if first + second and abs(first / (first + second) - weight) < _CLOSE:
                return _line_of_count(text, function)
    if halves is not None and not 0 < weight < 1:
        return (
            "a sample's loss depends on the others of its micro-batch (contrastive losses,"
            " statistics of the batch), or the loss is a sum. No count makes the first add up: take"
            " it that training.batch_size is part of what is learned. A sum says so: loss_reduction"
            ' = "sum", or reduction = "sum" of a loss function'
        )
    if counted:
        what = "its count(batch) is something else than"
    elif function is None:
        what = "give the model a method count(batch), which returns"
    else:
        what = f"write {function}.count = lambda batch: …, which returns"
    what += " what its loss is divided by"
    example = halves[0] if halves is not None else batch
    labels = example.get("labels") if isinstance(example, Mapping) else None
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        count = 'def count(self, batch):\n    return (batch["labels"] != -100).sum()'
        if function is not None:
            count = f'{function}.count = lambda batch: (batch["labels"] != -100).sum()'
        return f"{what}, for instance the valid labels:\n{count}"
    members = (
        f"; its batches have {listed([*map(str, example)])}" if isinstance(example, Mapping) else ""
    )
    return (
        f"{what} (the line of its forward that divides a sum, or takes a mean, shows it{members})"
    )


def _line_of_count(divisor: str, function: str | None) -> str:
    """Return the line to write for a divisor, an expression of the batch."""
    if function is None:
        return (
            "give the model what its loss is a mean over:\ndef count(self, batch):\n   "
            f" return {divisor}"
        )
    return (
        "write under the loss function what it is a mean over:\n"
        f"{function}.count = lambda batch: {divisor}"
    )


def _candidates(first: Any, second: Any) -> Iterator[tuple[str, float, float]]:
    """Yield (expression, its value for each half) for possible divisors of a loss."""
    for key in (
        first
        if isinstance(first, Mapping)
        else range(len(first) if isinstance(first, tuple | list) else 0)
    ):
        a = first[key]
        b = second[key]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not a.ndim:
            continue
        member = f"batch[{key!r}]".replace("'", '"')
        if a.is_floating_point() or a.dtype.itemsize == 1:
            yield f"{member}.sum()", float(a.sum()), float(b.sum())
            continue
        for ignored in _IGNORED:
            yield (
                f"({member} != {ignored}).sum()",
                float((a != ignored).sum()),
                float((b != ignored).sum()),
            )
        for ignored in _IGNORED if a.ndim > 1 else ():
            text = f"({member}[..., 1:] != {ignored}).sum()"
            yield text, float((a[..., 1:] != ignored).sum()), float((b[..., 1:] != ignored).sum())
        yield f"{member}.sum()", float(a.sum()), float(b.sum())
