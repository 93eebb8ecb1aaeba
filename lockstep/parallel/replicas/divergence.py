"""Detects replicas that drift apart, by a flipped bit or a parameter that is not synchronised.

Every K steps each replica adds up the bits of its parameters and buffers as integers, and ranks
compare one number. Where it differs, elements are compared: a bit that flipped in memory leaves one
element apart, a fault of software whole tensors. Bits that flip in a gradient before it is reduced
are seen by no comparison.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import StepConfig
from lockstep.errors import RunError, listed
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.process_group.mesh import replica_group
from lockstep.tensors import as_integers, fingerprint, local

_FEW_ELEMENTS = 2  # that a flipped bit can leave apart: a tied or a padded one
_MOST_TENSORS = 4  # that are looked at element by element


def guard_replicas(
    placed: ParallelModel,
    config: StepConfig,
    mesh: DeviceMesh | None,
    others: Iterable[tuple[dist.ProcessGroup, Set[str]]] = (),
    spread: Set[str] = frozenset(),
) -> None:
    """Add the checks of replicas that the config wants.

    Args:
        placed: gets them.
        config: says how often, and whether to repair.
        mesh: has the ranks along which parameters are compared.
        others: further groups whose ranks hold the same, and the names of what they do not.
        spread: names of the parameters of which these ranks hold different pieces.
    """
    every = config.distributed.divergence_check_steps
    if every is None:
        return
    for group, left_out in others:
        placed.checks.append(guard(placed, group, every, left_out=left_out))
    replicas = replica_group(mesh)
    if replicas is not None:
        repair = config.distributed.divergence_action == "repair"
        placed.checks.append(guard(placed, replicas, every, left_out=spread, repair=repair))
    elif "divergence_check_steps" in config.distributed.model_fields_set:
        placed.log_lines.append("warning: divergence_check_steps: one replica, nothing to compare")


def guard(
    placed: ParallelModel,
    group: dist.ProcessGroup,
    every: int,
    *,
    left_out: Set[str] = frozenset(),
    repair: bool = False,
) -> Callable[[int], None]:
    """Return a check to be called after each step with the number of steps made.

    Every rank calls it.

    It raises a RunError on every rank where replicas differ: the ranks of `group` hold the same
    parameters, or the same shards of them, but for those `left_out`. `repair` puts back a flipped
    bit, once on each rank.
    """
    repaired: set[int] = set()

    @torch.no_grad()
    def check(step: int) -> None:
        """Compare what the ranks hold; put a flipped bit back, or raise an error on all."""
        if step % every == 0:
            held = {name: tensor for name, tensor in placed.kept().items() if name not in left_out}
            divergence = compare(held, group, step)
            if (
                repair
                and divergence is not None
                and divergence.is_flip
                and not repaired & divergence.ranks
            ):
                repaired.update(divergence.ranks)
                for name in divergence.apart:
                    dist.broadcast(local(held[name]).detach(), divergence.good, group=group)
                placed.later_log_lines.append(
                    f"{divergence.what}; put back from rank {divergence.good} after step {step}"
                )
                divergence = None
            # The error of any rank is raised on all ranks, or the others would wait for it.
            anywhere = torch.tensor(
                [divergence is not None], dtype=torch.uint8, device=placed.random_state.device
            )
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            if anywhere.item():
                errors: list[RunError | None] = [None] * dist.get_world_size()
                dist.all_gather_object(errors, divergence)
                raise next(error for error in errors if error is not None)

    return check


class ReplicasDifferError(RunError):
    """Replicas differ."""

    # Name → ranks that hold other values than most; all ranks, where nobody knows which are right.
    apart: Mapping[str, list[int]] = {}
    is_flip = False  # one bit has flipped, on ranks that the others outvote
    ranks: frozenset[int] = frozenset()  # ranks with wrong values
    good = -1  # a rank that holds right ones


def compare(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup, step: int
) -> ReplicasDifferError | None:
    """Return an error that names the differences between the replicas of a group.

    None if there are none.
    """
    names = sorted(tensors)
    if not names:
        return None
    prints = torch.stack([fingerprint(local(tensors[name])) for name in names])
    # exchanged parameters must not cancel out
    positions = torch.arange(1, len(names) + 1, device=prints.device)
    sums = _gathered((prints * positions).sum().view(1), group)
    if bool((sums == sums[0]).all()):  # host waits for the device
        return None
    return _diverged(_gathered(prints, group), {name: tensors[name] for name in names}, group, step)


def _gathered(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(everyone, value, group=group)
    return torch.stack(everyone)


def _diverged(
    prints: Tensor, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, step: int
) -> ReplicasDifferError:
    """Return the error for fingerprints [ranks, names]: which ranks and parameters differ, how."""
    ranks = [dist.get_global_rank(group, index) for index in range(group.size())]
    apart: dict[str, list[int]] = {}
    for name, column in zip(tensors, prints.T.tolist(), strict=True):
        (most, count), *_ = Counter(column).most_common()
        if count < len(column):
            tied = 2 * count <= len(column)  # then nobody knows which of them is right
            apart[name] = (
                ranks
                if tied
                else [r for r, value in zip(ranks, column, strict=True) if value != most]
            )
    involved = sorted({rank for held in apart.values() for rank in held})
    if involved == ranks:
        who = "the replicas on ranks "
    else:
        who = "rank " if len(involved) == 1 else "ranks "
    who += ", ".join(map(str, involved))
    verb = "differ" if involved == ranks or len(involved) > 1 else "differs"
    whom = "each other" if involved == ranks else "the other replicas"
    few, how = _elements_apart([tensors[name] for name in apart], group)
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    where = sorted({host for rank, host in zip(ranks, hosts, strict=True) if rank in involved})
    why = (
        "the gradients of these parameters were not reduced in some step (used outside of"
        " forward?), or one rank alone has written them"
    )
    fix = "`lockstep verify` finds what is not synchronised; go on from the last checkpoint"
    if few:
        why = "a bit has flipped in memory, for the same gradients would leave no other trace"
        fix = (
            "go on from the last checkpoint; if it comes again on the same rank, replace that"
            " machine"
        )
    what = f"{who} {verb} from {whom} in {listed(list(apart), 5)}"
    place = f"after step {step}, on host{'s' * (len(where) > 1)} {', '.join(where)}"
    error = ReplicasDifferError(what, where=place, why=f"{how}: {why}", fix=fix)
    good = [rank for rank in ranks if rank not in involved]
    error.apart = apart
    error.is_flip = few and bool(good)
    error.ranks = frozenset(involved)
    error.good = good[0] if good else -1
    return error


def _elements_apart(tensors: list[Tensor], group: dist.ProcessGroup) -> tuple[bool, str]:
    """Return whether so few elements differ that a bit has flipped, and what differs."""
    if len(tensors) > _MOST_TENSORS:
        return False, f"{len(tensors)} tensors differ"
    differ = total = 0
    bits = ""
    for tensor in tensors:
        stacked = _gathered(as_integers(local(tensor)).clone(), group)
        places = (stacked != stacked[0]).any(0).nonzero().flatten().tolist()
        differ = differ + len(places)
        total = total + stacked.shape[1]
        if len(places) == 1:
            column = stacked[:, places[0]].tolist()
            changed = {a ^ b for a in column for b in column} - {0}
            flipped = [
                value.bit_length() - 1
                for value in changed
                if value > 0 and value & (value - 1) == 0
            ]
            bits = f", in bit {flipped[0]}" if len(changed) == 1 and flipped else ""
    few = 0 < differ <= _FEW_ELEMENTS and differ < total
    return few, f"{differ} of {total} elements differ{bits}"
