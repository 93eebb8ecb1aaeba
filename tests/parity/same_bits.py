"""Reproducible runs, as digests; functions here run on every rank of a test."""

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config import config_from
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer
from tests.parity.toy import RECIPE, VOCAB, Packed, Tokens, language_model, unchecked

Bits = tuple[str, list[tuple[str, str]]]
"""Digest of parameters and optimizer state at the end; (loss, gradient norm) of each step.

Loss and gradient norm are exact text.
"""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach()


def digest(trainer: Trainer) -> str:
    """SHA-256 of all parameters and their optimizer state, unsharded, by canonical name. All ranks
    call it.
    """
    tensors = {}
    for name, parameter in trainer.placed.parameters.items():
        tensors[name] = whole(parameter)
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"{name}//{key}"] = whole(value)
    if trainer.layout.pipeline > 1:
        everyone: list[Any] = [None] * trainer.layout.world_size
        torch.distributed.all_gather_object(everyone, tensors)
        for theirs in everyone:
            for name, value in theirs.items():
                assert torch.equal(tensors.setdefault(name, value), value), name
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def trainer_for(
    topology: str,
    model: str | nn.Module,
    settings: dict[str, Any],
    loss_fn: Any = None,
    **args: Any,
) -> Trainer:
    values, _ = parse_topology(topology)
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.learning_rate": 3e-3,
        **RECIPE,
        "training.warmup_steps": 3,
        "precision.mode": "fp32",
        "distributed.reproducible": True,
    }
    config = config_from(
        {**common, **{f"distributed.{key}": value for key, value in values.items()}, **settings}
    )
    built = language_model(model, **args) if isinstance(model, str) else model
    return unchecked(Trainer(built, config=config, loss_fn=loss_fn))


def bits(
    topology: str, model: str, settings: dict[str, Any] | None = None, steps: int = 8, **args: Any
) -> Bits:
    """Train from scratch; on samples of several documents with `packed`."""
    data = Packed() if args.pop("packed", False) else Tokens()
    settings = {"training.max_steps": steps, **(settings or {})}
    trainer = trainer_for(topology, model, settings, **args)
    records = [(float(r.loss).hex(), float(r.grad_norm).hex()) for r in trainer.steps(data)]
    return digest(trainer), records


def many(cases: list[tuple[Any, ...]]) -> list[Bits]:
    """`bits` of each case (topology, model, settings, steps, model arguments), one
    after the other.
    """
    return [bits(*case[:4], **(case[4] if len(case) > 4 else {})) for case in cases]


_of_one_process: dict[str, Bits] = {}


def of_one_process(rest: Sequence[Any]) -> Bits:
    """`bits` of (model, settings, steps, model arguments) on one process, trained once for all
    tests of a worker.
    """
    if (key := repr(rest)) not in _of_one_process:
        _of_one_process[key] = many([("single", *rest)])[0]
    return _of_one_process[key]


def go_on(trainer: Trainer, folder: str) -> None:
    """Load what `hand_over` has saved there last, if there is something."""
    newest = Path(folder, "newest")
    if newest.exists():
        trainer.load_checkpoint(newest.read_text())


def hand_over(trainer: Trainer, folder: str) -> None:
    """Save a run, on all ranks, for the next one that goes on from this folder."""
    path = trainer.save_checkpoint(Path(folder, f"step-{trainer.step.progress.step:08d}"))
    if trainer.layout.world_size > 1:
        torch.distributed.barrier()
    if trainer.is_main_process:
        Path(folder, "newest").write_text(str(path))
    if trainer.layout.world_size > 1:
        torch.distributed.barrier()


def relay(
    folder: str,
    model: str,
    settings: dict[str, Any],
    topologies: list[str],
    steps: int,
    vocabulary: int = VOCAB,
) -> Bits:
    """A run that changes its topology at checkpoints, `steps` steps on each; it goes on from
    `folder` if one is there.

    Returns:
        digest and records of this part of the run.
    """
    records = []
    trainer = None
    for topology in topologies:
        trainer = trainer_for(topology, model, settings, vocab_size=vocabulary)
        go_on(trainer, folder)
        for record in islice(trainer.steps(Tokens()), steps):
            records.append((float(record.loss).hex(), float(record.grad_norm).hex()))
        hand_over(trainer, folder)
    assert trainer is not None
    return digest(trainer), records
