"""Turns data, a config's or a user's own, into this rank's micro-batches of each step.

    which data        datasets.py builds what `data.name` names; adopt.py makes steps of a user's
                      own, which user_data.py understands
    which samples     order.py, permutation.py, mixing.py: a function of (seed, step) alone
    reading           loader.py plans and receives, reader.py reads in workers;
                      iterable.py, iterable_epoch.py for what can only be iterated
    the same data     agreement.py compares ranks, by the summaries of fingerprint.py;
                      generators.py seeds what the data draw from
    texts             document_files.py reads records, filters.py leaves out, encoding.py and
                      conversations.py make tokens, gathering.py documents of them
    sequences         prepare.py writes tokens into a folder (token_folder.py); language.py cuts
                      windows, packing.py and packed.py pack documents of several sources.py,
                      packed_stream.py those of which nobody knows the number
    mistakes.py says what a user's own dataset did wrong, show.py prints samples as text

Tests: tests/data/test_loader.py, tests/data/test_adopt.py
"""

from lockstep.data.adopt import adopt
from lockstep.data.batches import (
    Assign,
    BatchSizes,
    Data,
    MicroBatch,
    SourceSettings,
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
from lockstep.data.user_data import require_data, usual_order

__all__ = [
    "Assign",
    "BatchSizes",
    "Data",
    "DistributedSampler",
    "IterableSteps",
    "MicroBatch",
    "SampleOrder",
    "SourceSettings",
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
