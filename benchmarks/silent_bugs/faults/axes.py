"""Faults of models that are cut: into stages, shards, parts of a sequence or of a layer."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.silent_bugs.faults.models import (
    VOCAB,
    WIDTH,
    Chain,
    Net,
    after_reduction,
    gradient,
    net,
)
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1, on_ranks
from lockstep.models import get_model
from lockstep.models.attention import Attend
from lockstep.models.mixture import Router
from lockstep.tensors import local
from lockstep.trainer import Trainer
from lockstep.verify import Subject


@fault("segments", "refused", names="forward", topology="pipeline:2")
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


@fault("segments", "refused", topology="pipeline:2")
def layers_in_another_order_in_the_segments() -> Subject:
    class Swapped(Chain):
        def segments(self) -> list[tuple[str, nn.Module]]:
            stem, first, second, head = super().segments()
            return [stem, second, first, head]

    return net(Swapped())


@fault("training mode", names="evaluation rank_0", topology="pipeline:2")
def first_stage_in_evaluation_mode() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_ranks() and not on_rank_1():
            trainer.placed.parts[0].eval()

    return net(Chain(), prepare=prepare)


@fault("first values", names="blocks.0.up.weight rank_1", topology="fsdp:2")
def shard_of_another_layer_loaded_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            held = {name: local(p.detach()) for name, p in trainer.placed.parameters.items()}
            held["blocks.0.up.weight"].copy_(held["blocks.1.up.weight"])

    return net(prepare=prepare)


@fault("first values", "buffer", names="features rank_1")
def random_features_drawn_anew_on_rank_1() -> Subject:
    class Projected(Net):
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.register_buffer("features", torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.place(self.positions(ids))
            logits: Tensor = self.head(torch.cos(self.blocks[0](x) @ self.features))  # type: ignore[operator]
            return logits

    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            trainer.placed.buffers["features"].normal_(
                0, 0.25, generator=torch.Generator().manual_seed(7)
            )

    return net(Projected(), prepare)


@fault("tied weights", names="head.weight embed.weight")
def head_that_is_not_tied_on_ranks() -> Subject:
    model = Net()
    model.head.weight = (
        nn.Parameter(model.embed.weight.detach().clone()) if on_ranks() else model.embed.weight
    )
    return net(model)


@fault("frozen parameter", "not trained", names="blocks.0")
def layer_that_is_frozen_on_ranks() -> Subject:
    model = Net()
    model.blocks[0].requires_grad_(not on_ranks())
    return net(model)


def transformer(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    return get_model("transformer")(
        **{"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB + 1, **changed}
    )


@fault("positions", names="attend positions", topology="context:2")
def rotary_positions_that_begin_anew_on_each_rank() -> Subject:
    def prepare(trainer: Trainer) -> None:
        for module in trainer.placed.parts[0].modules():
            if isinstance(module, Attend):
                module.positions = lambda length, device, _documents=None: torch.arange(
                    length, device=device
                )  # type: ignore

    return net(transformer(), prepare)


@fault(
    "reduction",
    "unsynchronised parameter",
    "gradient",
    names="norm rank|ranks",
    topology="tensor:2",
)
def norm_s_gradient_of_a_part_of_the_sequence() -> Subject:
    """Each rank normalises its part of a sequence, and keeps the gradient of that part."""

    def change(trainer: Trainer) -> None:
        if on_ranks():
            found = gradient(trainer, "layers.0.mlp_norm.weight")
            found.mul_(0.3 if on_rank_1() else 0.7)

    return net(transformer(), after_reduction(change))


@fault("reduction", "tensor", "gradient", names="down.weight rank_1", topology="tensor:2")
def part_of_a_layer_scaled_by_the_number_of_ranks() -> Subject:
    def change(trainer: Trainer) -> None:
        if on_rank_1():
            local(gradient(trainer, "layers.1.mlp.down.weight")).mul_(2)

    return net(transformer(), after_reduction(change))


@fault("buffer", names="bias|load", topology="ddp:2*expert:2")
def router_that_counts_what_its_rank_has_seen() -> Subject:
    def prepare(trainer: Trainer) -> None:
        for part in trainer.placed.parts:
            for module in part.modules():
                if isinstance(module, Router) and on_ranks():
                    _count_own(module)

    return net(experts(), prepare)


def _count_own(router: Router) -> None:
    own = torch.zeros_like(router.load)
    end_step = router.end_step

    def counted(module: nn.Module, _args: Any, outputs: Any) -> None:
        own.add_(torch.bincount(outputs[0].flatten(), minlength=len(own)))

    def ended(_counts: Tensor) -> None:
        end_step(own.clone())
        own.zero_()

    router.register_forward_hook(counted)
    router.end_step = ended  # type: ignore[method-assign]


def experts(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": VOCAB,
        "n_expert": 4,
        "expert_hidden": 16,
    }
    return get_model("mixture")(**{**sizes, "bias_rate": 0.01, **changed})


@fault("reduction", "experts", names="experts", topology="ddp:2*expert:2")
def gradients_of_experts_averaged_over_all_ranks() -> Subject:
    """As those of replicas, although each rank holds other experts, which have seen all tokens."""

    def change(trainer: Trainer) -> None:
        for name, parameter in trainer.placed.parameters.items():
            if on_ranks() and ".experts." in name and parameter.grad is not None:
                local(parameter.grad).div_(2)

    return net(experts(), after_reduction(change))
