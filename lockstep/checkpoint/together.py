"""Work that all ranks do together: an error on one is the same error on all, and nobody waits for ever.

Every rank enters every exchange. A rank whose work failed sends its error instead of a value; then rank 0 decides
nothing, and all ranks raise that error. Without a process group there is one rank, and nothing is sent.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lockstep.errors import LockstepError, RunError

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
        """This process by itself, whatever groups it is in: nothing is sent."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.connected, ranks.rank, ranks.size = None, False, 0, 1
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def exchange(self, doing: str, local: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
        """`local()` on every rank, then `decide(all values, by rank)` on rank 0; each rank gets its own of the results.

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

    def agree(self, doing: str, local: Callable[[], T]) -> T:
        """`local()` on every rank, each of which keeps its own value, or one error on all. No value is sent."""
        kept: list[T] = []
        self.exchange(doing, lambda: kept.append(local()), lambda values: values)
        return kept[0]

    def judge(self, doing: str, local: Callable[[], T], verdict: Callable[[list[T]], R]) -> R:
        """`local()` on every rank, then `verdict(all values, by rank)` on rank 0; its result to all."""
        return self.exchange(doing, local, lambda values: [verdict(values)] * self.size)

    def same(self, doing: str, decide: Callable[[], R]) -> R:
        """`decide()` on rank 0; its result to all."""
        return self.judge(doing, lambda: None, lambda _: decide())

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
