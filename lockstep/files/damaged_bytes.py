"""Tells a file that was read and is damaged from one that could not be read.

Tests: tests/checkpoint/test_unreachable.py
"""


class DamagedBytesError(OSError):
    """Raised when a file is there, and is not what was written.

    Any other OSError, but a FileNotFoundError, says nothing of the file: a disk, a network or a
    service did not give it.
    """
