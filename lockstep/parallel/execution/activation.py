"""Activation checkpointing: drop what a block saves, and recompute it in the backward pass.

A block's `forward` is replaced on the instance, so canonical names stay, and hooks on the block
(keyed random numbers, FSDP's gathering) run outside of what is recomputed. `sequential` keeps only
the input of the first of several blocks in a row, and computes all of them again at once; a block
continues a run if it is given what the block before returned. Recomputation begins with the buffers
that the forward pass began with, and leaves no trace in them.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lockstep.errors import UsageError
from lockstep.generator_states import HostState
from lockstep.machine.accelerator import default_generator
from lockstep.parallel.changes import replace_method
from lockstep.randomness import RandomState
from lockstep.torch_compat.normalizations import BatchNorm
from lockstep.torch_compat.operators import FUSED_ATTENTION
from lockstep.torch_compat.pytree import tree_leaves, tree_map
from lockstep.torch_compat.tensor_versions import base_of, version_of

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
# their own forward
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
        if (before := _replaced.pop(block, None)) is not None:
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
        runs = _Runs(random_state)
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
    buffers = _ChangingBuffers(block)

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
    random_state: RandomState, captured: HostState | None, buffers: "_Copies", selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    keep: AbstractContextManager[Any] = nullcontext()
    reuse: AbstractContextManager[Any] = nullcontext()
    if selective:
        keep, reuse = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    drawn = None if random_state.device.type == "cpu" else _state(random_state)
    return keep, _recomputing(random_state, captured, drawn, buffers, reuse)


@contextmanager
def _recomputing(
    random_state: RandomState,
    captured: HostState | None,
    drawn: Tensor | None,
    buffers: "_Copies",
    reuse: AbstractContextManager[Any],
) -> Iterator[None]:
    """Repeat a block's random numbers in its recomputation.

    torch does so by itself where the block has tensors among its positional arguments and the
    device's module has `_initialized`, which those of MPS and of registered devices lack. `drawn`:
    the generator's state as the forward pass began; None: torch restores it.
    """
    drawing = nullcontext() if drawn is None else drawing_from(drawn, random_state)
    with random_state.recomputing(captured), drawing, _in_place(buffers), reuse:
        yield


_Copies = list[tuple[nn.Module, str, Tensor]]  # (module, name of a buffer there, its values)


class _ChangingBuffers:
    """The buffers of a block that its forward pass changes."""

    def __init__(self, block: nn.Module) -> None:
        self._all = [
            (m, name) for m in block.modules() for name, _ in m.named_buffers(recurse=False)
        ]
        self._changing: list[tuple[nn.Module, str]] | None = None  # None: no forward pass was seen
        self._before: list[tuple[int, int]] = []

    def copied(self) -> _Copies:
        """Return copies of the buffers that change; before the first forward pass, of all."""
        if self._changing is None:
            self._before = self._versions()
        buffers = self._all if self._changing is None else self._changing
        return [
            (m, name, buffer.clone())
            for m, name in buffers
            if (buffer := getattr(m, name)) is not None
        ]

    def notice(self) -> None:
        """Note, after the first forward pass, which of them it has changed."""
        if self._changing is not None:
            return
        pairs = zip(self._all, self._before, self._versions(), strict=True)
        # Batch normalisation writes its averages without a new version.
        self._changing = [
            each for each, old, new in pairs if old != new or isinstance(each[0], BatchNorm)
        ]

    def _versions(self) -> list[tuple[int, int]]:
        buffers = [getattr(module, name) for module, name in self._all]
        return [
            (0, 0) if buffer is None else (id(buffer), version_of(buffer)) for buffer in buffers
        ]


@contextmanager
def _in_place(buffers: _Copies) -> Iterator[None]:
    """Have copies in the place of buffers in the block.

    Autograd may have saved the buffers themselves.
    """
    live = [getattr(module, name) for module, name, _ in buffers]
    for module, name, before in buffers:
        setattr(module, name, before.clone())  # two halves of a backward pass may each recompute
    try:
        yield
    finally:
        for (module, name, _), buffer in zip(buffers, live, strict=True):
            setattr(module, name, buffer)


@contextmanager
def drawing_from(state: Tensor, random_state: RandomState) -> Iterator[None]:
    """Draw the device's random numbers in the block from `state`, and restore the outer state."""
    generator = default_generator(random_state.device)
    outer = _state(random_state)
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(outer)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class _Previous:
    """A placeholder for an output of the previous block, by its position among the outputs."""

    position: int


@dataclass(frozen=True)
class _Call:
    block: nn.Module
    forward: Callable[..., Any]
    # (positional, keyword); tensors are detached, and those from the block before are left out
    arguments: Any
    generator: Tensor  # state of the device's generator when the block began
    captured: HostState | None  # of the generators on the host, then
    buffers: _Copies  # that change, as they were then


class _Runs:
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
        buffers = _ChangingBuffers(block)

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
            generator = _state(self._random_state)
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
        if isinstance(leaf, Tensor):
            for position, returned in enumerate(self._returned):
                if _same(leaf, returned()):
                    return _Previous(position)
        return leaf


@dataclass(eq=False)
class _Run:
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
            return (
                leaf.tensor.detach().requires_grad_(leaf.requires_grad)
                if isinstance(leaf, _Input)
                else leaf
            )

        def never(_nothing: None) -> Tensor:
            raise AssertionError("the graph of a recomputation is not differentiated")

        with torch.enable_grad(), self._precision, saved_tensors_hooks(collect, never):
            for call in self.calls:
                for module in call.block.modules():
                    if isinstance(module, FSDPModule):
                        # freed since; FSDP2 frees it again after the backward pass
                        module.unshard()
                args, kwargs = tree_map(attached, call.arguments)
                drawing = _recomputing(
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


def _state(random_state: RandomState) -> Tensor:
    return default_generator(random_state.device).get_state()


def _same(one: Tensor, other: Tensor | None) -> bool:
    """Return whether two tensors are the same one, or aliases of the same one.

    FSDP2 passes inputs through its own autograd node.
    """
    if other is None or one.shape != other.shape or one.stride() != other.stride():
        return False
    bases = [tensor if (base := base_of(tensor)) is None else base for tensor in (one, other)]
    return bases[0] is bases[1] and one.storage_offset() == other.storage_offset()


@dataclass(frozen=True)
class _Input:
    """A tensor that a run was given, without the graph that made it."""

    tensor: Tensor
    requires_grad: bool


def _detached(leaf: Any) -> Any:
    return _Input(leaf.detach(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
