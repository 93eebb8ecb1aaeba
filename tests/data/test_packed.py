"""Packed documents: each target once, documents kept apart, and what a late step costs."""

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data import Data, build_data
from lockstep.data.packed import PackedDocuments
from lockstep.data.packing import PACKINGS, PackingPlan
from lockstep.data.prepare import prepare
from lockstep.errors import UsageError
from tests.data.shared import adopt, everything, plain, share, whole_from

TEXTS = {
    "long": [f"{n}:" + "abcdefghij" * (n % 13) for n in range(80)],
    "short": [f"<{n}>" for n in range(30)],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, texts in TEXTS.items():
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    prepare(tmp_path / "long.jsonl", tmp_path / "long")
    return tmp_path


def mixture(folder: Path, **args: Any) -> Data:
    sources = [
        {"path": str(folder / "long"), "weight": 0.7},
        {"path": str(folder / "short.jsonl"), "weight": 0.3, "min_tokens": 4},
    ]
    all_args = {"sources": sources, "sequence_length": 48, **args}
    return build_data(DataConfig(name="documents", args=all_args))


def pairs(sample: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """(input, target) where a target counts."""
    counts = sample["targets"] != -100
    return list(
        zip(sample["input_ids"][counts].tolist(), sample["targets"][counts].tolist(), strict=True)
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_token_is_predicted_once_from_its_own_document(packing: str, folder: Path) -> None:
    data = build_data(
        DataConfig(
            name="documents",
            args={"sources": str(folder / "long"), "sequence_length": 24, "packing": packing},
        )
    ).train
    expected = Counter(pair for text in TEXTS["long"] for pair in itertools.pairwise(text.encode()))
    assert Counter(pair for n in range(len(data)) for pair in pairs(data[n])) == expected
    for n in range(len(data)):
        ids = data[n]["document_ids"]
        inside = ids[1:] == ids[:-1]
        counts = data[n]["targets"][:-1] != -100
        follows = data[n]["targets"][:-1] == data[n]["input_ids"][1:]
        assert follows[inside & counts].all()
    together = data.collated([3, 0])
    assert torch.equal(together["targets"][0], data[3]["targets"])
    with pytest.raises(IndexError):
        data[len(data)]


def steps_of(data: Any, **options: Any) -> list[Any]:
    config = options.pop("config", DataConfig())
    arguments = {"start_step": 0, "stop_step": 30, "assign": everything, **options}
    source = adopt(
        data, config, batch_size=2, global_batch_size=6, seed=5, device="cpu", **arguments
    )
    found = plain(list(source))
    source.close()
    return found


def test_steps_are_the_same_on_any_ranks_and_workers_and_after_any_resume(folder: Path) -> None:
    data = mixture(folder).train
    whole = steps_of(data)
    assert len({row[1] for row in whole}) > 1  # epochs
    for ranks in (2, 3):
        parts = [steps_of(data, assign=share(rank, ranks)) for rank in range(ranks)]
        assert whole_from(parts) == whole
    workers = DataConfig(num_workers=2)
    assert steps_of(data, config=workers, start_step=7) == whole[7:]
    for start in (1, 13, 29):
        again = pickle.loads(pickle.dumps(data))
        assert steps_of(again, start_step=start) == whole[start:]


def test_sources_come_as_weights_say(folder: Path) -> None:
    data = mixture(folder).train
    order = data.epoch_order(1, shuffle=True)
    first = data._bounds[1]
    found = [sample >= first for sample in order.samples(0, range(10_000))]
    assert sum(found) == 3000
    with pytest.raises(UsageError, match="mixed at random"):
        steps_of(data, config=DataConfig(shuffle=False))


def test_the_first_sequences_of_a_validation_are_of_all_sources(folder: Path) -> None:
    """Those that an evaluation of a few batches reads; each sequence is there once."""
    held = mixture(folder, validation_fraction=0.5).validation
    assert held is not None
    parts = held.by_source().values()
    assert len(parts) > 1
    texts = [bytes(held[n]["input_ids"].tolist()) for n in range(len(held))]
    by_source = [{bytes(part[n]["input_ids"].tolist()) for n in range(len(part))} for part in parts]
    assert set(texts) == set().union(*by_source)
    count = len(held) // 2 + 1
    for some in (texts[:count], texts[-count:]):
        assert all(set(some) & of_source for of_source in by_source)


def test_validation_is_held_out_or_named(folder: Path) -> None:
    held = mixture(folder, validation_fraction=0.25)
    assert held.validation is not None
    seen = b"".join(
        bytes(held.validation[n]["input_ids"].tolist()) for n in range(len(held.validation))
    )
    assert b"79:" in seen
    assert b"20:" not in seen
    assert b"<29" in seen
    named = mixture(folder, validation=[str(folder / "short.jsonl")])
    assert len(named.train) == len(mixture(folder).train)
    assert mixture(folder).validation is None
    assert len(steps_of(named.validation, for_evaluation=True, epochs=1, stop_step=None)) > 0


class CountedTokens:
    """2^33 tokens of 2^30 documents, that count how often they, or the ends, are read."""

    def __init__(self, *, ends: bool) -> None:
        self.ends = ends
        self.reads = 0

    def __len__(self) -> int:
        return 2**30 if self.ends else 2**33

    def __getitem__(self, where: slice) -> np.ndarray[Any, Any]:
        self.reads += 1
        found = np.arange(where.start, where.stop)
        return (found + 1) * 8 if self.ends else found % 251


def test_a_late_step_reads_as_much_as_an_early_one() -> None:
    reads = {}
    for step in (10, 1_000_000):
        tokens = CountedTokens(ends=False)
        ends = CountedTokens(ends=True)
        plans = [PackingPlan(ends, 32, "first_fit") for _ in range(2)]
        data = PackedDocuments([tokens, tokens], plans, [7000, 3000], 2**27)
        ends.reads = 0
        steps_of(data, start_step=step, stop_step=step + 1)
        reads[step] = ends.reads + tokens.reads
    assert 0.9 < reads[1_000_000] / reads[10] < 1.1
    assert reads[10] < 6 * (2 * 32 + 20)
