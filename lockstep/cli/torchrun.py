"""Options of torchrun that `lockstep launch` has besides those of all verbs, and those that it refuses, with why."""

import argparse
import os
from typing import Any

from lockstep.cli.arguments import Parser
from lockstep.errors import UsageError
from lockstep.launch.streams import ConsoleOutput

_NO_EVENTS = "the launcher writes its events into DIR/events.jsonl, and calls no handlers"
_LOGS = "every rank's output is in DIR/logs/rank-N.log, whole"
# Option → values that say what happens anyway, why there is no more, what to do.
_REFUSED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "--start-method": (("spawn",), "a script always runs in a fresh process", "leave it out"),
    "--event-log-handler": (("null",), _NO_EVENTS, "leave it out, and read DIR/events.jsonl"),
    "--logs-specs": ((), _LOGS, "leave it out; --log-dir, --tee and --redirects say where output goes"),
    "--duplicate-stdout-filters": ((), _LOGS, "leave it out: grep WORD DIR/logs/rank-*.log"),
    "--duplicate-stderr-filters": ((), _LOGS, "leave it out: grep WORD DIR/logs/rank-*.log"),
    "--numa-binding": ((), "each rank is bound to its share of the cores of one NUMA node already", "leave it out"),
    "--signals-to-handle": (
        (),
        "SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the ranks always, and no others",
        "leave it out",
    ),
}


def add_torchrun_options(parser: Parser) -> None:
    group = parser.add_argument_group("as torchrun has them")
    group.add_argument("--no-python", action="store_true", help="SCRIPT is a program of any kind, run as it is")
    group.add_argument("--run-path", action="store_true", help=argparse.SUPPRESS)  # a script is always run so
    group.add_argument("--log-dir", metavar="DIR", help="where every rank's log goes (default: runs/<SCRIPT>/logs)")
    group.add_argument("-t", "--tee", metavar="WHAT", default="0", help="also show 1 stdout, 2 stderr, 3 both; 0:3,1:2")
    group.add_argument("-r", "--redirects", metavar="WHAT", default="0", help="keep off the console, in the log alone")
    group.add_argument("--local-ranks-filter", metavar="N,N,…", default="", help="show these local ranks (default: 0)")
    group.add_argument("--role", metavar="NAME", default="rank", help="what ROLE_NAME says to the ranks")
    group.add_argument("--local-addr", metavar="HOST", help="how other machines reach this one")
    group.add_argument(
        "--monitor-interval", metavar="SECONDS", type=float, default=0.1, help="between looks at the ranks"
    )
    group.add_argument(
        "--shutdown-timeout", metavar="SECONDS", type=int, help="for peers of a failed rank to end (default: 30)"
    )
    for option in parser._actions:
        value = os.environ.get(f"PET_{option.dest.upper()}")  # as torchrun has it: PET_NNODES, PET_NPROC_PER_NODE …
        if value is not None and option.option_strings:
            option.default = value not in ("0", "") if option.nargs == 0 else value
    group.add_argument("--virtual-local-rank", action=_Refuse, nargs=0, help=argparse.SUPPRESS)
    for name in _REFUSED:
        group.add_argument(name, action=_Refuse, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    """Refuses an option with why, unless it asks for what happens anyway."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name = self.option_strings[0]
        fine, why, fix = _REFUSED.get(
            name, ((), "LOCAL_RANK would be 0 on every rank, and ranks choose their GPU by it", "leave it out")
        )
        if values not in fine:
            raise UsageError(f"{name} is not supported", where="lockstep launch", why=why, fix=fix)


def console_output(given: argparse.Namespace) -> ConsoleOutput:
    """What of the ranks' output the console shows."""
    return ConsoleOutput(given.tee, given.redirects, given.local_ranks_filter)
