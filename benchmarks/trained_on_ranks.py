"""nanoGPT's published recipe for a CPU on 1, 2 and 4 ranks, beside a loop by hand of the same model
and recipe.

As nanoGPT does it, all of them: the vocabulary is that of the text's own characters, a step draws
random places of the text, and the loss at the end is estimated on 20 batches of random places of
the held-out text, the same for all. Replicas of the loop by hand are torch's DDP. A third run of
each size asks for the same bits.

    python -m benchmarks.trained_on_ranks --text tinyshakespeare.txt --write
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.page import RESULTS, machine, page, tell
from benchmarks.trained import BLOCK, MODELS, RECIPE
from lockstep import checkpoint
from lockstep.data.batches import CollatingDataset, Data
from lockstep.report.read import read_run

BATCH = 12
RANKS = (1, 2, 4)
SAME = BATCH // max(
    RANKS
)  # samples of a micro-batch where bits count: any number of ranks has some
EVERY = 50
MODEL: dict[str, Any] = MODELS["GPT-2"] | {"args": MODELS["GPT-2"]["args"] | {"vocab_size": 65}}
EVALUATED = 20 * BATCH  # samples of the estimate at the end


class Outcome(NamedTuple):
    """Loss on the held-out text at the end; seconds of a step (median), of the whole command, of
    all processors in it; digest of the weights.
    """

    loss: float
    step: float
    whole: float
    processors: float
    digest: str = ""


class RandomPlaces(CollatingDataset):
    """Blocks of a text at random places.

    Args:
        ids: of the text's characters.
        samples: how many there are.
        seed: of the places.
    """

    def __init__(self, ids: Tensor, samples: int, seed: int) -> None:
        self.ids = ids
        generator = torch.Generator().manual_seed(seed)
        self.places = torch.randint(len(ids) - BLOCK, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.places)

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return inputs and targets, [B, BLOCK] each."""
        inputs, targets = blocks(self.ids, self.places[list(indices)])
        return {"input_ids": inputs, "targets": targets}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.collated([index]).items()}


def split(path: Path) -> tuple[Tensor, Tensor]:
    """Return the first nine tenths of a text, and the rest, as numbers of its characters."""
    text = path.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([numbers[character] for character in text], dtype=torch.uint8)
    border = int(0.9 * len(ids))
    return ids[:border], ids[border:]


def characters(path: str, steps: int) -> Data:
    """Return the data of so many steps, for `data.name` of a config."""
    training, held_out = split(Path(path))
    drawn = RandomPlaces(training, steps * BATCH, seed=1337)
    return Data(drawn, RandomPlaces(held_out, EVALUATED, seed=1338))


def lockstep(text: Path, ranks: int, steps: int, folder: Path, *, same_bits: bool) -> Outcome:
    run = folder / f"{ranks}{'-same' if same_bits else ''}"
    config = {
        "model": MODEL,
        "training": (
            RECIPE
            | {
                "max_steps": steps,
                "batch_size": SAME if same_bits else BATCH // ranks,
                "global_batch_size": BATCH,
                "eval_steps": steps,
            }
        ),
        "distributed": {"strategy": "single" if ranks == 1 else "ddp", "reproducible": same_bits},
        "precision": {"mode": "fp32"},
        "data": {
            "name": "benchmarks.trained_on_ranks:characters",
            "args": {"path": str(text.resolve()), "steps": steps},
        },
        "checkpoint": {"save_steps": steps},
        "monitor": {"sinks": ["jsonl"], "log_steps": EVERY},
    }
    path = run.with_suffix(".yaml")
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "lockstep", "train", str(path), "--output-dir", str(run)]
    whole, processors = timed([*command, "--nproc-per-node", str(ranks)])
    data = read_run(run)
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    step = median(row["step_seconds"] for row in data.rows)
    loss = data.evaluations[-1]["eval_loss"]
    return Outcome(loss, step, whole, processors, checkpoint.digest(newest))


def timed(command: Sequence[Any]) -> tuple[float, float]:
    """Run a command; return the seconds that it takes, and those of all processors in it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return whole, used


def by_hand(text: Path, ranks: int, steps: int, folder: Path) -> Outcome:
    answer = folder / f"hand-{ranks}.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        sys.executable,
        *torchrun,
        "-m",
        "benchmarks.trained_on_ranks",
        "--text",
        text,
        "--hand",
        answer,
    ]
    whole, processors = timed([*command, "--steps", str(steps)])
    loss, step = json.loads(answer.read_text())
    return Outcome(loss, step, whole, processors)


def train_by_hand(path: Path, steps: int) -> tuple[float, float]:
    """What each rank of the loop by hand does; (loss on the held-out text, seconds of a step)."""
    from transformers import AutoModelForCausalLM, GPT2Config

    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1337)
    model = AutoModelForCausalLM.from_config(GPT2Config(**MODEL["args"], use_cache=False))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": RECIPE["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=RECIPE["learning_rate"], fused=True, **RECIPE["optimizer_args"]
    )
    wrapped = DistributedDataParallel(model) if world > 1 else model
    training, held_out = split(path)
    torch.manual_seed(1337 + rank)
    seconds = []
    begun = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        inputs, targets = blocks(training, torch.randint(len(training) - BLOCK, (BATCH // world,)))
        loss_of(wrapped, inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["gradient_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0:
            seconds.append((time.perf_counter() - begun) / EVERY)
            begun = time.perf_counter()
    places = RandomPlaces(held_out, EVALUATED, seed=1338).places[rank::world]
    model.eval()
    with torch.no_grad():
        chunks = places.split(64)
        summed = sum(
            (loss_of(model, *blocks(held_out, chunk)) * len(chunk) for chunk in chunks),
            torch.tensor(0.0),
        )
    total = torch.stack([summed, torch.tensor(float(len(places)))])
    if world > 1:
        dist.all_reduce(total)
        dist.destroy_process_group()
    return float(total[0] / total[1]), median(seconds)


def rate(step: int, steps: int) -> float:
    if step < RECIPE["warmup_steps"]:
        return float(RECIPE["learning_rate"] * (step + 1) / RECIPE["warmup_steps"])
    share = (step - RECIPE["warmup_steps"]) / (steps - RECIPE["warmup_steps"])
    low = RECIPE["min_lr_ratio"]
    return float(
        RECIPE["learning_rate"] * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
    )


def blocks(text: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), [B, BLOCK] each."""
    cut = torch.stack([text[place : place + BLOCK + 1] for place in places.tolist()]).long()
    return cut[:, :-1], cut[:, 1:]


def loss_of(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=RECIPE["max_steps"])
    parser.add_argument("--write", action="store_true", help="write results/trained_on_ranks.md")
    # a rank of the loop by hand; where rank 0 answers
    parser.add_argument("--hand", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hand:
        found = train_by_hand(args.text, args.steps)
        if os.environ["RANK"] == "0":
            args.hand.write_text(json.dumps(found))
        return
    where = machine()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in RANKS:
            hand = by_hand(args.text, ranks, args.steps, folder)
            ours = lockstep(args.text, ranks, args.steps, folder, same_bits=False)
            same = lockstep(args.text, ranks, args.steps, folder, same_bits=True)
            for what, one in (("by hand", hand), ("Lockstep", ours), ("Lockstep, same bits", same)):
                rows.append(
                    f"| {ranks} | {what} | {one.loss:.4f} | {1000 * one.step:.1f} ms |"
                    f" {one.step / hand.step:.2f} | {one.whole:.0f} s | {one.processors:.0f} s |"
                    f" {one.digest[:16]} |"
                )
                print(rows[-1], flush=True)
    text = page(
        "nanoGPT's recipe on ranks",
        "python -m benchmarks.trained_on_ranks --text tinyshakespeare.txt --write",
        where,
        [
            f"GPT-2 of 0.8 million parameters, {args.steps:,} steps of 12 × 64 characters over all"
            " ranks, on gloo, one core a rank as far as there are cores: a step is small, and its"
            " messages are not. 65 characters, random places of the text. Loss: an estimate on 20"
            " batches of random places of the held-out text, the same for all, nats a character."
            " nanoGPT publishes 1.88 after about 3 minutes of a laptop. By hand: the same model and"
            " torch's DDP. Whole: the command from start to end, with imports, the last evaluation"
            " and, with Lockstep, a checkpoint. Processors: the time of all of them in it. Where"
            f" bits count, micro-batches have {SAME} samples on any number of ranks."
        ],
        "| ranks | loop | loss at the end | median step | of the one by hand | whole | processors |"
        " digest of the weights |",
        rows,
    )
    tell(text, RESULTS / "trained_on_ranks.md" if args.write else None)


if __name__ == "__main__":
    main()
