"""Verbs that look at a run before it starts: plan, doctor.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

import argparse
import gc
from pathlib import Path

from lockstep.cli.arguments import (
    FLAG,
    Parser,
    add_config,
    add_launch_options,
    config_and_overrides,
    launch_options,
)
from lockstep.errors import EXIT_DONE, UsageError


def plan(argv: list[str]) -> int:
    """Run `lockstep plan CONFIG`, or plan a transformer of a size alone.

    `lockstep plan CONFIG [KEY=VALUE …]` or `lockstep plan --params N --seq-length N --batch-size
    N`.
    """
    parser = _plan_parser()
    args = parser.parse(argv)
    path, overrides = config_and_overrides(args, required=args.params is None)
    _require_one_plan(parser, args, path)
    size = getattr(args, f"{FLAG}batch_size") or "1"
    if not size.isdecimal():
        raise UsageError(
            f"--batch-size {size} is not a whole number", fix="count the samples of a micro-batch"
        )

    gc.disable()  # half a second of looking for garbage, where imports make none
    from lockstep.plan import command

    gc.freeze()
    gc.enable()
    options = command.PlanOptions(
        args.gpus,
        args.gpu_type,
        args.interconnect,
        args.gpus_per_node,
        args.find_batch_size,
        args.json,
        args.write,
        args.chart,
        args.price,
    )
    if args.params is not None:
        print(command.plan_by_size(args.params, args.seq_length, int(size), args.headroom, options))
        return EXIT_DONE

    from lockstep.config import load_config

    assert path is not None
    config = load_config(path, overrides)
    if args.stages is not None:
        from lockstep.plan.workload import plan_stages

        print(plan_stages(config, args.stages))
    else:
        print(command.plan(config, options))
    return EXIT_DONE


_OF_PARAMS = ("params", "seq_length", "headroom", "gpus", "json", f"{FLAG}batch_size")

_OF_STAGES = ("words", "config", "stages", FLAG.rstrip(":"))


def _require_one_plan(parser: Parser, args: argparse.Namespace, path: Path | None) -> None:
    """Raise a UsageError for arguments of another kind of plan: by size, of stages, of a config."""
    if args.params is None and args.stages is None:
        parser.refuse(
            "CONFIG", "seq_length", "headroom", fix="leave it out: it goes with --params N"
        )
    elif args.params is None:
        parser.take_only("CONFIG --stages N", lambda dest: dest.split(":")[0] in _OF_STAGES)
    elif path is None and args.stages is None:
        parser.take_only("--params N", lambda dest: dest in _OF_PARAMS)
    else:
        other = "--stages" if path is None else str(path)
        raise UsageError(
            f"--params plans without a config, and {other} needs one",
            fix="leave one of the two out",
        )


def _plan_parser() -> Parser:
    """Return the parser of `lockstep plan`."""
    text = "Predict the memory and time of a run, and which layout is best. Nothing is trained."
    parser = Parser("plan", text, ["lockstep plan run.yaml --gpus 8 --gpu-type A100-80GB"])
    add_config(parser)
    add = parser.add_argument
    add("--gpus", metavar="N", type=int, help="number of GPUs (default: those that are here, or 1)")
    add(
        "--gpu-type",
        metavar="NAME",
        help="V100, A100-80GB, H100, RTX-4090 … (default: this machine's)",
    )
    add("--interconnect", metavar="NAME", help="between nodes: InfiniBand-NDR, Ethernet-100G …")
    add("--gpus-per-node", metavar="N", type=int, default=8, help="(default: 8)")
    add("--find-batch-size", action="store_true", help="find the largest micro-batch that fits")
    add("--write", metavar="FILE", type=Path, help="write the best layout's config")
    add("--chart", metavar="FILE.svg", type=Path, help="draw the memory of each layout")
    add(
        "--price", metavar="AMOUNT", type=float, help="price of a GPU-hour, for the cost of the run"
    )
    add("--json", action="store_true", help="print bytes and seconds as JSON, for programs")
    add(
        "--stages",
        metavar="N",
        type=int,
        help="run each segment here, and cut the model into N stages of equal time",
    )
    add("--params", metavar="N", type=float, help="without a config: a transformer of N parameters")
    add("--seq-length", metavar="N", type=int, default=2048, help="with --params (default: 2048)")
    add("--headroom", metavar="SHARE", type=float, default=0.0, help="with --params: 0.5 adds half")
    return parser


def doctor(argv: list[str]) -> int:
    """Run `lockstep doctor [CONFIG] [launch options] [--json]`."""
    text = "Check machines, network and ranks before a run: ✓ good, ⚠ warning, ✗ will not work."
    parser = Parser("doctor", text, ["lockstep doctor run.yaml --nproc-per-node 2"])
    add_config(parser)
    add_launch_options(parser)
    text = "where runs write (default: runs)"
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=Path("runs"), help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    args = parser.parse(argv)
    path, overrides = config_and_overrides(args, required=False)
    if path is None:
        typed = ("words", *(dest for dest in vars(args) if dest.startswith(FLAG)))
        parser.refuse("without a config", *typed, fix="name the config: lockstep doctor CONFIG …")
    from lockstep.launch.doctor import doctor as examine

    return examine(
        path,
        overrides,
        launch_options(args),
        output_dir=args.output_dir,
        as_json=args.json,
        argv=argv,
    )
