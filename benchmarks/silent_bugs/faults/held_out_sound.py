"""Sound models that were written before verify was given any of them.

They are those of the second round of `first_try.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.held_out_faults import with_block
from benchmarks.silent_bugs.faults.models import WIDTH, Block, Chain, Net, Tokens, net
from benchmarks.silent_bugs.faults.registry import on_rank_1, sound
from lockstep.trainer import Trainer
from lockstep.verify import Subject


@sound()
def layer_in_float64_on_rank_1() -> Subject:
    """It is nearer to the right values than the reference."""
    wide = on_rank_1()

    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not wide:
                return super().forward(x)
            return functional.linear(x.double(), self.weight.double(), self.bias.double()).float()

    model = Net()
    torch.manual_seed(1)
    model.head = Wide(WIDTH, model.head.out_features)
    return net(model)


@sound()
def kernels_of_another_kind_on_rank_1() -> Subject:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3, foreach=on_rank_1(), amsgrad=True)

    return Subject(Net(), Tokens(), optimizer=optimizer)


@sound()
def model_that_recomputes_by_itself() -> Subject:
    class Recomputed(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return y

    return net(with_block(Recomputed()))


@sound()
def number_of_the_rank_in_an_attribute() -> Subject:
    class Knowing(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.logged = float(x.detach().mean()) + self.rank
            return super().forward(x)

    block = Knowing()
    block.rank = int(on_rank_1())  # type: ignore[assignment]
    block.logged = 0.0
    return net(with_block(block))


@sound(topology="fsdp:2", settings={"training.gradient_clip": 0.1})
def gradients_halved_by_a_hook_on_every_rank() -> Subject:
    model = Net()
    model.blocks[0].register_full_backward_hook(lambda _m, grads, _o: tuple(g / 2 for g in grads))
    return net(model)


@sound(topology="pipeline:2")
def average_of_weights_in_the_optimizer_s_hook() -> Subject:
    def prepare(trainer: Trainer) -> None:
        average = {name: p.detach().clone() for name, p in trainer.placed.parameters.items()}

        def follow(*_: Any) -> None:
            for name, parameter in trainer.placed.parameters.items():
                average[name].lerp_(parameter.detach(), 0.1)

        trainer.optimizer.register_step_post_hook(follow)

    return net(Chain(), prepare)
