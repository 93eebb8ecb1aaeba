"""Runs a script on ranks and as one process, and measures how far their gradients and updates are apart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.verify.script.gradients import Vector, relative, sizes_of, vector
from lockstep.verify.script.outcome import ScriptDifference, ScriptOutcome
from lockstep.verify.script.ranks import is_cut_by_script
from lockstep.verify.script.record import Pieces, RecordedStep, ScriptRecord, World
from lockstep.verify.script.runs import Feed, ScriptRuns, step_batches

ROUNDING = 2e-5  # relative difference that needs no explanation in float32
CEILING = 1e-2  # a difference above it is never rounding
NUDGES = 10.0  # how many times as far as changed last bits do a difference may be
MOST_PARTS = 8  # processes that are started for the parts of one step


class ScriptComparison:
    """The ranks of a script, and what one process is given to be compared with them."""

    def __init__(self, runs: ScriptRuns, outcome: ScriptOutcome) -> None:
        self.runs, self.outcome, self.ranks = runs, outcome, outcome.ranks
        self.records: list[ScriptRecord] = []
        self.world = World([])
        self.joined: dict[str, int] = {}
        self.folder = Path()
        self.rounding = ROUNDING
        self.given: dict[str, Any] = {}  # what each run of one process is given, but for its samples
        self.feed: Feed = {}
        self.sizes: dict[str, int] = {}  # of the gradients that are compared

    def take(self, what: str, **changes: Any) -> None:
        """Run the ranks, whose records are judged from now on."""
        self.folder, self.records = self.runs.world(self.ranks, what, **changes)
        self.world = World(self.records, self.joined)

    def first_values(self) -> dict[str, list[Any]]:
        """Return the first values of each parameter on each rank."""
        return self._on_ranks(lambda record: record.first)

    def all_gradients(self) -> list[dict[str, list[Any]]]:
        """Return, of each step, the gradient of each parameter with which each rank's optimizer steps."""

        def of(number: int) -> Callable[[ScriptRecord], Pieces]:
            return lambda record: record.steps[number].gradients

        return [self._on_ranks(of(number)) for number in range(self.outcome.steps)]

    def _on_ranks(self, pick: Callable[[ScriptRecord], Pieces]) -> dict[str, list[Any]]:
        ranks = self.world.tensors(pick)
        return {name: [rank[name] for rank in ranks if name in rank] for name in ranks[0]}

    def alone(self, what: str, feeds: Sequence[Feed], **changes: Any) -> list[ScriptRecord]:
        """Run the script as one process for each of the feeds."""
        return self.runs.alone(what, [{**self.given, **changes, "feed": feed} for feed in feeds])

    def distances(self, number: int, world: World, reference: ScriptRecord) -> tuple[float, float]:
        """Return how far the ranks' gradients are off, and their updates."""
        mine, right = self.gradients(number, world), self.gradients(number, World([reference]))[0]
        gradient = max(relative(one, right) for one in mine)
        return gradient, max(self.updates(number, world, reference))

    def gradients(self, number: int, world: World, *, clipped: bool = False) -> list[Vector]:
        """Return the gradients of a step as each rank sees them, before they are clipped or afterwards."""

        def pick(record: ScriptRecord) -> Any:
            step = record.steps[number]
            return step.gradients if clipped or not step.unclipped else step.unclipped

        return [vector(one, self.sizes) for one in world.tensors(pick)]

    def updates(self, number: int, world: World, reference: ScriptRecord) -> list[float]:
        """Return how far each rank's updated weights are off, relative to the update."""
        one_process = World([reference])
        values = one_process.tensors(lambda record: record.steps[number].values)
        sizes = sizes_of(values)
        right = vector(values[0], sizes)
        if number:
            before = one_process.tensors(lambda record: record.steps[number - 1].values)[0]
        else:
            before = {name: ranks[0] for name, ranks in self.given["first"].items()}
        moved = max(float(np.linalg.norm(right - vector(before, sizes))), 1e-300)
        ranks = world.tensors(lambda record: record.steps[number].values)
        return [float(np.linalg.norm(vector(one, sizes) - right)) / moved for one in ranks]

    def first_difference(
        self, reference: ScriptRecord, limits: Sequence[tuple[float, float]]
    ) -> tuple[ScriptDifference | None, float]:
        """Return the first difference, and the largest before it.

        Args:
            limits: of each step: for gradients, and for updates.
        """
        rounding = 0.0
        for number in range(min(self.outcome.steps, len(reference.steps))):
            step = reference.steps[number]
            self.size(step)
            for clipped in (False, True):
                right = self.gradients(number, World([reference]), clipped=clipped)[0]
                for rank, mine in enumerate(self.gradients(number, self.world, clipped=clipped)):
                    off = relative(mine, right)
                    if off > limits[number][0]:
                        aspect = "clipped gradients" if clipped and step.unclipped else "gradients"
                        distances, norms = self._norms(mine - right), self._norms(right)
                        name = max(distances, key=lambda name: distances[name])
                        self.outcome.parts = {n: off / max(norms[n], 1e-300) for n, off in distances.items()}
                        return ScriptDifference(number, aspect, name, off, rank), rounding
                    rounding = max(rounding, off)
            for rank, off in enumerate(self.updates(number, self.world, reference)):
                if off > limits[number][1]:
                    return ScriptDifference(number, "weights", "", off, rank), rounding
        return None, rounding

    def size(self, step: RecordedStep) -> None:
        """Compare from now on the gradients that a step of one process has."""
        pieces = {**step.unclipped, **step.gradients}
        self.sizes = {name: piece.local.numel() for name, piece in pieces.items()}

    def _norms(self, values: Vector) -> dict[str, float]:
        """Return the norm of each parameter's part of a vector."""
        found, begin = {}, 0
        for name, size in self.sizes.items():
            found[name] = float(np.linalg.norm(values[begin : begin + size]))
            begin += size
        return found

    def is_split(self) -> bool:
        """Return whether one process takes the ranks' batches one after another."""
        return any(len(at) == 1 for at in self.feed.values())

    def batches_of(self, number: int) -> tuple[int, range] | None:
        """Return the loader and batches of a step, if one process can be given parts of them."""
        at = step_batches(self.records[0], number)
        limited = len(self.world.units) <= MOST_PARTS and not is_cut_by_script(self.world)
        return at if self.feed and not self.is_split() and limited else None

    def alone_on_each(self, number: int, at: tuple[int, range]) -> list[tuple[Vector, ScriptRecord]]:
        """Return a step's gradient of one process on the samples of each unit."""
        return self.parts(number, at, [[[(unit[0], i)] for i in at[1]] for unit in self.world.units])

    def parts(
        self, step: int, at: tuple[int, range], given: Sequence[Sequence[Sequence[tuple[int, int]]]]
    ) -> list[tuple[Vector, ScriptRecord]]:  # fmt: skip
        """Return a step's gradient of one process for each of `given`: the samples of each of its batches."""
        feeds = [{**self.feed, **{(at[0], i): list(s) for i, s in zip(at[1], one, strict=True)}} for one in given]
        records = self.alone("given parts of the samples alone", feeds, steps=step + 1)
        return [(self.gradients(step, World([record]))[0], record) for record in records]
