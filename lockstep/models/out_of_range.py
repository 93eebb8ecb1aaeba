"""Says which sample has a target, or a token id, that the model has no class or row for.

torch's loss functions and embeddings raise an IndexError that names the number alone. The number is
looked up in the micro-batches that were running, where its sample stands.

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

from lockstep.errors import RunError

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
    if reading is None:
        return None
    for number, batch in batches:
        place = _place_of(reading, batch)
        if place is None:
            continue
        row, where = place
        sample = f"sample {row} of micro-batch {number}"
        if samples is not None and number < len(samples) and row < len(samples[number]):
            sample += f", number {samples[number][row]} of the data"
        at = "the evaluation" if step is None else f"step {step}"
        return _error(reading, f"{at}, {sample}: {where}")
    return None


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


def _place_of(reading: _Reading, batch: Any) -> tuple[int, str] | None:
    """Return (sample, place in it as text) of a number in a batch; None if it is not there.

    Targets are looked for first in the member that has them by its name or place, token ids first
    in the others.
    """
    members = list(_integers(batch, ""))
    if not members:
        return None

    # of a tuple, as TensorDataset gives it, the last member
    last = None if isinstance(batch, Mapping) else members[-1][0]
    targets_first = sorted(members, key=lambda each: each[0] not in (*_TARGET_NAMES, last))
    for path, tensor in targets_first if reading.is_target else reversed(targets_first):
        positions = (tensor == reading.number).nonzero()
        if not len(positions):
            continue
        row, *rest = positions[0].tolist() or [0]
        inner = ", ".join(map(str, rest))
        name = path or ("the targets" if reading.is_target else "the token ids")
        return row, f"{name}[{inner}]" if rest else name
    return None


def _integers(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of the whole numbers in a batch that the host can read."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if whole and value.device.type == "cpu" and not value.is_nested:
            yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _integers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _integers(inner, f"{path}[{number}]" if path else f"member {number}")
