"""What ranks do together: an error on one is the same error on all, and nobody waits for ever.

Every rank enters every exchange. A rank whose work failed sends its error instead of a value; then rank 0 decides
nothing, and all ranks raise that error. Without a process group there is one rank, and nothing is sent.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.snapshot import Part, TensorBlock, part_of
from lockstep.errors import LockstepError, RunError, UsageError, listed

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """The ranks of a process group (the default one if None), or this process alone if there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.connected = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if self.connected else 0
        self.size: int = dist.get_world_size(group) if self.connected else 1

    @classmethod
    def alone(cls) -> "Ranks":
        """Return this process by itself, whatever groups it is in: nothing is sent."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.connected, ranks.rank, ranks.size = None, False, 0, 1
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def exchange(self, doing: str, local: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `local()` on every rank, then `decide(all values, by rank)` on rank 0: a result for each rank.

        Args:
            doing: what fails if this fails: "the checkpoint of step 100 was not written".

        Raises:
            LockstepError: `local` failed on some rank, or `decide` on rank 0; the same error on every rank.
        """
        value, cause = self._attempt(doing, local)
        values = self._gather(value)
        answers: list[Any] = []
        if self.is_main:
            failed = [v for v in values if isinstance(v, LockstepError)]
            answer: Any = failed[0] if failed else None
            if not failed:
                answer, cause = self._attempt(doing, lambda: list(decide(cast(list[T], values))))
            answers = [answer] * self.size if isinstance(answer, LockstepError) else answer
        mine = self._scatter(answers)
        if isinstance(mine, LockstepError):
            raise mine from cause
        return cast(R, mine)

    def run(self, doing: str, local: Callable[[], T]) -> T:
        """Run `local()` on every rank, each of which keeps its own value, or raise one error on all."""
        kept: list[T] = []
        self.exchange(doing, lambda: kept.append(local()), lambda values: values)
        return kept[0]

    def all_reduce(self, doing: str, local: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run `local()` on every rank, then `combine(all values, by rank)` on rank 0; return its result on all."""
        return self.exchange(doing, local, lambda values: [combine(values)] * self.size)

    def broadcast(self, doing: str, decide: Callable[[], R]) -> R:
        """Run `decide()` on rank 0; return its result on all."""
        return self.all_reduce(doing, lambda: None, lambda _: decide())

    def _attempt(self, doing: str, work: Callable[[], T]) -> tuple[T | LockstepError, Exception | None]:
        try:
            return work(), None
        except LockstepError as error:
            return error, error.__cause__ if isinstance(error.__cause__, Exception) else None
        except Exception as error:
            where = f"rank {self.rank}" if self.size > 1 else None
            return _explain(doing, error, where), error

    def _gather(self, value: object) -> list[object]:
        if not self.connected:
            return [value]
        values: list[object] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=self._main(), group=self.group)
        return values or []

    def _scatter(self, values: list[Any]) -> Any:
        if not self.connected:
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values if self.is_main else None, src=self._main(), group=self.group)
        return mine[0]

    def _main(self) -> int:
        return dist.get_global_rank(self.group, 0) if self.group is not None else 0


_ADVICE = {
    errno.ENOSPC: "free some space, or save fewer checkpoints (checkpoint.save_total_limit)",
    errno.EDQUOT: "free some of the quota, or save fewer checkpoints (checkpoint.save_total_limit)",
    errno.EACCES: "give the user of this run the right to write there, or choose another --output-dir",
    errno.EPERM: "give the user of this run the right to write there, or choose another --output-dir",
    errno.EROFS: "the file system is read-only: choose another --output-dir",
}


def _explain(doing: str, error: Exception, where: str | None) -> LockstepError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch wraps what the file system said
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError) and cause.errno is not None:
        place = f"{where}, {cause.filename}" if where and cause.filename else where or cause.filename
        fix = _ADVICE.get(cause.errno)
        return RunError(doing, where=place, why=os.strerror(cause.errno), fix=fix)
    return RunError(doing, where=where, why=f"{type(error).__name__}: {error}")


# ---- tensors ----

_Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the whole tensor, shape
BlockFacts = tuple[tuple[int, ...], torch.dtype, _Block | None]  # shape of the whole, its dtype, this rank's block


@dataclass(frozen=True)
class TensorSource:
    """Where a whole tensor comes from.

    Args:
        senders: block → the first rank that holds it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    senders: dict[_Block, int] = field(default_factory=dict)


def blocks_of(part: Part) -> dict[str, BlockFacts]:
    """Return what this rank holds of each tensor of a part."""
    return {
        name: (piece.shape, piece.tensor.dtype, None if piece.is_empty else (piece.offset, tuple(piece.tensor.shape)))
        for name, piece in part.pieces.items()
    }


def sources_of(held: Sequence[Mapping[str, BlockFacts]]) -> dict[str, TensorSource]:
    """Return where each tensor comes from, by name, given `blocks_of` of each rank."""
    found: dict[str, TensorSource] = {}
    for rank, blocks in enumerate(held):
        for name, (shape, dtype, block) in blocks.items():
            source = found.setdefault(name, TensorSource(shape, dtype))
            if block is not None:
                source.senders.setdefault(block, rank)
    return dict(sorted(found.items()))


def gather_tensor(source: TensorSource, piece: TensorBlock | None, doing: str, ranks: Ranks) -> Tensor | None:
    """Put one tensor together on the CPU of rank 0 (None on the others); every rank calls it.

    Args:
        piece: what this rank holds of it.
        doing: what fails if this fails.
    """
    assembled: list[Tensor] = []

    def send() -> Tensor | None:
        sends = ranks.rank in source.senders.values() and not ranks.is_main
        return piece.tensor.detach().cpu() if sends and piece is not None else None

    def assemble(sent: list[Tensor | None]) -> None:
        whole = torch.zeros(source.shape, dtype=source.dtype)
        for (offset, shape), rank in source.senders.items():
            values = sent[rank] if rank or piece is None else piece.tensor
            assert values is not None
            _narrow(whole, offset, shape).copy_(values)
        assembled.append(whole)

    ranks.all_reduce(doing, send, assemble)
    return assembled[0] if assembled else None


def gather(tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Return a model's tensors, whole, on the CPU of rank 0; nothing on other ranks. Every rank calls it.

    Args:
        tensors: canonical name → what this rank holds of it.
        aliases: canonical name → further names of the same tensor; they appear, and share memory.
    """
    ranks, doing, part = Ranks(), "the model was not gathered", part_of(tensors, aliases)
    held = ranks.all_reduce(doing, lambda: (blocks_of(part), part.aliases), lambda shares: shares)
    model: dict[str, Tensor] = {}
    for name, source in sources_of([blocks for blocks, _ in held]).items():
        whole = gather_tensor(source, part.pieces.get(name), doing, ranks)
        if whole is not None:
            model |= dict.fromkeys((name, *(alias for _, ties in held for alias in ties.get(name, ()))), whole)
    return model


def scatter(
    whole: Mapping[str, Tensor], tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]
) -> None:  # fmt: skip
    """Write whole tensors, of which rank 0's count, into what each rank holds of them. Every rank calls it.

    Values are cast to the type of what they are written to, as `load_state_dict` of a plain module does.

    Raises:
        UsageError: on every rank, before anything is written; `whole` holds other names or shapes.
    """
    ranks, doing, mine = Ranks(), "the model was not loaded", part_of(tensors, aliases)
    shapes = {name: piece.shape for name, piece in mine.pieces.items()}

    def check(held: list[tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]]) -> list[str]:
        wanted = {name: shape for here, _ in held for name, shape in here.items()}
        others = {other for _, ties in held for tied in ties.values() for other in tied}
        _require_same(wanted, others, whole)
        return sorted(wanted)

    for name in ranks.all_reduce(doing, lambda: (shapes, mine.aliases), check):
        values = ranks.broadcast(doing, lambda name=name: whole[name].detach().cpu())  # type: ignore[misc]
        if name in mine.pieces:
            piece = mine.pieces[name]
            piece.tensor.copy_(_narrow(values, piece.offset, piece.tensor.shape))


def _require_same(wanted: Mapping[str, tuple[int, ...]], aliases: set[str], given: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted) - aliases)
    reshaped = [
        f"{name} has the shape {tuple(given[name].shape)}, not {shape}"
        for name, shape in wanted.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    whys = [f"it lacks {listed(missing)}"] * bool(missing)
    whys += [f"the model has no {listed(unknown)}"] * bool(unknown)
    if whys := whys + reshaped[:4]:
        raise UsageError(
            "the state that was given is another model's",
            why="; ".join(whys),
            fix="give rank 0 the state_dict of this model, with the names that it has without wrappers",
        )


def _narrow(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the part of `whole` that begins at `offset`."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole
