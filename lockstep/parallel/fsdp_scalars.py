"""Parameters without a dim under FSDP2, which cannot cut them: a scale, a temperature (CLIP's `logit_scale`).

Every rank holds them whole and FSDP2 leaves them alone. What the optimizer and checkpoints see is a replicated DTensor
that shares the parameter's memory, because torch's fused updates take DTensors or plain tensors, not both. The ranks
bring the step's gradients together as one table with a row for each micro-batch, which each adds up the tree: the same
bits as in one process, for a few bytes.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.parallel.micro_step import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.tree import Partials, finish


def scalars_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter without a dim."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 0}


class Scalars(AroundMicroBatch):
    """The parameters of a sharded model that every rank holds whole.

    Args:
        model: sharded, its values in place.

    Attributes:
        placed: name → what is trained, a replicated DTensor over the parameter's memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = scalars_of(model)
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        self.placed = {name: _replicated(parameter, meshes) for name, parameter in self._own.items()}
        self._trained = [name for name, parameter in self._own.items() if parameter.requires_grad]
        self._rows: dict[int, list[Tensor | None]] = {}

    def after(self, run: MicroBatchPass) -> None:
        """Keep the gradients of a micro-batch; after the last one, give the placed parameters theirs."""
        if not self._trained:
            return
        gradients = [self._own[name].grad for name in self._trained]
        if run.micro_batch.real:
            self._rows[run.micro_batch.index] = gradients
        for name in self._trained:
            self._own[name].grad = None
        if run.last:
            self._reduce(run.micro_batches_per_step)

    @torch.no_grad()
    def _reduce(self, micro_batches_per_step: int) -> None:
        first = self._own[self._trained[0]]
        # Adding zeros changes no bit of a row; each value has a second column that says whether it is there.
        table = torch.zeros(micro_batches_per_step, len(self._trained), 2, dtype=torch.float64, device=first.device)
        for index, row in self._rows.items():
            for place, gradient in enumerate(row):
                if gradient is not None:
                    table[index, place, 0], table[index, place, 1] = gradient, 1.0
        self._rows.clear()
        dist.all_reduce(table)
        there = table[..., 1].bool().tolist()
        sums = Partials(micro_batches_per_step)
        for index in range(micro_batches_per_step):
            sums.add(index, [
                table[index, place, 0].to(self._own[name].dtype) if there[index][place] else None
                for place, name in enumerate(self._trained)
            ])  # fmt: skip
        for name, total in zip(self._trained, sums.total() or [], strict=True):
            if total is not None:
                finish([total])
                placed = self.placed[name]
                assert isinstance(placed, DTensor)
                placed.grad = DTensor.from_local(total, placed.device_mesh, placed.placements, run_check=False)


def _replicated(parameter: nn.Parameter, meshes: Iterable[DeviceMesh]) -> nn.Parameter:
    mesh = next(iter(meshes))
    over = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return nn.Parameter(over, parameter.requires_grad)
