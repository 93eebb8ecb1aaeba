"""Plan a checkpoint, the second stop of a save: rank 0 merges the descriptions of all ranks.

Each rank sends a `Description`: names, shapes and dtypes, but no values. Rank 0 merges them into one `CheckpointPlan`,
or raises one error on all ranks. The format decides which rank writes which bytes (`write.FormatWriter.plan`); for
DCP's files the functions at the end do it.
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

from lockstep.checkpoint.manifest import MODEL, ParameterInfo
from lockstep.checkpoint.snapshot import Part, Staged, TensorBlock, dtype_name
from lockstep.errors import UsageError

_Aliases = Mapping[str, tuple[str, ...]]
TensorInfo = tuple[tuple[int, ...], str]  # shape of the whole tensor, dtype without `torch.`


@dataclass(frozen=True)
class Description:
    """The tensors and optimizer groups of one rank, without values.

    Args:
        tensors: part → name → shape of the whole tensor, and dtype.
        aliases: further names of the model's tensors.
        groups: name of an optimizer → its parameter groups.
        blocks: further information for the format (`FormatWriter.describe`).
    """

    tensors: dict[str, dict[str, TensorInfo]]
    aliases: _Aliases
    groups: dict[str, dict[str, Any]]
    blocks: Any


@dataclass(frozen=True)
class CheckpointPlan:
    """The content of the checkpoint to be written.

    Args:
        parts: the folders of tensors, the model's first.
        parameters: the tensors of the model, for the manifest.
        groups: the parameter groups of each optimizer, merged over all ranks.
    """

    parts: list[str]
    parameters: dict[str, ParameterInfo]
    groups: dict[str, dict[str, Any]]


def describe(staged: Staged, blocks: Any) -> Description:
    """Return the description of this rank; `blocks` comes from the format."""
    tensors = {
        part: {name: (block.shape, dtype_name(block.tensor.dtype)) for name, block in content.blocks.items()}
        for part, content in staged.parts.items()
    }
    return Description(tensors, staged.parts[MODEL].aliases, staged.groups, blocks)


def merge(ranks: Sequence[Description]) -> CheckpointPlan:
    """Return the plan of the checkpoint of all ranks.

    Raises:
        UsageError: ranks disagree about a tensor, an alias, or the options of an optimizer.
    """
    parts = sorted({part for rank in ranks for part in rank.tensors}, key=lambda part: (part != MODEL, part))
    whole: dict[str, dict[str, TensorInfo]] = {part: {} for part in parts}
    for rank in ranks:
        for part, tensors in rank.tensors.items():
            for name, info in tensors.items():
                first = whole[part].setdefault(name, info)
                if first != info:
                    raise UsageError(
                        f"ranks disagree about {name}: {_shown(first)} on one, {_shown(info)} on another",
                        why="a name means one tensor, whichever ranks hold it",
                    )
    aliases = _merged_aliases([rank.aliases for rank in ranks], whole[MODEL])
    parameters = {name: ParameterInfo(*info, aliases.get(name, ())) for name, info in whole[MODEL].items()}
    return CheckpointPlan(parts, parameters, _merged_groups([rank.groups for rank in ranks]))


def _shown(info: TensorInfo) -> str:
    return f"{info[1]}{list(info[0])}"


def _merged_aliases(ranks: Sequence[_Aliases], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the further names of each tensor on all ranks; `names` are the canonical ones."""
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
    """Return the plan to write all blocks of a part that this rank has."""
    return SavePlan([_write_item(name, block) for name, block in part.blocks.items() if not block.is_empty])


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Assign each block to one rank, with about as many bytes for each replica; also return the metadata.

    Raises:
        ValueError: the ranks' blocks of some tensor overlap, or leave a part of it out.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    shared, metadata = planner.create_global_plan(plans)
    return FileSystemWriter(Path()).prepare_global_plan(shared), metadata  # names each rank's file


def _write_item(name: str, block: TensorBlock) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(block.offset), block.tensor.size())
    data = TensorWriteData(chunk, TensorProperties(block.tensor.dtype), torch.Size(block.shape))
    # SHARD for whole tensors too, so that any rank that has a block may be assigned to write it.
    return WriteItem(MetadataIndex(name, block.offset), WriteItemType.SHARD, tensor_data=data)
