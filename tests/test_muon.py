"""Muon updates whole matrices on any ranks: the bits of one process, each matrix computed once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from lockstep import muon
from lockstep.errors import UsageError
from lockstep.muon import Muon
from lockstep.trainer import Trainer
from tests.parity.same_bits import bits, many, of_one_process, relay
from tests.ranks import run_ranks

_MUON = {"training.optimizer": "muon"}
_STEPS = 3
_MODEL = {"n_layer": 2, "vocab_size": 64}


def _matrices() -> dict[str, nn.Parameter]:
    """Matrices of several shapes, and what is none; gradients are there."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"block.a": (8, 6), "block.b": (5, 7), "block.c": (2, 9), "block.bias": (6,)}
    shapes["embedding"] = (10, 4)
    found = {}
    for name, shape in shapes.items():
        found[name] = nn.Parameter(torch.randn(shape, generator=generator))
        found[name].grad = torch.randn(shape, generator=generator)
    return found


def test_matrices_are_updated_as_by_torchs_muon_and_the_rest_as_by_adamw() -> None:
    ours = _matrices()
    theirs = _matrices()
    mine = Muon(Muon.groups_of(ours, ["block"]), lr=0.02, weight_decay=0.1)
    inside = [theirs[name] for name in ("block.a", "block.b", "block.c")]
    outside = [theirs["block.bias"], theirs["embedding"]]
    both: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inside, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outside, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    for _ in range(3):
        mine.step()
        for optimizer in both:
            optimizer.step()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


def test_a_plain_list_is_divided_by_dims() -> None:
    matrices, others = Muon(_matrices().values()).param_groups
    assert [p.ndim for p in matrices["params"]] == [2, 2, 2, 2]
    assert [p.ndim for p in others["params"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"momentum": 1.0}, "there is no Muon with momentum=1.0"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"adjust_lr_fn": "mine"}, "no adjust_lr_fn 'mine'"),
    ],
)
def test_arguments_without_sense_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        Muon(_matrices().values(), **arguments)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, "a group of parameters does not say matrices"),
        ({"matrices": True}, r"a parameter of shape \[6\] is no matrix"),
    ],
)
def test_a_group_that_muon_can_not_have_is_refused(group: dict[str, Any], expected: str) -> None:
    """At the start, and where it is added later."""
    bias = {"params": iter([_matrices()["block.bias"]]), **group}
    with pytest.raises(UsageError, match=expected):
        Muon([bias])
    made = Muon([{"params": [_matrices()["block.a"]], "matrices": True}], momentum=0.5)
    with pytest.raises(UsageError, match=expected):
        made.add_param_group({**bias, "params": _matrices()["block.bias"]})
    made.add_param_group({"params": [_matrices()["block.b"]], "matrices": True})
    assert [each["momentum"] for each in made.param_groups] == [0.5, 0.5]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="this model names no blocks"):
        Trainer(nn.Linear(3, 2), loss_fn=nn.MSELoss(), optimizer="muon")


def _counted() -> tuple[int, int, int, bool]:
    """Update shards of 3 ranks; return elements sent, exchanges, matrices computed, and whether
    the parameters are those of one process.
    """
    whole = _matrices()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {}
    for name, parameter in whole.items():
        shards[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        assert parameter.grad is not None
        shards[name].grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
    sent = exchanges = computed = 0
    send = dist.all_to_all_single
    make = muon.orthogonal

    def counts_sent(taken: torch.Tensor, given: torch.Tensor, *sizes: Any, **more: Any) -> Any:
        nonlocal sent, exchanges
        assert given.dtype == torch.bfloat16
        exchanges += 1
        sent += given.numel() - sizes[1][dist.get_rank()]
        return send(taken, given, *sizes, **more)

    def counts_made(*given: Any) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return make(*given)

    one = Muon(Muon.groups_of(whole, ["block"]), foreach=False)
    several = Muon(Muon.groups_of(shards, ["block"]), foreach=False)
    dist.all_to_all_single = counts_sent
    muon.orthogonal = counts_made  # type: ignore[assignment]
    for _ in range(2):
        several.step()
    muon.orthogonal = make
    dist.all_to_all_single = send
    for _ in range(2):
        one.step()
    same = True
    for name, parameter in shards.items():
        assert isinstance(parameter, DTensor)
        same = same and torch.equal(parameter.full_tensor(), whole[name])
    return sent, exchanges, computed, same


def test_each_matrix_is_computed_once_and_sent_twice_as_bfloat16() -> None:
    """On 3 ranks, of which not all have rows of each matrix."""
    found = run_ranks(_counted, 3)
    sent, exchanges, computed, same = zip(*found, strict=True)
    assert all(same)
    assert exchanges == (4, 4, 4)  # two a step
    assert sum(computed) == 2 * 3  # two steps, three matrices
    assert max(computed) == 2
    # a matrix leaves all ranks but its owner, and comes back
    rows = {"a": (3, 3, 2, 6), "b": (2, 2, 1, 7), "c": (1, 1, 0, 9)}
    most = sum(2 * 2 * sum(each[:3]) * each[3] for each in rows.values())
    assert sum(sent) < most
    assert sum(sent) == pytest.approx(most * 2 / 3, rel=0.1)


_TOPOLOGIES = {2: ["fsdp:2", "pipeline:2", "tensor:2"], 4: ["ddp:4", "hybrid:2x2"]}


def _check(ranks: int) -> None:
    cases = [(topology, "transformer", _MUON, _STEPS, _MODEL) for topology in _TOPOLOGIES[ranks]]
    expected = of_one_process(("transformer", _MUON, _STEPS, _MODEL))
    for results in run_ranks(many, ranks, cases):
        for (topology, *_), found in zip(cases, results, strict=True):
            assert found == expected, topology


def test_one_digest_on_two_ranks() -> None:
    _check(2)


@pytest.mark.full
def test_one_digest_on_four_ranks() -> None:
    _check(4)


@pytest.mark.full
def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """The momenta of matrices, saved as shards, are those of whole matrices."""
    settings = {**_MUON, "training.max_steps": 4}
    found = run_ranks(relay, 2, str(tmp_path), "transformer", settings, ["fsdp:2", "ddp:2"], 2)
    digest, _ = bits("single", "transformer", _MUON, 4)
    assert [one for one, _ in found] == [digest, digest]
