"""One function per verb, `argv -> exit code`.

It parses the arguments and calls the room that does the work.

Each verb imports what it needs, so that `--help` loads neither torch nor the schema.

Tests: tests/cli/test_cli.py, tests/cli/test_completion.py
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

from lockstep.cli.arguments import (
    FLAG,
    Parser,
    Subverbs,
    add_config,
    add_launch_options,
    add_torchrun_options,
    config_and_overrides,
    launch_options,
)
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.files.paths import bucket_url, local_path, run_directory
from lockstep.run_directory.run_files import printable


def init(argv: list[str]) -> int:
    """Run `lockstep init [DIR] [--script | --finetune FOLDER] [--data PATH]`."""
    parser = Parser(
        "init",
        "Write a starter project: a config, or a script, and data, which trains at once.",
        [
            "lockstep init first && cd first && lockstep train train.yaml",
            "lockstep init mine --script --data mine.csv",
            "lockstep init tuned --finetune FOLDER --data chat.jsonl",
        ],
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        default=Path("."),
        help="default: this folder",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--script", action="store_true", help="a Python script and a table, not a config and text"
    )
    text = "a config that trains this chat model of Hugging Face on conversations, by adapters"
    only.add_argument("--finetune", metavar="FOLDER", type=Path, help=text)
    text = (
        "your own: a text file or a folder of them; with --script a CSV file whose last column is"
        " the class; with --finetune conversations"
    )
    parser.add_argument("--data", metavar="PATH", type=Path, help=text)
    args = parser.parse(argv)
    from lockstep.cli import starter

    if args.finetune is not None:
        print(starter.finetuning(args.folder, model=args.finetune, data=args.data))
        return EXIT_DONE
    print(starter.project(args.folder, script=args.script, data=args.data))
    return EXIT_DONE


def new_model(argv: list[str]) -> int:
    """Run `lockstep new-model NAME`."""
    text = (
        "Write a language model of your own to change, a config that trains it, and a test that it"
        " takes the same steps on two ranks as in one process."
    )
    parser = Parser(
        "new-model", text, ["lockstep new-model my_model && lockstep train my_model.yaml"]
    )
    parser.add_argument(
        "name", metavar="NAME", help="my_model makes my_model.py with the class MyModel"
    )
    args = parser.parse(argv)
    from lockstep.cli import starter

    print(starter.model(args.name))
    return EXIT_DONE


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
    return launch_script(
        args.script,
        args.arguments,
        launch_options(args),
        kind="module" if args.module else "program" if args.no_python else "file",
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


_KEYS = ("words", "config", FLAG.rstrip(":"))
_CONFIG_VERBS: Subverbs = {
    "show": (
        "Print the config with all defaults, or draw its pipeline.",
        (*_KEYS, "schedule", "ranks"),
    ),
    "check": ("Check every key, and what the config names. Nothing is trained.", _KEYS),
    "schema": ("Print the JSON schema, with which editors complete keys.", ()),
    "list": ("List the configs that ship, to train or extend by name.", ()),
}


def config(argv: list[str]) -> int:
    """Run `lockstep config show|check|schema|list [CONFIG] [KEY=VALUE …]`."""
    text = "Show a config as it resolves, check it, print its schema, list those that ship."
    parser = Parser(
        "config", text, ["lockstep config check run.yaml training.max_steps=10"], _CONFIG_VERBS
    )
    parser.add_argument("verb", metavar="|".join(_CONFIG_VERBS))
    add_config(parser)
    parser.add_argument(
        "--schedule", action="store_true", help="show: draw the schedule of a pipeline"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="with --schedule (default: the product of the sizes)"
    )
    args = parser.parse(argv)
    if (args.schedule and args.verb != "show") or (args.ranks is not None and not args.schedule):
        raise UsageError(
            "a schedule is drawn by `show`",
            fix="lockstep config show CONFIG --schedule [--ranks N]",
        )
    path, overrides = config_and_overrides(args, required=args.schedule)
    if args.schedule:
        from lockstep.config import load_config
        from lockstep.parallel.pipeline.schedules import picture_of

        assert path is not None
        print(picture_of(load_config(path, overrides).step, args.ranks))
        return EXIT_DONE

    from lockstep.config import commands

    text = commands.run(args.verb, path, overrides)
    if args.verb == "check" and path is not None:
        from lockstep.config import load_config
        from lockstep.trainer import check_named

        check_named(load_config(path, overrides), str(path))
    print(text)
    return EXIT_DONE


_CHECKPOINT_VERBS: Subverbs = {
    "list": ("List a run's checkpoints: size, time, and damage.", ("path",)),
    "inspect": ("Show what one holds: parameters, shapes, steps.", ("path",)),
    "verify": ("Read every byte and compare the checksums.", ("path",)),
    "digest": ("Print the SHA-256 of the parameters, equal on any topology.", ("path",)),
    "export": ("Write the weights for other programs.", ("path", "output", "to")),
    "convert": ("Write a checkpoint in another format.", ("path", "output", "to")),
    "import": ("Make a checkpoint of another trainer's weights.", ("path", "output", "prefix")),
}


def checkpoint(argv: list[str]) -> int:
    """Run `lockstep checkpoint list|inspect|verify|digest|export|convert|import PATH`."""
    text = "Inspect and verify checkpoints, export weights from one or import them into one."
    examples = [
        "lockstep checkpoint export runs/run --output model.safetensors",
        "lockstep checkpoint export runs/run --to huggingface --output model",
    ]
    parser = Parser("checkpoint", text, examples, _CHECKPOINT_VERBS)
    parser.add_argument("verb", metavar="|".join(_CHECKPOINT_VERBS))
    text = (
        "a run directory, its checkpoints, or one of them; the URL of a bucket; a storage,"
        " package.module:Name, or a config that names one; import: another trainer's file or folder"
    )
    parser.add_argument("path", metavar="PATH|URL", help=text)
    text = "export, convert, import: the file or folder to write"
    parser.add_argument("--output", metavar="PATH", type=Path, help=text)
    parser.add_argument(
        "--to",
        metavar="FORM",
        help="convert: full, one file of whole tensors, or torch, for torch.load; export:"
        " safetensors, one file (the default), huggingface, a folder for transformers with adapters"
        " merged, or adapter, a folder for peft",
    )
    text = (
        "import: a prefix of names in the file that the model's names lack, such as model. in a"
        " LightningModule"
    )
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    args = parser.parse(argv)
    from lockstep.checkpoint import commands

    text = commands.run(args.verb, args.path, output=args.output, to=args.to, prefix=args.prefix)
    print(printable(text))  # names in it are those of a checkpoint, which may be a stranger's
    return EXIT_DONE


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


def data(argv: list[str]) -> int:
    """Run `lockstep data prepare …` or `lockstep data show CONFIG`."""
    if argv[:1] == ["show"]:
        return _show_data(argv[1:])
    from lockstep.data.prepare import prepare_command

    return prepare_command(argv)


def _show_data(argv: list[str]) -> int:
    """Run `lockstep data show CONFIG [KEY=VALUE …] [--samples N]`."""
    text = "Print samples of a config's training data as text, and which of their tokens train."
    parser = Parser("data show", text, ["lockstep data show chat.yaml --samples 1"])
    add_config(parser)
    parser.add_argument(
        "--samples", metavar="N", type=int, default=2, help="how many of the first (default: 2)"
    )
    args = parser.parse(argv)
    path, overrides = config_and_overrides(args)
    assert path is not None
    from lockstep.data import show

    print(show.show(path, overrides, args.samples))
    return EXIT_DONE


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


def sample(argv: list[str]) -> int:
    """Run `lockstep sample RUN_DIR [--prompt TEXT] [--tokens N] [--temperature T] [--seed N]`."""
    text = "Generate text with a run's language model, from its newest whole checkpoint."
    parser = Parser("sample", text, ['lockstep sample runs/run --prompt "The " --tokens 60'])
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("--prompt", metavar="TEXT", default="The ", help="the text to continue")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=200,
        help="number of tokens to add (default: 200)",
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    args = parser.parse(argv)
    from lockstep.evaluate.sample import sample as write

    print(
        write(
            args.run,
            prompt=args.prompt,
            num_tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
        )
    )
    return EXIT_DONE


def evaluate(argv: list[str]) -> int:
    """Run `lockstep evaluate RUN [--data PATH] [--metrics NAME,…] [--step N] [--prompt TEXT]`."""
    parser = _evaluate_parser()
    args = parser.parse(argv)
    if not args.prompt:
        parser.refuse("RUN", "tokens", "temperature", fix="add --prompt TEXT, or leave it out")
    if not args.tasks:
        parser.refuse("RUN", "limit", fix="add --tasks NAME, or leave it out")
    others = [word for word in args.words if "=" not in word]
    if others:
        raise UsageError(
            f"one RUN is expected, and {others[0]} is another",
            fix="a key is overridden as KEY=VALUE, without spaces",
        )
    from lockstep.evaluate.subject import Asked
    from lockstep.launch.evaluate import Wanted
    from lockstep.launch.evaluate import evaluate as start

    asked = Asked(args.run, args.config, args.words, args.data, args.step)
    wanted = Wanted(
        metrics=_names(args.metrics),
        prompts=args.prompt,
        num_tokens=args.tokens,
        temperature=args.temperature,
        tasks=_names(args.tasks),
        limit=args.limit,
        in_json=args.json,
    )
    output = run_directory(args.output_dir or Path("runs", f"evaluate-{args.run.stem}"))
    return start(asked, wanted, launch_options(args), output_dir=output, argv=argv)


def _evaluate_parser() -> Parser:
    """Return the parser of `lockstep evaluate`."""
    text = (
        "Evaluate a run, a checkpoint, a file of weights or a folder of Hugging Face: the loss, own"
        " metrics, texts. The numbers are the same on any number of ranks."
    )
    examples = [
        "lockstep evaluate runs/run     # on its validation data",
        "lockstep evaluate runs/run --data test.jsonl --nproc-per-node 2",
        'lockstep evaluate runs/run --step 100 --prompt "The " --tokens 60',
        "lockstep evaluate model.safetensors --config run.yaml",
    ]
    parser = Parser("evaluate", text, examples)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run directory, a checkpoint, a file or a folder")
    add("words", metavar="KEY=VALUE", nargs="*", default=[], help="keys of its config to override")
    add("--config", metavar="FILE", type=Path, help="the config of a file of weights, or a folder")
    text = "other data: what the run's data set takes as a path, or a config with others"
    add("--data", metavar="PATH", type=Path, help=text)
    text = "functions (outputs, targets) -> values, or classes as torchmetrics has them"
    add("--metrics", metavar="package.module:Name,…", default="", help=text)
    add("--step", metavar="N", type=int, help="the run's checkpoint of that step, not the newest")
    text = "a text for a language model to continue; may be given several times"
    add("--prompt", metavar="TEXT", action="append", default=[], help=text)
    add("--tokens", metavar="N", type=int, default=60, help="added to a prompt (default: 60)")
    text = "of what is added (default: 0, always the likeliest token)"
    add("--temperature", metavar="T", type=float, default=0.0, help=text)
    text = "tasks of lm-evaluation-harness (pip install lm_eval), or paths of descriptions"
    add("--tasks", metavar="NAME,…", default="", help=text)
    add("--limit", metavar="N", type=int, help="with --tasks: requests of each (default: all)")
    add("--json", action="store_true", help="print one JSON object, for programs")
    text = "for the ranks' logs (default: runs/evaluate-<RUN's name>)"
    add("--output-dir", metavar="DIR", type=Path, help=text)
    add_launch_options(parser)
    return parser


def _names(text: str) -> list[str]:
    """Return the names in a list that is written as `a,b`."""
    return [name.strip() for name in text.split(",") if name.strip()]


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


def submit(argv: list[str]) -> int:
    """Run `lockstep submit slurm|kubernetes|ray CONFIG [KEY=VALUE …] [--dry-run]`."""
    from lockstep.submit import SCHEDULERS, add_options, run

    if argv[:1] in (["-h"], ["--help"]):
        description = "Make a job of a run; `lockstep submit slurm --help` lists the options."
        example = "lockstep submit slurm run.yaml --nproc-per-node 8 --nnodes 2 --dry-run"
        overview = Parser("submit", description, [example])
        overview.add_argument("scheduler", metavar="slurm|kubernetes|ray", help="the scheduler")
        overview.parse(argv)
    if not argv or argv[0] not in SCHEDULERS:
        fix = "lockstep submit slurm|kubernetes|ray CONFIG [KEY=VALUE …] [--dry-run]"
        what = f"there is no scheduler {argv[0]}" if argv else "no scheduler is given"
        raise UsageError(what, fix=fix)
    parser = Parser(f"submit {argv[0]}", "Make a job of a run, and submit it to the scheduler.")
    add_config(parser)
    add_launch_options(parser)
    parser.add_argument(
        "--output-dir",
        metavar="DIR|URL",
        help="the run directory, shared by all machines, or a bucket: s3://BUCKET/PREFIX",
    )
    add_options(parser, argv[0])
    args = parser.parse(argv[1:])
    parser.refuse(
        "CONFIG",
        "node_rank",
        "rdzv_id",
        "rdzv_endpoint",
        "rdzv_conf",
        "master_addr",
        "master_port",
        "local_rank",
        "standalone",
        "rdzv_backend",
        fix="leave it out: the job's machines find each other by themselves",
    )
    path, overrides = config_and_overrides(args)
    assert path is not None
    print(run(argv[0], args, path, overrides, launch_options(args, at_once=False)))
    return EXIT_DONE


def jobs(argv: list[str]) -> int:
    """Run `lockstep jobs status|logs|cancel JOB`."""
    from lockstep.submit import jobs as submitted
    from lockstep.submit.ray_job import add_address

    subverbs = {
        name: (text, ("job", "namespace", "address")) for name, text in submitted.VERBS.items()
    }
    text = "Ask for a job that was submitted, or end it."
    parser = Parser("jobs", text, ["lockstep jobs status slurm:4711"], subverbs)
    parser.add_argument("verb", metavar="|".join(subverbs))
    parser.add_argument(
        "job", metavar="JOB", help="slurm:NUMBER, kubernetes:job|jobset|trainjob/NAME, ray:ID"
    )
    parser.add_argument("--namespace", help="of Kubernetes; default: kubectl's own")
    add_address(parser)
    args = parser.parse(argv)
    print(submitted.run(args.verb, args.job, args))
    return EXIT_DONE


def completion(argv: list[str]) -> int:
    """Run `lockstep completion bash|zsh`."""
    text = "Print a script with which the shell completes verbs, options and files."
    parser = Parser("completion", text, ["source <(lockstep completion bash)"])
    parser.add_argument("shell", metavar="bash|zsh")
    args = parser.parse(argv)
    from lockstep.cli.starter import completion_script

    print(completion_script(args.shell, VERBS), end="")
    return EXIT_DONE


Verb = tuple[Callable[[list[str]], int], str]
VERBS: dict[str, Verb] = {
    "init": (init, "write a starter project that trains at once"),
    "new-model": (new_model, "write a model of your own, with its config and its test of parity"),
    "train": (train, "train what a config says, on one rank or many"),
    "launch": (launch, "run any script of yours with the same launcher"),
    "verify": (verify, "prove that topologies take the steps that one process takes"),
    "compare": (compare, "prove that two programs train the same, or find why not"),
    "plan": (plan, "predict the memory and time of a run, and which layout is best"),
    "doctor": (doctor, "check machines, network and ranks before a run"),
    "warm": (warm, "leave a prepared process, so that later commands start at once"),
    "submit": (submit, "submit a run as a job of Slurm, Kubernetes or Ray"),
    "jobs": (jobs, "show, read or end jobs that were submitted"),
    "config": (config, "show, check or list configs"),
    "checkpoint": (
        checkpoint,
        "list, inspect, verify, digest, export, convert, import checkpoints",
    ),
    "evaluate": (evaluate, "evaluate weights on data: losses, metrics, texts"),
    "sample": (sample, "generate text with a trained language model"),
    "report": (report, "draw what runs did, and advise what to do next"),
    "top": (top, "show what the ranks of a running run do, again each second"),
    "bench": (bench, "measure how a config scales over ranks"),
    "data": (data, "prepare data, and show what of them is trained"),
    "completion": (completion, "print a script that lets bash or zsh complete"),
}
