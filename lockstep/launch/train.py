"""Implements `lockstep train` and `lockstep launch`.

The process becomes a rank, starts ranks, or trains by itself.

A wrong config is rejected before any process is started. One machine needs no address and no port:
the launcher's store takes a free port and passes it to the ranks. Loads torch inside functions
only.

Tests: tests/launch/test_local.py, tests/launch/test_torchrun.py, tests/cli/test_train.py
"""

import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import signals
from lockstep.cores import threads_per_rank
from lockstep.data_files import check_named_files
from lockstep.environment import MEMORY, RANK_0_OF_1, WORLD, check_numbers, rank_facts
from lockstep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    LockstepError,
    RunError,
    UsageError,
    refuse,
)
from lockstep.heartbeat.files import FOLDER
from lockstep.launch.failures import Failure, exit_code, first_cause
from lockstep.launch.hang import HangWatch
from lockstep.launch.live import CanTrain, LiveRanks
from lockstep.launch.live_hosts import LiveHosts
from lockstep.launch.options import (
    LaunchOptions,
    count_gpus,
    endpoint,
    explain,
    process_count,
    rendezvous_host,
    run_id,
)
from lockstep.launch.prepared import give_back
from lockstep.launch.rank_starts import (
    RankStarter,
    rank_starter,
    reason_of_script,
)
from lockstep.launch.script import run_script
from lockstep.launch.sizes import require_sizes
from lockstep.launch.worker import (
    FAILURES,
    LAUNCHER_PID,
    ConsoleOutput,
    environment_with,
    print_error,
    run_as_worker,
)
from lockstep.launch.world import LiveWorld
from lockstep.network import interface_variables
from lockstep.object_client import client_of, run_apart
from lockstep.paths import bucket_url, run_directory
from lockstep.records import RunDirectory
from lockstep.run_lock import LAUNCH, require_free
from lockstep.run_mirror import RunMirror, local_folder, push_after_ranks
from lockstep.scratch import SHARED_MEMORY, remove, scratch_folder
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

    def work() -> int:
        """Load the config and train.

        If there are several ranks, the cheap checks of `doctor` come first.
        """
        config = load_config(path, overrides)
        trainer = _load("lockstep.trainer")
        if config.distributed.strategy == AUTO:
            config = import_module("lockstep.plan.command").resolve_auto(config)
        chosen = resume or config.checkpoint.resume
        if rank_facts().world_size > 1:
            # The checks of doctor that cost nothing run at the start of every run.
            from lockstep import cluster
            from lockstep.diagnose.doctor import check_in_run

            cluster.setup(config.distributed)
            for line in check_in_run(config):
                _log(str(line))
        code: int = trainer.run(config, output_dir=output_dir, resume=chosen)
        return code

    if is_rank(options):

        def through_deaths() -> int:
            """Train; where the launcher offers it, also after other ranks have died."""
            world = os.environ.get(WORLD)
            if not world:
                return work()
            code: int = _load("lockstep.launch.survivor").through_deaths(work, Path(world))
            return code

        return run_as_worker(through_deaths, logs=run.logs)
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
    _log(f"strategy {distributed.strategy}, {_describe_processes(processes, options)} ({reason})")
    if in_this_process(processes, options):
        give_back()
        return run_as_worker(work, logs=run.logs, launched=False)
    variables = import_module("lockstep.cluster").environment(distributed)
    hang = distributed.hang.factor, distributed.hang.seconds, distributed.timeout_seconds
    return launch(
        LaunchJob(
            ("-m", "lockstep", "train", *argv),
            run.logs,
            variables,
            hang,
            fresh=fresh,
            can_train=partial(_can_train, config) if distributed.on_failure == "continue" else None,
            saves=run if _saves_there(config) else None,
            mirrored=(bucket, run.path) if bucket is not None and is_mirrored else None,
        ),
        options,
        processes,
    )


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
    if of_hub or model.auto is not None or model.lora is not None:
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
            " process a machine, "
        )
        fix += "say --nnodes and --nproc-per-node"
        raise UsageError(text, where="the environment: it says which rank this is", fix=fix)
    if kind == "file" and not Path(script).is_file():
        raise UsageError(
            f"there is no file {script}", fix="lockstep launch [options] SCRIPT.py [ARGS …]"
        )
    fresh = "" if options.fresh_processes else reason_of_script(script, kind)
    if fresh is None:
        fresh = prepare(options, may_be_alone=True)
    processes, reason = process_count(options)
    _log(f"{script}: {_describe_processes(processes, options)} ({reason})")
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
    from lockstep.launch import fork_server

    return fork_server.split_off(compiles=compiles)


def _load(module: str) -> Any:
    """Import a module.

    Collections of garbage find none in what is imported, and take a tenth of the time.
    """
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


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
    from lockstep.config.checks import launch_contradictions

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
    from lockstep.config.checks import contradictions, require_equation

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
    some = f"{processes} process{'es' * (processes != 1)}"
    several = f" on this machine ({socket.gethostname()}), {options.nnodes} machines"
    return some + several * options.several_nodes


def _log(text: str, *, to_stderr: bool = False) -> None:
    print(f"lockstep: {text}", file=sys.stderr if to_stderr else None, flush=True)


log_to_stderr = partial(_log, to_stderr=True)


# how long to wait for another machine's failure file, which a busy machine takes seconds to write
_OTHER_MACHINES_SECONDS = 10.0


@dataclass(frozen=True)
class LaunchJob:
    """The program that the ranks run."""

    arguments: Sequence[str]  # after `python`, the same on every rank
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # for every rank
    # `factor`, `seconds` and `patience` of the `HangWatch`; a Trainer in a script replaces them by
    # those of its config
    hang: tuple[float | None, float, float] = (20.0, 60.0, 1800.0)
    # why its ranks must be fresh processes ("": it is not worth a line); None: they may be forks
    fresh: str | None = None
    # says how many ranks can go on when some have died; None: they do not
    can_train: CanTrain | None = None
    # the bucket that has the run's records, too, and their folder here
    mirrored: tuple[Mapping[str, Any], Path] | None = None
    # the run whose newest copy in memory is saved when the launch ends with an error
    saves: RunDirectory | None = None


@dataclass
class _Ended:
    """Describes the end of this machine's agent, beside its exit code."""

    keeps_copies: bool = False  # it saves the newest copy in memory if the launch has failed


def launch(job: LaunchJob, options: LaunchOptions, processes: int) -> int:
    """Run the job's ranks here until all have ended, from the main thread.

    Return 0, 1, 2, or 75 if all have saved.
    """
    options.check()
    check_numbers(os.environ)
    job.logs.mkdir(parents=True, exist_ok=True)
    scratch = scratch_folder("launch")
    # Several machines share the logs' folder, so that each can report the first cause.
    failures = (job.logs if options.several_nodes else scratch) / "failures"
    beats = scratch / "heartbeats"
    failures.mkdir(exist_ok=True)
    beats.mkdir()
    # where ranks copy their run, for those that are started again (lockstep/checkpoint/memory.py)
    outlived = options.max_restarts > 0 or job.can_train is not None
    keeps = outlived and SHARED_MEMORY.is_dir()
    memory = scratch_folder("memory", SHARED_MEMORY) if keeps else None

    def exit_on_signal(number: int) -> None:
        signals.end_now(
            EXIT_PREEMPTED, f"stopped by {signals.name_of(number)} before ranks were started"
        )

    variables = {
        LAUNCHER_PID: str(os.getpid()),
        FAILURES: str(failures.absolute()),
        FOLDER: str(beats),
        MEMORY: "" if memory is None else str(memory),
        WORLD: "" if job.can_train is None else str(scratch / "world.json"),
    }
    # else torch's handlers replace ours, and raise
    variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    if options.several_nodes:
        variables |= interface_variables(rendezvous_host(options))
        variables[LAUNCH] = f"{run_id(options)} at {endpoint(options)}"
    variables |= job.environment
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        # collectives that torch's flight recorder keeps
        variables.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if "OMP_NUM_THREADS" not in os.environ:
        variables.setdefault("OMP_NUM_THREADS", str(threads_per_rank(processes)))
    code = EXIT_FAILED
    ended = _Ended()
    try:
        watch = HangWatch(beats, job.logs, *job.hang)
        with (
            signals.answered(exit_on_signal),
            environment_with(variables),
            rank_starter(job.fresh, log_to_stderr) as starter,
        ):
            code = _run_agent(job, options, processes, failures, memory, watch, starter, ended)
        return code
    except LockstepError as error:
        print_error(error)
        return error.exit_code
    finally:
        remove(scratch)
        if memory is not None:
            if code != EXIT_DONE and job.saves is not None and ended.keeps_copies:
                _save_newest_copy(memory, job.saves)
            remove(memory)
        for path in job.logs.glob("rank-*.stacks.txt"):
            with suppress(FileNotFoundError):  # launchers of other machines clean the same folder
                if not path.stat().st_size:
                    path.unlink()
        if job.mirrored is not None:
            _push_records(*job.mirrored)


def _push_records(bucket: Mapping[str, Any], run: Path) -> None:
    """Copy what the ranks could not, and their logs, to the bucket of the run."""
    try:
        run_apart(lambda: push_after_ranks(client_of(bucket, starting=True), run), bucket["url"])
    except LockstepError as error:
        log_to_stderr(f"warning: the last records are in {run} alone: {error}")


def _save_newest_copy(memory: Path, run: RunDirectory) -> None:
    """Save the newest copy in memory among the run's checkpoints, where it is newer."""
    checkpoint = _load("lockstep.checkpoint")
    try:
        copies = checkpoint.copies_of(memory, run.path)
        copies.adopt(run.recorded_step)
        path = checkpoint.save_newest(copies, run.checkpoints)
        if path is not None:
            run.append_event("save", step=checkpoint.step_of(path.name), checkpoint=path.name)
            log_to_stderr(f"the newest copy in memory is saved: {path}")
    except (OSError, LockstepError) as error:
        log_to_stderr(f"warning: the newest copy in memory could not be saved: {error}")


def _run_agent(
    job: LaunchJob,
    options: LaunchOptions,
    processes: int,
    failures: Path,
    memory: Path | None,
    watch: HangWatch,
    starter: RankStarter,
    ended_as: _Ended,
) -> int:
    """Run the ranks under torch's elastic agent. Return the exit code."""
    _load("lockstep.launch.agent")
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from lockstep.launch.agent import CLOSING_SECONDS, Agent, stopped_by, wait_for_failures
    from lockstep.launch.rendezvous_handlers import handler, open_store, own_address
    from lockstep.torch_compat.rank_processes import started_by

    # prints a banner for each failed rank
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if options.several_nodes:
        rendezvous = endpoint(options)
        log_to_stderr(
            f"waiting for {options.nnodes} machines at {rendezvous}; start this command on each of"
            " them"
        )
        gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
        if gloo or nccl:
            which = (
                gloo
                if gloo == nccl.removeprefix("=")
                else f"{gloo or '?'} (gloo), {nccl or '?'} (NCCL)"
            )
            choose = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another"
            log_to_stderr(f"traffic between machines: {which}; {choose}")

    def on_restart(cause: Failure | None, left: int) -> None:
        reason = (
            "machines joined or left" if cause is None else str(cause.error()).replace("\n", "\n  ")
        )
        log_to_stderr(
            f"starting the ranks again ({left} more restart{'s' * (left != 1)} left): {reason}"
        )
        if cause is None or not cause.consequence:
            with suppress(OSError):  # the disk is full: the line above has the same information
                RunDirectory(job.logs.parent).append_event("restart", reason=reason, left=left)

    def on_change(world: LiveWorld) -> None:
        """Tell on the console, and in the run's events, who died and who goes on."""
        lost = ", ".join(f"rank {rank}" for rank in world.lost)
        were = "was" if len(world.lost) == 1 else "were"
        left = len(world.members)
        go_on = "1 rank goes" if left == 1 else f"{left} ranks go"
        waiting = f"; waiting for a place: {len(world.spares)}" if world.spares else ""
        log_to_stderr(f"{lost} {were} killed: {go_on} on, in the same processes{waiting}")
        with suppress(OSError):
            RunDirectory(job.logs.parent).append_event(
                "recovery",
                lost=list(world.lost),
                ranks=len(world.members),
                spares=len(world.spares),
                generation=world.generation,
            )

    live = None
    if job.can_train is not None:
        kind = LiveHosts if options.several_nodes else LiveRanks
        live = kind(Path(os.environ[WORLD]), watch.folder, failures, job.can_train, on_change)
    agent = store = None
    try:
        # the other machines can join as long as it is held
        store = open_store(options, log_to_stderr)
        spec = WorkerSpec(
            role=options.role,
            local_world_size=processes,
            entrypoint=sys.executable,
            args=tuple(job.arguments),
            rdzv_handler=handler(options, store),
            max_restarts=options.max_restarts,
            monitor_interval=options.monitor_interval,
            local_addr=options.local_addr or own_address(options),
        )
        agent = Agent(
            spec,
            meeting=store,
            failures=failures,
            logs=job.logs,
            on_restart=on_restart,
            watch=watch,
            checkpoints=RunDirectory(job.logs.parent).checkpoints,
            memory=memory,
            live=live,
            shutdown_timeout=options.shutdown_timeout,
        )
        signals.listen(agent.on_signal)
        with started_by(starter):
            result = agent.run()
        ended = agent.failed(result)
        cause = first_cause(ended)
        is_consequence = cause is not None and cause.consequence and options.several_nodes
        if agent.others_failed or agent.others_are_lost or is_consequence:
            cause = first_cause(wait_for_failures(failures, _OTHER_MACHINES_SECONDS)) or cause
        if agent.others_failed and cause is None:
            raise RunError("the ranks of another machine failed", fix="its launcher says why")
        if cause is not None and agent.stop_signal is not None and cause.kind == "signal":
            raise stopped_by(agent.stop_signal)
        may_be_stopped = agent.stop_signal is not None or options.several_nodes
        code = exit_code(ended if cause is None else [*ended, cause], may_be_stopped=may_be_stopped)
        early = next((failure for failure in ended if failure.before_training), None)
        if code == EXIT_PREEMPTED and early is not None:
            log_to_stderr(early.what)
        elif cause is not None:
            print_error(cause.error(), cause.traceback)
        return code
    except Exception as error:
        raise explain(error, options) from error
    finally:
        watch.hear_from(None)
        if isinstance(live, LiveHosts):
            live.close()
        if agent is not None:
            ended_as.keeps_copies = agent.keeps_copies
            agent.leave_rendezvous(CLOSING_SECONDS)
        del store
