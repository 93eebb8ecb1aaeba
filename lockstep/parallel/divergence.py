"""The guard against replicas that drift apart: a flipped bit, or a parameter that is not synchronised.

Replicas make the same update from the same gradients, so they are equal in every bit. Every K steps each adds up the
bits of its parameters and buffers as integers, and ranks compare one number; the host waits for the device. Where it
differs, parameters, ranks and hosts are named, and elements compared: a bit that flipped in memory leaves one element
apart, a fault of software whole tensors. All ranks then stop with the same error, or, if the config says so, a flipped
bit is put back from a replica that the others agree with. Bits that flip in a gradient before it is reduced reach all
replicas alike, and those that a later update has rounded away leave them equal: no comparison sees either.
"""

import socket
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

_FEW_ELEMENTS = 2  # that a flipped bit can leave apart: a tied or a padded one
_MOST_TENSORS = 4  # that are looked at element by element
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
    repair = config.distributed.divergence_action == "repair"
    if mesh is not None and mesh["context"].size() > 1 and every is not None:
        placed.checks.append(guard(placed, mesh["context"].get_group(), every))
    if mesh is not None and mesh["tensor"].size() > 1 and every is not None:
        placed.checks.append(guard(placed, mesh["tensor"].get_group(), every, left_out=cut))
    if experts is not None and experts.replicas.size() > 1 and every is not None:
        placed.checks.append(guard(placed, experts.replicas, every, left_out=set(placed.kept()) - set(experts.shapes)))
    if mesh is not None and mesh["replicate"].size() > 1 and every is not None:
        spread = set() if experts is None else set(experts.shapes)
        placed.checks.append(guard(placed, mesh["replicate"].get_group(), every, left_out=spread, repair=repair))
    elif every is not None and "divergence_check_steps" in config.distributed.model_fields_set:
        placed.log_lines.append("divergence_check_steps: one replica, nothing to compare")


def guard(
    placed: ParallelModel, group: dist.ProcessGroup, every: int, *, left_out: Set[str] = frozenset(),
    repair: bool = False,
) -> Callable[[int], None]:  # fmt: skip
    """Return a check to be called after each step with the number of steps made; every rank calls it.

    Args:
        group: of the ranks that hold the same parameters, or the same shards of them.
        every: K.
        left_out: names of what they do not.
        repair: put back a flipped bit from the other replicas, once on each rank.

    Raises:
        RunError: (when it is called, on every rank) replicas differ; ranks and parameters are named.
    """
    repaired: set[int] = set()

    def check(step: int) -> None:
        if step % every == 0:
            held = {name: tensor for name, tensor in placed.kept().items() if name not in left_out}
            found = compare(held, group, step)
            if repair and found is not None and found.is_flip and not repaired & found.ranks:
                repaired.update(found.ranks)
                _put_back(held, found, group)
                placed.later_log_lines.append(f"{found.what}; put back from rank {found.good} after step {step}")
                found = None
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


class ReplicasDifferError(RunError):
    """Replicas differ.

    Attributes:
        apart: name → ranks that hold other values than most; all ranks, where nobody knows which are right.
        is_flip: whether one bit has flipped, on ranks that the others outvote.
        ranks: that hold wrong values.
        good: a rank that holds right ones.
    """

    apart: Mapping[str, list[int]] = {}
    is_flip = False
    ranks: frozenset[int] = frozenset()
    good = -1


@torch.no_grad()
def _put_back(tensors: Mapping[str, Tensor], found: ReplicasDifferError, group: dist.ProcessGroup) -> None:
    for name in found.apart:
        dist.broadcast(local(tensors[name]).detach(), found.good, group=group)


@torch.no_grad()
def compare(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, step: int) -> ReplicasDifferError | None:
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
    return _diverged(torch.stack(everyone), {name: tensors[name] for name in names}, group, step)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers; 0-dim int64, modulo 2⁶⁴."""
    return _integers(tensor).sum(dtype=torch.int64)


def _integers(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _agree(value: Tensor, group: dist.ProcessGroup) -> bool:
    everyone = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(everyone, value, group=group)
    return len(set(torch.cat(everyone).tolist())) == 1


def _diverged(
    prints: Tensor, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, step: int
) -> ReplicasDifferError:  # fmt: skip
    """Return the error for fingerprints [ranks, names]: which ranks differ in which parameters, and how."""
    ranks = [dist.get_global_rank(group, place) for place in range(group.size())]
    apart: dict[str, list[int]] = {}
    for name, column in zip(tensors, prints.T.tolist(), strict=True):
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
    few, how = _elements_apart([tensors[name] for name in apart], group)
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    where = sorted({host for rank, host in zip(ranks, hosts, strict=True) if rank in involved})
    error = ReplicasDifferError(
        f"{who} {verb} from {whom} in {listed(list(apart), 5)}",
        where=f"after step {step}, on host{'s' * (len(where) > 1)} {', '.join(where)}",
        why=f"{how}: a bit has flipped in memory, for the same gradients would leave no other trace"
        if few
        else f"{how}: the gradients of these parameters were not reduced in some step (used outside of forward?), or "
        "one rank alone has written them",
        fix="go on from the last checkpoint; if it comes again on the same rank, replace that machine"
        if few
        else "`lockstep verify` finds what is not synchronised; go on from the last checkpoint",
    )
    good = [rank for rank in ranks if rank not in involved]
    error.apart, error.is_flip, error.ranks = apart, few and bool(good), frozenset(involved)
    error.good = good[0] if good else -1
    return error


def _elements_apart(tensors: list[Tensor], group: dist.ProcessGroup) -> tuple[bool, str]:
    """Return whether so few elements differ that a bit has flipped, and what differs."""
    if len(tensors) > _MOST_TENSORS:
        return False, f"{len(tensors)} tensors differ"
    differ = total = 0
    bits = ""
    for tensor in tensors:
        mine = _integers(local(tensor)).clone()
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        stacked = torch.stack(everyone)
        places = (stacked != stacked[0]).any(0).nonzero().flatten().tolist()
        differ, total = differ + len(places), total + mine.numel()
        if len(places) == 1:
            column = stacked[:, places[0]].tolist()
            changed = {a ^ b for a in column for b in column} - {0}
            flipped = [value.bit_length() - 1 for value in changed if value > 0 and value & (value - 1) == 0]
            bits = f", in bit {flipped[0]}" if len(changed) == 1 and flipped else ""
    few = 0 < differ <= _FEW_ELEMENTS and differ < total
    return few, f"{differ} of {total} elements differ{bits}"
