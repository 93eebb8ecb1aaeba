"""What is done to a model before any strategy sees it: keyed random numbers, activation checkpointing, compilation."""

from torch import nn

from lockstep.config import TrainingConfig
from lockstep.models.protocol import require_segments, segments_of
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.compiled import compile_blocks
from lockstep.parallel.placement import Blocks
from lockstep.randomness import Cursor, key_segments


def key_model(model: nn.Module, cursor: Cursor, blocks: Blocks, *, cut: bool = False) -> None:
    """Key random numbers by segment; a model that names none is one segment.

    Args:
        cut: the model runs in stages of a pipeline.
    """
    segments = require_segments(model) if cut else segments_of(model)
    if segments is not None:
        key_segments(cursor, segments, chain=True)
    else:
        key_segments(cursor, [("", model)], chain=True)
        key_segments(cursor, blocks, chain=False)


def transform_blocks(model: nn.Module, training: TrainingConfig, cursor: Cursor, blocks: Blocks) -> list[str]:
    """Activation checkpointing, then compilation, on each block; returns lines to be said at start."""
    apply_activation_checkpointing(
        blocks, training.gradient_checkpointing, cursor,
        every=training.gradient_checkpointing_every, compiled=training.compile,
    )  # fmt: skip
    if not training.compile:
        return []
    compile_blocks(blocks or [("", model)])
    return [f"compile: {len(blocks) or 1} block(s), at their first forward pass"]
