"""What travels between stages has shapes that follow from those of the batch; the stages agree on them before a run.

Whoever waits for a tensor must know its shape, and stages in the middle never see a batch. So each shape of batch gets
a *signature*, a number that the first stage tells all others before a run. A new one is sent through the stages once,
with a description ahead of each tensor (`lockstep.parallel.pipeline.forward`); from then on every rank knows what its
stages receive and send. Micro-batches of different shapes can be in one run: a short last one, texts of all lengths.

The signatures of all data-parallel ranks are gathered together: FSDP2's collectives need these ranks to do the same
things, and one of them may see a shape that the others do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.pipeline.torch_stage import Metas
from lockstep.randomness import derive_key
from lockstep.torch_compat.pytree import tree_flatten


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on before a run.

    Attributes:
        signatures: of each of this pipeline's micro-batches.
        new: places in the run of those of which this pipeline does not know the shapes, one for each signature.
        anyone: whether any pipeline has such ones.
    """

    signatures: list[int]
    new: list[int]
    anyone: bool


class Shapes:
    """The shapes that a rank's stages receive and send, by signature.

    Args:
        column: which of the `columns` pipelines that work side by side this rank belongs to.
        knows_batches: this rank has the first stage.
        device: on which all ranks exchange small messages.
    """

    def __init__(self, column: int, columns: int, *, knows_batches: bool, device: torch.device) -> None:
        self._column, self._columns = column, columns
        self._knows_batches, self._device = knows_batches, device
        self._seen: set[tuple[int, int]] = set()  # (column, signature)
        self._metas: dict[tuple[int, int], tuple[Metas, Metas]] = {}  # (signature, stage) → what it receives, sends

    def agree(self, batches: Sequence[Any], *, training: bool) -> Agreement:
        """All ranks call it together, with the same number of micro-batches.

        Args:
            batches: the inputs of this rank's micro-batches; looked at on the ranks of first stages only.
        """
        table = torch.zeros(self._columns, len(batches), dtype=torch.int64, device=self._device)
        if self._knows_batches:
            table[self._column] = torch.tensor([signature(batch, training) for batch in batches])
        dist.all_reduce(table)
        rows = table.tolist()  # the hosts agree here; no device is waited for where the CPU has a process group
        mine: list[int] = rows[self._column]
        new = [
            place for place, key in enumerate(mine) if key not in mine[:place] and (self._column, key) not in self._seen
        ]
        told = {(column, key) for column, keys in enumerate(rows) for key in keys}
        anyone = bool(told - self._seen)
        self._seen |= told
        return Agreement(mine, new, anyone)

    def learn(self, key: int, stage: int, received: Metas, sent: Metas) -> None:
        """Keep what a stage receives and sends on for micro-batches of a signature."""
        self._metas[key, stage] = (received, sent)

    def of(self, key: int, stage: int) -> tuple[Metas, Metas]:
        """(what the stage receives, what it sends on) for a micro-batch of this signature."""
        return self._metas[key, stage]


def signature(batch: Any, training: bool) -> int:
    """A number for the shapes in a batch, and for the plain values in it."""
    leaves, structure = tree_flatten(batch)
    return derive_key(training, str(structure), [_leaf(leaf) for leaf in leaves])


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float) else type(leaf).__name__
