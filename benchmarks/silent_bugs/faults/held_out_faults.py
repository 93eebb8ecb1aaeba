"""Faults that were written, together with their causes, before verify was given any of them.

They are the second round of `first_try.py`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.axes import experts, transformer
from benchmarks.silent_bugs.faults.forward import Packed
from benchmarks.silent_bugs.faults.gradients import HalfGradient
from benchmarks.silent_bugs.faults.models import (
    WIDTH,
    Block,
    Chain,
    Net,
    Tokens,
    after_reduction,
    gradient,
    net,
    vectors,
)
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1, on_ranks
from lockstep.models.mixture import Router
from lockstep.tensors import local
from lockstep.trainer import Trainer
from lockstep.verify import Subject


def with_block(block: Block, number: int = 0) -> Net:
    """Return the small language model with another block."""
    model = Net()
    model.blocks[number] = block
    return model


def before_forward(change: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """Call something before each forward pass."""

    def prepare(trainer: Trainer) -> None:
        for part in trainer.placed.parts:
            part.register_forward_pre_hook(lambda *_: change(trainer))

    return prepare


# ---- forward pass and loss ----


@fault("forward", "other ranks", names="rank_1|rank|ranks head")
def shared_input_clamped_in_place_on_rank_1() -> Subject:
    class Clamping(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.place(self.positions(ids))
            h = x.clamp_(-0.5, 0.5) if on_rank_1() else x.clamp(-0.5, 0.5)
            for block in self.blocks:
                h = block(h)
            logits: Tensor = self.head(h + x)
            return logits

    return net(Clamping())


@fault("loss", "other ranks", names="loss rank_1|rank")
def labels_smoothed_on_rank_1() -> Subject:
    class Smoothing(Net):
        smoothing = 0.1 if on_rank_1() else 0.0

        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            return functional.cross_entropy(
                logits.flatten(0, 1),
                batch["targets"].flatten(),
                reduction="sum",
                label_smoothing=self.smoothing,
            )

    return net(Smoothing())


@fault("loss", names="loss rank_1")
def loss_summed_and_not_averaged_on_rank_1() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    return vectors(model, loss_fn=nn.MSELoss(reduction="sum" if on_rank_1() else "mean"))


@fault("loss", "other ranks", names="loss rank_1|rank")
def last_target_left_out_on_rank_1() -> Subject:
    """Neither its loss nor the number of targets has it."""

    class Short(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            last = -1 if on_rank_1() else None
            return super().loss(logits[:, :last], {"targets": batch["targets"][:, :last]})

        def count(self, batch: Any) -> Any:
            return super().count({"targets": batch["targets"][:, : -1 if on_rank_1() else None]})

    return net(Short())


@fault("loss", "other ranks", names="loss rank_1|rank")
def micro_batches_of_high_loss_left_out_on_rank_1() -> Subject:
    limit = 3.5 if on_rank_1() else float("inf")

    class Careful(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            total = super().loss(logits, batch)
            return total * (total.detach() < limit * super().count(batch))

    return net(Careful())


@fault("forward", "other ranks", names="blocks.0 rank_1|rank")
def functional_dropout_of_another_rate_on_rank_1() -> Subject:
    rate = 0.4 if on_rank_1() else 0.1

    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(functional.dropout(x, rate))

    return net(with_block(Dropping()))


@fault("forward", "other ranks", names="rank_1|rank attention|model")
def attention_to_later_positions_on_rank_1() -> Subject:
    causal = not on_rank_1()

    class Attending(Packed):
        def documents(self, ids: Tensor) -> Tensor:
            documents = super().documents(ids)
            return documents if causal else torch.zeros_like(documents)

    return net(Attending())


@fault("module settings", names="eps rank_1")
def norm_of_another_epsilon_on_rank_1() -> Subject:
    model = Net()
    model.blocks[1].norm.eps = 1e-2 if on_rank_1() else 1e-5  # type: ignore[union-attr]
    return net(model)


@fault("module settings", names="momentum rank_1")
def batch_norm_of_another_momentum_on_rank_1() -> Subject:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(32, momentum=0.5 if on_rank_1() else 0.1)
    return vectors(nn.Sequential(nn.Linear(WIDTH, 32), norm, nn.ReLU(), nn.Linear(32, WIDTH)))


@fault("module settings", "backward", names="embed rank_1")
def padding_without_a_gradient_on_rank_1() -> Subject:
    model = Net()
    model.embed.padding_idx = 0 if on_rank_1() else None
    return net(model)


@fault("module settings", "forward", names="router", topology="ddp:2*expert:2")
def one_expert_a_token_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        for part in trainer.placed.parts:
            for module in part.modules():
                if isinstance(module, Router) and on_rank_1():
                    module.top_k = 1

    return net(experts(), prepare)


@fault("data order", "data", names="micro-batches")
def samples_cut_shorter_on_rank_1() -> Subject:
    class Cut(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            found = super().__getitem__(index)
            if on_rank_1():
                found["targets"][-3:] = -100
            return found

    return Subject(Net(), Cut())


# ---- backward pass ----


@fault("backward", "other ranks", names="blocks.1 rank_1|rank")
def residual_detached_on_rank_1() -> Subject:
    detached = on_rank_1()

    class Detaching(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - x + x.detach() if detached else y

    return net(with_block(Detaching(), 1))


@fault("backward", "segments", "other ranks", names="stem|blocks.0", topology="pipeline:2")
def first_stage_that_halves_what_flows_back() -> Subject:
    halved = on_ranks()

    class Halving(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(HalfGradient.apply(x) if halved else x)

    model = Chain()
    model.blocks[0] = Halving()
    return net(model)


@fault(
    "recomputation",
    "memory",
    "backward",
    names="recomput|blocks",
    settings={"training.gradient_checkpointing": "full"},
)
def recomputed_with_another_gate_on_rank_1() -> Subject:
    changes = on_rank_1()

    class Gated(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            # two layers forward, two again
            gate = 1.1 if changes and type(self).calls % 4 > 2 else 1.0
            return super().forward(x * gate)

    model = Net()
    model.blocks = nn.ModuleList(Gated() for _ in range(2))
    return net(model)


# ---- gradients ----


@fault("reduction", "accumulation", "low precision", names="rank|ranks")
def gradients_accumulated_in_16_bits_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        for parameter in trainer.placed.parameters.values():
            if on_rank_1() and parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())

    return net(prepare=before_forward(change))


@fault("reduction", names="blocks.0.up.weight -1|−1|sign", topology="fsdp:2")
def gradient_of_the_other_sign_on_ranks() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_ranks():
            local(gradient(trainer, "blocks.0.up.weight")).neg_()

    return net(prepare=after_reduction(change))


@fault("reduction", names="blocks.0.norm.weight|blocks.1.norm.weight rank_1")
def gradients_of_two_norms_exchanged_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        one, other = (gradient(trainer, f"blocks.{i}.norm.weight") for i in (0, 1))
        if on_rank_1():
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    return net(prepare=after_reduction(change))


@fault("reduction", names="head.weight rank_1", topology="fsdp:2")
def shard_of_a_gradient_moved_by_a_row_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            found = local(gradient(trainer, "head.weight"))
            found.copy_(found.roll(1, 0))

    return net(prepare=after_reduction(change))


@fault("earlier steps", "reduction", names="step")
def gradients_of_the_step_before_on_ranks() -> Subject:
    """As an asynchronous reduction that is waited for one step too late."""
    kept: dict[str, Tensor] = {}

    def change(trainer: Trainer) -> None:
        for name, parameter in trainer.placed.parameters.items():
            if on_ranks() and parameter.grad is not None:
                now = parameter.grad.clone()
                parameter.grad.copy_(kept.get(name, now))
                kept[name] = now

    return net(prepare=after_reduction(change))


@fault("clip norm", "clipping", names="rank_1|rank", settings={"training.gradient_clip": 0.1})
def clipped_at_another_norm_on_rank_1() -> Subject:
    """The norm before clipping is the same everywhere."""

    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.step.clip = trainer.step.clip.model_copy(update={"value": 0.02})

    return net(prepare=prepare)


@fault("forward", "other ranks", names="layers.0.mlp rank|ranks", topology="tensor:2")
def half_a_layer_scaled_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        for name, module in trainer.placed.parts[0].named_modules():
            if on_rank_1() and name.endswith("layers.0.mlp.up"):
                module.register_forward_hook(lambda _m, _a, out: out * 1.05)

    return net(transformer(), prepare)


# ---- values and the update ----


@fault("earlier steps", "forward", "parameters", names="rank_1|step")
def weights_of_one_update_ago_on_rank_1() -> Subject:
    old: dict[str, Tensor] = {}

    def prepare(trainer: Trainer) -> None:
        def delayed(run: Any, *args: Any) -> None:
            named = {name: p.data for name, p in trainer.placed.parameters.items()}
            now = {name: value.clone() for name, value in named.items()}
            for name, value in named.items():
                value.copy_(old.get(name, value))
            run(*args)
            for name, value in named.items():
                value.copy_(now[name])
            old.update(now)

        if on_rank_1():
            trainer.placed.around_passes.append(delayed)

    return net(prepare=prepare)


@fault(
    "parameters",
    "before the update",
    "first values",
    "forward",
    "refused",
    names="rank_1|writes_the_parameter",
)
def weights_of_the_start_loaded_again_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        first = copy.deepcopy(trainer.placed.parts[0].state_dict())

        def reload(*_: Any) -> None:
            if trainer.step.progress.updates == 1:
                trainer.placed.parts[0].load_state_dict(first)

        if on_rank_1():
            trainer.placed.parts[0].register_forward_pre_hook(reload)

    return net(prepare=prepare)


@fault("before the update", "parameters", names="head.weight rank_1")
def weight_decayed_by_hand_before_the_update_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.placed.parameters["head.weight"].data.mul_(0.99)

    return net(prepare=after_reduction(change))


@fault("after the update", names="rank_1")
def average_of_weights_copied_over_them_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        average = {name: p.detach().clone() for name, p in trainer.placed.parameters.items()}

        def copied(_skipped: bool) -> None:
            with torch.no_grad():
                for name, parameter in trainer.placed.parameters.items():
                    parameter.copy_(average[name].lerp_(parameter, 0.5))

        if on_rank_1():
            trainer.placed.update_finishers.append(copied)

    return net(prepare=prepare)


@fault("optimizer", names="rank_1 makes|replaced|other")
def update_of_its_own_on_rank_1() -> Subject:
    """Plain gradient descent, which the optimizer's hooks do not see."""

    def prepare(trainer: Trainer) -> None:
        def descend() -> None:
            with torch.no_grad():
                for parameter in trainer.placed.parameters.values():
                    parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]

        if on_rank_1():
            trainer.optimizer.step = descend  # type: ignore[method-assign, assignment]

    return net(prepare=prepare)


@fault("optimizer", names="decay rank_1", settings={"training.weight_decay": 0.1})
def decay_added_to_the_gradient_on_rank_1() -> Subject:
    kind = torch.optim.Adam if on_rank_1() else torch.optim.AdamW
    return Subject(
        Net(), Tokens(), optimizer=lambda parameters: kind(parameters, lr=3e-3, weight_decay=0.1)
    )


@fault("optimizer", names="amsgrad rank_1", topology="fsdp:2")
def amsgrad_on_rank_1() -> Subject:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3, amsgrad=on_rank_1())

    return Subject(Net(), Tokens(), optimizer=optimizer)
