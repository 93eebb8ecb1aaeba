"""Compares the axis `tensor` with torch's own tensor parallelism, written by hand.

It measures time, CPU time and bytes of a step of each, in turn. Needs root, for a network of its
own.

    python -m benchmarks.tensor_by_hand [--ranks 2,4] [--rounds 20] [--write]

Both sides train the same transformer on the same batches with AdamW and clipping: by hand with
`parallelize_module` (column and row cuts, sequence parallel, loss parallel), as torch's tutorial
does it; and `lockstep.Trainer` on `tensor:N`. They take turns in one set of processes. Bytes are
those of the loopback interface of a network namespace that nothing else uses.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import config_from
from lockstep.models.transformer import INIT_STD, Block, Transformer
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

GOAL = 1.02
SIZE = {"n_layer": 4, "n_embd": 256, "n_head": 8, "vocab_size": 8192}
BATCH = 4
LENGTH = 256
COUNTERS = Path("/proc/self/net/dev")  # of the network namespace that a process is in
WARM_UP = 3


class ByHand(nn.Module):
    """The same layers as the transformer's, with torch's own modules at both ends."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZE["n_embd"]
        layers = SIZE["n_layer"]
        vocabulary = SIZE["vocab_size"]
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Block(width, SIZE["n_head"], None, None, 0.0, layers) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in (self.embed, self.head):
            nn.init.normal_(module.weight, std=INIT_STD)
        for layer in self.layers:
            layer.init_weights()  # type: ignore[operator]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cut_by_hand(model: ByHand, ranks: int) -> ByHand:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
    part = Shard(1)
    whole = Replicate()
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(part, part), desired_input_layouts=(whole, whole)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=part),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": RowwiseParallel(output_layouts=part),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, of_block)
    ends = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=part, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends)
    return model


def batch_of(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, SIZE["vocab_size"], (BATCH, LENGTH + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}


def step_by_hand(ranks: int) -> Callable[[int], float]:
    torch.manual_seed(0)
    model = cut_by_hand(ByHand(), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step(index: int) -> float:
        batch = batch_of(index)
        with loss_parallel():
            loss = F.cross_entropy(
                model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten()
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def step_of_lockstep(ranks: int) -> Callable[[int], float]:
    settings = {
        "distributed.tensor_size": ranks,
        "training.batch_size": BATCH,
        "training.gradient_clip": 1.0,
        "training.learning_rate": 1e-4,
        "training.weight_decay": 0.1,
        "training.max_steps": 10**6,
        "precision.mode": "fp32",
    }
    torch.manual_seed(0)
    trainer = Trainer(Transformer(**SIZE), config=config_from(settings))
    return lambda index: float(trainer.training_step(batch_of(index)))


def sent_bytes() -> int:
    """Bytes that all processes have put on the loopback interface."""
    line = next(
        line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(line.partition(":")[2].split()[8])


def measured(step: Callable[[int], float], index: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds of this process, and bytes of all processes."""
    dist.barrier()
    sent = sent_bytes()
    cpu = time.process_time()
    start = time.perf_counter()
    step(index)
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    dist.barrier()
    return seconds, cpu, sent_bytes() - sent


def in_turn(rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    sides = {"lockstep": step_of_lockstep(ranks), "by hand": step_by_hand(ranks)}
    losses = {name: [step(index) for index in range(WARM_UP)] for name, step in sides.items()}
    # First values are drawn alike, but not the same.
    assert all(abs(one - other) < 0.05 for one, other in zip(*losses.values(), strict=True)), losses
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name in list(sides)[:: 1 if round_ % 2 else -1]:
            found[name].append(measured(sides[name], WARM_UP + round_))
    return found


def row(ranks: int, rounds: int) -> str:
    all_ranks = run_ranks(in_turn, ranks, rounds, timeout=1800)
    ours, hand = ([rank[name] for rank in all_ranks] for name in ("lockstep", "by hand"))
    time_ratio = median(
        max(a[i][0] for a in ours) / max(b[i][0] for b in hand) for i in range(rounds)
    )
    cpu_ratio = median(
        sum(a[i][1] for a in ours) / sum(b[i][1] for b in hand) for i in range(rounds)
    )
    seconds, cpu = (
        [median(one[place] for one in side[0]) for side in (ours, hand)] for place in (0, 1)
    )
    sent = [median(one[2] for one in side[0]) for side in (ours, hand)]
    return (
        f"| {ranks} | {seconds[0] * 1e3:.0f} | {seconds[1] * 1e3:.0f} | {time_ratio:.3f} |"
        f" {cpu[0] * 1e3:.0f} | {cpu[1] * 1e3:.0f} | {cpu_ratio:.3f} | {sent[0] / 1e6:.2f} |"
        f" {sent[1] / 1e6:.2f} | {sent[0] / sent[1]:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.inside:
        again = [sys.executable, "-m", "benchmarks.tensor_by_hand", *sys.argv[1:], "--inside"]
        sys.exit(
            subprocess.run(
                ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *again]
            ).returncode
        )
    rows = []
    for ranks in map(int, asked.ranks.split(",")):
        rows.append(row(ranks, asked.rounds))
        print(rows[-1], flush=True)
    text = page(
        "Tensor parallel beside torch's own, written by hand",
        f"python -m benchmarks.tensor_by_hand --ranks {asked.ranks} --rounds {asked.rounds}"
        " --write",
        machine(),
        [
            (
                f"A transformer of {SIZE['n_layer']} layers, width {SIZE['n_embd']},"
                f" {SIZE['vocab_size']} tokens;"
            ),
            (
                f"{BATCH} × {LENGTH} tokens a step, fp32, AdamW, clipping; one thread a rank, gloo."
                " Milliseconds of a step"
            ),
            (
                "and of a rank's CPU, megabytes of all ranks' messages: medians of the rounds,"
                " which take turns. Allowed:"
            ),
            (
                f"{GOAL} of the time by hand, and no more bytes. gloo's reduce-scatter is a whole"
                " all-reduce, which"
            ),
            (
                "torch's side uses and Lockstep does not; over NCCL both would send the same. Four"
                " ranks share two cores,"
            ),
            "so that their CPU time says more than the clock.",
        ],
        "| ranks | ms | by hand | ratio | CPU ms | by hand | ratio | MB | by hand | ratio |",
        rows,
    )
    tell(text, RESULTS / "tensor_by_hand.md" if asked.write else None)


if __name__ == "__main__":
    main()
