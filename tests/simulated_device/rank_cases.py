"""What two ranks do on the simulated device, each with one of its own: each strategy, and mistakes
with others.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.simulated_device import collectives, device, mistakes
from tests.simulated_device.cases import check_marked, outcome
from tests.simulated_device.device import NAME
from tests.simulated_device.runs import SETTLED, check_same, run

STAGES = {"distributed.strategy": "pipeline", "training.gradient_accumulation_steps": 4}
UNDER: dict[str, dict[str, Any]] = {
    "ddp": {"distributed.strategy": "ddp"},
    "ddp, equal bits": {"distributed.strategy": "ddp", "distributed.reproducible": True},
    "fsdp": {"distributed.strategy": "fsdp"},
    "fsdp, equal bits": {"distributed.strategy": "fsdp", "distributed.reproducible": True},
    "pipeline": STAGES,
    "pipeline, equal bits": {**STAGES, "distributed.reproducible": True},
    "fsdp, recomputed": {"distributed.strategy": "fsdp", "training.gradient_checkpointing": "full"},
}


def main(folder: str, names: list[str]) -> dict[str, str]:
    """Run cases; return (name → traceback) of those that failed, and "" of the others."""
    rank = dist.get_rank()
    dist.barrier()  # else the other rank may still be joining
    dist.destroy_process_group()
    # each has its own device 0
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    device.install()
    collectives.install()
    launched = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    alone = run("cpu", **{"training.gradient_accumulation_steps": 4})
    os.environ |= launched
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        f"cpu:gloo,{NAME}:simccl",
        store=store,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    cases: dict[str, Callable[[], None]] = {
        f"as one process: {name}": lambda s=settings: like_one_process(alone, s)
        for name, settings in UNDER.items()
    }  # type: ignore[misc]
    cases["diloco"] = local_updates
    cases |= {f"found: {mistake.__doc__}": mistake for mistake in mistakes.TOGETHER}
    return {name: outcome(cases[name]) for name in names}


def local_updates() -> None:
    """Workers that train by themselves and then synchronize: no race, and no wait but the marked
    ones.
    """
    settings = {"distributed.strategy": "diloco", "distributed.diloco.inner_steps": 2}
    there = run(**settings)
    assert not there.races, there.races
    check_marked([wait for step in there.waits for wait in step])


def ddp_waits(second_step: list[device.Wait]) -> list[device.Wait]:
    """DDP copies the sizes of its buckets to the host once, after its first backward pass, in its
    forward.
    """
    return [wait for wait in second_step if "model(*args, **kwargs)" in wait.text]


def like_one_process(alone: Any, settings: dict[str, Any]) -> None:
    """The same numbers as one process, no race, and no wait of the host but the marked ones; one in
    a plain step.
    """
    there = run(**settings)
    check_same(alone, there)
    assert not there.races, there.races
    own = ddp_waits(there.waits[1])
    check_marked([wait for step in there.waits for wait in step if wait not in own])
    for step in there.waits[SETTLED:]:
        assert [wait.kind for wait in step] == ["event"], step
