"""Makes what B is given of A: each rank of B that rank's own, of some kinds.

    first values      of the parameters that B has in the same shape
    samples           a batch of B gets those of A's batches in that step, one or several
    random numbers    those that A has drawn in place of B's
    settings          of the optimizer, step by step

Tests: tests/verify/test_pair.py
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.verify.script.feeds import Feed, step_batches
from lockstep.verify.script.pairs.differences import as_drawn
from lockstep.verify.script.record import Pieces, ScriptRecord, batch_file
from lockstep.verify.script.task import GivenValues
from lockstep.verify.script.world import with_complete_tensors


@dataclass(frozen=True)
class ValuesOfA:
    """Holds what A has had, by which B is run again."""

    records: Sequence[ScriptRecord]  # of A's ranks
    folder: Path  # in which A has stored its samples
    records_of_b: Sequence[ScriptRecord]
    names: dict[str, str]  # B's name of a parameter → A's
    samples: Path  # a folder for the samples that B is given

    def given(self, kinds: Collection[str]) -> GivenValues:
        """Return what B is given: each rank's own of A, of some kinds."""
        given = GivenValues(names=self.names, by_rank=True)
        if "first values" in kinds:
            given = replace(given, first=self._first_values())
        if "samples" in kinds:
            given = replace(given, feed=self._feed(), samples=self.samples)
        if "random numbers" in kinds:
            pairs = enumerate(zip(self.records_of_b, self.records, strict=True))
            draws = {
                rank: [draw for draw in as_drawn(a, b) if draw is not None]
                for rank, (b, a) in pairs
            }
            given = replace(given, draws=draws)
        if "settings" in kinds:
            settings = tuple(step.settings for step in self.records[0].steps)
            given = replace(given, settings=settings)
        return given

    def _first_values(self) -> dict[str, list[Any]]:
        """Return A's first values on each rank, of the parameters that B has in the same shape."""
        firsts = []
        pairs = zip(
            with_complete_tensors(self.records_of_b),
            with_complete_tensors(self.records),
            strict=True,
        )
        for b, a in pairs:
            shapes = {name: piece.shape for name, piece in b.first.items()}
            firsts.append(
                {name: one for name, one in a.first.items() if shapes.get(name) == one.shape}
            )
        return _by_rank(firsts)

    def _feed(self) -> Feed:
        """Return the feed that gives each batch of B the samples that A had in that step.

        A step of A may take more and smaller batches. Empty if they are not a multiple.
        """
        self.samples.mkdir(exist_ok=True)
        feed: Feed = {}
        for rank, (b, a) in enumerate(zip(self.records_of_b, self.records, strict=True)):
            for number in range(min(len(b.steps), len(a.steps))):
                of_b = step_batches(b, number)
                of_a = step_batches(a, number)
                if of_b is None or of_a is None or len(of_a.indices) % len(of_b.indices):
                    return {}
                each = len(of_a.indices) // len(of_b.indices)  # batches of A for one of B
                for position, index in enumerate(of_b.indices):
                    indices_of_a = of_a.indices[position * each : (position + 1) * each]
                    feed[of_b.loader, index] = [(rank, index_of_a) for index_of_a in indices_of_a]
                    for index_of_a in indices_of_a:
                        link = batch_file(self.samples, rank, of_b.loader, index_of_a)
                        link.unlink(missing_ok=True)
                        link.symlink_to(batch_file(self.folder, rank, of_a.loader, index_of_a))
        return feed


def gradients_by_step(records: Sequence[ScriptRecord]) -> list[dict[str, list[Any]]]:
    """Return the gradients of each step on each rank, by name."""
    complete = with_complete_tensors(records)
    return [
        _by_rank([record.steps[number].gradients for record in complete])
        for number in range(len(complete[0].steps))
    ]


def _by_rank(ranks: Sequence[Pieces]) -> dict[str, list[Any]]:
    """Return each name's tensor on each rank; None where a rank has none."""
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {
        name: [pieces[name].local if name in pieces else None for pieces in ranks] for name in names
    }
