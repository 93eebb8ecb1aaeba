"""Makes steps of data that can only be iterated.

Every rank iterates all data and keeps its micro-batches, so that a step is the same on any number of ranks. A dataset
with `rank_sharded = True` reads a different stream on each rank; ranks whose stream has ended run dummies with weight
zero. Items are read with generators seeded by (seed, epoch, position), as an uninterrupted run does.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from lockstep.data.batches import Assign, MicroBatch, StepBatches, batch_length, known_length, move
from lockstep.data.loader import users_line
from lockstep.data.order import preserve_states, seed_from, set_epoch
from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.heartbeat import went_forward


class IterableSteps:
    """Iterates over the steps `start_step` … `stop_step` − 1 of an iterable; see `adopt` for further arguments.

    The `iterable`, of samples, or (`ready`) of collated batches, is iterated again each epoch, after `set_epoch(epoch)`
    if it has that method, until it yields nothing (a generator). `state` is a `state_dict` from a step before
    `start_step` (unset: step 0); those between are read and discarded. For a rank-sharded iterable, `any_left` returns
    whether any rank passes True; all ranks call it, once per step.

    A UsageError is raised for an empty iterable, or a state that JSON can't hold, and a RunError, which names the item,
    if the user's code raises.
    """

    def __init__(
        self, iterable: Iterable[Any], batch_size: int, global_batch_size: int, assign: Assign, *, start_step: int,
        stop_step: int | None, seed: int, device: torch.device | str, ready: bool = False, epochs: int | None = None,
        wanted: bool = True, state: dict[str, Any] | None = None, any_left: Callable[[bool], bool] | None = None,
        notice: str | None = None,
    ) -> None:  # fmt: skip
        self._iterable, self._assign, self._seed, self._device = iterable, assign, seed, torch.device(device)
        self._start, self._stop, self._epochs = start_step, stop_step, epochs
        self._batch_size, self._micro_batches = 1 if ready else batch_size, global_batch_size // batch_size
        self._ready, self._wanted, self._any_left = ready, wanted, any_left
        self._stream: Stream | None = None
        self._latest: tuple[list[Any], int, int] | None = None  # piece, step, index: for dummies
        self.rank_sharded = any_left is not None
        self.notice = notice  # a line to log at the start
        if self.rank_sharded:
            self.notice = "the data are sharded by rank: the content of a step depends on the number of ranks, so runs "
            self.notice += "on different numbers of ranks are different trainings"
        self._state: dict[str, Any] = {"step": 0, "epoch": 0, "position": 0, "iterable": None, **(state or {})}
        if self._state["step"] > start_step:
            what = f"the state of the data is that of step {self._state['step']}, after step {start_step}"
            why = "the data have gone further than the run; they are restored together, from one checkpoint"
            raise UsageError(what, why=why)

    @property
    def steps_per_epoch(self) -> int | None:
        count = known_length(self._iterable)
        if count is None or self.rank_sharded:  # a rank does not know the longest stream's length
            return None
        return -(-count // (self._batch_size * self._micro_batches))

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, where a run resumed after the last yielded step has to start reading.

        That is the position, or the start of the epoch (`set_epoch` alone), or of the data (neither, or rank-sharded).
        """
        return dict(self._state)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __iter__(self) -> Iterator[StepBatches]:
        try:
            for batches in self._all_steps():
                if batches.step >= self._start:
                    yield batches
        finally:
            self.close()

    def _all_steps(self) -> Iterator[StepBatches]:
        """Yield all steps from the state's on; those before `start_step` have no data."""
        step, epoch = int(self._state["step"]), int(self._state["epoch"])
        position, inner = int(self._state["position"]), self._state["iterable"]
        while (self._epochs is None or epoch < self._epochs) and (self._stop is None or step < self._stop):
            # Ranks that read different streams draw different random numbers.
            key = self._assign(self._micro_batches)[0][0] if self.rank_sharded else -1
            self._stream = Stream(self._iterable, self._seed, epoch, position, inner, key)
            if not self._any(self._stream.more):
                if step == 0:
                    what = f"the {type(self._iterable).__name__} is empty: there is nothing to train on"
                    raise UsageError(what, fix="give it batches, or check what it reads")
                return
            last = False
            while not last and (self._stop is None or step < self._stop):
                batches = self._step(self._stream, step, epoch)
                last = batches.last_of_epoch
                step += 1
                stream = self._stream
                if self.rank_sharded:
                    pass  # each rank has another position; a checkpoint holds one state for all
                elif stream.stateful and not last:
                    state = {"step": step, "epoch": epoch, "position": stream.position, "iterable": stream.state}
                    self._state = state
                elif last and (stream.stateful or stream.has_epochs):
                    self._state = {"step": step, "epoch": epoch + 1, "position": 0, "iterable": None}
                yield batches
            epoch, position, inner = epoch + 1, 0, None

    def _any(self, more: bool) -> bool:
        return more if self._any_left is None else self._any_left(more)

    def _step(self, stream: "Stream", step: int, epoch: int) -> StepBatches:
        if self.rank_sharded:
            count, assigned = self._micro_batches, self._assign(self._micro_batches)
            pieces = stream.take(sum(real for _, real in assigned), self._batch_size)
            waiting, shared = iter(pieces), []
            for index, real in assigned:
                piece = next(waiting, None) if real else None
                if piece is not None:
                    self._latest = (piece, step, index)
                if self._latest is None:
                    what = "this rank's share of the data is empty"
                    why = "a rank whose stream has ended repeats its latest batch, with weight zero; it had none"
                    raise RunError(what, where=f"step {step}", why=why, fix="give each rank at least one batch")
                shared.append((self._latest, piece is not None))
        else:
            pieces = stream.take(self._micro_batches, self._batch_size)
            count = len(pieces)
            shared = [((pieces[index], step, index), real) for index, real in self._assign(count)]
        mine = [self._micro_batch(*source, real) for source, real in shared] if step >= self._start else []
        samples = sum(batch_length(piece[0]) if self._ready else len(piece) for piece in pieces)
        return StepBatches(step, epoch, count, samples, not self._any(stream.more), mine)

    def _micro_batch(self, piece: list[Any], step: int, index: int, real: bool) -> MicroBatch:
        batch: Any = None
        if self._wanted and self._ready:
            batch = piece[0]
        elif self._wanted:
            try:
                with preserve_states():
                    seed_from("collate", self._seed, step, index)
                    batch = default_collate(piece)
            except Exception as error:
                what = f"collating micro-batch {index} of step {step} failed"
                raise RunError(what, where=users_line(error), why=f"{type(error).__name__}: {error}") from error
        return MicroBatch(index, batch if self._device.type == "cpu" else move(batch, self._device), real)


class Stream:
    """Reads one epoch of an iterable, one item ahead, to detect its end in time.

    `position` items were read before, which `state`, the iterable's own `state_dict`, includes; `key` distinguishes the
    random numbers of ranks that read different streams.
    """

    def __init__(self, iterable: Any, seed: int, epoch: int, position: int, state: Any, key: int) -> None:
        self._iterable = iterable
        self._keys = ("iterable", seed, epoch, key)
        self._ahead: list[Any] = []
        self.position = position  # number of items returned
        self.state: Any = state  # the iterable's own, before the item that was read ahead
        self.stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
        has_epochs = [set_epoch(holder, epoch) for holder in (iterable, getattr(iterable, "dataset", None))]
        self.has_epochs = any(has_epochs)
        if state is not None:
            iterable.load_state_dict(copy.deepcopy(state))
        with preserve_states():
            seed_from(*self._keys, "start")
            self._iterator: Iterator[Any] = self._guarded(lambda: iter(iterable))
            self._pull()

    @property
    def more(self) -> bool:
        return bool(self._ahead)

    def take(self, count: int, size: int) -> list[list[Any]]:
        """Return up to `count` pieces of `size` items; the last may be shorter."""
        pieces: list[list[Any]] = []
        with preserve_states():
            while self._ahead and len(pieces) < count:
                piece: list[Any] = []
                while self._ahead and len(piece) < size:
                    piece += self._ahead
                    self.position += 1
                    if len(piece) == size and len(pieces) == count - 1:
                        self._keep_state()
                    self._pull()
                pieces.append(piece)
        return pieces

    def close(self) -> None:
        """Release the iterator, which ends a generator and the workers of a DataLoader that does not keep them."""
        self._iterator = iter(())

    def _pull(self) -> None:
        seed_from(*self._keys, self.position)
        self._ahead = self._guarded(lambda: list(itertools.islice(self._iterator, 1)))
        went_forward()

    def _keep_state(self) -> None:
        if not self.stateful:
            return
        self.state = copy.deepcopy(self._iterable.state_dict())
        try:
            json.dumps(self.state)
        except TypeError as error:
            what = f"the state_dict of {type(self._iterable).__name__} can't be saved"
            why = f"a checkpoint holds numbers, texts, lists and dicts of such: {error}"
            fix = "return such from state_dict, or leave it out: a resumed run then reads again what it had read"
            raise UsageError(what, why=why, fix=fix) from None

    def _guarded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except LockstepError:
            raise
        except Exception as error:
            what = f"item {self.position} of the {type(self._iterable).__name__} failed in epoch {self._keys[2]}"
            where = users_line(error)
            raise RunError(what, where=where, why=f"{type(error).__name__}: {error}".splitlines()[0]) from error
