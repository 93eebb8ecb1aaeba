"""Mixed precision on a GPU: the losses of bf16 and fp16 beside fp32's, and the same step through
NCCL.

    python -m benchmarks.gpu.precision [--steps 100]
    python -m benchmarks.gpu.precision --device cpu --tiny --steps 8

Each precision trains the same transformer from the same values on the same tokens, by itself, by
itself again, and as `ddp` in a process group of one rank (NCCL on a GPU, gloo on a CPU). A GPU adds
in another order each time: the group must be no further off than a run is from itself, and each
precision must end near fp32. On one rank a strategy has nothing to send, so that group's
collectives are also called by themselves, in each dtype. (`benchmarks.gpu.parity` compares bits.)
"""

import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.common import TINY, WORKLOADS, RandomTokens, Workload, parser, require, where
from benchmarks.page import RESULTS, page, tell
from lockstep.config import config_from
from lockstep.trainer import Trainer

MODES = ("fp32", "bf16", "fp16")
NEAR = {"fp32": 2e-3, "bf16": 0.02, "fp16": 0.02}  # of fp32's loss, relative to the first loss
# Losses may be so far apart in any case: a run in fp16 was 5e-4 off itself on one GPU.
SAME = 2e-3
TIMES = 3.0  # what two runs may be apart, in distances of a run from itself


def losses(work: Workload, mode: str, steps: int, strategy: str) -> list[float]:
    with torch.device("meta"):
        model = work.model()
    config = config_from(
        {
            "training.batch_size": work.batch,
            "training.max_steps": steps,
            "training.learning_rate": 3e-4,
            "training.warmup_steps": steps // 5,
            "precision.mode": mode,
            "distributed.strategy": strategy,
        }
    )
    data = RandomTokens(work.length, work.args["vocab_size"])
    return [float(record.loss) for record in Trainer(model, config=config).steps(data)]


def join_alone(device: torch.device) -> None:
    """A process group of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def collectives_work(device: torch.device) -> bool:
    """Whether sums over one rank leave a tensor as it is, in each dtype that gradients may have."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.linspace(-2, 2, 1000, device=device).to(dtype)
        summed = values.clone()
        dist.all_reduce(summed)
        gathered = [torch.empty_like(values)]
        dist.all_gather(gathered, values)
        if not (torch.equal(summed, values) and torch.equal(gathered[0], values)):
            return False
    return True


def apart(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two runs' losses, relative to the first loss."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / one[0]


def row(work: Workload, mode: str, asked: Any, exact: list[float]) -> tuple[str, bool]:
    alone = losses(work, mode, asked.steps, "single")
    again = apart(alone, losses(work, mode, asked.steps, "single"))
    grouped = apart(alone, losses(work, mode, asked.steps, "ddp"))
    tail = max(1, asked.steps // 10)
    ends, exact_end = (sum(of[-tail:]) / tail for of in (alone, exact))
    off = abs(ends - exact_end) / exact[0]
    good = off <= NEAR[mode] and grouped <= max(SAME, TIMES * again)
    return (
        (
            f"| {mode} | {alone[0]:.4f} | {ends:.4f} | {off:.2e} | {again:.1e} | {grouped:.1e} |"
            f" {'yes' if good else 'NO'} |"
        ),
        good,
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=100)
    asked = arguments.parse_args()
    device = require(asked.device)
    work = (TINY if asked.tiny else WORKLOADS)["transformer-124m"]
    join_alone(device)
    works = collectives_work(device)
    exact = losses(work, "fp32", asked.steps, "single")
    found = [row(work, mode, asked, exact) for mode in MODES]
    dist.destroy_process_group()
    command = "python -m benchmarks.gpu.precision " + " ".join(sys.argv[1:])
    text = page(
        "Mixed precision",
        command,
        where(device),
        ["Differences are relative to the first loss."],
        "| precision | first loss | mean of the last tenth | off fp32's | a run off itself |"
        " group of one rank off | within limits |",
        [line for line, _ in found],
        [
            "Collectives of the group leave a tensor as it is, in fp32, bf16 and fp16:"
            f" {'yes' if works else 'NO'}."
        ],
    )
    tell(text, RESULTS / "gpu_precision.md" if asked.write else None)
    return 0 if works and all(good for _, good in found) else 1


if __name__ == "__main__":
    sys.exit(main())
