"""Writes and reads the files of a run directory. Does not import torch.

    runs/NAME/config.yaml  metrics.jsonl  events.jsonl  lock.json  checkpoints/  logs/rank-0.log …
              tensorboard/  media/

Each line is one JSON object, written by one `write` to a file opened for appending. A killed
process therefore leaves whole lines and at most one broken last line, which readers skip and the
next writer ends. A full disk takes a line whole or not at all.

Tests: tests/monitor/test_monitor.py, tests/report/test_report.py
"""

import errno
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.errors import UsageError
from lockstep.files.paths import local_path
from lockstep.run_directory import run_files
from lockstep.run_directory.run_files import (
    LeftOutError,
    Note,
    create_file,
    is_file,
    open_file,
    parse_object,
    read_object,
    replace_file,
)

if TYPE_CHECKING:
    from torch import Tensor

# a 0-dim tensor on a GPU until it is read, a plain number elsewhere
Scalar: TypeAlias = "Tensor | float"

_LONGEST_LINE = 4096  # bytes of a line that is expected
_MOST_OF_RANKS = 16 << 20  # bytes of ranks.json; one of 10,000 ranks has less than one


@dataclass
class StepRecord:
    """One step, as the loop yields it and `metrics.jsonl` stores it.

    On a GPU `loss`, `grad_norm`, `tokens`, `tokens_read` and `clipped` are 0-dim tensors until they
    are read: reading one (`float(record.loss)`) waits for the device. On the CPU they are plain
    numbers.
    """

    step: int
    loss: Scalar  # mean over the valid targets of the global batch
    grad_norm: Scalar  # global 2-norm before clipping
    lr: float
    samples: int  # in this step, over all ranks
    tokens: Scalar  # valid targets in this step, over all ranks
    # token ids in this step, over all ranks; 0 for other data; None: as `tokens`
    tokens_read: "Scalar | None" = None
    epoch: int = 0
    # The fraction that clipping changed: 1 or 0 (norm), of elements (value), of units (adaptive).
    clipped: "Scalar | None" = None
    # how its numbers were bad at first, where they were good when computed again
    recomputed: str | None = None
    skipped: bool = False  # no update was made: overflow under fp16, or an anomaly
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    # tokens that were read; rows of data without token ids have neither this nor the next
    tokens_per_second: float = 0.0
    targets_per_second: float = 0.0  # of these, valid targets
    memory_bytes: int = 0
    loss_scale: float | None = None
    time: float = field(default_factory=time.time)  # seconds since the Unix epoch
    skipped_steps: int | None = None  # in this process, so far
    # The following are over ranks, about once a second at most; a spread is [minimum, median,
    # maximum, rank of the maximum]. phase → spread of seconds per step; of evaluation and
    # checkpoint: in total
    phases: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None  # allocated, reserved, peak, host, total → spread of bytes
    own_seconds: list[float] | None = None  # each rank's step without waiting for other ranks
    gpu_utilisation: Any = None  # spread of the fraction of time in which a kernel ran
    flops_per_second: float | None = None  # over all ranks
    mfu: float | None = None  # model FLOPs per second over the devices' peak
    hfu: float | None = None  # the same including recomputed activations
    gradient_norms: dict[str, float] | None = None  # layer → 2-norm of its gradient before clipping

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers; waits for the device if a field is still a tensor."""
        return {name: plain(value) for name, value in vars(self).items() if value is not None}


def plain(value: Any) -> Any:
    """Convert `value` to JSON data.

    Tensors and arrays of one element become numbers, nan and inf become strings.
    """
    if type(value) in (int, str, bool):
        return value
    if hasattr(value, "item"):
        value = value.item()  # host waits for the device
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class RunDirectory:
    """The folder of one run, and the paths in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = local_path(path, "the run directory")
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.media = path / "media"
        self.tensorboard = path / "tensorboard"

    def create(self) -> None:
        """Create the folder and `logs/`. Raises UsageError: it cannot be created or written to."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".write-test-{secrets.token_hex(8)}"
            create_file(probe, b"")
            probe.unlink()
        except OSError as error:
            text = f"the run directory {self.path} can't be written"
            why = f"{type(error).__name__}: {error.strerror}"
            raise UsageError(
                text, why=why, fix="choose another with --output-dir DIR (in Python output_dir=…)"
            ) from None

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add the record of a step or an evaluation."""
        append_line(self.metrics, row)

    def append_event(self, kind: str, **what: Any) -> None:
        """Add an event that happened now."""
        append_line(self.events, {"kind": kind, "time": time.time(), **what})

    def write_ranks(self, table: Mapping[str, Sequence[float]], step: int) -> None:
        """Replace `ranks.json`: the newest measurements of all ranks.

        It maps names to values by rank; nan is null.
        """
        values = {
            name: [v if math.isfinite(v) else None for v in column]
            for name, column in table.items()
        }
        replace_file(self.path / "ranks.json", json.dumps({"measured_at": step, **values}))

    def read_ranks(self) -> dict[str, Any]:
        """Return what `write_ranks` wrote last; empty if there is nothing."""
        try:
            return read_object(self.path, "ranks.json", limit=_MOST_OF_RANKS)
        except OSError:
            return {}

    @property
    def recorded_step(self) -> int:
        """Return the last step that the metrics have; 0 if there is none."""
        rows = last_lines(self.metrics, 50)
        return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all whole rows of the metrics."""
        return list(read_lines(self.metrics))

    def read_events(self) -> list[dict[str, Any]]:
        """Return all whole rows of the events."""
        return list(read_lines(self.events))

    def drop_after(self, step: int) -> float:
        """Drop metrics of steps after `step`: the run resumes there and writes them again.

        Return the seconds that are lost with them: between the last row that is kept and the last
        one.
        """
        if not is_file(self.path, self.metrics.name):
            return 0.0
        kept_until = None
        until = None
        kept = self.metrics.with_name(f".{self.metrics.name}.tmp-{secrets.token_hex(8)}")
        try:
            with kept.open("x", encoding="utf-8") as file:
                # one at a time: a long run has gigabytes of them
                for row in read_lines(self.metrics):
                    at = row.get("step", 0)
                    until = row.get("time", until)
                    if isinstance(at, int | float) and at <= step:
                        file.write(json.dumps(row) + "\n")
                        kept_until = until
            kept.replace(self.metrics)
        finally:
            kept.unlink(missing_ok=True)
        if isinstance(until, int | float) and isinstance(kept_until, int | float):
            return max(0.0, until - kept_until)
        return 0.0


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON object as a line.

    The broken line of a killed process stays a line of its own.
    """
    data = (
        json.dumps({key: plain(value) for key, value in row.items()}, default=str) + "\n"
    ).encode()
    append_at_once(path, data, end=b"\n")


def append_at_once(path: Path, data: bytes, *, end: bytes = b"") -> None:
    """Append all of `data`, after the ending `end` that the file must have.

    If that raises OSError, nothing is.
    """
    handle = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
    )
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise LeftOutError(errno.EINVAL, "it is not an ordinary file", str(path))
        size = os.fstat(handle).st_size
        if end and size and os.pread(handle, len(end), max(0, size - len(end))) != end:
            data = end + data
        written = os.write(handle, data)
        if written < len(data):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def last_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last whole lines of a JSON-lines file, at most `count`; none if there is no file.

    Not all of the file is read. Raise an OSError if the system does not open it.
    """
    try:
        with open_file(path.parent, path.name) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - count * _LONGEST_LINE))
            lines = file.read(count * _LONGEST_LINE).splitlines()[-count:]
    except (FileNotFoundError, LeftOutError):
        return []
    return [row for line in lines if (row := parse_object(line)) is not None]


def read_lines(path: Path, note: Note | None = None) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSON-lines file.

    A broken one (the process was killed meanwhile) is skipped.

    `note` is told what else is left out, or raised without it (`run_files.read_lines`).
    """
    for line in run_files.read_lines(path.parent, path.name, note):
        if (row := parse_object(line)) is not None:
            yield row
