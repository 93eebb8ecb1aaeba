"""Models whose segments borrow parameters, under FSDP2 with every block a unit of its own."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lockstep.models import get_model
from tests.models.samples import ALL, batch_for
from tests.ranks import run_ranks


def _models() -> dict[str, nn.Module]:
    made = {family: build() for family, build in ALL.items()}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    made["llama"] = get_model("hf:llama")(vocab_size=24, tie_word_embeddings=True, **sizes)
    return made


def _loss(model: nn.Module, family: str) -> torch.Tensor:
    batch = batch_for(family)
    torch.manual_seed(3)
    loss: torch.Tensor = model.loss(model(*model.inputs(batch)), batch)
    return loss


def compare_with_one_process() -> list[str]:
    """Names of parameters whose gradients differ; every rank computes on the same batch."""
    torch.manual_seed(0)
    wrong = []
    for family, model in _models().items():
        whole = copy.deepcopy(model)
        loss = _loss(whole, family)
        loss.backward()
        for _, block in model.blocks():
            if any(True for _ in block.parameters()):
                fully_shard(block, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        sharded = _loss(model, family)
        sharded.backward()
        if not torch.allclose(sharded, loss, rtol=1e-6):
            wrong.append(f"{family}: loss {sharded.item()} instead of {loss.item()}")
        for (name, mine), (_, other) in zip(
            model.named_parameters(), whole.named_parameters(), strict=True
        ):
            expected = other.grad * dist.get_world_size()
            if not torch.allclose(mine.grad.full_tensor(), expected, rtol=1e-4, atol=1e-5):
                wrong.append(f"{family}: {name}")
    return wrong


def test_borrowed_parameters_are_gathered_and_get_their_whole_gradient() -> None:
    assert run_ranks(compare_with_one_process, 2) == [[], []]
