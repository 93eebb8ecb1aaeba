"""Activation checkpointing: forget what is inside a block, and recompute it in the backward pass.

A block's `forward` is replaced on the instance, so canonical names stay, and hooks on the block (keyed random numbers,
FSDP's gathering) lie outside of what is recomputed. The recomputation restores the random state of the forward pass:
under a pipeline another micro-batch is current by then.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.errors import UsageError
from lockstep.parallel.recomputed_runs import recompute_runs
from lockstep.randomness import Captured, RandomState
from lockstep.torch_compat.operators import FUSED_ATTENTION

# What selective checkpointing keeps: results that cost much to compute for their size. The rest is recomputed.
_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    *(attention.default for attention in FUSED_ATTENTION),
    torch.ops.aten.convolution.default,
)


def apply_activation_checkpointing(
    blocks: Sequence[tuple[str, nn.Module]],
    mode: str,
    random_state: RandomState,
    *,
    every: int = 2,
    compiled: bool = False,
) -> None:
    """Checkpoint blocks in place.

    Args:
        blocks: (name, module) in the order in which they run.
        mode: none | full (each block) | selective (each block, keeping products of matrices) | every_n (each
            `every`-th) | sequential (runs of `every` blocks: see `lockstep.parallel.recomputed_runs`).
        every: n of every_n and of sequential.
        compiled: the blocks will be compiled; the random context is then left to the hooks outside of them.

    Raises:
        UsageError: the model names no blocks, or runs of them would have to be compiled.
    """
    if mode == "none":
        return
    if not blocks:
        raise UsageError(
            "activation checkpointing needs to know the model's repeated blocks, and none were found",
            where="training.gradient_checkpointing",
            fix="give the model a method blocks() -> [(name, module)]",
        )
    if mode == "sequential":
        if compiled:
            raise UsageError(
                "a run of blocks is recomputed at once, and blocks are compiled one by one",
                where="training.gradient_checkpointing, training.compile",
                fix="set training.gradient_checkpointing: full, or training.compile: false",
            )
        recompute_runs(blocks, every, random_state)
        return
    chosen = blocks[::every] if mode == "every_n" else blocks
    for _, block in chosen:
        block.forward = _checkpointed(block.forward, random_state, selective=mode == "selective", compiled=compiled)


def _checkpointed(
    forward: Callable[..., Any], random_state: RandomState, *, selective: bool, compiled: bool
) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if compiled:
            contexts: dict[str, Any] = (
                {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
            )
        else:
            contexts = {"context_fn": partial(_contexts, random_state, random_state.capture(), selective)}
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **contexts, **kwargs)

    return checkpointed


def _contexts(
    random_state: RandomState, captured: Captured, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    keep: AbstractContextManager[Any] = nullcontext()
    reuse: AbstractContextManager[Any] = nullcontext()
    if selective:
        keep, reuse = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return keep, _Both(random_state.recomputing(captured), reuse)


class _Both(AbstractContextManager[None]):
    def __init__(self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        self._second.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._second.__exit__(*error)
        self._first.__exit__(*error)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
