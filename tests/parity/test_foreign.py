"""Models as others write them: the author's own losses, and one digest, under every topology; or a
clear refusal.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

import lockstep
from lockstep.config import Config, config_from
from lockstep.errors import UsageError
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer
from tests.parity import decoders
from tests.parity.decoders import DECODERS
from tests.parity.foreign import SAMPLES, Sample, gan, noisy
from tests.parity.foreign_kinds import MODELS
from tests.parity.same_bits import digest
from tests.ranks import results_or_errors, run_ranks
from tests.sampled import quick_and_full, sampled

pytest.importorskip("transformers")

STEPS = 3
LEARNING_RATE = 0.1
TOLERANCE = 1e-5
TOPOLOGIES = {
    2: ("ddp:2", "fsdp:2", "pipeline:2", "tensor:2", "context:2"),
    4: ("ddp:4", "fsdp:4", "hybrid:2x2", "pipeline:2*ddp:2"),
}
# takes seconds on each rank to trace for a pipeline
TRACED = ("nanochat", "x_transformers")
GAN = "gan"  # two models and two optimizers: no Trainer has them

MADE = {**MODELS, **DECODERS}
IN_CHUNKS = {"distributed.context_blocks": 4, "distributed.sequence_parallel": False}

Case = tuple[str, str, bool]
"""(model, topology, reproducible)."""

TORCH_STEP = {
    "training.optimizer": "sgd",
    "training.optimizer_args": {"momentum": 0.0},
    "training.weight_decay": 0.0,
    "training.learning_rate": LEARNING_RATE,
    "training.lr_schedule": "constant",
    "training.warmup_steps": 0,
    "training.gradient_clip": {"strategy": "none"},
    "training.max_steps": STEPS,
    "precision.mode": "fp32",
    "training.batch_size": 2,
    "training.global_batch_size": SAMPLES,
}


class Samples(Dataset[Sample]):
    """As many as a step takes, so that the order in which they come changes nothing but sums."""

    deterministic = True

    def __init__(self, sample: Callable[[int], Sample]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)


class Run(NamedTuple):
    """What became of a model under a topology.

    Attributes:
        refused: the message, where it was.
    """

    losses: list[float]
    digest: str
    refused: str = ""


def settings_of(
    topology: str, reproducible: bool, like: str = "", own: Mapping[str, Any] = MappingProxyType({})
) -> Config:
    """Settings of a topology, with the bits of runs that are `like` another."""
    values, _ = parse_topology(topology)
    distributed = {f"distributed.{key}": value for key, value in values.items()}
    exact = IN_CHUNKS if reproducible and "context" in (like or topology) else {}
    return config_from(
        {**TORCH_STEP, **own, **distributed, **exact, "distributed.reproducible": reproducible}
    )


def run(name: str, topology: str, reproducible: bool = True, like: str = "") -> Run:
    if name == GAN:
        return run_gan(topology) if reproducible else run_gan_by_hand(topology)
    made = MADE[name]
    model = made.make()
    if topology.startswith("pipeline") and made.piped is not None:
        model = made.piped(model)
    try:
        trainer = Trainer(
            model,
            loss_fn=made.loss_fn,
            config=settings_of(topology, reproducible, like, made.settings),
        )
        losses = [float(record.loss) for record in trainer.steps(Samples(made.sample))]
    except UsageError as error:
        return Run([], "", str(error))
    return Run(losses, digest(trainer))


def run_gan(topology: str) -> Run:
    """Two trainers, whose steps take turns."""
    judging, making = (Trainer(model, config=settings_of(topology, True)) for model in gan())
    steps = zip(judging.steps(Samples(noisy)), making.steps(Samples(noisy)), strict=True)
    losses = [float(record.loss) for both in steps for record in both]
    return Run(losses, digest(judging) + digest(making))


def run_gan_by_hand(topology: str) -> Run:
    """A loop of one's own: two optimizers that take turns."""
    values, _ = parse_topology(topology)
    both = [lockstep.place(model, **values) for model in gan()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE) for each in both]
    samples = [noisy(index) for index in range(SAMPLES)]
    batches = [default_collate(samples[first : first + 2]) for first in range(0, SAMPLES, 2)]
    losses = []
    for _ in range(STEPS):
        for placed, optimizer in zip(both, optimizers, strict=True):
            mine = slice(placed.data_parallel_rank, None, placed.data_parallel_size)
            losses.append(float(placed.backward(*batches[mine])))
            optimizer.step()
            optimizer.zero_grad()
    return Run(losses, "")


def run_all(cases: Sequence[Case]) -> list[Run | str]:
    """On every rank: all cases; an error that is not a refusal is a case's result."""
    return results_or_errors(run, cases)


@cache
def own_loop(name: str) -> list[float]:
    """The author's: all samples at once, in plain PyTorch; of CLIP, that depends on micro-batches,
    one process's.
    """
    if name == GAN:
        models = list(gan())
        losses_of = [lambda m, b: m(**b), lambda m, b: m(b["noise"])]
        batch = default_collate([noisy(index) for index in range(SAMPLES)])
    elif MADE[name].loss is None:
        return alone(name).losses
    else:
        models = [(MADE[name].reference or MADE[name].make)()]
        losses_of = [MADE[name].loss]
        batch = default_collate([MADE[name].sample(index) for index in range(SAMPLES)])
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LEARNING_RATE)
        for m in models
    ]
    losses = []
    for _ in range(STEPS):
        for model, optimizer, loss_of in zip(models, optimizers, losses_of, strict=True):
            loss: Tensor = loss_of(model, batch)  # type: ignore[misc]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@cache
def alone(name: str, like: str = "") -> Run:
    """One process, with the settings by which its bits are those of a topology."""
    return run(name, "single", like=like)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def refusal(name: str, topology: str) -> str:
    """What the message must name; empty where the model trains."""
    return "" if name == GAN or name in DECODERS else MODELS[name].refusal(topology)


def problem(case: Case, result: Run | str) -> str:
    """What is wrong with a result; empty: nothing."""
    name, topology, reproducible = case
    if isinstance(result, str):
        return result
    if expected := refusal(name, topology):
        return "" if expected in result.refused else f"is not refused, but {result}"
    if result.refused:
        return f"refused, {result.refused}"
    if (distance := apart(result.losses, own_loop(name))) > TOLERANCE:
        return f"{distance:.1e} away from the author's loop"
    like = topology if topology.startswith("context") else ""
    return (
        "another digest than one process"
        if reproducible and result.digest != alone(name, like).digest
        else ""
    )


def problems(cases: Sequence[Case], results: Sequence[Run | str]) -> list[str]:
    found = zip(cases, map(problem, cases, results), strict=True)
    return [
        f"{name} on {topology}, {reproducible=}: {text}"
        for (name, topology, reproducible), text in found
        if text
    ]


def pairs_of(ranks: int) -> list[tuple[str, str]]:
    """(model, topology)."""
    return [
        *((name, topology) for name in MODELS for topology in TOPOLOGIES[ranks]),
        (GAN, f"ddp:{ranks}"),
    ]


def require(ranks: int, cases: list[Case], timeout: float) -> None:
    found = [
        problems(cases, results) for results in run_ranks(run_all, ranks, cases, timeout=timeout)
    ]
    assert not any(found), "\n".join(found[0] or next(filter(None, found)))


@pytest.mark.parametrize("name", quick_and_full([*MODELS, GAN], [*list(MODELS)[::4], GAN]))
def test_one_process_takes_the_steps_of_the_authors_own_loop(name: str) -> None:
    assert not problem((name, "single", True), alone(name))
    if name == GAN:
        assert not problem((name, "single", False), run_gan_by_hand("single"))


# One topology or two of each model, each topology with a third of them.
IN_TURN: list[Case] = [
    (GAN, "ddp:2", True),
    *((name, topology, True) for name, topology in pairs_of(2)[::3] if name not in TRACED),
    *((name, "fsdp:2", True) for name in TRACED),
    (GAN, "ddp:2", False),
]
assert {name for name, *_ in IN_TURN} == {*MODELS, GAN}


@sampled("cases", IN_TURN, 6)
def test_two_ranks_take_the_steps_of_the_authors_own_loop(cases: list[Case]) -> None:
    """With the digest of one process; or the model is refused, and the message says what to do."""
    require(2, cases, timeout=300)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model_under_every_topology(ranks: int) -> None:
    """Reproducible or not."""
    cases = [(*pair, reproducible) for pair in pairs_of(ranks) for reproducible in (True, False)]
    require(ranks, cases, timeout=3000)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_page_of_families_says_what_came_out_of_each_decoder() -> None:
    text = decoders.PAGE.read_text()
    assert text == decoders.in_page(text), "python -m tests.parity.decoders --write"
