"""Lockstep: distributed training for PyTorch in which every strategy takes the same step.

The public names are imported when they are first used, so that the command line starts without
torch.

Tests: tests/test_packaging.py, tests/trainer/test_own_loop.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.data.order import DistributedSampler
    from lockstep.errors import LockstepError, RunError, UsageError
    from lockstep.launch.spawn import spawn
    from lockstep.models import get_model
    from lockstep.process_group.cluster import cleanup, setup
    from lockstep.process_group.collectives import (
        all_reduce,
        barrier,
        is_main_process,
        local_rank,
        rank,
        world_size,
    )
    from lockstep.trainer import Trainer
    from lockstep.trainer.average import WeightAverage
    from lockstep.trainer.placed_model import place
    from lockstep.trainer.whole_batch import WholeBatch
    from lockstep.verify.watch import observe

_HOME = {
    "Config": "lockstep.config",
    "Trainer": "lockstep.trainer",
    "get_model": "lockstep.models",
    "WeightAverage": "lockstep.trainer.average",
    "observe": "lockstep.verify.watch",
    "WholeBatch": "lockstep.trainer.whole_batch",
    "place": "lockstep.trainer.placed_model",
    "spawn": "lockstep.launch.spawn",
    "DistributedSampler": "lockstep.data.order",
    **dict.fromkeys(("LockstepError", "RunError", "UsageError"), "lockstep.errors"),
    **dict.fromkeys(("setup", "cleanup"), "lockstep.process_group.cluster"),
    **dict.fromkeys(
        ("rank", "world_size", "local_rank", "is_main_process", "barrier", "all_reduce"),
        "lockstep.process_group.collectives",
    ),
}

_STARTS = ("Trainer", "place", "setup", "spawn")  # from here on errors are explained

__all__ = [
    "Config",
    "DistributedSampler",
    "LockstepError",
    "RunError",
    "Trainer",
    "UsageError",
    "WeightAverage",
    "WholeBatch",
    "all_reduce",
    "barrier",
    "cleanup",
    "get_model",
    "is_main_process",
    "local_rank",
    "observe",
    "place",
    "rank",
    "setup",
    "spawn",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        advice = import_module("lockstep.config.names").advice_for_object(f"{name}(…)")
        raise AttributeError(
            f"module 'lockstep' has no attribute {name!r}" + (f": {advice}" if advice else "")
        )
    if name in _STARTS:
        import_module("lockstep.failures.explanations").install()
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
