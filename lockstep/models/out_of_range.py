"""Says which sample has a target, or a token id, that the model has no class or row for.

torch's loss functions and embeddings raise an IndexError that names the number alone. The number is
looked up in the micro-batches that were running, where its sample stands. So is what an operation
refuses in a loss that is written by hand (`out_of_range_by_hand`).

On a GPU the kernel fails instead, and nothing can be read from the device after that; such an error
is left to `lockstep.diagnose`.

Tests: tests/models/test_out_of_range.py
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import RunError, warn_at_caller
from lockstep.models.out_of_range_by_hand import Misuse, misuse_of, odd

_IGNORED_TARGET = -100  # torch's default `ignore_index`
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")  # of torch's cross entropy
_ID = "index out of range in self"  # of torch's embedding


class TargetOutOfBoundsError(IndexError):
    """Raised where torch's loss function is not called, with its text."""

    def __init__(self, target: int, classes: int) -> None:
        super().__init__(f"Target {target} is out of bounds.")
        self.classes = classes


@dataclass(frozen=True)
class _Reading:
    """A number that was used as an index, and the size of what was indexed."""

    number: int
    size: int | None  # None: unknown
    is_target: bool
    ignored: int = _IGNORED_TARGET


def explain_index(
    error: BaseException,
    batches: Sequence[tuple[int, Any]],
    *,
    step: int | None = None,
    samples: Sequence[Sequence[int]] | None = None,
) -> RunError | None:
    """Return an error that names the sample whose target or token id is out of range.

    None if the error is about something else, or the number is in none of the batches.

    Args:
        error: of a forward pass.
        batches: (number of the micro-batch in its step, batch) of this rank.
        step: counted from 1; None in an evaluation.
        samples: the dataset indices of the step's micro-batches, if they are known.
    """
    reading = _reading_of(error)
    misuse = misuse_of(error) if reading is None else None
    for number, batch in batches:
        place = None
        if reading is not None:
            place = _place_of(reading, batch)
        elif misuse is not None:
            place = _place_of_misuse(misuse, batch)
        if place is None:
            continue
        sample = f"sample {place.row} of micro-batch {number}"
        if samples is not None and number < len(samples) and place.row < len(samples[number]):
            sample += f", number {samples[number][place.row]} of the data"
        at = "the evaluation" if step is None else f"step {step}"
        where = f"{at}, {sample}: {place.path}"
        if reading is not None:
            return _error(reading, where)
        assert misuse is not None
        return _error_by_hand(misuse, place, where)
    return None


@dataclass(frozen=True)
class _Place:
    """The place of a number in a batch."""

    row: int  # of the sample
    path: str  # the member, and the position in the sample: targets[9]
    number: float
    is_target: bool  # by the member's name or place


def warn_of_odd_targets(targets: Tensor, batch: Any) -> None:
    """Warn of targets of a binary cross entropy of logits that are not from 0 to 1.

    torch takes them, and so may a loss that means them; it then has no lower bound.
    """
    outside = odd(targets)
    place: _Place | None = None
    for path, tensor, is_target in _targets_first(list(_numbers(batch, "", of_floats=None)), batch):
        wrong = odd(tensor)
        if tensor.numel() == targets.numel() and torch.equal(wrong.flatten(), outside.flatten()):
            place = _placed(path, tensor, wrong, is_target)
            break
    number = float(targets[outside][0])
    where = "" if place is None else f"\n  where: sample {place.row} of a micro-batch, {place.path}"
    warn_at_caller(
        f"a target of binary_cross_entropy_with_logits is {number:g}, not from 0 to 1{where}\n"
        "  why: its targets are probabilities; with others the loss has no lower bound\n"
        "  do: write 1 for yes and 0 for no, and mask what is to count for nothing"
    )


def _error_by_hand(misuse: Misuse, place: _Place, where: str) -> RunError:
    """Return the error about a number that an operation of the user's own loss refuses."""
    where += f", used in {misuse.line}"
    noun = "target" if place.is_target else "number"
    if misuse.of_probabilities:
        return RunError(
            f"{noun} {place.number:g} of a binary cross entropy is not from 0 to 1",
            where=where,
            why="its targets are probabilities",
            fix=(
                "write 1 for yes and 0 for no; numbers of classes belong into cross_entropy, and"
                " what is to count for nothing has to be masked"
            ),
        )
    number = int(place.number)
    size = "the classes" if misuse.size is None else f"{misuse.size} classes"
    most = "their number minus 1" if misuse.size is None else str(misuse.size - 1)
    fix = (
        "give the model as many classes as the data have (vocab_size of a language model,"
        " num_labels of a classifier), or encode the data as the model was trained"
    )
    if number < 0:
        fix = (
            "leave it out by hand where nothing is to be learned: index with"
            f" targets.clamp(min=0), and multiply the losses by (targets != {number})"
        )
    return RunError(
        f"{noun} {number} is out of range: it indexes {size}",
        where=where,
        why=f"a loss that is written by hand takes whole numbers from 0 to {most}",
        fix=fix,
    )


def _place_of_misuse(misuse: Misuse, batch: Any) -> _Place | None:
    """Return where a number stands that an operation refuses; None if it is not in the batch."""
    of_floats = None if misuse.of_probabilities else False
    members = list(_numbers(batch, "", of_floats=of_floats))
    for path, tensor, is_target in _targets_first(members, batch):
        if misuse.concerns(tensor):
            return _placed(path, tensor, misuse.is_outside(tensor), is_target)
    return None


def _placed(path: str, tensor: Tensor, outside: Tensor, is_target: bool) -> _Place:
    """Return the place of the first element of a member that is outside."""
    position = outside.nonzero()[0].tolist()
    row, *rest = position or [0]
    inner = ", ".join(map(str, rest))
    name = path or ("the targets" if is_target else "the token ids")
    number = float(tensor[tuple(position)])
    return _Place(row, f"{name}[{inner}]" if rest else name, number, is_target)


def _error(reading: _Reading, where: str) -> RunError:
    """Return the error about a number at a place."""
    size = reading.size
    number = reading.number
    if not reading.is_target:
        rows = "" if size is None else f" of {size} rows"
        what = f"token id {number} is not in the embedding{rows}"
        why = None if size is None else f"token ids are whole numbers from 0 to {size - 1}"
        fix = (
            "encode the data with the model's own tokenizer, or give the model as many rows as"
            " there are tokens (vocab_size)"
        )
        if number < 0:
            fix = "write a token id in its place: padding is a token, whose target is ignored"
        return RunError(what, where=where, why=why, fix=fix)
    classes = "classes" if size is None else f"{size} classes"
    bounds = "at least 0" if size is None else f"from 0 to {size - 1}"
    why = f"targets are whole numbers {bounds}, or {reading.ignored}, which counts for nothing"
    if number < 0:
        fix = f"write {reading.ignored} in the place of {number} where nothing is to be learned"
    else:
        fix = (
            "give the model as many classes as the data have (vocab_size of a language model,"
            " num_labels of a classifier), or encode the data as the model was trained"
        )
    return RunError(
        f"target {number} is not one of the model's {classes}", where=where, why=why, fix=fix
    )


def _reading_of(error: BaseException) -> _Reading | None:
    """Return which index an error of torch is about; None if it is about none."""
    text = str(error)
    about_target = _TARGET.search(text)
    if about_target is not None:
        number = int(about_target[1])
        classes = getattr(error, "classes", None)
        if classes is not None:
            return _Reading(number, classes, is_target=True)
        for frame in _frames(error, ("cross_entropy", "nll_loss")):
            scores = frame.f_locals.get("input")
            if isinstance(scores, Tensor) and scores.ndim:
                ignored = int(frame.f_locals.get("ignore_index", _IGNORED_TARGET))
                size = scores.shape[1 if scores.ndim > 1 else 0]
                return _Reading(number, size, is_target=True, ignored=ignored)
        return _Reading(number, None, is_target=True)
    if _ID not in text:
        return None
    for frame in _frames(error, ("embedding",)):
        ids = frame.f_locals.get("input")
        weight = frame.f_locals.get("weight")
        if isinstance(ids, Tensor) and isinstance(weight, Tensor) and weight.ndim:
            outside = ids[(ids < 0) | (ids >= weight.shape[0])]
            if outside.numel():
                return _Reading(int(outside[0]), weight.shape[0], is_target=False)
    return None


def _frames(error: BaseException, names: Sequence[str]) -> Iterator[FrameType]:
    """Yield the frames of torch's functions of these names in an error's traceback."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        in_torch = frame.f_globals.get("__name__") == "torch.nn.functional"
        if in_torch and frame.f_code.co_name in names:
            yield frame
        trace = trace.tb_next


_TARGET_NAMES = ("targets", "target", "labels", "label", "y")


def _place_of(reading: _Reading, batch: Any) -> _Place | None:
    """Return where a number stands in a batch; None if it is not there.

    Targets are looked for first in the member that has them by its name or place, token ids first
    in the others.
    """
    members = _targets_first(list(_numbers(batch, "", of_floats=False)), batch)
    for path, tensor, _ in members if reading.is_target else reversed(members):
        outside = tensor == reading.number
        if outside.any():
            return _placed(path, tensor, outside, reading.is_target)
    return None


def _targets_first(
    members: Sequence[tuple[str, Tensor]], batch: Any
) -> list[tuple[str, Tensor, bool]]:
    """Return (path, tensor, whether it is the targets) of members, targets first."""
    if not members:
        return []
    # of a tuple, as TensorDataset gives it, the last member
    last = None if isinstance(batch, Mapping) else members[-1][0]
    marked = [(path, tensor, path in (*_TARGET_NAMES, last)) for path, tensor in members]
    return sorted(marked, key=lambda each: not each[2])


def _numbers(value: Any, path: str, *, of_floats: bool | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of the whole numbers in a batch, or the others, that the host can read.

    Args:
        of_floats: whether to look for floating-point numbers; None: for both.
    """
    if isinstance(value, Tensor):
        fits = of_floats is None or value.is_floating_point() == of_floats
        fits = fits and not value.is_complex() and value.dtype != torch.bool
        if fits and value.device.type == "cpu" and not value.is_nested:
            yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key), of_floats=of_floats)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            inner_path = f"{path}[{number}]" if path else f"member {number}"
            yield from _numbers(inner, inner_path, of_floats=of_floats)
