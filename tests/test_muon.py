"""Muon updates whole matrices on any ranks: the bits of one process, each matrix computed once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep import muon
from lockstep.config import config_from
from lockstep.costs.hardware import cluster_of
from lockstep.errors import UsageError
from lockstep.models import build_model, get_model
from lockstep.muon import Muon
from lockstep.parallel.facts import facts_of
from lockstep.parallel.tensor.matrix_splits import splits_of
from lockstep.plan.candidates import evaluate_layout
from lockstep.plan.layouts import model_size_of
from lockstep.plan.workload import workload_of
from lockstep.trainer import Trainer
from tests.parity.same_bits import bits, many, of_one_process, relay
from tests.parity.toy import Tokens
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
        ({"split": "rows"}, "Muon can't split weights by 'rows'"),
        ({"split": "heads"}, "split: heads is of a config, where the model says"),
    ],
)
def test_arguments_without_sense_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        Muon(_matrices().values(), **arguments)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, "a group of parameters does not say matrices"),
        ({"matrices": True}, r"a parameter of shape \[6\] is not a matrix"),
        (
            {"matrices": True, "params": [torch.zeros(4, 6)], "split": (0, (3, 3))},
            "into \\(3, 3\\)",
        ),
    ],
)
def test_a_group_that_muon_can_not_have_is_refused(group: dict[str, Any], expected: str) -> None:
    """At the start, and where it is added later."""
    given = group.get("params", [_matrices()["block.bias"]])
    with pytest.raises(UsageError, match=expected):
        Muon([{**group, "params": iter(given)}])
    made = Muon([{"params": [_matrices()["block.a"]], "matrices": True}], momentum=0.5)
    with pytest.raises(UsageError, match=expected):
        made.add_param_group({**group, "params": given[0]})
    made.add_param_group({"params": [_matrices()["block.b"]], "matrices": True})
    assert [each["momentum"] for each in made.param_groups] == [0.5, 0.5]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="this model names no blocks"):
        Trainer(nn.Linear(3, 2), loss_fn=nn.MSELoss(), optimizer="muon")


Counts = tuple[int, int, int, bool]
"""Elements sent to other ranks, exchanges, matrices computed, and whether the parameters are those
of one process.
"""


def test_a_plan_has_its_state_to_the_byte() -> None:
    """One number for each of a matrix, two for each of the rest, and the numbers of steps."""
    args = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "block_size": 16}
    settings = {"model.name": "transformer", "model.args": args, "training.batch_size": 2}
    config = config_from({**settings, **_MUON})
    work = workload_of(config)
    planned = {
        ranks: evaluate_layout(
            work,
            config,
            cluster_of(ranks, "A100-40GB"),
            {"distributed.strategy": strategy},
            model_size_of(work, config),
        ).memory
        for ranks, strategy in ((1, "single"), (2, "fsdp"))
    }
    trainer = Trainer(build_model(config.model), config=config.replaced({"training.max_steps": 1}))
    next(iter(trainer.steps(Tokens())))
    states = trainer.optimizer.state.values()
    held = sum(t.nbytes for state in states for t in state.values() if isinstance(t, Tensor))
    assert planned[1] is not None
    assert planned[2] is not None
    assert planned[1]["optimizer"] == held
    assert planned[2]["optimizer"] == pytest.approx(held / 2, rel=1e-2)


def _counts(optimizer: Muon, named: dict[str, nn.Parameter]) -> Counts:
    """Make two updates, and compare `named` with what two updates of one process make."""
    sent = exchanges = computed = 0
    send = dist.all_to_all_single
    make = muon.orthogonal

    def counts_sent(taken: torch.Tensor, given: torch.Tensor, *sizes: Any, **more: Any) -> Any:
        nonlocal sent, exchanges
        assert given.dtype == torch.bfloat16
        exchanges += 1
        sent += given.numel() - sizes[1][dist.get_rank(more["group"])]
        return send(taken, given, *sizes, **more)

    def counts_made(*given: Any) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return make(*given)

    dist.all_to_all_single = counts_sent
    muon.orthogonal = counts_made  # type: ignore[assignment]
    for _ in range(2):
        optimizer.step()
    muon.orthogonal = make
    dist.all_to_all_single = send

    whole = _matrices()
    one = Muon(Muon.groups_of(whole, ["block"]), foreach=False)
    for _ in range(2):
        one.step()
    same = True
    for name, parameter in named.items():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        same = same and torch.equal(found, whole[name])
    return sent, exchanges, computed, same


def _cut(mesh: DeviceMesh, dim: int = 0) -> dict[str, nn.Parameter]:
    """Return `_matrices` as shards along the mesh; vectors are cut along their only dim."""
    shards = {}
    for name, parameter in _matrices().items():
        place = [Shard(dim if parameter.ndim > 1 else 0)]
        shards[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, place))
        assert parameter.grad is not None
        shards[name].grad = distribute_tensor(parameter.grad, mesh, place)
    return shards


def _on_shards(dim: int) -> Counts:
    shards = _cut(init_device_mesh("cpu", (dist.get_world_size(),)), dim)
    return _counts(Muon(Muon.groups_of(shards, ["block"]), foreach=False), shards)


def _on_replicas(spread: bool = True) -> Counts:
    replicas = _matrices()
    optimizer = Muon(Muon.groups_of(replicas, ["block"]), foreach=False, spread=spread)
    group = dist.group.WORLD
    assert group is not None
    optimizer.share_among({parameter: [group] for parameter in replicas.values()})
    return _counts(optimizer, replicas)


def _on_replicas_of_shards() -> Counts:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shards = _cut(mesh["shard"])
    optimizer = Muon(Muon.groups_of(shards, ["block"]), foreach=False)
    group = mesh["replicate"].get_group()
    optimizer.share_among({parameter: [group] for parameter in shards.values()})
    return _counts(optimizer, shards)


def _counted() -> list[Counts]:
    return [_on_shards(0), _on_shards(1), _on_replicas(), _on_replicas(False)]


def test_each_matrix_is_computed_once_and_sent_as_bfloat16() -> None:
    """On 3 ranks, of which not all have rows or columns of each matrix."""
    by_rows, by_columns, spread, apart = zip(*run_ranks(_counted, 3), strict=True)
    for found in (by_rows, by_columns, spread, apart):
        assert all(same for *_, same in found)
    for found in (by_rows, by_columns, spread):
        _, _, computed, _ = zip(*found, strict=True)
        assert sum(computed) == 2 * 3  # two steps, three matrices
        assert max(computed) == 2
    # a matrix leaves all ranks but its owner, and comes back
    rows = {"a": (3, 3, 2, 6), "b": (2, 2, 1, 7), "c": (1, 1, 0, 9)}
    most = sum(2 * 2 * sum(each[:3]) * each[3] for each in rows.values())
    for found in (by_rows, by_columns):
        sent, exchanges, _, _ = zip(*found, strict=True)
        assert exchanges == (4, 4, 4)  # two a step
        assert sum(sent) < most
        assert sum(sent) == pytest.approx(most * 2 / 3, rel=0.1)
    # from its owner a matrix goes to the two other replicas
    sent, exchanges, _, _ = zip(*spread, strict=True)
    assert exchanges == (2, 2, 2)
    assert sum(sent) == 2 * 2 * (8 * 6 + 5 * 7 + 2 * 9)
    assert [found[:3] for found in apart] == [(0, 0, 2 * 3)] * 3


def test_replicas_of_shards_compute_each_matrix_once() -> None:
    found = run_ranks(_on_replicas_of_shards, 4)
    assert all(same for *_, same in found)
    assert sum(computed for _, _, computed, _ in found) == 2 * 3


def test_a_weight_of_several_layers_can_be_updated_as_they_are_apart() -> None:
    """Rows of different numbers, whose rates differ, and columns as of a transposed layer."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, 6, generator=generator) for size in (6, 9, 9)]
    gradients = [torch.randn(size, 6, generator=generator) for size in (6, 9, 9)]
    apart = [nn.Parameter(part.clone()) for part in parts]
    fused = nn.Parameter(torch.cat(parts))
    turned = nn.Parameter(torch.cat(parts).t().contiguous())
    for parameter, gradient in zip(apart, gradients, strict=True):
        parameter.grad = gradient
    fused.grad = torch.cat(gradients)
    turned.grad = torch.cat(gradients).t().contiguous()
    sizes = (6, 9, 9)
    groups: list[dict[str, Any]] = [
        {"params": apart, "matrices": True},
        {"params": [fused], "matrices": True, "split": (0, sizes)},
        {"params": [turned], "matrices": True, "split": (1, sizes)},
    ]
    Muon(groups).step()
    expected = torch.cat([parameter.detach() for parameter in apart])
    torch.testing.assert_close(fused.detach(), expected, rtol=1e-6, atol=1e-7)
    # Newton and Schulz compute in bfloat16, and the other way round
    torch.testing.assert_close(turned.detach().t(), expected, rtol=0.02, atol=1e-4)
    whole = nn.Parameter(torch.cat(parts))
    whole.grad = torch.cat(gradients)
    Muon([{"params": [whole], "matrices": True}]).step()
    assert not torch.allclose(whole, fused, rtol=1e-3)


def test_a_momentum_in_bfloat16_is_left_as_it_is() -> None:
    """torch's function divides a matrix of that type in place."""
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 8.0)
    made = Muon([{"params": [parameter], "matrices": True}], momentum=0.5, nesterov=False)
    made.step()
    assert torch.equal(made.state[parameter]["momentum_buffer"], torch.full((3, 4), 4.0).bfloat16())


@pytest.mark.parametrize(
    ("how", "query", "key"), [("layers", None, None), ("heads", (0, (8,) * 4), (0, (8,) * 2))]
)
def test_a_model_says_what_its_weights_hold(how: str, query: Any, key: Any) -> None:
    facts = facts_of(get_model("transformer")(n_layer=1, n_embd=32, n_head=4, n_kv_head=2))
    found = splits_of(facts, how)
    assert found.get("layers.0.attention.query.weight") == query
    assert found.get("layers.0.attention.key.weight") == key
    assert len(found) == (3 if query else 0)


@pytest.mark.parametrize(("how", "sizes"), [("layers", (32,) * 3), ("heads", (16,) * 6)])
def test_a_fused_weight_of_gpt2_is_split_along_its_columns(
    how: str, sizes: tuple[int, ...]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    found = splits_of(facts_of(transformers.GPT2LMHeadModel(config)), how)
    assert found == {"transformer.h.0.attn.c_attn.weight": (1, sizes)}


def test_a_model_that_does_not_say_what_its_weights_hold_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    args = {"training.optimizer_args": {"split": "heads"}}
    with pytest.raises(UsageError, match="Sequential does not say what its weights hold"):
        Trainer(layers, loss_fn=nn.MSELoss(), config=config_from({**_MUON, **args}))


_TOPOLOGIES = {
    2: ["fsdp:2", "ddp:2", "pipeline:2", "tensor:2"],
    4: ["ddp:4", "hybrid:2x2", "pipeline:2*ddp:2", "ddp:2*tensor:2", "fsdp:2*tensor:2"],
}
_HEADS = {**_MUON, "training.optimizer_args": {"split": "heads"}}


def _check(ranks: int, settings: dict[str, Any], topologies: Sequence[str] = ()) -> None:
    cases = [
        (topology, "transformer", settings, _STEPS, _MODEL)
        for topology in topologies or _TOPOLOGIES[ranks]
    ]
    expected = of_one_process(("transformer", settings, _STEPS, _MODEL))
    for results in run_ranks(many, ranks, cases):
        for (topology, *_), found in zip(cases, results, strict=True):
            assert found == expected, topology


@pytest.mark.parametrize(
    "topologies",
    [["fsdp:2", "tensor:2"], pytest.param(_TOPOLOGIES[2], marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_one_digest_on_two_ranks(topologies: list[str]) -> None:
    _check(2, _MUON, topologies)


@pytest.mark.full
@pytest.mark.parametrize("settings", [_MUON, _HEADS], ids=["whole", "heads"])
def test_one_digest_on_four_ranks(settings: dict[str, Any]) -> None:
    _check(4, settings)


@pytest.mark.full
def test_one_digest_of_heads_on_two_ranks() -> None:
    _check(2, _HEADS)


@pytest.mark.full
def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """The momenta of matrices, saved as shards, are those of whole matrices."""
    settings = {**_MUON, "training.max_steps": 4}
    found = run_ranks(relay, 2, str(tmp_path), "transformer", settings, ["fsdp:2", "ddp:2"], 2)
    digest, _ = bits("single", "transformer", _MUON, 4)
    assert [one for one, _ in found] == [digest, digest]
