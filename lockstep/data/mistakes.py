"""Says what a user's dataset or collate function did wrong, and where.

Tests: tests/data/test_adopt.py, tests/data/test_loader.py
"""

import errno
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lockstep.errors import RunError


def is_users_file(filename: str) -> bool:
    """Return whether a file is of the user's own code: not of a library, nor of Python."""
    return "site-packages" not in filename and "/lib/python" not in filename


def users_line(error: BaseException) -> str | None:
    """Return the deepest line of a traceback in the user's own code.

    It has file:line, function and text.
    """
    package = os.path.dirname(__file__)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(f.filename) != package
    ]
    own = [frame for frame in frames if is_users_file(frame.filename)]
    if not (own or frames):
        return None
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}" + (
        f": {frame.line}" if frame.line else ""
    )


def reason(error: BaseException) -> str:
    """Return the class of an error and the first line of its message.

    An error of one of torch's workers stands for its cause, whose class and message are returned.
    """
    text = str(error)
    # its last line that is not indented
    if text.startswith("Caught ") and "Original Traceback" in text:
        return [line for line in text.splitlines() if line.strip() and not line.startswith(" ")][-1]
    return f"{type(error).__name__}: {text}".splitlines()[0]


_FULL = "unable to allocate shared memory"  # of torch, in the worker that sends a batch
_MORE = (
    "give /dev/shm more space (containers get 64 MB: docker run --shm-size=8g, or --ipc=host; in"
    " Kubernetes an emptyDir of medium Memory on /dev/shm), or set data.num_workers: 0"
)

_UNEQUAL = "equal size"  # of `default_collate`
_PAD = (
    "pad or cut them to one size in the dataset, or give a DataLoader with a collate_fn that pads:"
    " torch.nn.utils.rnn.pad_sequence, transformers.DataCollatorWithPadding(tokenizer); or use"
    " batch_size: 1"
)
_SAME_KINDS = (
    "let each sample hold the same keys, and tensors, arrays, numbers or text under them (leave out"
    " what is None), or give a DataLoader with a collate_fn that makes a batch of such samples"
)


def advice(error: BaseException) -> str | None:
    """Return what to do about an error of torch while data are read, if that is known."""
    if _UNEQUAL in str(error):
        return _PAD
    no_semaphores = (
        isinstance(error, OSError) and error.errno == errno.ENOSPC and _calls_semaphores(error)
    )
    return _MORE if _FULL in str(error) or no_semaphores else None


def _calls_semaphores(error: BaseException) -> bool:
    """Return whether the error is about the locks that processes share, which live in /dev/shm."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "multiprocessing" in frames[-1].filename


def workers_not_started(error: OSError) -> BaseException:
    """Return the error of data workers that can't be started.

    `error` itself if the shared memory is not full.
    """
    if error.errno != errno.ENOSPC:
        return error
    what = "the data workers can't be started: there is no space left in /dev/shm"
    return RunError(what, where="the training or validation data", why=reason(error), fix=_MORE)


def collate_by_default(samples: Sequence[Any], names: Callable[[], Sequence[str]]) -> Any:
    """Return torch's `default_collate` of samples.

    A RunError says which of them do not fit together, and in what.

    `names` returns what the samples are called in that message.
    """
    try:
        return default_collate(list(samples))
    except Exception as error:
        misfit = _misfit(samples, names(), "")
        if misfit is None:
            raise
        why = f"without a collate_fn the samples of a micro-batch are stacked ({reason(error)})"
        of_sizes = "of shape" in misfit or "of length" in misfit
        fix = _PAD if of_sizes else _SAME_KINDS
        raise RunError(
            f"samples do not fit together: {misfit}", where="the data", why=why, fix=fix
        ) from error


def _misfit(values: Sequence[Any], names: Sequence[str], path: str) -> str | None:
    """Say how two values differ in what has to be alike.

    `path` leads to them inside their samples.
    """
    here = f"sample{path}"
    for value, name in zip(values, names, strict=True):
        if _form(value) != _form(values[0]):
            return f"{here} is {_form(values[0])} in {names[0]}, and {_form(value)} in {name}"
    if isinstance(values[0], Mapping):
        parts: dict[str, list[Any]] = {
            f"[{key!r}]": [value[key] for value in values] for key in values[0]
        }
    elif isinstance(values[0], list | tuple):
        parts = {
            f"[{index}]": list(column) for index, column in enumerate(zip(*values, strict=True))
        }
    elif isinstance(values[0], torch.Tensor | np.ndarray | np.generic | int | float | str | bytes):
        return None
    else:
        return f"{here} is {_form(values[0])}, which can't be stacked"
    misfits = (_misfit(column, names, path + part) for part, column in parts.items())
    return next((misfit for misfit in misfits if misfit is not None), None)


def _form(value: Any) -> str:
    """Return what has to be alike to be stacked, in words."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of length {len(value)}"
    return (
        "a number" if isinstance(value, int | float | np.generic) else f"a {type(value).__name__}"
    )
