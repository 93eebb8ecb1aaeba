"""Storage that hosts do not share: is it so, writing everything from rank 0, and handing a checkpoint out to hosts.

Rank 0 gathers whole tensors, one at a time, and writes them as one process would. To load it elsewhere, each host gets
a copy of the checkpoint first; then all of them load as from a folder that they share.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.commit import commit, merge_groups, not_written, unfinished
from lockstep.checkpoint.disk import make_directories, open_inside, sync_directory, write_file
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.names import MANIFEST, Writer
from lockstep.checkpoint.pieces import Part, Piece
from lockstep.checkpoint.snapshot import Staged
from lockstep.checkpoint.together import Ranks

_LOOKS, _BETWEEN = 5, 0.2  # a network file system may show a new file a moment later


def is_shared(directory: str | Path, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks see the folder that rank 0 sees by this name; every rank calls it, all get the same answer.

    Raises:
        RunError: the folder can't be made or written to.
    """
    ranks, folder = Ranks(group), Path(directory)
    doing = f"the folder {folder} could not be tried out"

    def leave_mark() -> str:
        make_directories(folder)
        mark = folder / Writer.new().folder(".shared")
        mark.mkdir()
        return mark.name

    mark = folder / ranks.same(doing, leave_mark)
    try:
        return ranks.judge(doing, lambda: _appears(mark), all)
    finally:
        if ranks.is_main:
            mark.rmdir()


def _appears(path: Path) -> bool:
    for _ in range(_LOOKS):
        if path.is_dir():
            return True
        time.sleep(_BETWEEN)
    return False


def commit_gathered(path: Path, step: int, staged: Staged, config_yaml: str, ranks: Ranks) -> Path:
    """`commit` by rank 0 alone, of everything that all ranks hold; every rank calls it."""
    groups = ranks.judge(not_written(step), lambda: staged.groups, merge_groups)
    described = ranks.judge(
        not_written(step),
        lambda: {part: (list(p.pieces), p.aliases) for part, p in staged.parts.items()},
        lambda shares: shares,
    )
    parts: dict[str, Part] = {}
    for part in sorted({name for share in described for name in share}):
        names = sorted({name for share in described for name in share.get(part, ((), {}))[0]})
        mine = staged.parts.get(part, Part())
        pieces = {name: _whole(mine.pieces.get(name), step, ranks) for name in names}
        aliases: dict[str, tuple[str, ...]] = {}
        for share in described:
            for name, others in share.get(part, ((), {}))[1].items():
                aliases[name] = tuple(dict.fromkeys((*aliases.get(name, ()), *others)))
        parts[part] = Part({name: piece for name, piece in pieces.items() if piece is not None}, aliases)
    whole = Staged(parts, staged.state, groups)
    ranks.same(not_written(step), lambda: commit(path, step, whole, config_yaml, Ranks.alone()).name)
    return path


def _whole(piece: Piece | None, step: int, ranks: Ranks) -> Piece | None:
    """One tensor, put together on rank 0 (None on the others), each block sent by one of the ranks that hold it."""
    own = None if piece is None or piece.is_empty else (piece.offset, tuple(piece.tensor.shape))
    holders = ranks.judge(not_written(step), lambda: own, lambda blocks: blocks)
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

    ranks.judge(not_written(step), lambda: (facts, sent), assemble)
    return Piece(box[0], tuple(box[0].shape), (0,) * box[0].ndim) if box else None


def _place(whole: Tensor, offset: tuple[int, ...], block: Tensor) -> None:
    for dim, (start, length) in enumerate(zip(offset, block.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    whole.copy_(block)


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
