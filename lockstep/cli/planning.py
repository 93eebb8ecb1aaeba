"""The verb with the most options: `lockstep plan`. Imports are made once it is clear what is asked."""

import argparse
from pathlib import Path

from lockstep.cli.arguments import FLAG, Parser, add_config, config_and_overrides
from lockstep.errors import EXIT_DONE, UsageError


def plan(argv: list[str]) -> int:
    """lockstep plan CONFIG [KEY=VALUE …] | --params N --seq-length N --batch-size N"""
    given = _parser().parse(argv)
    path, overrides = config_and_overrides(given, required=given.params is None)
    if given.params is not None and (path is not None or given.stages is not None):
        other = "--stages" if path is None else str(path)
        raise UsageError(f"--params plans without a config, and {other} needs one", fix="leave one of the two out")
    size = _batch_size(given)

    from lockstep.plan import command

    asked = command.Asked(
        given.gpus, given.gpu_type, given.interconnect, given.gpus_per_node, given.find_batch_size, given.json,
        given.write, given.chart, given.price,
    )  # fmt: skip
    if given.params is not None:
        print(command.plan_by_size(given.params, given.seq_length, size, given.headroom, asked))
        return EXIT_DONE

    from lockstep.config import load_config

    assert path is not None
    config = load_config(path, overrides)
    if given.stages is not None:
        from lockstep.plan import segments

        print(segments.command(config, given.stages))
    else:
        print(command.plan(config, asked))
    return EXIT_DONE


def _parser() -> Parser:
    parser = Parser("plan", "What a run will need: memory, time, and which layout is best. Nothing is trained.")
    add_config(parser)
    parser.add_argument("--gpus", metavar="N", type=int, help="how many (default: those that are here, or 1)")
    parser.add_argument("--gpu-type", metavar="NAME", help="V100, A100-80GB, H100, RTX-4090 … (default: as here)")
    parser.add_argument("--interconnect", metavar="NAME", help="between nodes: InfiniBand-NDR, Ethernet-100G …")
    parser.add_argument("--gpus-per-node", metavar="N", type=int, default=8, help="(default: 8)")
    parser.add_argument("--find-batch-size", action="store_true", help="the largest micro-batch that fits")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the best layout's config")
    parser.add_argument("--chart", metavar="FILE.svg", type=Path, help="draw each layout's memory")
    parser.add_argument("--price", metavar="AMOUNT", type=float, help="of a GPU-hour, for the cost of the run")
    parser.add_argument("--json", action="store_true", help="bytes and seconds, for programs")
    text = "run each segment here, and cut the model into so many stages of equal time"
    parser.add_argument("--stages", metavar="N", type=int, help=text)
    text = "without a config: a transformer of so many parameters"
    parser.add_argument("--params", metavar="N", type=float, help=text)
    parser.add_argument("--seq-length", metavar="N", type=int, default=2048, help="with --params (default: 2048)")
    parser.add_argument("--headroom", metavar="SHARE", type=float, default=0.0, help="with --params: 0.5 adds half")
    return parser


def _batch_size(given: argparse.Namespace) -> int:
    text = getattr(given, f"{FLAG}batch_size") or "1"
    if not text.isdecimal():
        raise UsageError(f"--batch-size {text} is no whole number", fix="count the samples of a micro-batch")
    return int(text)
