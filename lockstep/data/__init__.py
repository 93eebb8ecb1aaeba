"""Data: which samples make up a step, how they are read, and the data sets that ship.

`SampleOrder` says what a step is, `StepLoader` reads this rank's share of it; `build_data` makes the data that a config
names.
"""

from lockstep.data.batches import Assign, MicroBatch, StepBatches, StepSource
from lockstep.data.dataset import Data
from lockstep.data.loader import StepLoader
from lockstep.data.order import SampleOrder, Window
from lockstep.data.registry import build_data

__all__ = [
    "Assign",
    "Data",
    "MicroBatch",
    "SampleOrder",
    "StepBatches",
    "StepLoader",
    "StepSource",
    "Window",
    "build_data",
]
