"""Fourth stop, commit: the whole way of a save, and the moment at which the checkpoint exists.

`save` takes a snapshot through all stops: staged, planned by rank 0, written by all ranks into a draft, which no reader
sees; then rank 0 adds the state, the config and, last, the manifest, in one commit. Before it there is no new
checkpoint, after it a whole one; whatever happens meanwhile, older ones are untouched. `AsyncSaver` does the same while
training goes on.
"""

import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from lockstep.checkpoint.manifest import CONFIG, JSON_LIMIT, STATE, Manifest, verify
from lockstep.checkpoint.plan import CheckpointPlan, Description, describe, merge
from lockstep.checkpoint.posix import locate, storage_at
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.snapshot import Part, Snapshot, Staged, TensorBlock, stage
from lockstep.checkpoint.storage import (
    SHARED_MARK,
    Checkpoint,
    CheckpointPath,
    Directory,
    Location,
    Storage,
    aside_name,
    step_name,
    step_of,
)
from lockstep.checkpoint.write import Format, WrittenFiles, writer_of
from lockstep.errors import RunError, UsageError
from lockstep.groups import once

_FIRST_PAUSE = 0.5  # seconds before the second try; doubled for each further one
_LOOKS, _SECONDS_BETWEEN_LOOKS = 5, 0.2  # a network file system may show a new folder a moment later


@dataclass(frozen=True)
class SaveOptions:
    """How checkpoints of a run are written.

    Attributes:
        format: `sharded`: each rank writes a file of its own blocks; `full`: one file of whole tensors a part, which
            rank 0 gathers, one tensor in memory at a time. Any number of ranks loads either.
            `local`: each rank's shards as they lie in its memory, replicas too; only the same ranks load it again.
        retries: how often a save that the storage refused is tried again, after pauses that double.
        on_retry: called with the error and the seconds of the pause, on rank 0.
    """

    format: Format = "sharded"
    retries: int = 0
    on_retry: Callable[[RunError, float], object] = lambda _error, _seconds: None


def save(
    directory: Directory,
    step: int,
    snapshot: Snapshot,
    *,
    config_yaml: str,
    options: SaveOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> CheckpointPath:
    """Write a checkpoint; every rank of the group calls it. When it returns, the checkpoint is stored, whole.

    Args:
        directory: the folder of checkpoints, made if it is not there, or another storage. All ranks share it, but for
            `full`.
        step: the step after which the snapshot was taken.
        config_yaml: the resolved config of the run, kept beside the state.
        options: unset: sharded, tried once.
        group: the ranks that hold the state; the default group if None. Gloo or NCCL.

    Returns:
        the new checkpoint, `directory/step-00000100`.

    Raises:
        UsageError: the snapshot can't be stored, or a checkpoint of this step exists already and is whole.
        RunError: the storage refused; nothing of the attempt stays behind, older checkpoints are untouched.
            The same error on every rank.
    """
    target = Location(storage_at(directory), step_name(step))
    return save_as(target, step, snapshot, config_yaml=config_yaml, options=options, group=group)


def save_as(
    checkpoint: Checkpoint,
    step: int,
    snapshot: Snapshot,
    *,
    config_yaml: str,
    options: SaveOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> CheckpointPath:
    """Write a checkpoint as `save` does, under a name of the caller's; it must not exist yet."""
    ranks = Ranks(group)
    staged = ranks.run(_failure(step), lambda: stage(snapshot))
    return write_staged(locate(checkpoint), step, staged, config_yaml, options or SaveOptions(), ranks).path


def write_staged(
    target: Location, step: int, staged: Staged, config_yaml: str, options: SaveOptions, ranks: Ranks
) -> Location:
    """Write a snapshot that is staged already; every rank meets the same errors, and tries again alike."""
    pause = _FIRST_PAUSE
    for left in reversed(range(options.retries + 1)):
        try:
            write_once(target, step, staged, config_yaml, options.format, ranks)
            return target
        except RunError as error:
            if not left:
                raise
            if ranks.is_main:
                options.on_retry(error, pause)
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last try returns or raises")


def write_once(target: Location, step: int, staged: Staged, config_yaml: str, format: Format, ranks: Ranks) -> None:
    """Plan, write and commit, once; every rank calls it.

    Raises:
        UsageError: there is something of this name already (a damaged checkpoint is moved aside), or ranks disagree.
        RunError: the storage refused; the same error on every rank, and nothing of the attempt stays.
    """
    doing = _failure(step)
    writer = writer_of(format, staged, ranks, doing)
    decided: list[tuple[CheckpointPlan, Location]] = []  # on rank 0
    with ExitStack() as stack:

        def plan(described: list[Description]) -> list[tuple[str, object]]:
            plan = merge(described)
            shares = writer.plan(plan, described)
            _make_way(target, step)
            draft = stack.enter_context(unfinished(target.storage, target.name))
            decided.append((plan, draft))
            return [(draft.name, share) for share in shares]

        def finish(written: list[WrittenFiles]) -> None:
            plan, draft = decided[0]
            files = writer.finish(draft, written)
            state = Staged({}, staged.state, plan.groups).state_json()
            files[STATE] = draft.put(STATE, _bounded(STATE, state))
            files[CONFIG] = draft.put(CONFIG, config_yaml.encode())
            versions = {"torch": torch.__version__, "python": platform.python_version()}
            manifest = Manifest(step, files, plan.parameters, tuple(plan.parts), versions, writer.raw_ranks)
            target.storage.commit(draft.name, target.name, _bounded("manifest.json", manifest.to_bytes()))

        draft, share = ranks.exchange(doing, lambda: describe(staged, writer.describe()), plan)
        ranks.all_reduce(doing, lambda: writer.write(target.beside(draft), share), finish)


def is_shared(directory: Directory, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks see the storage that rank 0 sees; every rank calls it, all get the same answer.

    Raises:
        RunError: the folder can't be made or written to.
    """
    ranks, storage = Ranks(group), storage_at(directory)
    doing = f"the folder {storage} could not be tried out"

    def appears(draft: str) -> bool:
        for _ in range(_LOOKS):
            if storage.sees(draft):
                return True
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return False

    draft: str | None = None
    try:
        draft = ranks.broadcast(doing, lambda: storage.begin(SHARED_MARK))
        return ranks.all_reduce(doing, partial(appears, draft), all)
    finally:
        if draft is not None and ranks.is_main:
            storage.delete(draft)


def _failure(step: int) -> str:
    return f"the checkpoint of step {step} was not written"


@contextmanager
def unfinished(storage: Storage, name: str) -> Iterator[Location]:
    """Begin a draft; after a failure, nothing of it stays."""
    draft = storage.begin(name)
    try:
        yield Location(storage, draft)
    except BaseException:
        with suppress(Exception):  # a storage that fails at this too has the rest swept later
            storage.delete(draft)
        raise


def _make_way(target: Location, step: int) -> None:
    if not target.storage.exists(target.name):
        return
    if step_of(target.name) is None or not verify(target):
        raise UsageError(
            f"{target} exists already, and a checkpoint is never overwritten",
            fix="resume from it, or move it away",
        )
    target.storage.move(target.name, aside_name(step))  # damaged: kept, but no longer in the way


def _bounded(file: str, data: bytes) -> bytes:
    """Return data that a reader will take; UsageError for more."""
    if len(data) > JSON_LIMIT:
        raise UsageError(
            f"{file} of the checkpoint would have {len(data) >> 20} MiB, and {JSON_LIMIT >> 20} MiB are read at most",
            fix="keep large data in tensors, in `extra`, or in a file of your own",
        )
    return data


# ---- while training goes on ----


class AsyncSaver:
    """Writes checkpoints in the background; every rank makes one, and calls each of its methods at the same points.

    `save` copies the state and returns; a thread writes the copy and commits it, with process groups of its own, so
    that its collectives never meet those of training. One save is in flight at a time; the next waits for it. An error
    in the background is raised on every rank by the same later call: `poll`, `wait` or `save`. Call `wait` before
    another saver is made, and before the process group is destroyed: savers share groups, which go with it.

    Args:
        then: called on rank 0, in the background, after each commit (`rotate`); its error counts as the save's.
    """

    def __init__(self, then: Callable[[CheckpointPath], object] | None = None) -> None:
        connected = dist.is_available() and dist.is_initialized()
        # Two groups: `poll` may run beside the thread's own collectives. Gloo: they send objects, not tensors on a GPU.
        self._control = Ranks(_gloo("control") if connected else None)
        self._writing = Ranks(_gloo("writing") if connected else None)
        self._then = then
        self._save: _BackgroundSave | None = None
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def in_flight(self) -> bool:
        """Whether a save was started whose result no call has returned yet; the same on every rank."""
        return self._save is not None

    def save(
        self,
        directory: Directory,
        step: int,
        snapshot: Snapshot,
        *,
        config_yaml: str,
        options: SaveOptions | None = None,
    ) -> CheckpointPath | None:
        """Start a save; the snapshot's tensors may be changed as soon as this returns. Waits for the one before.

        On CUDA the copy runs on the current stream into pinned memory, and the host does not wait for it.

        Args:
            options: unset: sharded, tried once.

        Returns:
            the checkpoint of the save before, if that had not been returned yet.

        Raises:
            UsageError: the snapshot can't be stored; as in `save`.
            RunError: the save before failed.
        """
        before = self.wait()
        staged, copied = self._control.run(_failure(step), lambda: self._copy(stage(snapshot)))
        target = Location(storage_at(directory), step_name(step))

        def work() -> None:
            if copied is not None:
                torch.cuda.set_device(copied[0])  # a new thread stands on device 0, whichever this rank's is
                copied[1].synchronize()
            write_staged(target, step, staged, config_yaml, options or SaveOptions(), self._writing)
            if self._then is not None and self._writing.is_main:
                self._then(target.path)

        self._save = _BackgroundSave(target, step, work)
        return before

    def poll(self) -> CheckpointPath | None:
        """Return the checkpoint of the save in flight once it is done; None while it runs, or if there is none.

        Costs one small exchange between hosts while a save is in flight, and nothing otherwise.

        Raises:
            RunError: it failed; the same error on every rank.
        """
        if self._save is None:
            return None
        running = self._save.is_running
        if self._control.all_reduce("the background save", lambda: running, any):
            return None
        return self.wait()

    def wait(self) -> CheckpointPath | None:
        """Wait for the save in flight, and return its checkpoint; None if there is none.

        Raises:
            RunError: it failed; the same error on every rank.
        """
        if self._save is None:
            return None
        save, self._save = self._save, None
        self._control.run(_failure(save.step), save.result)
        return save.target.path

    def finish_alone(self) -> None:
        """Wait for the save in flight without asking other ranks: this one is about to end for an error.

        Its process may leave at once, and would take the thread along. The others wait in training for this rank, and
        their threads write on; where they are gone, the thread's own collectives fail.
        """
        if self._save is not None:
            self._save.join()

    def _copy(self, staged: Staged) -> tuple[Staged, tuple[torch.device, torch.cuda.Event] | None]:
        parts = {
            part: Part({name: self._copy_piece(part, name, piece) for name, piece in p.pieces.items()}, p.aliases)
            for part, p in staged.parts.items()
        }
        devices = {piece.tensor.device for p in staged.parts.values() for piece in p.pieces.values()}
        cuda = next((device for device in devices if device.type == "cuda"), None)
        copied = None
        if cuda is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(cuda))
            copied = (cuda, event)
        return Staged(parts, staged.state, staged.groups), copied

    def _copy_piece(self, part: str, name: str, piece: TensorBlock) -> TensorBlock:
        source, key = piece.tensor, (part, name)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer  # kept for the next save: to pin memory anew each time is slow
        buffer.copy_(source, non_blocking=True)
        return piece.with_tensor(buffer)


def _gloo(use: str) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = once(f"checkpoint: {use}", partial(dist.new_group, backend="gloo"))
    return group


class _BackgroundSave:
    """One save at work in a thread. A run that ends or fails lets it finish what it was given."""

    def __init__(self, target: Location, step: int, work: Callable[[], None]) -> None:
        self.target, self.step = target, step
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # carried to the rank's own thread, and raised there
            self._error = error
