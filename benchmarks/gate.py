"""Where a contestant of a benchmark waits for its turn, and what is counted while it has it.

A contestant is a program that trains for ever and calls its gate once a step, from the same place:
a hook before the model's forward pass. Every `block` steps the gate tells the conductor what the
block took and waits for a word: another block, counted or not, or the end. Nothing of a framework
needs to know of it.

What can be counted: seconds; CPU seconds of all threads; calls of Python functions and of C
functions from Python, in the training thread (`sys.setprofile`: exact, the same on every machine);
instructions of all threads (valgrind's callgrind, exact but for what depends on time). Loads
nothing but the standard library.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

# File descriptors.
READ = "GATE_READ"
WRITE = "GATE_WRITE"
BLOCK = "GATE_BLOCK"  # another number of steps in a block: valgrind runs them fifty times slower
DUMPS = "GATE_DUMPS"  # the folder in which callgrind writes what it has counted
GO, CALLS, INSTRUCTIONS, END = "gcie"

_SWITCH = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


class Gate:
    """Call it before each step.

    Args:
        block: steps between two words with the conductor.
    """

    def __init__(self, block: int) -> None:
        self._block = int(os.environ.get(BLOCK, block))
        self._steps = 0
        self._read = int(os.environ[READ])
        self._write = int(os.environ[WRITE])
        self._word = ""
        self._calls = 0
        self._instructions: Instructions | None = None
        self._since = self._cpu = 0.0

    def __call__(self, *_: Any) -> None:
        if self._steps % self._block == 0:
            self._turn()
        self._steps += 1

    def _turn(self) -> None:
        seconds = time.perf_counter() - self._since
        cpu = time.process_time() - self._cpu
        sys.setprofile(None)
        found: dict[str, float] = {"seconds": seconds / self._block, "cpu": cpu / self._block}
        if self._word == CALLS:
            found["calls"] = self._calls / self._block
        if self._word == INSTRUCTIONS and self._instructions is not None:
            found["instructions"] = self._instructions.end() / self._block
        os.write(self._write, (json.dumps(found) + "\n").encode())
        self._word = os.read(self._read, 1).decode()
        # no conductor is left, or it is enough: a framework's own way out takes its time
        if self._word in ("", END):
            os._exit(0)
        if self._word == INSTRUCTIONS:
            self._instructions = self._instructions or Instructions()
            self._instructions.begin()
        if self._word == CALLS:
            self._calls = 0
            sys.setprofile(self._count)
        self._since = time.perf_counter()
        self._cpu = time.process_time()

    def _count(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            self._calls += 1


class Instructions:
    """Counts instructions of all threads of this process between `begin` and `end`, if it runs
    under callgrind.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "switch.c")
            library = Path(folder, "switch.so")
            source.write_text(_SWITCH)
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
            self._switch = ctypes.CDLL(str(library))

    def begin(self) -> None:
        self._switch.begin()

    def end(self) -> int:
        """Dump what was counted into a file of callgrind's, and read it there."""
        self._switch.end(b"block")
        total = 0
        for path in Path(os.environ[DUMPS]).glob(f"{os.getpid()}.*"):
            lines = path.read_text(errors="replace").splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("totals:"))
            path.unlink()
        return total


def under_callgrind(folder: str) -> list[str]:
    """What goes before a command so that its instructions can be counted; nothing is until a block
    asks for it.
    """
    return [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={folder}/%p",
        "-q",
    ]
