"""Recomputes several blocks in a row at once, from the input of the first (`sequential`).

Three blocks, of which a run keeps x alone, and nothing that autograd saves in them:

    forward    x → block 0 → block 1 → block 2 → y      each call is noted; autograd saves positions
    backward   asks for the first of these: blocks 0, 1 and 2 run again from x, and what autograd
               saves now are the tensors for all positions

A block continues a run if it is given what the block before returned.

Tests: tests/parallel/execution/test_activation.py, tests/parallel/execution/test_recompute.py
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from lockstep.host_draws import HostState
from lockstep.parallel.execution.recomputing import (
    ChangingBuffers,
    Copies,
    generator_state,
    recomputing,
)
from lockstep.randomness import RandomState
from lockstep.torch_compat.pytree import tree_leaves, tree_map
from lockstep.torch_compat.tensor_versions import base_of


@dataclass(frozen=True)
class _Previous:
    """A placeholder for an output of the previous block, by its position among the outputs."""

    position: int


@dataclass(frozen=True)
class _Input:
    """A tensor that a run was given, without the graph that made it."""

    tensor: Tensor
    requires_grad: bool


@dataclass(frozen=True)
class _Call:
    """A call of a block, with all that its recomputation needs."""

    block: nn.Module
    forward: Callable[..., Any]
    # (positional, keyword); tensors are detached, and those from the block before are left out
    arguments: Any
    generator: Tensor  # state of the device's generator when the block began
    captured: HostState | None  # of the generators on the host, then
    buffers: Copies  # those that the forward pass changes, as they were then


class BlockRuns:
    """The runs of a model's blocks.

    One is open at a time: forward passes of micro-batches do not interleave.
    """

    def __init__(self, random_state: RandomState) -> None:
        self._random_state = random_state
        self._open: _Run | None = None
        self._returned: list[weakref.ref[Tensor]] = []  # by the block that ran last

    def over(self, block: nn.Module, *, starts: bool) -> Callable[..., Any]:
        """Return a block's forward pass as a part of a run of blocks, or as the first of one."""
        forward = block.forward
        buffers = ChangingBuffers(block)

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            """Run the block, keep nothing that autograd saves, and note the call."""
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            arguments = tree_map(self._linked, (args, kwargs))
            continues = any(isinstance(leaf, _Previous) for leaf in tree_leaves(arguments))
            run = self._open
            if run is None or starts or not continues:
                run = self._open = _Run(self._random_state)
                arguments = (args, kwargs)
            generator = generator_state(self._random_state)
            captured = self._random_state.capture()
            before = buffers.copied()
            run.calls.append(
                _Call(block, forward, tree_map(_detached, arguments), generator, captured, before)
            )
            with saved_tensors_hooks(run.pack, run.unpack):
                outputs = forward(*args, **kwargs)
            buffers.notice()
            self._returned = [
                weakref.ref(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)
            ]
            return outputs

        return recomputed

    def _linked(self, leaf: Any) -> Any:
        """Return a placeholder for what the block before has returned, and all else as it is."""
        if isinstance(leaf, Tensor):
            for position, returned in enumerate(self._returned):
                if _same(leaf, returned()):
                    return _Previous(position)
        return leaf


@dataclass(eq=False)
class _Run:
    """Several blocks in a row: what autograd saves in them, by position, and how to compute it."""

    random_state: RandomState
    calls: list[_Call] = field(default_factory=list)
    _saved: int = 0
    _values: dict[int, Tensor] = field(default_factory=dict)  # position → tensor, once recomputed

    def __post_init__(self) -> None:
        kind = self.random_state.device.type
        self._precision: AbstractContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            cached = torch.is_autocast_cache_enabled()
            self._precision = torch.autocast(kind, dtype, cache_enabled=cached)

    def pack(self, _tensor: Tensor) -> int:
        """Return the position of a tensor among those that autograd saves, which stands for it."""
        self._saved += 1
        return self._saved - 1

    def unpack(self, position: int) -> Tensor:
        """Return the tensor that a position stands for; the first one recomputes all of them."""
        if position not in self._values:
            self._recompute()
        return self._values.pop(position)

    def _recompute(self) -> None:
        """Run all blocks of the run again with a graph, and take what autograd saves."""
        recomputed: list[Tensor] = []
        outputs: list[Any] = []

        def collect(tensor: Tensor) -> None:
            recomputed.append(tensor.detach())

        def attached(leaf: Any) -> Any:
            if isinstance(leaf, _Previous):
                return outputs[leaf.position]
            if isinstance(leaf, _Input):
                return leaf.tensor.detach().requires_grad_(leaf.requires_grad)
            return leaf

        def never(_nothing: None) -> Tensor:
            raise AssertionError("the graph of a recomputation is not differentiated")

        with torch.enable_grad(), self._precision, saved_tensors_hooks(collect, never):
            for call in self.calls:
                for module in call.block.modules():
                    if isinstance(module, FSDPModule):
                        # freed since; FSDP2 frees it again after the backward pass
                        module.unshard()
                args, kwargs = tree_map(attached, call.arguments)
                drawing = recomputing(
                    self.random_state, call.captured, call.generator, call.buffers, nullcontext()
                )
                with drawing:
                    result = call.forward(*args, **kwargs)
                outputs[:] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if len(recomputed) != self._saved:
            what = (
                f"blocks saved {self._saved} tensors in the forward pass, and {len(recomputed)}"
                " when they were recomputed"
            )
            raise RuntimeError(what)
        self._values = dict(enumerate(recomputed))


def _detached(leaf: Any) -> Any:
    return _Input(leaf.detach(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _same(one: Tensor, other: Tensor | None) -> bool:
    """Return whether two tensors are the same one, or aliases of the same one.

    FSDP2 passes inputs through its own autograd node.
    """
    if other is None or one.shape != other.shape or one.stride() != other.stride():
        return False
    bases = [tensor if (base := base_of(tensor)) is None else base for tensor in (one, other)]
    return bases[0] is bases[1] and one.storage_offset() == other.storage_offset()
