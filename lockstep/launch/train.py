"""Implements `lockstep train` and `lockstep launch`: become a rank, start ranks, or run in this process.

A wrong config is rejected before any process is started.
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
from lockstep.launch.local import LaunchJob, launch
from lockstep.launch.options import LaunchOptions, count_gpus, process_count
from lockstep.launch.script import run_script
from lockstep.launch.worker import ConsoleOutput, environment_with, run_as_worker
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
    "MASTER_PORT": "0",  # the system picks one; no other rank needs to know it
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
    """Run `lockstep train`.

    Args:
        resume: "auto", "never" or a path; None: the config's value.
        argv: the arguments after `train`, which the workers are started with.

    Returns:
        the exit code.
    """
    from lockstep.config import load_config

    run = RunDirectory(output_dir)

    def work() -> int:
        config = load_config(path, overrides)
        if config.distributed.strategy == AUTO:
            config = import_module("lockstep.plan.command").resolve_auto(config)
        chosen = _resume_from(run, resume or config.checkpoint.resume)
        _compare_ranks(config)
        code: int = import_module("lockstep.trainer").run(config, output_dir=output_dir, resume=chosen)
        return code

    if is_rank(options):
        return run_as_worker(work, logs=run.logs)
    config = load_config(path, overrides)
    processes, reason = _processes(config, options)
    _check_layout(config, processes, options)
    if not options.several_nodes:
        require_free(run.path)
    run.create()
    _log(f"strategy {config.distributed.strategy}, {_describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        return run_as_worker(work, logs=run.logs, launched=False)
    job = LaunchJob(("-m", "lockstep", "train", *argv), run.logs, _environment(config), _hang(config))
    return launch(job, options, processes)


def launch_script(
    script: str, arguments: Sequence[str], options: LaunchOptions, *, kind: str, logs: Path, output: ConsoleOutput
) -> int:
    """Run `lockstep launch`.

    Args:
        script: a file, a module's name or a program, depending on `kind`.
        kind: `file`, `module` or `program`.
        logs: the folder for every rank's output.
        output: which output the console shows.
    """
    output.check()
    if is_rank(options):
        raise UsageError(
            "`lockstep launch` was itself started by a launcher, as one of its ranks",
            where="the environment: it says which rank this is",
            fix=f"start the script itself: python {script}; or, with srun or mpirun starting one process a machine,"
            " say --nnodes and --nproc-per-node",
        )
    if kind == "file" and not Path(script).is_file():
        raise UsageError(f"there is no file {script}", fix="lockstep launch [options] SCRIPT.py [ARGS …]")
    processes, reason = process_count(options)
    _log(f"{script}: {_describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        with environment_with(_RANK_0_OF_1):
            return run_as_worker(lambda: run_script(script, arguments, kind=kind), logs=logs, launched=False)
    started = ("-m", "lockstep.launch.script", str(logs), kind, script, *arguments)
    return launch(LaunchJob(started, logs, output.environment()), options, processes)


def _compare_ranks(config: "Config") -> None:
    """Run the checks of doctor that cost nothing, at the start of every run of several ranks."""
    if rank_facts().world_size == 1:
        return
    from lockstep import cluster
    from lockstep.diagnose.doctor import check_in_run, names_in

    cluster.setup(config.distributed)
    for line in check_in_run(config.to_yaml(), names_in(config)):
        _log(str(line))


def is_rank(options: LaunchOptions) -> bool:
    """Return whether this process is a rank itself.

    srun and mpirun start either ranks or one launcher per machine: options that only a launcher needs show which.
    """
    starts_ranks = options.nproc_per_node is not None or options.several_nodes
    if starts_ranks and ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        return False  # a job script exports only one of them; started ranks get both
    launcher = rank_facts().launcher
    return launcher == "torchrun" or (launcher != "none" and not starts_ranks)


def _processes(config: "Config", options: LaunchOptions) -> tuple[int, str]:
    distributed = config.distributed
    return process_count(
        options, use_gpus=distributed.device != "cpu", single_reason=_single_process_reason(distributed.strategy)
    )


def _single_process_reason(strategy: str) -> str | None:
    return None if strategy == AUTO else strategy_named(strategy).one_process or None


def _check_layout(config: "Config", processes: int, options: LaunchOptions) -> None:
    """Reject a layout that these ranks and devices cannot have, before a rank is started.

    Raises:
        UsageError: sizes that do not multiply (with the equation), or keys that contradict the ranks.
    """
    from lockstep.config.checks import contradictions, require_equation

    no_gpu = config.distributed.device == "auto" and not count_gpus()
    device_type = "cpu" if no_gpu else config.distributed.device
    world = processes * int(options.nnodes) if options.nnodes.isdecimal() else None
    if world is None or config.distributed.strategy == AUTO:
        refuse(contradictions(config, device_type=device_type))
        if world == 1:  # with more ranks, the strategy that is chosen later decides
            require_equation(config.training, 1)
        return
    layout = resolve(config.distributed, world, processes)
    refuse(contradictions(config, layout, device_type))
    require_equation(config.training, layout.batch_shares)


def _resume_from(run: RunDirectory, requested: str) -> str:
    """Return `requested`, but "auto" for restarted ranks if this launch has saved a checkpoint."""
    if requested == "auto" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return requested
    import psutil

    launched = psutil.Process(os.getppid()).create_time()
    saved = any(event["kind"] == "save" and event["time"] >= launched for event in run.read_events())
    return "auto" if saved else requested


def in_this_process(processes: int, options: LaunchOptions) -> bool:
    """Return whether to run without a launcher: one process, and no option asks for a launcher."""
    return processes == 1 and options.nproc_per_node is None and not options.several_nodes and not options.max_restarts


def _environment(config: "Config") -> Mapping[str, str]:
    from lockstep.cluster import environment

    return environment(config.distributed)


def _hang(config: "Config") -> tuple[float | None, float, float]:
    distributed = config.distributed
    return distributed.hang.factor, distributed.hang.seconds, distributed.timeout_seconds


def _describe_processes(processes: int, options: LaunchOptions) -> str:
    some = f"{processes} process{'es' * (processes != 1)}"
    if options.several_nodes:
        return f"{some} on this machine ({socket.gethostname()}), {options.nnodes} machines"
    return some


def _log(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stdout, flush=True)
