"""The guard against replicas that drift apart: a flipped bit, or a parameter that is not synchronised.

Replicas make the same update from the same gradients, so their parameters are equal in every bit. Every K steps each
one adds up the bits of each parameter, and of each buffer, as integers: one pass over them, and one number sent. A
change of one bit always changes the sum; several changes almost always do. If the numbers differ, those of the single
parameters are compared, to name the parameters and ranks. Every rank then stops with the same error, those of other
shards and stages too. (The host waits for the device in a check. A check does not see a bit that a later update has
rounded away: the replicas are equal again.)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import StepConfig
from lockstep.errors import RunError, listed
from lockstep.parallel.expert import PlacedExperts
from lockstep.parallel.parallel_model import ParallelModel, local

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def guard_replicas(
    placed: ParallelModel, config: StepConfig, mesh: DeviceMesh | None, *, cut: Set[str] = frozenset(),
    experts: PlacedExperts | None = None,
) -> None:  # fmt: skip
    """Add a check to the placed model where there are replicas to compare and the config wants it.

    Args:
        experts: spread over the axis `expert`.
        cut: names of which ranks along the axis `tensor` hold different pieces; all others they hold whole.
    """
    every = config.distributed.divergence_check_steps
    if mesh is not None and mesh["context"].size() > 1 and every is not None:
        placed.checks.append(guard(placed, mesh["context"].get_group(), every))
    if mesh is not None and mesh["tensor"].size() > 1 and every is not None:
        placed.checks.append(guard(placed, mesh["tensor"].get_group(), every, left_out=cut))
    if experts is not None and experts.replicas.size() > 1 and every is not None:
        placed.checks.append(guard(placed, experts.replicas, every, left_out=set(placed.kept()) - set(experts.shapes)))
    if mesh is not None and mesh["replicate"].size() > 1 and every is not None:
        spread = set() if experts is None else set(experts.shapes)
        placed.checks.append(guard(placed, mesh["replicate"].get_group(), every, left_out=spread))
    elif every is not None and "divergence_check_steps" in config.distributed.model_fields_set:
        placed.log_lines.append("divergence_check_steps: one replica, nothing to compare")


def guard(
    placed: ParallelModel, group: dist.ProcessGroup, every: int, *, left_out: Set[str] = frozenset()
) -> Callable[[int], None]:
    """Return a check to be called after each step with the number of steps made; every rank calls it.

    Args:
        group: of the ranks that hold the same parameters, or the same shards of them.
        every: K.
        left_out: names of what they do not.

    Raises:
        RunError: (when it is called, on every rank) replicas differ; ranks and parameters are named.
    """

    def check(step: int) -> None:
        if step % every == 0:
            held = {name: tensor for name, tensor in placed.kept().items() if name not in left_out}
            found = compare(held, group, step)
            _raise_together(found, placed.random_state.device)

    return check


def _raise_together(error: RunError | None, device: torch.device) -> None:
    """Raise the error of any rank on all ranks, or the others would wait for it."""
    anywhere = torch.tensor([error is not None], dtype=torch.uint8, device=device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if anywhere.item():
        found: list[RunError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, error)
        raise next(one for one in found if one is not None)


@torch.no_grad()
def compare(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, step: int) -> RunError | None:
    """Return an error that names the differences between the replicas of a group; None if there are none."""
    names = sorted(tensors)
    if not names:
        return None
    prints = torch.stack([fingerprint(local(tensors[name])) for name in names])
    place = torch.arange(1, len(names) + 1, device=prints.device)  # exchanged parameters must not cancel out
    if _agree((prints * place).sum().view(1), group):
        return None
    everyone = [torch.empty_like(prints) for _ in range(group.size())]
    dist.all_gather(everyone, prints, group=group)
    return _diverged(torch.stack(everyone), names, group, step)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers; 0-dim int64, modulo 2⁶⁴."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    integers = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return integers.sum(dtype=torch.int64)


def _agree(value: Tensor, group: dist.ProcessGroup) -> bool:
    everyone = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(everyone, value, group=group)
    return len(set(torch.cat(everyone).tolist())) == 1


def _diverged(prints: Tensor, names: list[str], group: dist.ProcessGroup, step: int) -> RunError:
    """Return the error for fingerprints [ranks, names]: which ranks differ in which parameters."""
    ranks = [dist.get_global_rank(group, place) for place in range(group.size())]
    apart: dict[str, list[int]] = {}
    for name, column in zip(names, prints.T.tolist(), strict=True):
        (most, count), *_ = Counter(column).most_common()
        if count < len(column):
            tied = 2 * count <= len(column)  # then nobody knows which of them is right
            apart[name] = ranks if tied else [r for r, value in zip(ranks, column, strict=True) if value != most]
    involved = sorted({rank for held in apart.values() for rank in held})
    if involved == ranks:
        who = "the replicas on ranks " + ", ".join(map(str, ranks))
    else:
        who = ("rank " if len(involved) == 1 else "ranks ") + ", ".join(map(str, involved))
    verb = "differ" if involved == ranks or len(involved) > 1 else "differs"
    whom = "each other" if involved == ranks else "the other replicas"
    return RunError(
        f"{who} {verb} from {whom} in {listed(list(apart), 5)}",
        where=f"after step {step}",
        why="a parameter whose gradient is not reduced (used outside of forward, or changed by hand on one rank), or a "
        "bit that flipped in memory"
        if len(apart) == 1
        else "gradients were not reduced in some step, or ranks were given different updates",
        fix="go on from the last checkpoint; if it comes again on the same rank, replace that machine; "
        "`lockstep verify` finds what is not synchronised",
    )
