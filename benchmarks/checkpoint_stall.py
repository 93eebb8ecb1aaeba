"""How long training stands still for a save: in the background, and not.

    python -m benchmarks.checkpoint_stall [--millions 25] [--saves 5] [--folder DIR]

One process, one model, the same storage; the run's own figure (`save_stall` in events.jsonl) is read. The first save in
the background also makes the buffers that later ones use again, so it is given apart.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.page import tell
from lockstep import Trainer
from lockstep.config import config_from

WIDTH = 1024


class Rows(Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), index / 64), torch.zeros(WIDTH)


def stalls(folder: Path, layers: int, saves: int, *, background: bool) -> tuple[list[float], list[float], int]:
    """Seconds of each save but the last, which is waited for either way; those that it waited for the one before; and
    the bytes of a checkpoint.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    every = 4  # steps; the writer has time to end
    config = config_from(
        {
            "training.max_steps": every * (saves + 1),
            "training.batch_size": 1,
            "training.eval_steps": None,
            "precision.mode": "fp32",
            "checkpoint.save_steps": every,
            "checkpoint.save_total_limit": 1,
            "checkpoint.async": background,
            "monitor.sinks": ["jsonl"],
        }
    )
    Trainer(model, loss_fn=nn.functional.mse_loss, config=config, output_dir=folder).train(Rows())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "save_stall"]
    seconds = [event["seconds"] - event["waited_for_previous"] for event in told]
    waits = [event["waited_for_previous"] for event in told]
    newest = max(folder.glob("checkpoints/step-*"))
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return seconds[:-1], waits[1:-1], size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=25, help="parameters")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-stall-", dir=given.folder))
    layers = max(1, round(given.millions * 1e6 / WIDTH**2))
    waiting, _, size = stalls(folder / "sync", layers, given.saves, background=False)
    (first, *later), waits, _ = stalls(folder / "async", layers, given.saves, background=True)
    share = median(later) / median(waiting)
    text = f"""# How long a save stops training

`python -m benchmarks.checkpoint_stall --millions {given.millions} --saves {given.saves}`: one process on the CPU,
a checkpoint of {size / 2**20:.0f} MiB (model and AdamW), CRC-32 of every byte, every file synced.

| | median s | least | most |
|---|---|---|---|
| `async: false` | {median(waiting):.3f} | {min(waiting):.3f} | {max(waiting):.3f} |
| `async: true`, first save (makes its buffers) | {first:.3f} | | |
| `async: true`, later saves | {median(later):.3f} | {min(later):.3f} | {max(later):.3f} |
| waiting for the save before to be written | {median(waits):.3f} | {min(waits):.3f} | {max(waits):.3f} |

The last row is there where saves come faster than the storage takes them: one is under way at a time.
A save in the background stops training for {share:.1%} of the time of one that is waited for.
"""
    tell(text, given.output)


if __name__ == "__main__":
    main()
