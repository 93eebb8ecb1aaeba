"""Faults and sound models that verify had not seen when the other ones were mended.

They are the third round of `first_try.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.axes import transformer
from benchmarks.silent_bugs.faults.held_out_faults import with_block
from benchmarks.silent_bugs.faults.models import (
    VOCAB,
    WIDTH,
    Block,
    Chain,
    Net,
    Taught,
    Tokens,
    Vectors,
    after_reduction,
    follow_student,
    gradient,
    net,
    vectors,
)
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1, on_ranks, sound
from lockstep.tensors import local
from lockstep.trainer import Trainer
from lockstep.verify import Subject


@fault("random numbers", "other ranks", "forward", names="rank_1|ranks|rank")
def number_drawn_for_a_log_on_rank_1() -> Subject:
    """All numbers after it are other ones."""
    logs = on_rank_1()

    class Logging(Block):
        def forward(self, x: Tensor) -> Tensor:
            if logs:
                torch.rand(1)
            return super().forward(x)

    return net(with_block(Logging()))


@fault("training mode", "forward", "other ranks", names="evaluation|dropout")
def first_micro_batch_in_evaluation_mode_on_rank_1() -> Subject:
    model = Net()
    rank_1 = on_rank_1()
    calls = [0]

    def mode(*_: Any) -> None:
        calls[0] += 1
        model.train(not (rank_1 and calls[0] % 2))

    model.register_forward_pre_hook(mode)
    return net(model)


@fault("backward", "other ranks", names="blocks.1 rank_1|rank")
def layer_without_gradients_for_a_micro_batch_of_rank_1() -> Subject:
    rank_1 = on_rank_1()
    calls = [0]

    class Saving(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += 1
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (rank_1 and calls[0] % 2)):
                return super().forward(x)

    return net(with_block(Saving(), 1))


@fault("backward", "other ranks", names="up rank_1|rank")
def branch_detached_on_rank_1() -> Subject:
    detached = on_rank_1()

    class Detaching(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.norm(x))
            gate = torch.sigmoid(h.detach() if detached else h)
            y: Tensor = self.down(h * gate)
            return x + y.cumsum(1) / 8

    return net(with_block(Detaching()))


@fault("forward", "other ranks", names="embed|blocks.0|model rank", topology="hybrid:2x2")
def embedding_scaled_on_replicas_of_shards() -> Subject:
    scaled = on_ranks()

    class Scaling(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) * (1.1 if scaled else 1.0) + self.place(self.positions(ids))
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    return net(Scaling())


@fault("loss", names="loss rank_1")
def classes_weighed_on_rank_1() -> Subject:
    weight = torch.linspace(0.5, 1.5, VOCAB) if on_rank_1() else torch.ones(VOCAB)

    class Weighing(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            targets = batch["targets"].flatten()
            return functional.cross_entropy(logits.flatten(0, 1), targets, weight, reduction="sum")

    return net(Weighing())


@fault("loss", "other ranks", "context", names="loss|rank", topology="context:2")
def targets_of_a_part_shifted_on_rank_1() -> Subject:
    shifted = on_rank_1()
    model = transformer()
    compute = model.loss

    def loss(outputs: Any, batch: Any) -> Any:
        return compute(
            outputs, {**batch, "targets": batch["targets"].roll(1, -1)} if shifted else batch
        )

    model.loss = loss  # type: ignore[assignment]
    return net(model)


@fault("reduction", names="head.bias 2 rank_1")
def gradient_doubled_on_rank_1_beside_a_number_in_the_samples() -> Subject:
    """The samples of rank 1 differ, in a field that nothing reads."""

    class Numbered(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {**super().__getitem__(index), "rank": torch.tensor(int(on_rank_1()))}

    def change(trainer: Trainer) -> None:
        if on_rank_1():
            gradient(trainer, "head.bias").mul_(2)

    return Subject(Net(), Numbered(), prepare=after_reduction(change))


@fault("reduction", "before the update", names="rank_1")
def gradients_halved_around_the_optimizer_s_step_of_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        step = trainer.optimizer.step

        def halved() -> None:
            for parameter in trainer.placed.parameters.values():
                parameter.grad.div_(2)  # type: ignore[union-attr]
            step()

        if on_rank_1():
            trainer.optimizer.step = halved  # type: ignore[method-assign, assignment]

    return net(prepare=prepare)


@fault("reduction", names="embed.weight rank_1", topology="fsdp:2")
def gradient_clamped_in_a_shard_of_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            local(gradient(trainer, "embed.weight")).clamp_(-1e-3, 1e-3)

    return net(prepare=after_reduction(change))


@fault("earlier steps", "reduction", names="step")
def gradients_doubled_from_the_second_step_of_a_process() -> Subject:
    steps = [0]

    def change(trainer: Trainer) -> None:
        steps[0] += 1
        if on_ranks() and steps[0] > 1:
            for parameter in trainer.placed.parameters.values():
                parameter.grad.mul_(2)  # type: ignore[union-attr]

    return net(prepare=after_reduction(change))


@fault("optimizer", names="head.bias", topology="pipeline:2")
def bias_that_the_last_stage_does_not_update() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            left_out = trainer.placed.parameters["head.bias"]
            for group in trainer.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not left_out]

    return net(Chain(), prepare=prepare)


@fault("first values", names="1.running_var rank_1")
def statistics_of_another_run_loaded_on_rank_1() -> Subject:
    torch.manual_seed(0)

    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.placed.buffers["1.running_var"].mul_(3)

    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))
    return vectors(model, prepare=prepare)


@sound(topology="hybrid:2x2", settings={"training.gradient_clip": 0.1})
def teacher_on_replicas_of_shards() -> Subject:
    return Subject(Taught(), Vectors(), prepare=follow_student)


@sound(settings={"training.gradient_checkpointing": "full"})
def group_norm_and_dropout_recomputed() -> Subject:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, WIDTH)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return x + functional.dropout(self.down(functional.gelu(self.up(y))), 0.2)

    model = Net()
    model.blocks = nn.ModuleList(Normed() for _ in range(2))
    return net(model)
