"""What is read of a checkpoint into which tensors of this rank, and under which names.

A weight that is tied has one name in a checkpoint, and others in the model, its aliases. Another
trainer's file may have it under an alias, or twice.

Tests: tests/checkpoint/test_round_trip.py, tests/checkpoint/test_ranks.py
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.checkpoint.fetch import Ranges
from lockstep.checkpoint.manifest import MODEL, Manifest, dtype_of
from lockstep.checkpoint.read import PartReader, ShardedReader, open_part
from lockstep.checkpoint.snapshot import Snapshot, TensorBlock, TensorInfo, blocks_of
from lockstep.checkpoint.storage import Location
from lockstep.errors import UsageError, listed

TensorInfos = dict[str, TensorInfo]  # by name


@dataclass
class RestoreTarget:
    """The tensors of this rank that a part of a checkpoint is read into."""

    reader: PartReader
    blocks: dict[str, TensorBlock]  # this rank's, by their names in the snapshot
    owner: dict[str, str] = field(default_factory=dict)  # alias → canonical name, as stored

    def info(self) -> TensorInfos:
        return {self.owner.get(name, name): block.info for name, block in self.blocks.items()}


def targets_of(
    checkpoint: Location, manifest: Manifest, snapshot: Snapshot, only: Collection[str] | None
) -> dict[str, RestoreTarget]:
    """Return what to read into which tensors, for each part; refuse what does not fit."""
    tensors = snapshot.tensors()
    wanted = {part for part in (*manifest.parts, *tensors) if only is None or part in only}
    stray = [f"{part}: not in the checkpoint" for part in sorted(wanted - set(manifest.parts))]
    stray += [
        f"{part}: only in the checkpoint"
        for part in sorted(wanted & set(manifest.parts) - tensors.keys())
    ]
    if stray:
        raise UsageError(
            f"{checkpoint} holds other parts than were to be loaded", why=listed(stray)
        )
    targets = {
        part: RestoreTarget(open_part(checkpoint, manifest, part), blocks_of(tensors[part]))
        for part in sorted(wanted)
    }
    if MODEL in targets:
        ties = {alias: name for name, info in manifest.parameters.items() for alias in info.aliases}
        targets[MODEL].owner = ties | _stored_under_aliases(targets[MODEL], snapshot.aliases)
        _check_ties(
            checkpoint, targets[MODEL], {a for others in snapshot.aliases.values() for a in others}
        )
    return targets


def needed_ranges(targets: Iterable[RestoreTarget]) -> Ranges:
    """Return the bytes of the files that this rank's blocks are read from."""
    needed: Ranges = {}
    for target in targets:
        blocks = {target.owner.get(name, name): block for name, block in target.blocks.items()}
        needed |= target.reader.needed(blocks)
    return needed


def _stored_under_aliases(
    model: RestoreTarget, aliases: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return name → alias for tied weights that another trainer's file has under an alias."""
    stored = model.reader.stored.info()
    return {
        name: next(other for other in others if other in stored)
        for name, others in aliases.items()
        if name not in stored and any(other in stored for other in others)
    }


def _check_ties(checkpoint: Location, model: RestoreTarget, declared: Collection[str]) -> None:
    """Refuse tensors that are tied only in the checkpoint or only in the model."""
    in_memory: dict[tuple[object, ...], str] = {}
    stored: dict[str, str] = {}
    for name, block in model.blocks.items():
        if not block.tensor.numel():
            continue
        kept = model.owner.get(name, name)
        first = in_memory.setdefault(block.memory, name)
        if model.owner.get(first, first) != kept:
            fix = (
                "untie them before loading, or build the model as it was built for the run that"
                " saved"
            )
            raise UsageError(
                f"{first} and {name} are tied in the model, but two parameters in {checkpoint}",
                fix=fix,
            )
        other = stored.setdefault(kept, name)
        if model.blocks[other].memory != block.memory and not {name, other} & set(declared):
            what = f"{other} and {name} are two parameters in the model, but tied in {checkpoint}"
            raise UsageError(what, fix="tie them before loading: training would pull them apart")


def equal_aliases(model: RestoreTarget, aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of tied weights that are stored separately with equal values."""
    equal: list[str] = []
    if not isinstance(model.reader, ShardedReader):
        return equal
    stored = model.reader.stored.info()
    for name, others in aliases.items():
        for other in others:
            if name in stored and stored.get(other) == stored[name] and other not in model.owner:
                shape, dtype = stored[name]
                both = {each: torch.empty(shape, dtype=dtype_of(dtype)) for each in (name, other)}
                model.reader.read_into(
                    {each: TensorBlock.full(tensor) for each, tensor in both.items()}
                )
                equal += [other] if torch.equal(both[name], both[other]) else []
    return equal
