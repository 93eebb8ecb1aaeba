"""Clipping, whole and sharded: the same gradients, whichever dim a parameter is cut along."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.clipping import clip_adaptively, clip_by_value
from tests.parity.toy import losses, worst
from tests.ranks import run_ranks

CPU = torch.device("cpu")
RATIO = 0.05
SHAPES = {"matrix": (6, 10), "heads": (4, 3, 10), "vector": (12,), "scalar": (), "uneven": (5, 2)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in SHAPES.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator) * 0.1
        found[name] = parameter
    with torch.no_grad():
        found["matrix"][2] = 0.0  # a unit of weight zero may still grow
        assert found["matrix"].grad is not None
        found["matrix"].grad[1] = 0.0  # and one without a gradient is left alone
    return found


def reference(weight: Tensor, gradient: Tensor) -> Tensor:
    """The formula of the paper, unit by unit."""
    if weight.ndim < 2:
        bound = RATIO * max(float(weight.norm()), 1e-3)
        return gradient * min(1.0, bound / float(gradient.norm()))
    return torch.stack(
        [
            reference(w.flatten(), g.flatten()).view(g.shape)
            for w, g in zip(weight, gradient, strict=True)
        ]
    )


def test_adaptive_clipping_follows_the_paper() -> None:
    own = parameters()
    own["matrix"].grad[1] = 1e-4  # type: ignore[index]
    expected = {
        name: reference(p.detach(), p.grad) for name, p in own.items() if p.grad is not None
    }
    changed = clip_adaptively(own.values(), RATIO, [], CPU)
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, expected[name])
    units = 6 + 4 + 1 + 1 + 5
    assert 0 < float(changed) < 1
    assert float(changed) * units == pytest.approx(round(float(changed) * units))


def sharded() -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for exact in (False, True):
        for dim in (0, -1):
            own = parameters()
            cut = {}
            for name, parameter in own.items():
                if not parameter.ndim:
                    cut[name] = parameter
                    continue
                placement = [Shard(dim % parameter.ndim)]
                cut[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placement))
                assert parameter.grad is not None
                cut[name].grad = distribute_tensor(parameter.grad, mesh, placement)  # type: ignore[assignment]
            share = clip_adaptively(cut.values(), RATIO, [mesh.get_group()], CPU, exact=exact)
            grads = {
                n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                for n, p in cut.items()
            }
            found.append({"exact": exact, "grads": grads, "share": float(share)})
    return found


def test_trap_07_units_that_shards_cut_are_clipped_by_their_whole_norm() -> None:
    """The norm of a rank's own piece would clip each piece by another factor."""
    whole = {}
    for exact in (False, True):
        own = parameters()
        clip_adaptively(own.values(), RATIO, [], CPU, exact=exact)
        whole[exact] = {name: p.grad for name, p in own.items()}
        for name in own:
            torch.testing.assert_close(whole[exact][name], whole[False][name])
    for cases in run_ranks(sharded, 3):
        for case in cases:
            for name, gradient in case["grads"].items():
                if case["exact"]:
                    assert torch.equal(gradient, whole[True][name]), name
                else:
                    torch.testing.assert_close(gradient, whole[False][name])
            assert 0 < case["share"] < 1


def clipped_runs() -> list[list[tuple[float, ...]]]:
    settings = [{"training.gradient_clip": {"strategy": kind, "value": v}} for kind, v in CLIPS]
    strategies = ("ddp", "fsdp")
    return [
        losses({**s, "distributed.strategy": strategy}, "bdh", 3)
        for s in settings
        for strategy in strategies
    ]


CLIPS = [("adaptive", 0.01), ("value", 1e-3), ("norm", 0.5), ("none", 1.0)]


def test_trap_07_every_kind_of_clipping_is_the_same_under_every_strategy() -> None:
    alone = [
        losses({"training.gradient_clip": {"strategy": kind, "value": v}}, "bdh", 3)
        for kind, v in CLIPS
    ]
    assert len({run[-1][0] for run in alone}) == len(CLIPS), "each kind trains another way"
    for runs in run_ranks(clipped_runs, 2):
        for place, run in enumerate(runs):
            assert worst(run, alone[place // 2]) < 1e-5, CLIPS[place // 2]


def test_clipping_by_value_counts_what_it_changed() -> None:
    gradients = [torch.tensor([-2.0, 0.5]), torch.tensor([[3.0, 0.0]])]
    assert float(clip_by_value(gradients, 1.0, [], CPU)) == 0.5
    assert gradients[0].tolist() == [-1.0, 0.5]
    assert gradients[1].tolist() == [[1.0, 0.0]]
