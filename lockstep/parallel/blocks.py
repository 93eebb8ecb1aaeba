"""What is done to a model before any strategy sees it: keyed random numbers, activation checkpointing, compilation."""

from torch import nn

from lockstep.config import TrainingConfig
from lockstep.models.protocol import require_segments, segments_of
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.compiled import compile_blocks
from lockstep.parallel.placement import Blocks
from lockstep.randomness import RandomState, key_segments


def key_model(model: nn.Module, random_state: RandomState, blocks: Blocks, *, cut: bool = False) -> None:
    """Key random numbers by segment; a model that names none is one segment.

    Args:
        cut: the model runs in stages of a pipeline.
    """
    segments = require_segments(model) if cut else segments_of(model)
    if segments is not None:
        key_segments(random_state, segments, chain=True)
    else:
        key_segments(random_state, [("", model)], chain=True)
        key_segments(random_state, blocks, chain=False)


def transform_blocks(
    model: nn.Module, training: TrainingConfig, random_state: RandomState, blocks: Blocks
) -> list[str]:
    """Activation checkpointing, then compilation, on each block; returns lines to be said at start."""
    apply_activation_checkpointing(
        blocks, training.gradient_checkpointing, random_state,
        every=training.gradient_checkpointing_every, compiled=training.compile,
    )  # fmt: skip
    if not training.compile:
        return []
    compile_blocks(blocks or [("", model)])
    return [f"compile: {len(blocks) or 1} block(s), at their first forward pass"]
