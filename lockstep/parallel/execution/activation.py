"""Activation checkpointing: drop what a block saves, and recompute it in the backward pass.

A block's `forward` is replaced on the instance, so canonical names stay, and hooks on the block
(keyed random numbers, FSDP's gathering) run outside of what is recomputed. What each mode keeps of
a block for the backward pass:

    none         all that autograd saves
    full         its inputs
    selective    its inputs, and products of matrices, which cost most to compute again
    every_n      as full, every n-th block; the others as none
    sequential   the first of n blocks its inputs, the others nothing (`block_runs.py`)

A recomputed block begins with the random numbers and buffers that its forward pass began with
(`recomputing.py`).

Tests: tests/parallel/execution/test_activation.py, tests/parallel/execution/test_recompute.py
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lockstep.errors import UsageError
from lockstep.host_draws import HostState
from lockstep.parallel.changes import replace_method
from lockstep.parallel.execution.block_runs import BlockRuns
from lockstep.parallel.execution.recomputing import (
    ChangingBuffers,
    Copies,
    generator_state,
    recomputing,
)
from lockstep.randomness import RandomState
from lockstep.torch_compat.operators import FUSED_ATTENTION

# Selective checkpointing keeps results that cost much to compute for their size. The rest is
# recomputed.
_PRODUCTS = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.convolution,
)
_KEPT = tuple(operator.default for operator in (*_PRODUCTS, *FUSED_ATTENTION))

_MODES = ("none", "full", "selective", "every_n", "sequential")
# block → its forward pass, as it was before it was checkpointed
_replaced: "weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]]" = weakref.WeakKeyDictionary()


def apply_activation_checkpointing(
    blocks: Sequence[tuple[str, nn.Module]],
    mode: str,
    random_state: RandomState,
    *,
    every: int = 2,
    compiled: bool = False,
) -> None:
    """Checkpoint blocks, given in the order in which they run, in place.

    Args:
        mode: none | full (each block) | selective (each block, keeping products of matrices) |
            every_n (each `every`-th) | sequential (runs of `every` blocks).
        compiled: the blocks will be compiled; the random context is then left to the hooks outside
            of them.
    """
    for _, block in blocks:  # another mode takes the place of the one before
        before = _replaced.pop(block, None)
        if before is not None:
            block.forward = before
    if mode == "none":
        return
    if mode not in _MODES:
        raise UsageError(
            f"there is no activation checkpointing {mode!r}",
            where="training.gradient_checkpointing",
            fix=f"write one of {', '.join(_MODES)}",
        )
    if not blocks:
        what = (
            "activation checkpointing needs to know the model's repeated blocks, and none were"
            " found"
        )
        fix = "give the model a method blocks() -> [(name, module)]"
        raise UsageError(what, where="training.gradient_checkpointing", fix=fix)
    if mode == "sequential":
        if compiled:
            what = "a run of blocks is recomputed at once, and blocks are compiled one by one"
            fix = "set training.gradient_checkpointing: full, or training.compile: false"
            raise UsageError(
                what, where="training.gradient_checkpointing, training.compile", fix=fix
            )
        runs = BlockRuns(random_state)
        for position, (_, block) in enumerate(blocks):
            _replaced[block] = block.forward
            recomputed = runs.over(block, starts=position % every == 0)
            replace_method(block, recomputed, by="gradient_checkpointing")
        return
    for _, block in blocks[::every] if mode == "every_n" else blocks:
        _replaced[block] = block.forward
        checkpointed = _checkpointed(
            block, random_state, selective=mode == "selective", compiled=compiled
        )
        replace_method(block, checkpointed, by="gradient_checkpointing")


def _checkpointed(
    block: nn.Module, random_state: RandomState, *, selective: bool, compiled: bool
) -> Callable[..., Any]:
    """Return a block's forward pass, recomputed in the backward pass."""
    forward = block.forward
    buffers = ChangingBuffers(block)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        """Run the block; keep its inputs, its random state and its changing buffers."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        repeat: Any = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=True)
        if compiled:
            selecting = (
                {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
                if selective
                else {}
            )
            return repeat(*args, **selecting, **kwargs)
        before = buffers.copied()
        contexts = partial(_contexts, random_state, random_state.capture(), before, selective)
        outputs = repeat(*args, context_fn=contexts, **kwargs)
        buffers.notice()
        return outputs

    return checkpointed


def _contexts(
    random_state: RandomState, captured: HostState | None, buffers: Copies, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    keep: AbstractContextManager[Any] = nullcontext()
    reuse: AbstractContextManager[Any] = nullcontext()
    if selective:
        keep, reuse = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    drawn = None if random_state.device.type == "cpu" else generator_state(random_state)
    return keep, recomputing(random_state, captured, drawn, buffers, reuse)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
