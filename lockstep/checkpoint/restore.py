"""Reading a checkpoint back: proved first, compared strictly, then filled in place, for any layout of ranks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.disk import read_inside
from lockstep.checkpoint.local import Reader, check_topology, open_part
from lockstep.checkpoint.manifest import DamagedError, Manifest, problems_of_files, read_manifest
from lockstep.checkpoint.names import CONFIG, MODEL, STATE, extra_part, optimizer_part
from lockstep.checkpoint.pieces import Piece, dtype_name, pieces_of
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.together import Ranks
from lockstep.checkpoint.untrusted import JSON_LIMIT, parse_json
from lockstep.errors import UsageError, listed


def load(
    path: str | Path,
    snapshot: Snapshot,
    *,
    only: Collection[str] | None = None,
    proved: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the snapshot's tensors, in place, from a checkpoint; every rank of the group calls it.

    The ranks, the mesh and the placements may be other than those that saved. Nothing is touched before every checksum
    has been compared (the files are shared out among the ranks) and every name, shape and dtype agrees.

    Args:
        only: parts to load, such as `["model"]`; all of them, on both sides, if None.
        proved: `resume_point` has just compared the checksums; they are not compared again.

    Returns:
        the checkpoint's `state`, with the optimizers' groups under "optimizer_groups"; the same on every rank.

    Raises:
        UsageError: the checkpoint is not there, or holds other names, shapes, dtypes or ties than the snapshot.
        DamagedError: something on disk is not what was written.
    """
    ranks, folder = Ranks(group), Path(path)
    manifest = ranks.agree(_failed(folder), lambda: read_manifest(folder)) if proved else prove(folder, ranks)
    targets: dict[str, _Target] = {}

    def describe() -> dict[str, _Facts]:
        targets.update(_targets(folder, manifest, snapshot, only))
        for target in targets.values():
            check_topology(folder, manifest, target.reader, target.pieces, target.owner, ranks)
        return {part: target.facts() for part, target in targets.items()}

    def compare(described: list[dict[str, _Facts]]) -> None:
        _compare(folder, {part: target.stored_facts() for part, target in targets.items()}, described)

    ranks.judge(_failed(folder), describe, compare)
    return ranks.agree(_failed(folder), lambda: _fill(folder, targets))


def has_extra(path: str | Path, name: str) -> bool:
    """Whether a checkpoint holds an extra part of this name."""
    return extra_part(name) in read_manifest(path).parts


def prove(folder: Path, ranks: Ranks) -> Manifest:
    """Compare every checksum of a checkpoint, each rank its share of the bytes; the same verdict on every rank.

    Raises:
        DamagedError: with the files that are not what was written.
        UsageError: there is no checkpoint at `folder`, or of a later format.
    """
    manifest = ranks.agree(_failed(folder), lambda: read_manifest(folder))
    by_size = sorted(manifest.files, key=lambda path: (manifest.files[path].size, path))
    problems = ranks.judge(
        _failed(folder),
        lambda: problems_of_files(folder, manifest, by_size[ranks.rank :: ranks.size], thorough=True),
        lambda shares: sorted(problem for share in shares for problem in share),
    )
    if problems:
        raise DamagedError(
            f"the checkpoint {folder} is damaged",
            why=listed(problems),
            fix="resume from an older one: lockstep checkpoint list shows which are whole",
        )
    return manifest


def _failed(folder: Path) -> str:
    return f"the checkpoint {folder} could not be loaded"


_Facts = dict[str, tuple[tuple[int, ...], str]]  # name → shape, dtype


@dataclass
class _Target:
    """One part of the snapshot, beside what is stored of it.

    Args:
        pieces: name in the snapshot → this rank's piece.
        owner: alias → canonical name, as stored.
    """

    reader: Reader
    pieces: dict[str, Piece]
    owner: dict[str, str] = field(default_factory=dict)

    def stored_facts(self) -> _Facts:
        stored = self.reader.stored.tensors.items()
        return {name: (tuple(t.size), dtype_name(t.properties.dtype)) for name, t in stored}

    def facts(self) -> _Facts:
        return {
            self.owner.get(name, name): (piece.shape, dtype_name(piece.tensor.dtype))
            for name, piece in self.pieces.items()
        }


def _targets(folder: Path, manifest: Manifest, snapshot: Snapshot, only: Collection[str] | None) -> dict[str, _Target]:
    tensors = {MODEL: snapshot.model}
    tensors |= {optimizer_part(name): flat for name, flat in snapshot.optimizers.items()}
    tensors |= {extra_part(name): flat for name, flat in snapshot.extra.items()}
    wanted = {part for part in (*manifest.parts, *tensors) if only is None or part in only}
    stray = [f"{part}: not in the checkpoint" for part in sorted(wanted - set(manifest.parts))]
    stray += [f"{part}: only in the checkpoint" for part in sorted(wanted & set(manifest.parts) - tensors.keys())]
    if stray:
        raise UsageError(f"{folder} holds other parts than were to be loaded", why=listed(stray))
    targets = {part: _Target(open_part(folder, manifest, part), pieces_of(tensors[part])) for part in sorted(wanted)}
    if MODEL in targets:
        ties = {alias: name for name, facts in manifest.parameters.items() for alias in facts.aliases}
        targets[MODEL].owner = ties
        _check_ties(folder, targets[MODEL], {a for others in snapshot.aliases.values() for a in others})
    return targets


def _check_ties(folder: Path, model: _Target, declared: Collection[str]) -> None:
    """What is one tensor in the checkpoint is one in the model, and the other way round."""
    in_memory: dict[tuple[object, ...], str] = {}
    stored: dict[str, str] = {}
    for name, piece in model.pieces.items():
        if not piece.tensor.numel():
            continue
        kept = model.owner.get(name, name)
        first = in_memory.setdefault(piece.memory, name)
        if model.owner.get(first, first) != kept:
            raise UsageError(
                f"{first} and {name} are tied in the model, but two parameters in {folder}",
                fix="untie them before loading, or build the model as it was built for the run that saved",
            )
        other = stored.setdefault(kept, name)
        if model.pieces[other].memory != piece.memory and not {name, other} & set(declared):
            raise UsageError(
                f"{other} and {name} are two parameters in the model, but tied in {folder}",
                fix="tie them before loading: training would pull them apart",
            )


def _compare(folder: Path, stored: dict[str, _Facts], ranks: list[dict[str, _Facts]]) -> None:
    """All that is stored is wanted by some rank, all that is wanted is stored, in the same shape and dtype."""
    missing: set[str] = set()
    unexpected: set[str] = set()
    shapes: set[str] = set()
    dtypes: set[str] = set()
    for part, kept in stored.items():
        prefix = "" if part == MODEL else f"{part}: "
        unexpected |= {prefix + name for name in kept.keys() - {name for rank in ranks for name in rank.get(part, {})}}
        for name, (shape, dtype) in (item for rank in ranks for item in rank.get(part, {}).items()):
            if name not in kept:
                missing.add(prefix + name)
                continue
            stored_shape, stored_dtype = kept[name]
            if shape != stored_shape:
                shapes.add(f"{prefix}{name} (stored {list(stored_shape)}, wanted {list(shape)})")
            if dtype != stored_dtype:
                dtypes.add(f"{prefix}{name} (stored {stored_dtype}, wanted {dtype})")
    kinds = (
        ("missing in the checkpoint", missing),
        ("only in the checkpoint", unexpected),
        ("of another shape", shapes),
        ("of another dtype", dtypes),
    )
    if differing := [f"{kind}: {listed(sorted(names))}" for kind, names in kinds if names]:
        raise UsageError(
            f"{folder} does not fit this model",
            why="; ".join(differing),
            fix="build the model and the optimizer from the config beside the checkpoint's state, config.yaml",
        )


def _fill(folder: Path, targets: Mapping[str, _Target]) -> dict[str, Any]:
    for target in targets.values():
        rest = dict(target.pieces)
        while rest:  # a name is read once a pass; a parameter that lies here twice takes two
            now = {target.owner.get(name, name): name for name in reversed(rest)}
            target.reader.read_into({kept: rest.pop(name) for kept, name in now.items()})
    return read_state(folder)


def config_text(folder: Path) -> str:
    """The resolved config of the run that saved; of imported weights, a comment.

    Raises:
        DamagedError: it is not what was written.
    """
    try:
        return read_inside(folder, CONFIG, JSON_LIMIT).decode()
    except (OSError, ValueError) as error:
        raise DamagedError("a checkpoint can't be read", where=str(folder / CONFIG), why=str(error)) from None


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json`; its checksum is the caller's to compare.

    Raises:
        DamagedError: it is not what was written.
    """
    try:
        return parse_json(read_inside(folder, STATE, JSON_LIMIT), finite=False)
    except (OSError, ValueError) as error:
        raise DamagedError("a checkpoint can't be read", where=str(folder / STATE), why=str(error)) from None


def unreadable(folder: Path) -> str | None:
    """Why a checkpoint whose files are as they were written can't be read nevertheless; None if it can.

    What describes its parts and its state is read; tensors are not.
    """
    try:
        manifest = read_manifest(folder)
        for part in manifest.parts:
            open_part(folder, manifest, part)
        read_state(folder)
    except DamagedError as error:
        return f"{error.where}: {error.why}"
    return None
