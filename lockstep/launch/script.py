"""Runs a user's script as a rank.

The command is `python -m lockstep.launch.script LOGS file|module|program SCRIPT ARGS …`.

Tests: tests/launch/test_torchrun.py, tests/launch/test_foreign.py
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import EXIT_DONE, EXIT_PREEMPTED, UsageError
from lockstep.launch.worker import run_as_worker
from lockstep.machine import signals
from lockstep.machine.processes import die_with_this_process


def run_script(script: str, arguments: Sequence[str], *, kind: str = "file") -> int:
    """Run a script as `python SCRIPT ARGS` (or `python -m`) would, in this process.

    A program, which is not Python's, runs as a child process. Return 0, or 75 if the script handled
    SIGTERM or a Ctrl-C itself and then exited with 0: its work is not done.
    """
    if kind == "program":
        return _run_program([script, *arguments])
    sys.argv = [script, *arguments]
    signals.leave_to_script()
    try:
        if kind == "module":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            path = Path(script).absolute()  # as Python does: __file__ stays right after os.chdir
            sys.path.insert(0, str(path.parent))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise  # `sys.exit()` and `sys.exit(0)` end a script normally
    return EXIT_PREEMPTED if signals.asked_to_end() else EXIT_DONE


def _run_program(command: Sequence[str]) -> int:
    """Run a program that is not Python, pass signals on to it, and return the exit code."""
    try:
        program = subprocess.Popen(command, preexec_fn=die_with_this_process)
    except OSError as error:
        text = f"{command[0]} can't be run: {error.strerror}"
        fix = "chmod +x, or leave --no-python out"
        raise UsageError(text, where="--no-python", fix=fix) from None
    signals.listen(program.send_signal)
    for number in signals.seen:  # signals from before the program was started
        program.send_signal(number)
    code = program.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    return EXIT_PREEMPTED if signals.asked_to_end() else EXIT_DONE


def main() -> int:
    """Run the script named on the command line as a rank, and return the exit code."""
    logs, kind, script, *arguments = sys.argv[1:]
    return run_as_worker(
        lambda: run_script(script, arguments, kind=kind), logs=Path(logs), include_children=True
    )


if __name__ == "__main__":
    sys.exit(main())
