"""Measures how long training stands still for a save, in the background and not.

    python -m benchmarks.checkpoint_stall [--millions 25] [--saves 5] [--ranks 1,2,4]
        [--folder DIR] [--write]

The same model on the same storage, alone and sharded over ranks of this machine; the run's own
figure (`save_stall` in events.jsonl) is read. The first save in the background also makes the
buffers that later ones use again, so it is given apart.
"""

import argparse
import json
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.page import RESULTS, machine, page, tell
from lockstep import Trainer
from lockstep.config import config_from
from tests.ranks import run_ranks

WIDTH = 1024
EVERY = 4  # steps from save to save


class Rows(Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), index / 64), torch.zeros(WIDTH)


def stalls(
    folder: Path, layers: int, saves: int, *, background: bool
) -> tuple[list[float], list[float], int]:
    """Seconds of each save but the last, which is waited for either way; those that it waited for
    the one before; and the bytes of a checkpoint. On every rank; rank 0 reads.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = config_from(
        {
            "training.max_steps": EVERY * (saves + 1),
            "training.batch_size": 1,
            "training.eval_steps": None,
            "precision.mode": "fp32",
            "distributed.strategy": "fsdp" if dist.get_world_size() > 1 else "single",
            "distributed.fsdp.auto_wrap_policy": ["Linear"],
            "checkpoint.save_steps": EVERY,
            "checkpoint.save_total_limit": 1,
            "checkpoint.async": background,
            "monitor.sinks": ["jsonl"],
        }
    )
    Trainer(model, loss_fn=nn.functional.mse_loss, config=config, output_dir=folder).train(Rows())
    dist.barrier()
    if dist.get_rank() != 0:
        return [], [], 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "save_stall"]
    seconds = [event["seconds"] - event["waited_for_previous"] for event in told]
    waits = [event["waited_for_previous"] for event in told]
    newest = max(folder.glob("checkpoints/step-*"))
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return seconds[:-1], waits[1:-1], size


def row(ranks: int, layers: int, saves: int, where: Path | None) -> str:
    measure = import_module("benchmarks.checkpoint_stall").on_rank  # as other processes find it
    folder = Path(tempfile.mkdtemp(prefix="lockstep-stall-", dir=where))
    try:
        found = run_ranks(measure, ranks, folder, layers, saves, timeout=900)[0]
    finally:
        shutil.rmtree(folder)
    (waiting, _, size), ((first, *later), waits, _) = found
    return (
        f"| {ranks} | {size / 2**20:.0f} | {_spread(waiting)} | {first:.3f} | {_spread(later)} |"
        f" {_spread(waits)} | {median(later) / median(waiting):.1%} |"
    )


def on_rank(folder: Path, layers: int, saves: int) -> tuple[object, object]:
    return (
        stalls(folder / "sync", layers, saves, background=False),
        stalls(folder / "async", layers, saves, background=True),
    )


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=25, help="parameters")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    layers = max(1, round(asked.millions * 1e6 / WIDTH**2))
    rows = []
    for ranks in map(int, asked.ranks.split(",")):
        rows.append(row(ranks, layers, asked.saves, asked.folder))
        print(rows[-1], flush=True)
    command = f"--millions {asked.millions} --saves {asked.saves} --ranks {asked.ranks}"
    text = page(
        "How long a save stops training",
        f"python -m benchmarks.checkpoint_stall {command} --write",
        machine(),
        [
            (
                "Model and AdamW, alone and sharded (fsdp) over ranks that share the machine's"
                " cores and its disk; CRC-32"
            ),
            (
                "of every byte, every file synced. Seconds: median (least–most). The first save in"
                " the background makes"
            ),
            (
                f"its buffers. `waits`: for the save before to be written, where {EVERY} steps take"
                " less time than that;"
            ),
            (
                "one is under way at a time. Last: later saves in the background over those that"
                " are waited for."
            ),
        ],
        "| ranks | MiB | `async: false` | `async: true`, first | later | waits | of a save that is"
        " waited for |",
        rows,
    )
    tell(text, RESULTS / "checkpoint_stall.md" if asked.write else None)


if __name__ == "__main__":
    main()
