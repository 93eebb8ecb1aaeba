"""Data that can only be iterated: each rank keeps its share, whole and resumable; streams sharded
by rank even out.
"""

import itertools
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data import IterableSteps
from lockstep.data.iterable_epoch import WITNESSES
from lockstep.errors import RunError, UsageError
from tests.data.shared import everything, plain, settings_of, share, whole_from


class Numbers(IterableDataset[Any]):
    """0 … n − 1 in an order and with noise drawn from the global generators."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.shuffle(order)
        for number in order:
            yield {"number": number, "noise": torch.rand(1)}


class Resumable(Numbers):
    """Knows where it stands; counts what it reads."""

    def __init__(self, size: int = 11) -> None:
        super().__init__(size)
        self.position = self.epoch = self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.size:
            self.position += 1
            self.read += 1
            yield {"number": self.position - 1 + 100 * self.epoch, "noise": torch.rand(1)}
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def steps_of(
    iterable: Any, *, assign=everything, start=0, stop=None, epochs=2, **options: Any
) -> IterableSteps:
    options["epochs"] = epochs
    settings = settings_of(start, stop, 5, options)
    return IterableSteps(iterable, 2, 4, assign, settings, **options)


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return plain(list(steps_of(Numbers())))


def test_an_epoch_ends_with_a_short_step_and_no_step_straddles(reference):
    assert [row[:5] for row in reference] == [
        (0, 0, 2, 4, False),
        (1, 0, 2, 4, False),
        (2, 0, 2, 3, True),
        (3, 1, 2, 4, False),
        (4, 1, 2, 4, False),
        (5, 1, 2, 3, True),
    ]
    for epoch in (0, 1):
        rows = [row for row in reference if row[1] == epoch]
        assert sorted(number for row in rows for m in row[5:] for number in m[1]["number"]) == list(
            range(11)
        )


def test_trap_13_epochs_of_an_iterable_differ(reference):
    """A sampler that draws from one seed gives each epoch the same order."""
    assert [row[5:] for row in reference[:3]] != [row[5:] for row in reference[3:]]


class Eager(Numbers):
    """Draws its order when iterating begins, before the first item."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__()))


class Noise(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield from (torch.rand(1) for _ in range(self.size))


@pytest.mark.parametrize(
    "made",
    [Eager, lambda: DataLoader(Noise(), batch_size=2, num_workers=1)],
    ids=["drawn at once", "drawn in a worker"],
)
def test_what_is_drawn_when_iterating_begins_is_the_same_on_every_rank(made):
    drawn = []
    for rank in range(2):
        random.seed(rank), torch.manual_seed(rank)
        drawn.append(plain(list(steps_of(made(), ready=isinstance(made(), DataLoader)))))
    assert drawn[0] == drawn[1]
    assert drawn[0][0][5:] != drawn[0][3][5:]


def test_trap_12_ranks_read_the_same_stream_and_share_it(reference):
    """Ranks that draw for themselves would each see another order, and share out samples twice or
    never.
    """
    for ranks in (2, 3):
        parts = []
        for rank in range(ranks):
            random.seed(rank), torch.manual_seed(rank)
            parts.append(plain(list(steps_of(Numbers(), assign=share(rank, ranks)))))
        assert whole_from(parts) == reference


@pytest.mark.parametrize("start", [1, 3, 5])
def test_trap_54_fast_forward_gives_the_tail(reference, start):
    """Random numbers that advance differently while batches are skipped make another run of the
    rest.
    """
    assert plain(list(steps_of(Numbers(), start=start))) == reference[start:]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_state_resumes_in_the_middle_and_reads_again_what_it_compares_alone(stop):
    """An epoch of 61 items has 16 steps: the first stops are in it, the last is its end."""
    stop *= 4
    whole = plain(list(steps_of(Resumable(61))))
    first = steps_of(Resumable(61), stop=stop)
    begun = plain(list(first))
    again = Resumable(61)
    rest = plain(list(steps_of(again, start=stop, state=first.state_dict())))
    assert begun + rest == whole
    assert again.read == 122 - sum(row[3] for row in begun) + (0 if stop == 16 else WITNESSES)


def test_a_state_is_that_of_the_step_in_hand_not_of_what_was_read_ahead():
    source = steps_of(Resumable(61))
    for row in itertools.islice(source, 5):
        state = source.state_dict()
        taken = 4 * (row.step + 1)
        assert state["witnessed"] + len(state["witnesses"]) == taken
        assert state["position"] == max(0, taken - WITNESSES)
        assert state["iterable"] == {"position": state["position"]}


class Forgets(Resumable):
    """The base of those whose state does not restore everything."""

    def __init__(self) -> None:
        super().__init__(61)


class ForgetsItsBuffer(Forgets):
    """What waits in a buffer is not part of the state."""

    def __iter__(self) -> Iterator[Any]:
        buffer = []
        choose = random.Random(self.epoch)
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 16:
                yield buffer.pop(choose.randrange(16))
        yield from buffer


class ForgetsItsGenerator(Forgets):
    """One of two sources by chance: the first items may be restored by chance, too."""

    def __iter__(self) -> Iterator[Any]:
        choose = random.Random(3)
        for item in super().__iter__():
            yield {**item, "source": choose.random() < 0.5}


class ForgetsWhatIsUnderWay(Forgets):
    """The state is of what workers have read ahead."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": min(self.position + 3, self.size)}


class ForgetsWhereItBegan(Forgets):
    """Counts from where it was resumed: the second resume starts anew."""

    began = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position - self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.began = self.position


class ForgetsAll(Forgets):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CannotLoad(Forgets):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["position"]:
            raise KeyError("offset")


# Before 5.1 a stream that is resumed twice begins where it was resumed first.
RESUMES = tuple(map(int, datasets.__version__.split(".")[:2])) >= (5, 1)


def hugging_face(*, buffer: int = 0) -> Any:
    rows = datasets.Dataset.from_dict({"number": list(range(61))}).to_iterable_dataset(num_shards=4)
    rows = datasets.interleave_datasets(
        [rows.skip(3), rows.map(dict).take(40)], probabilities=[0.7, 0.3], seed=1
    )
    rows = rows.map(lambda some: some, batched=True, batch_size=7)
    return rows.shuffle(seed=3, buffer_size=buffer) if buffer else rows


def in_parts(make: Any, stops: list[int], **options: Any) -> list[Any]:
    """The steps of runs that are resumed one after the other, each with an object of its own."""
    rows: list[Any] = []
    state: dict[str, Any] | None = None
    for start, stop in itertools.pairwise([0, *stops, None]):
        source = steps_of(make(), start=start, stop=stop, state=state, **options)
        rows += plain(list(source))
        state = json.loads(json.dumps(source.state_dict()))
    return rows


@pytest.mark.parametrize(
    ("make", "restores"),
    [
        (lambda: Resumable(61), True),
        (hugging_face, RESUMES),
        (ForgetsItsBuffer, False),
        (ForgetsItsGenerator, False),
        (ForgetsWhatIsUnderWay, False),
        (ForgetsWhereItBegan, False),
        (ForgetsAll, False),
        (CannotLoad, False),
        (lambda: hugging_face(buffer=16), False),
    ],
    ids=[
        "exact",
        "streams",
        "buffer",
        "generator",
        "ahead",
        "second resume",
        "nothing",
        "raises",
        "shuffled stream",
    ],
)
def test_trap_83_a_state_that_does_not_restore_is_found_out_in_each_resume(make, restores, caplog):
    """Buffers that are lost, choices drawn anew and counts from the resume on leave out samples,
    silently.
    """
    assert in_parts(make, [3, 7, 12, 17, 22]) == plain(list(steps_of(make())))
    assert ("does not restore" in caplog.text) != restores


class Unrepeatable(Resumable):
    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield {**item, "noise": random.SystemRandom().random()}


def test_items_that_never_come_again_are_warned_of_and_refused_under_reproducible(caplog):
    numbers = [
        [m[1]["number"] for m in row[5:]] for row in in_parts(lambda: Unrepeatable(61), [3, 5])
    ]
    assert numbers == [
        [m[1]["number"] for m in row[5:]] for row in plain(list(steps_of(Resumable(61))))
    ]
    assert "does not give the same items again: item 4 of epoch 0" in caplog.text
    with pytest.raises(UsageError, match="does not give the same items again"):
        in_parts(lambda: Unrepeatable(61), [3], reproducible=True)


def test_data_that_have_become_fewer_are_refused():
    first = steps_of(Resumable(61), stop=10)
    list(first)
    with pytest.raises(UsageError, match="item 32 of epoch 0 is missing"):
        list(steps_of(Resumable(32), start=10, state=first.state_dict()))


def test_a_rollback_reads_the_same_object_again_from_the_state():
    data = Resumable(61)
    source = steps_of(data, epochs=1)
    states = []
    whole = []
    for batches in source:
        whole.append(batches)
        states.append(source.state_dict())
    for step in (1, 2, 9):
        assert plain(list(steps_of(data, epochs=1, start=step, state=states[step - 1]))) == plain(
            whole[step:]
        )


def test_without_a_state_of_its_own_an_iterable_told_its_epoch_resumes_there():
    class Told(Numbers):
        begun: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.begun.append(epoch)

    whole = plain(list(steps_of(Told())))
    first = steps_of(Told(), stop=4)
    list(first)
    Told.begun.clear()
    assert plain(list(steps_of(Told(), start=4, state=first.state_dict()))) == whole[4:]
    assert Told.begun == [1]


def test_a_state_that_json_cannot_hold_is_refused_at_once():
    class Tensorial(Resumable):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": torch.get_rng_state()}

    with pytest.raises(UsageError, match="state_dict of Tensorial can't be saved"):
        next(iter(steps_of(Tensorial())))


def test_a_state_later_than_the_start_is_refused():
    with pytest.raises(UsageError, match="step 3, after step 1"):
        steps_of(Resumable(), start=1, state={"step": 3})


def test_ready_batches_are_micro_batches():
    batches = [torch.arange(3), torch.arange(2), torch.arange(1)]
    rows = plain(list(steps_of(batches, ready=True, epochs=1)))
    assert rows == [
        (0, 0, 2, 5, False, (0, [0, 1, 2], True), (1, [0, 1], True)),
        (1, 0, 1, 1, True, (0, [0], True)),
    ]


def test_what_can_be_iterated_once_ends_the_steps():
    rows = plain(list(steps_of((torch.ones(1) for _ in range(3)), ready=True, epochs=None)))
    assert [row[0] for row in rows] == [0, 1]
    assert rows[-1][4]


def test_leaving_the_loop_closes_a_generator():
    closed = []

    def batches() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield torch.ones(1)
        finally:
            closed.append(True)

    for _ in steps_of(batches(), ready=True):
        break
    assert closed


def test_outer_random_states_are_untouched():
    random.seed(1), torch.manual_seed(1)
    expected = (random.random(), torch.rand(1).item())
    random.seed(1), torch.manual_seed(1)
    list(steps_of(Numbers()))
    assert (random.random(), torch.rand(1).item()) == expected


def test_an_empty_iterable_is_one_clear_message():
    with pytest.raises(UsageError, match="the list is empty"):
        list(steps_of([], ready=True))


@pytest.mark.fault(
    "data: an iterable that raises",
    "in the middle of an epoch",
    "one message with the number of the item",
)
def test_an_iterable_that_raises_is_named_with_its_item():
    def samples() -> Iterator[int]:
        yield from range(5)
        raise ValueError("bad line")

    with pytest.raises(RunError, match="item 5 of the generator failed in epoch 0") as caught:
        list(steps_of(samples()))
    assert caught.value.why == "ValueError: bad line"
    assert "in samples" in (caught.value.where or "")


def test_samples_of_unlike_shapes_are_not_blamed_on_this_package():
    found = r"sample is of shape \[2\] in its sample 0, and of shape \[3\] in its sample 1"
    with pytest.raises(RunError, match=found) as caught:
        list(steps_of([torch.zeros(2), torch.zeros(3)]))
    assert caught.value.where == "micro-batch 0 of step 0"
    assert "lockstep" not in (caught.value.where or "")
    assert "stack expects each tensor to be equal size" in (caught.value.why or "")


def test_a_rank_that_wants_no_data_learns_where_epochs_end(reference):
    rows = plain(list(steps_of(Numbers(), wanted=False)))
    assert [row[:5] for row in rows] == [row[:5] for row in reference]
    assert all(m[1] is None for row in rows for m in row[5:])


class Together:
    """`any_left` among threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=200)
        self.votes: list[bool] = [False] * ranks

    def on(self, rank: int):
        def any_left(mine: bool) -> bool:
            self.votes[rank] = mine
            self.barrier.wait()
            result = any(self.votes)
            self.barrier.wait()
            return result

        return any_left


def on_ranks(streams: list[list[Any]], **options: Any) -> list[Any]:
    """Each rank with a stream of its own; what each yields, or the error that it meets."""
    together = Together(len(streams))
    results = [None] * len(streams)

    def rank_main(rank: int) -> None:
        assign = share(rank, len(streams))
        try:
            source = steps_of(
                streams[rank], ready=True, assign=assign, any_left=together.on(rank), **options
            )
            results[rank] = plain(list(source))
        except Exception as error:
            results[rank] = error
            together.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def numbered(rank: int, count: int) -> list[torch.Tensor]:
    return [torch.tensor([10 * rank + k]) for k in range(count)]


def test_trap_63_streams_that_end_at_different_times_are_evened_out_by_dummies():
    """A rank that stops while others go on leaves them waiting for ever; here it runs dummies."""
    short, long = on_ranks([numbered(0, 1), numbered(1, 3)], epochs=1)
    assert [row[5:] for row in short] == [((0, [0], True),), ((0, [0], False),), ((0, [0], False),)]
    assert [row[5:] for row in long] == [((1, [10], True),), ((1, [11], True),), ((1, [12], True),)]
    assert [row[4] for row in short] == [row[4] for row in long] == [False, False, True]
    assert [row[3] for row in short] == [1, 0, 0]  # samples: this rank's own


def test_epochs_of_streams_begin_together():
    short, long = on_ranks([numbered(0, 1), numbered(1, 2)], epochs=2)
    assert [(row[1], row[5][2]) for row in short] == [(0, True), (0, False), (1, True), (1, False)]
    assert [(row[1], row[5][2]) for row in long] == [(0, True), (0, True), (1, True), (1, True)]


def test_a_stream_sharded_by_rank_is_resumed_by_reading_up_to_there():
    streams = [numbered(0, 2), numbered(1, 5)]
    whole = on_ranks(streams, epochs=1)
    assert on_ranks(streams, epochs=1, start=3) == [rows[3:] for rows in whole]


@pytest.mark.fault(
    "data: a rank without data",
    "a stream sharded by rank is shorter than the ranks",
    "one message",
)
def test_a_rank_with_no_data_at_all_is_one_clear_message():
    errors = on_ranks([[], numbered(1, 2)])
    assert isinstance(errors[0], RunError)
    assert "this rank's share of the data is empty" in str(errors[0])


def test_law_1_is_waived_aloud():
    assert steps_of(numbered(0, 2), ready=True).notice is None
    notice = steps_of(numbered(0, 2), ready=True, any_left=bool).notice
    assert notice is not None
    assert "sharded by rank" in notice
