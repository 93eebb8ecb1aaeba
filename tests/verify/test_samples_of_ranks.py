"""Samples that ranks share are a mistake where each goes by an order, and chance where it draws."""

import pytest
import torch

from lockstep.verify.script.draws import LoopDraw
from lockstep.verify.script.ranks import seen_on_ranks
from lockstep.verify.script.record import RecordedStep, ScriptRecord, World

READ = ([["a", "b", "c"], ["d", "e", "f"]], [["d", "e", "g"], ["a", "h", "i"]])  # of two ranks


def world_of(*, loader: bool) -> World:
    """Return two ranks that have read three of each other's samples, each in two steps."""
    records = []
    for batches in READ:
        steps = [RecordedStep(losses=[1.0], inputs=[batch]) for batch in batches]
        record = ScriptRecord(steps)
        if loader:
            record.batches[0] = batches
            record.lengths[0] = (9, 18)
        records.append(record)
    return World(records)


def kinds(world: World) -> dict[str, bool]:
    return {found.kind: found.is_error for found in seen_on_ranks(world)}


@pytest.mark.parametrize("loader", [True, False])
def test_ranks_with_orders_of_their_own_are_found(loader: bool) -> None:
    world = world_of(loader=loader)
    order = LoopDraw((-1, 0), "train.py:9", "torch.randperm", 0, torch.tensor([1, 0]), True)
    for record in world.records:
        record.draws.append(order)
    assert kinds(world) == {"samples": True}


def test_samples_that_are_drawn_meet_by_chance() -> None:
    assert kinds(world_of(loader=False)) == {}
    with_replacement = world_of(loader=True)
    for record in with_replacement.records:
        record.replacing.add(0)
    assert kinds(with_replacement) == {}
