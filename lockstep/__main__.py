"""`python -m lockstep` and the command `lockstep`: a process of its own."""

import gc
import sys

from lockstep.cli import main


def run() -> int:
    """`main`, in a process that ends with it."""
    code = main()
    gc.freeze()  # the end would look at each of torch's million objects once more: a second
    return code


if __name__ == "__main__":
    sys.exit(run())
