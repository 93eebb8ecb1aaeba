"""The command line: finds the verb, reads its arguments, and hands over at once.

A verb is a function `argv -> exit code` in `VERBS`; its imports are its own, so that `--help` loads neither torch nor
the schema. Whatever goes wrong for a user's reason is one message on stderr; LOCKSTEP_TRACEBACK=1 shows the traceback.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lockstep.errors import EXIT_DONE, LockstepError, UsageError

if TYPE_CHECKING:
    from lockstep.launch.local import LaunchOptions

_DESCRIPTION = "Distributed training for PyTorch in which every strategy takes the same step."
_EPILOG = "Exit codes: 0 done; 1 the run failed; 2 the command or config is wrong; 75 preempted and saved."
_FLAG = "flag:"  # marks the short names of keys among the parsed arguments
_LEGACY = ("--local-rank",)  # the legacy launcher adds it; the environment says the same


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        the exit code: 0 done; 1 the run failed; 2 the command or config is wrong; 75 preempted and saved.
    """
    arguments = without_legacy(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's own `package.module:Name`, as under `python -m lockstep`
    try:
        return _dispatch(arguments)
    except LockstepError as error:
        from lockstep.launch.worker import first_to_fail, print_error

        if first_to_fail():  # under another's launcher every rank is told the same
            print_error(error, traceback.format_exc())
        return error.exit_code


def _dispatch(argv: list[str]) -> int:
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        print(_overview())
        return EXIT_DONE
    if verb == "--version":
        from importlib.metadata import version

        print(f"lockstep {version('lockstep-train')}")
        return EXIT_DONE
    if verb not in VERBS:
        raise UsageError(f"there is no verb {verb!r}", fix=f"one of {', '.join(VERBS)}; `lockstep --help` says more")
    return VERBS[verb][0](argv[1:])


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
    return f"usage: lockstep VERB …\n\n{_DESCRIPTION}\n\n{verbs}\n\n`lockstep VERB --help` says more.\n{_EPILOG}"


# ---- verbs ----


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
    parser = Parser("launch", "Run any script of yours on several ranks.")
    add_launch_options(parser)
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

    output = given.output_dir or Path("runs", Path(given.script).stem)
    return launch_script(
        given.script, given.arguments, launch_options(given), module=given.module, logs=Path(output, "logs")
    )


def config(argv: list[str]) -> int:
    """lockstep config show|check|schema|list [CONFIG] [KEY=VALUE …]"""
    parser = Parser("config", "Show a config as it resolves, check it, print its schema, list those that ship.")
    parser.add_argument("verb", metavar="show|check|schema|list")
    add_config(parser)
    parser.add_argument("--schedule", action="store_true", help="show: draw the schedule of a pipeline")
    parser.add_argument("--ranks", metavar="N", type=int, help="with --schedule (default: what the sizes multiply to)")
    given = parser.parse(argv)
    path, overrides = config_and_overrides(given, required=given.schedule)
    if given.schedule:
        from lockstep.config import load_config
        from lockstep.parallel.pipeline.picture import picture_of

        assert path is not None
        print(picture_of(load_config(path, overrides), given.ranks))
        return EXIT_DONE

    from lockstep.config import commands

    print(commands.run(given.verb, path, overrides))
    return EXIT_DONE


def checkpoint(argv: list[str]) -> int:
    """lockstep checkpoint list|inspect|verify|digest|export|convert PATH"""
    parser = Parser("checkpoint", "Look at checkpoints, prove them, take weights out of them.")
    parser.add_argument("verb", metavar="list|inspect|verify|digest|export|convert")
    parser.add_argument("path", metavar="PATH", type=Path, help="a run directory, its checkpoints, or one of them")
    parser.add_argument("--output", metavar="PATH", type=Path, help="export, convert: the file or folder to write")
    parser.add_argument("--to", metavar="full|torch", help="convert: one file of whole tensors, or torch.load's format")
    given = parser.parse(argv)

    from lockstep.checkpoint import commands

    print(commands.run(given.verb, given.path, output=given.output, to=given.to))
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


def plan(argv: list[str]) -> int:
    """lockstep plan CONFIG [KEY=VALUE …] | --params N --seq-length N --batch-size N"""
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
    parser.add_argument(
        "--params", metavar="N", type=float, help="without a config: a transformer of so many parameters"
    )
    parser.add_argument("--seq-length", metavar="N", type=int, default=2048, help="with --params (default: 2048)")
    parser.add_argument("--headroom", metavar="SHARE", type=float, default=0.0, help="with --params: 0.5 adds half")
    given = parser.parse(argv)
    path, overrides = config_and_overrides(given, required=given.params is None)

    from lockstep.plan import command

    asked = command.Asked(
        given.gpus, given.gpu_type, given.interconnect, given.gpus_per_node, given.find_batch_size, given.json,
        given.write, given.chart, given.price,
    )  # fmt: skip
    if given.params is not None:
        size = int(getattr(given, f"{_FLAG}batch_size", None) or 1)
        print(command.plan_by_size(given.params, given.seq_length, size, given.headroom, asked))
    else:
        from lockstep.config import load_config

        assert path is not None
        config = load_config(path, overrides)
        if given.stages is not None:
            from lockstep.plan import segments

            print(segments.command(config, given.stages))
        else:
            print(command.plan(config, asked))
    return EXIT_DONE


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

    from lockstep.launch.doctor import Request
    from lockstep.launch.doctor import doctor as examine

    request = Request(given.output_dir, None if path is None else str(path), tuple(overrides), given.json)
    return examine(request, launch_options(given))


def submit(argv: list[str]) -> int:
    """lockstep submit slurm|kubernetes CONFIG [KEY=VALUE …] [--dry-run]"""
    from lockstep.submit import command

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


Verb = tuple[Callable[[list[str]], int], str]
VERBS: dict[str, Verb] = {
    "train": (train, "train what a config says, on one rank or many"),
    "launch": (launch, "run any script of yours with the same launcher"),
    "verify": (verify, "prove that topologies take the steps that one process takes"),
    "plan": (plan, "say what a run will need, and which layout is best"),
    "doctor": (doctor, "look at machines, network and ranks before a run"),
    "submit": (submit, "make a job of Slurm or Kubernetes of a run"),
    "config": (config, "show, check or list configs"),
    "checkpoint": (checkpoint, "list, inspect, verify, digest, export or convert checkpoints"),
    "sample": (sample, "let a trained language model write"),
    "report": (report, "draw what runs did, and say what to do next"),
    "bench": (bench, "measure how a config scales over ranks"),
    "data": (data, "prepare data"),
}


# ---- arguments that verbs share ----


class Parser(argparse.ArgumentParser):
    """argparse with one message instead of a usage wall, options and positionals in any order."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(f"lockstep {verb}", description=description, allow_abbrev=False, epilog=_EPILOG)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=f"the command {self.prog!r}", fix=f"`{self.prog} --help` says what there is")

    def parse(self, argv: list[str], *, until_script: bool = False) -> argparse.Namespace:
        """Read the arguments; underscores in flags equal dashes.

        Args:
            until_script: what follows the first positional belongs to a script, and is left as it is.
        """
        dashed = self._dashed(argv, until_script)
        given, unknown = self.parse_known_args(dashed) if until_script else self.parse_known_intermixed_args(dashed)
        if unknown:
            self._refuse(argv[dashed.index(unknown[0])])
        return given

    def _dashed(self, argv: list[str], until_script: bool) -> list[str]:
        takes_value = {name for action in self._actions for name in action.option_strings if action.nargs != 0}
        result: list[str] = []
        for index, token in enumerate(argv):
            value_of_flag = bool(result) and result[-1] in takes_value
            if until_script and not token.startswith("-") and not value_of_flag:
                return result + argv[index:]
            name, equals, value = token.partition("=")
            result.append(name.replace("_", "-") + equals + value if token.startswith("--") else token)
        return result

    def _refuse(self, token: str) -> NoReturn:
        from lockstep.config.names import advice_for_flag

        advice = advice_for_flag(token) if token.startswith("-") else None
        where = f"the command {self.prog!r}"
        raise UsageError(f"there is no argument {token}", where=where, fix=advice or self._nearest(token))

    def _nearest(self, token: str) -> str:
        from difflib import get_close_matches

        near = get_close_matches(token.partition("=")[0], self._option_string_actions, n=1)
        return f"write {near[0]}" if near else f"`{self.prog} --help` says what there is"


def add_config(parser: Parser) -> None:
    parser.add_argument("words", metavar="CONFIG KEY=VALUE", nargs="*", help="a YAML file, and keys to override")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the same as CONFIG")
    from lockstep.config.flags import FLAGS

    group = parser.add_argument_group("short names of keys")
    for flag in FLAGS:
        text = f"{flag.help} ({flag.key})"
        if flag.switch:
            group.add_argument(flag.option, dest=_FLAG + flag.name, action="store_const", const="true", help=text)
        else:
            group.add_argument(flag.option, dest=_FLAG + flag.name, metavar=flag.metavar, help=text)


def config_and_overrides(given: argparse.Namespace, *, required: bool = True) -> tuple[Path | None, list[str]]:
    """The config file, and the overrides: short names first, then KEY=VALUE in the order given."""
    from lockstep.config.flags import apply_flags, as_overrides

    said = {name.removeprefix(_FLAG): value for name, value in vars(given).items() if name.startswith(_FLAG)}
    short = as_overrides(apply_flags({name: value for name, value in said.items() if value is not None}))
    overrides = [word for word in given.words if re.match(r"[A-Za-z_][\w.]*=", word)]
    files = [Path(word) for word in given.words if word not in overrides]
    files += [given.config] if given.config is not None else []
    if len(files) > 1:
        raise UsageError(
            f"one config, please, not {len(files)}: {', '.join(map(str, files))}",
            fix="a key is overridden as KEY=VALUE, without spaces; files are composed with `extends:`",
        )
    if not files and required:
        raise UsageError(
            "which config?", fix="lockstep train CONFIG.yaml; `lockstep config list` names those that ship"
        )
    return (files[0] if files else None), short + overrides


def add_launch_options(parser: Parser) -> None:
    group = parser.add_argument_group("processes and machines, by torchrun's names")
    group.add_argument(
        "--nproc-per-node", metavar="N|auto", help="ranks on this machine (default: all visible GPUs, else 1)"
    )
    group.add_argument("--nnodes", metavar="N|MIN:MAX", default="1", help="machines (default: 1)")
    group.add_argument("--node-rank", metavar="N", type=int, help="this machine's number, from 0")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where machines meet, when they need no number")
    group.add_argument("--rdzv-id", metavar="NAME", help="tells jobs that meet at one endpoint apart")
    group.add_argument("--rdzv-backend", choices=("c10d", "static"), help=argparse.SUPPRESS)
    group.add_argument("--rdzv-conf", metavar="KEY=VALUE,…", default="", help="for the meeting: timeout=900, is_host=1")
    group.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--master-addr", metavar="HOST", help="the machine with --node-rank 0")
    group.add_argument("--master-port", metavar="PORT", type=int, help="a free port there (default: 29500)")
    group.add_argument(
        "--max-restarts", metavar="N", type=int, default=0, help="start the ranks anew so often (default: 0)"
    )
    group.add_argument("--local-rank", help=argparse.SUPPRESS)


def launch_options(given: argparse.Namespace, *, at_once: bool = True) -> "LaunchOptions":
    """What was said about processes and machines; checked as a whole where ranks are to be started at once."""
    from lockstep.launch.local import LaunchOptions

    conf = dict(pair.partition("=")[::2] for pair in given.rdzv_conf.split(",") if pair)
    options = LaunchOptions(
        nproc_per_node=given.nproc_per_node,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        rdzv_endpoint=given.rdzv_endpoint,
        rdzv_id=given.rdzv_id,
        rdzv_conf=conf,
        master_addr=given.master_addr,
        master_port=given.master_port,
        max_restarts=given.max_restarts,
    )
    if at_once:
        options.check()
    return options


def without_legacy(argv: Sequence[str]) -> list[str]:
    """Without `--local-rank=N` and `--local_rank N` before the verb, where `torch.distributed.launch` puts it."""
    rest = list(argv)
    while rest and rest[0].partition("=")[0].replace("_", "-") in _LEGACY:
        rest = rest[1 if "=" in rest[0] else 2 :]
    return rest
