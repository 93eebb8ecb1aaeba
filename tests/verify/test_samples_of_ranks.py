"""Samples that ranks share are a mistake where each goes by an order, and chance where it draws."""

from collections.abc import Sequence

import pytest
import torch

from lockstep.verify.script.causes.ranks import seen_on_ranks
from lockstep.verify.script.observed.draws import LoopDraw
from lockstep.verify.script.observed.orders import LoaderPass
from lockstep.verify.script.record import RecordedStep, ScriptRecord
from lockstep.verify.script.world import World

READ = ([["a", "b", "c"], ["d", "e", "f"]], [["d", "e", "g"], ["a", "h", "i"]])  # of two ranks


def world_of(*, loader: bool) -> World:
    """Return two ranks that have read three of each other's samples, each in two steps."""
    records = []
    for batches in READ:
        steps = [RecordedStep(losses=[1.0], inputs=[batch]) for batch in batches]
        record = ScriptRecord(steps)
        if loader:
            record.batches[0] = [*batches]
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


def test_streams_that_meet_are_noted() -> None:
    """Two samples of six may be chance; a loader's padding, which is at most one, is not noted."""
    world = world_of(loader=True)
    world.records[1].batches[0][1] = ["h", "j", "i"]
    assert kinds(world) == {}
    for record in world.records:
        record.lengths[0] = (0, 0)
    assert kinds(world) == {"samples": False}


def gan(batches: list[list[str]], *, latents: torch.Tensor, rank: int) -> ScriptRecord:
    """Return a rank whose steps, of a critic and of a generator, share a batch and a latent."""
    steps = []
    for index, batch in enumerate(batches):
        key = (0, index)
        fakes = [f"fake {index} of rank {rank}"] * len(batch)
        critic = RecordedStep(losses=[1.0, 1.0], inputs=[batch, fakes], read=[[key], []])
        steps += [critic, RecordedStep(losses=[1.0], inputs=[fakes], read=[[]])]
    for step in steps:
        step.elements = rank
    record = ScriptRecord(steps)
    record.batches[0] = batches
    for index in range(len(batches)):
        value = latents + index
        record.draws.append(LoopDraw((0, index), "train.py:7", "torch.randn", 0, value, True))
    return record


def test_batches_that_serve_several_backward_passes() -> None:
    mine = [["a", "b"], ["c", "d"]]
    other = [["e", "f"], ["g", "h"]]
    latent = torch.arange(8.0).view(2, 4)
    sound = [gan(mine, latents=latent, rank=0), gan(other, latents=-latent, rank=1)]
    assert sound[0].training_loader is None
    assert sound[0].training_loaders == [0]
    assert kinds(World(sound)) == {}
    same_latents = [sound[0], gan(other, latents=latent, rank=1)]
    assert kinds(World(same_latents)) == {"random numbers": True}
    # The latents differ, so that inputs do: nothing is cut, all ranks read the same.
    unsharded = [sound[0], gan(mine, latents=-latent, rank=1)]
    assert kinds(World(unsharded)) == {"samples": True}


def test_each_of_several_loaders_is_looked_at() -> None:
    """Labelled and other samples come from two loaders, of which the second is not sharded."""
    records = []
    for labelled in ([["a"], ["b"]], [["c"], ["d"]]):
        keys = [[(0, number), (1, number)] for number in range(2)]
        record = ScriptRecord([RecordedStep(losses=[1.0], read=[read]) for read in keys])
        record.batches = {0: labelled, 1: [["x"], ["y"]], 2: [["evaluated"], ["by all"]]}
        record.lines.loaders = {0: "train.py:1", 1: "train.py:2"}
        records.append(record)
    assert records[0].training_loaders == [0, 1]
    (cause,) = seen_on_ranks(World(records))
    assert (cause.kind, cause.line) == ("samples", "train.py:2")


def test_a_rank_may_hold_its_own_part_of_the_data() -> None:
    """Each goes through all of its part; where the data are the same, nothing is sharded."""
    world = world_of(loader=True)
    for rank, record in enumerate(world.records):
        record.batches[0] = [[f"{rank}{sample}" for sample in batch] for batch in READ[0]]
        record.lengths[0] = (9, 9)
        record.data[0] = f"of rank {rank}"
    assert kinds(world) == {}
    for record in world.records:
        record.data[0] = "of all"
    assert kinds(world) == {"samples": True}


def test_numbers_without_a_loader() -> None:
    """Ranks train on their own parts; the noise is alike, as are the positions that they pick."""

    def record(rank: int, noise: torch.Tensor) -> ScriptRecord:
        found = ScriptRecord()
        for number in range(2):
            rows = [f"{rank}{number}{row}" for row in range(4)]
            found.steps.append(RecordedStep(losses=[1.0], inputs=[rows], elements=rank + 1))
            for name, value in (("randn", noise + number), ("randint", torch.arange(4) + number)):
                key = (-1, number)
                found.draws.append(LoopDraw(key, f"{name}.py:1", f"torch.{name}", 0, value, True))
        return found

    noise = torch.arange(8.0).view(4, 2)
    assert kinds(World([record(0, noise), record(1, -noise)])) == {}
    (cause,) = seen_on_ranks(World([record(0, noise), record(1, noise)]))
    assert cause.kind == "random numbers"
    assert "randn.py:1" in cause.text
    assert "randint" not in cause.text


@pytest.mark.parametrize(
    ("other", "is_error"),
    [
        (range(10, 20), False),  # the other half
        ([*range(10, 19), 0], False),  # the last batch is filled up, and one is left out
        (range(5, 15), True),  # half of another order
        ([0, 1, 2, 3, 4, 4, 3, 2, 1, 0], False),  # drawn, as by weights
    ],
)
def test_complete_passes_that_overlap_are_of_other_orders(
    other: Sequence[int], is_error: bool
) -> None:
    """The steps show nothing of it: no sample was read on both ranks so far."""
    records = []
    for rank, positions in enumerate((list(range(10)), list(other))):
        batches = [[f"{rank}a", f"{rank}b"], [f"{rank}c", f"{rank}d"]]
        record = ScriptRecord([RecordedStep(losses=[1.0]) for _ in batches])
        record.batches[0] = batches
        record.lengths[0] = (0, 20)
        record.data[0] = "of all"
        record.note_orders({0: [LoaderPass(positions, is_complete=True)]})
        records.append(record)
    assert records[0].lengths[0] == (10, 20)
    assert kinds(World(records)) == ({"samples": True} if is_error else {})
    records[1].orders[0][0].is_complete = False
    assert kinds(World(records)) == {}


def test_ranks_that_look_for_a_plateau_in_losses_of_their_own() -> None:
    records = [ScriptRecord([RecordedStep(losses=[1.0])], metrics=[0.5, 0.25]) for _ in range(2)]
    assert kinds(World(records)) == {}
    records[1].metrics = [0.5, 0.3]
    (cause,) = seen_on_ranks(World(records))
    assert cause.kind == "learning rate schedule"
    assert "in its call 2" in cause.text
    for record in records:
        record.metrics = [float("nan")]
    assert kinds(World(records)) == {}
