"""A simulated accelerator, `sim`: torch's PrivateUse1 device, in memory of the host, that works
late on purpose.

    from tests.simulated_device import device; device.install()     # once, in a process of its own

As on a GPU, an operation on the device only queues work in the current stream, and returns. A
stream runs in its order, and only when somebody waits for it: the host (`synchronize`, `.item()`, a
copy to pageable memory), or another stream (`wait_event`, `wait_stream`). That is the latest moment
that a GPU may take, so that a wait which is missing shows in the values at every run, not now and
then. In a process group a thread runs what is older than `LATE` seconds, since ranks wait for one
another.

- **Races.** Each operation knows which others are certain to be before it (vector clocks, as in
  `torch.cuda._sanitizer`). Two that touch the same memory in no certain order, one of them to
  write, are in `races`, whatever the values are.
- **Host waits** are in `waits`, with the line of Lockstep that waits.
- **Memory** comes from a caching allocator: what is freed is given out again on its stream at once,
  while other streams may still read it (`record_stream` keeps it), and what is new holds NaN.
- **Pinned memory** of the host is copied from and to in the stream's order, late. Pageable memory
  is read at once, and a copy into it waits, as CUDA's does.
- **Collectives** (backend `simccl`, over gloo) run on a stream of their group, after what the
  current stream holds; `Work.wait` makes the current stream wait, not the host. Calls that differ
  between ranks, which hang under NCCL, raise.

The values are those of the CPU's kernels. Not simulated: kernels of a GPU and their rounding, C++
that takes CUDA's streams by name (DDP waits for a bucket as its future is asked for, so that
nothing overlaps there), a send that blocks until it is received, `torch.compile`, several devices
in a process.
"""

import ast
import functools
import itertools
import linecache
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
LATE = 0.05  # seconds; only in a process group
aten = torch.ops.aten


class Wait(NamedTuple):
    """A wait of the host for the device."""

    kind: str
    where: str  # of the innermost frame in Lockstep, or else outside of this file: path:line
    text: str  # the statement there, with the comments right above it


Clock = dict[int, int]  # stream → the number of its operations that are certain to be before

waits: list[Wait] = []
races: list[str] = []
errors: list[Exception] = []  # of work that was queued; the host is told when it waits, as by a GPU
_running = threading.RLock()
_host = threading.local()


def _host_clock() -> Clock:
    if not hasattr(_host, "clock"):
        _host.clock = {}
    clock: Clock = _host.clock
    return clock


def _merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(count, into.get(stream, 0))


@functools.cache
def _statement(path: str, line: int) -> str:
    """Return the innermost statement around a line, with the comments right above it."""
    lines = linecache.getlines(path)
    around = [
        node
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return linecache.getline(path, line).strip()
    innermost = max(around, key=lambda node: node.lineno)
    first = innermost.lineno
    while lines[first - 2].strip().startswith("#"):
        first -= 1
    # Of a compound statement, such as an `if`, the lines up to the one that waits.
    last = line if hasattr(innermost, "body") else innermost.end_lineno
    return "".join(lines[first - 1 : last]).strip()


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def _caller() -> tuple[str, str]:
    frame: Any = sys._getframe(1)
    outside = None
    while frame is not None:
        path = frame.f_code.co_filename
        line = frame.f_lineno
        mode = frame.f_code.co_name == "__torch_dispatch__"  # it passes on what another has called
        if "/lockstep/" in path and "site-packages" not in path and not mode:
            return f"{path.rpartition('/lockstep/')[2]}:{line}", _statement(path, line)
        if outside is None and path != __file__ and "/torch/" not in path:
            outside = f"{path.rpartition('/')[2]}:{line}", linecache.getline(path, line).strip()
        frame = frame.f_back
    return outside or ("?", "")


def _host_waits(kind: str, stream: "Stream", count: int | None = None) -> None:
    waits.append(Wait(kind, *_caller()))
    stream.run(stream.queued if count is None else count)
    if errors:
        raise errors[0]
    if count is None:
        _merge(_host_clock(), stream.clock)


# ---- streams and events ----


class Stream:
    """A queue of work, which runs in order, when it must."""

    numbers = itertools.count()
    every: "list[Stream]" = []

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = next(self.numbers)
        self.queued = 0
        self.done = 0
        self.work: deque[tuple[float, Callable[[], object]]] = deque()
        self.clock: Clock = {}
        self.every.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def queue(self, work: Callable[[], object]) -> int:
        """Append work; return its number, from 1."""
        _merge(self.clock, _host_clock())
        self.queued += 1
        self.clock[self.number] = self.queued
        self.work.append((time.monotonic(), work))
        return self.queued

    def run(self, until: int) -> None:
        """Do the work up to this number."""
        if self.done >= until:
            return
        with _running, torch.no_grad(), _disable_current_modes():
            while self.done < until:
                _, work = self.work.popleft()
                try:
                    work()
                except Exception as error:
                    errors.append(error)
                self.done += 1

    def wait_event(self, event: "Event") -> None:
        if event.stream is None:
            return  # as in CUDA: an event that was never recorded is complete
        before = event.stream
        until = event.count
        _merge(self.clock, event.clock)
        self.queue(lambda: before.run(until))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _host_waits("stream", self)

    def query(self) -> bool:
        """Return whether all work is done; the host knows then, and what it queues comes later."""
        passed = self.done == self.queued
        if passed:
            _merge(_host_clock(), self.clock)
        return passed


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.stream: Stream | None = None
        self.count = 0
        self.clock: Clock = {}
        self._time = [0.0]

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        passed = self._time = [0.0]

        def note() -> None:
            passed[0] = time.perf_counter()

        self.count = self.stream.queue(note)
        self.clock = dict(self.stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether it has passed; the host knows then, and what it queues comes later."""
        passed = self.stream is None or self.stream.done >= self.count
        if passed:
            _merge(_host_clock(), self.clock)
        return passed

    def synchronize(self) -> None:
        if self.stream is not None:
            _host_waits("event", self.stream, self.count)
            _merge(_host_clock(), self.clock)

    def elapsed_time(self, end: "Event") -> float:
        return (end._time[0] - self._time[0]) * 1000


_default = Stream()
_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Return this thread's stream."""
    stream: Stream = getattr(_current, "stream", _default)
    return stream


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Queue work in `chosen` in the block."""
    before = current_stream()
    _current.stream = chosen or current_stream()
    try:
        yield
    finally:
        _current.stream = before


def synchronize(device: Any = None) -> None:
    """Make the host wait for all streams."""
    waits.append(Wait("device", *_caller()))
    for each in list(Stream.every):
        each.run(each.queued)
        _merge(_host_clock(), each.clock)


def forget() -> None:
    """Begin a count: forget the waits, races and errors so far."""
    for each in waits, races, errors:
        each.clear()


# ---- memory ----


class Block:
    """Memory of the device, from its allocation to the last tensor that uses it."""

    free: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)

    def __init__(self, bytes_: int) -> None:
        self.stream = current_stream()
        self.recorded = False
        self.size = bytes_
        again = self.free[self.stream.number, bytes_]
        if again:
            self.storage, self.written, self.read = again.pop()
        else:
            # NaN in all floats
            self.storage = torch.empty(bytes_, dtype=torch.uint8).fill_(0xFF).untyped_storage()
            self.written = None
            self.read = {}

    def __del__(self) -> None:
        if not self.recorded:
            self.free[self.stream.number, self.storage.nbytes()].append(
                (self.storage, self.written, self.read)
            )

    def touch(self, stream: Stream, number: int, clock: Clock, writes: bool, what: str) -> None:
        """Note that an operation reads or writes, after comparing it with those before."""
        others = [("written", self.written)] if self.written is not None else []
        if writes:
            others += [("read", at) for at in self.read.items()]
        for how, (other, count) in others:
            if other != stream.number and clock.get(other, 0) < count:
                races.append(
                    f"{what} on stream {stream.number} {'writes' if writes else 'reads'} memory of"
                    f" {self.storage.nbytes()} bytes that is {how} on stream {other}, in no certain"
                    f" order; {_caller()}"
                )
        if writes:
            self.written = (stream.number, number)
            self.read = {}
        else:
            self.read[stream.number] = number


class Storage:
    """What Python may ask of a tensor's storage. FSDP2 frees and allocates parameters by resizing
    it.
    """

    def __init__(self, tensor: "SimTensor") -> None:
        self._tensor = tensor
        self._block = tensor.block
        self.device = tensor.device

    def size(self) -> int:
        return self._block.size

    nbytes = size

    def data_ptr(self) -> int:
        return self._block.storage.data_ptr()

    def resize_(self, size: int) -> "Storage":
        """Free the memory, or allocate it again; NaN is in it then, in the order of the current
        stream.
        """
        storage = self._block.storage
        if size != self._block.size:
            _queue(lambda: storage.fill_(0xFF), [], [self._tensor], "resize_")
        self._block.size = size
        return self


class SimTensor(Tensor):
    """A tensor on the device; `raw` is a view of its block, which only queued work may touch."""

    raw: Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, block: Block) -> "SimTensor":
        made: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        made.block = block
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a sim tensor to numpy; use Tensor.cpu()")

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    def record_stream(self, stream: Stream) -> None:
        self.block.recorded = True

    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, value: "SimTensor") -> None:
        torch.Tensor.data.__set__(self, value)
        self.raw = value.raw
        self.block = value.block

    data = property(_get_data, _set_data)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return Storage(self)


def _new(like: Tensor) -> SimTensor:
    """Return memory for a tensor like one on meta."""
    block = Block(like.untyped_storage().nbytes())
    return SimTensor(
        torch.empty(0, dtype=like.dtype).set_(block.storage, 0, like.shape, like.stride()), block
    )


_pinned: set[int] = set()


def pinned(like: Tensor) -> Tensor:
    """Return page-locked memory of the same shape, which holds NaN, or −1."""
    made = torch.empty(like.shape, dtype=like.dtype)
    storage = made.untyped_storage().fill_(0xFF)
    _pinned.add(storage.data_ptr())
    weakref.finalize(made, _pinned.discard, storage.data_ptr())
    return made


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a tensor of the host is in page-locked memory."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _pinned


# ---- operations ----


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Queue one operation of torch, and return its result, which is there later."""
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.copy_.default:
        return _copy(
            args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        )
    if func is aten._pin_memory.default or func is aten.is_pinned.default:
        return False
    if func is aten._fused_sdp_choice.default:
        return 0  # the composite expression
    operation = func
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return _view(func, args, kwargs)
    bound = [*zip(schema.arguments, args, strict=False)]
    bound += [(a, kwargs[a.name]) for a in schema.arguments[len(args) :] if a.name in kwargs]
    written = [
        t
        for a, v in bound
        if a.alias_info is not None and a.alias_info.is_write
        for t in _tensors(v)
    ]
    read = [t for a, v in bound for t in _tensors(v) if not any(t is w for w in written)]
    if torch.Tag.nondeterministic_seeded in func.tags:
        func, args, kwargs = _drawing(func, args, kwargs, schema)
    raw_args = [_raw(each) for each in args]
    raw_kwargs = {key: _raw(each) for key, each in kwargs.items()}
    name = str(schema.name)
    if written:
        _queue(lambda: func(*raw_args, **raw_kwargs), read, written, name)
        return _returned(schema, bound)
    made = _outputs(func, operation, args, kwargs)
    if made is None:  # its shape, or its result, are known to the device alone
        _touch(current_stream(), current_stream().queued, read, [], name)
        _host_waits(name, current_stream())
        return _pytree.tree_map_only(Tensor, _upload, func(*raw_args, **raw_kwargs))
    several = isinstance(made, list | tuple)
    raws = [
        each.raw if isinstance(each, SimTensor) else None for each in (made if several else [made])
    ]

    def work() -> None:
        results = func(*raw_args, **raw_kwargs)
        for target, result in zip(raws, results if several else [results], strict=True):
            if target is not None:
                target.copy_(result)

    _queue(work, read, _tensors(made), name)
    return made


def _tensors(value: Any) -> list[SimTensor]:
    if isinstance(value, SimTensor):
        return [value]
    return [t for t in value if isinstance(t, SimTensor)] if isinstance(value, list | tuple) else []


def _raw(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value.raw
    if isinstance(value, list | tuple):
        return [_raw(each) for each in value]
    if isinstance(value, Tensor):
        assert value.ndim == 0, f"a tensor of {value.device} among tensors of {NAME}"
        return value.clone()  # read as the work is queued, as an argument of a kernel is
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _queue(
    work: Callable[[], object], read: Sequence[SimTensor], written: Sequence[SimTensor], name: str
) -> None:
    on = current_stream()
    number = on.queue(work)
    _touch(on, number, read, written, name)


def _touch(
    on: Stream, number: int, read: Sequence[SimTensor], written: Sequence[SimTensor], name: str
) -> None:
    for each in read:
        each.block.touch(on, number, on.clock, False, name)
    for each in written:
        each.block.touch(on, number, on.clock, True, name)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    block = next(
        each.block for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, SimTensor)
    )
    made = func(*map(_raw, args), **{key: _raw(each) for key, each in kwargs.items()})
    return (
        SimTensor(made, block)
        if isinstance(made, Tensor)
        else [SimTensor(each, block) for each in made]
    )


def _returned(schema: Any, bound: Sequence[tuple[Any, Any]]) -> Any:
    """Return the arguments that an operation in place returns."""
    found = []
    for result in schema.returns:
        names = result.alias_info.before_set if result.alias_info is not None else set()
        found += [
            v
            for a, v in bound
            if a.alias_info is not None and names and a.alias_info.before_set == names
        ]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _outputs(func: Any, name: Any, args: Any, kwargs: Any) -> Any:
    """Return empty results of an operation; None if the device has to tell their shape."""

    key = (name, _described(args), _described(tuple(kwargs.items())))
    if key not in _shapes:
        try:
            like = func(*_pytree.tree_map(_meta, args), **_pytree.tree_map(_meta, kwargs))
        except (NotImplementedError, RuntimeError):
            like = None
        if not any(isinstance(each, Tensor) for each in _pytree.tree_leaves(like)):
            like = None  # a number: `.item()`, `equal`
        _shapes[key] = like
    like = _shapes[key]
    if isinstance(like, list | tuple):
        return type(like)([_new(t) if isinstance(t, Tensor) else t for t in like])
    return None if like is None else _new(like)


_shapes: dict[Any, Any] = {}  # operation and shapes → tensors on meta, like its results


def _meta(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(_described(each) for each in value)
    return type(value), value


def _drawing(func: Any, args: Any, kwargs: Any, schema: Any) -> tuple[Any, Any, Any]:
    """Advance the generator now, as a launch does, and draw the same numbers when the
    work is done.
    """
    kwargs = dict(kwargs)
    generator = kwargs.pop("generator", None) or default_generators[0]
    at = generator.get_state()
    takes = any(argument.name == "generator" for argument in schema.arguments)
    assert takes or func is aten.native_dropout.default, func
    like = _pytree.tree_map_only(SimTensor, lambda t: torch.ones_like(t.raw), (args, kwargs))
    own = torch.Generator()

    def draw(generator: torch.Generator, args: Any, kwargs: Any) -> Any:
        return (
            func(*args, **kwargs, generator=generator)
            if takes
            else _dropout(*args, **kwargs, generator=generator)
        )

    draw(generator, *like)

    def later(*args: Any, **kwargs: Any) -> Any:
        if any(
            isinstance(each, Tensor) and each.is_meta
            for each in _pytree.tree_leaves((args, kwargs))
        ):
            return func(*args, **kwargs)
        own.set_state(at)
        return draw(own, args, kwargs)

    return later, args, kwargs


def _dropout(
    input: Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`native_dropout`, which takes no generator, and other threads may use the default one
    meanwhile.
    """
    kept = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return input * kept * (1 / (1 - p)), kept


def _upload(host: Tensor) -> SimTensor:
    made = _new(host.to("meta"))
    made.raw.copy_(host)
    return made


def _to_copy(
    source: Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    to_host = device is not None and torch.device(device).type == "cpu"
    like = torch.empty_strided(
        source.shape, source.stride(), dtype=dtype or source.dtype, device="meta"
    )
    like = torch.empty_like(like, memory_format=memory_format or torch.preserve_format)
    if not to_host:
        made = _new(like)
    else:  # torch gives memory that is pinned where the copy need not wait
        made = (
            pinned(like)
            if non_blocking
            else torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        )
    return _copy(made, source, non_blocking)


def _copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    on = current_stream()
    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        to = target.raw
        of = source.raw
        _queue(lambda: to.copy_(of), [source], [target], "copy_")
    elif isinstance(target, SimTensor):
        late = non_blocking and is_pinned(source)
        # CUDA copies pageable memory aside
        to = target.raw
        host = source if late else source.clone()
        _queue(lambda: to.copy_(host), [], [target], "copy to the device")
        if not non_blocking and source.numel():
            _host_waits("copy to the device", on)
    else:
        assert isinstance(source, SimTensor)
        of = source.raw
        host = target.detach()
        _queue(lambda: host.copy_(of), [source], [], "copy to the host")
        if not (non_blocking and is_pinned(target)):
            _host_waits("copy to the host", on)
    return target


# ---- what torch asks a device for ----

default_generators = [torch.Generator()]


class _Module:
    """`torch.sim`."""

    Stream = Stream
    Event = Event
    stream = staticmethod(stream)
    current_stream = staticmethod(current_stream)
    synchronize = staticmethod(synchronize)
    default_generators = default_generators

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "simulated"

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def manual_seed_all(self, seed: int) -> None:
        default_generators[0].manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        default_generators[0].set_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False

    def default_stream(self, device: Any = None) -> Stream:
        return _default


_library: Any = None
_autocasting: list[Any] = []  # as long as these live, what they register does


def install() -> None:
    """Make `sim` torch's accelerator, for the rest of the process."""
    global _library
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        return _new(
            torch.empty(
                size,
                dtype=dtype,
                device="meta",
                memory_format=memory_format or torch.contiguous_format,
            )
        )

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return _new(torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(target, source, non_blocking)

    _library.impl("empty.memory_format", empty, "PrivateUse1")
    _library.impl("empty_strided", empty_strided, "PrivateUse1")
    _library.impl("_copy_from", copy_from, "PrivateUse1")
    for name in (
        "arange",
        "arange.start",
        "arange.start_step",
        "randperm",
        "randperm.generator",
        "linspace",
    ):
        packet, _, overload = name.partition(".")
        _library.impl(
            name, _made_here(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1"
        )
    _autocast()
    _pin_in_python()


def _made_here(operation: Any) -> Callable[..., Tensor]:
    """Return a kernel for what has no input: torch's own would resize a tensor."""

    def make(*args: Any, device: Any = None, generator: Any = None, **options: Any) -> Tensor:
        draws = (
            {"generator": generator or default_generators[0]}
            if operation is aten.randperm.generator
            else {}
        )
        host = operation(*args, **draws, **options)
        made = _new(host.to("meta"))
        _queue(lambda: made.raw.copy_(host), [], [made], str(operation))
        return made

    return make


_IN_LOW_PRECISION = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "conv2d",
    "scaled_dot_product_attention",
)
_IN_FLOAT32 = (
    "layer_norm",
    "native_layer_norm",
    "softmax.int",
    "log_softmax.int",
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss_nd",
    "pow.Tensor_Scalar",
    "rsqrt",
    "exp",
    "log",
    "sum",
    "sum.dim_IntList",
)


def _autocast() -> None:
    """Register a part of autocast's lists, which a backend brings itself."""
    global _autocasting
    _autocasting = [torch.library.Library("_", "IMPL")]
    _autocasting[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    for name in (*_IN_LOW_PRECISION, *_IN_FLOAT32):
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(aten, packet), overload or "default")

        def cast(
            *args: Any,
            operation: Any = operation,
            low: bool = name in _IN_LOW_PRECISION,
            **kwargs: Any,
        ) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(off):
                dtype = torch.get_autocast_dtype(NAME) if low else torch.float32

                def to(value: Tensor) -> Tensor:
                    known = value.is_floating_point() and value.dtype is not torch.float64
                    return value.to(dtype) if known and value.device.type == NAME else value

                args, kwargs = _pytree.tree_map_only(Tensor, to, (args, kwargs))
                return operation(*args, **kwargs)

        _library.impl(name, cast, "AutocastPrivateUse1")


def _pin_in_python() -> None:
    """Answer what torch would ask a pinned allocator in C++, which a Python backend can't bring."""
    from torch.utils._device import _device_constructors

    # cached: `with torch.device("meta")` knows the function that is called below
    _device_constructors()
    plain = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made: Tensor = plain(*size, **options)
        return pinned(made) if pin_memory else made

    torch.empty = empty
    torch.Tensor.is_pinned = lambda self, device=None: is_pinned(self)
    torch.Tensor.pin_memory = lambda self, device=None: pinned(self).copy_(self)
