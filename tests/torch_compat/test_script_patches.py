"""`lockstep/torch_compat/script_patches.py`: calls of a script are seen, in a process
of its own.
"""

import inspect
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.nn.utils import clip_grad_value_
from torch.utils.data import DataLoader, IterableDataset

from lockstep.torch_compat import script_patches
from tests.ranks import run_ranks


def test_backward_clipping_and_loaders_are_seen() -> None:
    # not in a fork of this process, in which torch may have run backward passes in threads
    (found,) = run_ranks(observed, 1)
    assert found == [
        ("backward", 3.0),
        ("clip", 1),
        ("clip", 1),
        ("made", 2),
        [[0, 1], [2]],
        ("made", 2),
    ]


def observed() -> list[Any]:
    found: list[Any] = []

    def backward(call: Any, loss: Any) -> Any:
        found.append(("backward", float(loss)))
        return call()

    def clipping(call: Any, parameters: Any) -> Any:
        found.append(("clip", len(parameters)))
        return call()

    script_patches.patch_backward(backward)
    script_patches.patch_clipping(clipping)
    script_patches.patch_loaders(
        lambda given: given.update(batch_size=2),
        lambda loader: found.append(("made", loader.batch_size)),
    )

    def order(_loader: Any, positions: Any) -> Any:
        found.append(list(positions))
        return iter(found[-1])

    script_patches.patch_orders(order)
    model = torch.nn.Linear(1, 1, bias=False)
    (model.weight.sum() * 0 + 3).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert clip_grad_value_ is not torch.nn.utils.clip_grad_value_
    torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)
    assert len(next(iter(DataLoader([1, 2, 3], 1)))) == 2  # type: ignore[arg-type]
    next(iter(DataLoader(Stream())))  # has no positions
    return found


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_functions_are_replaced_under_the_names_of_other_modules() -> None:
    """A notebook has imported them before, and a script may import them from where they are."""
    (found,) = run_ranks(renamed, 1)
    assert found == [
        ("clip", 1),
        ("clip", 1),  # by a norm that the script has computed
        ("all_reduce",),
        ("all_gather_object",),  # which calls all_gather
        ("random.shuffle",),
        ("random.randint",),  # which calls randrange
        ("numpy.random.rand",),
        ("numpy.random.normal",),
        ("numpy.random.shuffle",),
    ]


def renamed() -> list[Any]:
    before = ModuleType("before")
    sys.modules["before"] = before
    vars(before).update(
        clip=torch.nn.utils.clip_grad_norm_, shuffle=random.shuffle, old=np.random.RandomState(0)
    )
    expected = [np.random.RandomState(3).rand(), np.random.Generator(np.random.PCG64(3)).normal()]
    found: list[Any] = []

    def clipping(call: Any, parameters: Any) -> Any:
        found.append(("clip", len(parameters)))
        return call()

    def drawn(name: str, call: Any) -> Any:
        found.append((name,))
        return call()

    script_patches.patch_clipping(clipping)
    script_patches.patch_collectives(lambda name, _given: found.append((name,)))
    script_patches.patch_draws(drawn)
    script_patches.patch_names()
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    before.clip([weight], 1.0)
    norm = torch.nn.utils.get_total_norm([weight.grad])
    torch.nn.utils.clip_grads_with_norm_([weight], 1.0, norm)
    distributed_c10d.all_reduce(torch.ones(1))
    dist.all_gather_object([None], "rank 0")
    before.shuffle([1, 2])
    random.Random(3).randint(0, 5)
    values = [np.random.RandomState(3).rand(), np.random.Generator(np.random.PCG64(3)).normal()]
    assert values == expected
    np.random.default_rng(0).shuffle([1, 2])
    assert isinstance(before.old, np.random.RandomState)  # as libraries ask
    return found


def test_modules_modes_seeds_and_schedules_are_seen_and_put_back() -> None:
    found: list[Any] = []
    undo = [
        script_patches.patch_modules(lambda module: found.append(type(module).__name__)),
        script_patches.patch_modes(lambda module: found.append(("eval", type(module).__name__))),
        script_patches.patch_seeds(found.append),
        script_patches.patch_schedules(lambda schedule: found.append(schedule.last_epoch)),
    ]
    try:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        model.eval().train()
        torch.manual_seed(3)
        random.seed()
        np.random.seed(seed=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        schedule.step()
    finally:
        for one in undo:
            one()
    torch.manual_seed(5)
    # the parts of a module that is put into evaluation mode are not reported by themselves
    expected = ["Linear", "Sequential", ("eval", "Sequential"), (3,), (), (4,), 0, 1]
    assert found == expected


def test_what_is_looked_at_for_a_plateau() -> None:
    (found,) = run_ranks(looked_for, 1)
    assert found == [0.5, 0.25]


def looked_for() -> list[float]:
    found: list[float] = []
    script_patches.patch_plateaus(found.append)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    schedule.step(0.5)
    schedule.step(torch.tensor(0.25))  # type: ignore[arg-type]
    return found


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

    script_patches.patch_sharding(report)
    script_patches.patch_names()
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
    assert script_patches.loss_of_schedule(object()) is None
