"""Parameters that stages of several ranks use: their gradients are summed over these ranks, once a step.

Each of the ranks holds the whole parameter (or the same shard of it) and makes the same update from the same sum, so
the copies stay equal, bit for bit. Norms count it on the first of its ranks alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.collectives import create_once


class SharedSums:
    """Sums the gradients of shared parameters over the pipeline ranks that hold them.

    Args:
        ranks_of: parameter → pipeline ranks, of *all* parameters that cross ranks: every rank makes every group.
        pipelines: the global ranks of each pipeline, by pipeline rank.
        parameters: this rank's parameters as they are when called.
    """

    def __init__(
        self, ranks_of: Mapping[str, Sequence[int]], pipelines: Sequence[Sequence[int]],
        parameters: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:  # fmt: skip
        self._parameters = parameters
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        me = dist.get_rank()
        for ranks in sorted({tuple(ranks) for ranks in ranks_of.values()}):
            for pipeline in pipelines:
                members = [pipeline[rank] for rank in ranks]
                group = create_once(("shared", *members), partial(dist.new_group, members))
                if me in members:
                    assert group is not None
                    groups[ranks] = group
        self.group_of = {name: groups[tuple(ranks)] for name, ranks in ranks_of.items() if tuple(ranks) in groups}

    @torch.no_grad()
    def __call__(self) -> None:
        """After the last backward pass of a step, once gradients are reduced over replicas and shards."""
        parameters = self._parameters()
        works = []
        for name in sorted(self.group_of):
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(_local(parameter.grad), group=self.group_of[name], async_op=True))
        for work in works:
            if work is not None:
                work.wait()


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local
