"""Run `lockstep checkpoint list|inspect|verify|digest|export|convert|import PATH`.

The functions return the text to print.
"""

import json
from collections.abc import Callable
from datetime import datetime
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from lockstep.checkpoint.convert import (
    digest,
    export_hugging_face,
    export_safetensors,
    export_torch,
    import_weights,
    rewrite_full,
)
from lockstep.checkpoint.keep import list_checkpoints, newest
from lockstep.checkpoint.manifest import DamagedError, read_manifest, read_state, verify
from lockstep.checkpoint.object_store import ObjectStorage, in_bucket
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.restore import unreadable
from lockstep.checkpoint.storage import (
    MANIFEST,
    CheckpointPath,
    Directory,
    Location,
    build_storage,
    step_of,
)
from lockstep.config import ObjectSpec, load_config
from lockstep.config.tree import Origin, parse
from lockstep.errors import UsageError, did_you_mean
from lockstep.files.paths import bucket_url
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_files import printable, read_text

Place = Path | ObjectStorage | Location  # what a user names
FORMATS = ("full", "torch")
# what is written if no name is given
EXPORTS = {"safetensors": "model.safetensors", "huggingface": "exported", "adapter": "adapter"}
_LARGEST_CONFIG = 1 << 20  # bytes


def run(verb: str, path: str | Path, **options: Any) -> str:
    """Run one of VERBS, with its options, and return the text to print, or raise a UsageError.

    `path` is a run directory, a folder of checkpoints, one checkpoint, or another storage:
    `package.module:Name`, a config that names one, the URL of a bucket, or of one checkpoint in it;
    verbs for one checkpoint take the newest whole one. If `verify` finds damage, a DamagedError
    lists what is damaged.
    """
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS)
        raise UsageError(
            f"there is no `lockstep checkpoint {verb}`{near}", fix="one of: " + ", ".join(VERBS)
        )
    chosen = {key: value for key, value in options.items() if value is not None}
    action, accepted = _ACTIONS[verb]
    if stray := [key for key in chosen if key not in accepted]:
        what = f"`lockstep checkpoint {verb}` takes no {stray[0]}"
        raise UsageError(
            what, fix=f"`lockstep checkpoint {verb}` takes {', '.join(accepted) or 'a path alone'}"
        )
    url = None if verb == "import" else bucket_url(path, "PATH")
    return action(Path(path) if url is None else in_bucket(url), **chosen)


def _list(path: Place) -> str:
    rows = [("checkpoint", "size", "written", "")]
    for checkpoint in checkpoints_at(path):
        if problems := verify(checkpoint, thorough=False):
            rows.append((checkpoint.name, "", "", f"damaged: {problems[0]}"))
            continue
        seconds = locate(checkpoint).storage.committed_at(checkpoint.name)
        written = "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
        rows.append((checkpoint.name, _size(read_manifest(checkpoint).num_bytes), written, ""))
    return _table(rows)


def _inspect(path: Place) -> str:
    """Return what stands in a checkpoint, as text: parts, versions, state and tensors."""
    checkpoint = newest_at(path)
    manifest = read_manifest(checkpoint)
    elements = sum(prod(info.shape) for info in manifest.parameters.values())
    lines = [
        f"{checkpoint}: step {manifest.step}, {_size(manifest.num_bytes)} in {len(manifest.files)}"
        " files"
    ]
    for part in manifest.parts:
        lines.append(
            f"  {part}: {_size(sum(manifest.files[file].size for file in manifest.files_of(part)))}"
        )
    lines += [f"written by: {', '.join(f'{k} {v}' for k, v in manifest.written_by.items())}"]
    lines += [f"state: {json.dumps(read_state(checkpoint), sort_keys=True)}"]
    lines += [f"model: {len(manifest.parameters)} tensors, {elements:,} elements"]
    rows = [
        (
            f"  {name}",
            info.dtype,
            str(list(info.shape)),
            f"tied: {', '.join(info.aliases)}" if info.aliases else "",
        )
        for name, info in manifest.parameters.items()
    ]
    return "\n".join([*lines, _table(rows)]) if rows else "\n".join(lines)


def _verify(path: Place) -> str:
    checkpoints = checkpoints_at(path)
    problems = {
        checkpoint: verify(checkpoint) or unreadable(checkpoint) for checkpoint in checkpoints
    }
    if damaged := {checkpoint: damage for checkpoint, damage in problems.items() if damage}:
        why = "; ".join(
            f"{checkpoint.name}: {', '.join(damage)}" for checkpoint, damage in damaged.items()
        )
        fix = "delete or restore what is damaged; a run resumes from the newest whole one"
        raise DamagedError(
            f"{len(damaged)} of {len(checkpoints)} checkpoints damaged", why=why, fix=fix
        )
    return "\n".join(f"{checkpoint}: whole" for checkpoint in checkpoints)


def _export(path: Place, output: str | Path | None = None, to: str = "safetensors") -> str:
    if to not in EXPORTS:
        raise UsageError(
            f"there is no form {to!r} to export to", fix=f"one of: {', '.join(EXPORTS)}"
        )
    checkpoint = newest_at(path)
    target = output or EXPORTS[to]
    if to == "safetensors":
        return f"{checkpoint} → {export_safetensors(checkpoint, target)}"
    folder, lines = export_hugging_face(checkpoint, target, adapter=to == "adapter")
    return "\n".join([f"{checkpoint} → {folder}", *lines])


def _convert(path: Place, to: str = "full", output: str | Path | None = None) -> str:
    if to not in FORMATS:
        by_ranks = (
            f"; ranks write it: lockstep train CONFIG --resume {quote(str(path))}"
            f" checkpoint.format={to}"
        )
        fix = f"one of: {', '.join(FORMATS)}" + (by_ranks if to in ("sharded", "local") else "")
        raise UsageError(f"there is no format {to!r} to convert to", fix=fix)
    checkpoint = newest_at(path)
    full_name = f"{locate(checkpoint).name}-full"
    target = Path(output) if output else Path(full_name if to == "full" else "model.pt")
    if to == "torch":
        return f"{checkpoint} → {export_torch(checkpoint, target)}"
    return f"{checkpoint} → {rewrite_full(checkpoint, target)}"


def _import(path: Path, output: str | Path = "imported", prefix: str = "") -> str:
    written, taken, left_out = import_weights(path, output, prefix=prefix)
    rest = f", {left_out} without the prefix left out" if left_out else ""
    begins = f"`lockstep train CONFIG --resume {quote(str(written))}` begins there"
    return f"{path} → {written}: {taken} tensors in float32{rest}; {begins}"


# with the options that each takes
_ACTIONS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "list": (_list, ()),
    "inspect": (_inspect, ()),
    "verify": (_verify, ()),
    "digest": (lambda path: digest(newest_at(path)), ()),
    "export": (_export, ("output", "to")),
    "convert": (_convert, ("output", "to")),
    "import": (_import, ("output", "prefix")),
}
VERBS = tuple(_ACTIONS)


def checkpoints_at(path: Place) -> list[CheckpointPath]:
    """Return the checkpoint at a path, or those of a folder or of a run, oldest first.

    Raises a UsageError if there is none.
    """
    if isinstance(path, Location):
        return [path]
    if isinstance(path, ObjectStorage):
        if checkpoints := list_checkpoints(path):
            return checkpoints
        fix = "give the URL that `lockstep train --output-dir` or checkpoint.storage has"
        raise UsageError(f"there is no checkpoint in {path}", fix=fix)
    if step_of(path.resolve().name) is not None or (path / MANIFEST).exists():
        return [path]
    elsewhere: list[Directory] = []
    if path.suffix in (".yaml", ".yml") and path.is_file():
        elsewhere = [_storage_of_config(path)]
    elif ":" in str(path) and not path.exists():
        elsewhere = [build_storage(ObjectSpec(name=str(path)), "PATH")]
    for directory in elsewhere or [path / "checkpoints", path]:
        if checkpoints := list_checkpoints(directory):
            return checkpoints
    what = f"there is no checkpoint in {', '.join(map(str, elsewhere)) or path}"
    if not elsewhere and not path.exists():
        what = f"{path} does not exist"
    kept_in = None if elsewhere else _storage_named_in(path)
    if kept_in is not None:
        fix = f"give {path / 'config.yaml'}: that imports the storage, with its arguments"
        why = f"its config keeps checkpoints in {kept_in}"
        raise UsageError(what, why=why, fix=fix)
    raise UsageError(
        what,
        fix=(
            "give a run directory, its folder checkpoints/, one checkpoint in it, or a config that"
            " names a storage"
        ),
    )


def _storage_of_config(path: Path) -> Directory:
    """Return the storage of a config, which is code: whoever gives it as a path means to run it."""
    storage = load_config(path).checkpoint.storage
    if storage is None:
        fix = "give the run directory, whose folder checkpoints/ has them"
        raise UsageError(f"{path} names no checkpoint.storage", fix=fix)
    return build_storage(storage)


def _storage_named_in(run: Path) -> str | None:
    """Return the name of the storage in a run directory's config, of which nothing is imported."""
    try:
        text = read_text(run, RunDirectory(run).config.name, limit=_LARGEST_CONFIG)
        content = parse(text, lambda line: Origin("config.yaml", line + 1)).plain()
    except (OSError, ValueError, UsageError):
        return None
    section = content.get("checkpoint") if isinstance(content, dict) else None
    storage = section.get("storage") if isinstance(section, dict) else None
    name = storage.get("name") if isinstance(storage, dict) else storage
    return printable(name) if isinstance(name, str) else None


def newest_at(path: Place) -> CheckpointPath:
    """Return the checkpoint at a path, or the newest whole one of a folder or of a run."""
    checkpoints = checkpoints_at(path)
    if isinstance(path, Path | Location) and checkpoints == [path]:
        return path
    chosen = newest(locate(checkpoints[0]).storage)
    assert chosen is not None, "there are some, and `newest` raises where none is whole"
    return chosen


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
        ).rstrip()
        for row in rows
    )
