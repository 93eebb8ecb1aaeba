"""The data of the kill benches, which kill their own rank where they are told to.

CHAOS_COMMIT=RANK:N kills that rank, in its first start, at its Nth operation on a file below
`checkpoints/`: opening, making, renaming, removing (Python's audit events) or syncing; CHAOS_COPY
does so at one on a file of the copies in memory. CHAOS_UPDATE=RANK:N:before kills it before its Nth
update, and CHAOS_UPDATE=RANK:N:after behind it.
"""

import os
import signal
import sys
import threading

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import Dataset

from tests.faults.tiny import Points

__all__ = ["Points", "Tokens"]

_FILES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")


class Tokens(Dataset[dict[str, Tensor]]):
    """96 short sequences for a language model."""

    deterministic = True

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(17) * (index + 1) % 64
        return {"input_ids": tokens[:-1], "targets": tokens[1:]}


class _Countdown:
    """Kills this process when it is called for the last of so many times."""

    def __init__(self, calls: int) -> None:
        self._left = calls
        self._lock = threading.Lock()

    def __call__(self, *_: object) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _arm_files(folder: str, calls: int) -> None:
    count = _Countdown(calls)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _FILES and any(folder in str(argument) for argument in arguments):
            count()

    sync = os.fsync

    def fsync(handle: int) -> None:
        count()
        sync(handle)

    os.fsync = fsync
    sys.addaudithook(hook)


def _armed(name: str) -> list[str]:
    """Return what a variable says after the rank, if this is the rank, in its first start."""
    rank, *rest = os.environ.get(name, "").split(":")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    return rest if is_first and rank == os.environ.get("RANK") else []


if _calls := _armed("CHAOS_COMMIT"):
    _arm_files("/checkpoints/", int(_calls[0]))
if _calls := _armed("CHAOS_COPY"):
    _arm_files("/lockstep-memory-", int(_calls[0]))
if _calls := _armed("CHAOS_UPDATE"):
    _register = (
        register_optimizer_step_pre_hook
        if _calls[1] == "before"
        else register_optimizer_step_post_hook
    )
    _register(_Countdown(int(_calls[0])))
