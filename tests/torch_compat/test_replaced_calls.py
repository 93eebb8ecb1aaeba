"""`lockstep/torch_compat/replaced_calls.py`: replaced wherever a script finds them."""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.torch_compat.parallel_patches import patch_collectives
from lockstep.torch_compat.replaced_calls import patch_names
from lockstep.torch_compat.script_patches import patch_clipping
from tests.ranks import run_ranks


def test_functions_are_replaced_under_the_names_of_other_modules() -> None:
    """A notebook has imported them before, and a script may import them from where they are."""
    (found,) = run_ranks(renamed, 1)
    assert found == [
        ("clip", 1),
        ("clip", 1),  # by a norm that the script has computed
        ("all_reduce",),
        ("all_gather_object",),  # which calls all_gather
    ]


def renamed() -> list[Any]:
    before = ModuleType("before")
    sys.modules["before"] = before
    vars(before).update(clip=torch.nn.utils.clip_grad_norm_)
    found: list[Any] = []

    def clipping(call: Any, parameters: Any) -> Any:
        found.append(("clip", len(parameters)))
        return call()

    patch_clipping(clipping)
    patch_collectives(lambda name, _given: found.append((name,)))
    patch_names()
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    before.clip([weight], 1.0)
    norm = torch.nn.utils.get_total_norm([weight.grad])
    torch.nn.utils.clip_grads_with_norm_([weight], 1.0, norm)
    distributed_c10d.all_reduce(torch.ones(1))
    dist.all_gather_object([None], "rank 0")
    return found
