"""Measures how fast a checkpoint is written and read, against the disk's own rate.

Both are measured in the same run, on 1, 2 and 4 ranks.

    python -m benchmarks.checkpoint_rate [--millions 25] [--rounds 3] [--ranks 1,2,4]
        [--folder DIR] [--write]

The disk's own rate: `dd` of as many bytes into one file with `conv=fsync`, before each save; and
once more past the page cache (`oflag=direct`), which is as fast as the disk is, and asks nothing of
the processor. A save is the whole of it: copy, CRC-32, files, folders and manifest synced, renamed.
All ranks write to the same disk, each its shard (fsdp), so that more ranks cannot be faster than
the disk. Reading is that of the newest checkpoint, checked, from the page cache.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import config_from
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

WIDTH = 1024


def trainer_of(layers: int) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = config_from(
        {"training.batch_size": 1, "precision.mode": "fp32", "distributed.strategy": "fsdp"}
    )
    return Trainer(model, loss_fn=nn.functional.mse_loss, config=config)


def on_rank(layers: int, rounds: int, folder: str) -> dict[str, Any]:
    """Of each round: seconds of `dd`, of a direct one, of a save, of a load; and the bytes of a
    checkpoint.
    """
    trainer = trainer_of(layers)
    trainer.training_step((torch.ones(1, WIDTH), torch.zeros(1, WIDTH)))
    found: dict[str, Any] = {"dd": [], "direct": [], "save": [], "load": []}
    size = 12 * trainer.placed.num_parameters  # parameters and AdamW's two states
    for number in range(rounds + 1):
        place = Path(folder, str(number))
        first = dist.get_rank() == 0
        plain = disk(Path(folder), size) if first else 0.0
        direct = disk(Path(folder), size, "oflag=direct") if first else 0.0
        saved, path = timed(lambda place=place: trainer.save_checkpoint(place))
        loaded, _ = timed(lambda path=path: trainer.load_checkpoint(path))
        if number:  # the first makes buffers and groups
            for key, value in (
                ("dd", plain),
                ("direct", direct),
                ("save", saved),
                ("load", loaded),
            ):
                found[key].append(value)
        dist.barrier()
        if dist.get_rank() == 0:
            found["bytes"] = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
            shutil.rmtree(place)
    return found


def timed(call: Any) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    dist.barrier()
    return time.perf_counter() - begin, result


def disk(folder: Path, size: int, *how: str) -> float:
    """Seconds in which `dd` writes and syncs so many bytes."""
    target = folder / "dd"
    begin = time.perf_counter()
    count = max(1, size >> 20)
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={count}", "conv=fsync", *how]
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - begin
    target.unlink()
    return taken


def row(ranks: int, layers: int, rounds: int, where: Path | None) -> str:
    folder = tempfile.mkdtemp(prefix="lockstep-rate-", dir=where)
    try:
        measure = import_module("benchmarks.checkpoint_rate").on_rank  # as other processes find it
        found = run_ranks(measure, ranks, layers, rounds, folder, timeout=1800)[0]
    finally:
        shutil.rmtree(folder)
    size = found["bytes"] / 1e6
    of_dd, of_direct = (
        median(disk / save for disk, save in zip(found[key], found["save"], strict=True))
        for key in ("dd", "direct")
    )
    dd, direct, save, load = (median(found[key]) for key in ("dd", "direct", "save", "load"))
    return (
        f"| {ranks} | {size:.0f} | {size / dd:.0f} | {size / direct:.0f} | {size / save:.0f} |"
        f" {of_dd:.2f} | {of_direct:.2f} | {load:.2f} | {size / load:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=25, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    layers = max(1, round(asked.millions * 1e6 / WIDTH**2))
    rows = []
    for ranks in map(int, asked.ranks.split(",")):
        rows.append(row(ranks, layers, asked.rounds, asked.folder))
        print(rows[-1], flush=True)
    command = f"--millions {asked.millions} --rounds {asked.rounds} --ranks {asked.ranks}"
    text = page(
        "Writing and reading checkpoints",
        f"python -m benchmarks.checkpoint_rate {command} --write",
        machine(),
        [
            (
                f"fsdp, AdamW, one disk for all ranks; medians of {asked.rounds} rounds, `dd` and"
                " save in turn. Goal:"
            ),
            (
                "0.8 of the disk's rate. `dd` writes through the page cache, and is as fast as that"
                " has pages at hand;"
            ),
            (
                "a direct `dd` is the disk alone, beside which a save takes time for checksums and"
                " copies on its core."
            ),
        ],
        "| ranks | MB | dd, MB/s | direct, MB/s | save, MB/s | of dd | of direct | load, s | load,"
        " MB/s |",
        rows,
    )
    tell(text, RESULTS / "checkpoint_rate.md" if asked.write else None)


if __name__ == "__main__":
    main()
