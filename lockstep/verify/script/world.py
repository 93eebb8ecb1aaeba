"""Puts together the pieces that the ranks of a run hold of one model's tensors.

Two ranks, of which each holds half of the rows of a matrix, and all of a bias:

    rank 0: weight[0:4], bias      rank 1: weight[4:8], bias      →  weight[0:8], bias

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.division import ceil_div
from lockstep.verify.script.record import Pieces, ScriptRecord, TensorPiece

Tensors = dict[str, Tensor]


def _assembled(pieces: Sequence[TensorPiece], dim: int | None) -> Tensor:
    """Return the complete tensor from the pieces that ranks hold.

    A script may have cut it along `dim` over the ranks. Of equal copies, the last is taken.
    """
    if dim is not None:
        return torch.cat([piece.local for piece in pieces], dim)
    if pieces[0].flat:
        return torch.cat([piece.local.flatten() for piece in pieces])
    if not pieces[0].cuts:
        return pieces[-1].local
    result = torch.zeros(pieces[0].shape, dtype=pieces[0].local.dtype)
    for piece in pieces:
        part = result
        for sharded, parts, index in piece.cuts:
            size = ceil_div(part.shape[sharded], parts)
            start = min(index * size, part.shape[sharded])
            part = part.narrow(sharded, start, min(size, part.shape[sharded] - start))
        part.copy_(piece.local)
    return result


class World:
    """Ranks of a run, and what they hold of one model.

    `joined`: name → dim along which the script itself cuts it.
    """

    def __init__(
        self, records: Sequence[ScriptRecord], joined: Mapping[str, int] | None = None
    ) -> None:
        self.records = records
        self.joined = dict(joined or {})
        self._held = [set(record.first) for record in records]
        by_hand = bool(self.joined) or any(held != self._held[0] for held in self._held)
        everybody = set(range(len(records)))
        together = [
            everybody if by_hand else {rank} | record.together
            for rank, record in enumerate(records)
        ]
        # A pipeline's ranks and those of tensor parallel may overlap.
        for _ in records:
            together = [set().union(*(together[other] for other in mine)) for mine in together]
        # Ranks that compute the same samples together, in order; each rank alone, where a model is
        # not cut.
        self.units = [sorted(mine) for rank, mine in enumerate(together) if rank == min(mine)]
        self.leaders = [records[unit[0]] for unit in self.units]

    def tensors(self, ranks: Sequence[Pieces]) -> list[Tensors]:
        """Return the complete tensors as each rank sees them.

        A rank sees its own copies, then those of its unit, then those of other units.
        """
        complete: list[Tensors] = [{} for _ in ranks]
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            holders = [rank for rank, pieces in enumerate(ranks) if name in pieces]
            pieces = [ranks[rank][name] for rank in holders]
            in_parts = name in self.joined or any(piece.cuts or piece.flat for piece in pieces)
            if not in_parts and all(name in names or not names for names in self._held):
                for rank in holders:
                    complete[rank][name] = ranks[rank][name].local
                continue
            for unit in self.units:
                in_order = name in self.joined or ranks[holders[0]][name].flat
                ordered = holders if in_order else sorted(holders, key=lambda rank: rank in unit)
                value = _assembled([ranks[rank][name] for rank in ordered], self.joined.get(name))
                for rank in unit:
                    complete[rank][name] = value
        return complete


def with_complete_tensors(records: Sequence[ScriptRecord]) -> list[ScriptRecord]:
    """Return the records of a run's ranks with complete tensors, as each rank sees them."""
    world = World(records)

    def complete(ranks: Sequence[Pieces]) -> list[Pieces]:
        return [
            {name: TensorPiece(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}
            for tensors in world.tensors(ranks)
        ]

    steps = min(len(record.steps) for record in records)
    of_steps = []
    for number in range(steps):
        of_ranks = [record.steps[number] for record in records]
        parts = [
            complete([getattr(step, kind) for step in of_ranks])
            for kind in ("unclipped", "gradients", "values")
        ]
        of_steps.append(
            [
                replace(step, unclipped=unclipped, gradients=gradients, values=values)
                for step, unclipped, gradients, values in zip(of_ranks, *parts, strict=True)
            ]
        )
    firsts = complete([record.first for record in records])
    return [
        replace(record, first=first, steps=[each[rank] for each in of_steps])
        for rank, (record, first) in enumerate(zip(records, firsts, strict=True))
    ]
