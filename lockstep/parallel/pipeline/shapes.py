"""The shapes of the tensors that stages send, which ranks agree on before they run.

A receiver must know the shape of a tensor, and stages in the middle never see a batch. So each
shape of batch gets a *signature*, a number that the first stage sends to all others before a run,
and a new one is sent through the stages once. The signatures of all data-parallel ranks are
gathered together: FSDP2's collectives need these ranks to do the same things.

Tests: tests/parallel/execution/test_transport.py, tests/parallel/pipeline/test_pipeline.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.execution.programs import Message
from lockstep.parallel.execution.transport import KnownMessages, Metas, replace_strides
from lockstep.torch_compat.pytree import tree_flatten


@dataclass(frozen=True)
class Agreement:
    """The signatures that the ranks exchanged before a run."""

    signatures: list[int]  # of each of this pipeline's micro-batches
    # Places in the run of micro-batches with signatures new to this pipeline, one for each
    # signature; where pipelines run together, all places if any pipeline has new ones.
    new: list[int]
    anyone: bool  # whether any pipeline has new ones


@dataclass
class Shapes:
    """The shapes that a rank's stages receive and send, by signature."""

    dp_rank: int  # which of the `dp_size` parallel pipelines this rank belongs to
    dp_size: int
    knows_batches: bool  # this rank has the first stage
    device: torch.device  # on which all ranks exchange small messages
    # pipelines exchange rows of experts in each pass, so that all of them run the same number of
    # passes
    together: bool
    _seen: set[tuple[int, int]] = field(default_factory=set)  # (dp_rank, signature)
    # (signature, stage) → in, out
    _metas: dict[tuple[int, int], tuple[Metas, Metas]] = field(default_factory=dict)

    def agree(self, batches: Sequence[Any], *, training: bool) -> Agreement:
        """Exchange signatures.

        All ranks call it together, with the same number of micro-batches.
        """
        table = torch.zeros(self.dp_size, len(batches), dtype=torch.int64, device=self.device)
        if self.knows_batches:
            table[self.dp_rank] = torch.tensor([signature(batch, training) for batch in batches])
        dist.all_reduce(table)
        # the hosts agree here; no device is waited for where the CPU has a process group
        rows = table.tolist()
        mine: list[int] = rows[self.dp_rank]
        known = {key for dp_rank, key in self._seen if dp_rank == self.dp_rank}
        new = [
            position
            for position, key in enumerate(mine)
            if key not in known and key not in mine[:position]
        ]
        received = {(dp_rank, key) for dp_rank, keys in enumerate(rows) for key in keys}
        anyone = bool(received - self._seen)
        if anyone and self.together:
            new = list(range(len(mine)))
        self._seen |= received
        return Agreement(mine, new, anyone)

    def learn(self, key: int, stage: int, received: Metas, sent: Metas) -> None:
        self._metas[key, stage] = (received, sent)

    def of(self, key: int, stage: int) -> tuple[Metas, Metas]:
        return self._metas[key, stage]


@dataclass
class RunDescriptions:
    """Describes the messages of a run to what carries them, stage by stage of this rank.

    Of the gradients of a shape the strides are sent with the first ones, where they are asked for.
    """

    shapes: Shapes
    stages: Sequence[int]  # of this rank
    count: int  # of stages in the pipeline
    sums: Callable[[int], Metas]  # stage → what travels with the gradients of its outputs
    with_strides: bool  # gradients lie as they were made
    _known: set[int] = field(default_factory=set)  # signatures of earlier runs
    _gradients: dict[tuple[int, int], Metas] = field(default_factory=dict)  # (signature, stage)

    def of_run(self, keys: Sequence[int], *, training: bool) -> KnownMessages:
        """Return what is known of the messages of a run; `keys`: its micro-batches' signatures."""
        new = set(keys) - self._known if training and self.with_strides else set()
        self._known |= new
        arriving: dict[Message, Metas] = {}
        leaving: dict[Message, Metas] = {}
        bring_strides: set[Message] = set()
        for position, key in enumerate(keys):
            for stage in self.stages:
                received, sent = self.shapes.of(key, stage)
                if stage > 0:
                    arriving[Message("F", stage, position)] = received
                if stage + 1 < self.count:
                    leaving[Message("F", stage + 1, position)] = sent
                    if training:
                        arriving[Message("B", stage, position)] = self._of_gradients(key, stage)
                if key in new:
                    bring_strides.add(Message("B", stage, position))
                    bring_strides.add(Message("B", stage - 1, position))
        return KnownMessages(arriving, leaving, bring_strides)

    def _of_gradients(self, key: int, stage: int) -> Metas:
        """Describe the gradients of a stage's outputs, and the sums that travel with them."""
        if (key, stage) not in self._gradients:
            _, sent = self.shapes.of(key, stage)
            own = [meta.as_gradient() for meta in sent if meta.requires_grad]
            self._gradients[key, stage] = (*own, *self.sums(stage))
        return self._gradients[key, stage]

    def note_strides(
        self, keys: Sequence[int], strides: Mapping[Message, Sequence[tuple[int, ...]]]
    ) -> None:
        """Note the strides that have come with messages of a run, for later runs."""
        for message, strides_of_gradients in strides.items():
            at = keys[message.micro_batch], message.stage
            self._gradients[at] = replace_strides(self._gradients[at], strides_of_gradients)


def signature(batch: Any, training: bool) -> int:
    """Return a hash of the shapes and the plain values in a batch, the same in this process."""
    leaves, structure = tree_flatten(batch)
    # of a text, as -1 and -2 have one hash
    return hash(repr((training, str(structure), [_leaf(leaf) for leaf in leaves])))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float) else type(leaf).__name__
