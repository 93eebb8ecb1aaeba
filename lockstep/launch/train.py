"""Implements `lockstep train` and `lockstep launch`.

The process becomes a rank, starts ranks, or trains by itself.

A wrong config is rejected before any process is started. `lockstep.launch.launcher` runs the ranks.
One machine needs no address and no port: the launcher's store takes a free port and passes it to
the ranks. Loads torch inside functions only.

Tests: tests/launch/test_local.py, tests/launch/test_torchrun.py, tests/cli/test_train.py
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UsageError
from lockstep.files.paths import bucket_url, run_directory
from lockstep.launch.launcher import LaunchJob, import_without_gc, launch, log
from lockstep.launch.options import LaunchOptions, process_count
from lockstep.launch.refusals import can_train, refuse_what_cannot_run
from lockstep.launch.roles import describe_processes, in_this_process, is_rank, prepare
from lockstep.launch.script import run_script
from lockstep.launch.worker import environment_with, run_as_worker
from lockstep.machine.environment import GENERATION, RANK_0_OF_1, WORLD, rank_facts
from lockstep.prepared.process import give_back
from lockstep.prepared.rank_starts import reason_of_script
from lockstep.run_directory.rank_output import ConsoleOutput
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_mirror import local_folder
from lockstep.strategy import AUTO, strategy_named

if TYPE_CHECKING:
    from lockstep.config import Config


def train(
    path: Path,
    overrides: Sequence[str],
    options: LaunchOptions,
    *,
    output_dir: str | Path,
    resume: str | None,
    argv: Sequence[str],
) -> int:
    """Run `lockstep train`; `resume`: auto, never, a path; None: the config's.

    Ranks are started with `argv`. The `output_dir` may be the URL of a bucket.
    """
    url = bucket_url(output_dir, "--output-dir")
    named = Path(output_dir) if url is None else local_folder(url)
    run = RunDirectory(run_directory(named))
    work = partial(_train_here, path, overrides, output_dir, resume)
    if is_rank(options):
        return run_as_worker(partial(_through_deaths, work), logs=run.logs)

    from lockstep.config import load_config

    config = load_config(path, overrides)
    if url is not None:
        config = config.kept_in(url)
    is_mirrored = url is not None and run.path == named  # a proof writes to no bucket
    on_cpu = config.distributed.device == "cpu"
    fresh = prepare(options, may_be_alone=on_cpu, compiles=uses_compiler(config))
    processes, reason = _process_count(config, options)
    refuse_what_cannot_run(config, options, processes, run, resume=resume, is_mirrored=is_mirrored)

    run.create()
    strategy = config.distributed.strategy
    log(f"strategy {strategy}, {describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        give_back()
        return run_as_worker(work, logs=run.logs, launched=False)
    command = ("-m", "lockstep", "train", *argv)
    job = _job(config, command, run, fresh=fresh, is_mirrored=is_mirrored)
    return launch(job, options, processes)


def _process_count(config: "Config", options: LaunchOptions) -> tuple[int, str]:
    """Return the number of processes on this machine, and why there are so many."""
    strategy = config.distributed.strategy
    one_process = "" if strategy == AUTO else strategy_named(strategy).one_process
    return process_count(
        options,
        use_gpus=config.distributed.device != "cpu",
        single_reason=one_process or None,
    )


def _job(
    config: "Config",
    command: tuple[str, ...],
    run: RunDirectory,
    *,
    fresh: str | None,
    is_mirrored: bool,
) -> LaunchJob:
    """Return what the ranks run, and what the launcher does for them.

    Args:
        config: of the run.
        command: that each rank is started with.
        run: its directory.
        fresh: why ranks are fresh processes; None: they are forks.
        is_mirrored: whether the run's directory is kept in a bucket.
    """
    distributed = config.distributed
    hang = distributed.hang
    bucket = config.bucket
    return LaunchJob(
        command,
        run.logs,
        environment=import_module("lockstep.process_group.cluster").environment(distributed),
        hang=(hang.factor, hang.seconds, distributed.timeout_seconds),
        fresh=fresh,
        can_train=partial(can_train, config) if distributed.on_failure == "continue" else None,
        saves=run if _saves_there(config) else None,
        mirrored=(bucket, run.path) if bucket is not None and is_mirrored else None,
    )


def _train_here(
    path: Path, overrides: Sequence[str], output_dir: str | Path, resume: str | None
) -> int:
    """Load the config and train in this process, as its rank; return the exit code."""
    from lockstep.config import load_config

    config = load_config(path, overrides)
    trainer = import_without_gc("lockstep.trainer")
    if config.distributed.strategy == AUTO:
        config = import_module("lockstep.plan.command").resolve_auto(config)
    if rank_facts().world_size > 1:
        import_module("lockstep.process_group.cluster").setup(config.distributed)
        # Survivors of a death run the code and the config that were compared at the start.
        if os.environ.get(GENERATION, "0") == "0":
            # The checks of doctor that cost little run at the start of every run.
            from lockstep.diagnose.doctor import check_in_run

            for line in check_in_run(config):
                log(str(line))
    code: int = trainer.run(
        config, output_dir=output_dir, resume=resume or config.checkpoint.resume
    )
    return code


def _through_deaths(work: Callable[[], int]) -> int:
    """Train; where the launcher offers it, also after other ranks have died."""
    world = os.environ.get(WORLD)
    if not world:
        return work()
    code: int = import_without_gc("lockstep.live.survivor").through_deaths(work, Path(world))
    return code


def uses_compiler(config: "Config") -> bool:
    """Return whether ranks will use torch's compiler."""
    return config.training.compile or config.training.gradient_checkpointing != "none"


def _saves_there(config: "Config") -> bool:
    """Return whether a run saves into its own directory."""
    return config.checkpoint.save_strategy != "none" and config.checkpoint.storage is None


def launch_script(
    script: str,
    arguments: Sequence[str],
    options: LaunchOptions,
    *,
    kind: str,
    logs: Path,
    output: ConsoleOutput,
) -> int:
    """Run `lockstep launch`: a `file`, a `module` or a `program`, as `kind` says.

    Ranks log into `logs`.
    """
    output.check()
    if is_rank(options):
        text = "`lockstep launch` was itself started by a launcher, as one of its ranks"
        fix = (
            f"start the script itself: python {script}; or, with srun or mpirun starting one"
            " process a machine, say --nnodes and --nproc-per-node"
        )
        raise UsageError(text, where="the environment: it says which rank this is", fix=fix)
    if kind == "file" and not Path(script).is_file():
        raise UsageError(
            f"there is no file {script}", fix="lockstep launch [options] SCRIPT.py [ARGS …]"
        )
    fresh = "" if options.fresh_processes else reason_of_script(script, kind)
    if fresh is None:
        fresh = prepare(options, may_be_alone=True)
    processes, reason = process_count(options)
    log(f"{script}: {describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        with environment_with(RANK_0_OF_1):
            return run_as_worker(
                lambda: run_script(script, arguments, kind=kind), logs=logs, launched=False
            )
    started = ("-m", "lockstep.launch.script", str(logs), kind, script, *arguments)
    return launch(LaunchJob(started, logs, output.environment(), fresh=fresh), options, processes)
