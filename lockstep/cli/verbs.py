"""The verbs: each is a function `argv -> exit code`, which reads its arguments and hands over at once.

Imports are a verb's own, so that `--help` loads neither torch nor the schema.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from lockstep.cli.arguments import Parser, add_config, add_launch_options, config_and_overrides, launch_options
from lockstep.cli.planning import plan
from lockstep.errors import EXIT_DONE, UsageError


def train(argv: list[str]) -> int:
    """lockstep train CONFIG [KEY=VALUE …]"""
    parser = Parser("train", "Train what CONFIG says. KEY=VALUE overrides a key of it: training.max_steps=10.")
    add_config(parser)
    add_launch_options(parser)
    parser.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="the run directory (default: runs/<CONFIG's name>)"
    )
    parser.add_argument("--resume", metavar="auto|never|PATH", help="where to go on from (default: checkpoint.resume)")
    given = parser.parse(argv)
    path, overrides = config_and_overrides(given)
    assert path is not None

    from lockstep.launch.train import train as start

    return start(
        path,
        overrides,
        launch_options(given),
        output_dir=given.output_dir or Path("runs", path.stem),
        resume=given.resume,
        argv=argv,
    )


def launch(argv: list[str]) -> int:
    """lockstep launch [options] SCRIPT.py [ARGS …]"""
    from lockstep.cli.torchrun import add_torchrun_options, console_output

    parser = Parser("launch", "Run any script of yours on several ranks.")
    add_launch_options(parser)
    add_torchrun_options(parser)
    parser.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="logs go to DIR/logs (default: runs/<SCRIPT's name>)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("script", metavar="SCRIPT", nargs="?")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    given = parser.parse(argv, until_script=True)
    if given.script is None:
        raise UsageError("which script?", fix="lockstep launch [options] SCRIPT.py [ARGS …]")

    from lockstep.launch.train import launch_script

    if given.module and given.no_python:
        raise UsageError("a module is run by Python", where="-m and --no-python", fix="leave one of them out")
    output = given.output_dir or Path("runs", Path(given.script).stem)
    return launch_script(
        given.script,
        given.arguments,
        launch_options(given),
        kind="module" if given.module else "program" if given.no_python else "file",
        logs=Path(given.log_dir or output / "logs"),
        output=console_output(given),
    )


def config(argv: list[str]) -> int:
    """lockstep config show|check|schema|list [CONFIG] [KEY=VALUE …]"""
    parser = Parser("config", "Show a config as it resolves, check it, print its schema, list those that ship.")
    parser.add_argument("verb", metavar="show|check|schema|list")
    add_config(parser)
    parser.add_argument("--schedule", action="store_true", help="show: draw the schedule of a pipeline")
    parser.add_argument("--ranks", metavar="N", type=int, help="with --schedule (default: what the sizes multiply to)")
    given = parser.parse(argv)
    if (given.schedule and given.verb != "show") or (given.ranks is not None and not given.schedule):
        raise UsageError("a schedule is drawn by `show`", fix="lockstep config show CONFIG --schedule [--ranks N]")
    path, overrides = config_and_overrides(given, required=given.schedule)
    if given.schedule:
        from lockstep.config import load_config
        from lockstep.parallel.pipeline.picture import picture_of

        assert path is not None
        print(picture_of(load_config(path, overrides), given.ranks))
        return EXIT_DONE

    from lockstep.config import commands

    said = commands.run(given.verb, path, overrides)
    if given.verb == "check" and path is not None:
        from lockstep.config import load_config
        from lockstep.trainer.named import check_named

        check_named(load_config(path, overrides), str(path))
    print(said)
    return EXIT_DONE


def checkpoint(argv: list[str]) -> int:
    """lockstep checkpoint list|inspect|verify|digest|export|convert|import PATH"""
    parser = Parser("checkpoint", "Look at checkpoints, prove them, take weights out of them or into one.")
    parser.add_argument("verb", metavar="list|inspect|verify|digest|export|convert|import")
    text = "a run directory, its checkpoints, or one of them; import: another trainer's file or folder"
    parser.add_argument("path", metavar="PATH", type=Path, help=text)
    text = "export, convert, import: the file or folder to write"
    parser.add_argument("--output", metavar="PATH", type=Path, help=text)
    parser.add_argument("--to", metavar="full|torch", help="convert: one file of whole tensors, or torch.load's format")
    text = "import: what names there begin with and the model's do not, as model. in a LightningModule"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    given = parser.parse(argv)

    from lockstep.checkpoint import commands

    print(commands.run(given.verb, given.path, output=given.output, to=given.to, prefix=given.prefix))
    return EXIT_DONE


def report(argv: list[str]) -> int:
    """lockstep report RUN [RUN2 …] [-o FILE] [--live]"""
    parser = Parser("report", "What runs did and what to do next, as one HTML file; also of a run that crashed.")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories; several are compared")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: report.html in the first RUN")
    parser.add_argument("--live", action="store_true", help="serve the page on loopback instead, following the run")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="with --live (default: any free one)")
    given = parser.parse(argv)

    from lockstep.report import command

    return command.run(given.runs, output=given.output, live=given.live, port=given.port)


def bench(argv: list[str]) -> int:
    """lockstep bench scaling CONFIG --ranks 1,2,4"""
    parser = Parser("bench", "Weak and strong scaling of a config on this machine, measured against the ideal.")
    parser.add_argument("study", metavar="scaling")
    add_config(parser)
    parser.add_argument("--ranks", metavar="N,N,…", default="1,2,4", help="numbers of ranks (default: 1,2,4)")
    text = "ranks that sleep instead of computing, measured beside (default: none)"
    parser.add_argument("--sleeping", metavar="N,N,…", default="", help=text)
    parser.add_argument("--steps", metavar="N", type=int, default=30, help="steps of each run (default: 30)")
    parser.add_argument("-o", "--output", metavar="NAME", type=Path, default=Path("scaling"), help="NAME.md, NAME.html")
    given = parser.parse(argv)
    path, overrides = config_and_overrides(given)
    assert path is not None

    from lockstep.report import command

    return command.bench(
        given.study, path, overrides, ranks=given.ranks, sleeping=given.sleeping, steps=given.steps, output=given.output
    )


def data(argv: list[str]) -> int:
    """lockstep data prepare …"""
    from lockstep.data import prepare

    return prepare.run(argv)


def verify(argv: list[str]) -> int:
    """lockstep verify CONFIG [KEY=VALUE …] [--against TOPOLOGY,…] [--steps N] [--json]"""
    parser = Parser(
        "verify",
        "Prove that topologies take the steps that one process takes: the same samples, loss, gradients and values, "
        "up to the order of summation, or in every bit with distributed.reproducible=true. Where they do not, say "
        "what differs first, and why. Exits with 1 then.",
    )
    add_config(parser)
    parser.add_argument(
        "--against", metavar="TOPOLOGY,…",
        help="ddp:2, fsdp:4, hybrid:2x2, pipeline:2*fsdp:2 … (default: ddp:2, fsdp:2 and the config's own strategy)",
    )  # fmt: skip
    parser.add_argument("--steps", metavar="N", type=int, help="how many steps are compared (default: 5)")
    parser.add_argument("--json", action="store_true", help="the result for programs")
    given = parser.parse(argv)
    path, overrides = config_and_overrides(given)
    assert path is not None

    from lockstep.verify import command

    return command.run(path, overrides, against=given.against, steps=given.steps, in_json=given.json)


def sample(argv: list[str]) -> int:
    """lockstep sample RUN_DIR [--prompt TEXT] [--tokens N] [--temperature T] [--seed N]"""
    parser = Parser("sample", "Let the language model of a run write, from its newest whole checkpoint.")
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("--prompt", metavar="TEXT", default="The ", help="what it continues")
    parser.add_argument("--tokens", metavar="N", type=int, default=200, help="how many tokens it adds (default: 200)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.8, help="0: the likeliest token, always")
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    given = parser.parse(argv)

    from lockstep.sample import sample as write

    print(
        write(given.run, prompt=given.prompt, num_tokens=given.tokens, temperature=given.temperature, seed=given.seed)
    )
    return EXIT_DONE


def doctor(argv: list[str]) -> int:
    """lockstep doctor [CONFIG] [launch options] [--json]"""
    parser = Parser("doctor", "Look at machines, network and ranks before a run: ✓ good, ⚠ runs but, ✗ will not work.")
    add_config(parser)
    add_launch_options(parser)
    parser.add_argument("--output-dir", metavar="DIR", default="runs", help="where runs write (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    given = parser.parse(argv)
    path, overrides = config_and_overrides(given, required=False)

    from lockstep.launch.doctor import DoctorRequest
    from lockstep.launch.doctor import doctor as examine

    request = DoctorRequest(given.output_dir, None if path is None else str(path), tuple(overrides), given.json)
    return examine(request, launch_options(given))


def submit(argv: list[str]) -> int:
    """lockstep submit slurm|kubernetes CONFIG [KEY=VALUE …] [--dry-run]"""
    from lockstep.submit import command

    if argv[:1] in (["-h"], ["--help"]):
        overview = Parser("submit", "Make a job of a run; `lockstep submit slurm --help` says more.")
        overview.add_argument("scheduler", metavar="slurm|kubernetes", help="to which it is handed")
        overview.parse(argv)
    if not argv or argv[0] not in command.SCHEDULERS:
        raise UsageError("to which scheduler?", fix="lockstep submit slurm|kubernetes CONFIG [KEY=VALUE …] [--dry-run]")
    parser = Parser(f"submit {argv[0]}", "Make a job of a run, and hand it to the scheduler.")
    add_config(parser)
    add_launch_options(parser)
    parser.add_argument("--output-dir", metavar="DIR", type=Path, help="the run directory, shared by all machines")
    command.add_options(parser, argv[0])
    given = parser.parse(argv[1:])
    path, overrides = config_and_overrides(given)
    assert path is not None
    print(command.run(argv[0], given, path, overrides, launch_options(given, at_once=False)))
    return EXIT_DONE


def completion(argv: list[str]) -> int:
    """lockstep completion bash|zsh"""
    parser = Parser("completion", "Print a script that lets the shell complete: source <(lockstep completion bash).")
    parser.add_argument("shell", metavar="bash|zsh")
    given = parser.parse(argv)

    from lockstep.cli.completion import script

    print(script(given.shell, VERBS), end="")
    return EXIT_DONE


Verb = tuple[Callable[[list[str]], int], str]
VERBS: dict[str, Verb] = {
    "train": (train, "train what a config says, on one rank or many"),
    "launch": (launch, "run any script of yours with the same launcher"),
    "verify": (verify, "prove that topologies take the steps that one process takes"),
    "plan": (plan, "say what a run will need, and which layout is best"),
    "doctor": (doctor, "look at machines, network and ranks before a run"),
    "submit": (submit, "make a job of Slurm or Kubernetes of a run"),
    "config": (config, "show, check or list configs"),
    "checkpoint": (checkpoint, "list, inspect, verify, digest, export, convert or import checkpoints"),
    "sample": (sample, "let a trained language model write"),
    "report": (report, "draw what runs did, and say what to do next"),
    "bench": (bench, "measure how a config scales over ranks"),
    "data": (data, "prepare data"),
    "completion": (completion, "print a script that lets bash or zsh complete"),
}
