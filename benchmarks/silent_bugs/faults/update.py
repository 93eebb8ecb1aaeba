"""Faults of what happens to a step's gradients once they are there: clipping, the optimizer, the
schedule.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.silent_bugs.faults.models import Net, Taught, Tokens, Vectors, follow_student, net
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1, on_ranks
from lockstep.tensors import local
from lockstep.trainer import Trainer
from lockstep.verify import Subject


@fault("optimizer", names="rank 1")
def another_learning_rate_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.optimizer.register_step_pre_hook(
                lambda optimizer, *_: optimizer.param_groups[0].update(
                    lr=optimizer.param_groups[0]["lr"] * 1.5
                )
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


def before_update(change: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """Call something right before each update of the optimizer."""

    def prepare(trainer: Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(lambda *_: change(trainer))

    return prepare


@fault("optimizer", names="rank_1 weight_decay", settings={"training.weight_decay": 0.1})
def weight_decay_that_rank_1_does_not_have() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            for group in trainer.optimizer.param_groups:
                group["weight_decay"] = 0.0

    return net(prepare=prepare)


@fault("optimizer", names="betas", topology="fsdp:2")
def betas_of_another_recipe_on_ranks() -> Subject:
    betas = (0.9, 0.95) if on_ranks() else (0.9, 0.999)
    return Subject(
        Net(), Tokens(), optimizer=lambda parameters: torch.optim.AdamW(parameters, 3e-3, betas)
    )


@fault("optimizer", names="rank_1 state|exp_avg|moment")
def moments_lost_on_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1() and trainer.step.progress.updates == 1:
            trainer.optimizer.state.clear()

    return net(prepare=before_update(change))


class UpdatesWeightsAlone(torch.optim.AdamW):
    """Has two groups, and steps the first of them."""

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = self.param_groups[:1]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


@fault("optimizer", names="rank_1 bias|norm")
def parameter_group_without_decay_skipped_on_rank_1() -> Subject:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        decayed, others = (
            [p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False)
        )
        kind = UpdatesWeightsAlone if on_rank_1() else torch.optim.AdamW
        return kind([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3)

    return Subject(Net(), Tokens(), optimizer=optimizer)


@fault(
    "learning rate",
    "schedule",
    "optimizer",
    names="learning_rate|lr",
    settings={"training.lr_schedule": "cosine", "training.warmup_steps": 6},
)
def schedule_that_ranks_step_twice() -> Subject:
    def prepare(trainer: Trainer) -> None:
        plan = trainer.step.plan_run

        def planned(total: int | None, schedule: Any) -> None:
            plan(total, schedule)
            rates = schedule.rates
            object.__setattr__(
                schedule, "rates", lambda groups, updates: rates(groups, 2 * updates)
            )

        if on_ranks():
            trainer.step.plan_run = planned  # type: ignore[method-assign]

    return net(prepare=prepare)


@fault("optimizer", names="rank_1 skip|skipped|no_update|not_update|unchanged|stay")
def update_that_rank_1_skips_for_an_overflow_of_its_own() -> Subject:
    def prepare(trainer: Trainer) -> None:
        step = trainer.optimizer.step
        if on_rank_1():
            trainer.optimizer.step = lambda: None if trainer.step.progress.updates == 1 else step()  # type: ignore

    return net(prepare=prepare)


@fault("clipping", "clip norm", "optimizer hook", names="rank_1")
def gradients_clipped_before_the_update_of_rank_1() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            nn.utils.clip_grad_norm_(trainer.placed.parameters.values(), 0.05)

    return net(prepare=before_update(change))


@fault("clipping", "clip norm", "optimizer hook", names="rank|ranks", topology="fsdp:2")
def gradients_clipped_by_the_norm_of_a_rank_s_own_shard() -> Subject:
    def change(trainer: Trainer) -> None:
        own = [local(p.grad) for p in trainer.placed.parameters.values() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in own]).norm()
        for gradient in own:
            gradient.mul_((0.2 / norm).clamp(max=1.0))

    return net(prepare=before_update(change))


@fault("after the update", "not trained", "replicas", names="teacher 1")
def teacher_that_follows_on_rank_0_alone() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if not on_rank_1():
            follow_student(trainer)

    return Subject(Taught(), Vectors(), prepare=prepare)


@fault("after the update", "optimizer", names="head.weight 1")
def weights_clamped_after_the_update_of_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        weight = trainer.placed.parameters["head.weight"].data
        if on_rank_1():
            trainer.optimizer.register_step_post_hook(lambda *_: weight.clamp_(-0.1, 0.1))  # type: ignore

    return net(prepare=prepare)


@fault("gradients not zeroed", "stale gradients", names="rank_1")
def gradients_not_zeroed_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            object.__setattr__(trainer.placed, "clear_gradients", lambda: None)

    return net(prepare=prepare)
