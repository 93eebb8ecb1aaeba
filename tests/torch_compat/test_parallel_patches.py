"""`lockstep/torch_compat/parallel_patches.py`: what shards and cuts a model is seen."""

import inspect

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules

from lockstep.torch_compat import parallel_patches
from lockstep.torch_compat.replaced_calls import patch_names
from tests.ranks import run_ranks


def test_mixed_precision_of_fsdp_is_seen_and_left_out() -> None:
    (found,) = run_ranks(sharded, 1)
    seen, output = found
    assert seen == ["", "torch.bfloat16", "torch.float16"]
    assert output == "torch.float32"


def sharded() -> tuple[list[str], str]:
    seen: list[str] = []

    def report(dtype: str) -> bool:
        seen.append(dtype)
        return False

    parallel_patches.patch_sharding(report)
    patch_names()
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16))
    output = str(model(torch.ones(1, 2)).dtype)
    mixed = fsdp.MixedPrecision(torch.float16)
    fsdp.FullyShardedDataParallel(
        torch.nn.Linear(2, 2), device_id=torch.device("cpu"), mixed_precision=mixed
    )
    return seen, output


def test_the_loss_of_a_schedule() -> None:
    """Of torch's private names this is the one that a pipeline's line is taken from."""
    assert "_loss_fn" in inspect.getsource(schedules._PipelineSchedule.__init__)
    assert parallel_patches.loss_of_schedule(object()) is None
