"""Steps of data that can only be iterated.

Every rank iterates the whole and keeps its share, so that a step is the same on any number of ranks. A dataset with
`rank_sharded = True` reads a stream of its own on each rank; then what a step holds depends on the number of ranks, and
`notice` says so. Streams that end at different times are evened out by dummies that count nothing.

One item is read ahead, to know the end of an epoch in time. Items are read with generators seeded by (seed, epoch,
position), so a resumed run draws what the whole run would have drawn.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from lockstep.data.batches import Assign, MicroBatch, StepBatches, batch_length, known_length, move
from lockstep.data.reader import Collate, users_line
from lockstep.data.seeding import outer_states_kept, seed_from
from lockstep.data.stream import Stream
from lockstep.errors import RunError, UsageError

_Share = tuple[tuple[list[Any], int, int], bool]  # (piece, step, index), real


class IterableSteps:
    """Iterate over the steps `start_step` … `stop_step` − 1 of an iterable.

    Args:
        iterable: of samples, or (`ready`) of batches. Iterated anew each epoch, after `set_epoch(epoch)` if it has
            that. What yields nothing the second time (a generator) ends the steps.
        batch_size, global_batch_size: samples in a micro-batch and in a step; of ready batches only the quotient
            counts, the number of batches in a step.
        assign: M → this rank's micro-batches, in running order.
        stop_step: the first step not taken; None: as far as the data go.
        ready: the items are collated batches.
        epochs: how many times to go through the data; None: until `stop_step`.
        state: what `state_dict` gave in a step before `start_step`. The steps between are read and thrown away; all
            from step 0 without a state.
        any_left: for a rank-sharded iterable: whether any rank passes True; called by all ranks, once a step.
        notice: something about the data to be said at start.

    Raises:
        UsageError: an empty iterable, or a state that JSON can't hold.
        RunError: while iterating: the user's code raised; names the item.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        batch_size: int,
        global_batch_size: int,
        assign: Assign,
        *,
        start_step: int,
        stop_step: int | None,
        seed: int,
        device: torch.device | str,
        ready: bool = False,
        collate_fn: Collate | None = None,
        epochs: int | None = None,
        wanted: bool = True,
        state: dict[str, Any] | None = None,
        any_left: Callable[[bool], bool] | None = None,
        notice: str | None = None,
    ) -> None:
        self._iterable = iterable
        self._batch_size = 1 if ready else batch_size
        self._micro_batches = global_batch_size // batch_size
        self._assign = assign
        self._start, self._stop = start_step, stop_step
        self._seed = seed
        self._device = torch.device(device)
        self._ready = ready
        self._collate: Collate = collate_fn or default_collate
        self._epochs = epochs
        self._wanted = wanted
        self._any_left = any_left
        self._notice = notice
        self._stream: Stream | None = None
        self._latest: tuple[list[Any], int, int] | None = None  # piece, step, index: what a dummy repeats
        self.rank_sharded = any_left is not None
        self._state = self._begin_at(state or {})

    @property
    def steps_per_epoch(self) -> int | None:
        count = known_length(self._iterable)
        if count is None or self.rank_sharded:  # then it is the longest stream's, which this rank does not know
            return None
        return -(-count // (self._batch_size * self._micro_batches))

    @property
    def notice(self) -> str | None:
        if not self.rank_sharded:
            return self._notice
        return (
            "the data are sharded by rank: what a step holds depends on the number of ranks, so runs on different "
            "numbers of ranks are different trainings"
        )

    def state_dict(self) -> dict[str, Any]:
        """From where a run resumed after the step that was yielded last has to read, as JSON; for `state`.

        With a `state_dict` of the iterable's: from just there. With `set_epoch` only: from the start of the epoch. With
        neither, or sharded by rank: from the start of the data.
        """
        return dict(self._state)

    def close(self) -> None:
        """End what the iterable runs, if anything."""
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

    def _begin_at(self, state: dict[str, Any]) -> dict[str, Any]:
        begin = {"step": 0, "epoch": 0, "position": 0, "iterable": None, **state}
        if begin["step"] > self._start:
            raise UsageError(
                f"the state of the data is that of step {begin['step']}, after step {self._start}",
                why="the data have gone further than the run; they are restored together, from one checkpoint",
            )
        return begin

    def _all_steps(self) -> Iterator[StepBatches]:
        """From where the state stands; those before `start_step` come with no data."""
        step, epoch = int(self._state["step"]), int(self._state["epoch"])
        position, inner = int(self._state["position"]), self._state["iterable"]
        while (self._epochs is None or epoch < self._epochs) and (self._stop is None or step < self._stop):
            self._stream = Stream(self._iterable, self._seed, epoch, position, inner, self._key())
            if not self._any(self._stream.more):
                if step == 0:
                    raise UsageError(
                        f"the {type(self._iterable).__name__} is empty: there is nothing to train on",
                        fix="give it batches, or check what it reads",
                    )
                return
            last = False
            while not last and (self._stop is None or step < self._stop):
                batches = self._step(self._stream, step, epoch)
                last = batches.last_of_epoch
                step += 1
                self._note_state(self._stream, step, epoch, last)
                yield batches
            epoch, position, inner = epoch + 1, 0, None

    def _note_state(self, stream: Stream, step: int, epoch: int, last: bool) -> None:
        if self.rank_sharded:
            return  # each rank stands elsewhere; a checkpoint holds one state for all
        if stream.stateful and not last:
            self._state = {"step": step, "epoch": epoch, "position": stream.position, "iterable": stream.state}
        elif last and (stream.stateful or stream.told_epoch):
            self._state = {"step": step, "epoch": epoch + 1, "position": 0, "iterable": None}

    def _key(self) -> int:
        """What tells this rank's random numbers from other ranks': nothing, unless they read unlike streams."""
        return self._assign(self._micro_batches)[0][0] if self.rank_sharded else -1

    def _any(self, more: bool) -> bool:
        return more if self._any_left is None else self._any_left(more)

    def _step(self, stream: Stream, step: int, epoch: int) -> StepBatches:
        if self.rank_sharded:
            count, assigned = self._micro_batches, self._assign(self._micro_batches)
            pieces = stream.take(sum(real for _, real in assigned), self._batch_size)
            shared = self._evened_out(pieces, assigned, step)
        else:
            pieces = stream.take(self._micro_batches, self._batch_size)
            count = len(pieces)
            shared = [((pieces[index], step, index), real) for index, real in self._assign(count)]
        mine = [self._micro_batch(*source, real) for source, real in shared] if step >= self._start else []
        samples = sum(batch_length(piece[0]) if self._ready else len(piece) for piece in pieces)
        return StepBatches(step, epoch, count, samples, not self._any(stream.more), mine)

    def _evened_out(self, pieces: list[list[Any]], assigned: list[tuple[int, bool]], step: int) -> list[_Share]:
        """Rank-sharded: this rank's pieces, and its latest one as a dummy in place of those that it no longer has."""
        waiting = iter(pieces)
        shared: list[_Share] = []
        for index, real in assigned:
            piece = next(waiting, None) if real else None
            if piece is not None:
                self._latest = (piece, step, index)
            if self._latest is None:
                raise RunError(
                    "this rank's share of the data is empty",
                    where=f"step {step}",
                    why="a rank whose stream has ended repeats its latest batch, with weight zero; this one had none",
                    fix="give each rank at least one batch",
                )
            shared.append((self._latest, piece is not None))
        return shared

    def _micro_batch(self, piece: list[Any], step: int, index: int, real: bool) -> MicroBatch:
        batch = self._batch(piece, step, index) if self._wanted else None
        return MicroBatch(index, batch if self._device.type == "cpu" else move(batch, self._device), real)

    def _batch(self, piece: list[Any], step: int, index: int) -> Any:
        if self._ready:
            return piece[0]
        try:
            with outer_states_kept():
                seed_from("collate", self._seed, step, index)
                return self._collate(piece)
        except Exception as error:
            raise RunError(
                f"collating micro-batch {index} of step {step} failed",
                where=users_line(error),
                why=f"{type(error).__name__}: {error}",
            ) from error
