"""Saving while training goes on.

`save` copies the state and returns; a thread writes the copy and commits it, with process groups of its own, so that
its collectives never meet those of training. One save is in flight at a time; the next waits for it. An error in the
background is raised on every rank by the same later call: `poll`, `wait` or `save`.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.checkpoint.commit import not_written
from lockstep.checkpoint.names import step_name
from lockstep.checkpoint.pieces import Part, Piece
from lockstep.checkpoint.saving import Manner, write
from lockstep.checkpoint.snapshot import Snapshot, Staged, stage
from lockstep.checkpoint.together import Ranks
from lockstep.groups import once


class AsyncSaver:
    """Writes checkpoints in the background; every rank makes one, and calls each of its methods at the same points.

    Call `wait` before another is made, and before the process group is destroyed: they share groups, which go with it.

    Args:
        then: run on rank 0, in the background, after each commit (`rotate`); its error counts as the save's.
    """

    def __init__(self, then: Callable[[Path], object] | None = None) -> None:
        connected = dist.is_available() and dist.is_initialized()
        # Two groups: `poll` may run beside the thread's own collectives. Gloo: they send objects, not tensors on a GPU.
        self._control = Ranks(_gloo("control") if connected else None)
        self._writing = Ranks(_gloo("writing") if connected else None)
        self._then = then
        self._save: _Save | None = None
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def in_flight(self) -> bool:
        """Whether a save was started whose result no call has returned yet; the same on every rank."""
        return self._save is not None

    def save(
        self,
        directory: str | Path,
        step: int,
        snapshot: Snapshot,
        *,
        config_yaml: str,
        manner: Manner | None = None,
    ) -> Path | None:
        """Start a save; the snapshot's tensors may be changed as soon as this returns. Waits for the one before.

        On CUDA the copy runs on the current stream into pinned memory, and the host does not wait for it.

        Args:
            manner: unset: sharded, into a folder that all ranks share, tried once.

        Returns:
            the checkpoint of the save before, if that had not been reported yet.

        Raises:
            UsageError: the snapshot can't be stored; as in `save`.
            RunError: the save before failed.
        """
        before = self.wait()
        staged, copied = self._control.agree(not_written(step), lambda: self._copy(stage(snapshot)))
        path = Path(directory) / step_name(step)

        def work() -> None:
            if copied is not None:
                torch.cuda.set_device(copied[0])  # a new thread stands on device 0, whichever this rank's is
                copied[1].synchronize()
            write(path, step, staged, config_yaml, manner or Manner(), self._writing)
            if self._then is not None and self._writing.is_main:
                self._then(path)

        self._save = _Save(path, step, work)
        return before

    def poll(self) -> Path | None:
        """Whether the save in flight is done: its path, once; None while it runs, or if there is none.

        Costs one small exchange between hosts while a save is in flight, and nothing otherwise.

        Raises:
            RunError: it failed; the same error on every rank.
        """
        if self._save is None:
            return None
        running = self._save.is_running
        if self._control.judge("the background save", lambda: running, any):
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for the save in flight; its path, or None if there is none.

        Raises:
            RunError: it failed; the same error on every rank.
        """
        if self._save is None:
            return None
        save, self._save = self._save, None
        self._control.agree(not_written(save.step), save.result)
        return save.path

    def finish_alone(self) -> None:
        """Wait for the save in flight, without a word to other ranks: this one is about to end for an error.

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

    def _copy_piece(self, part: str, name: str, piece: Piece) -> Piece:
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


class _Save:
    """One save at work in a thread. A run that ends or fails lets it finish what it was given."""

    def __init__(self, path: Path, step: int, work: Callable[[], None]) -> None:
        self.path, self.step = path, step
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
