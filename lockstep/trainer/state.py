"""What a checkpoint holds of a trainer, and how a trainer takes it up again."""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep import checkpoint, collectives
from lockstep.errors import UsageError, listed
from lockstep.records import plain
from lockstep.step import Progress
from lockstep.trainer.changes import compare, keep_what_was_changed

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

OPTIMIZER = "main"
WORKERS = "workers"  # of local updates
_UNKNOWN_TO_A_LOOP = {  # of one's own (`lockstep.place`), which saves its step and metadata alone
    "skipped": [], "epoch": 0, "samples": 0, "nominal": None, "loss_scale": None, "source": {}, "best": {},
}  # fmt: skip


def snapshot(trainer: "Trainer", *, include_optimizer: bool, metadata: dict[str, Any]) -> checkpoint.Snapshot:
    """The run as it stands; tensors are the live ones."""
    placed, step = trainer.placed, trainer.step
    optimizers: dict[str, dict[str, torch.Tensor]] = {}
    groups: dict[str, dict[str, Any]] = {}
    if include_optimizer:
        optimizers[OPTIMIZER], groups[OPTIMIZER] = _optimizer_state(trainer)
    workers = placed.local_training
    progress = step.progress
    return checkpoint.Snapshot(
        model=placed.kept(),
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
            "global_batch_size": trainer.global_batch_size,
            "steps_per_epoch": trainer.steps_per_epoch,
            "workers": trainer.layout.workers,
            "loss_scale": step.loss_scale.state_dict() if step.loss_scale else None,
            "source": trainer.source_state,
            "best": trainer.best,
            "metrics": {name: plain(value) for name, value in trainer.metrics.items()},
            "losses": list(step.anomaly_detector.losses),
            "avoid": sorted(step.avoid),
            "metadata": metadata,
        },
        extra=placed.state if workers is None else {**placed.state, WORKERS: workers.state()},
        aliases={name: tuple(others) for name, others in placed.aliases.items() if name in placed.parameters},
    )


def _optimizer_state(trainer: "Trainer") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's state, or that of each worker of this rank, under names of its own."""
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, Any] = {}
    for prefix in _prefixes(trainer):
        names = {id(p): prefix + name for name, p in trainer.placed.parameters.items()}
        some, own = checkpoint.optimizer_state(trainer.optimizer, names)
        tensors |= some
        if not groups:
            groups = own
        else:
            groups["values"] |= own["values"]
            for group, more in zip(groups["groups"], own["groups"], strict=True):
                group["params"] += more["params"]
    return tensors, groups


def _prefixes(trainer: "Trainer") -> Iterable[str]:
    workers = trainer.placed.local_training
    return [""] if workers is None else workers.each(trainer.optimizer)


def load(trainer: "Trainer", path: Path) -> tuple[int, dict[str, Any]]:
    """See `Trainer.load_checkpoint`."""
    found = find(trainer, str(path))
    if found is None:
        raise UsageError(
            f"there is no checkpoint in {path}", fix="give a checkpoint, a run directory or its folder checkpoints/"
        )
    trainer.is_placed = True
    return restore(trainer, found)


def resume(trainer: "Trainer", how: str) -> checkpoint.CheckpointPath | None:
    """See `Trainer.resume`."""
    started = time.perf_counter()
    found = find(trainer, how)
    changed = compare(trainer, found) if found is not None else []
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    step = _go_to(trainer, found)
    trainer.is_placed = True
    if found is None:
        return None
    if trainer.scales_rate:  # the config's own optimizer; a user's brings its options
        keep_what_was_changed(trainer.optimizer.param_groups, fresh, changed)
    trainer.resumed_from = found
    trainer.start_lines.append(f"goes on after step {step}, from {found}")
    if changed:
        trainer.start_lines.append(f"changed since that step: {', '.join(map(str, changed))}")
    if trainer.run_directory is not None and trainer.is_main_process:
        seconds = time.perf_counter() - started
        trainer.run_directory.append_event("resume", step=step, checkpoint=str(found), seconds=seconds)
    return found


def restore(trainer: "Trainer", path: checkpoint.Checkpoint) -> tuple[int, dict[str, Any]]:
    """Fill the trainer from a checkpoint of any topology.

    Returns:
        the step, and the metadata that it was saved with.

    Raises:
        UsageError: it holds another model; what differs is named.
    """
    step = trainer.step
    state = _fill(trainer, path)
    if "updates" not in state:
        state = {**_UNKNOWN_TO_A_LOOP, "updates": state["step"], **state}
        trainer.start_lines.append(
            f"{path} is of a loop over lockstep.place: data go on as after {state['step']} steps of this trainer"
        )
    step.progress = Progress(state["step"], state["updates"], list(state["skipped"]), state["epoch"], state["samples"])
    if state["nominal"] is not None:  # before the first step, and of weights that were imported, nobody knows it
        step.nominal = state["nominal"]
    if step.loss_scale is not None and state["loss_scale"] is not None:
        step.loss_scale.load_state_dict(state["loss_scale"])
    trainer.source_state, trainer.best = state["source"], state["best"]
    trainer.metrics = dict(state.get("metrics", {}))
    step.anomaly_detector.losses = deque(state.get("losses", ()))
    step.avoid |= set(state.get("avoid", ()))
    step.anomaly_detector.discard_pending()
    return step.progress.step, state["metadata"]


def _fill(trainer: "Trainer", path: checkpoint.Checkpoint) -> dict[str, Any]:
    """Tensors of the model, the strategy and the optimizer; what is left is the state that is no tensor."""
    placed, workers = trainer.placed, trainer.placed.local_training
    target = snapshot(trainer, include_optimizer=False, metadata={})
    # Workers may begin where a run without workers ended: each takes over its model and its optimizer state.
    begins = workers is not None and not checkpoint.has_extra(path, WORKERS)
    if begins:
        del target.extra[WORKERS]
    elif workers is not None:
        _require_as_many(path, workers.total)
    optimizer = _optimizer_in(path)
    named = {p: {("" if begins else p) + name: q for name, q in placed.parameters.items()} for p in _prefixes(trainer)}
    if optimizer is not None:
        wanted = {name: q for names in named.values() for name, q in names.items()}
        target.optimizers[optimizer] = checkpoint.optimizer_targets(path, optimizer, wanted)
    with torch.no_grad():
        state = checkpoint.load(path, target)
    if workers is not None and begins:
        workers.begin_from_common()
    if optimizer is None:
        return state
    for prefix in _prefixes(trainer):
        names = {id(q): name for name, q in named[prefix].items()}
        tensors = target.optimizers[optimizer]
        if begins:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        checkpoint.restore_optimizer(trainer.optimizer, names, tensors, state["optimizer_groups"][optimizer])
    return state


def _optimizer_in(path: checkpoint.Checkpoint) -> str | None:
    """Return the name of the one optimizer in a checkpoint; a loop of one's own names it as it likes."""
    names = checkpoint.optimizers_in(path)
    if len(names) > 1:
        raise UsageError(
            f"{path} holds the optimizers {listed(names)}, and a Trainer has one",
            why="a loop over lockstep.place wrote it",
            fix="go on with lockstep.place(…).load_checkpoint(path, optimizers); or take the weights alone: "
            "model.load_state_dict(lockstep.checkpoint.weights(path)) before the Trainer is made",
        )
    return names[0] if names else None


def _require_as_many(path: checkpoint.Checkpoint, workers: int) -> None:
    stored = checkpoint.read_state(path).get("workers")
    if stored != workers:
        raise UsageError(
            f"{path} holds {stored} workers, and this run has {workers}",
            why="each worker goes on from its own parameters and its own optimizer state",
            fix=f"set distributed.diloco.workers: {stored}, on a number of ranks that divides it",
        )


def find(trainer: "Trainer", how: str) -> checkpoint.CheckpointPath | None:
    """Where to resume from: the newest whole checkpoint (`auto`), nowhere (`never`), or the path that is given.

    Raises:
        UsageError: the path is no checkpoint.
        RunError: there are checkpoints, and none is whole: starting afresh is for a person to decide.
    """
    if how == "never":
        return None
    if how == "auto":
        folder = trainer.checkpoints
        if folder is None:
            return None
        if trainer.storage_is_shared:
            return checkpoint.resume_point(folder)
        here = checkpoint.newest(folder, thorough=True) if trainer.is_main_process else None
        return checkpoint.hand_out(here)
    if isinstance(trainer.checkpoints, checkpoint.Storage) and trainer.checkpoints.exists(how):
        return trainer.checkpoints.path(how)
    return _named(Path(how), how)


def go_back(trainer: "Trainer", how: str) -> tuple[checkpoint.CheckpointPath | None, int]:
    """Take the trainer to a checkpoint, and the run directory with it; every rank calls it.

    Metrics of later steps are dropped, and later checkpoints set aside: these steps will be written anew.

    Returns:
        the checkpoint and its step; None and 0 where there is none to go to.
    """
    found = find(trainer, how)
    return found, _go_to(trainer, found)


def _go_to(trainer: "Trainer", found: checkpoint.CheckpointPath | None) -> int:
    """The step that the trainer stands at once it, and its run directory, are taken to a checkpoint or to the start."""
    step = restore(trainer, found)[0] if found is not None else 0
    directory = trainer.run_directory
    if directory is not None and trainer.is_main_process:
        directory.forget_after(step)
        for path in checkpoint.set_aside(trainer.checkpoints or directory.checkpoints, after=step):
            directory.append_event("set_aside", step=step, checkpoint=path.name)
    if trainer.layout.world_size > 1:
        collectives.barrier()  # nobody looks into the folder before it is in order
    return step


def _named(path: Path, how: str) -> checkpoint.CheckpointPath:
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if path.is_dir() and not (path / checkpoint.MANIFEST).exists():
        found = checkpoint.resume_point(path)
        if found is not None:
            return found
    if not (path / checkpoint.MANIFEST).exists():
        raise UsageError(
            f"{how} is no checkpoint",
            where="--resume",
            why=f"there is no {checkpoint.MANIFEST} in it" if path.is_dir() else "there is no such folder",
            fix="give a folder checkpoints/step-…, a run directory, auto or never",
        )
    return path
