"""The worker processes of a `DataLoader`'s iterator.

They are looked at, and ended before the iterator is collected.

Public torch: an iterator ends its workers when it is garbage-collected, which a traceback that
holds it puts off; a `DataLoader` with persistent workers holds its iterator itself. Which worker
died is told in no public way. Seen to work: torch 2.11.0 to 2.15.0. When gone: workers end with
their iterator, and the message about a dead worker leaves out what it read.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader


def workers_of(iterator: Any) -> Sequence[Any]:
    """Return the processes by number; none where it reads in this process."""
    return list(getattr(iterator, "_workers", ()))


def end_workers(loader: DataLoader[Any], iterator: Any) -> None:
    """End the workers of an iterator, if it has any, and have the next iteration start new ones."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    loader._iterator = None
