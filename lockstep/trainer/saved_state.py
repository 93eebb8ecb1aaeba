"""Writes a `RunState` into a checkpoint, and loads it on any topology.

Tests: tests/trainer/test_resume.py, tests/trainer/test_formats.py
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.errors import UsageError, listed
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.step import Step
from lockstep.trainer.average import AVERAGE
from lockstep.trainer.plain_state import load_imported, load_state_of_model, state_of_model
from lockstep.trainer.run_state import RunState

OPTIMIZER = "main"
WORKERS = "workers"  # name of the workers' tensors
_UNKNOWN_TO_A_LOOP = {  # a loop over `lockstep.place` saves only its step and metadata
    "skipped": [],
    "epoch": 0,
    "samples": 0,
    "nominal": None,
    "loss_scale": None,
    "source": {},
    "best": {},
}


def snapshot(
    run: RunState, *, include_optimizer: bool = True, metadata: dict[str, Any] | None = None
) -> checkpoint.Snapshot:
    """Return a checkpoint's contents for the current state, with the live tensors.

    All ranks call it.
    """
    run.modes.eval()
    layout = run.layout
    step = run.step
    facts = {
        "seed": run.config.training.seed,
        "layout": str(layout),
        "workers": layout.workers,
        "global_batch_size": run.global_batch_size,
    }
    if run.evaluated_average is not None:
        facts["evaluated"] = AVERAGE  # whose weights count
    state = {**run.state_dict(), **facts, **state_of_model(step.placed), "metadata": metadata or {}}
    contents = _tensors(step.placed, state)
    if include_optimizer:
        contents.optimizers[OPTIMIZER], contents.groups[OPTIMIZER] = _optimizer_state(step)
    return contents


def load(
    run: RunState, path: checkpoint.Checkpoint, *, is_verified: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Load a checkpoint of any topology; return the caller's metadata in it, and lines to log.

    `is_verified`: all ranks have compared its checksums just now.
    """
    state = _fill(run.step, path, is_verified=is_verified)
    log_lines = []
    if "updates" not in state:
        state = {**_UNKNOWN_TO_A_LOOP, "updates": state["step"], **state}
        log_lines.append(
            f"{path} is of a loop over lockstep.place: data go on as after {state['step']} steps of"
            " this trainer"
        )
    run.load_state_dict(state)
    load_state_of_model(run.step.placed, state)
    return state["metadata"], log_lines


def load_weights(run: RunState, path: checkpoint.Checkpoint) -> None:
    """Load a checkpoint's weights alone, those that its run evaluated; all ranks call it."""
    placed = run.step.placed
    if load_imported(placed, path) is not None:
        return
    saved = checkpoint.fetched(path)
    with torch.no_grad():
        state = checkpoint.load(
            saved, checkpoint.Snapshot(placed.kept(), aliases=placed.named_aliases), only=["model"]
        )
        if state.get("evaluated") == AVERAGE:
            average = checkpoint.Snapshot({}, extra={AVERAGE: dict(placed.parameters)})
            checkpoint.load(saved, average, only=[f"extra/{AVERAGE}"], is_verified=True)
    load_state_of_model(placed, state)


def _tensors(placed: ParallelModel, state: dict[str, Any] | None = None) -> checkpoint.Snapshot:
    """Return the live tensors of the model and of the strategy, and the `state` without tensors."""
    extra = dict(placed.state)
    if placed.local_training is not None:
        extra[WORKERS] = placed.local_training.state()
    return checkpoint.Snapshot(
        placed.kept(), state=state or {}, extra=extra, aliases=placed.named_aliases
    )


def _optimizer_state(step: Step) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's state, or that of each worker's model under its own names."""
    tensors: dict[str, Tensor] = {}
    groups: dict[str, Any] = {}
    for prefix in _prefixes(step):
        names = {id(p): prefix + name for name, p in step.placed.parameters.items()}
        some, own = checkpoint.optimizer_state(step.optimizer, names)
        tensors |= some
        if groups:
            groups["values"] |= own["values"]
            for group, more in zip(groups["groups"], own["groups"], strict=True):
                group["params"] += more["params"]
        groups = groups or own
    return tensors, groups


def _prefixes(step: Step) -> Iterable[str]:
    """Yield the prefixes of the parameters' names in the optimizer's state.

    Without workers, the prefix is empty. Else it names a worker, whose state is in place meanwhile.
    """
    local = step.placed.local_training
    return [""] if local is None else local.each(step.optimizer)


def _fill(step: Step, path: checkpoint.Checkpoint, *, is_verified: bool) -> dict[str, Any]:
    """Fill the tensors of the model, the strategy and the optimizer.

    Return the state besides tensors.
    """
    placed = step.placed
    local = step.placed.local_training
    if (imported := load_imported(placed, path)) is not None:
        if local is not None:
            local.begin_from_common()
        return imported
    target = _tensors(placed)
    # Workers may start from a run without workers: each takes over its model and its optimizer
    # state.
    begins = local is not None and f"extra/{WORKERS}" not in checkpoint.read_manifest(path).parts
    if begins:
        del target.extra[WORKERS]
    elif local is not None:
        stored = checkpoint.read_state(path).get("workers")
        if stored != local.total:
            why = "each worker goes on from its own parameters and its own optimizer state"
            fix = f"set distributed.diloco.workers: {stored}, on a number of ranks that divides it"
            raise UsageError(
                f"{path} holds {stored} workers, and this run has {local.total}", why=why, fix=fix
            )
    optimizer = _optimizer_in(path)
    named = {}
    for prefix in _prefixes(step):
        named[prefix] = {
            ("" if begins else prefix) + name: p for name, p in placed.parameters.items()
        }
    if optimizer is not None:
        wanted = {name: p for names in named.values() for name, p in names.items()}
        target.optimizers[optimizer] = checkpoint.optimizer_targets(path, optimizer, wanted)
    with torch.no_grad():
        state = checkpoint.load(path, target, is_verified=is_verified)
    if local is not None and begins:
        local.begin_from_common()
    if optimizer is None:
        return state
    if local is None:
        checkpoint.add_missing_groups(step.optimizer, placed.parameters, path, optimizer)
    for prefix in _prefixes(step):
        names = {id(p): name for name, p in named[prefix].items()}
        tensors = target.optimizers[optimizer]
        if begins:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        checkpoint.restore_optimizer(
            step.optimizer, names, tensors, state["optimizer_groups"][optimizer]
        )
    return state


def _optimizer_in(path: checkpoint.Checkpoint) -> str | None:
    """Return the name of the one optimizer in a checkpoint.

    A user's own loop may choose any name.
    """
    names = checkpoint.optimizers_in(path)
    if len(names) > 1:
        what = f"{path} holds the optimizers {listed(names)}, and a Trainer has one"
        fix = (
            "go on with lockstep.place(…).load_checkpoint(path, optimizers); or take the weights"
            " alone: model.load_state_dict(lockstep.checkpoint.weights(path)) before the Trainer"
            " is made"
        )
        raise UsageError(what, why="a loop over lockstep.place wrote it", fix=fix)
    return names[0] if names else None
