"""The peak of a step, and its time, with the loss computed in chunks.

    python -m benchmarks.loss_chunks [--only single,fsdp:2] [--write]

A small transformer with a large vocabulary. The peak of live tensors is measured in the third step
on gloo ranks, every tensor followed from the operation that makes it to its last reference, and
predicted by the same step on fake tensors, as `lockstep plan` does. The time is the median of
`--rounds` steps of one process; the numbers of chunks take turns in each round.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import Config, config_from
from lockstep.models import get_model
from lockstep.models.language import set_token_losses
from lockstep.plan.rehearsal import rehearse
from lockstep.plan.stages import rehearse_rank
from lockstep.plan.tracker import Tracker
from lockstep.plan.workload import Workload
from lockstep.strategy import parse_topology, resolve
from lockstep.trainer import Trainer
from tests.parity.toy import unchecked
from tests.ranks import run_ranks

VOCABULARY = 8_192
LENGTH = 256
BATCH = 4
SIZES: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "dropout": 0.0}
CHUNKS = (1, 4, 16)
TOPOLOGIES = ("single", "fsdp:2", "pipeline:2", "tensor:2", "context:2")


class Texts(Dataset[dict[str, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(LENGTH) * 7 + index) % VOCABULARY
        return {"input_ids": ids, "targets": ids}


def made() -> nn.Module:
    return get_model("transformer")(**SIZES, vocab_size=VOCABULARY, block_size=LENGTH)


def config_of(topology: str, chunks: int) -> Config:
    values, _ = parse_topology(topology)
    return config_from(
        {
            **{f"distributed.{key}": value for key, value in values.items()},
            "training.batch_size": BATCH,
            "training.gradient_accumulation_steps": 2,
            "training.loss_chunks": chunks,
            "precision.mode": "fp32",
        }
    )


def trainer_of(topology: str, chunks: int) -> Trainer:
    with torch.device("meta"):
        model = made()
    return unchecked(Trainer(model, config=config_of(topology, chunks)))


def peaks(cases: Sequence[tuple[str, int]]) -> list[int]:
    """On every rank: the most bytes of live tensors in a third step."""
    found = []
    for topology, chunks in cases:
        with Tracker() as tracker:
            trainer = trainer_of(topology, chunks)
            steps = trainer.steps(Texts())
            next(steps)
            next(steps)
            tracker.restart()
            next(steps)
            found.append(tracker.peak)
            steps.close()  # type: ignore[attr-defined]
    return found


def predicted(topology: str, chunks: int, ranks: int) -> int:
    """The most of any rank."""

    def make() -> nn.Module:
        model = made()
        set_token_losses(model, label_smoothing=0, z_loss=0, chunks=chunks, has_loss_fn=False)
        return model

    config = config_of(topology, chunks)
    layout = resolve(config.distributed, ranks)
    work = Workload(make, Texts()[0])
    run = partial(rehearse, work, config, layout)
    if layout.pipeline > 1:
        run = partial(rehearse_rank, work, config, layout, layout.pipeline - 1)
    return run(micro_batches=2, device_type="cpu").peak.total


def times(rounds: int) -> dict[int, float]:
    """Chunks → seconds of a step of one process, in turns."""
    steps = {chunks: trainer_of("single", chunks).steps(Texts(), epochs=99) for chunks in CHUNKS}
    seconds: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
    for number in range(rounds + 1):
        for chunks, each in steps.items():
            begun = time.perf_counter()
            next(each)
            if number:
                seconds[chunks].append(time.perf_counter() - begun)
    return {chunks: median(each) for chunks, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(TOPOLOGIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    where = machine()
    cases = [(topology, chunks) for topology in asked.only.split(",") for chunks in CHUNKS]
    alone = [case for case in cases if case[0] == "single"]
    measured = dict(zip(alone, peaks(alone), strict=True))
    others = [case for case in cases if case not in measured]
    if others:
        of_ranks = run_ranks(peaks, 2, others, timeout=1800)
        measured |= dict(zip(others, map(max, *of_ranks), strict=True))
    rows = []
    for topology, chunks in cases:
        peak = measured[topology, chunks]
        planned = predicted(topology, chunks, 1 if topology == "single" else 2)
        rows.append(
            f"| {topology} | {chunks} | {peak / 2**20:.1f} | {planned / 2**20:.1f} |"
            f" {planned / peak - 1:+.1%} | {peak / measured[topology, 1]:.2f} |"
        )
        print(rows[-1], flush=True)
    found = times(asked.rounds)
    logits = BATCH * LENGTH * VOCABULARY * 4
    of_times = ", ".join(
        f"{chunks}: {seconds:.2f} s ({seconds / found[1]:.2f})" for chunks, seconds in found.items()
    )
    left_out = [each for each in TOPOLOGIES if each not in asked.only.split(",")]
    not_run = f" Not run: {', '.join(left_out)}." if left_out else ""
    text = page(
        "The loss in chunks",
        f"python -m benchmarks.loss_chunks --only {asked.only} --rounds {asked.rounds} --write",
        where,
        [
            f"A transformer of 2 layers of width 64 and {VOCABULARY:,} tokens, micro-batches of"
            f" {BATCH} × {LENGTH} positions, fp32, AdamW. The logits of a micro-batch are"
            f" {logits / 2**20:.0f} MiB. MiB are the peak of live tensors in the third step of the"
            " rank with the most.",
        ],
        "| topology | chunks | measured MiB | `lockstep plan` | error | of one chunk |",
        rows,
        [
            f"Seconds of a step of one process, by chunks, medians of {asked.rounds} in turns (of"
            f" one chunk): {of_times}. The logits are computed twice where there are chunks: once"
            f" forward, once in the backward pass.{not_run}"
        ],
    )
    tell(text, RESULTS / "loss_chunks.md" if asked.write else None)


if __name__ == "__main__":
    main()
