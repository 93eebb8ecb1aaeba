"""Second stop, plan: rank 0 learns what every rank holds, and decides what the checkpoint will be.

Each rank sends a `Description`: names, shapes, dtypes, no values. Rank 0 merges them into one `CheckpointPlan`, or
refuses them with one error for all ranks. Which rank writes which bytes is decided by the format
(`write.FormatWriter.plan`); for DCP's files the functions at the end do it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lockstep.checkpoint.manifest import MODEL, ParameterFacts
from lockstep.checkpoint.snapshot import Part, Staged, TensorBlock, dtype_name
from lockstep.errors import UsageError

_Aliases = Mapping[str, tuple[str, ...]]
TensorFacts = tuple[tuple[int, ...], str]  # shape of the whole tensor, dtype without `torch.`


@dataclass(frozen=True)
class Description:
    """What one rank holds.

    Args:
        tensors: part → name → shape of the whole and dtype.
        aliases: further names of the model's tensors.
        groups: name of an optimizer → its parameter groups.
        blocks: what the format needs besides (`FormatWriter.describe`).
    """

    tensors: dict[str, dict[str, TensorFacts]]
    aliases: _Aliases
    groups: dict[str, dict[str, Any]]
    blocks: Any


@dataclass(frozen=True)
class CheckpointPlan:
    """What the checkpoint will hold.

    Args:
        parts: the folders of tensors, the model's first.
        parameters: what the manifest holds of the model's tensors.
        groups: the parameter groups of each optimizer, those of all ranks merged.
    """

    parts: list[str]
    parameters: dict[str, ParameterFacts]
    groups: dict[str, dict[str, Any]]


def describe(staged: Staged, blocks: Any) -> Description:
    """Return what this rank holds; `blocks` is what the format adds."""
    tensors = {
        part: {name: (piece.shape, dtype_name(piece.tensor.dtype)) for name, piece in content.pieces.items()}
        for part, content in staged.parts.items()
    }
    return Description(tensors, staged.parts[MODEL].aliases, staged.groups, blocks)


def merge(ranks: Sequence[Description]) -> CheckpointPlan:
    """Return the plan of a checkpoint of what all ranks hold.

    Raises:
        UsageError: ranks disagree about a tensor, an alias, or the options of an optimizer.
    """
    parts = sorted({part for rank in ranks for part in rank.tensors}, key=lambda part: (part != MODEL, part))
    whole: dict[str, dict[str, TensorFacts]] = {part: {} for part in parts}
    for rank in ranks:
        for part, tensors in rank.tensors.items():
            for name, facts in tensors.items():
                first = whole[part].setdefault(name, facts)
                if first != facts:
                    raise UsageError(
                        f"ranks disagree about {name}: {_shown(first)} on one, {_shown(facts)} on another",
                        why="a name means one tensor, whichever ranks hold it",
                    )
    aliases = _merged_aliases([rank.aliases for rank in ranks], whole[MODEL])
    parameters = {name: ParameterFacts(*facts, aliases.get(name, ())) for name, facts in whole[MODEL].items()}
    return CheckpointPlan(parts, parameters, _merged_groups([rank.groups for rank in ranks]))


def _shown(facts: TensorFacts) -> str:
    return f"{facts[1]}{list(facts[0])}"


def _merged_aliases(ranks: Sequence[_Aliases], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the further names of each tensor over all ranks; `names` are the canonical ones."""
    merged: dict[str, tuple[str, ...]] = {}
    for aliases in ranks:
        for name, others in aliases.items():
            merged[name] = tuple(dict.fromkeys((*merged.get(name, ()), *others)))
    for name, others in merged.items():
        if both := [other for other in others if other in names]:
            raise UsageError(
                f"{name} and {both[0]} are one parameter on one rank and two on another",
                fix="give every rank's snapshot aliases={canonical name: (further names,)}",
            )
    return merged


def _merged_groups(ranks: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the parameter groups of each optimizer; ranks may hold different parameters of a group."""
    merged: dict[str, dict[str, Any]] = {}
    for groups in ranks:
        for name, mine in groups.items():
            whole = merged.setdefault(name, {"groups": [], "values": {}})
            whole["values"] |= mine["values"]
            for i, group in enumerate(mine["groups"]):
                if i == len(whole["groups"]):
                    whole["groups"].append({"params": [], "options": group["options"]})
                if whole["groups"][i]["options"] != group["options"]:
                    raise UsageError(
                        f"group {i} of optimizer {name!r} has different options on different ranks",
                        fix="make the optimizer alike on every rank: options must not depend on the rank",
                    )
                known = whole["groups"][i]["params"]
                known += [param for param in group["params"] if param not in set(known)]
    return merged


# ---- torch.distributed.checkpoint's plans ----


def local_plan(part: Part) -> SavePlan:
    """Return what this rank could write of a part."""
    return SavePlan([_write_item(name, piece) for name, piece in part.pieces.items() if not piece.is_empty])


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Share out each block once, so that replicas write about the same number of bytes; also return the metadata.

    Raises:
        ValueError: the ranks' blocks of some tensor overlap, or leave a part of it out.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    shared, metadata = planner.create_global_plan(plans)
    return FileSystemWriter(Path()).prepare_global_plan(shared), metadata  # names each rank's file


def _write_item(name: str, piece: TensorBlock) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.size())
    data = TensorWriteData(chunk, TensorProperties(piece.tensor.dtype), torch.Size(piece.shape))
    # SHARD for whole tensors too: then any rank that holds a block may be the one that writes it.
    return WriteItem(MetadataIndex(name, piece.offset), WriteItemType.SHARD, tensor_data=data)
