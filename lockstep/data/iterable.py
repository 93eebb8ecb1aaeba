"""Makes steps of data that can only be iterated.

Every rank iterates all data and keeps its micro-batches, so that a step is the same on any number
of ranks. A dataset with `rank_sharded = True` reads a different stream on each rank; ranks whose
stream has ended run dummies with weight zero. Items are read with generators seeded by (seed,
epoch, position), as an uninterrupted run does.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.attributes import attributes_of
from lockstep.data.agreement import MOST_ITEMS, DataEvidence, require_same_data, several_ranks
from lockstep.data.batches import (
    Assign,
    MicroBatch,
    SourceSettings,
    StepBatches,
    batch_length,
    known_length,
    move,
    num_tokens,
)
from lockstep.data.fingerprint import summary
from lockstep.data.iterable_epoch import IterableEpoch, NotRestoredError, start_of
from lockstep.data.mistakes import collate_by_default, reason, users_line
from lockstep.division import ceil_div
from lockstep.errors import RunError, UsageError
from lockstep.process_group.collectives import is_main_process
from lockstep.randomness import preserve_states, seed_from

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class _Piece:
    """The samples of a micro-batch, or (`ready`) a batch alone, before they are collated."""

    samples: list[Any]
    step: int
    index: int  # among the step's micro-batches


class IterableSteps:
    """Iterates over the steps of an iterable that the settings name.

    The `iterable`, of samples, or (`ready`) of collated batches, is iterated again each epoch,
    after `set_epoch(epoch)` if it has that method, until it yields nothing (a generator). `state`
    is a `state_dict` from a step before `start_step` (unset: step 0); those between are read and
    discarded. If other items come than the run had read, the epoch is read again from its start,
    and if that does not help, a warning is logged; `reproducible` refuses. For a rank-sharded
    iterable, `any_left` returns whether any rank passes True; all ranks call it, once per step.

    A UsageError is raised for an empty iterable, or a state that JSON can't hold, and a RunError,
    which names the item, if the user's code raises.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        batch_size: int,
        global_batch_size: int,
        assign: Assign,
        settings: SourceSettings,
        *,
        ready: bool = False,
        state: dict[str, Any] | None = None,
        any_left: Callable[[bool], bool] | None = None,
    ) -> None:
        self._iterable = iterable
        self._assign = assign
        self._seed = settings.seed
        self._device = torch.device(settings.device)
        self._start = settings.start_step
        self._stop = settings.stop_step
        self._epochs = settings.epochs
        self._batch_size = 1 if ready else batch_size
        self._micro_batches = global_batch_size // batch_size
        self._ready = ready
        self._wanted = settings.wanted
        self._any_left = any_left
        self._reproducible = settings.reproducible
        self._epoch: IterableEpoch | None = None
        self._latest: _Piece | None = None  # that a dummy repeats
        self.rank_sharded = any_left is not None
        self.notice = settings.notice  # a line to log at the start
        if self.rank_sharded:
            self.notice = (
                "the data are sharded by rank: the content of a step depends on the number of"
                " ranks, so runs on different numbers of ranks are different trainings"
            )
        self._compares = settings.compares and any_left is None
        self._tries = 0  # to read an epoch from its start, because a state was not restored
        self._as_handed_over = dict(attributes_of(iterable) or {})
        self._state: dict[str, Any] = {**start_of(0, 0), **(state or {})}
        if self._state["step"] > self._start:
            what = (
                f"the state of the data is that of step {self._state['step']}, after step"
                f" {self._start}"
            )
            why = (
                "the data have gone further than the run; they are restored together, from one"
                " checkpoint"
            )
            raise UsageError(what, why=why)

    @property
    def steps_per_epoch(self) -> int | None:
        count = known_length(self._iterable)
        if count is None or self.rank_sharded:  # a rank does not know the longest stream's length
            return None
        return ceil_div(count, self._batch_size * self._micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, where a run resumed after the last yielded step has to start reading.

        That is some items before that step, to compare them; or the start of the epoch (`set_epoch`
        alone), or of the data (neither, or rank-sharded).
        """
        return dict(self._state)

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None

    def __iter__(self) -> Iterator[StepBatches]:
        try:
            for batches in self._all_steps():
                if batches.step >= self._start:
                    yield batches
        finally:
            self.close()

    def _all_steps(self) -> Iterator[StepBatches]:
        """Yield all steps from the state's on; those before `start_step` have no data."""
        state = self._state
        step = int(state["step"])
        epoch = int(state["epoch"])
        while (self._epochs is None or epoch < self._epochs) and (
            self._stop is None or step < self._stop
        ):
            first_step = step
            try:
                for batches in self._steps_of_epoch(state):
                    step = batches.step + 1
                    yield batches
            except NotRestoredError as difference:
                self.close()
                state = self._read_again(state, difference)
                step = int(state["step"])
                continue
            if step == first_step:
                return
            epoch += 1
            state = start_of(epoch, step)

    def _steps_of_epoch(self, state: dict[str, Any]) -> Iterator[StepBatches]:
        """Yield the steps of an epoch from a state on; none if the iterable has no more items."""
        step = int(state["step"])
        epoch = int(state["epoch"])
        # Ranks that read different streams draw different random numbers.
        key = self._assign(self._micro_batches)[0][0] if self.rank_sharded else -1
        items = IterableEpoch(self._iterable, self._seed, state, key)
        self._epoch = items
        last = not self._any(items.more)
        if last:
            self._compare([])
        if last and step == 0:
            what = f"the {type(self._iterable).__name__} is empty: there is nothing to train on"
            raise UsageError(what, fix="give it batches, or check what it reads")
        while not last and (self._stop is None or step < self._stop):
            batches = self._step(items, step, epoch)
            last = batches.last_of_epoch
            step += 1
            if self.rank_sharded:
                pass  # each rank has another position; a checkpoint holds one state for all
            elif items.stateful and not last:
                self._state = items.restart(step)
            elif last and (items.stateful or items.has_epochs):
                self._state = start_of(epoch + 1, step)
            yield batches

    def _read_again(self, state: dict[str, Any], difference: NotRestoredError) -> dict[str, Any]:
        """Return a state to go on from in place of one that was not restored, or raise an error.

        First the epoch is read again from its start, with the iterable's own state from there, then
        with none.
        """
        vars(self._iterable).clear()
        vars(self._iterable).update(self._as_handed_over)
        name = type(self._iterable).__name__
        begins = state["begins"]
        self._tries += 1
        compared = {key: state[key] for key in ("begins", "witnessed", "witnesses")}
        if begins is not None:
            state = {
                **start_of(state["epoch"], begins["step"]),
                "begins": begins,
                "iterable": begins["state"],
            }
        if begins is not None and self._tries == 1:
            _warn(
                f"the state_dict of {name} does not restore what was being read (the contents of a"
                f" shuffle buffer are not part of it, for instance): epoch {state['epoch']} is read"
                " again from its start"
            )
            return state | compared
        if begins is not None and self._tries == 2:
            return state | compared | {"iterable": None}
        what = (
            f"the {name} does not give the same items again: item {difference.position} of epoch"
            f" {state['epoch']}"
        )
        what += " is missing" if difference.ended else " is another one"
        why = (
            "the run that is resumed had read it; neither the state_dict nor reading from the start"
            " brings it back"
        )
        if difference.__cause__ is not None:
            why = f"{why}: {reason(difference.__cause__)}"
        if difference.ended or self._reproducible:
            fix = (
                "draw from Python's, NumPy's or torch's global generators, which are seeded for"
                " each item, and let each iteration begin anew; or leave out state_dict and"
                " load_state_dict"
            )
            raise UsageError(what, where="the training data", why=why, fix=fix)
        _warn(
            f"{what}: {why}. The run goes on after as many items; some may come twice, others never"
        )
        return {**state, "witnesses": []}

    def _compare(self, items: list[Any]) -> None:
        """Compare the first items that are trained on with those of the other ranks.

        All ranks call it together.
        """
        if self._compares and several_ranks():
            self._compares = False
            require_same_data(
                self._iterable,
                DataEvidence(known_length(self._iterable), items=list(map(summary, items))),
            )

    def _any(self, more: bool) -> bool:
        return more if self._any_left is None else self._any_left(more)

    def _step(self, items: IterableEpoch, step: int, epoch: int) -> StepBatches:
        """Take one step's samples from the epoch, and return this rank's micro-batches of them."""
        if self.rank_sharded:
            num_micro_batches = self._micro_batches
            assigned = self._assign(num_micro_batches)
            taken = items.take(sum(real for _, real in assigned), self._batch_size)
            mine = self._of_own_stream(taken, assigned, step)
        else:
            taken = items.take(self._micro_batches, self._batch_size)
            num_micro_batches = len(taken)
            mine = [
                (_Piece(taken[index], step, index), real)
                for index, real in self._assign(num_micro_batches)
            ]
            if step >= self._start:
                self._compare([item for samples in taken for item in samples][:MOST_ITEMS])
        micro_batches = []
        if step >= self._start:
            micro_batches = [self._micro_batch(piece, real) for piece, real in mine]
        num_samples = sum(batch_length(each[0]) if self._ready else len(each) for each in taken)
        last_of_epoch = not self._any(items.more)
        return StepBatches(
            step, epoch, num_micro_batches, num_samples, last_of_epoch, micro_batches
        )

    def _of_own_stream(
        self, taken: list[list[Any]], assigned: list[tuple[int, bool]], step: int
    ) -> list[tuple[_Piece, bool]]:
        """Return what a rank runs that has a stream of its own, and what of it counts.

        Where its stream has ended, or has fewer micro-batches than are assigned, it repeats its
        latest one with weight zero. RunError: there is none.
        """
        waiting = iter(taken)
        mine: list[tuple[_Piece, bool]] = []
        for index, real in assigned:
            samples = next(waiting, None) if real else None
            if samples is not None:
                self._latest = _Piece(samples, step, index)
            if self._latest is None:
                raise RunError(
                    "this rank's share of the data is empty",
                    where=f"step {step}",
                    why=(
                        "a rank whose stream has ended repeats its latest batch, with weight zero;"
                        " it had none"
                    ),
                    fix="give each rank at least one batch",
                )
            mine.append((self._latest, samples is not None))
        return mine

    def _micro_batch(self, piece: _Piece, real: bool) -> MicroBatch:
        """Collate one micro-batch and move it to the device.

        Raises RunError: the user's code failed.
        """
        samples = piece.samples
        step = piece.step
        index = piece.index
        batch: Any = None
        if self._wanted and self._ready:
            batch = samples[0]
        elif self._wanted:
            try:
                with preserve_states():
                    seed_from("collate", self._seed, step, index)
                    batch = collate_by_default(
                        samples, lambda: [f"its sample {number}" for number in range(len(samples))]
                    )
            except RunError as error:
                where = f"micro-batch {index} of step {step}"
                raise RunError(error.what, where=where, why=error.why, fix=error.fix) from error
            except Exception as error:
                what = f"collating micro-batch {index} of step {step} failed"
                raise RunError(
                    what, where=users_line(error), why=f"{type(error).__name__}: {error}"
                ) from error
        placed = batch if self._device.type == "cpu" else move(batch, self._device)
        return MicroBatch(index, placed, real, num_tokens(batch))


def _warn(text: str) -> None:
    if is_main_process():
        _log.warning("warning: %s", text)
