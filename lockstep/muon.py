"""Muon for the matrices of a model's hidden layers, AdamW for its other parameters.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a
matrix by its nearest orthogonal one, whose singular values are all 1. Five steps of Newton and
Schulz find it without computing them: each makes a·X + b·(XXᵀ)X + c·(XXᵀ)²X of X, so every singular
value s becomes a·s + b·s³ + c·s⁵. With a = 3.4445, b = -4.7750 and c = 2.0315, values from 0 to 1
come near 1 fast, and stay there without coming closer. For a matrix with the values 3 and 1:

    3, 1 → divided by its norm, √10: 0.95, 0.32 → one step: 0.75, 0.94 → five steps: 0.75, 1.13

So it needs whole matrices, where ranks have shards:

    rank 0                          rank 1
    rows 0, 1 of A, B and C         rows 2, 3 of A, B and C       momenta, each its own rows
    all of A and C            ←→    all of B                      the rows go to each one's owner
    orthogonal A and C              orthogonal B                  each is computed once
    rows 0, 1 of all three    ←→    rows 2, 3 of all three        and come back

Replicas share the matrices out, too: each computes some, and sends them to the others.

    replica 0                       replica 1
    all of A, B and C               all of A, B and C             momenta, the same
    orthogonal A and C        ←→    orthogonal B                  each is computed once

All of this sends bfloat16, which is what the steps compute in: no bit is lost. Of N elements of
matrices a rank of R sends 4 · (1 − 1/R) · N / R bytes where it has shards, there and back, and
2 · (1 − 1/R) · N where it has replicas, on average; AdamW sends nothing. Parameters that are cut
along two axes are gathered on each rank that has a part, which computes them complete.

By default its rate is that of AdamW (Liu et al. 2025, arXiv:2502.16982): an update of a matrix is
scaled to the size that AdamW's has.

A parameter is one matrix, as for `torch.optim.Muon`, whatever lies in it. A weight [3 · D, D] that
holds queries, keys and values may be split instead: into three layers [D, D], or into heads, each
of which is made orthogonal by itself, and has the rate of its own shape.

Tests: tests/test_muon.py
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.division import ceil_div
from lockstep.errors import UsageError
from lockstep.torch_compat.muon_steps import COEFFICIENTS, EPS, adjusted_rate, orthogonal

_MOMENTUM = "momentum_buffer"

Split = tuple[int, Sequence[int]]
"""(dim, sizes): how a parameter is split into matrices along a dim, as `Tensor.split` takes it."""

SPLITS = ("layers", "heads")


class Muon(torch.optim.AdamW):
    """Updates matrices by Muon, and other parameters by AdamW.

    Args:
        params: parameters, of which those of two dims are matrices; or groups, whose `matrices`
            (True or False) says which optimizer has them, and whose `split` (dim, sizes), if there
            is one, how each of its parameters is split into matrices.
        weight_decay: decoupled, of both.
        momentum: of Muon; `nesterov`: looks one update ahead.
        ns_steps: steps of Newton and Schulz.
        adjust_lr_fn: `match_rms_adamw`, or torch's `original`, with a rate of its own.
        split: for a config: None, one matrix a parameter; `layers`: a weight that holds several
            layers is split into theirs; `heads`: and queries, keys and values into heads.
        spread: whether replicas share the matrices out, and send each other what they computed.
        adamw: further arguments of AdamW: `betas`, `eps`, `fused`, `foreach`.
    """

    shards: ClassVar[bool] = True  # it gathers what it needs of others' shards
    # parameter → groups of ranks that hold the same of it
    _replicas: Mapping[Tensor, Sequence[dist.ProcessGroup]] = {}
    _spreads: bool = True

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
        split: str | None = None,
        spread: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        _check(momentum, ns_steps, adjust_lr_fn, split)
        self._spreads = spread
        groups = list(params)
        if not groups or not isinstance(groups[0], Mapping):
            if split is not None:
                fix = "give groups with 'matrices': True and 'split': (dim, sizes)"
                what = f"split: {split} is of a config, where the model says what a weight holds"
                raise UsageError(what, where="lockstep.muon.Muon(…)", fix=fix)
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
                what = f"a parameter of shape {list(odd)} is not a matrix"
                fix = "put it into a group with 'matrices': False"
                raise UsageError(what, where=where, fix=fix)
            _check_split(param_group.get("split"), shapes, where)
        own = self._of_muon if param_group["matrices"] else {}
        super().add_param_group({**own, **param_group, "params": params})

    @staticmethod
    def groups_of(
        named: Mapping[str, nn.Parameter],
        blocks: Sequence[str],
        splits: Mapping[str, Split] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the groups of a model's parameters: the matrices in its blocks, and the others.

        So an embedding and an output layer are AdamW's. Matrices that are split alike, by name in
        `splits`, have a group, on each rank, also on one that has no such parameter.
        """
        inside = tuple(f"{name}." for name in blocks)
        if not inside:
            what = "muon updates the matrices of hidden layers, and this model names no blocks"
            fix = (
                "give the model blocks() -> [(name, module)], or make lockstep.muon.Muon of groups"
            )
            raise UsageError(what, where="training.optimizer", fix=fix)
        matrices = {name for name, p in named.items() if p.ndim == 2 and name.startswith(inside)}
        by_name = splits or {}
        ways: list[Split | None] = [None, *dict.fromkeys(by_name.values())]
        groups: list[dict[str, Any]] = []
        for way in ways:
            alike = [
                p for name, p in named.items() if name in matrices and by_name.get(name) == way
            ]
            split = {} if way is None else {"split": way}
            groups.append({"params": alike, "matrices": True, **split})
        others = [p for name, p in named.items() if name not in matrices]
        return [*groups, {"params": others, "matrices": False}]

    def share_among(self, replicas: Mapping[Tensor, Sequence[dist.ProcessGroup]]) -> None:
        """Let replicas share out the matrices.

        Args:
            replicas: parameter → groups of ranks that hold the same of it, and have the same
                gradient. Of a parameter with two groups, each rank of the first is in a group of
                the second kind of its own.
        """
        if self._spreads:
            self._replicas = replicas

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
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        split: Split | None = group.get("split")
        matrices = [
            _Matrix(
                parameter,
                self._direction(parameter, group),
                tuple(each for each in self._replicas.get(parameter, ()) if each.size() > 1),
                split,
            )
            for parameter in parameters
        ]

        def orthogonal_of(matrix: Tensor) -> Tensor:
            """Return the orthogonal matrix of a complete one, split by split."""
            # The function divides a bfloat16 matrix in place: it gets one of its own.
            own = matrix.to(torch.bfloat16, copy=True)
            dim, sizes = split or (0, [matrix.shape[0]])
            made = [
                orthogonal(each, COEFFICIENTS, group["ns_steps"], EPS)
                for each in torch.split(own, list(sizes), dim)
            ]
            return made[0] if len(made) == 1 else torch.cat(made, dim)

        for parameter, update in zip(
            parameters, orthogonal_parts(matrices, orthogonal_of), strict=True
        ):
            values = _local(parameter)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            rates = [
                adjusted_rate(group["lr"], group["adjust_lr_fn"], shape)
                for shape in _split_shapes(parameter.shape, split)
            ]
            if len(set(rates)) == 1:
                values.add_(update, alpha=-rates[0])
            else:
                assert split is not None
                values.sub_(update * _by_element(parameter, rates, split))

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


def _check(momentum: float, ns_steps: int, adjust_lr_fn: str, split: str | None) -> None:
    """Raise a UsageError for arguments with which there is no Muon."""
    where = "training.optimizer_args"
    if not 0 <= momentum < 1 or ns_steps < 1:
        what = f"there is no Muon with momentum={momentum} and ns_steps={ns_steps}"
        raise UsageError(what, where=where, fix="write a momentum from 0 to below 1, and 1 step")
    if adjust_lr_fn not in ("match_rms_adamw", "original"):
        what = f"Muon has no adjust_lr_fn {adjust_lr_fn!r}"
        raise UsageError(what, where=where, fix="write match_rms_adamw or original")
    if split is not None and split not in SPLITS:
        what = f"Muon can't split weights by {split!r}"
        raise UsageError(what, where=where, fix="write split: layers or heads, or leave it out")


def _check_split(split: Split | None, shapes: Sequence[torch.Size], where: str) -> None:
    """Raise a UsageError for a split that does not fit the matrices of its group."""
    if split is None:
        return
    dim, sizes = split
    odd = next((shape for shape in shapes if dim not in (0, 1) or sum(sizes) != shape[dim]), None)
    if odd is not None:
        what = f"a parameter of shape {list(odd)} can't be split along dim {dim} into {sizes}"
        raise UsageError(what, where=where, fix="write (0 or 1, sizes that add up to that dim)")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split_shapes(shape: torch.Size, split: Split | None) -> list[torch.Size]:
    """Return the shapes of the matrices in a parameter."""
    if split is None:
        return [shape]
    dim, sizes = split
    return [torch.Size([size, shape[1]] if dim == 0 else [shape[0], size]) for size in sizes]


def _by_element(parameter: Tensor, rates: Sequence[float], split: Split) -> Tensor:
    """Return each element's rate, of this rank's part of a parameter."""
    dim, sizes = split
    each = torch.tensor(rates, dtype=torch.float32, device=parameter.device)
    along = each.repeat_interleave(torch.tensor(sizes, device=parameter.device))
    every = along.unsqueeze(1 - dim).expand(parameter.shape)
    if not isinstance(parameter, DTensor):
        return every
    cut = distribute_tensor(
        every.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return cut.to_local()


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is to be updated."""

    parameter: Tensor  # a DTensor where ranks have shards
    direction: Tensor  # this rank's part of its momentum
    replicas: tuple[dist.ProcessGroup, ...]  # of ranks that have the same part
    split: Split | None = None

    @property
    def cost(self) -> int:
        """The multiplications of one step of Newton and Schulz.

        With m rows and n ≥ m columns, X · Xᵀ and its product with X take m²·n each, and the square
        of it m³.
        """
        found = 0
        for shape in _split_shapes(self.parameter.shape, self.split):
            short, long = sorted(shape)
            found += short * short * (2 * long + short)
        return found

    @property
    def cut(self) -> tuple[dist.ProcessGroup, int] | None:
        """The ranks that share out the rows or columns, and the dim.

        None: nobody does, or it is cut along several axes.
        """
        along = self._cut_along
        if len(along) != 1 or not isinstance(self.parameter, DTensor):
            return None
        place = self.parameter.placements[along[0]]
        if type(place) is not Shard:  # FSDP2 has a kind of its own, for shards of pieces
            return None
        return self.parameter.device_mesh.get_group(along[0]), place.dim

    @property
    def is_complete(self) -> bool:
        """Return whether this rank has the whole matrix."""
        return not self._cut_along

    @property
    def _cut_along(self) -> list[int]:
        if not isinstance(self.parameter, DTensor):
            return []
        placements = self.parameter.placements
        return [dim for dim, place in enumerate(placements) if not place.is_replicate()]

    def shape_on(self, rank: int, ranks: int, dim: int) -> list[int]:
        """Return the shape of a rank's part: all but the last have equally many rows."""
        shape = list(self.parameter.shape)
        size = ceil_div(shape[dim], ranks)
        shape[dim] = max(0, min(size, shape[dim] - rank * size))
        return shape


Whole = Callable[[Tensor], Tensor]
"""Makes the orthogonal matrix, bfloat16, of a complete one."""


def orthogonal_parts(matrices: Sequence[_Matrix], whole: Whole) -> list[Tensor]:
    """Return this rank's part of each matrix's orthogonal direction, bfloat16."""
    by_replicas: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_replicas.setdefault(matrix.replicas, []).append(number)
    found: dict[int, Tensor] = {}
    for replicas, numbers in by_replicas.items():
        parts = _by_replicas([matrices[number] for number in numbers], replicas, whole)
        found |= dict(zip(numbers, parts, strict=True))
    return [found[number] for number in range(len(matrices))]


def _by_replicas(
    matrices: Sequence[_Matrix], groups: Sequence[dist.ProcessGroup], whole: Whole
) -> list[Tensor]:
    """Return this rank's part of each orthogonal matrix, which one replica computes."""
    if not groups:
        return _on_shards(matrices, whole)
    group, *others = groups
    ranks = group.size()
    owners = _owners(matrices, ranks)
    owned_by = [[n for n, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    mine = owned_by[group.rank()]
    made = _by_replicas([matrices[number] for number in mine], others, whole)

    sizes = [sum(matrices[n].direction.numel() for n in numbers) for numbers in owned_by]
    like = matrices[0].direction.new_empty(0, dtype=torch.bfloat16)
    own = torch.cat([like, *(part.reshape(-1) for part in made)])
    flat = _exchanged([own] * ranks, [own.numel()] * ranks, sizes, like, group)
    order = [number for numbers in owned_by for number in numbers]
    parts = torch.split(flat, [matrices[number].direction.numel() for number in order])
    by_number = dict(zip(order, parts, strict=True))
    return [by_number[n].view_as(matrix.direction) for n, matrix in enumerate(matrices)]


def _on_shards(matrices: Sequence[_Matrix], whole: Whole) -> list[Tensor]:
    """Return this rank's part of each orthogonal matrix, which ranks with shards compute."""
    found: dict[int, Tensor] = {}
    by_cut: dict[tuple[dist.ProcessGroup, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if matrix.is_complete:
            found[number] = whole(matrix.direction.contiguous())
        elif matrix.cut is None:
            found[number] = _gathered_everywhere(matrix, whole)
        else:
            by_cut.setdefault(matrix.cut, []).append(number)
    for (group, dim), numbers in by_cut.items():
        parts = _by_owners([matrices[number] for number in numbers], group, dim, whole)
        found |= dict(zip(numbers, parts, strict=True))
    return [found[number] for number in range(len(matrices))]


def _gathered_everywhere(matrix: _Matrix, whole: Whole) -> Tensor:
    """Return this rank's part, of a matrix that each rank computes."""
    parameter = matrix.parameter
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    placements = parameter.placements
    spread = DTensor.from_local(
        matrix.direction.to(torch.bfloat16),
        mesh,
        placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    made = whole(spread.full_tensor().contiguous())
    return distribute_tensor(made, mesh, placements, src_data_rank=None).to_local()


def _by_owners(
    matrices: Sequence[_Matrix], group: dist.ProcessGroup, dim: int, whole: Whole
) -> list[Tensor]:
    """Return this rank's part of each orthogonal matrix, which one rank of the group computes.

    With ranks 0 and 1, and matrices of 4, 4 and 2 rows that 0, 1 and 0 own, rank 1 sends its rows
    of the first and the third to rank 0, and gets rank 0's of the second. `dim` is 1 where ranks
    have columns.
    """
    ranks = group.size()
    me = group.rank()
    owners = _owners(matrices, ranks)
    shapes = [[matrix.shape_on(rank, ranks, dim) for rank in range(ranks)] for matrix in matrices]
    size = [[math.prod(shape) for shape in of_ranks] for of_ranks in shapes]
    owned_by = [[n for n, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    mine = owned_by[me]
    order = [number for numbers in owned_by for number in numbers]

    halves = [matrix.direction.to(torch.bfloat16) for matrix in matrices]
    out = [sum(size[n][me] for n in owned_by[rank]) for rank in range(ranks)]
    back = [sum(size[n][rank] for n in mine) for rank in range(ranks)]
    flat = _exchanged([halves[n].reshape(-1) for n in order], out, back, halves[0], group)

    # From each rank come its parts of the matrices that are this one's, in their order.
    pieces = {number: list[Tensor]() for number in mine}
    for rank, part in enumerate(torch.split(flat, back)):
        sizes = [size[number][rank] for number in mine]
        for number, piece in zip(mine, torch.split(part, sizes), strict=True):
            pieces[number].append(piece.view(shapes[number][rank]))
    made = {number: whole(torch.cat(pieces[number], dim)) for number in mine}

    along = [[shape[dim] for shape in of_ranks] for of_ranks in shapes]
    returned = [
        torch.split(made[n], along[n], dim)[rank].reshape(-1) for rank in range(ranks) for n in mine
    ]
    flat = _exchanged(returned, back, out, halves[0], group)
    sizes = [size[number][me] for number in order]
    parts = dict(zip(order, torch.split(flat, sizes), strict=True))
    return [parts[number].view_as(halves[number]) for number in range(len(matrices))]


def _owners(matrices: Sequence[_Matrix], ranks: int) -> list[int]:
    """Return the rank that computes each matrix: the largest first, to the one with least work."""
    work = [0] * ranks
    owners = [0] * len(matrices)
    costs = [matrix.cost for matrix in matrices]
    for number in sorted(range(len(matrices)), key=lambda number: (-costs[number], number)):
        owners[number] = work.index(min(work))
        work[owners[number]] += costs[number]
    return owners


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
