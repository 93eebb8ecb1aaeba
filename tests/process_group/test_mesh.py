"""Layouts: sizes that multiply out, and one clear equation where they do not."""

import itertools

import pytest
import torch

from lockstep.config import Config, DistributedConfig, StepConfig
from lockstep.config.checks import step_contradictions
from lockstep.errors import UsageError, refuse
from lockstep.layout import SIZED, Layout
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, parse_topology, resolve, strategy_named
from lockstep.tensors import local_chunk


class OfAPackage(Strategy):
    axes = ("replicate",)


class Shards(Strategy):
    axes = ("shard",)


def layout(world_size: int, local: int | None = None, **settings: object) -> Layout:
    return resolve(DistributedConfig.model_validate(settings), world_size, local)


def test_trap_17_single_on_several_processes_is_refused() -> None:
    """Four processes without a strategy would train four models; each strategy is named, none is
    silently ignored.
    """
    with pytest.raises(UsageError, match="4 were started") as error:
        layout(4, strategy="single")
    assert "ddp or fsdp" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "world", "local", "expected"),
    [
        ({"strategy": "ddp"}, 3, 3, "ddp:3"),
        ({"strategy": "fsdp"}, 4, 4, "fsdp:4"),
        ({"strategy": "fsdp", "fsdp": {"sharding_strategy": "hybrid_shard"}}, 8, 4, "hybrid:2x4"),
        ({"strategy": "fsdp", "fsdp": {"sharding_strategy": "hybrid_shard"}}, 4, 4, "hybrid:2x2"),
        ({"strategy": "fsdp", "shard_size": 2}, 8, 8, "hybrid:4x2"),
        ({"strategy": "fsdp", "expert_size": 2}, 4, 4, "fsdp:4*expert:2"),
        ({"strategy": "pipeline"}, 4, 4, "pipeline:4"),
        ({"strategy": "pipeline", "pipeline_size": 2}, 4, 4, "pipeline:2*ddp:2"),
        ({"strategy": "pipeline", "shard_size": 2}, 4, 4, "pipeline:2*fsdp:2"),
        (
            {"strategy": "pipeline", "pipeline_size": 2, "replicate_size": 2, "shard_size": 2},
            8,
            8,
            "pipeline:2*hybrid:2x2",
        ),
    ],
)
def test_leftover_ranks_replicate(
    settings: dict[str, object], world: int, local: int, expected: str
) -> None:
    assert str(layout(world, local, **settings)) == expected


def test_experts_are_spread_over_ranks_that_share_out_micro_batches() -> None:
    with pytest.raises(UsageError, match="expert_size=3 does not divide the data-parallel size, 4"):
        layout(4, strategy="ddp", expert_size=3)


@pytest.mark.parametrize("strategy", ["ddp", "accelerate"])
def test_ranks_along_an_axis_that_a_strategy_does_not_have_are_refused(strategy: str) -> None:
    """They would share out micro-batches, and each would train on its own gradient."""
    config = DistributedConfig(strategy=strategy, replicate_size=1, shard_size=2)
    with pytest.raises(UsageError, match=f"strategy {strategy} has no axis shard") as error:
        resolve(config, 2)
    assert "write strategy: fsdp" in str(error.value)


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES.shipped, "tests.process_group.test_mesh:OfAPackage"]
)
def test_no_size_is_passed_over_without_a_word(strategy: str) -> None:
    """Each strategy follows the size of each axis, or refuses it; those of the config come first.

    `tensor` with a replicate_size trained on as many ranks as it had, and `fsdp` with a
    pipeline_size did, too.
    """
    followed = set()
    several = () if strategy_named(strategy).one_process else (2, 4, 8)
    for axis, ranks in itertools.product((*SIZED, "expert"), (1, *several)):
        distributed = DistributedConfig.model_validate({"strategy": strategy, f"{axis}_size": 2})
        found, refused = _resolved(distributed, ranks)
        where = f"{strategy}, {axis}_size, {ranks} ranks: {refused}"
        if found is None:
            assert refused is not None
            assert axis in str(refused), where
            assert refused.fix, where
        else:
            assert getattr(found, axis) == 2, where
            followed.add(axis)
    of_its_own = {"ddp": "replicate", "fsdp": "shard", "pipeline": "pipeline", "tensor": "tensor"}
    assert of_its_own.get(strategy) in {*followed, None}


def _resolved(
    distributed: DistributedConfig, ranks: int
) -> tuple[Layout, None] | tuple[None, UsageError]:
    """Return the layout, or what refuses the config as it is loaded or placed."""
    step = StepConfig(Config().training, Config().precision, distributed)
    try:
        refuse(step_contradictions(step))
        found = resolve(distributed, ranks)
        refuse(step_contradictions(step, found))
    except UsageError as error:
        return None, error
    return found, None


def test_sizes_that_do_not_multiply_show_the_equation() -> None:
    with pytest.raises(UsageError, match=r"pipeline 2 × replicate 1 × shard 3 = 6 ranks, but 4"):
        layout(4, strategy="pipeline", pipeline_size=2, shard_size=3)


def test_hybrid_shard_says_what_it_chose_on_one_node() -> None:
    assert (
        "2 replicas × 3 shards"
        in layout(6, 6, strategy="fsdp", fsdp={"sharding_strategy": "hybrid_shard"}).notice
    )


@pytest.mark.parametrize(
    "text",
    [
        "single",
        "ddp:2",
        "fsdp:4",
        "hybrid:2x2",
        "pipeline:2",
        "pipeline:2*fsdp:2",
        "pipeline:2*hybrid:2x2",
        "ddp:4*expert:2",
    ],
)
def test_a_topology_reads_back_as_it_is_written(text: str) -> None:
    settings, ranks = parse_topology(text)
    assert str(layout(ranks, ranks, **settings)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ddp:0",
        "fsdp:2x2",
        "hybrid:4",
        "hybrid:2x0",
        "fsdp:2*pipeline:2",
        "tensors:2",
        "expert:2",
        "ddp:2*expert:0",
    ],
)
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a topology"):
        parse_topology(text)


def test_the_right_order_of_a_topology_is_told() -> None:
    with pytest.raises(UsageError, match=r"write pipeline:2\*fsdp:2$"):
        parse_topology("fsdp:2*pipeline:2")


def test_a_strategy_of_a_package_has_the_sizes_of_the_axes_that_it_lists() -> None:
    assert layout(4, strategy="tests.process_group.test_mesh:Shards", shard_size=2).shard == 2
    with pytest.raises(UsageError, match="OfAPackage has no axis shard"):
        layout(4, strategy="tests.process_group.test_mesh:OfAPackage", shard_size=2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_chunks_cover_a_tensor_once(size: int) -> None:
    full = torch.arange(5 * 3).view(5, 3)
    assert torch.equal(torch.cat([local_chunk(full, 0, size, c) for c in range(size)]), full)
