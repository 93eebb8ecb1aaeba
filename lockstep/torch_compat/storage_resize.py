"""`torch.UntypedStorage.resize_`, replaced on the class: a storage that changes its size is told.

Public torch: no hook; FSDP2 frees gathered parameters by this method, which no dispatch mode sees.
Seen to work: torch 2.13.0.
When gone: `lockstep plan` counts gathered parameters as if they were never freed; the class is public.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def resizes_watched(resized: Callable[[Any], None]) -> Iterator[None]:
    """Call `resized(storage)` after each change of a storage's size, while the block runs."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: Any) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
