"""What the guard against diverging replicas costs: a check against a step, on two ranks of this
machine.

A check adds up the bits of every parameter once and sends two numbers; by default it is made every
100 steps.

    python benchmarks/divergence_guard.py [--layers 6] [--width 512] [--steps 10] [--ranks 2]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import config_from
from lockstep.launch.spawn import spawn
from lockstep.models import get_model
from lockstep.parallel.replicas import divergence
from lockstep.trainer import Trainer

EVERY = 100


def seconds_of_step_and_check(trainer: Trainer, data: Any, *, steps: int) -> tuple[float, float]:
    """Medians over `steps` of each, on this rank; all ranks call it. The trainer's replicas are the
    whole world.
    """
    world = dist.group.WORLD
    assert world is not None
    check = divergence.guard(trainer.placed, world, every=1)
    step_seconds = []
    check_seconds = []
    ticking = islice(trainer.steps(data), steps + 2)
    for number in range(steps + 2):
        step_seconds.append(_timed(lambda: next(ticking)))
        check_seconds.append(_timed(lambda number=number: check(number)))
    return statistics.median(step_seconds[2:]), statistics.median(check_seconds[2:])


def _timed(run: Callable[[], Any]) -> float:
    dist.barrier()
    since = time.perf_counter()
    run()
    return time.perf_counter() - since


class _Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (129,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "targets": ids[1:]}


def on_rank(layers: int, width: int, steps: int) -> None:
    """Measure, and let rank 0 print."""
    settings = {
        "distributed.strategy": "ddp",
        "distributed.divergence_check_steps": None,
        "training.batch_size": 4,
        "precision.mode": "fp32",
        "training.max_steps": steps + 2,
        "training.warmup_steps": 0,
    }
    with torch.device("meta"):
        model = get_model("transformer")(n_layer=layers, n_embd=width, n_head=8, vocab_size=256)
    trainer = Trainer(model, config=config_from(settings))
    step, check = seconds_of_step_and_check(trainer, _Tokens(), steps=steps)
    if trainer.is_main_process:
        size = sum(p.numel() for p in model.parameters())
        print(
            f"{size / 1e6:.1f} M parameters on {dist.get_world_size()} ranks, 4 × 128 tokens each,"
            " fp32"
        )
        print(
            f"a step {step * 1e3:.1f} ms, a check {check * 1e3:.2f} ms ({4e-9 * size / check:.1f}"
            " GB/s)"
        )
        print(f"a check every {EVERY} steps adds {check / EVERY / step:.4%} to a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 6), ("width", 512), ("steps", 10), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    spawn(on_rank, (given.layers, given.width, given.steps), nprocs=given.ranks)


if __name__ == "__main__":
    main()
