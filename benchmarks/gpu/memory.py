"""Memory on a GPU beside what `lockstep plan` says of it: peaks of a step that is not compiled.

    python -m benchmarks.gpu.memory [--steps 4]
    python -m benchmarks.gpu.memory --device cpu --tiny

The peak is that of torch's allocator (`max_memory_allocated`), without what the process held
before; the plan is the rehearsal of the same config on one GPU. Both in bytes.
"""

import gc
import sys
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.common import TINY, WORKLOADS, RandomTokens, Workload, parser, require, where
from benchmarks.page import RESULTS, page, tell
from lockstep.config import Config, config_from
from lockstep.plan.rehearsal import rehearse
from lockstep.plan.workload import Workload as Planned
from lockstep.strategy import resolve
from lockstep.trainer import Trainer

MODES = ("fp32", "bf16", "fp16")
CHECKPOINTING = ("none", "selective", "full")
NEAR = 0.05  # of the peak


def config_of(work: Workload, mode: str, checkpointing: str, steps: int) -> Config:
    return config_from(
        {
            "training.batch_size": work.batch,
            "training.max_steps": steps,
            "training.gradient_accumulation_steps": 2,
            "training.gradient_checkpointing": checkpointing,
            "training.gradient_clip.value": 1.0,
            "precision.mode": mode,
            "distributed.strategy": "single",
        }
    )


def measured(work: Workload, config: Config, device: torch.device) -> float:
    """Return the most that the allocator gave out while the run trained; nan on a CPU."""
    cuda = device.type == "cuda"
    held = 0
    gc.collect()
    if cuda:
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    with torch.device("meta"):
        model = work.model()
    for _ in Trainer(model, config=config).steps(data_of(work)):
        pass
    return float(torch.cuda.max_memory_allocated(device) - held) if cuda else float("nan")


def data_of(work: Workload) -> RandomTokens:
    return RandomTokens(work.length, work.args.get("vocab_size", 256))


def planned(work: Workload, config: Config) -> float:
    parallel = resolve(config.distributed, 1)
    return float(rehearse(Planned(work.model, data_of(work)[0]), config, parallel).peak.total)


def row(
    name: str, mode: str, checkpointing: str, asked: Any, device: torch.device
) -> tuple[str, bool]:
    work = (TINY if asked.tiny else WORKLOADS)[name]
    config = config_of(work, mode, checkpointing, asked.steps)
    peak = measured(work, config, device)
    plan = planned(work, config)
    off = plan / peak - 1
    good = abs(off) <= NEAR or device.type != "cuda"
    return (
        f"| {name} | {mode} | {checkpointing} | {peak / 1e9:.3f} | {plan / 1e9:.3f} | {off:+.1%} |"
        f" {'yes' if good else 'NO'} |",
        good,
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=4)
    asked = arguments.parse_args()
    device = require(asked.device)
    cases = product(("transformer-124m", "bdh"), MODES, CHECKPOINTING)
    found = [row(*case, asked, device) for case in cases]
    text = page(
        "Memory on a GPU, beside the plan",
        "python -m benchmarks.gpu.memory " + " ".join(sys.argv[1:]),
        where(device),
        ["Two micro-batches a step, clipping, AdamW; nothing is compiled."],
        "| model | precision | checkpointing | peak, GB | planned, GB | planned off | within 5 % |",
        [line for line, _ in found],
    )
    tell(text, RESULTS / "gpu_memory.md" if asked.write else None)
    return 0 if all(good for _, good in found) else 1


if __name__ == "__main__":
    sys.exit(main())
