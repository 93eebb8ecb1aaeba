"""Saves checkpoints in the background, while training goes on.

    training   step 100 → copy the state → step 101 → step 102 → … → poll: is it done?
    thread                 └ write the copy → commit it

Tests: tests/checkpoint/test_background.py, tests/checkpoint/test_ranks.py
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from lockstep.checkpoint.commit import SaveOptions, failure_of, write_staged
from lockstep.checkpoint.posix import storage_at
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.snapshot import Part, Snapshot, Staged, TensorBlock, stage
from lockstep.checkpoint.storage import CheckpointPath, Directory, Location, step_name
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.machine import accelerator


class _SaveInFlight(NamedTuple):
    """A save that a thread writes."""

    target: Location
    step: int
    thread: threading.Thread


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
        self._groups: tuple[Ranks, Ranks] | None = None  # for control, and for writing
        self._then = then
        self._save: _SaveInFlight | None = None
        self._error: BaseException | None = None  # of the save in flight
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}  # (part, name) → its copy

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
        staged, copied = control.run(failure_of(step), lambda: self._copy(stage(snapshot)))
        target = Location(storage_at(directory), step_name(step))
        self._error = None

        def work() -> None:
            """Write the staged data in a thread of its own; `wait` raises what goes wrong."""
            try:
                if copied is not None:
                    device, all_copied = copied
                    accelerator.select(device)  # a new thread begins with device 0
                    all_copied.synchronize()  # host waits for the copy, in this thread
                with own_heartbeat().background_write():
                    write_staged(
                        target, step, staged, config_yaml, options or SaveOptions(), writing
                    )
                    if self._then is not None and writing.is_main:
                        self._then(target.path)
            except BaseException as error:  # `wait` raises it in the rank's own thread
                self._error = error

        # The thread is not a daemon: a run that ends or fails lets it finish.
        thread = threading.Thread(target=work, name=f"checkpoint-{step}")
        self._save = _SaveInFlight(target, step, thread)
        thread.start()
        return previous

    def _meet(self) -> tuple[Ranks, Ranks]:
        """Return the ranks for control and for writing; the first save makes their groups.

        There are two, because `poll` may run beside the thread's collectives. They are groups of
        Gloo, because they send Python objects. Ranks that start, or start again, don't wait for
        them.
        """
        if self._groups is None:
            control = Ranks.on_gloo(f"{self._use}: control")
            self._groups = control, Ranks.on_gloo(f"{self._use}: writing")
        return self._groups

    def poll(self) -> CheckpointPath | None:
        """Return the checkpoint of the save in flight once it is done.

        None while it runs, or if there is none.
        """
        if self._save is None:
            return None
        control, _ = self._meet()
        runs_here = self._save.thread.is_alive()
        if control.all_reduce("the background save", lambda: runs_here, any):
            return None
        return self.wait()

    def wait(self) -> CheckpointPath | None:
        """Wait for the save in flight, and return its checkpoint; None if there is none."""
        if self._save is None:
            return None
        save = self._save
        self._save = None

        def result() -> None:
            save.thread.join()
            if self._error is not None:
                raise self._error

        control, _ = self._meet()
        with own_heartbeat().awaiting_write():
            control.run(failure_of(save.step), result)
        return save.target.path

    def finish_alone(self) -> None:
        """Wait for the save in flight without a collective, on a rank that ends with an error.

        Other ranks write on.
        """
        if self._save is not None:
            with own_heartbeat().awaiting_write():
                self._save.thread.join()

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
