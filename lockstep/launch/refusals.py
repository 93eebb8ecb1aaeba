"""Refuses a run that can't work, before a rank of it is started.

Loads torch inside functions only.

Tests: tests/cli/test_cli.py, tests/cli/test_train.py, tests/run_directory/test_run_mirror.py
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError, refuse
from lockstep.files.data_files import check_named_files
from lockstep.files.object_client import client_of, run_apart
from lockstep.files.paths import bucket_url
from lockstep.launch.options import LaunchOptions, count_gpus
from lockstep.launch.sizes import require_sizes
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_lock import require_free
from lockstep.run_directory.run_mirror import RunMirror
from lockstep.strategy import AUTO, resolve

if TYPE_CHECKING:
    from lockstep.config import Config


def refuse_what_cannot_run(
    config: "Config",
    options: LaunchOptions,
    processes: int,
    run: RunDirectory,
    *,
    resume: str | None,
    is_mirrored: bool,
) -> None:
    """Refuse all that can be refused before a rank is started; fetch what a bucket has of the run.

    Args:
        config: of the run.
        options: of the launcher.
        processes: the ranks on this machine.
        run: its directory.
        resume: the `--resume` of the command; None: the config's.
        is_mirrored: whether the run's directory is kept in a bucket.

    Raises:
        UsageError: with what to write instead.
    """
    _check_layout(config, processes, options)
    on_cpu = _device_type(config) in ("auto", "cpu")
    require_sizes(config, processes, options.nodes[1], on_cpu=on_cpu)
    check_named_files(config.data.name, config.data.args)
    _check_hugging_face(config)
    if not options.several_nodes:
        require_free(run.path)
    bucket = config.bucket
    if bucket is not None:
        run_apart(partial(_look_into, bucket, run.path if is_mirrored else None), bucket["url"])
    from_url = bucket_url(resume or config.checkpoint.resume, "--resume")
    if from_url is not None:
        run_apart(lambda: client_of({"url": from_url}, starting=True).check_readable(), from_url)


def _look_into(bucket: Mapping[str, Any], run: Path | None) -> None:
    """Refuse a bucket that a run could not write to; fetch the records of a run that is in it."""
    client = client_of(bucket, starting=True)
    client.check()
    if run is not None:
        RunMirror(client, run).fetch()


def _check_layout(config: "Config", processes: int, options: LaunchOptions) -> None:
    """Raise a UsageError for a layout that these ranks and devices can't have."""
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


def _check_hugging_face(config: "Config") -> None:
    """Refuse what a model of Hugging Face can't be, and download it if it is only on the hub.

    A folder or a type alone, which only ranks look at, costs no import of the library here.
    """
    model = config.model
    source = (model.name or "").removeprefix("hf:")
    of_hub = source != model.name and "/" in source and not Path(source).exists()
    if of_hub or model.auto or model.adapter or model.lora is not None:
        import_module("lockstep.models").check_model(model)


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


def _device_type(config: "Config") -> str:
    no_gpu = config.distributed.device == "auto" and not count_gpus()
    return "cpu" if no_gpu else config.distributed.device


def can_train(config: "Config", ranks: int, each_machine: int) -> bool:
    """Return whether a config can train on so many ranks."""
    try:
        _check_world(config, ranks, each_machine, _device_type(config))
    except UsageError:
        return False
    return True
