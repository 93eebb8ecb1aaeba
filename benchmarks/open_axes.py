"""What it costs a reproducible run on one process to keep the axes `tensor` and `context` open.

    python -m benchmarks.open_axes [--rounds 9] [--write]

One model, one trainer for each value of `distributed.open_axes`, in one process; they take a step
in turn. A step's time is divided by that of the run that keeps none open in the same round; the
median of these ratios is quoted, with the middle half of them.
"""

import argparse
import platform
import time
from statistics import median, quantiles
from typing import Literal

import torch

from benchmarks.page import RESULTS, machine, page, tell
from lockstep import Trainer
from lockstep.models import get_model

OPEN: dict[str, list[Literal["tensor", "context"]]] = {
    "[]": [],
    "[tensor]": ["tensor"],
    "[tensor, context]": ["tensor", "context"],
}
LAYERS = 4
VOCABULARY = 512
LENGTH = 256
SAMPLES = 4
WIDTHS = (128, 384)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many samples as the benchmark takes."""

    deterministic = True

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(
            0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": ids[:-1], "targets": ids[1:]}


def ratios(width: int, rounds: int) -> dict[str, list[float]]:
    """Times of a step over those of the run that keeps none open, of each round."""
    running = {}
    for name, axes in OPEN.items():
        torch.manual_seed(0)
        model = get_model("transformer")(
            n_layer=LAYERS,
            n_head=8,
            n_embd=width,
            vocab_size=VOCABULARY,
            block_size=LENGTH,
            dropout=0.0,
        )
        trainer = Trainer(
            model,
            strategy="single",
            reproducible=True,
            open_axes=axes,
            batch_size=SAMPLES,
            max_steps=rounds + 2,
        )
        running[name] = trainer.steps(Tokens(), progress=False)
    found: dict[str, list[float]] = {name: [] for name in OPEN}
    for number in range(rounds + 1):
        seconds = {}
        for name in [*OPEN][number % len(OPEN) :] + [*OPEN][: number % len(OPEN)]:
            begin = time.perf_counter()
            next(running[name])
            seconds[name] = time.perf_counter() - begin
        if number:  # the first step compares losses
            for name in OPEN:
                found[name].append(seconds[name] / seconds["[]"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = []
    for width in WIDTHS:
        for name, found in ratios(width, asked.rounds).items():
            low, _, high = quantiles(found, n=4)
            rows.append(f"| {width} | `{name}` | {median(found):.2f} | {low:.2f} – {high:.2f} |")
            print(rows[-1], flush=True)
    text = page(
        "What open axes cost a reproducible run on one process",
        f"python -m benchmarks.open_axes --write --rounds {asked.rounds}",
        f"torch {torch.__version__}, {platform.machine()}, one thread, {machine()}",
        [
            (
                f"Transformer of {LAYERS} layers, {SAMPLES} samples of {LENGTH} tokens a step, with"
                " its update."
            ),
            (
                "A step's time over that with `open_axes: []` in the same round: the median of"
                f" {asked.rounds} rounds,"
            ),
            "and the middle half.",
        ],
        "| width | `open_axes` | time | middle half |",
        rows,
    )
    tell(text, RESULTS / "open_axes.md" if asked.write else None)


if __name__ == "__main__":
    main()
