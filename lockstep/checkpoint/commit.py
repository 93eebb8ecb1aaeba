"""Save a checkpoint: before the commit there is no new one, after it a whole one.

Older ones are never touched.
"""

import itertools
import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checkpoint.manifest import (
    CONFIG,
    GROUPS_KEY,
    JSON_LIMIT,
    STATE,
    Manifest,
    verify,
)
from lockstep.checkpoint.posix import storage_at
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.snapshot import (
    CheckpointPlan,
    Description,
    Part,
    Snapshot,
    Staged,
    TensorBlock,
    describe,
    merge,
    stage,
)
from lockstep.checkpoint.storage import (
    CheckpointPath,
    Directory,
    FileInfo,
    Location,
    Storage,
    aside_name,
    step_name,
    step_of,
)
from lockstep.checkpoint.write import Format, WrittenFiles, writer_of
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat.writer import own_heartbeat, went_forward
from lockstep.machine import accelerator
from lockstep.process_group.collectives import create_once, new_group

_log = logging.getLogger(__name__)

# the name of the draft that `is_shared` makes, to find out whether ranks see one storage
SHARED_MARK = ".shared"
_FIRST_PAUSE = 0.5  # seconds before the second try; doubled for each further one
# a network file system may show a new folder a moment later
_ATTEMPTS = 5
_SECONDS_BETWEEN_ATTEMPTS = 0.2


@dataclass(frozen=True)
class SaveOptions:
    """The format of checkpoints (see `write`), and the retries of a save."""

    format: Format = "sharded"
    retries: int = 0  # tries of a save that the storage refused, after pauses that double
    # seconds of the pause; on rank 0
    on_retry: Callable[[RunError, float], object] = lambda _error, _seconds: None
    sets_aside: bool = False  # a checkpoint of the same step gets another name; else it is an error


def save(
    directory: Directory,
    step: int,
    snapshot: Snapshot,
    *,
    config_yaml: str,
    options: SaveOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> CheckpointPath:
    """Write the checkpoint `directory/step-00000100`, and return it once it is committed.

    Every rank calls it.

    All ranks share the `directory`, which is created if missing, except in the format `full`. The
    ranks of `group` (Gloo or NCCL) hold the state; None: those of the default group.

    A UsageError is raised if the snapshot can't be stored, or a whole checkpoint of this step
    exists; a RunError, on every rank, if the storage failed: the draft is deleted, and older
    checkpoints are untouched.
    """
    ranks = Ranks(group)
    target = Location(storage_at(directory), step_name(step))
    staged = ranks.run(_failure(step), lambda: stage(snapshot))
    write_staged(target, step, staged, config_yaml, options or SaveOptions(), ranks)
    return target.path


def write_staged(
    target: Location,
    step: int,
    staged: Staged,
    config_yaml: str,
    options: SaveOptions,
    ranks: Ranks,
) -> None:
    """Write a staged snapshot, with retries; every rank raises the same errors."""
    for attempt in itertools.count():
        try:
            return write_once(target, step, staged, config_yaml, options, ranks)
        except RunError as error:
            if attempt == options.retries:
                raise
            pause = _FIRST_PAUSE * 2**attempt
            if ranks.is_main:
                options.on_retry(error, pause)
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            went_forward()  # the pause is meant: no rank hangs
            time.sleep(min(left, 1.0))


def write_once(
    target: Location,
    step: int,
    staged: Staged,
    config_yaml: str,
    options: SaveOptions,
    ranks: Ranks,
) -> None:
    """Plan, write and commit on every rank, without retries; delete the draft after a failure.

    Rank 0 decides who writes what and begins a draft; every rank writes its share into it; rank 0
    adds the files beside the tensors and makes the checkpoint visible.
    """
    failure = _failure(step)
    writer = writer_of(options.format, staged, ranks, failure)
    decided: list[tuple[CheckpointPlan, Location]] = []  # on rank 0
    with ExitStack() as stack:

        def decide(described: list[Description]) -> list[tuple[str, object]]:
            """Decide on rank 0 who writes what, and begin the draft; return each rank's share."""
            plan = merge(described)
            shares = writer.plan(plan, described)
            if target.storage.exists(target.name) and not options.sets_aside:
                _set_damaged_aside(target, step)
            draft = stack.enter_context(new_draft(target.storage, target.name))
            decided.append((plan, draft))
            return [(draft.name, share) for share in shares]

        def commit(written: list[WrittenFiles]) -> None:
            """Write the files beside the tensors on rank 0, and make the checkpoint visible."""
            plan, draft = decided[0]
            files = writer.finish(draft, written)
            files |= _write_beside(draft, staged.state, plan.groups, config_yaml)
            versions = {"torch": torch.__version__, "python": platform.python_version()}
            manifest = Manifest(
                step, files, plan.parameters, tuple(plan.parts), versions, writer.raw_ranks
            )
            if options.sets_aside and target.storage.exists(target.name):
                _set_older_aside(target, step)
            manifest_json = _within_limit("manifest.json", manifest.to_bytes())
            target.storage.commit(draft.name, target.name, manifest_json)

        draft_name, share = ranks.exchange(
            failure, lambda: describe(staged, writer.describe()), decide
        )
        draft = Location(target.storage, draft_name)
        ranks.all_reduce(failure, lambda: writer.write(draft, share), commit)


def _set_damaged_aside(target: Location, step: int) -> None:
    """Give a damaged checkpoint of this name another one; a UsageError if it is complete."""
    if step_of(target.name) is None or not verify(target):
        fix = (
            "begin with it (in Python: trainer.load_checkpoint), move it away, or name another"
            " folder for this run"
        )
        what = f"{target} exists already, and a checkpoint is never overwritten"
        raise UsageError(what, fix=fix)
    target.storage.move(target.name, aside_name(step))


def _set_older_aside(target: Location, step: int) -> None:
    """Give the older checkpoint of this name another one, and say so."""
    aside = aside_name(step)
    target.storage.move(target.name, aside)
    _log.warning(
        "warning: %s exists already: the older checkpoint is called %s from now on", target, aside
    )


def _write_beside(
    draft: Location, state: dict[str, Any], groups: dict[str, dict[str, Any]], config_yaml: str
) -> dict[str, FileInfo]:
    """Write the state with the optimizers' groups, and the config; return size and checksum."""
    # Floats are exact to the bit; NaN and Infinity are in Python's notation.
    text = json.dumps({**state, GROUPS_KEY: groups}, indent=1, sort_keys=True) + "\n"
    return {
        STATE: draft.put(STATE, _within_limit(STATE, text.encode())),
        CONFIG: draft.put(CONFIG, config_yaml.encode()),
    }


def is_shared(directory: Directory) -> bool:
    """Return whether all ranks see the storage that rank 0 sees, which they can write to.

    Every rank calls it.
    """
    ranks = Ranks()
    storage = storage_at(directory)
    failure = f"the folder {storage} could not be tested"

    def appears(draft: str) -> bool:
        for _ in range(_ATTEMPTS):
            if storage.sees(draft):
                return True
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        return False

    draft: str | None = None
    try:
        draft = ranks.broadcast(failure, lambda: storage.begin(SHARED_MARK))
        return ranks.all_reduce(failure, partial(appears, draft), all)
    finally:
        if draft is not None and ranks.is_main:
            storage.delete(draft)


def _failure(step: int) -> str:
    return f"the checkpoint of step {step} was not written"


@contextmanager
def new_draft(storage: Storage, name: str) -> Iterator[Location]:
    """Begin a draft, and delete it after a failure."""
    draft = storage.begin(name)
    try:
        yield Location(storage, draft)
    except BaseException:
        with suppress(Exception):  # if this fails too, the rest is swept later
            storage.delete(draft)
        raise


def _within_limit(file: str, data: bytes) -> bytes:
    if len(data) > JSON_LIMIT:
        what = (
            f"{file} of the checkpoint would have {len(data) >> 20} MiB, and {JSON_LIMIT >> 20} MiB"
            " are read at most"
        )
        raise UsageError(
            what, fix="keep large data in tensors, in `extra`, or in a file of your own"
        )
    return data


class AsyncSaver:
    """Writes checkpoints in the background.

    Every rank has one, and calls its methods at the same points.

    `save` copies the state and returns; a thread writes the copy and commits it, with process
    groups of its own, so that its collectives never mix with those of training. One save is in
    flight at a time; the next waits for it. An error in the background is raised on every rank by
    the same later call: `poll`, `wait` or `save`. Call `wait` before another saver of the same
    `use` is created, because these share groups, and before the process group is destroyed. Rank 0
    calls `then`, in the background, after each commit; its error counts as an error of the save.
    """

    def __init__(
        self, then: Callable[[CheckpointPath], object] | None = None, *, use: str = "checkpoint"
    ) -> None:
        self._use = use
        self._groups: tuple[Ranks, Ranks] | None = None
        self._then = then
        self._save: tuple[Location, int, threading.Thread] | None = None  # with its step
        self._error: BaseException | None = None  # of the save in flight
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def save(
        self,
        directory: Directory,
        step: int,
        snapshot: Snapshot,
        *,
        config_yaml: str,
        options: SaveOptions | None = None,
    ) -> CheckpointPath | None:
        """Start a save, after the previous one has ended.

        Returns the checkpoint of the previous save, if no call has returned it yet.

        The tensors may be changed as soon as this returns. On an accelerator the copy runs on the
        current stream into pinned memory, and the host does not wait for it.
        """
        previous = self.wait()
        control, writing = self._meet()
        staged, copied = control.run(_failure(step), lambda: self._copy(stage(snapshot)))
        target = Location(storage_at(directory), step_name(step))
        self._error = None

        def work() -> None:
            """Write the staged data in a thread of its own; `wait` raises what goes wrong."""
            try:
                if copied is not None:
                    accelerator.select(copied[0])  # a new thread begins with device 0
                    copied[1].synchronize()  # host waits for the copy, in this thread
                with own_heartbeat().background_write():
                    write_staged(
                        target, step, staged, config_yaml, options or SaveOptions(), writing
                    )
                    if self._then is not None and writing.is_main:
                        self._then(target.path)
            except BaseException as error:  # `wait` raises it in the rank's own thread
                self._error = error

        # The thread is not a daemon: a run that ends or fails lets it finish.
        self._save = (target, step, threading.Thread(target=work, name=f"checkpoint-{step}"))
        self._save[2].start()
        return previous

    def _meet(self) -> tuple[Ranks, Ranks]:
        """Return the ranks for control and for writing; the first save makes their groups.

        There are two, because `poll` may run beside the thread's collectives. They are groups of
        Gloo, because they send Python objects. Ranks that start, or start again, don't wait for
        them.
        """
        if self._groups is None:
            connected = dist.is_available() and dist.is_initialized()
            groups = [
                gloo_group(f"{self._use}: {purpose}") if connected else None
                for purpose in ("control", "writing")
            ]
            self._groups = Ranks(groups[0]), Ranks(groups[1])
        return self._groups

    def poll(self) -> CheckpointPath | None:
        """Return the checkpoint of the save in flight once it is done.

        None while it runs, or if there is none.
        """
        if self._save is None:
            return None
        running = self._save[2].is_alive()
        return (
            None
            if self._meet()[0].all_reduce("the background save", lambda: running, any)
            else self.wait()
        )

    def wait(self) -> CheckpointPath | None:
        """Wait for the save in flight, and return its checkpoint; None if there is none."""
        if self._save is None:
            return None
        target, step, thread = self._save
        self._save = None

        def result() -> None:
            thread.join()
            if self._error is not None:
                raise self._error

        with own_heartbeat().awaiting_write():
            self._meet()[0].run(_failure(step), result)
        return target.path

    def finish_alone(self) -> None:
        """Wait for the save in flight without a collective, on a rank that ends with an error.

        Other ranks write on.
        """
        if self._save is not None:
            with own_heartbeat().awaiting_write():
                self._save[2].join()

    def _copy(self, staged: Staged) -> tuple[Staged, tuple[torch.device, torch.Event] | None]:
        """Copy the tensors to host memory; return them, and the event that ends the copying."""
        device: torch.device | None = None

        def copied(part: str, name: str, block: TensorBlock) -> TensorBlock:
            """Copy one block into the buffer that the save before used for it."""
            nonlocal device
            source = block.tensor
            key = (part, name)
            device = source.device if source.device.type not in ("cpu", "meta") else device
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                pins = accelerator.pins_memory(source.device)
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=pins)
                # kept for the next save, because pinning memory is slow
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
            return block.with_tensor(buffer)

        parts = {
            part: Part(
                {name: copied(part, name, block) for name, block in p.blocks.items()}, p.aliases
            )
            for part, p in staged.parts.items()
        }
        event = None if device is None else (device, accelerator.record_event(device))
        return Staged(parts, staged.state, staged.groups), event


def gloo_group(use: str) -> dist.ProcessGroup | None:
    """Return the group of all ranks for one use, on Gloo; every rank asks for it."""
    group: dist.ProcessGroup | None = create_once(
        f"saver of {use}", partial(new_group, None, backend="gloo")
    )
    return group
