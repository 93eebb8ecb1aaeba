"""Prepares a folder, and kills itself in the midst of it: python -m tests.data.killed_prepare BYTES
SOURCE OUT [WORKERS]
"""

import os
import signal
import sys

from lockstep.data import prepare


def main(amount: int, source: str, out: str, workers: str = "0") -> None:
    """Prepare until so many bytes are read; between syncs more is written than a buffer holds."""
    left = amount

    def advance(size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare.SAVED_EVERY = 20_000
    prepare.prepare(source, out, workers=int(workers), advance=advance)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
