"""Faults of gradients, of their reduction over ranks, and of collectives."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.silent_bugs.faults.models import (
    VOCAB,
    WIDTH,
    Block,
    Chaos,
    Net,
    after_reduction,
    gradient,
    net,
    vectors,
)
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1, on_ranks
from lockstep.tensors import local
from lockstep.trainer import Trainer
from lockstep.verify import Subject


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
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.inner(x)))

    return vectors(Two(), prepare=after_reduction(change))


@fault("synchronisation", names="not_reduced|reduced")
def accumulation_that_reduces_no_gradient() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_ranks():
            from lockstep.parallel.replicas.ddp import DDPSync

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
            trainer.placed.parameters["blocks.0.up.weight"].register_hook(
                lambda g: g.clamp(-1e-4, 1e-4)
            )

    return net(prepare=prepare)


@fault("gradient hook", "backward", names="blocks.1.down")
def hook_on_a_module_that_halves_gradients_on_ranks() -> Subject:
    model = Net()
    if on_ranks():
        model.blocks[1].down.register_full_backward_hook(
            lambda _m, grads, _o: tuple(g / 2 for g in grads)
        )  # type: ignore[union-attr]
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


@fault("reduction", names="blocks.0.up.weight|blocks.1.up.weight rank|ranks")
def gradients_joined_in_another_order_on_rank_1() -> Subject:
    """Two layers' gradients travel as one message, whose parts rank 1 has the other way round."""

    def change(trainer: Trainer) -> None:
        names = ["blocks.0.up.weight", "blocks.1.up.weight"]
        found = [gradient(trainer, name) for name in (reversed(names) if on_rank_1() else names)]
        if on_ranks():
            message = torch.cat([each.flatten() for each in found]) / dist.get_world_size()
            dist.all_reduce(message)
            for each, part in zip(found, message.chunk(2), strict=True):
                each.copy_(part.view_as(each))

    return net(prepare=after_reduction(change))


@fault("reduction", names="head.bias|head.weight rank|ranks", topology="hybrid:2x2")
def shards_averaged_over_the_wrong_group() -> Subject:
    """Over neighbours, which hold different shards, and not over replicas."""

    def change(trainer: Trainer) -> None:
        if on_ranks():
            shard = local(gradient(trainer, "head.weight"))
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            message = torch.zeros(VOCAB * WIDTH)
            message[: shard.numel()] = shard.flatten() / 2
            dist.all_reduce(message, group=pairs[dist.get_rank() // 2])
            shard.copy_(message[: shard.numel()].view_as(shard))

    return net(prepare=after_reduction(change))


@fault("reduction", "low precision", names="float16 blocks.0.up.weight")
def gradient_that_is_sent_in_half_precision() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_ranks():
            found = gradient(trainer, "blocks.0.up.weight")
            found.copy_(found.half().float())

    return net(prepare=after_reduction(change))


def clear_before_each_forward(trainer: Trainer) -> None:
    (model,) = trainer.placed.parts

    def clear(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    model.register_forward_pre_hook(clear)


@fault("reduction", "accumulation", names="micro-batch 1")
def gradients_zeroed_before_each_micro_batch_of_rank_1() -> Subject:
    return net(prepare=lambda trainer: clear_before_each_forward(trainer) if on_rank_1() else None)


@fault("accumulation", "plain pass")
def gradients_zeroed_before_each_micro_batch_everywhere() -> Subject:
    return net(prepare=clear_before_each_forward)
