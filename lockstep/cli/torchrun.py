"""Adds torchrun's further options to `lockstep launch`, and rejects unsupported ones with a reason."""

import argparse
import os
from typing import Any

from lockstep.cli.arguments import Parser
from lockstep.errors import UsageError
from lockstep.launch.worker import ConsoleOutput

_NO_EVENTS = "the launcher writes its events into DIR/events.jsonl, and calls no handlers"
_LOGS = "every rank's output is in DIR/logs/rank-N.log, whole"
# Option → values that equal what happens anyway, why no other is supported, what to do.
_UNSUPPORTED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "--start-method": (("spawn",), "a script always runs in a fresh process", "leave it out"),
    "--event-log-handler": (("null",), _NO_EVENTS, "leave it out, and read DIR/events.jsonl"),
    "--logs-specs": ((), _LOGS, "leave it out; --log-dir, --tee and --redirects choose where output goes"),
    "--duplicate-stdout-filters": ((), _LOGS, "leave it out: grep WORD DIR/logs/rank-*.log"),
    "--duplicate-stderr-filters": ((), _LOGS, "leave it out: grep WORD DIR/logs/rank-*.log"),
    "--numa-binding": ((), "each rank is bound to its share of the cores of one NUMA node already", "leave it out"),
    "--signals-to-handle": (
        (),
        "SIGTERM, SIGINT, SIGHUP and SIGUSR1 are always forwarded to the ranks, and no others",
        "leave it out",
    ),
}


def add_torchrun_options(parser: Parser) -> None:
    """Add the options; variables named PET_* give their defaults."""
    group = parser.add_argument_group("as torchrun has them")
    group.add_argument("--no-python", action="store_true", help="SCRIPT is a program of any kind, run as it is")
    group.add_argument("--run-path", action="store_true", help=argparse.SUPPRESS)  # scripts always run that way
    group.add_argument("--log-dir", metavar="DIR", help="folder of the ranks' logs (default: runs/<SCRIPT>/logs)")
    group.add_argument("-t", "--tee", metavar="WHAT", default="0", help="also show 1 stdout, 2 stderr, 3 both; 0:3,1:2")
    group.add_argument("-r", "--redirects", metavar="WHAT", default="0", help="do not show, only log")
    group.add_argument("--local-ranks-filter", metavar="N,N,…", default="", help="show these local ranks (default: 0)")
    group.add_argument("--role", metavar="NAME", default="rank", help="the ranks' ROLE_NAME")
    group.add_argument("--local-addr", metavar="HOST", help="the address at which other machines reach this one")
    group.add_argument(
        "--monitor-interval", metavar="SECONDS", type=float, default=0.1, help="between checks of the ranks"
    )
    group.add_argument(
        "--shutdown-timeout", metavar="SECONDS", type=int, help="for peers of a failed rank to end (default: 30)"
    )
    for option in parser._actions:
        value = os.environ.get(f"PET_{option.dest.upper()}")  # torchrun's names: PET_NNODES, PET_NPROC_PER_NODE …
        if value is not None and option.option_strings:
            option.default = value not in ("0", "") if option.nargs == 0 else value
    group.add_argument("--virtual-local-rank", action=_Unsupported, nargs=0, help=argparse.SUPPRESS)
    for name in _UNSUPPORTED:
        group.add_argument(name, action=_Unsupported, help=argparse.SUPPRESS)


class _Unsupported(argparse.Action):
    """Rejects an option with a reason, unless its value equals what happens anyway."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name = self.option_strings[0]
        fine, why, fix = _UNSUPPORTED.get(
            name, ((), "LOCAL_RANK would be 0 on every rank, and ranks choose their GPU by it", "leave it out")
        )
        if values not in fine:
            raise UsageError(f"{name} is not supported", where="lockstep launch", why=why, fix=fix)


def console_output(given: argparse.Namespace) -> ConsoleOutput:
    """Return which output of the ranks the console shows."""
    return ConsoleOutput(given.tee, given.redirects, given.local_ranks_filter)
