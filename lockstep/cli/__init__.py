"""The command line: finds the verb (`verbs.py`) and calls its function.

An error that a user can cause is one message on stderr; LOCKSTEP_TRACEBACK=1 shows the traceback.
"""

import os
import select
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence

from lockstep.cli.arguments import EPILOG
from lockstep.cli.verbs import VERBS
from lockstep.errors import EXIT_DONE, LockstepError, UsageError, did_you_mean
from lockstep.machine.output import flush

_DESCRIPTION = "Distributed training for PyTorch in which every strategy takes the same step."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    arguments = without_legacy(sys.argv[1:] if argv is None else argv)
    try:
        folder = os.getcwd()
    except OSError:
        why = "it was deleted, or made anew, while this shell was in it"
        return _report(
            UsageError(
                "the working directory is gone", why=why, fix="go to one that is there: cd ~"
            )
        )
    if folder not in sys.path and "" not in sys.path:
        # for the user's own `package.module:Name`, as under `python -m lockstep`
        sys.path.insert(0, folder)
    try:
        code = _dispatch(arguments)
        flush(sys.stdout)
        return code
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return EXIT_DONE
    except LockstepError as error:
        return _report(error)
    except OSError as error:
        if error.filename is None:
            raise
        why = error.strerror or type(error).__name__
        fix = "name another file or folder, or see to its rights"
        return _report(UsageError(f"{error.filename} can't be read or written", why=why, fix=fix))


def _report(error: LockstepError) -> int:
    from lockstep.launch.worker import first_to_fail
    from lockstep.run_directory.rank_output import print_error

    if first_to_fail():  # under another launcher every rank fails with this error
        print_error(error, traceback.format_exc())
    return error.exit_code


def _stdout_is_closed() -> bool:
    """Return whether the pipe behind stdout is closed (`lockstep … | head`).

    If so, discard further output.
    """
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in watched.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _dispatch(argv: list[str]) -> int:
    """Run the verb that the first word names, or print what there is. Return the exit code."""
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
        codes = textwrap.fill(EPILOG, shutil.get_terminal_size().columns)
        print(f"usage: lockstep VERB …\n\n{_DESCRIPTION}\n\n{verbs}\n")
        print(f"`lockstep VERB --help` lists its options.\n{codes}")
        return EXIT_DONE
    if verb == "--version":
        from importlib.metadata import version

        print(f"lockstep {version('lockstep-train')}")
        return EXIT_DONE
    if verb not in VERBS:
        fix = f"one of {', '.join(VERBS)}; `lockstep --help` lists them"
        raise UsageError(f"there is no verb {verb!r}{did_you_mean(verb, VERBS)}", fix=fix)
    return VERBS[verb][0](argv[1:])


def without_legacy(argv: Sequence[str]) -> list[str]:
    """Remove `--local-rank=N` before the verb.

    `torch.distributed.launch` adds it there, also as `--local_rank N`.
    """
    rest = list(argv)
    while rest and rest[0].partition("=")[0].replace("_", "-") == "--local-rank":
        rest = rest[1 if "=" in rest[0] else 2 :]
    return rest
