"""Export, digest and rewrite the weights of a checkpoint, and import weights of other trainers.

Whole tensors pass through memory one at a time, except in the torch format. Weights that can be
imported:

    FOLDER/model.safetensors            Accelerate, Hugging Face; or parts of it with
                                        model.safetensors.index.json
    FOLDER/pytorch_model.bin            older versions of both
    FILE.safetensors                    also written by `lockstep checkpoint export`
    FILE.ckpt | .pt | .pth | .bin       Lightning, torch.save: {"state_dict": …}, {"model": …} or
                                        the weights themselves

Tests: tests/checkpoint/test_importing.py, tests/checkpoint/test_files_of_others.py,
tests/checkpoint/test_commands.py
"""

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from lockstep.checkpoint.commit import SaveOptions, write_staged
from lockstep.checkpoint.keep import newest
from lockstep.checkpoint.manifest import (
    GROUPS_KEY,
    HUGGING_FACE,
    JSON_LIMIT,
    LOSS_NAMES,
    MODEL,
    OWN_FORM,
    Manifest,
    config_text,
    dtype_name,
    parse_json,
    read_manifest,
    read_state,
    text_of,
)
from lockstep.checkpoint.posix import locate, sync_folder
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.read import check_block, open_part
from lockstep.checkpoint.read_once import VerifiedSource, verified
from lockstep.checkpoint.snapshot import Part, Snapshot, Staged, TensorBlock, stage
from lockstep.checkpoint.storage import MANIFEST, Checkpoint, CheckpointPath, Location
from lockstep.errors import UsageError, listed
from lockstep.files.paths import local_path
from lockstep.machine.progress import Advance, progress_of
from lockstep.models.hf_folder import UnreadWeights, write_folder
from lockstep.models.loss_modules import PREFIX
from lockstep.models.safetensors_files import tensor_bytes, write_tensors
from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES

Weights = dict[str, Tensor]  # by name

_DDP_PREFIX = "module."
_EXTRA_STATE = "_extra_state"  # under which torch keeps what a module's get_extra_state returns
_INDEX = "model.safetensors.index.json"
_IN_FOLDERS = (_INDEX, "model.safetensors", "pytorch_model.bin")
# keys of a checkpoint under which weights may be
_WEIGHT_KEYS = ("state_dict", "model_state_dict", "model")


def digest(path: Checkpoint) -> str:
    """Return the digest of a checkpoint's model: SHA-256, 64 hexadecimal digits.

    It is over the tensors in the order of their canonical names (by code points). For each: a line
    of JSON, `["name", "dtype", [shape]]`, and the elements of the whole tensor, row by row,
    little-endian. Tied names count once. A DamagedError is raised for a file that is not what was
    written.
    """
    with verified(locate(path), MODEL) as source:
        return digest_tensors(_complete_tensors(source))


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of whole tensors, which come in the order of their names."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(
            json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode() + b"\n"
        )
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def weights(path: Checkpoint) -> dict[str, Tensor]:
    """Return the model's gathered tensors on the CPU, without those of a loss function.

    Tied names share memory.

    The path is a checkpoint, or a run directory or folder of checkpoints, whose newest complete one
    is read. Of a run that evaluates an average of the weights (`WeightAverage(evaluate=True)`) they
    are the average.

    A DamagedError is raised where a byte is not as written.
    """
    model: dict[str, Tensor] = {}
    with verified(locate(_newest_in(path)), MODEL) as source:
        _warn_of_own_form(source.checkpoint)
        with _unread_weights(source) as (forms, read):
            for name in forms:
                aliases = source.manifest.parameters[name].aliases
                model |= dict.fromkeys((name, *aliases), read(name))
    return model


def loss_weights(path: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of a run's loss function on the CPU, by its own `state_dict` names."""
    with verified(locate(path), MODEL) as source:
        of_model = set(source.manifest.parameters) - _of_loss(source.checkpoint)
        tensors = _complete_tensors(source, without=of_model)
        return {name.removeprefix(PREFIX): tensor for name, tensor in tensors}


def _of_loss(checkpoint: Location) -> set[str]:
    """Return the names in a checkpoint that are of a loss function."""
    return set(read_state(checkpoint).get(LOSS_NAMES, ()))


def _warn_of_own_form(checkpoint: Location) -> None:
    """Warn that the model's `load_state_dict` may read tensors of these names in another way."""
    if modules := read_state(checkpoint).get(OWN_FORM):
        text = (
            f"a hook or a method of {listed(modules)} makes the model's state_dict, which is not"
            " simply its tensors. These are its parameters and buffers; Trainer.state_dict()"
            " returns what the model's own would"
        )
        warnings.warn(text, stacklevel=3)


def _newest_in(path: Checkpoint) -> Checkpoint:
    """Return the newest complete checkpoint of a folder of them.

    A checkpoint is returned as it is.
    """
    if isinstance(path, Location):
        return path
    folder = local_path(path, "the checkpoint")
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return path
    within = folder / "checkpoints"
    return newest(within if within.is_dir() else folder) or path


def export_safetensors(path: Checkpoint, output: str | Path) -> Path:
    """Write the whole tensors of the model to one safetensors file, by canonical name.

    Its metadata has tied names.
    """
    target = local_path(output, "the file to write")
    with verified(locate(path), MODEL) as source:
        manifest = source.manifest
        _warn_of_own_form(source.checkpoint)
        metadata = {"format": "pt", "step": str(manifest.step)}
        of_loss = _of_loss(source.checkpoint)
        with _unread_weights(source) as (forms, read):
            aliases = {name: of for name, of in _aliases(manifest).items() if name not in of_loss}
            if aliases:
                metadata["aliases"] = json.dumps(aliases)
            return _write_at_once(target, lambda file: write_tensors(file, forms, read, metadata))


def export_hugging_face(
    path: Checkpoint, output: str | Path, *, adapter: bool = False
) -> tuple[Path, list[str]]:
    """Write a model of Hugging Face as a folder that its library loads.

    Adapters are merged, or with `adapter` written alone, as peft does.

    Returns:
        the folder, and lines about what it lacks.

    Raises:
        UsageError: the checkpoint is of another kind of model.
    """
    target = local_path(output, "the folder to write")
    checkpoint = locate(_newest_in(path))
    described = read_state(checkpoint).get(HUGGING_FACE)
    if described is None:
        raise UsageError(
            f"{path} does not say that its model is one of transformers",
            where="--to",
            fix="run `lockstep checkpoint export PATH`, which writes one safetensors file",
        )
    with verified(checkpoint, MODEL) as source:
        _warn_of_own_form(source.checkpoint)
        with _unread_weights(source) as (forms, read):
            home = {alias: name for name, of in _aliases(source.manifest).items() for alias in of}
            tied = {alias: forms[name] for alias, name in home.items() if name in forms}
            unread = UnreadWeights({**forms, **tied}, lambda name: read(home.get(name, name)))
            return target, write_folder(described, unread, target, adapter=adapter)


def export_torch(path: Checkpoint, output: str | Path) -> Path:
    """Write `{"model": weights(path), "step": …}` for `torch.load(…, weights_only=True)`."""
    step = read_manifest(path).step
    target = local_path(output, "the file to write")
    return _write_at_once(
        target, lambda file: torch.save({"model": weights(path), "step": step}, file)
    )


def rewrite_full(path: Checkpoint, output: Checkpoint) -> CheckpointPath:
    """Write the same checkpoint with one file of full tensors per part, and commit it."""
    target = locate(output)
    with (
        verified(locate(path)) as source,
        progress_of(f"writing {target.name}", source.manifest.num_bytes) as advance,
    ):
        manifest = source.manifest
        state = read_state(source.checkpoint)
        parts = {part: _unread_part(source, part, advance) for part in manifest.parts}
        staged = Staged(parts, state, state.pop(GROUPS_KEY, {}))
        write_staged(
            target,
            manifest.step,
            staged,
            config_text(source.checkpoint),
            SaveOptions("full"),
            Ranks(alone=True),
        )
    return target.path


def _complete_tensors(
    source: VerifiedSource, *, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors of the model on CPU, one at a time, in the order of the names."""
    manifest = source.manifest
    size = sum(manifest.files[file].size for file in manifest.files_of(MODEL))
    with progress_of(f"reading {source.checkpoint.name}", size) as advance:
        model = _unread_part(source, MODEL, advance, without=without)
        for name in model.blocks:
            if name not in without:
                yield name, model.tensor(name)


@contextmanager
def _unread_weights(
    source: VerifiedSource,
) -> Iterator[tuple[dict[str, Tensor], Callable[[str], Tensor]]]:
    """Yield the tensors that the run evaluates, on meta and by name, and what reads one of them.

    They are the model's, or those of the average of the weights, if the run has one; without those
    of a loss function.
    """
    manifest = source.manifest
    of_loss = _of_loss(source.checkpoint)
    size = sum(manifest.files[file].size for file in manifest.files_of(MODEL))
    with progress_of(f"reading {source.checkpoint.name}", size) as advance:
        average = Part()
        part = f"extra/{read_state(source.checkpoint).get('evaluated')}"
        if part in manifest.parts:
            source.verify_further(part)
            average = _unread_part(source, part, advance)
        model = _unread_part(source, MODEL, advance, without={*of_loss, *average.blocks})

        def holder(name: str) -> Part:
            return average if name in average.blocks else model

        names = [name for name in model.blocks if name not in of_loss]
        forms = {name: holder(name).blocks[name].tensor for name in names}
        yield forms, lambda name: holder(name).tensor(name)


def _unread_part(
    source: VerifiedSource, part: str, advance: Advance, *, without: Collection[str] = ()
) -> Part:
    """Return a part of whole tensors by name, each of which is read when its values are needed.

    Those `without` which the caller does are not read.
    """
    reader = open_part(source.checkpoint, source.manifest, part)
    tensors = sorted(reader.stored.tensors.items())
    blocks = {
        name: TensorBlock.unread(stored.size, stored.properties.dtype) for name, stored in tensors
    }
    needs = {name: reader.needed({name: blocks[name]}) for name in blocks if name not in without}
    source.expect(part, needs)

    def read(name: str) -> Tensor:
        full = torch.empty_like(blocks[name].tensor, device="cpu")
        with source.holding(part, name):
            reader.read_into({name: blocks[name].with_tensor(full)})
        advance(full.nbytes)
        return full

    return Part(blocks, _aliases(source.manifest) if part == MODEL else {}, read)


def _aliases(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    return {name: info.aliases for name, info in manifest.parameters.items() if info.aliases}


def _write_at_once(target: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a file under a temporary name, then rename it.

    An existing file is never overwritten.
    """
    if target.exists():
        raise UsageError(f"{target} exists already", fix="name another file, or move it away")
    beside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(target.absolute().parent)
    return target


def read_weights(source: str | Path) -> tuple[Weights, dict[str, str]]:
    """Return the weights of another trainer by name, and alias → the name of its tensor.

    Names are without what wrappers add to them. `source` is a file or a folder of a kind above;
    pickles are read by torch's restricted unpickler. A UsageError is raised if there are no weights
    at `source`, or they can't be read safely.
    """
    weights, aliases = _read_weights(local_path(source, "the weights"))
    _check(weights, source)
    ddp = _DDP_PREFIX if all(_canonical(name).startswith(_DDP_PREFIX) for name in weights) else ""
    named = {_canonical(name).removeprefix(ddp): tensor for name, tensor in weights.items()}
    ties = {
        _canonical(alias).removeprefix(ddp): _canonical(name).removeprefix(ddp)
        for alias, name in aliases.items()
    }
    return named, ties


def import_weights(
    source: str | Path, output: Checkpoint, *, prefix: str = ""
) -> tuple[CheckpointPath, int, int]:
    """Write the weights of another trainer as a checkpoint of step 0.

    Return it, and how many it has and leaves out.

    `source` is one that `read_weights` reads. `prefix`, such as `model.` of a LightningModule, is
    removed from names, and those without it are left out. A UsageError is raised if there are no
    weights at `source`, or none with that prefix, or they can't be read safely.
    """
    target = locate(output)
    named, aliases = read_weights(source)
    kept = {
        name.removeprefix(prefix): tensor
        for name, tensor in named.items()
        if name.startswith(prefix)
    }
    if not kept:
        names = ", ".join(list(named)[:3])
        raise UsageError(
            f"no name in {source} begins with {prefix!r}",
            where="--prefix",
            why=f"it holds {names} …",
        )
    declared: dict[str, tuple[str, ...]] = {}
    for pair in aliases.items():
        alias, name = (name_in_file.removeprefix(prefix) for name_in_file in pair)
        if name in kept and alias not in kept:
            declared[name] = (*declared.get(name, ()), alias)
    state = {
        "step": 0,
        "updates": 0,
        "skipped": [],
        "epoch": 0,
        "samples": 0,
        "nominal": None,
        "loss_scale": None,
        "source": {},
        "best": {},
        "metadata": {"imported_from": str(source)},
    }
    # Parameters are kept in float32; tensors that shared memory still do.
    converted: dict[object, Tensor] = {}
    for name, tensor in kept.items():
        memory = TensorBlock.full(tensor).memory if tensor.numel() else name
        if memory not in converted:
            converted[memory] = tensor.float() if tensor.is_floating_point() else tensor
        kept[name] = converted[memory]
    staged = stage(Snapshot(kept, state=state, aliases=declared))
    write_staged(
        target, 0, staged, f"# weights imported from {source}\n", SaveOptions(), Ranks(alone=True)
    )
    return target.path, len(kept), len(named) - len(kept)


def _read_weights(source: Path) -> tuple[Weights, dict[str, str]]:
    """Return (name → tensor, alias → the name of its tensor)."""
    file = _file_of(source)
    if file.name == _INDEX:
        try:
            index = parse_json(locate(file.absolute().parent).read(file.name, JSON_LIMIT))
            parts = sorted({text_of(part) for part in index["weight_map"].values()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"{file} is not an index of weights", why=_first_line(error)) from None
        if any(Path(part).name != part or part in ("", "..") or "\0" in part for part in parts):
            what = f"{file} names files outside of its folder"
            raise UsageError(
                what, why="an index that reaches elsewhere is not one that a trainer wrote"
            )
        read = [_safetensors(file.with_name(part)) for part in parts]
        weights = {name: tensor for tensors, _ in read for name, tensor in tensors.items()}
        return weights, {alias: name for _, ties in read for alias, name in ties.items()}
    return _safetensors(file) if file.suffix == ".safetensors" else (_pickled(file), {})


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def _file_of(source: Path) -> Path:
    """Return the file with the weights: `source` itself, or the one that is usual in its folder."""
    for file in (source, *(source / name for name in _IN_FOLDERS)):
        if file.is_file():
            return file
    if not source.exists():
        what = f"there is no file or folder {str(source)!r}"
        raise UsageError(
            what, fix="give the file with the weights, or the folder that the other trainer wrote"
        )
    fix = (
        "give the file with the weights; shards of Accelerate's FSDP become one by `accelerate"
        " merge-weights`"
    )
    raise UsageError(
        f"there are no weights in {source}",
        why=f"none of {', '.join(_IN_FOLDERS)} is there",
        fix=fix,
    )


def _safetensors(file: Path) -> tuple[Weights, dict[str, str]]:
    """Read weights from a safetensors file, and which names share one tensor."""
    try:
        with safe_open(file, "pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata: dict[str, str] = opened.metadata() or {}
    except Exception as error:
        # its own errors, and others: a dtype that this torch lacks, a lack of memory …
        raise UsageError(f"{file} is not a safetensors file", why=_first_line(error)) from None
    ties = {
        alias: name for alias, name in metadata.items() if name in weights and alias not in weights
    }
    try:
        ours = parse_json(metadata.get("aliases", "{}").encode())  # of `export_safetensors`
        for name, others in ours.items():
            ties |= dict.fromkeys((text_of(other) for other in others), name)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{file} does not say which names are tied", why=_first_line(error)
        ) from None
    return weights, ties


def _pickled(file: Path) -> Weights:
    """Read weights that `torch.save` wrote, without running code that is in them."""
    try:
        with file.open("rb") as opened:
            check_block(opened, file.stat().st_size)
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # a broken pickle can raise nearly any error: IndexError, UnicodeDecodeError, KeyError …
        fix = (
            "save the weights alone, torch.save(model.state_dict(), FILE), or as safetensors;"
            " objects of other classes in a pickle could run code"
        )
        raise UsageError(
            f"{file} can't be read as weights", why=_first_line(error), fix=fix
        ) from None
    for key in _WEIGHT_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        what = f"{file} holds a {type(content).__name__}, where weights by name are needed"
        raise UsageError(what, fix="save the weights alone: torch.save(model.state_dict(), FILE)")
    if strange := [
        n for n, value in content.items() if not (isinstance(n, str) and isinstance(value, Tensor))
    ]:
        what = (
            f"{file} holds {strange[0]!r}, which is not the name of a tensor, among {len(content)}"
            " entries"
        )
        fix = "save the weights alone: torch.save(model.state_dict(), FILE)"
        if str(strange[0]).rpartition(".")[2] == _EXTRA_STATE:
            fix = (
                "load the file before the Trainer is made: model.load_state_dict(torch.load(FILE))"
            )
        elif isinstance(content[strange[0]], Mapping):
            fix = (
                "if the weights are there, save them alone:"
                f" torch.save(torch.load(FILE)[{strange[0]!r}], ANOTHER)"
            )
        raise UsageError(what, fix=fix)
    return dict(content)


def _check(weights: Weights, source: str | Path) -> None:
    """Refuse tensors that can't be stored, or would grow in memory, and names that collide.

    A tensor grows if it is larger in memory than in the file.

    Values that are not finite are warned of: training goes on from them.
    """
    for name, tensor in weights.items():
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_meta
            or tensor.is_nested
        ):
            what = f"{name} in {source} can't be imported"
            fix = "convert it (Tensor.dequantize, Tensor.to_dense) and save the weights again"
            raise UsageError(what, why="only dense tensors with values are stored", fix=fix)
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            what = (
                f"{name} in {source} has {tensor.numel()} elements, and only some of them are"
                " stored"
            )
            why = "it is an expanded view, which would grow in memory"
            raise UsageError(what, why=why, fix="save the weights again with Tensor.contiguous()")
    floats = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    if bad := [name for name, tensor in floats.items() if not torch.isfinite(tensor.float()).all()]:
        warnings.warn(
            f"{source} holds values that are not numbers (nan or inf), in {listed(bad)}",
            stacklevel=3,
        )
    if len({_canonical(name) for name in weights}) < len(weights):
        what = (
            f"two names in {source} differ only in what wrappers add to them"
            f" ({', '.join(WRAPPER_NAMES)})"
        )
        raise UsageError(
            what, fix="save the weights of the model alone: torch.save(model.state_dict(), FILE)"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200] or type(error).__name__
