"""What a checkpoint holds of a trainer, and how a trainer takes it up again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep import checkpoint
from lockstep.errors import UsageError
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
    trainer.learn_nominal(state["nominal"])
    if step.loss_scale is not None and state["loss_scale"] is not None:
        step.loss_scale.load_state_dict(state["loss_scale"])
    trainer.source_state, trainer.best = state["source"], state["best"]
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
        return checkpoint.resume_point(directory.checkpoints) if directory is not None else None
    path = Path(how)
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
