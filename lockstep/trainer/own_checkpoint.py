"""Checkpoints of a loop of one's own: the model, any number of optimizers by name, and what the caller adds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel


def save(
    placed: ParallelModel, path: Path, step: int, optimizers: Mapping[str, Optimizer], metadata: dict[str, Any], *,
    config_yaml: str,
) -> Path:  # fmt: skip
    """Write it; every rank calls it. Whole when this returns, or not there."""
    snapshot = _snapshot(placed)
    names = {id(parameter): name for name, parameter in placed.parameters.items()}
    for name, optimizer in optimizers.items():
        snapshot.optimizers[name], snapshot.groups[name] = checkpoint.optimizer_state(optimizer, names)
    snapshot.state = {"step": step, "metadata": metadata}
    saved = checkpoint.save(path, step, snapshot, config_yaml=config_yaml)
    assert isinstance(saved, Path)
    return saved


def load(placed: ParallelModel, path: Path, optimizers: Mapping[str, Optimizer]) -> tuple[int, dict[str, Any]]:
    """Take it up, whatever layout wrote it; every rank calls it.

    Returns:
        its step and its metadata.

    Raises:
        UsageError: there is none; it is of another model, or lacks an optimizer.
    """
    found: checkpoint.CheckpointPath | None = path
    if not (path / checkpoint.MANIFEST).exists():
        found = checkpoint.resume_point(path)
    if found is None:
        raise UsageError(f"there is no checkpoint in {path}", fix="give a checkpoint, or the folder that was saved to")
    names = {id(parameter): name for name, parameter in placed.parameters.items()}
    target = _snapshot(placed)
    for name, optimizer in optimizers.items():
        if not checkpoint.has_optimizer(found, name):
            raise UsageError(f"{found} holds no optimizer {name!r}", fix="name the optimizers as they were saved")
        own = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        target.optimizers[name] = checkpoint.optimizer_targets(found, name, own)
    parts = ["model", *(f"optimizer/{name}" for name in optimizers), *(f"extra/{name}" for name in target.extra)]
    with torch.no_grad():
        state = checkpoint.load(found, target, only=parts)
    for name, optimizer in optimizers.items():
        checkpoint.restore_optimizer(optimizer, names, target.optimizers[name], state["optimizer_groups"][name])
    return int(state["step"]), state["metadata"]


def _snapshot(placed: ParallelModel) -> checkpoint.Snapshot:
    aliases = {name: tuple(others) for name, others in placed.aliases.items() if name in placed.parameters}
    return checkpoint.Snapshot(model=placed.kept(), extra=dict(placed.state), aliases=aliases)
