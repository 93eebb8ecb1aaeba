"""Runs a user's script as a rank.

The launcher starts `python -m lockstep.launch.script LOGS file|module|program SCRIPT ARGS …`.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep import signals
from lockstep.errors import EXIT_DONE, EXIT_PREEMPTED, UsageError
from lockstep.launch.worker import die_with_this_process, run_as_worker


def run_script(script: str, arguments: Sequence[str], *, kind: str = "file") -> int:
    """Run it as `python SCRIPT ARGS` (or `python -m`) would, in this process; or a program, as one of its own.

    Args:
        kind: `file`, `module` or `program`.

    Returns:
        0, or 75 where the script answered SIGTERM or a Ctrl-C itself and then ended well: it was not done.
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
            path = Path(script).absolute()  # as Python has it: __file__ stays right after os.chdir
            sys.path.insert(0, str(path.parent))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise  # `sys.exit()` and `sys.exit(0)` are a script's way to end well
    return EXIT_PREEMPTED if signals.asked_to_end() else EXIT_DONE


def _run_program(command: Sequence[str]) -> int:
    """Run a program to its end, and pass on to it what this process is told."""
    try:
        program = subprocess.Popen(command, preexec_fn=die_with_this_process)
    except OSError as error:
        raise UsageError(
            f"{command[0]} can't be run: {error.strerror}",
            where="--no-python",
            fix="chmod +x, or leave --no-python out",
        ) from None
    signals.listen(program.send_signal)
    for number in signals.seen:  # before it was there
        program.send_signal(number)
    code = program.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    return EXIT_PREEMPTED if signals.asked_to_end() else EXIT_DONE


def main() -> int:
    logs, kind, script, *arguments = sys.argv[1:]
    return run_as_worker(lambda: run_script(script, arguments, kind=kind), logs=Path(logs), children_too=True)


if __name__ == "__main__":
    sys.exit(main())
