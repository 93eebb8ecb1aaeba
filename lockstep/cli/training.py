"""Verbs that start ranks: train, launch, bench, and warm, which prepares their start.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

import argparse
from pathlib import Path

from lockstep.cli.arguments import (
    FLAG,
    Parser,
    add_config,
    add_launch_options,
    add_torchrun_options,
    config_and_overrides,
    launch_options,
)
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.files.paths import bucket_url, local_path, run_directory


def train(argv: list[str]) -> int:
    """Run `lockstep train CONFIG [KEY=VALUE …]`."""
    parser = Parser(
        "train",
        "Train a config. KEY=VALUE overrides one of its keys: training.max_steps=10.",
        [
            "lockstep train run.yaml --nproc-per-node 2      # two ranks",
            "lockstep train run.yaml training.max_steps=100  # again: the run resumes",
        ],
    )
    add_config(parser)
    add_launch_options(parser)
    add = parser.add_argument
    add(
        "--output-dir",
        metavar="DIR|URL",
        help="the run directory, or the URL of a bucket, s3://BUCKET/PREFIX (default:"
        " runs/<CONFIG's name>)",
    )
    add(
        "--resume",
        metavar="auto|never|PATH|URL",
        help="where to resume from (default: checkpoint.resume)",
    )
    args = parser.parse(argv)
    path, overrides = config_and_overrides(args)
    assert path is not None
    if args.resume is not None:
        bucket_url(args.resume, "--resume")
    from lockstep.launch.train import train as start

    named = args.output_dir or Path("runs", path.stem)
    output = bucket_url(named, "--output-dir") or Path(named)
    return start(
        path, overrides, launch_options(args), output_dir=output, resume=args.resume, argv=argv
    )


def launch(argv: list[str]) -> int:
    """Run `lockstep launch [options] SCRIPT.py [ARGS …]`."""
    parser = _launch_parser()
    args = parser.parse(argv, until_script=True)
    if args.script is None:
        raise UsageError("no script is given", fix="lockstep launch [options] SCRIPT.py [ARGS …]")
    local_path(args.script, "SCRIPT")

    from lockstep.launch.train import launch_script
    from lockstep.run_directory.rank_output import ConsoleOutput

    if args.module and args.no_python:
        raise UsageError(
            "a module is run by Python", where="-m and --no-python", fix="leave one of them out"
        )
    if args.log_dir is not None:
        parser.refuse(
            "--log-dir DIR", "output_dir", fix="keep one of the two: logs go to --log-dir"
        )
    output_dir = run_directory(args.output_dir or Path("runs", Path(args.script).stem))
    if args.watch_training is not None:
        _watch_training(args.watch_training)
    kind = "file"
    if args.module:
        kind = "module"
    elif args.no_python:
        kind = "program"
    return launch_script(
        args.script,
        args.arguments,
        launch_options(args),
        kind=kind,
        logs=Path(args.log_dir or output_dir / "logs"),
        output=ConsoleOutput(args.tee, args.redirects, args.local_ranks_filter),
    )


def _launch_parser() -> Parser:
    """Return the parser of `lockstep launch`."""
    text = "Run any script of yours on several ranks, with restarts and one message for a failure."
    parser = Parser("launch", text, ["lockstep launch --nproc-per-node 2 train.py --my-option 3"])
    add_launch_options(parser)
    add_torchrun_options(parser)
    add = parser.add_argument
    add(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="logs go to DIR/logs (default: runs/<SCRIPT's name>)",
    )
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    text = (
        "say what contradicts a right training loop; look at parameters every N steps (default:"
        " 100)"
    )
    add("--watch-training", metavar="N", nargs="?", type=int, const=100, help=text)
    add("script", metavar="SCRIPT", nargs="?")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return parser


def _watch_training(steps: int) -> None:
    """Let every process that is started observe its training loop; parameters every `steps`."""
    if steps < 1:
        raise UsageError(
            f"--watch-training {steps} is not a number from 1 on", fix="leave it out: 100"
        )
    from lockstep.verify.watch import inject

    inject(LOCKSTEP_WATCHED_TRAINING=str(steps))


def bench(argv: list[str]) -> int:
    """Run `lockstep bench scaling CONFIG --ranks 1,2,4`."""
    text = "Weak and strong scaling of a config on this machine, measured against the ideal."
    parser = Parser("bench", text, ["lockstep bench scaling run.yaml --ranks 1,2 --steps 20"])
    parser.add_argument("study", metavar="scaling")
    add_config(parser)
    parser.add_argument(
        "--ranks", metavar="N,N,…", default="1,2,4", help="numbers of ranks (default: 1,2,4)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=30, help="steps of each run (default: 30)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="NAME",
        type=Path,
        default=Path("scaling"),
        help="NAME.md, NAME.html",
    )
    args = parser.parse(argv)
    parser.refuse("scaling", f"{FLAG}max_steps", fix="write --steps N, the length of each run")
    path, overrides = config_and_overrides(args)
    assert path is not None
    from lockstep.launch import bench as study

    return study.run(
        args.study, path, overrides, ranks=args.ranks, steps=args.steps, output=args.output
    )


def warm(argv: list[str]) -> int:
    """Run `lockstep warm [--idle-minutes N | --stop | --status]`."""
    from lockstep.prepared import warm

    text = (
        "Leave a process that has imported torch and Lockstep, in forks of which later commands"
        " start at once."
    )
    examples = ["lockstep warm --idle-minutes 480", "lockstep warm --stop"]
    parser = Parser("warm", text, examples)
    add = parser.add_argument
    text = f"end it after so long without a command (default: {warm.IDLE_MINUTES})"
    add("--idle-minutes", metavar="N", type=float, default=warm.IDLE_MINUTES, help=text)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--stop", action="store_true", help="end it, when its commands have ended")
    only.add_argument("--status", action="store_true", help="say whether there is one")
    args = parser.parse(argv)
    if args.stop:
        print("it ends" if warm.stop() else "there is none")
        return EXIT_DONE
    if not args.status:
        if args.idle_minutes <= 0:
            raise UsageError(
                f"--idle-minutes {args.idle_minutes:g} is not above 0",
                fix=f"leave it out: {warm.IDLE_MINUTES}",
            )
        warm.stop()
        warm.start(args.idle_minutes)
    status = warm.status()
    print("there is none: lockstep warm" if status is None else status)
    return EXIT_DONE
