"""Exchange values between ranks; an error on one is raised on all, so that no rank hangs.

Every rank enters every exchange. A rank whose work failed sends its error instead of a value; rank
0 then returns that error to all ranks, which raise it. Without a process group there is one rank,
and nothing is sent.

Tests: tests/checkpoint/test_ranks.py, tests/checkpoint/test_ranks_agree.py
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.snapshot import Part, TensorBlock, part_of
from lockstep.errors import LockstepError, RunError, UsageError, listed
from lockstep.heartbeat.writer import went_forward
from lockstep.process_group.collectives import create_once, new_group
from lockstep.process_group.objects import (
    all_gather_objects,
    broadcast_object,
    gather_objects,
    scatter_objects,
)

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """The ranks of a process group (None: the default one), or this process alone.

    It is this process alone if there is no process group, or with `alone`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = group
        self.connected = not alone and dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if self.connected else 0
        self.size: int = dist.get_world_size(group) if self.connected else 1

    @classmethod
    def on_gloo(cls, use: str) -> "Ranks":
        """Return all ranks, in a group of Gloo for one use of it; every rank asks for it."""
        connected = dist.is_available() and dist.is_initialized()
        make = partial(new_group, None, backend="gloo")
        return cls(create_once(f"saver of {use}", make) if connected else None)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def exchange(
        self, failure: str, local: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """Run `local()` on every rank, then `decide` on rank 0; return this rank's result.

        `decide` gets the values by rank, and returns a result for each rank.

        If `local` failed on some rank, or `decide` on rank 0, every rank raises the same
        LockstepError. Other exceptions are explained by `failure`, such as "the checkpoint of step
        100 was not written".
        """
        value, cause = self._attempt(failure, local)
        answers, cause = self._decided(failure, self._at_main(value), decide, cause)
        mine = scatter_objects(answers, self.group) if self.connected else answers[0]
        return cast(R, _passed_on(mine, cause))

    def run(self, failure: str, local: Callable[[], T]) -> T:
        """Run `local()` on every rank; return this rank's value, or raise one error on all."""
        value, cause = self._attempt(failure, local)
        error = value if isinstance(value, LockstepError) else None
        errors = all_gather_objects(error, self.group) if self.connected else [error]
        _passed_on(next(filter(None, errors), None), cause)
        return cast(T, value)

    def all_reduce(
        self, failure: str, local: Callable[[], T], combine: Callable[[list[T]], R]
    ) -> R:
        """Run `local()` on every rank, then `combine(all values, by rank)` on rank 0.

        Return its result on all.
        """
        value, cause = self._attempt(failure, local)
        answers, cause = self._decided(
            failure, self._at_main(value), lambda values: [combine(values)], cause
        )
        return cast(R, self._from_main(answers, cause))

    def broadcast(self, failure: str, decide: Callable[[], R]) -> R:
        """Run `decide()` on rank 0, which waits for no other; return its result on all."""
        if not self.is_main:
            return cast(R, self._from_main([], None))
        answer, cause = self._attempt(failure, decide)
        return cast(R, self._from_main([answer], cause))

    def _at_main(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, by rank; nothing on the others."""
        return gather_objects(value, self.group) if self.connected else [value]

    def _from_main(self, answers: list[Any], cause: Exception | None) -> Any:
        """Return the only answer of rank 0 on all ranks, or raise it, if it is an error."""
        answer = answers[0] if answers else None
        if self.connected:
            answer = broadcast_object(answer, self.group)
        return _passed_on(answer, cause)

    def _decided(
        self,
        failure: str,
        values: list[Any],
        decide: Callable[[list[Any]], Sequence[Any]],
        cause: Exception | None,
    ) -> tuple[list[Any], Exception | None]:
        """Return what rank 0 decides on the values of all ranks, and what caused this rank's error.

        It is one error for each rank, if a value is one, or `decide` failed; on the other ranks,
        nothing.
        """
        if not self.is_main:
            return [], cause
        for value in values:
            if isinstance(value, LockstepError):
                return [value] * self.size, cause
        decided, cause = self._attempt(failure, lambda: list(decide(values)))
        if isinstance(decided, LockstepError):
            return [decided] * self.size, cause
        return decided, cause

    def _attempt(
        self, failure: str, work: Callable[[], T]
    ) -> tuple[T | LockstepError, Exception | None]:
        """Do some work; return its result, or an error that names this rank, and what caused it."""
        try:
            return work(), None
        except LockstepError as error:
            return error, error.__cause__ if isinstance(error.__cause__, Exception) else None
        except Exception as error:
            where = f"rank {self.rank}" if self.size > 1 else None
            cause: BaseException | None = error
            # torch wraps errors of the file system
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if isinstance(cause, OSError) and cause.errno is not None:
                place = (
                    f"{where}, {cause.filename}"
                    if where and cause.filename
                    else where or cause.filename
                )
                return (
                    RunError(
                        failure,
                        where=place,
                        why=os.strerror(cause.errno),
                        fix=_ADVICE.get(cause.errno),
                    ),
                    error,
                )
            return RunError(failure, where=where, why=f"{type(error).__name__}: {error}"), error


def _passed_on(answer: Any, cause: Exception | None) -> Any:
    """Return what ranks were told, or raise it, if it is an error."""
    went_forward()
    if isinstance(answer, LockstepError):
        raise answer from cause
    return answer


_ADVICE = {
    errno.ENOSPC: "free some space, or save fewer checkpoints (checkpoint.save_total_limit)",
    errno.EDQUOT: "free some of the quota, or save fewer checkpoints (checkpoint.save_total_limit)",
    errno.EACCES: (
        "give the user of this run the right to write there, or choose another --output-dir"
    ),
    errno.EPERM: (
        "give the user of this run the right to write there, or choose another --output-dir"
    ),
    errno.EROFS: "the file system is read-only: choose another --output-dir",
}


_Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the whole tensor, shape
# shape of the whole, its dtype, this rank's block
BlockInfo = tuple[tuple[int, ...], torch.dtype, _Block | None]


@dataclass(frozen=True)
class TensorSource:
    """A whole tensor, and the ranks that have its blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    senders: dict[_Block, int] = field(default_factory=dict)  # block → the first rank that has it


def held_blocks(part: Part) -> dict[str, BlockInfo]:
    """Return shape, dtype and this rank's block of each tensor of a part."""
    return {
        name: (
            block.shape,
            block.tensor.dtype,
            None if block.is_empty else (block.offset, tuple(block.tensor.shape)),
        )
        for name, block in part.blocks.items()
    }


def sources_of(held: Sequence[Mapping[str, BlockInfo]]) -> dict[str, TensorSource]:
    """Return the source of each tensor by name, from `held_blocks` of each rank."""
    sources: dict[str, TensorSource] = {}
    for rank, blocks in enumerate(held):
        for name, (shape, dtype, block) in blocks.items():
            source = sources.setdefault(name, TensorSource(shape, dtype))
            if block is not None:
                source.senders.setdefault(block, rank)
    return dict(sorted(sources.items()))


def gather_tensor(
    source: TensorSource, block: TensorBlock | None, failure: str, ranks: Ranks
) -> Tensor | None:
    """Assemble one tensor on the CPU of rank 0 (None on the others).

    Every rank calls it, with its block.
    """
    assembled: list[Tensor] = []

    def send() -> Tensor | None:
        sends = ranks.rank in source.senders.values() and not ranks.is_main
        return block.tensor.detach().cpu() if sends and block is not None else None

    def assemble(sent: list[Tensor | None]) -> None:
        full = torch.zeros(source.shape, dtype=source.dtype)
        for (offset, shape), rank in source.senders.items():
            values = sent[rank] if rank or block is None else block.tensor
            assert values is not None
            narrow(full, offset, shape).copy_(values)
        assembled.append(full)

    ranks.all_reduce(failure, send, assemble)
    return assembled[0] if assembled else None


def gather(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """Return the whole tensors of a model, aliases too, on the CPU of rank 0, and {} on others.

    Every rank calls it.
    """
    ranks = Ranks()
    failure = "the model was not gathered"
    part = part_of(tensors, aliases)
    held = ranks.all_reduce(
        failure, lambda: (held_blocks(part), part.aliases), lambda shares: shares
    )
    model: dict[str, Tensor] = {}
    for name, source in sources_of([blocks for blocks, _ in held]).items():
        full = gather_tensor(source, part.blocks.get(name), failure, ranks)
        if full is not None:
            model |= dict.fromkeys(
                (name, *(alias for _, ties in held for alias in ties.get(name, ()))), full
            )
    return model


def scatter(
    full: Mapping[str, Tensor], tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]
) -> None:
    """Copy whole tensors of rank 0 into those of each rank, in their dtypes.

    A UsageError on all if they don't fit.
    """
    ranks = Ranks()
    failure = "the model was not loaded"
    mine = part_of(tensors, aliases)
    shapes = {name: block.shape for name, block in mine.blocks.items()}

    def check(
        held: list[tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]],
    ) -> list[str]:
        """Compare all ranks' parameters with the tensors; return what to say where they differ."""
        wanted = {name: shape for here, _ in held for name, shape in here.items()}
        others = {other for _, ties in held for tied in ties.values() for other in tied}
        missing = sorted(set(wanted) - set(full))
        unknown = sorted(set(full) - set(wanted) - others)
        whys = [f"it lacks {listed(missing)}"] * bool(missing)
        whys += [f"the model has no {listed(unknown)}"] * bool(unknown)
        given = {name: tuple(full[name].shape) for name in wanted if name in full}
        reshaped = [
            f"{n} has the shape {shape}, not {wanted[n]}"
            for n, shape in given.items()
            if shape != wanted[n]
        ]
        if whys := whys + reshaped[:4]:
            fix = (
                "give rank 0 the state_dict of this model, with the names that it has without"
                " wrappers"
            )
            raise UsageError(
                "the state that was given is another model's", why="; ".join(whys), fix=fix
            )
        return sorted(wanted)

    for name in ranks.all_reduce(failure, lambda: (shapes, mine.aliases), check):
        values = ranks.broadcast(failure, lambda name=name: full[name].detach().cpu())  # type: ignore[misc]
        if name in mine.blocks:
            block = mine.blocks[name]
            block.tensor.copy_(narrow(values, block.offset, block.tensor.shape))


def narrow(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the part of `whole` that begins at `offset`."""
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
