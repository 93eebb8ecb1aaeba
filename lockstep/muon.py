"""Muon for the matrices of a model's hidden layers, AdamW for its other parameters.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a
matrix by its nearest orthogonal one, which five steps of Newton and Schulz find. So it needs whole
matrices, where ranks have shards:

    rank 0                          rank 1
    rows 0, 1 of A, B and C         rows 2, 3 of A, B and C       momenta, each its own rows
    all of A and C            ←→    all of B                      the rows go to each one's owner
    orthogonal A and C              orthogonal B                  each is computed once
    rows 0, 1 of all three    ←→    rows 2, 3 of all three        and come back

Both exchanges send bfloat16, which is what the steps compute in: no bit is lost. A rank sends
2 · (1 − 1/ranks) bytes an element of the matrices that it shares, and as much comes back, where
AdamW sends nothing. Parameters that are cut in another way than by rows along one axis are gathered
on each rank, which computes them whole.

By default its rate is that of AdamW (Liu et al. 2025, arXiv:2502.16982): an update of a matrix is
scaled to the size that AdamW's has.

Tests: tests/test_muon.py
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.errors import UsageError
from lockstep.torch_compat.muon_steps import COEFFICIENTS, EPS, adjusted_rate, orthogonal

_MOMENTUM = "momentum_buffer"


class Muon(torch.optim.AdamW):
    """Updates matrices by Muon, and other parameters by AdamW.

    Args:
        params: parameters, of which those of two dims are matrices; or groups, whose `matrices`
            (True or False) says which optimizer has them.
        weight_decay: decoupled, of both.
        momentum: of Muon; `nesterov`: looks one update ahead.
        ns_steps: steps of Newton and Schulz.
        adjust_lr_fn: `match_rms_adamw`, or torch's `original`, with a rate of its own.
        adamw: further arguments of AdamW: `betas`, `eps`, `fused`, `foreach`.
    """

    shards: ClassVar[bool] = True  # it gathers what it needs of others' shards

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        _check(momentum, ns_steps, adjust_lr_fn)
        groups = list(params)
        if not groups or not isinstance(groups[0], Mapping):
            groups = [
                {"params": [p for p in groups if p.ndim == 2], "matrices": True},
                {"params": [p for p in groups if p.ndim != 2], "matrices": False},
            ]
        self._of_muon = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(
            groups,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            foreach=foreach,
            fused=fused,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which says by `matrices` which optimizer has it."""
        where = "lockstep.muon.Muon(…)"
        if "matrices" not in param_group:
            fix = "write {'params': …, 'matrices': True} for Muon, and False for AdamW"
            raise UsageError("a group of parameters does not say matrices", where=where, fix=fix)
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        if param_group["matrices"]:
            shapes = [(p[1] if isinstance(p, tuple) else p).shape for p in params]
            odd = next((shape for shape in shapes if len(shape) != 2), None)
            if odd is not None:
                what = f"a parameter of shape {list(odd)} is no matrix"
                fix = "put it into a group with 'matrices': False"
                raise UsageError(what, where=where, fix=fix)
        own = self._of_muon if param_group["matrices"] else {}
        super().add_param_group({**own, **param_group, "params": params})

    @staticmethod
    def groups_of(named: Mapping[str, nn.Parameter], blocks: Sequence[str]) -> list[dict[str, Any]]:
        """Return the groups of a model's parameters: the matrices in its blocks, and the others.

        So an embedding and an output layer are AdamW's.
        """
        inside = tuple(f"{name}." for name in blocks)
        if not inside:
            what = "muon updates the matrices of hidden layers, and this model names no blocks"
            fix = (
                "give the model blocks() -> [(name, module)], or make lockstep.muon.Muon of groups"
            )
            raise UsageError(what, where="training.optimizer", fix=fix)
        matrices = {name for name, p in named.items() if p.ndim == 2 and name.startswith(inside)}
        return [
            {"params": [p for name, p in named.items() if name in matrices], "matrices": True},
            {"params": [p for name, p in named.items() if name not in matrices], "matrices": False},
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; all ranks call it together."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["matrices"]:
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group."""
        matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
        directions = [self._direction(parameter, group) for parameter in matrices]

        def whole(matrix: Tensor) -> Tensor:
            return orthogonal(matrix, COEFFICIENTS, group["ns_steps"], EPS)

        for parameter, update in zip(
            matrices, _orthogonal(matrices, directions, whole), strict=True
        ):
            rate = adjusted_rate(group["lr"], group["adjust_lr_fn"], parameter.shape)
            values = _local(parameter)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.add_(update, alpha=-rate)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return this rank's part of the momentum, after it took in the gradient."""
        state = self.state[parameter]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = _local(parameter.grad)
        momentum = _local(state[_MOMENTUM])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _check(momentum: float, ns_steps: int, adjust_lr_fn: str) -> None:
    """Raise a UsageError for arguments with which there is no Muon."""
    where = "training.optimizer_args"
    if not 0 <= momentum < 1 or ns_steps < 1:
        what = f"there is no Muon with momentum={momentum} and ns_steps={ns_steps}"
        raise UsageError(what, where=where, fix="write a momentum from 0 to below 1, and 1 step")
    if adjust_lr_fn not in ("match_rms_adamw", "original"):
        what = f"Muon has no adjust_lr_fn {adjust_lr_fn!r}"
        raise UsageError(what, where=where, fix="write match_rms_adamw or original")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonal(
    matrices: Sequence[Tensor], directions: Sequence[Tensor], whole: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return this rank's part of each matrix's orthogonal direction.

    Args:
        matrices: parameters, DTensors where ranks have shards.
        directions: this rank's part of each one's momentum.
        whole: makes an orthogonal matrix of one that is whole.
    """
    found: dict[int, Tensor] = {}
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for number, parameter in enumerate(matrices):
        if not isinstance(parameter, DTensor):
            found[number] = whole(directions[number].contiguous())
            continue
        group = _group_of_rows(parameter)
        if group is None:
            found[number] = _gathered_everywhere(parameter, directions[number], whole)
        else:
            by_group.setdefault(group, []).append(number)
    for group, numbers in by_group.items():
        parts = _by_owners(
            [matrices[number] for number in numbers],
            [directions[number] for number in numbers],
            group,
            whole,
        )
        found |= dict(zip(numbers, parts, strict=True))
    return [found[number] for number in range(len(matrices))]


def _group_of_rows(parameter: DTensor) -> dist.ProcessGroup | None:
    """Return the ranks that share out a matrix's rows; None: it is cut otherwise."""
    cut = [dim for dim, place in enumerate(parameter.placements) if not place.is_replicate()]
    if len(cut) != 1 or parameter.placements[cut[0]] != Shard(0):
        return None
    return parameter.device_mesh.get_group(cut[0])


def _gathered_everywhere(
    parameter: DTensor, direction: Tensor, whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return this rank's part, of a matrix that each rank computes."""
    mesh = parameter.device_mesh
    placements = parameter.placements
    spread = DTensor.from_local(
        direction, mesh, placements, shape=parameter.shape, stride=parameter.stride()
    )
    made = whole(spread.full_tensor().contiguous())
    return distribute_tensor(made, mesh, placements, src_data_rank=None).to_local()


def _by_owners(
    matrices: Sequence[Tensor],
    directions: Sequence[Tensor],
    group: dist.ProcessGroup,
    whole: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return this rank's rows of each orthogonal matrix, which one rank of the group computes.

    With ranks 0 and 1, and matrices of 4, 4 and 2 rows that 0, 1 and 0 own, rank 1 sends its rows
    of the first and the third to rank 0, and gets rank 0's of the second.
    """
    ranks = dist.get_world_size(group)
    me = dist.get_rank(group)
    owners = _owners(matrices, ranks)
    rows = [[_rows(matrix, rank, ranks) for rank in range(ranks)] for matrix in matrices]
    width = [matrix.shape[1] for matrix in matrices]
    mine = [number for number, owner in enumerate(owners) if owner == me]
    owned_by = [[n for n, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    order = [number for numbers in owned_by for number in numbers]

    halves = [direction.to(torch.bfloat16) for direction in directions]
    out = [sum(rows[n][me] * width[n] for n in owned_by[rank]) for rank in range(ranks)]
    back = [sum(rows[n][rank] * width[n] for n in mine) for rank in range(ranks)]
    flat = _exchanged([halves[n].reshape(-1) for n in order], out, back, halves[0], group)

    # From each rank come its rows of the matrices that are this one's, in their order.
    pieces = {number: list[Tensor]() for number in mine}
    for rank, part in enumerate(torch.split(flat, back)):
        sizes = [rows[number][rank] * width[number] for number in mine]
        for number, piece in zip(mine, torch.split(part, sizes), strict=True):
            pieces[number].append(piece.view(rows[number][rank], width[number]))
    made = {number: whole(torch.cat(pieces[number])).contiguous() for number in mine}

    returned = [
        torch.split(made[n], rows[n])[rank].reshape(-1) for rank in range(ranks) for n in mine
    ]
    flat = _exchanged(returned, back, out, halves[0], group)
    sizes = [rows[number][me] * width[number] for number in order]
    parts = dict(zip(order, torch.split(flat, sizes), strict=True))
    return [parts[number].view_as(halves[number]) for number in range(len(matrices))]


def _owners(matrices: Sequence[Tensor], ranks: int) -> list[int]:
    """Return the rank that computes each matrix: the largest first, to the one with least work."""
    work = [0] * ranks
    owners = [0] * len(matrices)

    def cost(number: int) -> int:
        """Return the multiplications of a step, up to a factor."""
        long, short = sorted(matrices[number].shape, reverse=True)
        return long * short * short

    for number in sorted(range(len(matrices)), key=lambda number: (-cost(number), number)):
        owners[number] = work.index(min(work))
        work[owners[number]] += cost(number)
    return owners


def _rows(matrix: Tensor, rank: int, ranks: int) -> int:
    """Return how many rows of a matrix a rank has: all but the last have equally many."""
    size = -(-matrix.shape[0] // ranks)
    return max(0, min(size, matrix.shape[0] - rank * size))


def _exchanged(
    parts: Sequence[Tensor],
    sent: list[int],
    received: list[int],
    like: Tensor,
    group: dist.ProcessGroup,
) -> Tensor:
    """Send each rank its elements of the parts, and return those of all ranks, by rank."""
    given = torch.cat(list(parts)) if parts else like.new_empty(0)
    taken = like.new_empty(sum(received))
    dist.all_to_all_single(taken, given, received, sent, group=group)
    return taken
