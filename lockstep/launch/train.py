"""What `lockstep train` and `lockstep launch` do: be a worker, start ranks, or run here.

A config that is wrong is refused before any process is started.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.launch.local import Job, launch
from lockstep.launch.options import LaunchOptions, count_gpus, how_many
from lockstep.launch.script import run_script
from lockstep.launch.streams import Shown
from lockstep.launch.worker import environment_with, run_as_worker
from lockstep.records import RunDirectory
from lockstep.rules import refuse
from lockstep.run_lock import require_free
from lockstep.strategy import AUTO, resolve, strategy_named

if TYPE_CHECKING:
    from lockstep.config import Config

_RANK_0_OF_1 = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # the system picks; there is nobody else to tell
}


def train(
    path: Path,
    overrides: Sequence[str],
    options: LaunchOptions,
    *,
    output_dir: Path,
    resume: str | None,
    argv: Sequence[str],
) -> int:
    """`lockstep train`.

    Args:
        resume: "auto", "never" or a path; None: what the config says.
        argv: the arguments after `train`, which workers are started with.

    Returns:
        the exit code.
    """
    from lockstep.config import load_config

    run = RunDirectory(output_dir)

    def work() -> int:
        config = load_config(path, overrides)
        if config.distributed.strategy == AUTO:
            config = import_module("lockstep.plan.auto").resolve(config)
        chosen = _resume_from(run, resume or config.checkpoint.resume)
        _compare_ranks(config)
        code: int = import_module("lockstep.trainer").run(config, output_dir=output_dir, resume=chosen)
        return code

    if is_rank(options):
        return run_as_worker(work, logs=run.logs)
    config = load_config(path, overrides)
    processes, reason = _processes(config, options)
    _refuse_layout(config, processes, options)
    if not options.several_nodes:
        require_free(run.path)
    run.create()
    _announce(f"strategy {config.distributed.strategy}, {_counted(processes, options)} ({reason})")
    if in_this_process(processes, options):
        return run_as_worker(work, logs=run.logs, launched=False)
    job = Job(("-m", "lockstep", "train", *argv), run.logs, _environment(config), _hang(config))
    return launch(job, options, processes)


def launch_script(
    script: str, arguments: Sequence[str], options: LaunchOptions, *, kind: str, logs: Path, shown: Shown
) -> int:
    """`lockstep launch`.

    Args:
        script: a file, a module's name or a program, as `kind` (`file`, `module`, `program`) says.
        logs: where every rank's output goes.
        shown: what of it the console shows.
    """
    shown.check()
    if is_rank(options):
        raise UsageError(
            "`lockstep launch` was itself started by a launcher, as one of its ranks",
            where="the environment: it says which rank this is",
            fix=f"start the script itself: python {script}; or, with srun or mpirun starting one process a machine,"
            " say --nnodes and --nproc-per-node",
        )
    if kind == "file" and not Path(script).is_file():
        raise UsageError(f"there is no file {script}", fix="lockstep launch [options] SCRIPT.py [ARGS …]")
    processes, reason = how_many(options)
    _announce(f"{script}: {_counted(processes, options)} ({reason})")
    if in_this_process(processes, options):
        with environment_with(_RANK_0_OF_1):
            return run_as_worker(lambda: run_script(script, arguments, kind=kind), logs=logs, launched=False)
    started = ("-m", "lockstep.launch.script", str(logs), kind, script, *arguments)
    return launch(Job(started, logs, shown.environment()), options, processes)


def _compare_ranks(config: "Config") -> None:
    """What doctor finds at no cost, in every run of several ranks."""
    if rank_facts().world_size == 1:
        return
    from lockstep import cluster
    from lockstep.diagnose.doctor import check_in_run, names_in

    cluster.setup(config.distributed)
    for line in check_in_run(config.to_yaml(), names_in(config)):
        _announce(str(line))


def is_rank(options: LaunchOptions) -> bool:
    """Whether this process is a rank itself.

    srun and mpirun start ranks, or one launcher a machine: options that only a launcher needs tell which.
    """
    starts_ranks = options.nproc_per_node is not None or options.several_nodes
    if starts_ranks and ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        return False  # a job script exports one of them; the ranks that are started get both
    launcher = rank_facts().launcher
    return launcher == "torchrun" or (launcher != "none" and not starts_ranks)


def _processes(config: "Config", options: LaunchOptions) -> tuple[int, str]:
    distributed = config.distributed
    return how_many(options, use_gpus=distributed.device != "cpu", alone=_for_one_process(distributed.strategy))


def _for_one_process(strategy: str) -> str | None:
    return None if strategy == AUTO else strategy_named(strategy).one_process or None


def _refuse_layout(config: "Config", processes: int, options: LaunchOptions) -> None:
    """Refuse what these ranks and devices can't follow, before one is started.

    Raises:
        UsageError: sizes that do not multiply (with the equation), or keys that contradict the ranks.
    """
    from lockstep.config.checks import contradictions, require_equation

    no_gpu = config.distributed.device == "auto" and not count_gpus()
    device_type = "cpu" if no_gpu else config.distributed.device
    world = processes * int(options.nnodes) if options.nnodes.isdecimal() else None
    if world is None or config.distributed.strategy == AUTO:
        refuse(contradictions(config, device_type=device_type))
        if world == 1:  # on several, what is chosen for the user decides
            require_equation(config.training, 1)
        return
    layout = resolve(config.distributed, world, processes)
    refuse(contradictions(config, layout, device_type))
    require_equation(config.training, layout.batch_shares)


def _resume_from(run: RunDirectory, asked: str) -> str:
    """As asked, but ranks that are started anew go on from what this launch has saved, if it has saved anything."""
    if asked == "auto" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return asked
    import psutil

    launched = psutil.Process(os.getppid()).create_time()
    saved = any(event["kind"] == "save" and event["time"] >= launched for event in run.read_events())
    return "auto" if saved else asked


def in_this_process(processes: int, options: LaunchOptions) -> bool:
    """One process that nobody asked a launcher for needs none."""
    return processes == 1 and options.nproc_per_node is None and not options.several_nodes and not options.max_restarts


def _environment(config: "Config") -> Mapping[str, str]:
    from lockstep.cluster import environment

    return environment(config.distributed)


def _hang(config: "Config") -> tuple[float | None, float, float]:
    distributed = config.distributed
    return distributed.hang.factor, distributed.hang.seconds, distributed.timeout_seconds


def _counted(processes: int, options: LaunchOptions) -> str:
    some = f"{processes} process{'es' * (processes != 1)}"
    if options.several_nodes:
        return f"{some} on this machine ({socket.gethostname()}), {options.nnodes} machines"
    return some


def _announce(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stdout, flush=True)
