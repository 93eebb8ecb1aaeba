"""Implements `lockstep train` and `lockstep launch`.

The process becomes a rank, starts ranks, or trains by itself.

A wrong config is rejected before any process is started. `lockstep.launch.launcher` runs the ranks.
One machine needs no address and no port: the launcher's store takes a free port and passes it to
the ranks. Loads torch inside functions only.

Tests: tests/launch/test_local.py, tests/launch/test_torchrun.py, tests/cli/test_train.py
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import (
    UsageError,
    refuse,
)
from lockstep.files.data_files import check_named_files
from lockstep.files.object_client import client_of, run_apart
from lockstep.files.paths import bucket_url, run_directory
from lockstep.launch.launcher import LaunchJob, import_without_gc, launch, log
from lockstep.launch.options import (
    LaunchOptions,
    count_gpus,
    process_count,
)
from lockstep.launch.script import run_script
from lockstep.launch.sizes import require_sizes
from lockstep.launch.worker import environment_with, run_as_worker
from lockstep.machine.environment import GENERATION, RANK_0_OF_1, WORLD, rank_facts
from lockstep.prepared.process import give_back
from lockstep.prepared.rank_starts import (
    reason_of_script,
)
from lockstep.run_directory.rank_output import ConsoleOutput
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_lock import require_free
from lockstep.run_directory.run_mirror import RunMirror, local_folder
from lockstep.strategy import AUTO, resolve, strategy_named

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
    from lockstep.config import load_config

    url = bucket_url(output_dir, "--output-dir")
    named = Path(output_dir) if url is None else local_folder(url)
    run = RunDirectory(run_directory(named))
    work = partial(_train_here, path, overrides, output_dir, resume)
    if is_rank(options):
        return run_as_worker(partial(_through_deaths, work), logs=run.logs)

    config = load_config(path, overrides)
    if url is not None:
        config = config.kept_in(url)
    distributed = config.distributed
    fresh = prepare(
        options, may_be_alone=distributed.device == "cpu", compiles=uses_compiler(config)
    )
    one_process = (
        "" if distributed.strategy == AUTO else strategy_named(distributed.strategy).one_process
    )
    processes, reason = process_count(
        options, use_gpus=distributed.device != "cpu", single_reason=one_process or None
    )

    # All that can be refused is refused before a rank is started.
    _check_layout(config, processes, options)
    require_sizes(
        config, processes, options.nodes[1], on_cpu=_device_type(config) in ("auto", "cpu")
    )
    check_named_files(config.data.name, config.data.args)
    _check_hugging_face(config)
    if not options.several_nodes:
        require_free(run.path)
    bucket = config.bucket
    is_mirrored = url is not None and run.path == named  # a proof writes to no bucket
    if bucket is not None:
        run_apart(partial(_look_into, bucket, run.path if is_mirrored else None), bucket["url"])
    from_url = bucket_url(resume or config.checkpoint.resume, "--resume")
    if from_url is not None:
        run_apart(lambda: client_of({"url": from_url}, starting=True).check_readable(), from_url)

    run.create()
    log(f"strategy {distributed.strategy}, {_describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        give_back()
        return run_as_worker(work, logs=run.logs, launched=False)
    hang = distributed.hang
    job = LaunchJob(
        ("-m", "lockstep", "train", *argv),
        run.logs,
        environment=import_module("lockstep.process_group.cluster").environment(distributed),
        hang=(hang.factor, hang.seconds, distributed.timeout_seconds),
        fresh=fresh,
        can_train=partial(_can_train, config) if distributed.on_failure == "continue" else None,
        saves=run if _saves_there(config) else None,
        mirrored=(bucket, run.path) if bucket is not None and is_mirrored else None,
    )
    return launch(job, options, processes)


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


def _check_hugging_face(config: "Config") -> None:
    """Refuse what a model of Hugging Face can't be, and download it if it is only on the hub.

    A folder or a type alone, which only ranks look at, costs no import of the library here.
    """
    model = config.model
    source = (model.name or "").removeprefix("hf:")
    of_hub = source != model.name and "/" in source and not Path(source).exists()
    if of_hub or model.auto or model.adapter or model.lora is not None:
        import_module("lockstep.models").check_model(model)


def _saves_there(config: "Config") -> bool:
    """Return whether a run saves into its own directory."""
    return config.checkpoint.save_strategy != "none" and config.checkpoint.storage is None


def _can_train(config: "Config", ranks: int, each_machine: int) -> bool:
    """Return whether a config can train on so many ranks."""
    try:
        _check_world(config, ranks, each_machine, _device_type(config))
    except UsageError:
        return False
    return True


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
    log(f"{script}: {_describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        with environment_with(RANK_0_OF_1):
            return run_as_worker(
                lambda: run_script(script, arguments, kind=kind), logs=logs, launched=False
            )
    started = ("-m", "lockstep.launch.script", str(logs), kind, script, *arguments)
    return launch(LaunchJob(started, logs, output.environment(), fresh=fresh), options, processes)


def prepare(options: LaunchOptions, *, may_be_alone: bool, compiles: bool = False) -> str | None:
    """Make forks of this process possible, before it looks for devices, if it starts ranks.

    Return why ranks must be fresh processes ("": it is not worth a line), or None.

    Args:
        may_be_alone: whether a command that names no number of ranks trains in this process.
        compiles: whether ranks will use torch's compiler.
    """
    if options.fresh_processes:
        return ""
    if may_be_alone and in_this_process(1, options):
        return None
    from lockstep.prepared import fork_server

    return fork_server.split_off(compiles=compiles)


def is_rank(options: LaunchOptions) -> bool:
    """Return whether this process is a rank itself."""
    # srun and mpirun start either ranks or one launcher per machine: options that only a launcher
    # needs show which.
    starts_ranks = options.nproc_per_node is not None or options.several_nodes
    if starts_ranks and ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        return False  # a job script exports only one of them; started ranks get both
    launcher = rank_facts().launcher
    return launcher == "torchrun" or (launcher != "none" and not starts_ranks)


def _look_into(bucket: Mapping[str, Any], run: Path | None) -> None:
    """Refuse a bucket that a run could not write to; fetch the records of a run that is in it."""
    client = client_of(bucket, starting=True)
    client.check()
    if run is not None:
        RunMirror(client, run).fetch()


def _check_layout(config: "Config", processes: int, options: LaunchOptions) -> None:
    """Raise a UsageError for a layout that these ranks and devices can't have.

    No rank is started before.
    """
    from lockstep.config.checks_launch import launch_contradictions

    device_type = _device_type(config)
    refuse(
        launch_contradictions(
            config,
            max_restarts=options.max_restarts,
            builds_again=True,
            device_type=device_type,
        )
    )
    world = processes * int(options.nnodes) if options.nnodes.isdecimal() else None
    _check_world(config, world, processes, device_type)


def _device_type(config: "Config") -> str:
    no_gpu = config.distributed.device == "auto" and not count_gpus()
    return "cpu" if no_gpu else config.distributed.device


def _check_world(config: "Config", world: int | None, each_machine: int, device_type: str) -> None:
    """Raise a UsageError for a layout that so many ranks can't have.

    Args:
        config: of the run.
        world: number of ranks; None: not known yet.
        each_machine: number of ranks of each machine.
        device_type: of their devices.
    """
    from lockstep.config.checks import contradictions
    from lockstep.config.checks_training import require_equation

    if world is None or config.distributed.strategy == AUTO:
        refuse(contradictions(config, device_type=device_type))
        if world == 1:  # with more ranks, the strategy that is chosen later decides
            require_equation(config.training, 1)
        return
    layout = resolve(config.distributed, world, each_machine)
    refuse(contradictions(config, layout, device_type))
    require_equation(config.training, layout.batch_shares)


def in_this_process(processes: int, options: LaunchOptions) -> bool:
    """Return whether to run without a launcher: one process, and no option asks for a launcher."""
    return (
        processes == 1
        and options.nproc_per_node is None
        and not options.several_nodes
        and not options.max_restarts
    )


def _describe_processes(processes: int, options: LaunchOptions) -> str:
    on_one = f"{processes} process{'es' * (processes != 1)}"
    several = f" on this machine ({socket.gethostname()}), {options.nnodes} machines"
    return on_one + several * options.several_nodes
