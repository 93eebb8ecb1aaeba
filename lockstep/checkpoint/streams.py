"""Files of known size that are read at any position, wherever their bytes come from.

Tests: tests/checkpoint/test_fetch.py, tests/checkpoint/test_object_store.py,
tests/checkpoint/test_round_trip.py
"""

import io
from abc import abstractmethod
from typing import Any


class SizedStream(io.RawIOBase):
    """A file that is read; a subclass says how bytes at a position are fetched.

    Args:
        size: of the file, in bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    @abstractmethod
    def fill(self, view: memoryview, position: int) -> int:
        """Put bytes of the file from a position on into a view that does not reach beyond its end.

        Return how many there are: one or more, or 0 if the file is shorter than it should be.
        """

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + to)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        if not len(view):
            return 0
        taken = self.fill(view, self._at)
        self._at += taken
        return taken

    def read(self, size: int = -1, /) -> bytes:
        """Read as many bytes, or all; fewer at the end."""
        remaining = max(0, self._size - self._at)
        data = memoryview(bytearray(remaining if size < 0 else min(size, remaining)))
        held = 0
        while held < len(data):
            taken = self.readinto(data[held:])
            if not taken:
                break
            held += taken
        return bytes(data[:held])
