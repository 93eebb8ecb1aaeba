"""TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares each collective between ranks before
it runs it.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.pipeline_cases import Steps, deep, piped, steps_of, trainer_of, worst
from tests.parity.toy import Tokens
from tests.ranks import run_ranks
from tests.sampled import chosen, quick_and_full

DETAIL = {"distributed.debug": "detail"}
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"distributed.strategy": "fsdp"},
    "fsdp, reproducible": {"distributed.strategy": "fsdp", "distributed.reproducible": True},
    "pipeline": piped("1F1B"),
}


def begin_again(folder: str) -> None:
    """Leave the group that the tests' ranks come with: torch looks at the level when it
    makes one.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size
    )


def train_and_differ(folder: str, names: list[str]) -> dict[str, Any]:
    """The steps of each strategy; and what the ranks are told when they call different
    collectives.
    """
    begin_again(folder)
    found: dict[str, Any] = {
        name: steps_of(trainer_of(deep(), CASES[name] | DETAIL), Tokens()) for name in names
    }
    found["level"] = dist.get_debug_level().name  # type: ignore[attr-defined]
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), 0)
    except RuntimeError as error:
        found["told"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("detail"))
    return run_ranks(train_and_differ, 2, folder, chosen(request, "name"), timeout=200)


@pytest.mark.parametrize("name", quick_and_full(CASES, ["fsdp"]))
def test_strategies_train_as_without_it(ranks: list[dict[str, Any]], name: str) -> None:
    more = {"distributed.reproducible": True} if "reproducible" in name else {}
    alone: Steps = steps_of(trainer_of(deep(), more), Tokens())
    for rank in ranks:
        assert rank["level"] == "DETAIL"
        assert worst(rank[name], alone) < 1e-5


def test_collectives_that_differ_are_named(ranks: list[dict[str, Any]]) -> None:
    """The gain: without it they would pair up, or hang."""
    for rank in ranks:
        assert "Detected mismatch between collectives on ranks" in rank["told"]
        assert "ALLREDUCE" in rank["told"]
