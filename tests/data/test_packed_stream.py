"""Streams are packed window by window: nothing is lost, shares are kept, and a run that is resumed
anywhere, also twice, gets the same sequences, having read at most one window again.
"""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data import Data, build_data
from lockstep.data.batches import SourceSettings, assign_contiguous
from lockstep.data.iterable import IterableSteps
from lockstep.data.language import IGNORED
from lockstep.errors import UsageError

LENGTH = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sources: `a` of 120 documents, each of one letter, and `b` of 40 longer ones."""
    for name, count, size in (("a", 120, 9), ("b", 40, 31)):
        rows = [{"text": chr(97 + n % 26) * (n % size + 2), "n": n} for n in range(count)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


def build(sources: Any, seed: int = 3, **args: Any) -> Data:
    args = {"sequence_length": LENGTH, "window": 4, **args}
    return build_data(DataConfig(name="stream", args={"sources": sources, **args}), seed=seed)


def key(sample: dict[str, torch.Tensor]) -> str:
    return json.dumps({name: column.tolist() for name, column in sample.items()})


def pairs(samples: Any) -> Counter[tuple[int, int]]:
    """How often which target followed which input."""
    found: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        valid = sample["targets"] != IGNORED
        ids = sample["input_ids"][valid].tolist()
        found.update(zip(ids, sample["targets"][valid].tolist(), strict=True))
    return found


def all_pairs(*files: Path) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for file in files:
        for line in file.read_text().splitlines():
            text = json.loads(line)["text"].encode()
            found.update(pairwise(text))
    return found


@pytest.mark.parametrize("packing", ["first_fit", "in_order"])
@pytest.mark.parametrize("window", [1, 4, 1000])
def test_an_epoch_has_every_target_once(packing: str, window: int, folder: Path) -> None:
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    data = build([str(file) for file in files], packing=packing, window=window).train
    assert pairs(data) == all_pairs(*files)
    assert {tuple(sample["input_ids"].shape) for sample in islice(data, 3)} == {(LENGTH,)}


def test_epochs_and_seeds_have_other_orders(folder: Path) -> None:
    source = str(folder / "a.jsonl")
    data = build(source).train
    first = [key(sample) for sample in data]
    data.set_epoch(1)
    second = [key(sample) for sample in data]
    other = [key(sample) for sample in build(source, seed=4).train]
    assert first != second
    assert first != other
    assert sorted(first) == sorted(second) == sorted(other)
    data.set_epoch(0)
    assert [key(sample) for sample in data] == first


def test_weights_are_shares_of_tokens(folder: Path) -> None:
    sources = [
        {"path": str(folder / "a.jsonl"), "weight": 3},
        {"path": str(folder / "b.jsonl"), "weight": 1},
    ]
    data = build(sources).train
    list(islice(data, 40))
    taken = [source.tokens for source in data._sources]
    assert taken[0] / taken[1] == pytest.approx(3, rel=0.1)
    rest = list(data)
    # An epoch goes on until each has ended; what ended before began again.
    assert data._sources[1].passes >= 1
    assert data._sources[0].passes >= 1
    assert rest


def resumed(data: Any, state: dict[str, Any]) -> list[str]:
    data.load_state_dict(json.loads(json.dumps(state)))
    return [key(sample) for sample in data]


def check_resumes(make: Any) -> None:
    """From anywhere, in another object, and again from where that one is."""
    expected = [key(sample) for sample in make()]
    for count in (1, 3, 4, 11, len(expected) - 1):
        data = make()
        iterator = iter(data)
        assert [key(next(iterator)) for _ in range(count)] == expected[:count]
        again = make()
        again.load_state_dict(json.loads(json.dumps(data.state_dict())))
        iterator = iter(again)
        further = min(5, len(expected) - count)
        assert [key(next(iterator)) for _ in range(further)] == expected[count : count + further]
        assert resumed(make(), again.state_dict()) == expected[count + further :]


@pytest.mark.parametrize("kind", ["files", "weights", "hf"])
def test_it_goes_on_exactly_anywhere_and_twice(kind: str, folder: Path) -> None:
    sources: Any = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    if kind == "weights":
        sources = [{"path": path, "weight": n + 1} for n, path in enumerate(sources)]
    if kind == "hf":
        datasets = pytest.importorskip("datasets")
        rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
        (folder / "set").mkdir()
        for part in (0, 1):
            made = datasets.Dataset.from_list(rows[part::2])
            made.to_parquet(folder / "set" / f"train-{part}.parquet")
        sources = [{"path": f"hf:{folder / 'set'}", "min_tokens": 3}]
    check_resumes(lambda: build(sources).train)


def test_a_resumed_run_reads_one_window_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is: counted are the documents that become tokens."""
    from lockstep.data.encoding import Encoder

    count = 0
    encode = Encoder.encode

    def counted(self: Encoder, record: Any) -> Any:
        nonlocal count
        count += 1
        return encode(self, record)

    monkeypatch.setattr(Encoder, "encode", counted)
    source = [str(folder / "a.jsonl")]
    most = []
    for place in (2, 12, 30):
        data = build(source).train
        list(islice(iter(data), place))
        state = data.state_dict()
        count = 0
        again = build(source).train
        again.load_state_dict(state)
        next(iter(again))
        most.append(count)
    assert max(most) < 40
    assert max(most) < 2 * min(most) + 10


def steps_of(data: Any, ranks: int, rank: int, state: Any = None, start: int = 0) -> IterableSteps:
    return IterableSteps(
        data,
        2,
        6,
        lambda count: assign_contiguous(count, rank, ranks),
        SourceSettings(start, 12, seed=3, device="cpu", reproducible=True),
        state=state,
    )


def micro_batches(steps: IterableSteps, count: int) -> dict[tuple[int, int], str]:
    found = {}
    for batches in islice(steps, count):
        for each in batches.mine:
            if each.real:
                found[batches.step, each.index] = key(each.batch)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_is_the_same_on_any_number_of_ranks(ranks: int, folder: Path) -> None:
    """Also where the run moves from one number of ranks to another."""
    sources = [
        {"path": str(folder / "a.jsonl"), "weight": 1},
        {"path": str(folder / "b.jsonl"), "weight": 1},
    ]
    alone = steps_of(build(sources).train, 1, 0)
    expected = micro_batches(alone, 12)
    assert len({step for step, _ in expected}) == 12  # more than one epoch
    before = steps_of(build(sources).train, 1, 0)
    iterator = iter(before)
    for _ in range(5):
        next(iterator)
    state = json.loads(json.dumps(before.state_dict()))
    whole: dict[tuple[int, int], str] = {}
    moved: dict[tuple[int, int], str] = {}
    for rank in range(ranks):
        whole |= micro_batches(steps_of(build(sources).train, ranks, rank), 12)
        later = steps_of(build(sources).train, ranks, rank, state, start=5)
        moved |= micro_batches(later, 7)
    assert whole == expected
    assert moved == {place: value for place, value in expected.items() if place[0] >= 5}


def test_a_text_that_comes_in_parts_is_one_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.data.text.CHUNK", 4)
    text = "abc\ndefghi\njklm\n"
    (folder / "c.txt").write_text(text)
    (sample,) = build(str(folder / "c.txt")).train
    assert bytes(sample["input_ids"].tolist()).decode() == text[:-1] + "\0"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"path": "a.jsonl", "epochs": 2}], "nobody knows how long a stream is"),
        ([{"path": "a.jsonl", "weight": 1}, "b.jsonl"], r"has a weight, and .* has none"),
        (
            [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 0}],
            "b.jsonl has the weight 0",
        ),
        ([{"path": "a.jsonl", "split": "train"}], "split beside a.jsonl"),
        ([{"path": "a.jsonl", "splits": "train"}], "takes no 'splits'; did you mean 'split'"),
        (["a.jsonl", {"path": "b.jsonl", "messages_field": "m"}], "some of the sources are conv"),
        (["prepared"], "prepared is prepared, and its lengths are known"),
        (["nothing.jsonl"], "there is no file or folder 'nothing.jsonl'"),
    ],
)
def test_bad_sources_are_refused(
    sources: Any, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "prepared").mkdir()
    (folder / "prepared" / "tokens.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=message):
        build(sources)


def test_a_source_of_which_nothing_is_kept_is_refused(folder: Path) -> None:
    data = build({"path": str(folder / "a.jsonl"), "min_tokens": 1000}).train
    with pytest.raises(UsageError, match="has no document to train on"):
        next(iter(data))
