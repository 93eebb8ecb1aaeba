"""Says which ranks' samples one process gets in place of its own.

Tests: tests/verify/test_script.py
"""

from typing import NamedTuple

from lockstep.division import ceil_div
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.world import World

Feed = dict[tuple[int, int], list[tuple[int, int]]]
"""(loader, batch) of one process → the (rank, batch) whose samples it gets together."""


def united(world: World, *, shared: bool) -> Feed:
    """Return the feed that gives one process the batches of all ranks together.

    `shared`: each reads the whole one.
    """
    feed: Feed = {}
    readers = [unit[0] for unit in world.units[: 1 if shared else None]]
    records = world.records
    for loader in records[0].batches:
        counts = {rank: len(records[rank].batches.get(loader, [])) for rank in readers}
        # Where rank 0 reads for all (Accelerate's dispatch_batches), a step takes a batch for each
        # rank of it.
        together = (
            len(readers) if counts[0] and not any(counts[rank] for rank in readers[1:]) else 1
        )
        for index in range(ceil_div(max(counts.values()), together)):
            at = range(index * together, (index + 1) * together)
            feed[loader, index] = [(r, i) for r, count in counts.items() for i in at if i < count]
    return feed


class TrainedBatches(NamedTuple):
    """The batches of a loader that a step trains on."""

    loader: int
    indices: range  # among all that it has given


def step_batches(record: ScriptRecord, step: int) -> TrainedBatches | None:
    """Return the training loader, and which of its batches a step trains on.

    None if batches are not passes.
    """
    loader = record.training_loader
    if loader is None:
        return None
    begin = sum(record.passes[:step])
    return TrainedBatches(loader, range(begin, begin + record.passes[step]))


def one_after_another(world: World) -> Feed:
    """Return the feed that gives one process the batches of the ranks one after another.

    It is for a script that takes, on fewer ranks, proportionally more batches a step.
    """
    feed: Feed = {}
    number = 0
    for step in range(len(world.records[0].steps)):
        trained = step_batches(world.records[0], step)
        assert trained is not None
        for index in trained.indices:
            for unit in world.units:
                feed[trained.loader, number] = [(unit[0], index)]
                number += 1
    return feed
