"""What is to be known of a model whatever its layout."""

from lockstep.config import Config
from lockstep.costs.steps import ModelSize
from lockstep.models.protocol import blocks_of, pipeline_segments_of
from lockstep.parallel import fsdp
from lockstep.parallel.compression import sent_numbers
from lockstep.plan.workload import Workload

_OPTIMIZER_BYTES = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0}


def facts_of(work: Workload, config: Config) -> ModelSize:
    """Those of the model that a config trains."""
    model = work.description
    blocks = blocks_of(model)
    units = fsdp.units_of(model, config.distributed.fsdp, blocks)
    held = sum(p.numel() for _, unit in units for p in unit.parameters())
    optimizer = _OPTIMIZER_BYTES.get(config.training.optimizer, 0.0)
    if config.training.optimizer_args.get("momentum"):
        optimizer = 4.0
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    low_rank = sent_numbers(shapes, "powersgd", config.distributed.ddp.compression.rank)
    return ModelSize(
        sum(p.numel() for p in model.parameters()), len(blocks), len(pipeline_segments_of(model) or []), len(units),
        held / len(units) if units else 0.0, optimizer, 4 * low_rank,
    )  # fmt: skip
