"""What is to be known of a model whatever its layout."""

from dataclasses import dataclass

from lockstep.config import Config
from lockstep.models.protocol import blocks_of, segments_of
from lockstep.parallel import fsdp
from lockstep.plan.workload import Workload

_OPTIMIZER_BYTES = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0}


@dataclass(frozen=True)
class Facts:
    """Of a model.

    Attributes:
        parameters: how many.
        blocks, segments: how many; 0 where it names none.
        units: what FSDP gathers one by one, and
        unit_parameters: of the average one.
        optimizer_bytes: of state a parameter, at least.
    """

    parameters: int
    blocks: int
    segments: int
    units: int
    unit_parameters: float
    optimizer_bytes: float
    tokens_per_sample: int


def facts_of(work: Workload, config: Config) -> Facts:
    model = work.model()
    blocks = blocks_of(model)
    units = fsdp.units_of(model, config.distributed.fsdp, blocks)
    held = sum(p.numel() for _, unit in units for p in unit.parameters())
    optimizer = _OPTIMIZER_BYTES.get(config.training.optimizer, 0.0)
    if config.training.optimizer_args.get("momentum"):
        optimizer = 4.0
    return Facts(
        sum(p.numel() for p in model.parameters()), len(blocks), len(segments_of(model) or []), len(units),
        held / len(units) if units else 0.0, optimizer, work.tokens_per_sample(),
    )  # fmt: skip
