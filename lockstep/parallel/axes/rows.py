"""The axis `batch_norm`: rows of neighbouring ranks whose micro-batches are normalised together.

Tests: tests/parallel/forward_effects/test_buffers.py
"""

from collections.abc import Sequence
from typing import ClassVar, Self

from lockstep.parallel.axes.axis import Axis, PartOfModel
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.parallel.forward_effects.batch_norm_rows import BatchNormRows, apply_batch_norm_rows
from lockstep.parallel.site import Site


class RowsAxis(Axis):
    """Rows of ranks that batch normalisation covers; it divides the ranks that share out a step."""

    name: ClassVar[str] = "batch_norm"

    def __init__(self, rows: BatchNormRows) -> None:
        self.rows = rows

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        training = site.config.training
        samples = None if site.dry_run is not None else training.batch_norm_samples
        rows = apply_batch_norm_rows(
            site.facts.model, samples, training.batch_size, site.layout.data_parallel_size
        )
        return None if rows is None else cls(rows)

    def around_passes(self, part: PartOfModel) -> Sequence[AroundMicroBatch]:
        return [self.rows]
