"""Live bytes of tensors while code runs, by kind: on real tensors a measurement, on fake ones a prediction.

A storage counts from the operation that makes it until its last reference goes; `resize_` (how FSDP2 frees gathered
parameters) is followed. What an operation allocates and frees inside of itself, and what the allocator adds by
rounding, is not seen. The record is a list of changes, so that parts of it can be repeated (`lockstep.plan.record`).
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lockstep.costs.hardware import Cost
from lockstep.plan.record import KINDS, Change, Mark, Record
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.torch_compat.fake_tensors import FakeTensor
from lockstep.torch_compat.local_tensor import local_tensor
from lockstep.torch_compat.operators import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, UNSAFE_VIEW
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.torch_compat.storage_resize import resizes_watched

_KIND = {kind: index for index, kind in enumerate(KINDS)}

# What FSDP2's own operations work on says what a storage is for.
_FSDP_KINDS = {
    "all_gather_copy_in": "gathered",
    "split_with_sizes_copy": "gathered",
    "chunk_cat": "buckets",
}


def _attention(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Two products over all positions, as torch counts the GPU's kernels: a causal mask saves nothing here."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(_gradient: Tensor, *args: Any, **kwargs: Any) -> int:
    return _attention(*args, **kwargs) * 5 // 2  # five products, one of which computes the scores anew


_FORMULAS = {
    **flop_registry,  # which leaves out the CPU's fused attention
    CPU_ATTENTION: _attention,
    CPU_ATTENTION_BACKWARD: _attention_backward,
}
# Without traffic.
_FREE = {"empty", "empty_like", "empty_strided", "detach", "alias", UNSAFE_VIEW.__name__, "lift_fresh", "set_"}
_DEVICE = torch.ops.prim.device.default


class EqualPieces(TorchFunctionMode):
    """Cuts a tensor into many chunks by cutting off two: one stands for all of the same size.

    FSDP2 cuts each parameter into as many chunks as there are shards and keeps one. What chunks hold is not there on
    fake tensors, and making hundreds of them for each parameter took most of the time of a plan for many GPUs.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and (isinstance(args[0], nn.Parameter) or not torch.is_grad_enabled()):
            return _chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _chunks(whole: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    length = whole.shape[dim]
    size = -(-length // chunks)
    if not size:
        return torch.chunk(whole, chunks, dim)
    even, rest = divmod(length, size)
    last = [whole.narrow(dim, length - rest, rest)] if rest else []
    return (*([whole.narrow(dim, 0, size)] * even if even else []), *last)


class Tracker(TorchDispatchMode):
    """Follows every tensor that is made while it is active, on any device but meta.

    Attributes:
        record: the changes so far.
        live: bytes now, by kind.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record([])
        self.live = [0] * len(KINDS)
        self.peak = 0
        self._storages: dict[int, tuple[Any, list[int]]] = {}  # id → weak reference, [bytes, kind]

    @property
    def total(self) -> int:
        return sum(self.live)

    def restart(self) -> None:
        """Forget the record and the peak; what is live stays live."""
        self.record = Record([], tuple(self.live))
        self.peak = self.total

    def mark(self, label: str) -> None:
        self.record.items.append(Mark(label))

    def tag(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say what tensors are for; those that were made before the tracker was active begin to count."""
        for tensor in tensors:
            if tensor is not None:
                storage = local_tensor(tensor).untyped_storage()
                self._see(storage)
                self._retag(id(storage), _KIND[kind])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked thousands of times in a step, and slow to answer below
        if func.namespace == "prim":  # a question, not an operation
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._see(local_tensor(leaf).untyped_storage())
        self._count(func, args, kwargs or {}, out)
        if str(func).startswith("fsdp."):  # torch's operators of FSDP2
            name = func.overloadpacket.__name__
            written = args[1] if name == "all_gather_copy_in" else (kwargs or {}).get("out", ())
            self.tag([t for t in tree_leaves(written) if isinstance(t, Tensor)], _FSDP_KINDS.get(name, "activations"))
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        operator = func.overloadpacket
        formula = _FORMULAS.get(operator)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.record.items.append(Cost(full=flops) if first.dtype == torch.float32 else Cost(low=flops))
        elif not func.is_view and operator.__name__ not in _FREE:
            touched = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
            moved = sum(local_tensor(t).numel() * t.element_size() for t in touched.values())
            if moved:
                self.record.items.append(Cost(moved=moved))

    def _see(self, storage: Any) -> None:
        key = id(storage)
        if key not in self._storages:
            size = storage.nbytes()
            self._storages[key] = (weakref.ref(storage, partial(self._gone, key)), [size, 0])
            self._change(0, size)

    def _gone(self, key: int, _reference: Any) -> None:
        _, (size, kind) = self._storages.pop(key)
        self._change(kind, -size)

    def _retag(self, key: int, kind: int) -> None:
        entry = self._storages[key][1]
        if entry[1] != kind:
            # One moves out as the other moves in: no peak lies between.
            self._change(entry[1], -entry[0])
            self._change(kind, entry[0])
            entry[1] = kind

    def _change(self, kind: int, size: int) -> None:
        if size:
            self.live[kind] += size
            self.peak = max(self.peak, self.total)
            self.record.items.append(Change(kind, size))

    def __enter__(self) -> "Tracker":
        self._watching = resizes_watched(self._resized)
        self._watching.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _resized(self, storage: Any) -> None:
        found = self._storages.get(id(storage))
        if found is not None:
            before, found[1][0] = found[1][0], storage.nbytes()
            self._change(found[1][1], storage.nbytes() - before)
