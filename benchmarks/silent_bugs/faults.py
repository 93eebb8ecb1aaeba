"""Faults and sound models for `lockstep verify`; each function builds one, in every process.

`FAULTS` says for each fault what its cause must name, `SOUND` lists models that must pass. Where a fault is planted on
one rank, that is rank 1; the process that is the reference is rank 0 of 1.
"""

import math
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from lockstep.environment import rank_facts
from lockstep.trainer import Trainer
from lockstep.verify import Subject

VOCAB, LENGTH, WIDTH = 31, 8, 16


def on_rank_1() -> bool:
    return rank_facts().rank == 1


def on_ranks() -> bool:
    return rank_facts().world_size > 1


class Tokens(Dataset[dict[str, Tensor]]):
    """Samples in which up to four targets do not count."""

    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        targets = ids[1:].clone()
        targets[: index % 5] = -100
        return {"input_ids": ids[:-1], "targets": targets}


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of vectors."""

    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x, torch.tanh(x.roll(1)) + 0.1 * torch.randn(WIDTH, generator=generator)


class Block(nn.Module):
    """A layer of a small language model, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return x + y.cumsum(1) / LENGTH


class Net(nn.Module):
    """A small language model."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch["input_ids"],)

    def positions(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(self.positions(ids))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")

    def count(self, batch: Any) -> Any:
        return (batch["targets"] != -100).sum()


def net(model: nn.Module | None = None, prepare: Callable[[Trainer], None] = lambda _: None) -> Subject:
    return Subject(Net() if model is None else model, Tokens(), prepare=prepare)


def vectors(model: nn.Module, **rest: Any) -> Subject:
    return Subject(model, Vectors(), **{"loss_fn": nn.MSELoss(), **rest})


@dataclass(frozen=True)
class Fault:
    """What verify must find.

    Attributes:
        make: builds it.
        kinds: of a cause that is right.
        names: words that its text must have, any one of each tuple.
        topology: on which it shows.
        settings: of the run.
        steps: number of steps.
    """

    make: Callable[[], Any]
    kinds: tuple[str, ...]
    names: tuple[tuple[str, ...], ...] = ()
    topology: str = "ddp:2"
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 2


FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(*kinds: str, names: str = "", **rest: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a fault; `names` is words joined by spaces, alternatives by |."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        FAULTS.append(Fault(make, kinds, tuple(tuple(word.split("|")) for word in names.split()), **rest))
        return make

    return register


def sound(**rest: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        SOUND.append(Fault(make, (), **rest))
        return make

    return register


# ---- gradients ----


def after_reduction(change: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """Change gradients once they are reduced."""

    def prepare(trainer: Trainer) -> None:
        finish = trainer.placed.finish_gradients

        def changed() -> None:
            finish()
            change(trainer)

        trainer.placed.finish_gradients = changed

    return prepare


def gradient(trainer: Trainer, name: str) -> Tensor:
    found = trainer.placed.parameters[name].grad
    assert found is not None
    return found


class Chaos(nn.Module):
    """Sixty steps of a map, each of which magnifies a difference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = torch.sin(3 * self.inner(x))
        y: Tensor = self.head(x)
        return y


@fault("reduction", names="inner.weight 0 rank|ranks")
def chaotic_net_with_a_gradient_zeroed_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            gradient(trainer, "inner.weight").zero_()

    return vectors(Chaos(), prepare=after_reduction(change))


@fault("reduction", names="blocks.0.up.weight 2")
def gradient_doubled_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            gradient(trainer, "blocks.0.up.weight").mul_(2)

    return net(prepare=after_reduction(change))


@fault("reduction", names="2")
def gradients_summed_where_a_mean_is_due() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_ranks():
            for parameter in trainer.placed.parameters.values():
                parameter.grad.mul_(2)  # type: ignore[union-attr]

    return net(prepare=after_reduction(change))


@fault("reduction", names="1/2")
def gradients_averaged_twice() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_ranks():
            for parameter in trainer.placed.parameters.values():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(4)  # type: ignore[union-attr]

    return net(prepare=after_reduction(change))


@fault("reduction", names="transposed inner.weight")
def gradient_transposed_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            found = gradient(trainer, "inner.weight")
            found.copy_(found.T.clone())

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.inner(x)))

    return vectors(Two(), prepare=after_reduction(change))


@fault("synchronisation", names="not_reduced|reduced")
def accumulation_that_reduces_no_gradient() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_ranks():
            from lockstep.parallel.ddp import DDPSync

            before = DDPSync.before

            def never(self: Any, run: Any) -> None:
                before(self, run)
                self._model.require_backward_grad_sync = False

            DDPSync.before = never  # type: ignore[method-assign]

    return net(prepare=prepare)


@fault("loss", "other ranks", names="2 loss rank_1")
def accumulated_gradients_not_divided_on_rank_1() -> Subject:
    """Its part of the mean weighs as one micro-batch more."""

    class Unscaled(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            return super().loss(logits, batch) * (2 if on_rank_1() else 1)

    return net(Unscaled())


@fault("unsynchronised parameter", names="blocks.1.down.weight")
def parameter_left_out_of_ddp() -> Subject:
    model = Net()
    ignore = "_set_params_and_buffers_to_ignore_for_model"
    getattr(nn.parallel.DistributedDataParallel, ignore)(model, ["blocks.1.down.weight"])
    return net(model)


@fault("backward", "gradient hook", names="blocks.0.up.weight")
def hook_on_a_parameter_of_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.placed.parameters["blocks.0.up.weight"].register_hook(lambda g: g.clamp(-1e-4, 1e-4))

    return net(prepare=prepare)


@fault("gradient hook", "backward", names="blocks.1.down")
def hook_on_a_module_that_halves_gradients_on_ranks() -> Subject:
    model = Net()
    if on_ranks():
        model.blocks[1].down.register_full_backward_hook(lambda _m, grads, _o: tuple(g / 2 for g in grads))  # type: ignore[union-attr]
    return net(model)


class HalfGradient(torch.autograd.Function):
    """Passes values on, and half of their gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / 2


@fault("backward", "other ranks", names="blocks.1 1/2")
def backward_of_a_layer_that_halves_on_rank_1() -> Subject:
    class Halving(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(HalfGradient.apply(x) if on_rank_1() else x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[1] = Halving()
    return net(model)


# ---- precision and modes ----


@fault("low precision", names="autocast|bfloat16 1")
def autocast_on_rank_1() -> Subject:
    class Casting(Net):
        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on_rank_1()):
                return super().forward(ids).float()

    return net(Casting())


@fault("low precision", names="blocks.0 1")
def a_layer_in_half_precision_on_rank_1() -> Subject:
    class Rounding(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.bfloat16().float() if on_rank_1() else y

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Rounding()
    return net(model)


@fault("training mode", names="evaluation dropout")
def evaluation_mode_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            for part in trainer.placed.parts:
                part.eval()

    return net(prepare=prepare)


# ---- what a rank computes ----


@fault("other ranks", "forward", names="place shifted|+|2")
def positions_shifted_by_rank() -> Subject:
    class Shifted(Net):
        def positions(self, ids: Tensor) -> Tensor:
            return torch.arange(ids.shape[1]) + rank_facts().rank

    return net(Shifted())


@fault("other ranks", "loss", names="loss 1")
def labels_shifted_on_rank_1() -> Subject:
    class Shifted(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            targets = batch["targets"].roll(1, 1) if on_rank_1() else batch["targets"]
            return super().loss(logits, {"targets": targets})

    return net(Shifted())


@fault("data order", names="micro-batches")
def labels_of_another_sample_on_ranks() -> Subject:
    class Other(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            found = super().__getitem__(index)
            return {**found, "targets": super().__getitem__(index + 1)["targets"]} if on_ranks() else found

    return Subject(Net(), Other())


@fault("data order", names="micro-batches")
def every_rank_reads_the_same_samples() -> Subject:
    class Same(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(index % 4 if on_ranks() else index)

    return Subject(Net(), Same())


@fault("loss normalisation", names="targets")
def mean_of_means_on_ranks() -> Subject:
    class Means(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            total = super().loss(logits, batch)
            return total / super().count(batch) if on_ranks() else total

        def count(self, batch: Any) -> Any:
            return 1 if on_ranks() else super().count(batch)

    return net(Means())


@fault("other ranks", names="allgather|all_gather loss")
def negatives_gathered_from_all_ranks() -> Subject:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.one(x), self.other(y)
            keys = b
            if dist.is_initialized() and dist.get_world_size() > 1:
                every = [torch.empty_like(b) for _ in range(dist.get_world_size())]
                dist.all_gather(every, b.detach())
                every[dist.get_rank()] = b
                keys = torch.cat(every)
            first = dist.get_rank() * len(b) if dist.is_initialized() else 0
            return functional.cross_entropy(a @ keys.T, torch.arange(len(a)) + first)

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(Contrastive(), Vectors())


@fault("other ranks", names="allreduce|all_reduce")
def statistics_averaged_over_ranks_in_forward() -> Subject:
    class Centred(Block):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean((0, 1))
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean = mean / dist.get_world_size()
            return super().forward(x - mean)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Centred()
    return net(model)


@fault("forward", names="blocks.1 1 rank|ranks")
def a_layer_scaled_on_rank_1() -> Subject:
    model = Net()
    if on_rank_1():
        model.blocks[1].register_forward_hook(lambda _m, _a, out: out * 1.01)
    return net(model)


@fault("forward", names="head 1")
def a_mask_inverted_on_rank_1() -> Subject:
    model = Net()
    if on_rank_1():
        model.head.register_forward_pre_hook(lambda _m, args: (-args[0],))
    return net(model)


# ---- random numbers ----


@fault("random numbers", names="rank 1")
def another_seed_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        trainer.placed.random_state.seed += rank_facts().rank

    return net(prepare=prepare)


GENERATOR = torch.Generator().manual_seed(0)


@fault("memory", names="GENERATOR")
def own_generator_of_the_module() -> Subject:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=GENERATOR))

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Noisy()
    return net(model)


NUMPY = np.random.default_rng(0)


@fault("memory", names="NUMPY")
def numpy_generator_in_forward() -> Subject:
    class Scaled(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * float(1 + 0.2 * NUMPY.random())

    return net(Scaled())


PYTHON = random.Random(0)


@fault("memory", names="PYTHON")
def python_generator_in_forward() -> Subject:
    class Dropping(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (0.5 if PYTHON.random() < 0.5 else 1.0)

    return net(Dropping())


@fault("non-deterministic operation", names="blocks.0|model|embed")
def numbers_from_the_operating_system() -> Subject:
    model = Net()

    def noisy(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * (1 + int.from_bytes(os.urandom(2), "little") / 2**18)

    model.blocks[0].register_forward_hook(noisy)
    return net(model)


# ---- memory ----


STEPS = {"seen": 0}


@fault("memory", names="STEPS")
def counter_of_the_module() -> Subject:
    class Warming(Net):
        def forward(self, ids: Tensor) -> Tensor:
            STEPS["seen"] += 1
            return super().forward(ids) * min(1.0, 0.2 * STEPS["seen"])

    return net(Warming())


QUEUE: deque[Tensor] = deque(maxlen=2)


@fault("memory", names="QUEUE")
def queue_of_earlier_micro_batches() -> Subject:
    class Remembering(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            past = sum(QUEUE) / len(QUEUE) if QUEUE else 0.0
            QUEUE.append(y.detach().mean())
            return y + past

    model = Net()
    torch.manual_seed(1)
    model.blocks[1] = Remembering()
    return net(model)


@fault("memory", "buffer", "refused", names="seen")
def buffer_written_and_read_in_forward() -> Subject:
    class Centring(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            seen: Tensor = self.seen  # type: ignore[assignment]
            seen.mul_(0.5).add_(0.5 * x.detach().mean((0, 1)))
            return super().forward(x - seen)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Centring()
    return net(model)


@fault("refused", names="blocks.0.up.weight")
def parameter_written_in_forward() -> Subject:
    class Renormalising(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.mul_(0.99)
            return super().forward(x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Renormalising()
    return net(model)


@fault("refused", "memory", names="calls")
def counter_in_an_attribute() -> Subject:
    class Counting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x) * (1 + 0.01 * self.calls)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Counting()
    model.blocks[0].calls = 0
    return net(model)


# ---- pipelines ----


class Stem(nn.Module):
    """Token and position embeddings."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.embed, self.place = model.embed, model.place

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        return x


class Chain(Net):
    """A model that is its segments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem(self)
        del self.embed, self.place

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def segments(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("stem", self.stem), *blocks, ("head", self.head)]


@fault("segments", names="forward()", topology="pipeline:2")
def segments_that_are_not_forward() -> Subject:
    class Scaled(Chain):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 0.5

    return net(Scaled())


@fault("reduction", "backward", names="stem.embed.weight", topology="pipeline:2")
def tied_weight_whose_gradient_is_lost_in_a_pipeline() -> Subject:
    def change(trainer: Trainer) -> None:
        found = trainer.placed.parameters.get("stem.embed.weight")
        if on_rank_1() and found is not None and found.grad is not None:
            found.grad.zero_()
        elif on_ranks() and found is not None and found.grad is not None:
            found.grad.mul_(0.5)

    return net(Chain(), prepare=after_reduction(change))


# ---- the loss and the cut into micro-batches ----


class Weighted(Net):
    """Divides its loss by something that its count does not say."""

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        weights = 1.0 + (batch["targets"] % 3).float()
        each = functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
        return (each * weights).sum() / weights.sum() * super().count(batch)


@fault("loss normalisation", names="count|mean")
def loss_that_is_a_mean_over_something_else() -> Subject:
    return net(Weighted())


class MeanOfAll(nn.Module):
    """Takes the mean over masked targets, and does not say over how many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = (y > 0.3).float()
        return ((self.inner(x) - y).square() * mask).sum() / mask.sum()


@fault("loss normalisation", names="count|mean")
def masked_mean_without_a_count() -> Subject:
    return Subject(MeanOfAll(), Vectors())


# ---- the optimizer ----


@fault("optimizer", names="rank 1")
def another_learning_rate_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.optimizer.register_step_pre_hook(
                lambda optimizer, *_: optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] * 1.5)
            )

    return net(prepare=prepare)


@fault("optimizer", names="head.bias 1")
def parameter_missing_in_the_optimizer_of_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            left_out = trainer.placed.parameters["head.bias"]
            for group in trainer.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not left_out]

    return net(prepare=prepare)


# ---- collectives ----


@fault("reduction", names="rank|ranks")
def all_reduce_that_loses_a_rank() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_ranks():
            found = gradient(trainer, "head.weight")
            if on_rank_1():
                dist.all_reduce(torch.zeros_like(found))
            else:
                mine = found.clone() / 2
                dist.all_reduce(mine)
                found.copy_(mine)

    return net(prepare=after_reduction(change))


@fault("hang", names="rank")
def collective_that_rank_1_does_not_call() -> Subject:
    def change(_trainer: Trainer) -> None:
        if on_ranks() and not on_rank_1():
            dist.recv(torch.zeros(1), src=1)

    return net(prepare=after_reduction(change))


@fault("crash", names="rank_1|rank")
def rank_1_dies() -> Subject:
    def change(_trainer: Trainer) -> None:
        if on_rank_1():
            os.abort()

    return net(prepare=after_reduction(change))


# ---- sound models ----


@sound()
def language_model_with_dropout() -> Subject:
    return net()


@sound(topology="fsdp:2")
def language_model_sharded() -> Subject:
    return net()


@sound(topology="pipeline:2")
def language_model_in_a_pipeline() -> Subject:
    return net(Chain())


@sound()
def batch_norm() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))
    return vectors(model)


@sound()
def ema_teacher() -> Subject:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.mse_loss(self.student(x), self.teacher(x) + y)

    return Subject(Teacher(), Vectors(), prepare=_follow)


def _follow(trainer: Trainer) -> None:
    named = trainer.placed.parameters

    def follow(_updates: int) -> None:
        for name in ("weight", "bias"):
            named[f"teacher.{name}"].mul_(0.9).add_(0.1 * named[f"student.{name}"])

    trainer.step.after_update.append(follow)


@sound()
def spectral_norm() -> Subject:
    torch.manual_seed(0)
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return vectors(nn.Sequential(inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


@sound()
def chaotic_net() -> Subject:
    return vectors(Chaos())


@sound(topology="fsdp:2")
def chaotic_net_sharded() -> Subject:
    return vectors(Chaos())


@sound()
def python_and_numpy_random_numbers() -> Subject:
    class Drawing(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (0.5 + random.random()) * float(1 + np.random.rand())

    return net(Drawing())


@sound()
def tied_weights() -> Subject:
    model = Net()
    model.head.weight = model.embed.weight
    return net(model)


@sound(topology="pipeline:2")
def tied_weights_in_a_pipeline() -> Subject:
    model = Chain()
    model.head.weight = model.stem.embed.weight
    return net(model)


@sound(settings={"training.gradient_checkpointing": "full", "training.gradient_clip": 0.1})
def recomputed_and_clipped() -> Subject:
    return net()


@sound(settings={"precision.mode": "bf16"}, topology="fsdp:2")
def low_precision() -> Subject:
    return net()


@sound()
def frozen_layer_and_a_unused_one() -> Subject:
    model = Net()
    model.embed.requires_grad_(False)
    return net(model)


@sound()
def contrastive_in_each_micro_batch() -> Subject:
    class InBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.one(x), self.other(y)
            return functional.cross_entropy(a @ b.T / math.sqrt(WIDTH), torch.arange(len(a)))

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(InBatch(), Vectors())


@sound()
def module_with_a_cache_that_changes_nothing() -> Subject:
    class Caching(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach()
            return super().forward(x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Caching()
    return net(model)
