"""What a checkpoint holds of a trainer, and how a trainer takes it up again."""

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep import checkpoint, collectives
from lockstep.errors import UsageError
from lockstep.records import plain
from lockstep.step import Progress

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

OPTIMIZER = "main"


def snapshot(trainer: "Trainer", *, include_optimizer: bool, metadata: dict[str, Any]) -> checkpoint.Snapshot:
    """The run as it stands; tensors are the live ones."""
    placed, step = trainer.placed, trainer.step
    model = {name: p.detach() for name, p in placed.parameters.items()} | placed.buffers
    optimizers, groups = {}, {}
    if include_optimizer:
        names = {id(p): name for name, p in placed.parameters.items()}
        optimizers[OPTIMIZER], groups[OPTIMIZER] = checkpoint.optimizer_state(trainer.optimizer, names)
    progress = step.progress
    return checkpoint.Snapshot(
        model=model,
        optimizers=optimizers,
        groups=groups,
        state={
            "step": progress.step,
            "updates": progress.updates,
            "skipped": list(progress.skipped),
            "epoch": progress.epoch,
            "samples": progress.samples,
            "nominal": step.nominal,
            "seed": trainer.config.training.seed,
            "layout": str(trainer.layout),
            "loss_scale": step.loss_scale.state_dict() if step.loss_scale else None,
            "source": trainer.source_state,
            "best": trainer.best,
            "metrics": {name: plain(value) for name, value in trainer.metrics.items()},
            "losses": list(step.judge.losses),
            "avoid": sorted(step.avoid),
            "metadata": metadata,
        },
        extra=placed.state,
        aliases={name: tuple(others) for name, others in placed.aliases.items() if name in placed.parameters},
    )


def restore(trainer: "Trainer", path: Path) -> tuple[int, dict[str, Any]]:
    """Fill the trainer from a checkpoint of any topology.

    Returns:
        the step, and the metadata that it was saved with.

    Raises:
        UsageError: it holds another model; what differs is named.
    """
    placed, step = trainer.placed, trainer.step
    names = {id(p): name for name, p in placed.parameters.items()}
    target = snapshot(trainer, include_optimizer=False, metadata={})
    with_optimizer = checkpoint.has_optimizer(path, OPTIMIZER)
    if with_optimizer:
        target.optimizers[OPTIMIZER] = checkpoint.optimizer_targets(path, OPTIMIZER, placed.parameters)
    with torch.no_grad():
        state = checkpoint.load(path, target)
    if with_optimizer:
        checkpoint.restore_optimizer(
            trainer.optimizer, names, target.optimizers[OPTIMIZER], state["optimizer_groups"][OPTIMIZER]
        )
    step.progress = Progress(state["step"], state["updates"], list(state["skipped"]), state["epoch"], state["samples"])
    if state["nominal"] is not None:  # weights that were imported know none
        trainer.learn_nominal(state["nominal"])
    if step.loss_scale is not None and state["loss_scale"] is not None:
        step.loss_scale.load_state_dict(state["loss_scale"])
    trainer.source_state, trainer.best = state["source"], state["best"]
    trainer.metrics = dict(state.get("metrics", {}))
    step.judge.losses = deque(state.get("losses", ()))
    step.avoid |= set(state.get("avoid", ()))
    step.judge.forget()
    return step.progress.step, state["metadata"]


def find(trainer: "Trainer", how: str) -> Path | None:
    """Where to resume from: the newest whole checkpoint (`auto`), nowhere (`never`), or the path that is given.

    Raises:
        UsageError: the path is no checkpoint.
        RunError: there are checkpoints, and none is whole: starting afresh is for a person to decide.
    """
    if how == "never":
        return None
    if how == "auto":
        directory = trainer.run_directory
        if directory is None:
            return None
        if trainer.storage_is_shared:
            return checkpoint.resume_point(directory.checkpoints)
        here = checkpoint.newest(directory.checkpoints, thorough=True) if trainer.is_main_process else None
        return checkpoint.hand_out(here)
    return _named(Path(how), how)


def go_back(trainer: "Trainer", how: str) -> tuple[Path | None, int]:
    """Take the trainer to a checkpoint, and the run directory with it; every rank calls it.

    Metrics of later steps are dropped, and later checkpoints set aside: these steps will be written anew.

    Returns:
        the checkpoint and its step; None and 0 where there is none to go to.
    """
    found = find(trainer, how)
    step = restore(trainer, found)[0] if found is not None else 0
    directory = trainer.run_directory
    if directory is not None and trainer.is_main_process:
        directory.forget_after(step)
        for path in checkpoint.set_aside(directory.checkpoints, after=step):
            directory.append_event("set_aside", step=step, checkpoint=path.name)
    if trainer.layout.world_size > 1:
        collectives.barrier()  # nobody looks into the folder before it is in order
    return found, step


def _named(path: Path, how: str) -> Path:
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if path.is_dir() and not (path / "manifest.json").exists():
        found = checkpoint.resume_point(path)
        if found is not None:
            return found
    if not (path / "manifest.json").exists():
        raise UsageError(
            f"{how} is no checkpoint",
            where="--resume",
            why="there is no manifest.json in it" if path.is_dir() else "there is no such folder",
            fix="give a folder checkpoints/step-…, a run directory, auto or never",
        )
    return path
