"""Mistakes that are planted in Lockstep, or in a program beside it; each case fails unless the
device finds its own.
"""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import bad_numbers, checkpoint
from lockstep.checkpoint.background import AsyncSaver
from lockstep.data.batches import MicroBatch
from lockstep.machine import accelerator
from lockstep.parallel.execution import recomputing
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.trainer import Trainer
from tests.simulated_device import device
from tests.simulated_device.collectives import SimWork
from tests.simulated_device.device import NAME, Event, Stream, Wait
from tests.simulated_device.runs import SETTLED, Tokens, differ, plain, replaced, run, trainer_on


def a_wait_stream_that_is_dropped() -> None:
    """a wait_stream that is dropped"""
    for waits in (True, False):
        device.forget()
        side = Stream()
        batch = torch.ones(4).pin_memory()
        with device.stream(side):
            there = batch.to(NAME, non_blocking=True)
        if waits:
            device.current_stream().wait_stream(side)
        doubled = there * 2
        assert bool(device.races) is not waits
        assert doubled.cpu().eq(2).all().item() is waits


def unmarked(steps: list[list[Wait]]) -> list[Wait]:
    return [wait for step in steps[SETTLED:] for wait in step if "# host waits" not in wait.text]


def a_loss_that_is_read_in_each_step() -> None:
    """.item() in each step"""

    def read(trainer: Trainer) -> None:
        before = trainer.step._advance

        def advance(samples: int) -> None:
            next(iter(trainer.placed.parameters.values())).sum().item()
            before(samples)

        trainer.step._advance = advance  # type: ignore[method-assign]

    assert not unmarked(plain().waits)
    assert {wait.kind for wait in unmarked(run(change=read).waits)} == {"aten::_local_scalar_dense"}


def a_number_that_is_copied_in_each_step() -> None:
    """torch.tensor(number, device=…) in each step"""

    def copy(value: Any, on: torch.device) -> torch.Tensor:
        return torch.as_tensor(
            float("inf") if value is None else 0.0, dtype=torch.float64, device=on
        )

    with replaced(bad_numbers, "_on_device", copy):
        assert {wait.kind for wait in unmarked(run().waits)} == {"copy to the device"}


def a_pinned_buffer_that_is_overwritten() -> None:
    """a pinned buffer that is overwritten early"""
    buffer = torch.empty(2, 16, dtype=torch.int64, pin_memory=True)

    def reuse(batch: Any, on: torch.device) -> Any:
        moved = {}
        for name, value in batch.items():
            moved[name] = buffer.copy_(value).to(on, non_blocking=True)
        return moved

    from lockstep.data import loader

    right = plain()
    with replaced(loader, "move", reuse):
        assert differ(run(), right)


def saved_by(change: Callable[[], Any]) -> bool:
    """Return whether a checkpoint in the background holds the values of its step.

    Training goes on only when the thread is done: if it were ahead, its own waits could make a
    missing one good.
    """
    start = AsyncSaver.save

    def save(self: AsyncSaver, *args: Any, **settings: Any) -> Any:
        previous = start(self, *args, **settings)
        self.finish_alone()
        return previous

    with tempfile.TemporaryDirectory() as folder, change(), replaced(AsyncSaver, "save", save):
        trainer = trainer_on(NAME, 3, Path(folder), **{"checkpoint.save_steps": 2})
        trainer.train(Tokens())
        saved = checkpoint.weights(Path(folder) / "checkpoints" / "step-00000002")
    right = plain(steps=2).values
    return all(torch.equal(saved[name], value) for name, value in right.items())


def an_event_that_is_recorded_too_early() -> None:
    """an event that is recorded before the copy"""
    copy = AsyncSaver._copy

    def early(self: AsyncSaver, staged: Any) -> Any:
        event = Event()
        event.record()
        made, copied = copy(self, staged)
        assert copied is not None
        return made, (copied[0], event)

    assert saved_by(lambda: replaced(AsyncSaver, "_copy", copy))
    assert not saved_by(lambda: replaced(AsyncSaver, "_copy", early))


def a_save_that_waits_for_nothing() -> None:
    """a missing synchronize before a save"""
    copy = AsyncSaver._copy
    assert not saved_by(
        lambda: replaced(AsyncSaver, "_copy", lambda self, staged: (copy(self, staged)[0], None))
    )


def a_copy_that_is_read_at_once() -> None:
    """a copy to the host that is read before its event"""

    class Careless(Event):
        def synchronize(self) -> None:
            pass

    def record(on: torch.device, *, timed: bool = False) -> Event:
        event = Careless()
        event.record()
        return event

    with (
        replaced(accelerator, "record_event", record),
        pytest.raises(bad_numbers.RunError, match=r"did not meet|nan"),
    ):
        run()


def _read_on_a_side_stream() -> tuple[Stream, torch.Tensor, torch.Tensor]:
    """Queue a sum of ones on a stream of its own; return that, the ones, and the sum."""
    device.forget()
    side = Stream()
    mine = torch.ones(1000, device=NAME)
    side.wait_stream(device.current_stream())
    with device.stream(side):
        return side, mine, mine.sum()


def memory_that_is_given_out_again() -> None:
    """memory that is freed while another stream reads it"""
    for keeps in (True, False):
        side, mine, total = _read_on_a_side_stream()
        if keeps:
            mine.record_stream(side)  # type: ignore[arg-type]
        del mine
        other = torch.zeros(1000, device=NAME)
        device.current_stream().synchronize()
        device.current_stream().wait_stream(side)
        assert (total.cpu().item() == 1000.0) is keeps
        assert any("read on stream" in race for race in device.races) is not keeps
        assert other is not None


def memory_that_is_written_unseen() -> None:
    """memory that is written again before its reader was seen to have ended"""
    for sees in (True, False):
        side, mine, total = _read_on_a_side_stream()
        end = side.record_event()
        side.run(side.queued)  # by chance it has ended by now
        if sees:
            assert end.query()
        mine.fill_(0.0)
        assert any("read on stream" in race for race in device.races) is not sees
        device.current_stream().wait_stream(side)
        assert total.cpu().item() == 1000.0


def dropout_that_is_drawn_anew() -> None:
    """random numbers that are not restored for a recomputation"""
    right = plain()
    full = {"training.gradient_checkpointing": "full"}
    assert not differ(run(**full), right)
    with replaced(recomputing, "drawing_from", lambda _state, _random_state: nullcontext()):
        assert differ(run(**full), right)


ALONE = [
    a_wait_stream_that_is_dropped,
    a_loss_that_is_read_in_each_step,
    a_number_that_is_copied_in_each_step,
    a_pinned_buffer_that_is_overwritten,
    an_event_that_is_recorded_too_early,
    a_save_that_waits_for_nothing,
    a_copy_that_is_read_at_once,
    memory_that_is_given_out_again,
    memory_that_is_written_unseen,
    dropout_that_is_drawn_anew,
]


# ---- on two ranks ----


def a_collective_on_another_stream() -> None:
    """a collective that does not wait for the stream that made its tensor"""
    for waits in (True, False):
        device.forget()
        side = Stream()
        with device.stream(side):
            gradient = torch.ones(8, device=NAME) * 2
        if waits:
            device.current_stream().wait_stream(side)
        dist.all_reduce(gradient)
        assert gradient.cpu().eq(4).all().item() is waits
        assert bool(device.races) is not waits
        dist.barrier()


def a_collective_that_nobody_waits_for() -> None:
    """the step's own sums, read without Work.wait"""

    def total() -> float:
        device.forget()
        sums = LossAccumulator(2, torch.device(NAME), shared=True)
        loss = Loss(torch.ones((), device=NAME), 1, 4)
        sums.add(MicroBatch(dist.get_rank(), None, True), loss)
        return float(sums.totals()[0])

    assert total() == 2.0
    assert not device.races

    def careless(self: LossAccumulator) -> None:
        self.start_reduce()
        self._work = None

    with replaced(LossAccumulator, "_finish", careless):
        total()
    assert device.races
    dist.barrier()


def collectives_in_another_order() -> None:
    """collectives in another order on one rank"""
    a = torch.ones(4, device=NAME)
    b = torch.ones(8, device=NAME)
    calls = [a, b] if dist.get_rank() == 0 else [b, a]
    device.forget()
    works: list[Any] = [dist.all_reduce(each, async_op=True) for each in calls]
    assert all(isinstance(work, SimWork) for work in works)
    found = []
    for each, work in zip(calls, works, strict=True):
        work.wait()
        try:
            each.cpu()
        except RuntimeError as error:
            found.append(str(error))
    assert any("NCCL would hang" in text for text in found), found


def a_tensor_of_the_host() -> None:
    """a tensor of the host among those of the device"""
    with pytest.raises(AssertionError, match="no tensors of the host"):
        dist.all_gather([torch.empty(2) for _ in range(2)], torch.ones(2, device=NAME))


TOGETHER = [
    a_collective_on_another_stream,
    a_collective_that_nobody_waits_for,
    a_tensor_of_the_host,
    collectives_in_another_order,
]
