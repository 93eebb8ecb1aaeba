"""Loading is the same on any number of workers, from any start, and leaves no trace outside."""

import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.data import SampleOrder, StepLoader
from lockstep.data.batches import CollatingDataset, batch_length, move
from lockstep.data.reader import INLINE_LIMIT, InlineBatch
from lockstep.errors import RunError
from tests.data.shared import everything, plain, settings_of, share, whole_from
from tests.diagnose.provoke import mount_full_shared_memory


class Drawing(Dataset[dict[str, Any]]):
    """Each sample draws from all three global generators."""

    def __init__(self, num_samples: int = 20) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "drawn": [random.random(), float(np.random.rand()), torch.rand(2)]}


class Plain(Dataset[torch.Tensor]):
    """Draws nothing; counts its calls."""

    deterministic = True

    def __init__(self, num_samples: int = 20) -> None:
        self.num_samples = num_samples
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.calls.append(list(indices))
        return [torch.tensor(index) for index in indices]


def loader(
    dataset: Any, *, assign=everything, start=0, stop=9, shuffle=True, **options: Any
) -> StepLoader:
    order = SampleOrder(len(dataset), 2, 6, seed=3, shuffle=shuffle)
    return StepLoader(dataset, order, assign, settings_of(start, stop, 3, options), **options)


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return plain(list(loader(Drawing())))


def test_steps_of_two_epochs(reference):
    assert [(row[0], row[1], row[2], row[3], row[4]) for row in reference] == [
        (step, step // 4, 1 if step % 4 == 3 else 3, 2 if step % 4 == 3 else 6, step % 4 == 3)
        for step in range(9)
    ]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_samples_do_not_depend_on_the_number_of_workers(reference, num_workers):
    assert plain(list(loader(Drawing(), num_workers=num_workers))) == reference


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("start", [2, 4, 7])
def test_trap_54_resuming_gives_the_tail_of_the_whole_run(reference, start, num_workers):
    """Skipped batches that advance the random numbers, and a resume at an epoch's end (step 4) that
    skips an epoch.
    """
    assert plain(list(loader(Drawing(), start=start, num_workers=num_workers))) == reference[start:]


def test_trap_12_ranks_share_a_step_and_read_nothing_twice(reference):
    """Every rank drawing the same samples trains on them `ranks` times and on others never."""
    for ranks in (1, 2, 3):
        assert (
            whole_from(
                [plain(list(loader(Drawing(), assign=share(rank, ranks)))) for rank in range(ranks)]
            )
            == reference
        )


def test_a_rank_reads_its_own_micro_batches_only():
    datasets = [Plain(), Plain()]
    for rank, dataset in enumerate(datasets):
        list(loader(dataset, assign=share(rank, 2), stop=4))
    order = SampleOrder(20, 2, 6, seed=3)
    for rank, dataset in enumerate(datasets):
        expected = [
            order.samples_of(step).micro_batches[index]
            for step in range(4)
            for index, _ in share(rank, 2)(len(order.samples_of(step).micro_batches))
        ]
        assert dataset.calls == expected  # one call of __getitems__ a micro-batch


def test_drawn_numbers_are_a_function_of_seed_epoch_and_index_only():
    def drawn(order: SampleOrder, seed: int = 3) -> dict[tuple[int, int], Any]:
        steps = StepLoader(Drawing(), order, everything, settings_of(0, None, seed, {}))
        found: dict[tuple[int, int], Any] = {}
        for step in steps:
            if step.epoch == 2:
                return found
            for micro in step.mine:
                python, numpy, pytorch = micro.batch["drawn"]
                for k, index in enumerate(micro.batch["index"].tolist()):
                    found[step.epoch, index] = (
                        float(python[k]),
                        float(numpy[k]),
                        pytorch[k].tolist(),
                    )
        raise AssertionError("unreachable")

    first = drawn(SampleOrder(20, 2, 6, seed=3))
    assert first == drawn(SampleOrder(20, 5, 10, seed=99, shuffle=False))
    assert len({str(value) for value in first.values()}) == 40
    assert drawn(SampleOrder(20, 2, 6, seed=3), seed=4) != first


@pytest.mark.parametrize("num_workers", [0, 1])
def test_outer_random_states_are_untouched(num_workers):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    list(loader(Drawing(), num_workers=num_workers, stop=3))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def noisy(samples: list[Any]) -> torch.Tensor:
    return torch.rand(len(samples))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_that_draws_depends_on_the_micro_batch_only(num_workers):
    whole = [m.batch.tolist() for s in loader(Plain(), collate_fn=noisy) for m in s.mine]
    parts = [
        [
            (s.step, m.index, m.batch.tolist())
            for s in loader(Plain(), collate_fn=noisy, assign=share(r, 2))
            for m in s.mine
            if m.real
        ]
        for r in range(2)
    ]
    assert [batch for _, _, batch in sorted(parts[0] + parts[1])] == whole
    assert plain(list(loader(Plain(), collate_fn=noisy, num_workers=num_workers))) == plain(
        list(loader(Plain(), collate_fn=noisy))
    )
    assert len(set(map(tuple, whole))) == len(whole)


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def gone(pid: int) -> bool:
    for _ in range(20_000):  # on a busy machine
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_workers_live_through_epochs_and_end_with_the_loader():
    made = loader(Pids(), num_workers=2, stop=12)
    pids = {pid for step in made for micro in step.mine for pid in micro.batch.tolist()}
    assert len(pids) == 2  # over three epochs
    assert all(gone(pid) for pid in pids)


def test_a_loop_that_is_left_ends_its_workers():
    for step in loader(Pids(), num_workers=1, stop=None):
        pid = step.mine[0].batch[0].item()
        break
    assert gone(pid)


def test_persistent_workers_serve_the_next_iteration_and_end_at_close():
    made = loader(Pids(), num_workers=1, stop=2, persistent_workers=True)
    pids = [{pid for s in made for m in s.mine for pid in m.batch.tolist()} for _ in range(2)]
    assert pids[0] == pids[1]
    (pid,) = pids[0]
    os.kill(pid, 0)
    made.close()
    assert gone(pid)


class Broken(Dataset[int]):
    deterministic = False

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 7:
            if self.how == "raises":
                raise ValueError("bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class BrokenTogether(Broken):
    deterministic = True

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class BrokenInOneGo(CollatingDataset):
    def __init__(self, how: str) -> None:
        self.one_by_one = Broken(how)

    def __len__(self) -> int:
        return len(self.one_by_one)

    def __getitem__(self, index: int) -> Any:
        return self.one_by_one[index]

    def collated(self, indices: Sequence[int]) -> Any:
        return torch.tensor([self[index] for index in indices])


@pytest.mark.fault(
    "data: a sample that can not be read",
    "the dataset raises",
    "one message with the index of the sample",
)
@pytest.mark.parametrize("kind", [Broken, BrokenTogether, BrokenInOneGo])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises_is_named_with_its_index(kind, num_workers):
    with pytest.raises(RunError) as caught:
        list(loader(kind("raises"), num_workers=num_workers))
    assert caught.value.what == "dataset[7] failed"
    assert caught.value.why == "ValueError: bad sample"
    assert "test_loader.py" in (caught.value.where or "")
    assert 'raise ValueError("bad sample")' in (caught.value.where or "")
    assert len(str(caught.value).splitlines()) <= 4


def uncollatable(samples: list[Any]) -> Any:
    raise KeyError("no such field")


def test_a_collate_function_that_raises_is_named_with_its_samples():
    with pytest.raises(RunError, match=r"collating the samples \[0, 1\] failed") as caught:
        list(loader(Plain(), collate_fn=uncollatable, num_workers=1, shuffle=False))
    assert "in uncollatable" in (caught.value.where or "")


@pytest.mark.fault(
    "data: a data worker is killed",
    "the system takes memory back",
    "one message with what it was reading; the ranks are started again",
)
def test_a_worker_that_dies_is_reported_with_what_it_was_reading():
    with pytest.raises(RunError, match="a data worker died") as caught:
        list(loader(Broken("dies"), num_workers=1))
    assert "dataset[7]" in (caught.value.where or "")
    assert "killed by SIGKILL" in (caught.value.why or "")


def test_a_rank_that_wants_no_data_follows_without_reading():
    dataset = Plain()
    steps = list(loader(dataset, wanted=False, num_workers=1))
    assert dataset.calls == []
    assert [(s.step, s.samples, [(m.index, m.batch, m.real) for m in s.mine]) for s in steps][
        3
    ] == (
        3,
        2,
        [(0, None, True)],
    )
    assert len(steps) == 9


def test_an_empty_range_of_steps_gives_nothing():
    assert list(loader(Plain(), start=4, stop=4, num_workers=1)) == []


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_leaves_that_are_no_tensors_pass_through_any_nesting():
    marker = object()
    batch = {
        "a": [torch.zeros(2), (marker, 3)],
        "b": Pair(torch.ones(1), "n"),
        "c": Counter(k=1),
        "d": None,
    }
    moved = move(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"].x.device.type == "meta"
    assert moved["a"][1] == (marker, 3)
    assert (type(moved["b"]), moved["b"].name, moved["d"]) == (Pair, "n", None)
    assert moved["c"] == Counter(k=1)
    assert batch_length({"name": "x", "y": torch.zeros(3, 2)}) == 3


def test_a_step_of_one_millisecond_does_not_wait_for_its_data():
    """What the loader itself costs, with nothing to read: well below a step."""
    steps = iter(loader(Plain(10_000), stop=500))
    next(steps)
    begin = time.process_time()
    count = sum(1 for _ in steps)
    assert (time.process_time() - begin) / count < 1e-3 / 2


# ---- what a worker sends arrives unchanged, small tensors inside the message ----


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


def sent(batch: Any) -> Any:
    return pickle.loads(bytes(ForkingPickler.dumps(InlineBatch(batch))))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(1.5),
        torch.zeros(0, 4),
        torch.rand(3, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.rand(4).bfloat16(),
        torch.rand(INLINE_LIMIT),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_every_kind_of_tensor_arrives_as_it_was(tensor):
    arrived = sent({"x": [tensor], "other": ("text", None)})
    assert arrived["other"] == ("text", None)
    assert arrived["x"][0].dtype == tensor.dtype
    assert torch.equal(arrived["x"][0], tensor)


def test_what_arrives_can_be_written_and_keeps_its_type():
    arrived = sent(Batch(torch.zeros(3), ["a"]))
    arrived.x += 1
    assert (arrived.x.tolist(), arrived.names) == ([1, 1, 1], ["a"])


def test_small_tensors_travel_in_the_message_and_large_ones_do_not():
    small = torch.zeros(INLINE_LIMIT // 8, dtype=torch.int64)
    large = torch.zeros(INLINE_LIMIT, dtype=torch.int64)
    assert len(ForkingPickler.dumps(InlineBatch(small))) > INLINE_LIMIT
    assert len(ForkingPickler.dumps(InlineBatch(large))) < 4096


class Large(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100_000,), float(index))


def in_full_shared_memory(space: int, queue: Any) -> None:
    try:
        mount_full_shared_memory(space)
        list(loader(Large(), num_workers=1))
        queue.write(b"read")
    except BaseException as error:
        queue.write(str(error).encode())


@pytest.mark.fault(
    "data: /dev/shm is full", "a worker starts, or sends a batch", "one message with the way out"
)
@pytest.mark.parametrize(
    ("space", "what"), [(8, "can't be started: there is no space left in /dev/shm"), (64, "failed")]
)
def test_workers_without_shared_memory_are_one_message_with_the_way_out(
    space: int, what: str
) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "wb") as answer:
            in_full_shared_memory(space, answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    if "not permitted" in text:
        pytest.skip("mounting a /dev/shm takes root")
    assert what in text
    assert "do: give /dev/shm more space" in text


@pytest.mark.parametrize(
    ("make", "misfit"),
    [
        (
            lambda i: torch.zeros(i + 1),
            "sample is of shape [1] in dataset[0], and of shape [2] in dataset[1]",
        ),
        (
            lambda i: {"y": 1, "ids": np.zeros(3 - i)},
            "sample['ids'] is of shape [3] in dataset[0], and of shape [2]",
        ),
        (
            lambda i: {"ids": [1] * (i + 2)},
            "sample['ids'] is a list of length 2 in dataset[0], and a list of length 3",
        ),
        (
            lambda i: ([torch.zeros(2), torch.zeros(2 + i)], 1),
            "sample[0][1] is of shape [2] in dataset[0]",
        ),
        (
            lambda i: (1,) * (i + 1),
            "sample is a tuple of length 1 in dataset[0], and a tuple of length 2",
        ),
        (
            lambda i: {"x": i, f"y{i}": i},
            "sample is a dict with the keys ['x', 'y0'] in dataset[0], and a dict",
        ),
        (
            lambda i: {"x": None if i else 1},
            "sample['x'] is a number in dataset[0], and a NoneType in dataset[1]",
        ),
        (lambda _i: {"x": None}, "sample['x'] is a NoneType, which can't be stacked"),
    ],
    ids=["tensors", "arrays", "lists", "nested", "tuples", "keys", "missing", "none"],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_samples_that_do_not_fit_together_are_named_with_what_differs(
    make: Any, misfit: str, workers: int
) -> None:
    class Misfits(Drawing):
        def __getitem__(self, index: int) -> Any:
            return make(index)

    with pytest.raises(RunError) as caught:
        list(loader(Misfits(), shuffle=False, num_workers=workers))
    assert f"samples do not fit together: {misfit}" in caught.value.what
    of_kinds = "keys" in misfit or "NoneType" in misfit
    wanted = "leave out what is None" if of_kinds else "collate_fn that pads"
    assert wanted in (caught.value.fix or "")
