"""Records live bytes of tensors by kind while code runs.

This measures real tensors, and predicts with fake ones.

A storage counts from the operation that creates it until its last reference goes; `resize_` (by
which FSDP2 frees gathered parameters) is followed. Memory that an operation allocates and frees
inside of itself, and the allocator's rounding, are not counted. The result is a list of changes
with marks, so that parts of it can be repeated.

Tests: tests/plan/test_memory.py
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lockstep.config import DDPConfig
from lockstep.costs.hardware import Cost
from lockstep.division import ceil_div
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.torch_compat.dispatch_mode import UntracedDispatchMode, without_modes
from lockstep.torch_compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    OutputCache,
    local_tensor,
    resizes_watched,
)
from lockstep.torch_compat.operators import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    SHARDING,
    UNSAFE_VIEW,
)
from lockstep.torch_compat.pytree import tree_leaves

KINDS = ("activations", "parameters", "gradients", "optimizer", "gathered", "buckets", "stashes")
INDEX_OF_KIND = {kind: index for index, kind in enumerate(KINDS)}


class MemoryChange(NamedTuple):
    """A change of the live bytes of a kind (an index into KINDS)."""

    kind: int
    size: int


class Region(NamedTuple):
    """The changes and costs between two marks, named by the first of them ('' before any)."""

    label: str
    changes: list[MemoryChange]
    cost: Cost


def regions_of(
    items: Iterable[MemoryChange | Cost | str], labels: Sequence[str], times: int
) -> list[Region]:
    """Split a record at its marks, which are strings.

    Repeat regions with one of `labels` `times` times more.
    """
    regions = [Region("", [], Cost())]
    for item in items:
        if isinstance(item, str):
            regions.append(Region(item, [], Cost()))
        elif isinstance(item, MemoryChange):
            regions[-1].changes.append(item)
        else:
            regions[-1] = regions[-1]._replace(cost=regions[-1].cost.plus(item))
    return [
        each for region in regions for each in [region] * (1 + times * (region.label in labels))
    ]


@dataclass(frozen=True)
class Peak:
    """The largest number of live bytes."""

    total: int
    parts: dict[str, int]  # bytes by kind at that moment


def peak_over(start: Sequence[int], regions: Iterable[Region]) -> Peak:
    """Return the peak over regions."""
    live = list(start)
    total = highest = sum(live)
    parts = tuple(live)
    for region in regions:
        for kind, size in region.changes:
            live[kind] += size
            total += size
            if total > highest:
                highest = total
                parts = tuple(live)
    return Peak(highest, dict(zip(KINDS, parts, strict=True)))


# The operations of FSDP2 show the purpose of a storage.
_FSDP_KINDS = {
    "all_gather_copy_in": "gathered",
    "split_with_sizes_copy": "gathered",
    "chunk_cat": "buckets",
}


def _attention(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Count two products over all positions, as torch does for the GPU's kernels.

    A causal mask saves nothing in this count.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


_FORMULAS = {
    **flop_registry,  # does not include the CPU's fused attention
    CPU_ATTENTION: _attention,
    # five products, one of which recomputes the scores
    CPU_ATTENTION_BACKWARD: lambda _gradient, *args, **kwargs: _attention(*args, **kwargs) * 5 // 2,
}
# Operations without memory traffic.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "detach",
    "alias",
    UNSAFE_VIEW.__name__,
    "lift_fresh",
    "set_",
}
_DEVICE = torch.ops.prim.device.default


class EqualChunks(TorchFunctionMode):
    """Returns the same chunk for all chunks of one size.

    FSDP2 would create hundreds and keep one, and fake ones have no contents.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = func is torch.chunk and (
            isinstance(args[0], nn.Parameter) or not torch.is_grad_enabled()
        )
        return (_chunks if kept else func)(*args, **(kwargs or {}))


def _chunks(tensor: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    length = tensor.shape[dim]
    size = ceil_div(length, chunks)
    if not size:
        return torch.chunk(tensor, chunks, dim)
    even, rest = divmod(length, size)
    last = [tensor.narrow(dim, length - rest, rest)] if rest else []
    return (*([tensor.narrow(dim, 0, size)] * even if even else []), *last)


def _cost_of(func: Any, args: Any, kwargs: Any, out: Any) -> Cost | None:
    operator = func.overloadpacket
    if (formula := _FORMULAS.get(operator)) is not None:
        flops = int(formula(*args, **kwargs, out_val=out))
        first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return Cost(full=flops) if first.dtype == torch.float32 else Cost(low=flops)
    if func.is_view or operator.__name__ in _FREE:
        return None
    touched = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
    moved = sum(local_tensor(t).numel() * t.element_size() for t in touched.values())
    return Cost(moved=moved) if moved else None


class Tracker(UntracedDispatchMode):
    """Follows every tensor that is created while it is active, on any device but meta."""

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = None if fake is None else OutputCache(fake)
        # the record: changes, costs and marks in order
        self.items: list[MemoryChange | Cost | str] = []
        self.start = (0,) * len(KINDS)  # live bytes by kind before the first change
        self.live = [0] * len(KINDS)
        self.peak = 0
        self._storages: dict[int, tuple[Any, list[int]]] = {}  # id → weak reference, [bytes, kind]

    def restart(self) -> None:
        """Clear the record and the peak; live tensors stay live."""
        self.items = []
        self.start = tuple(self.live)
        self.peak = sum(self.live)

    def take_items(self) -> list[MemoryChange | Cost | str]:
        """Return the record so far, and begin another; the peak stays."""
        items = self.items
        self.items = []
        return items

    def mark(self, label: str) -> None:
        """Add a mark to the record."""
        self.items.append(label)

    def tag(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of tensors.

        Those created before the tracker was active count from now on.
        """
        for tensor in tensors:
            if tensor is not None:
                storage = local_tensor(tensor).untyped_storage()
                self._see(storage)
                entry = self._storages[id(storage)][1]
                if entry[1] != INDEX_OF_KIND[kind]:
                    # One decreases as the other increases: there is no peak between.
                    self._change(entry[1], -entry[0])
                    entry[1] = INDEX_OF_KIND[kind]
                    self._change(entry[1], entry[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # called thousands of times in a step, and slow below
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query, not an operation
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            return without_modes(func, args, kwargs)
        if self._cache is not None:
            out, cost = self._cache.run(func, args, kwargs, _cost_of)
        else:
            out = func(*args, **kwargs)
            cost = _cost_of(func, args, kwargs, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._see(local_tensor(leaf).untyped_storage())
        if cost is not None:
            self.items.append(cost)
        if func.namespace == SHARDING:  # torch's operators of FSDP2
            name = func.overloadpacket.__name__
            written = args[1] if name == "all_gather_copy_in" else kwargs.get("out", ())
            self.tag(
                [t for t in tree_leaves(written) if isinstance(t, Tensor)],
                _FSDP_KINDS.get(name, "activations"),
            )
        return out

    def _see(self, storage: Any) -> None:
        key = id(storage)
        if key not in self._storages:
            size = storage.nbytes()
            self._storages[key] = (weakref.ref(storage, partial(self._gone, key)), [size, 0])
            self._change(0, size)

    def _gone(self, key: int, _reference: Any) -> None:
        _, (size, kind) = self._storages.pop(key)
        self._change(kind, -size)

    def _change(self, kind: int, size: int) -> None:
        if size:
            self.live[kind] += size
            self.peak = max(self.peak, sum(self.live))
            self.items.append(MemoryChange(kind, size))

    def __enter__(self) -> "Tracker":
        self._watching = resizes_watched(self._resized)
        self._watching.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _resized(self, storage: Any) -> None:
        if id(storage) in self._storages:
            entry = self._storages[id(storage)][1]
            before = entry[0]
            entry[0] = storage.nbytes()
            self._change(entry[1], entry[0] - before)


def mark_blocks(tracker: Tracker, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Mark where the forward (F0, F1, …) and backward passes (B…) of blocks begin.

    A region includes what FSDP2 gathers for the next block, before that block's hooks run.
    """
    for index, (_, block) in enumerate(blocks):

        def before(_module: nn.Module, _inputs: Any, index: int = index) -> None:
            tracker.mark(f"F{index}")

        def after(_module: nn.Module, _inputs: Any, outputs: Any, index: int = index) -> None:
            if index == len(blocks) - 1:
                tracker.mark("after the blocks")
            first = (
                outputs
                if isinstance(outputs, Tensor)
                else next(t for t in outputs if isinstance(t, Tensor))
            )
            if first.requires_grad:
                on_backward(first, lambda: tracker.mark(f"B{index}"))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


def tag_gradients(tracker: Tracker, parameters: Iterable[nn.Parameter]) -> None:
    """Count gradients as such as soon as they exist."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: tracker.tag([p.grad], "gradients")
            )


def on_backward(tensor: Tensor, call: Callable[[], None]) -> None:
    """Call a function when the backward pass reaches a tensor."""
    tensor.register_hook(lambda _gradient: call())  # type: ignore[no-untyped-call]


class Reducer(AroundMicroBatch):
    """Allocates what DDP's reducer would: buckets for all gradients.

    The gradients become views of the buckets when it reduces.

    DDP's own reducer, in C++, rejects fake tensors.
    """

    def __init__(self, tracker: Tracker, model: nn.Module, options: DDPConfig) -> None:
        self._last = True
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = [torch.empty_like(p) for p in parameters]
        tracker.tag(self._buckets, "buckets")
        if options.compression.kind == "powersgd" and options.compression.error_feedback:
            self._errors = [torch.empty_like(p) for p in parameters]
            tracker.tag(self._errors, "buckets")
        for parameter, bucket in zip(parameters, self._buckets, strict=True):
            ready = partial(self._ready, tracker, bucket, options.gradient_as_bucket_view)
            parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def before(self, passing: MicroBatchPass) -> None:
        """Remember whether the micro-batch is the step's last."""
        self._last = passing.last

    def _ready(
        self, tracker: Tracker, bucket: Tensor, as_view: bool, parameter: nn.Parameter
    ) -> None:
        if self._last and as_view:
            parameter.grad = bucket
        else:
            tracker.tag([parameter.grad], "gradients")
