"""Take a snapshot of a run and plan its checkpoint, the first two stops of a save.

`stage` turns each tensor into a block: a plain tensor is one block, the whole; a DTensor is the
block of this rank, or an empty one. Each rank then sends a `Description`, without values. Rank 0
merges them into one `CheckpointPlan`, or raises one error on all ranks. The format decides which
rank writes which bytes (`write.FormatWriter.plan`).

Tests: tests/checkpoint/test_round_trip.py, tests/checkpoint/test_ranks.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.manifest import GROUPS_KEY, MODEL, ParameterInfo, checked_part, dtype_name
from lockstep.errors import UsageError
from lockstep.torch_compat.checkpoint_format import chunks_of


@dataclass(frozen=True)
class TensorBlock:
    """A block of a whole tensor, on this rank."""

    tensor: Tensor  # the block itself; it shares memory with the tensor that it was taken from
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # the index, in the whole, of the block's first element

    @classmethod
    def full(cls, tensor: Tensor) -> "TensorBlock":
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @classmethod
    def unread(cls, shape: Sequence[int], dtype: torch.dtype) -> "TensorBlock":
        return cls.full(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    @property
    def is_empty(self) -> bool:
        """Return whether it has no elements though the whole tensor has some.

        It is then not written.
        """
        return self.tensor.numel() == 0 and 0 not in self.shape

    @property
    def memory(self) -> tuple[object, ...]:
        """A key that is equal for two blocks exactly if they are the same memory.

        The key of a block without elements means nothing.
        """
        t = self.tensor
        return (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype, self.shape, self.offset)

    def with_tensor(self, tensor: Tensor) -> "TensorBlock":
        return TensorBlock(tensor, self.shape, self.offset)

    @property
    def info(self) -> "TensorInfo":
        return self.shape, dtype_name(self.tensor.dtype)


@dataclass(frozen=True)
class Part:
    """This rank's blocks of one flat dictionary of tensors (such as the model), by their names.

    The names are canonical.
    """

    blocks: dict[str, TensorBlock] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # returns the values of a block, which `blocks` then lack, when written
    read: Callable[[str], Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        return self.blocks[name].tensor if self.read is None else self.read(name)


@dataclass
class Snapshot:
    """The state of a training run on this rank, or the tensors to load a checkpoint into.

    A tensor is a DTensor (this rank's shard is saved), or plain and the same on every rank that has
    its name. Ranks may have different names. A tensor of the model under two names is stored once.
    The state of an optimizer is flat, `"<canonical parameter name>//<state key>"` → tensor.
    """

    model: dict[str, Tensor]  # parameters and buffers, by canonical name
    optimizers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # everything that is not a tensor, as JSON; rank 0's is written
    state: dict[str, Any] = field(default_factory=dict)
    # EMA, compression state, or the user's own
    extra: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # of each optimizer; merged over ranks
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    # further names that are on different ranks
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors by folder: `model`, `optimizer/NAME`, `extra/NAME`."""
        tensors = {MODEL: self.model}
        tensors |= {
            checked_part(f"optimizer/{name}"): flat for name, flat in self.optimizers.items()
        }
        return tensors | {checked_part(f"extra/{name}"): flat for name, flat in self.extra.items()}


@dataclass(frozen=True)
class Staged:
    """A snapshot ready to be written.

    Once its blocks are copied, training can go on and change the originals.
    """

    parts: dict[str, Part]
    state: dict[str, Any]
    groups: dict[str, dict[str, Any]]


def stage(snapshot: Snapshot) -> Staged:
    """Return the blocks of a snapshot, which share its memory, and a copy of its JSON.

    Raises a UsageError if its state uses a reserved key, or has a value that can't be saved.
    """
    if GROUPS_KEY in snapshot.state:
        raise UsageError(
            f"state[{GROUPS_KEY!r}] is where the optimizers' groups are kept",
            fix="choose another key",
        )
    parts = {part: Part(blocks_of(tensors)) for part, tensors in snapshot.tensors().items()}
    parts[MODEL] = part_of(snapshot.model, snapshot.aliases)
    return Staged(parts, as_json(snapshot.state, "state"), as_json(snapshot.groups, "groups"))


@torch.no_grad()
def blocks_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorBlock]:
    """Return this rank's block of each tensor.

    Raises a UsageError if a value has no memory to save.
    """
    blocks = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fix = "put it in `state`"
            raise UsageError(
                f"{name} is a {type(tensor).__name__}, where a checkpoint holds tensors", fix=fix
            )
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
            what = (
                f"{name} can't be in a checkpoint: it is on device {tensor.device} with layout"
                f" {tensor.layout}"
            )
            raise UsageError(what, why="only dense tensors with values are stored")
        if isinstance(tensor, DTensor):
            offset = tuple(chunks_of(tensor).offsets)
            blocks[name] = TensorBlock(tensor.to_local().detach(), tuple(tensor.shape), offset)
        else:
            blocks[name] = TensorBlock.full(tensor.detach())
    return blocks


def part_of(tensors: Mapping[str, Tensor], declared: Mapping[str, Sequence[str]]) -> Part:
    """Return the blocks of a model, with one entry for each tensor.

    Names with the same memory become one name with aliases.

    The canonical name is the first in the dictionary; aliases that are on different ranks have to
    be `declared`.
    """
    owner = {alias: name for name, aliases in declared.items() for alias in aliases}
    aliases = {name: tuple(others) for name, others in declared.items()}
    blocks: dict[str, TensorBlock] = {}
    seen: dict[tuple[object, ...], str] = {}
    for given, block in blocks_of(tensors).items():
        name = owner.get(given, given)
        if block.tensor.numel():
            name = seen.setdefault(block.memory, name)
        if name != given and given not in aliases.get(name, ()):
            aliases[name] = (*aliases.get(name, ()), given)
        blocks.setdefault(name, block)
    return Part(blocks, aliases)


def as_json(value: Any, place: str) -> Any:
    """Return a copy in the types of JSON, tuples as lists.

    Raise a UsageError for what JSON would change or lacks.
    """
    if isinstance(value, Mapping):
        if stray := [key for key in value if type(key) is not str]:
            what = f"{place} has the key {stray[0]!r}; JSON knows only strings as keys"
            raise UsageError(what, fix="write the key as text")
        return {key: as_json(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if value is None or type(value) in (str, int, float, bool):
        return value
    fix = (
        "put tensors in `extra`"
        if isinstance(value, Tensor)
        else "turn it into numbers, strings, lists and dicts"
    )
    raise UsageError(f"{place} is a {type(value).__name__}, which JSON can't hold", fix=fix)


TensorInfo = tuple[tuple[int, ...], str]  # shape of the whole tensor, dtype without `torch.`


@dataclass(frozen=True)
class Description:
    """The tensors and optimizer groups of one rank, without values."""

    tensors: dict[str, dict[str, TensorInfo]]  # by part and name
    aliases: Mapping[str, tuple[str, ...]]
    groups: dict[str, dict[str, Any]]  # by optimizer
    blocks: Any  # from `FormatWriter.describe`


def describe(staged: Staged, blocks: Any) -> Description:
    """Return the description of a staged snapshot; `blocks` is what its format says of them."""
    tensors = {
        part: {name: block.info for name, block in content.blocks.items()}
        for part, content in staged.parts.items()
    }
    return Description(tensors, staged.parts[MODEL].aliases, staged.groups, blocks)


@dataclass(frozen=True)
class CheckpointPlan:
    """The content of a new checkpoint: its parts, the model's parameters and all ranks' groups."""

    parts: list[str]
    parameters: dict[str, ParameterInfo]
    groups: dict[str, dict[str, Any]]


def merge(ranks: Sequence[Description]) -> CheckpointPlan:
    """Return the plan of the checkpoint of all ranks; raise a UsageError if they disagree."""
    parts = sorted(
        {part for rank in ranks for part in rank.tensors}, key=lambda part: (part != MODEL, part)
    )
    infos = {part: _tensors_of_all(ranks, part) for part in parts}
    of_model = infos.get(MODEL, {})
    aliases = _aliases_of_all(ranks, of_model)
    parameters = {
        name: ParameterInfo(*info, aliases.get(name, ())) for name, info in of_model.items()
    }
    return CheckpointPlan(parts, parameters, _groups_of_all(ranks))


def _tensors_of_all(ranks: Sequence[Description], part: str) -> dict[str, TensorInfo]:
    """Return the tensors of a part that any rank has; those of one name have to be alike."""
    infos: dict[str, TensorInfo] = {}
    for rank in ranks:
        for name, info in rank.tensors.get(part, {}).items():
            first = infos.setdefault(name, info)
            if first != info:
                here, there = (f"{dtype}{list(shape)}" for shape, dtype in (first, info))
                what = f"ranks disagree about {name}: {here} on one, {there} on another"
                raise UsageError(what, why="a name means one tensor, whichever ranks hold it")
    return infos


def _aliases_of_all(
    ranks: Sequence[Description], tensors: Mapping[str, TensorInfo]
) -> dict[str, tuple[str, ...]]:
    """Return canonical name → further names on any rank, none of which is a tensor of its own."""
    aliases: dict[str, tuple[str, ...]] = {}
    for rank in ranks:
        for name, others in rank.aliases.items():
            aliases[name] = tuple(dict.fromkeys((*aliases.get(name, ()), *others)))
    for name, others in aliases.items():
        if both := [other for other in others if other in tensors]:
            what = f"{name} and {both[0]} are one parameter on one rank and two on another"
            raise UsageError(
                what, fix="give every rank's snapshot aliases={canonical name: (further names,)}"
            )
    return aliases


def _groups_of_all(ranks: Sequence[Description]) -> dict[str, dict[str, Any]]:
    """Return the parameter groups of each optimizer; ranks may hold different parameters of one."""
    merged: dict[str, dict[str, Any]] = {}
    for name, mine in (item for rank in ranks for item in rank.groups.items()):
        all_groups = merged.setdefault(name, {"groups": [], "values": {}})
        all_groups["values"] |= mine["values"]
        for number, group in enumerate(mine["groups"]):
            if number == len(all_groups["groups"]):
                all_groups["groups"].append({"params": [], "options": group["options"]})
            known = all_groups["groups"][number]
            if known["options"] != group["options"]:
                what = (
                    f"group {number} of optimizer {name!r} has different options on different ranks"
                )
                fix = "make the optimizer alike on every rank: options must not depend on the rank"
                raise UsageError(what, fix=fix)
            seen = set(known["params"])
            known["params"] += [param for param in group["params"] if param not in seen]
    return merged


def local_plan(part: Part) -> SavePlan:
    """Return the plan to write all blocks of a part that this rank has."""
    items = []
    for name, block in part.blocks.items():
        if not block.is_empty:
            chunk = ChunkStorageMetadata(torch.Size(block.offset), block.tensor.size())
            data = TensorWriteData(
                chunk, TensorProperties(block.tensor.dtype), torch.Size(block.shape)
            )
            # SHARD for whole tensors too, so that any rank that has a block may be assigned to
            # write it.
            items.append(
                WriteItem(MetadataIndex(name, block.offset), WriteItemType.SHARD, tensor_data=data)
            )
    return SavePlan(items)


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Assign each block to one rank, and return each rank's plan and the metadata; on rank 0.

    Of the ranks that have a block, the one that is to write the fewest bytes so far writes it: that
    is torch's rule (`dedup_save_plans`). Raise a ValueError unless blocks make up tensors.

    Args:
        plans: of the blocks that each rank has (`local_plan`), by rank.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    shared, metadata = planner.create_global_plan(plans)
    return FileSystemWriter(Path()).prepare_global_plan(shared), metadata  # names each rank's file
