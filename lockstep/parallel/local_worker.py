"""One of the models that train by themselves under `diloco`: its parameters in one tensor, and all that is its own.

Assumes parameters of one floating type (`require_one_type`).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import Turn
from lockstep.parallel.wire import BLOCK

_ALIGNED = 64  # elements: parameters begin where kernels like it


class Flat:
    """The trainable parameters in one tensor, so that an exchange is a few operations, with a view for each.

    Args:
        parameters: of one floating type.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        first, size = next(iter(parameters.values())), 0
        starts = {}
        for name, parameter in parameters.items():
            starts[name] = size
            size += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        self.data = torch.zeros(-(-size // BLOCK) * BLOCK, dtype=first.dtype, device=first.device)
        self.views = {
            name: self.data[starts[name] : starts[name] + p.numel()].view(p.shape) for name, p in parameters.items()
        }

    def named(self, prefix: str) -> dict[str, Tensor]:
        """As a checkpoint keeps it."""
        return {f"{prefix}/{name}": view for name, view in self.views.items()}


@dataclass
class Worker:
    """One model that trains by itself.

    Attributes:
        number: among all workers.
        values: its parameters.
        buffers: its persistent buffers.
        error: what int8 or int4 rounded away of its last change, and of its share of the last mean.
        gradients: of its step, while another worker is in place.
        optimizer: its state of the inner optimizer, while another worker is in place.
        turn: its update of this step; None where it had no micro-batch.
    """

    number: int
    values: Flat
    buffers: dict[str, Tensor]
    error: Flat | None
    gradients: list[Tensor | None] = field(default_factory=list)
    optimizer: Any = field(default_factory=lambda: defaultdict(dict))
    turn: Turn | None = None

    @property
    def prefix(self) -> str:
        """Of its names in a checkpoint."""
        return f"worker-{self.number}"


def require_one_type(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse what an exchange as one tensor would have to convert.

    Raises:
        UsageError: there is no parameter, or there are several types, or one that is not floating.
    """
    kinds = {p.dtype: name for name, p in parameters.items()}
    if len(kinds) != 1 or not next(iter(kinds)).is_floating_point:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in kinds.items()) or "there is none that trains"
        raise UsageError(
            "diloco exchanges parameters of one floating type",
            where="distributed.strategy: diloco",
            why=listed,
            fix="give all parameters that train one type (model.float()), or use ddp",
        )
