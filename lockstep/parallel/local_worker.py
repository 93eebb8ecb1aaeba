"""One of the models that train by themselves under `diloco`: its parameters in one tensor, and all that is its own.

Assumes parameters of one floating type (`require_one_type`).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.numbers import Number, number
from lockstep.parallel.parallel_model import ModelUpdate
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
        update: its update of this step; None where it had no micro-batch.
    """

    number: int
    values: Flat
    buffers: dict[str, Tensor]
    error: Flat | None
    gradients: list[Tensor | None] = field(default_factory=list)
    optimizer: Any = field(default_factory=lambda: defaultdict(dict))
    update: ModelUpdate | None = None

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


class WorkersLossAccumulator(LossAccumulator):
    """Accumulates under local updates, where each worker adds its gradient's norm after its backward pass.

    Args:
        workers: their number over all ranks.
    """

    def __init__(self, micro_batches_per_step: int, device: torch.device, *, shared: bool, workers: int) -> None:
        super().__init__(micro_batches_per_step + workers, device, shared=shared)
        self.micro_batches_per_step = micro_batches_per_step

    def add_norm(self, worker: int, norm: Tensor) -> None:
        """Add the norm of a worker's gradient."""
        self._table[0, self.micro_batches_per_step + worker] = norm
        self._table[1, self.micro_batches_per_step + worker] = 1.0

    def start_reduce(self) -> None:
        """Do nothing yet: norms are still to come, so the all-reduce starts in `totals`."""

    def totals(self) -> tuple[Number, Number]:
        super().start_reduce()
        self._finish()
        sums = self._table[:, : self.micro_batches_per_step].sum(dim=1)
        return number(sums[0]), number(sums[1])

    @property
    def mean_norm(self) -> Number:
        """Mean norm of the workers' gradients, after `totals`; equal on all ranks."""
        norms, noted = self._table[:, self.micro_batches_per_step : -1].sum(dim=1)
        return number(norms / noted.clamp(min=1))

    @property
    def stop_votes(self) -> Number:
        return number(self._table[0, -1])

    @property
    def step_marks(self) -> Number:
        return number(self._table[1, -1])
