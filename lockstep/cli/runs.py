"""Verbs that show runs: report, top.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

from pathlib import Path

from lockstep.cli.arguments import Parser
from lockstep.files.paths import local_path


def report(argv: list[str]) -> int:
    """Run `lockstep report RUN [RUN2 …] [-o FILE] [--live]`."""
    parser = Parser(
        "report",
        "What runs did and what to do next, as one HTML file; also of a run that crashed. Of a"
        " folder of runs: an index that compares them, beside a report of each.",
        [
            "lockstep report runs/run --live         # follows it while it trains",
            "lockstep report runs                    # all runs in the folder",
            "lockstep report runs/a runs/b -o compared.html",
        ],
    )
    parser.add_argument(
        "runs",
        metavar="RUN|URL",
        nargs="+",
        help="run directories, or URLs of runs in buckets; several are compared",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: report.html in the first RUN"
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the page on loopback instead, following the run"
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="with --live (default: any free port)"
    )
    args = parser.parse(argv)
    if args.live:
        parser.refuse("RUN --live", "output", fix="leave it out: the page is served, not written")
        for path in args.runs:
            local_path(path, "RUN --live")
    else:
        parser.refuse("RUN", "port", fix="add --live, or leave it out")
    from lockstep.report.index import run

    return run(args.runs, output=args.output, live=args.live, port=args.port)


def top(argv: list[str]) -> int:
    """Run `lockstep top RUN [RUN2 …] [--once]`."""
    text = "What every rank of a running run does: host, phases of its step, memory, GPU."
    examples = [
        "lockstep top runs/run",
        "ssh -t MACHINE lockstep top runs/run   # a run on another machine",
    ]
    parser = Parser("top", text, examples)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories")
    parser.add_argument("--once", action="store_true", help="print the table once, for scripts")
    args = parser.parse(argv)
    from lockstep.report.top import run

    return run(args.runs, once=args.once)
