"""Weights of other trainers, written as a checkpoint: those of Accelerate, Lightning, Hugging Face and plain torch.

    FOLDER/model.safetensors, or parts with model.safetensors.index.json    Accelerate, Hugging Face
    FOLDER/pytorch_model.bin                                                 the same, older
    FILE.safetensors                                                         ours by `export` too
    FILE.ckpt | .pt | .pth | .bin: {"state_dict": …}, {"model": …} or the weights themselves    Lightning, torch.save

Only weights are taken: optimizers, schedules and random states are stored in each trainer's own way, by position. The
run that goes on from an import therefore begins at step 0. Pickles are read by torch's restricted unpickler.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lockstep.checkpoint.commit import save_as
from lockstep.checkpoint.manifest import JSON_LIMIT, parse_json, text_of
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.read import check_block
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage import Checkpoint, CheckpointPath
from lockstep.errors import UsageError
from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES

_DDP = "module."
_INDEX = "model.safetensors.index.json"
_IN_FOLDERS = (_INDEX, "model.safetensors", "pytorch_model.bin")
_INSIDE = ("state_dict", "model")  # under which the weights may lie

Weights = dict[str, Tensor]


def import_weights(
    source: str | Path, output: Checkpoint, *, prefix: str = ""
) -> tuple[CheckpointPath, int, int]:  # fmt: skip
    """Write the weights of a checkpoint of another trainer as a checkpoint of step 0.

    Args:
        source: a file or a folder, see above.
        output: the folder of the new checkpoint; must not exist.
        prefix: what names begin with there and not in the model, as `model.` in a LightningModule; other names are
            left out.

    Returns:
        (the checkpoint, how many tensors it has, how many were left out).

    Raises:
        UsageError: there are no weights at `source`, or none by that prefix; or they can't be read safely.
    """
    found, aliases = read_weights(Path(source))
    _check(found, source)
    ddp = _DDP if all(canonical(name).startswith(_DDP) for name in found) else ""
    named = {canonical(name).removeprefix(ddp): tensor for name, tensor in found.items()}
    kept = {name.removeprefix(prefix): _full_precision(t) for name, t in named.items() if name.startswith(prefix)}
    if not kept:
        names = ", ".join(list(named)[:3])
        raise UsageError(f"no name in {source} begins with {prefix!r}", where="--prefix", why=f"it holds {names} …")
    ties = {_stripped(alias, ddp + prefix): _stripped(name, ddp + prefix) for alias, name in aliases.items()}
    declared: dict[str, tuple[str, ...]] = {}
    for alias, name in ties.items():
        if name in kept and alias not in kept:
            declared[name] = (*declared.get(name, ()), alias)
    state = {
        "step": 0, "updates": 0, "skipped": [], "epoch": 0, "samples": 0, "nominal": None, "loss_scale": None,
        "source": {}, "best": {}, "metadata": {"imported_from": str(source)},
    }  # fmt: skip
    snapshot = Snapshot(_ties_kept(named, kept, prefix), state=state, aliases=declared)
    path = save_as(output, 0, snapshot, config_yaml=f"# weights imported from {source}\n")
    return path, len(kept), len(named) - len(kept)


def read_weights(source: Path) -> tuple[Weights, dict[str, str]]:
    """Return (name → tensor, alias → the name under which the tensor is).

    Raises:
        UsageError: there are none, or they can't be read safely.
    """
    file = _file_of(source)
    if file.name == _INDEX:
        try:
            index = parse_json(locate(file.absolute().parent).read(file.name, JSON_LIMIT))
            parts = sorted({text_of(part) for part in index["weight_map"].values()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"{file} is no index of weights", why=_first_line(error)) from None
        if any(Path(part).name != part or part in ("", "..") or "\0" in part for part in parts):
            raise UsageError(
                f"{file} names files outside of its folder",
                why="an index that reaches elsewhere is not one that a trainer wrote",
            )
        read = [_safetensors(file.with_name(part)) for part in parts]
        weights = {name: tensor for found, _ in read for name, tensor in found.items()}
        return weights, {alias: name for _, ties in read for alias, name in ties.items()}
    return _safetensors(file) if file.suffix == ".safetensors" else (_pickled(file), {})


def canonical(name: str) -> str:
    """Return a name without what FSDP, torch.compile and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def _stripped(name: str, prefix: str) -> str:
    return canonical(name).removeprefix(prefix)


def _file_of(source: Path) -> Path:
    if source.is_file():
        return source
    for name in _IN_FOLDERS:
        if (source / name).is_file():
            return source / name
    if not source.exists():
        raise UsageError(
            f"there is no file or folder {str(source)!r}",
            fix="give the file with the weights, or the folder that the other trainer wrote",
        )
    raise UsageError(
        f"there are no weights in {source}",
        why=f"none of {', '.join(_IN_FOLDERS)} is there",
        fix="give the file with the weights; shards of Accelerate's FSDP become one by `accelerate merge-weights`",
    )


def _safetensors(file: Path) -> tuple[Weights, dict[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata: dict[str, str] = opened.metadata() or {}
    except Exception as error:  # besides its own errors: of types that this torch does not have, of memory …
        raise UsageError(f"{file} is no safetensors file", why=_first_line(error)) from None
    ties = {alias: name for alias, name in metadata.items() if name in weights and alias not in weights}
    try:
        ours = parse_json(metadata.get("aliases", "{}").encode())  # as ours are exported
        for name, others in ours.items():
            ties |= dict.fromkeys((text_of(other) for other in others), name)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file} does not say which names are tied", why=_first_line(error)) from None
    return weights, ties


def _pickled(file: Path) -> Weights:
    try:
        with file.open("rb") as opened:
            check_block(opened, 0, file.stat().st_size)
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises nearly anything: IndexError, UnicodeDecodeError, KeyError …
        raise UsageError(
            f"{file} can't be read as weights",
            why=_first_line(error),
            fix="save the weights alone, torch.save(model.state_dict(), FILE), or as safetensors; objects of other "
            "classes in a pickle could run code",
        ) from None
    for key in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise UsageError(
            f"{file} holds a {type(found).__name__}, where weights by name are needed",
            fix="save the weights alone: torch.save(model.state_dict(), FILE)",
        )
    if strange := [n for n, value in found.items() if not (isinstance(n, str) and isinstance(value, Tensor))]:
        raise UsageError(
            f"{file} holds {strange[0]!r}, which is no tensor, among {len(found)} entries"
            if isinstance(strange[0], str)
            else f"{file} holds an entry by the name {strange[0]!r}, where names are texts",
            fix="save the weights alone: torch.save(model.state_dict(), FILE)",
        )
    return dict(found)


def _check(weights: Weights, source: str | Path) -> None:
    """Refuse what can't be stored, or what would become larger in memory than it is in the file.

    Raises:
        UsageError: with the first such tensor; or two names differ in wrappers alone.
    """
    for name, tensor in weights.items():
        dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
        if not dense:
            raise UsageError(
                f"{name} in {source} can't be imported",
                why="only dense tensors with values are stored",
                fix="convert it (Tensor.dequantize, Tensor.to_dense) and save the weights again",
            )
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UsageError(
                f"{name} in {source} has {tensor.numel()} elements, and only some of them are stored",
                why="it is an expanded view, which would grow in memory",
                fix="save the weights again with Tensor.contiguous()",
            )
    if len({canonical(name) for name in weights}) < len(weights):
        raise UsageError(
            f"two names in {source} differ only in what wrappers add to them ({', '.join(WRAPPER_NAMES)})",
            fix="save the weights of the model alone: torch.save(model.state_dict(), FILE)",
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200] or type(error).__name__


def _full_precision(tensor: Tensor) -> Tensor:
    """Return parameters as float32; autocast does the rest."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _ties_kept(named: Weights, kept: Weights, prefix: str) -> Weights:
    """Have names that shared memory before they were converted share it after."""
    first: dict[tuple[object, ...], str] = {}
    for name in kept:
        t = named[prefix + name]
        if t.numel():
            kept[name] = kept[first.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype), name)]
    return kept
