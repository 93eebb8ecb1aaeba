"""Models with habits that a distributed step has to respect; functions here run on every rank of a
test.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Trainer, WeightAverage
from lockstep.errors import UsageError

WIDTH = 6
STEPS = 4
THAW = 2


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * STEPS, WIDTH, generator=generator)
    return TensorDataset(x, x.roll(1, dims=1).sin())


def chain(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), *modules
    )


class HostNoise(nn.Module):
    """Drops its input by Python's random numbers, and scales it by NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x) * (random.random() < 0.7) * float(np.random.rand())
        return out


def hooked() -> nn.Module:
    """Its gradients go through hooks: one that cuts elements, so it must see whole means, and one
    that only looks.
    """
    model = chain()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-2e-3, 1e-3))
        parameter.register_hook(lambda gradient: None)
    return model


def spectral() -> nn.Module:
    torch.manual_seed(0)
    new = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return chain(new, nn.Tanh(), old)


class Noisy(nn.Sequential):
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [
            (name, module)
            for name, module in self.named_children()
            if isinstance(module, HostNoise)
        ]


def noisy() -> nn.Module:
    torch.manual_seed(1)
    return Noisy(*chain(HostNoise(), HostNoise()))


class Distilled(nn.Module):
    """A student that is pulled to a teacher, which follows it: in the forward pass, or after the
    update.
    """

    def __init__(self, in_forward: bool = False, through_data: bool = False) -> None:
        super().__init__()
        self.student = chain()
        self.teacher = chain()
        self.teacher.requires_grad_(False)
        self.in_forward = in_forward
        self.through_data = through_data

    @torch.no_grad()
    def follow(self, _updates: int = 0) -> None:
        for teacher, student in zip(
            self.teacher.parameters(), self.student.parameters(), strict=True
        ):
            teacher = teacher.data if self.through_data else teacher
            teacher.mul_(0.7).add_(student.data if self.through_data else student, alpha=0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward and self.training:
            self.follow()
        out: Tensor = self.student(x) - 0.5 * self.teacher(x + 1)
        return out


class Counted(nn.Module):
    """Scales its output by the number of its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.passes = 0
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.last = float(x.sum())  # kept to be looked at: no state
        out: Tensor = self.layers(x) / self.passes
        return out


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * torch.rand(1, generator=self.generator)
        return out


class Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.table = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + self.table(x[:, 0].long().clamp(0, 3))
        return out


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "teacher": (lambda: Distilled(in_forward=True), "writes the parameter teacher.0.0.weight"),
    "teacher by .data": (
        lambda: Distilled(in_forward=True, through_data=True),
        "writes the parameter teacher.0.0",
    ),
    "max_norm": (Renormalised, "writes the parameter table.weight"),
    "counter": (Counted, "advances the attribute passes"),
    "generator": (OwnGenerator, "draws from a generator of the model's own, generator"),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "hooks": hooked,
    "spectral": spectral,
    "ema": chain,
    "swa": chain,
    "frozen": chain,
    "noise": noisy,
    "teacher": Distilled,
}

Result = tuple[list[float], list[float]]
"""Losses of the steps, and losses over the data at the end.

The latter are the loss of the model, and that of its average if there is one.
"""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(wanted, lr=0.2, momentum=0.5)


def plain(name: str) -> Result:
    """The author's own loop over whole batches."""
    model = MODELS[name]()
    averaged = {
        "ema": lambda: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6)),
        "swa": lambda: AveragedModel(model),
    }.get(name, lambda: None)()
    if name == "frozen":
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    losses = []
    for step, (x, y) in enumerate(DataLoader(data(), batch_size=8)):
        if step == THAW and name == "frozen":
            model[0].requires_grad_(True)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if isinstance(model, Distilled):
            model.follow()
        if averaged is not None and (name == "ema" or step >= 2):
            averaged.update_parameters(model)
        losses.append(loss.item())
    x, y = data().tensors
    ends = []
    for one in (model, averaged):
        if one is not None:
            with torch.no_grad():
                ends.append(nn.functional.mse_loss(one.eval()(x), y).item())
    return losses, ends


def ours(name: str, strategy: str, **more: Any) -> Result:
    model = MODELS[name]()
    average = {"ema": WeightAverage(0.6), "swa": WeightAverage(None, start=3)}.get(name)
    trainer = Trainer(
        model,
        optimizer_of(model),
        nn.MSELoss(),
        strategy=strategy,
        batch_size=2,
        global_batch_size=8,
        shuffle=False,
        after_update=model.follow if isinstance(model, Distilled) else average,
        freeze_until={"0": THAW} if name == "frozen" else None,
        min_num_params=1,
        **more,
    )
    losses = [float(record.loss) for record in trainer.steps(data())]
    ends = [trainer.evaluate(data())]
    if average is not None:
        with average.applied():
            ends.append(trainer.evaluate(data()))
        assert trainer.evaluate(data()) == ends[0]
    return losses, ends


def all_of(strategies: list[str], names: list[str]) -> dict[tuple[str, str, bool], Result]:
    """Models under every strategy: (model, strategy, reproducible) → what came out."""
    found = {}
    for strategy in strategies:
        for name in names:
            if name == "teacher" and strategy == "pipeline":
                continue  # it is not a chain
            for exact in (False, True):
                found[name, strategy, exact] = ours(name, strategy, reproducible=exact)
    return found


def refusals(strategies: list[str], *, reproducible: bool) -> dict[tuple[str, str], str]:
    """What is said to models that no rank can train alike."""
    return dict(_refusals(strategies, reproducible))


def _refusals(strategies: list[str], reproducible: bool) -> Iterator[tuple[tuple[str, str], str]]:
    for strategy in strategies:
        for name, (make, _) in REFUSED.items():
            model = make()
            trainer = Trainer(
                model,
                optimizer_of(model),
                nn.MSELoss(),
                strategy=strategy,
                batch_size=2,
                global_batch_size=8,
                reproducible=reproducible,
                min_num_params=1,
            )
            try:
                list(trainer.steps(data()))
                yield (name, strategy), "trained"
            except UsageError as error:
                yield (name, strategy), str(error)
        yield ("thawed", strategy), _thawed(strategy, reproducible)


def _thawed(strategy: str, reproducible: bool) -> str:
    model = chain()
    model[0].requires_grad_(False)
    trainer = Trainer(
        model,
        optimizer_of(model),
        nn.MSELoss(),
        strategy=strategy,
        batch_size=2,
        global_batch_size=8,
        reproducible=reproducible,
    )
    try:
        for _ in trainer.steps(data()):
            model.requires_grad_(True)
    except UsageError as error:
        return str(error)
    return "trained"


def average_goes_on(folder: str, strategy: str) -> tuple[list[float], list[float]]:
    """What the average is worth after all steps, and after a resume half-way."""

    def trainer(average: WeightAverage) -> Trainer:
        model = chain()
        return Trainer(
            model,
            optimizer_of(model),
            nn.MSELoss(),
            strategy=strategy,
            batch_size=2,
            global_batch_size=8,
            after_update=average,
            max_steps=STEPS,
        )

    ends: list[list[float]] = []
    saved = None
    for resumed in (False, True):
        average = WeightAverage(0.6)
        run = trainer(average)
        if resumed:
            assert saved is not None
            run.load_checkpoint(saved)
        for record in run.steps(data()):
            if record.step == 2 and not resumed:
                saved = run.save_checkpoint(folder)
        with average.applied():
            ends.append([run.evaluate(data())])
    lockstep.barrier()
    return ends[0], ends[1]


@dataclass
class OnRanks:
    """What came out on several ranks."""

    runs: dict[tuple[str, str, bool], Result]
    refusals: dict[tuple[str, str], str]
    averages: list[tuple[list[float], list[float]]]


def on_ranks(folder: str, names: list[str]) -> OnRanks:
    """All of the cases of two ranks, in one launch."""
    averages = [
        average_goes_on(f"{folder}/{strategy}", strategy)
        for strategy in ("ddp", "fsdp", "pipeline")
    ]
    found = refusals(["ddp", "fsdp"], reproducible=False)
    return OnRanks(all_of(["ddp", "fsdp", "pipeline"], names), found, averages)
