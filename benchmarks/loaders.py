"""Samples a second of the loaders, beside reading the same samples from the raw memory map; and
whether a step waits.

    pip install litdata grain                         # what is not installed is left out, and said
    python -m benchmarks.loaders [--samples 20000] [--rounds 5] [--write]

A file of tokens as `lockstep data prepare` makes it; micro-batches of 8 windows of 256 tokens, in
the shuffled order of an epoch. The raw loop slices the map and stacks, and does nothing else.
`datasets` has the windows as rows of a table, litData as its own chunks of tokens, Grain reads the
memory map. Contestants take turns, medians are quoted. A step that takes no time but 1 ms of sleep
waits for its batch as long as `waits` says.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.data.batches import SourceSettings, assign_contiguous
from lockstep.data.loader import StepLoader
from lockstep.data.order import SampleOrder
from lockstep.data.permutation import epoch_permutation
from lockstep.data.text import tokens
from lockstep.data.token_folder import FORMAT, HEADER, TOKENS

BLOCK = 256
BATCH = 8
STEP_SECONDS = 0.001


def prepare(folder: Path, samples: int) -> None:
    count = samples * BLOCK + 1
    numbers = np.random.default_rng(0).integers(0, 50_000, count, dtype=np.uint16)
    numbers.tofile(folder / TOKENS)
    header = {
        "format": FORMAT,
        "dtype": "uint16",
        "num_tokens": count,
        "vocab_size": 50_000,
        "tokenizer": "bytes",
    }
    (folder / HEADER).write_text(json.dumps({**header, "source": "random"}))


def raw(folder: Path, samples: int) -> Iterator[Any]:
    mapped = np.memmap(folder / TOKENS, dtype="<u2", mode="r")
    order = epoch_permutation(samples, 1, 0).tolist()
    for first in range(0, samples, BATCH):
        rows = [mapped[i * BLOCK : i * BLOCK + BLOCK + 1] for i in order[first : first + BATCH]]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        yield {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}


def torch_loader(workers: int) -> Callable[[Path, int], Iterator[Any]]:
    def batches(folder: Path, samples: int) -> Iterator[Any]:
        data = tokens(path=str(folder), block_size=BLOCK, validation_fraction=0.0).train
        yield from DataLoader(data, BATCH, shuffle=True, num_workers=workers)

    return batches


def ours(workers: int) -> Callable[[Path, int], Iterator[Any]]:
    def batches(folder: Path, samples: int) -> Iterator[Any]:
        data = tokens(path=str(folder), block_size=BLOCK, validation_fraction=0.0).train
        order = SampleOrder(len(data), BATCH, BATCH, seed=1)
        loader = StepLoader(
            data,
            order,
            lambda count: assign_contiguous(count, 0, 1),
            SourceSettings(0, order.steps_per_epoch, seed=1, device="cpu"),
            num_workers=workers,
        )
        for step in loader:
            yield step.mine[0].batch

    return batches


def windows_of(folder: Path, samples: int) -> Any:
    """The samples as rows of BLOCK + 1 tokens."""
    mapped = np.memmap(folder / TOKENS, dtype="<u2", mode="r")
    return np.lib.stride_tricks.sliding_window_view(mapped, BLOCK + 1)[::BLOCK][:samples]


def hugging_face(folder: Path, samples: int) -> Iterator[Any]:
    """The package datasets: a table of windows on the disk, shuffled, as tensors."""
    import datasets

    saved = folder / "table"
    if not saved.exists():
        rows = {"window": windows_of(folder, samples).astype(np.int32)}
        datasets.Dataset.from_dict(rows).save_to_disk(str(saved))
    table = datasets.load_from_disk(str(saved)).with_format("torch").shuffle(seed=1)
    for batch in table.iter(BATCH):
        windows = batch["window"].long()
        yield {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}


def litdata(folder: Path, samples: int) -> Iterator[Any]:
    """LitData: chunks of tokens, which it shuffles."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import Cache

    chunks = folder / "chunks"
    loader = TokensLoader(block_size=BLOCK + 1)
    if not chunks.exists():
        chunks.mkdir()
        cache = Cache(str(chunks), chunk_size=(BLOCK + 1) * 1024, item_loader=loader)
        for number, window in enumerate(windows_of(folder, samples)):
            cache[number] = torch.from_numpy(window.astype(np.int32))
        cache.done()
        cache.merge()
    data = StreamingDataset(str(chunks), item_loader=loader, shuffle=True, seed=1)
    for batch in StreamingDataLoader(data, batch_size=BATCH, num_workers=0):
        windows = batch.long()
        yield {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}


def grain(folder: Path, samples: int) -> Iterator[Any]:
    """Grain: a source of random access, its index shuffle, its batches."""
    import grain as library

    class Windows:
        def __init__(self) -> None:
            self._mapped = np.memmap(folder / TOKENS, dtype="<u2", mode="r").view(np.ndarray)

        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: Any) -> Any:
            return self._mapped[index * BLOCK : index * BLOCK + BLOCK + 1].astype(np.int64)

    data = library.MapDataset.source(Windows()).shuffle(seed=1).batch(BATCH)
    for batch in data.to_iter_dataset(library.ReadOptions(num_threads=0, prefetch_buffer_size=0)):
        windows = torch.from_numpy(batch)
        yield {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}


OTHERS = {"datasets": hugging_face, "litdata": litdata, "grain": grain}

CONTESTANTS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    "raw memory map": raw,
    "torch's DataLoader": torch_loader(0),
    "lockstep": ours(0),
    "torch's DataLoader, 1 worker": torch_loader(1),
    "lockstep, 1 worker": ours(1),
}


def installed() -> tuple[dict[str, Callable[[Path, int], Iterator[Any]]], list[str]]:
    """The contestants, and a line on those that are not installed."""
    there = {name: call for name, call in OTHERS.items() if find_spec(name) is not None}
    missing = [name for name in OTHERS if name not in there]
    versions = ", ".join(f"{name} {version(name)}" for name in there)
    lines = [f"Beside {versions}." if there else ""]
    lines += [f"Not installed: {', '.join(missing)}."] if missing else []
    return {**CONTESTANTS, **there}, [line for line in lines if line]


def rate(batches: Iterator[Any], samples: int) -> float:
    """Samples a second, after the first batch, which starts workers."""
    next(batches)
    begin = time.perf_counter()
    counted = sum(BATCH for _ in batches)
    return min(counted, samples) / (time.perf_counter() - begin)


def waits(batches: Iterator[Any], steps: int = 1000) -> float:
    """The share of the time that a step of 1 ms waits for its batch."""
    next(batches)
    waited = 0.0
    begin = time.perf_counter()
    for _, since in zip(range(steps), iter(time.perf_counter, None), strict=False):
        if next(batches, None) is None:
            break
        waited += time.perf_counter() - since
        time.sleep(STEP_SECONDS)
    return waited / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    contestants, said = installed()
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    shares: dict[str, list[float]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), asked.samples)
        for _ in range(asked.rounds):
            for name, make in contestants.items():
                rates[name].append(rate(make(Path(folder), asked.samples), asked.samples))
                shares[name].append(waits(make(Path(folder), asked.samples)))
    rows = []
    for name in contestants:
        ratio = median(a / b for a, b in zip(rates[name], rates["raw memory map"], strict=True))
        rows.append(
            f"| {name} | {median(rates[name]):,.0f} | {ratio:.2f} | {median(shares[name]):.1%} |"
        )
    text = page(
        "Samples a second of the loaders",
        f"python -m benchmarks.loaders --samples {asked.samples} --rounds {asked.rounds} --write",
        machine(),
        [
            (
                f"Batches of {BATCH} windows of {BLOCK} tokens from a file of uint16; medians of"
                f" {asked.rounds} rounds,"
            ),
            (
                "the contestants in turn. The last column: the share of its time that a step of 1"
                " ms waits for its batch."
            ),
            *said,
        ],
        "| loader | samples/s | of the raw map | waits |",
        rows,
    )
    tell(text, RESULTS / "loaders.md" if asked.write else None)


if __name__ == "__main__":
    main()
