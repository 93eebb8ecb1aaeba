"""What runs on every rank for the tests of pipelines: odd models, odd data, and what is
looked at.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.parallel.execution.executor import Executor
from lockstep.parallel.pipeline import stage_sync
from lockstep.trainer import Trainer
from tests.parity import pipelines
from tests.parity.toy import RECIPE, VOCAB, Tokens, language_model, unchecked

Steps = list[tuple[float, float, float]]

COMMON: dict[str, Any] = {
    "training.batch_size": 2,
    "training.global_batch_size": 12,
    "training.learning_rate": 3e-3,
    **RECIPE,
    "training.max_steps": 2,
    "precision.mode": "fp32",
}


def piped(schedule: str = "1F1B", **more: Any) -> dict[str, Any]:
    """Settings for a schedule, with keys of `distributed` in `more`."""
    return {
        "distributed.strategy": "pipeline",
        "distributed.pipeline.schedule": schedule,
        "distributed.pipeline.stages_per_rank": pipelines.SCHEDULES[schedule],
        **{f"distributed.{key.replace('__', '.')}": value for key, value in more.items()},
    }


def trainer_of(model: nn.Module, settings: dict[str, Any], loss_fn: Any = None) -> Trainer:
    return unchecked(Trainer(model, loss_fn=loss_fn, config=config_from({**COMMON, **settings})))


def steps_of(trainer: Trainer, data: Dataset[Any]) -> Steps:
    return [(float(r.loss), float(r.grad_norm), float(r.tokens)) for r in trainer.steps(data)]


def worst(one: Steps, other: Steps) -> float:
    assert len(one) == len(other)
    return max(
        abs(a - b) / max(abs(b), 1e-12)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


class TextsOfAllLengths(Dataset[dict[str, Tensor]]):
    """Each sample has a length of its own; to be read one at a time."""

    deterministic = True

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(
            0, VOCAB, (3 + index * 7 % 11,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": ids[:-1], "targets": ids[1:]}


# ---- odd models: chains whose tensors travel in every way ----


class Start(nn.Module):
    """ids → (x, ids, a loss of its own per sample): integers and an auxiliary loss are carried."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        return x, ids, x.square().mean((1, 2)) * 0.3


class Middle(nn.Module):
    """(x, ids, auxiliary) → the same; looks at the ids again, returns one input as it came and one
    as a view.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.bias = nn.Embedding(VOCAB, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, ids: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x + self.drop(torch.tanh(self.linear(x))) + self.bias(ids)
        return y.view(y.shape), ids, auxiliary + y.abs().mean((1, 2)) * 0.2


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, VOCAB)

    def forward(self, x: Tensor, ids: Tensor, auxiliary: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x), "auxiliary": auxiliary, "ids": ids}


class Carrying(nn.Module):
    """An auxiliary loss is born in every stage and summed at the end; the gradient of a sum is not
    contiguous.
    """

    def __init__(self, middles: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.start = Start()
        self.end = End()
        self.middle = nn.ModuleList(Middle() for _ in range(middles))

    def segments(self) -> list[tuple[str, nn.Module]]:
        middle = [(f"middle.{i}", module) for i, module in enumerate(self.middle)]
        return [("start", self.start), *middle, ("end", self.end)]

    def forward(self, ids: Tensor) -> Any:
        values: Any = (ids,)
        for _, segment in self.segments():
            values = segment(*values)
        return values

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        return (batch["input_ids"],)

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        logits = outputs["logits"].flatten(0, 1)
        targets = batch["targets"].flatten()
        assert torch.equal(outputs["ids"], batch["input_ids"])
        return (
            nn.functional.cross_entropy(logits, targets, reduction="sum")
            + outputs["auxiliary"].sum() * 16
        )

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["targets"] != -100).sum())


class TwoOutputs(torch.autograd.Function):
    """One operation with a weight whose outputs both have gradients: (x·w, x + w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return product * weight + total, (product * x + total).flatten(0, -2).sum(0)


class TwofoldMiddle(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor, ids: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product, total = TwoOutputs.apply(x, self.scale)  # type: ignore[no-untyped-call]
        return super().forward(product + torch.tanh(total), ids, auxiliary)


class DeafEnd(End):
    def forward(self, x: Tensor, ids: Tensor, auxiliary: Tensor) -> dict[str, Tensor]:
        return super().forward(x, ids, torch.zeros_like(auxiliary))


class Twofold(Carrying):
    """What torch's halves of a backward pass are fussy about: see `Backward`. An input of the last
    stage is unused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList(TwofoldMiddle() for _ in range(6))
        self.end = DeafEnd()


class Drifting(Carrying):
    """Shapes in the middle depend on values: what a pipeline can't do, and must say."""

    def __init__(self) -> None:
        super().__init__(2)
        self.calls = 0
        self.start.register_forward_hook(self._drift)

    def _drift(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        self.calls += 1
        return (
            tuple(t[:, :-1].contiguous() if t.ndim > 1 else t for t in outputs)
            if self.calls > 4
            else outputs
        )


def recurring() -> nn.Module:
    """One module, with weights and dropout, in three places of the chain."""
    torch.manual_seed(7)
    again = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh())
    return nn.Sequential(
        nn.Linear(16, 16),
        again,
        nn.Linear(16, 16),
        again,
        nn.LayerNorm(16),
        again,
        nn.Linear(16, 16),
    )


def normalised() -> nn.Module:
    """Batch normalisation in every stage."""
    torch.manual_seed(9)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=0.3)) for _ in range(4))
    )


def frozen() -> nn.Module:
    """Nothing trains in the first stages."""
    model = Carrying()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            not name.startswith(("start", "middle.0", "middle.1", "middle.2", "middle.3"))
        )
    return model


def with_spare() -> nn.Module:
    """A parameter that no segment uses."""
    model = Carrying()
    model.spare = nn.Parameter(torch.ones(3))
    return model


def deep(name: str = "transformer", **args: Any) -> nn.Module:
    return language_model(name, **{"n_layer": 4, "n_embd": 16, "n_head": 2, **args})


def shallow() -> nn.Module:
    """Two blocks: each takes seconds to compile."""
    return deep(n_layer=2)


# ---- what is run ----


def train(
    make: str, settings: dict[str, Any], data: str = "Tokens", args: dict[str, Any] | None = None
) -> Steps:
    """Train `make()` on `data()`, both named here."""
    loss_fn = nn.CrossEntropyLoss() if data == "Points" else None
    trainer = trainer_of(globals()[make](**(args or {})), settings, loss_fn)
    return steps_of(trainer, DATA[data]())


DATA: dict[str, Any] = {
    "Tokens": Tokens,
    "TextsOfAllLengths": TextsOfAllLengths,
    "Points": pipelines.Points,
}


def train_all(cases: Sequence[tuple[Any, ...]]) -> list[Steps]:
    results = []
    for case in cases:
        try:
            results.append(train(*case))
        except Exception as error:
            error.add_note(str(case))
            raise
    return results


def whole_values(trainer: Trainer) -> dict[str, Tensor]:
    """Name → whole value of the parameters that this rank holds; collective where they
    are sharded.
    """
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.placed.parameters.items()
    }


def look(settings: dict[str, Any], model: str, **args: Any) -> dict[str, Any]:
    """A placed model, before any step and after two."""
    trainer = trainer_of(deep(model, **args), settings)
    before = whole_values(trainer)
    next(iter(trainer.steps(Tokens())))
    ids = torch.arange(2 * 9).view(2, 9) % VOCAB
    return {
        "first": before,
        "then": whole_values(trainer),
        "optimizer": len(trainer.optimizer.state),
        "on_meta": [
            n for part in trainer.placed.parts for n, b in part.named_buffers() if b.is_meta
        ],
        "counted": trainer.placed.counted,
        "wants_data": trainer.placed.wants_data,
        "sample": trainer.forward(ids),
        "log_lines": trainer.placed.log_lines,
        "num_parameters": trainer.placed.num_parameters,
    }


def names(settings: dict[str, Any]) -> list[str]:
    """Of this rank's parameters, as checkpoints have them."""
    return list(trainer_of(deep(), settings).placed.parameters)


def overflow(settings: dict[str, Any]) -> list[tuple[bool, float, float]]:
    """(skipped, loss scale, loss) of steps that start with a loss scale that is too high."""
    config = {
        "precision.mode": "fp16",
        "precision.loss_scale.initial_scale": 2.0**24,
        "precision.loss_scale.growth_interval": 2,
        "training.max_steps": 10,
    }
    trainer = trainer_of(deep(), {**config, **settings})
    return [(bool(r.skipped), float(r.loss_scale), float(r.loss)) for r in trainer.steps(Tokens())]


def running_statistics(settings: dict[str, Any]) -> dict[str, Tensor]:
    # small batches make training ill-conditioned
    still = {"training.batch_size": 4, "training.learning_rate": 1e-9}
    trainer = trainer_of(normalised(), {**still, **settings}, nn.CrossEntropyLoss())
    steps_of(trainer, pipelines.Points())
    return {name: buffer.clone() for name, buffer in trainer.placed.buffers.items()}


_OF_A_RUN = {"training.max_steps": 3}


def save(settings: dict[str, Any], folder: str) -> Steps:
    """Two steps, a checkpoint, and one more."""
    trainer = trainer_of(deep(tie_embeddings=True), settings | _OF_A_RUN)
    steps = trainer.steps(Tokens())
    done = [next(steps) for _ in range(2)]
    trainer.save_checkpoint(Path(folder))
    return [(float(r.loss), float(r.grad_norm), float(r.tokens)) for r in [*done, *steps]]


def go_on(settings: dict[str, Any], folder: str) -> Steps:
    """What follows the checkpoint."""
    trainer = trainer_of(deep(tie_embeddings=True), settings | _OF_A_RUN)
    trainer.load_checkpoint(Path(folder))
    return steps_of(trainer, Tokens())


def parity(case: pipelines.Case) -> pipelines.Result:
    return pipelines.run(case.model, case.settings())


def evaluation(settings: dict[str, Any], data: str) -> float:
    return trainer_of(deep(), {"training.batch_size": 1, **settings}).evaluate(DATA[data]())


def reductions(settings: dict[str, Any]) -> dict[str, int]:
    """How often, in one step, schedules run and gradients are reduced over replicas."""
    counts = {"runs": 0, "reductions": 0}
    trainer = trainer_of(deep(), settings)
    reduce = stage_sync.reduce_gradients
    run = Executor.run

    def counted_reduce(unit: Any, *, begun: bool) -> None:
        counts["reductions"] += 1
        reduce(unit, begun=begun)

    def counted_run(self: Executor, *args: Any, **kwargs: Any) -> None:
        counts["runs"] += 1
        run(self, *args, **kwargs)

    with (
        patch.object(stage_sync, "reduce_gradients", counted_reduce),
        patch.object(Executor, "run", counted_run),
    ):
        next(iter(trainer.steps(Tokens())))
    return counts


def several(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Functions of this file, by name, one after the other on each rank."""
    results = []
    for name, args in calls:
        try:
            results.append(globals()[name](*args))
        except Exception as error:
            error.add_note(f"rank {dist.get_rank() if dist.is_initialized() else 0}: {name}{args}")
            raise
    return results


def message_of(make: str, settings: dict[str, Any]) -> str:
    """The error of a training that fails on this rank."""
    try:
        train(make, settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
