"""Verbs that prove that trainings are the same: verify, compare.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

import argparse
from pathlib import Path

from lockstep.cli.arguments import Parser, add_config, config_and_overrides
from lockstep.errors import UsageError


def verify(argv: list[str]) -> int:
    """Run `lockstep verify CONFIG`, `lockstep verify SCRIPT.py` or `lockstep verify -- COMMAND …`.

    `lockstep verify CONFIG [KEY=VALUE …] [--against TOPOLOGY,…]`, `… SCRIPT.py [--nproc-per-node
    N,…]` or `… [--ranks N,…] -- COMMAND …`.
    """
    parser = _verify_parser()
    before_dashes, after_dashes = _split_at_dashes(argv)
    args = parser.parse(before_dashes)
    names_nothing = not args.words and args.config is None
    first = args.words[0] if args.words else ""
    is_script = first.endswith(".py") or len(first.split()) > 1
    if is_script or (names_nothing and after_dashes):
        return _verify_script(parser, args, after_dashes)
    if args.nproc_per_node is not None or len(before_dashes) < len(argv):
        fix = (
            "name one, as in lockstep verify train.py; topologies of a config are written --against"
            " ddp:2"
        )
        raise UsageError("--nproc-per-node and arguments after -- are for a script", fix=fix)
    path, overrides = config_and_overrides(args)
    assert path is not None
    from lockstep.verify import command

    return command.run(
        path,
        overrides,
        against=args.against,
        steps=args.steps,
        in_json=args.json,
        page=args.html,
    )


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--`, and those after it, which are a script's or a command."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def _verify_script(parser: Parser, args: argparse.Namespace, after_dashes: list[str]) -> int:
    """Verify a script, `SCRIPT.py [-- ARGS …]`, or a command as it is typed, `-- COMMAND …`."""
    from lockstep.verify.command import run_script

    ranks_typed = "against" if args.nproc_per_node is None else "nproc_per_node"
    accepted = ("words", "steps", "json", "html", ranks_typed)
    fix = "leave it out: a script sets such keys itself; what follows -- goes to the script"
    parser.take_only("SCRIPT", lambda dest: dest in accepted, fix)
    ranks = args.nproc_per_node or args.against
    from lockstep.verify.launchers import PlainScript, plain_script, with_ranks

    script: str | PlainScript
    arguments: list[str] = []
    if args.words:
        script = args.words[0]
        arguments = [*args.words[1:], *after_dashes]
    else:
        command, typed_ranks = with_ranks(after_dashes)
        script = plain_script(after_dashes) or command
        if not ranks and typed_ranks is not None and typed_ranks > 1:
            ranks = str(typed_ranks)
    return run_script(
        script, arguments, ranks=ranks, steps=args.steps, in_json=args.json, page=args.html
    )


def _verify_parser() -> Parser:
    """Return the parser of `lockstep verify`."""
    parser = Parser(
        "verify",
        "Prove that topologies take the steps that one process takes: the same samples, loss,"
        " gradients and values, up to the order of summation, or in every bit with"
        " distributed.reproducible=true. If they do not, report the first difference and its cause,"
        " and exit with 1. CONFIG may be anybody's training script: SCRIPT.py [--nproc-per-node"
        " 1,2,4] [--steps N] [--json] [--html FILE] [-- ARGS …], where {n} in ARGS is the number of"
        " ranks; or a command as it is typed, as in lockstep verify --ranks 1,2 -- torchrun"
        " --nproc-per-node 2 train.py, whose number of ranks is replaced.",
        [
            "lockstep verify run.yaml --against ddp:2,fsdp:2",
            "lockstep verify train.py --nproc-per-node 1,2",
            "lockstep verify --ranks 1,2 -- accelerate launch train.py",
        ],
    )
    add_config(parser)
    text = (
        "ddp:2, fsdp:4, hybrid:2x2, pipeline:2*fsdp:2 … (default: ddp:2, fsdp:2 and the config's"
        " own strategy)"
    )
    parser.add_argument("--against", metavar="TOPOLOGY,…", help=text)
    text = "of a script: numbers of ranks, each compared with one process (default: 2)"
    parser.add_argument("--nproc-per-node", "--ranks", metavar="N,…", help=text)
    text = "how many steps are compared (default: 5, of a script 3)"
    parser.add_argument("--steps", metavar="N", type=int, help=text)
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, for programs"
    )
    text = "write the result as a page, too, with the first difference drawn through the model"
    parser.add_argument("--html", metavar="FILE", type=Path, help=text)
    return parser


def compare(argv: list[str]) -> int:
    """Run `lockstep compare A B [KEY=VALUE …]` or `lockstep compare A.py B.py [-- ARGS …]`."""
    parser = Parser(
        "compare",
        "Compare two programs that should be the same training: two configs, or two scripts or"
        " commands, each written as one word with its arguments. What makes them differ is named,"
        " and undoing it is tried. Exit with 1 if they differ. --paired: they are meant to differ;"
        " print the mean difference of their losses on the same samples and random numbers, and"
        " its standard error.",
        [
            "lockstep compare old.yaml new.yaml",
            'lockstep compare train.py "train.py --compile"',
            "lockstep compare --ranks 2 ddp.py fsdp.py -- --lr 1e-3",
            'lockstep compare --paired train.py "train.py --lr 2e-3"',
        ],
    )
    parser.add_argument("a", metavar="A", help="a config, a script or a command")
    parser.add_argument("b", metavar="B", help="another one, compared with it")
    text = "settings of both configs, KEY=VALUE; arguments of both scripts follow --"
    parser.add_argument("more", metavar="KEY=VALUE", nargs="*", default=[], help=text)
    text = "of scripts: the number of ranks of both (default: 1, or what a command names)"
    parser.add_argument("--ranks", metavar="N", type=int, help=text)
    text = "how many steps are compared (default: 5; with --paired 30)"
    parser.add_argument("--steps", metavar="N", type=int, help=text)
    text = "compare the losses of two trainings that are meant to differ"
    parser.add_argument("--paired", action="store_true", help=text)
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, for programs"
    )
    before_dashes, after_dashes = _split_at_dashes(argv)
    args = parser.parse(before_dashes)
    from lockstep.verify.compare_command import run

    return run(
        args.a,
        args.b,
        [*args.more, *after_dashes],
        ranks=args.ranks,
        steps=args.steps,
        paired=args.paired,
        in_json=args.json,
    )
