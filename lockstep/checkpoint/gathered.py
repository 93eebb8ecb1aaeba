"""Storage that hosts do not share: is it so, writing everything from rank 0, and handing a checkpoint out to hosts.

Rank 0 gathers whole tensors, one at a time, and writes them as one process would; a loop of one's own may have them.
To load a checkpoint elsewhere, each host gets a copy of it first; then all of them load as from a folder that they
share.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.commit import commit, merge_groups, not_written, unfinished
from lockstep.checkpoint.disk import make_directories, open_inside, sync_directory, write_file
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.names import MANIFEST, MODEL, SHARED_MARK
from lockstep.checkpoint.pieces import Part, Piece, part_of
from lockstep.checkpoint.snapshot import Staged
from lockstep.checkpoint.together import Ranks
from lockstep.errors import UsageError

_SHOWN = 5  # names in an error
_LOOKS, _BETWEEN = 5, 0.2  # a network file system may show a new file a moment later


def is_shared(directory: str | Path, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks see the folder that rank 0 sees by this name; every rank calls it, all get the same answer.

    Raises:
        RunError: the folder can't be made or written to.
    """
    ranks, folder = Ranks(group), Path(directory)
    doing = f"the folder {folder} could not be tried out"

    with unfinished(folder / SHARED_MARK) as mine:

        def leave_mark() -> str:
            make_directories(folder)
            mine.mkdir()
            return mine.name

        mark = folder / ranks.same(doing, leave_mark)
        return ranks.judge(doing, lambda: _appears(mark), all)


def _appears(path: Path) -> bool:
    for _ in range(_LOOKS):
        if path.is_dir():
            return True
        time.sleep(_BETWEEN)
    return False


def commit_gathered(path: Path, step: int, staged: Staged, config_yaml: str, ranks: Ranks) -> Path:
    """`commit` by rank 0 alone, of everything that all ranks hold; every rank calls it."""
    groups = ranks.judge(not_written(step), lambda: staged.groups, merge_groups)
    parts = _gathered(staged.parts, not_written(step), ranks)
    whole = Staged(parts, staged.state, groups)
    ranks.same(not_written(step), lambda: commit(path, step, whole, config_yaml, Ranks.alone()).name)
    return path


def gather(tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """A model's tensors, whole, on the CPU of rank 0; nothing on other ranks. Every rank calls it.

    Args:
        tensors: canonical name → what this rank holds of it.
        aliases: canonical name → further names of the same tensor; they appear, and share memory.
    """
    part = _gathered({MODEL: part_of(dict(tensors), aliases)}, "the model was not gathered", Ranks())[MODEL]
    whole = {name: piece.tensor.detach().cpu().clone() for name, piece in part.pieces.items()}
    return whole | {other: whole[name] for name in whole for other in part.aliases.get(name, ())}


def scatter(
    whole: Mapping[str, Tensor], tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]
) -> None:  # fmt: skip
    """Write whole tensors, of which rank 0's count, into what each rank holds of them. Every rank calls it.

    Values are cast to the type of what they are written to, as `load_state_dict` of a plain module does.

    Raises:
        UsageError: on every rank, before anything is written; `whole` holds other names or shapes.
    """
    ranks, doing, mine = Ranks(), "the model was not loaded", part_of(dict(tensors), aliases)
    shapes = {name: piece.shape for name, piece in mine.pieces.items()}

    def names(held: list[tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]]) -> list[str]:
        wanted = {name: shape for here, _ in held for name, shape in here.items()}
        others = {other: name for _, ties in held for name, tied in ties.items() for other in tied}
        _require_same(wanted, others, whole)
        return sorted(wanted)

    for name in ranks.judge(doing, lambda: (shapes, mine.aliases), names):
        values = ranks.same(doing, lambda name=name: whole[name].detach().cpu())  # type: ignore[misc]
        if name in mine.pieces:
            piece = mine.pieces[name]
            piece.tensor.copy_(_block(values, piece.offset, piece.tensor))


def _require_same(
    wanted: Mapping[str, tuple[int, ...]], others: Mapping[str, str], given: Mapping[str, Tensor]
) -> None:
    missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted) - set(others))
    reshaped = [name for name in wanted if name in given and tuple(given[name].shape) != wanted[name]]
    if not (missing or unknown or reshaped):
        return
    whys = [f"it lacks {', '.join(missing[:_SHOWN])}"] * bool(missing)
    whys += [f"the model has no {', '.join(unknown[:_SHOWN])}"] * bool(unknown)
    whys += [f"{name} has the shape {tuple(given[name].shape)}, not {wanted[name]}" for name in reshaped[:_SHOWN]]
    raise UsageError(
        "the state that was given is another model's",
        why="; ".join(whys),
        fix="give rank 0 the state_dict of this model, with the names that it has without wrappers",
    )


def _gathered(parts: Mapping[str, Part], doing: str, ranks: Ranks) -> dict[str, Part]:
    """Parts put together from what all ranks hold, on rank 0; on the others they are empty."""
    described = ranks.judge(
        doing, lambda: {part: (list(p.pieces), p.aliases) for part, p in parts.items()}, lambda shares: shares
    )
    gathered: dict[str, Part] = {}
    for part in sorted({name for share in described for name in share}):
        names = sorted({name for share in described for name in share.get(part, ((), {}))[0]})
        mine = parts.get(part, Part())
        pieces = {name: _whole(mine.pieces.get(name), doing, ranks) for name in names}
        aliases: dict[str, tuple[str, ...]] = {}
        for share in described:
            for name, others in share.get(part, ((), {}))[1].items():
                aliases[name] = tuple(dict.fromkeys((*aliases.get(name, ()), *others)))
        gathered[part] = Part({name: piece for name, piece in pieces.items() if piece is not None}, aliases)
    return gathered


def _whole(piece: Piece | None, doing: str, ranks: Ranks) -> Piece | None:
    """One tensor, put together on rank 0 (None on the others), each block sent by one of the ranks that hold it."""
    own = None if piece is None or piece.is_empty else (piece.offset, tuple(piece.tensor.shape))
    holders = ranks.judge(doing, lambda: own, lambda blocks: blocks)
    sends = own is not None and holders.index(own) == ranks.rank
    sent = piece.tensor.detach().cpu() if piece is not None and sends and not ranks.is_main else None
    facts = None if piece is None else (piece.shape, piece.tensor.dtype)
    box: list[Tensor] = []

    def assemble(shares: list[tuple[Any, Tensor | None]]) -> None:
        shape, dtype = next(known for known, _ in shares if known is not None)
        tensor = torch.zeros(shape, dtype=dtype)
        for block, (_, values) in zip(holders, shares, strict=True):
            if block is not None and values is not None:
                _place(tensor, block[0], values)
        if piece is not None and sends and ranks.is_main:
            _place(tensor, piece.offset, piece.tensor)
        box.append(tensor)

    ranks.judge(doing, lambda: (facts, sent), assemble)
    return Piece(box[0], tuple(box[0].shape), (0,) * box[0].ndim) if box else None


def _place(whole: Tensor, offset: tuple[int, ...], block: Tensor) -> None:
    _block(whole, offset, block).copy_(block)


def _block(whole: Tensor, offset: tuple[int, ...], like: Tensor) -> Tensor:
    """The part of `whole` that lies where the block `like` does."""
    for dim, (start, length) in enumerate(zip(offset, like.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def hand_out(path: Path | None, group: dist.ProcessGroup | None = None) -> Path | None:
    """Give each host that lacks it a copy of the checkpoint that rank 0 has; every rank calls it.

    Args:
        path: rank 0's choice counts.

    Returns:
        rank 0's path, by which every rank finds the checkpoint now.
    """
    ranks = Ranks(group)
    path = ranks.same("no checkpoint was chosen", lambda: path)
    if path is None:
        return None
    doing = f"the checkpoint {path} could not be handed out"
    files = ranks.same(doing, lambda: [*read_manifest(path).files, MANIFEST])
    lacking = ranks.judge(doing, lambda: (socket.gethostname(), os.fspath(path.absolute()), path.exists()), _receivers)
    with unfinished(path) as folder:
        writes = ranks.rank in lacking
        for name in files:
            data = ranks.same(doing, lambda name=name: _read(path, name))  # type: ignore[misc]
            ranks.agree(doing, lambda name=name, data=data: _write(folder / name, data) if writes else None)  # type: ignore[misc]
        ranks.agree(doing, lambda: folder.rename(path) if writes else None)
    return path


def _receivers(ranks: list[tuple[str, str, bool]]) -> list[int]:
    """The first rank of each place that has no copy."""
    first: dict[tuple[str, str], int] = {}
    for rank, (host, path, there) in enumerate(ranks):
        if not there:
            first.setdefault((host, path), rank)
    return list(first.values())


def _read(path: Path, name: str) -> bytes:
    with open_inside(path, name) as file:
        return file.read()


def _write(path: Path, data: bytes) -> None:
    make_directories(path.parent)
    write_file(path, data)
    sync_directory(path.parent)
