"""Defines which samples make up a step (`SampleOrder`), and reads them (`StepLoader`).

The data sets that ship are here, too.

Tests: tests/data/test_loader.py, tests/data/test_adopt.py
"""

from lockstep.data.adopt import adopt, require_data, usual_order
from lockstep.data.batches import (
    Assign,
    Data,
    MicroBatch,
    StepBatches,
    StepSource,
    batch_length,
    counted_samples,
    move,
)
from lockstep.data.datasets import build_data, check_data
from lockstep.data.iterable import IterableSteps
from lockstep.data.loader import StepLoader
from lockstep.data.order import DistributedSampler, SampleOrder

__all__ = [
    "Assign",
    "Data",
    "DistributedSampler",
    "IterableSteps",
    "MicroBatch",
    "SampleOrder",
    "StepBatches",
    "StepLoader",
    "StepSource",
    "adopt",
    "batch_length",
    "build_data",
    "check_data",
    "counted_samples",
    "move",
    "require_data",
    "usual_order",
]
