"""Functions of torch that a training script calls, replaced so that an observer sees the calls.

Public torch: hooks for modules and optimizers alone. A script is observed unchanged, so the
functions themselves are replaced, in a process that only observes. Seen to work: torch 2.13.0. When
gone: importing this file raises ImportError, or `lockstep verify SCRIPT` says that it saw no step.

A function is replaced where it is looked up by everybody (`torch.nn.utils.clip_grad_norm_`). Other
modules may hold it by a name of their own: those that were imported before, the module that defines
it, and a notebook's cells. `patch_names`, called last, replaces it there, too.
"""

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed.fsdp as distributed_fsdp
import torch.distributed.tensor.parallel as tensor_parallel
import torch.nn.utils.clip_grad as clip
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import schedules, stage
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, dataloader

from lockstep.torch_compat.function_transforms import is_transforming

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)

Around = Callable[[Callable[[], Any], Any], Any]
"""Is given a call to make and its first argument; returns the call's result."""

Undo = Callable[[], None]
"""Puts back what a patch has replaced."""


def _has_no_values() -> bool:
    """Return whether torch compiles or transforms what runs: its tensors have no values then."""
    return torch.compiler.is_compiling() or is_transforming()


def patch_backward(around: Around) -> Undo:
    """Replace the function with which every backward pass starts.

    `tensor.backward()` calls it, too.
    """
    return _replace(torch.autograd, "backward", around)


def patch_clipping(around: Around) -> Undo:
    """Replace the functions that clip gradients, by norm and by value, and FSDP1's method.

    Among them is `clip_grads_with_norm_`, for a norm that the script has computed by itself.
    """
    once = _outermost(around)
    names = ("clip_grad_norm_", "clip_grad_value_")
    undo = [_replace(clip, name, once) for name in names]
    undo.append(
        _replace(
            FullyShardedDataParallel,
            "clip_grad_norm_",
            lambda call, model: once(call, list(model.parameters())),
        )
    )
    undo += [_set(torch.nn.utils, name, getattr(clip, name)) for name in names]
    undo.append(_replace(torch.nn.utils, "clip_grads_with_norm_", once))
    return _all_of(undo)


class _Nesting:
    """Tells a call that a script makes from one that is made within it."""

    def __init__(self) -> None:
        self._depth = 0

    def is_within(self) -> bool:
        """Return whether a call runs."""
        return self._depth > 0

    def entered(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call, within which others are."""

        def inner() -> Any:
            self._depth += 1
            try:
                return call()
            finally:
                self._depth -= 1

        return inner


def _outermost(around: Around) -> Around:
    """Return what leaves calls within another call alone."""
    nesting = _Nesting()

    def observed(call: Callable[[], Any], first: Any) -> Any:
        return call() if nesting.is_within() else around(nesting.entered(call), first)

    return observed


def _all_of(several: list[Undo]) -> Undo:
    def undo() -> None:
        for one in several:
            one()

    return undo


_replaced: dict[int, tuple[Any, Any]] = {}
"""By the id of a function of a module: the function, and what stands in its place."""


def _set(owner: Any, name: str, value: Any) -> Undo:
    original = getattr(owner, name)
    setattr(owner, name, value)
    if isinstance(owner, ModuleType):
        _replaced[id(original)] = (original, value)

    def undo() -> None:
        setattr(owner, name, original)
        _replaced.pop(id(original), None)

    return undo


def patch_names() -> Undo:
    """Replace the functions that are replaced by now under all names that modules have for them."""
    undo = []
    for module in list(sys.modules.values()):
        # Objects that stand for modules may run anything when they are asked.
        name_of_module = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or name_of_module.startswith("lockstep."):
            continue
        for name, value in list(vars(module).items()):
            original, replacement = _replaced.get(id(value), (None, None))
            if original is not None and original is value:
                undo.append(_rename(module, name, original, replacement))
    return _all_of(undo)


def _rename(module: ModuleType, name: str, original: Any, replacement: Any) -> Undo:
    setattr(module, name, replacement)
    return lambda: setattr(module, name, original)


def _replace(module: Any, name: str, around: Around) -> Undo:
    original = getattr(module, name)
    parameter = next(iter(inspect.signature(original).parameters))

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.pop(parameter)
        if isinstance(first, Iterator):
            first = list(first)  # it is read twice
        return around(lambda: original(first, *args[1:], **kwargs), first)

    return _set(module, name, observed)


def patch_loaders(arguments: Callable[[dict[str, Any]], None], made: Callable[[Any], None]) -> None:
    """Let `arguments` change those of the constructor of loaders, by name.

    `made` sees each loader.
    """
    original = DataLoader.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        arguments(given)
        original(self, **given)
        made(self)

    setattr(DataLoader, "__init__", observed)  # noqa: B010 — mypy forbids to assign a method


def patch_collectives(called: Callable[[str, Any], None]) -> None:
    """Report each collective that a script calls itself: its name, and what it is given first.

    What such a collective calls in its turn, as `all_gather_object` calls `all_gather`, is not
    reported.
    """
    depth = [0]

    def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that is reported."""

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not depth[0]:
                called(original.__name__, (args, kwargs))
            depth[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return observed

    for name in COLLECTIVES:
        _set(torch.distributed, name, reporting(getattr(torch.distributed, name)))


def patch_model_parallel(together: Callable[[list[int]], None], around: Around) -> None:
    """Report the ranks that compute the same samples with this one.

    The step of pipeline schedules is replaced.
    """
    parallelize = tensor_parallel.parallelize_module

    @wraps(parallelize)
    def observed(module: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device_mesh is not None and device_mesh.size() > 1:
            together(torch.distributed.get_process_group_ranks(device_mesh.get_group()))
        return parallelize(module, device_mesh, *args, **kwargs)

    _set(tensor_parallel, "parallelize_module", observed)
    made = stage._PipelineStageBase.__init__

    @wraps(made)
    def observed_stage(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        group = self.group if self.group is not None else torch.distributed.group.WORLD
        together(torch.distributed.get_process_group_ranks(group))

    setattr(stage._PipelineStageBase, "__init__", observed_stage)  # noqa: B010
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        _replace(schedule, "step", around)


def patch_sharding(sharded: Callable[[str], bool]) -> None:
    """Report each use of `fully_shard` and of FSDP1, with the dtype in which layers compute then.

    It is empty where FSDP leaves it as it is. `sharded` returns whether FSDP may change it.
    """
    original = distributed_fsdp.fully_shard
    made = FullyShardedDataParallel.__init__

    def told(given: dict[str, Any], key: str) -> dict[str, Any]:
        dtype = getattr(given.get(key), "param_dtype", None)
        keeps = sharded("" if dtype is None else str(dtype))
        return given if keeps else {name: value for name, value in given.items() if name != key}

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **told(kwargs, "mp_policy"))

    @wraps(made)
    def observed_wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **told(kwargs, "mixed_precision"))

    _set(distributed_fsdp, "fully_shard", observed)
    setattr(FullyShardedDataParallel, "__init__", observed_wrapper)  # noqa: B010


def loss_of_schedule(schedule: Any) -> Any:
    """Return the function with which a pipeline's schedule computes the loss."""
    return getattr(schedule, "_loss_fn", None)


def patch_made(made: Callable[[Any], None]) -> Undo:
    """Report each wrapper, optimizer and learning rate schedule that is made."""
    kinds = (DistributedDataParallel, torch.optim.Optimizer, LRScheduler)
    return _all_of([_after(kind, "__init__", lambda self, _result: made(self)) for kind in kinds])


def patch_hooks(registered: Callable[[str, bool], bool]) -> None:
    """Ask `registered` of each hook that replaces how DistributedDataParallel reduces gradients.

    It is given the hook's name, and whether torch itself offers it. It returns whether the hook is
    registered.
    """
    original = DistributedDataParallel.register_comm_hook
    built_in = DistributedDataParallel._register_builtin_comm_hook

    @wraps(original)
    def observed(self: Any, state: Any, hook: Any) -> None:
        name = getattr(hook, "__name__", type(hook).__name__)
        of_torch = str(getattr(hook, "__module__", "")).startswith("torch.")
        if registered(name, of_torch):
            original(self, state, hook)

    @wraps(built_in)
    def observed_kind(self: Any, kind: Any) -> None:
        if registered(str(kind).rpartition(".")[2], True):
            built_in(self, kind)  # type: ignore[no-untyped-call]

    setattr(DistributedDataParallel, "register_comm_hook", observed)  # noqa: B010
    setattr(DistributedDataParallel, "_register_builtin_comm_hook", observed_kind)  # noqa: B010


def patch_samplers(begun: Callable[[Any], None]) -> Undo:
    """Report each pass over a distributed sampler."""
    return _after(DistributedSampler, "__iter__", lambda self, _result: begun(self))


def patch_modes(left: Callable[[Any], None]) -> Undo:
    """Report each module that is put into evaluation mode, and not those inside of it."""
    original = torch.nn.Module.train
    depth = [0]

    @wraps(original)
    def observed(self: Any, mode: bool = True) -> Any:
        if not mode and not depth[0]:
            left(self)
        depth[0] += 1
        try:
            return original(self, mode)
        finally:
            depth[0] -= 1

    return _set(torch.nn.Module, "train", observed)


def patch_modules(made: Callable[[Any], None]) -> Undo:
    """Report each module whose constructor begins."""
    return _after(torch.nn.Module, "__init__", lambda self, _result: made(self))


def patch_schedules(stepped: Callable[[Any], None]) -> Undo:
    """Report each step of a learning rate schedule."""
    return _after(LRScheduler, "step", lambda self, _result: stepped(self))


def patch_plateaus(stepped: Callable[[float], None]) -> None:
    """Report each number that a schedule is given which looks for a plateau, as of a loss."""
    original = ReduceLROnPlateau.step

    @wraps(original)
    def observed(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        stepped(float(metrics))
        original(self, metrics, *args, **kwargs)

    _set(ReduceLROnPlateau, "step", observed)


def patch_seeds(seeded: Callable[[Any], None]) -> Undo:
    """Report each seed that is given to the generators of torch, NumPy and Python."""

    def seeding(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            seeded((*args, *kwargs.values()))
            return original(*args, **kwargs)

        return observed

    places = ((torch, "manual_seed"), (np.random, "seed"), (random, "seed"))
    return _all_of([_set(owner, name, seeding(getattr(owner, name))) for owner, name in places])


def patch_products(multiplied: Callable[[Tensor, Tensor], None]) -> Undo:
    """Report each product of two tensors with other numbers of dims, before it is computed."""

    def multiplying(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 2:
                mine, other = args
                are_tensors = isinstance(mine, Tensor) and isinstance(other, Tensor)
                if are_tensors and mine.ndim != other.ndim:
                    multiplied(mine, other)
            return original(*args, **kwargs)

        return observed

    names = ("__mul__", "__rmul__", "mul", "multiply")
    places = [*((Tensor, name) for name in names), (torch, "mul"), (torch, "multiply")]
    return _all_of([_set(owner, name, multiplying(getattr(owner, name))) for owner, name in places])


def patch_scalers(scaled: Callable[[Any], None], unscaled: Callable[[], None]) -> Undo:
    """Report each loss that a scaler scales, with the scaler, and gradients that it unscales."""
    undo = []
    for kind in (GradScaler, ShardedGradScaler):
        undo.append(_after(kind, "scale", lambda self, _result: scaled(self)))
        undo.append(_after(kind, "unscale_", lambda _self, _result: unscaled()))
    return _all_of(undo)


def patch_synchronisation(told: Callable[[bool], None]) -> Undo:
    """Report whether FSDP2 is told to reduce gradients."""
    original = FSDPModule.set_requires_gradient_sync

    @wraps(original)
    def observed(self: Any, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
        told(bool(requires_gradient_sync))
        original(self, requires_gradient_sync, *args, **kwargs)

    return _set(FSDPModule, "set_requires_gradient_sync", observed)


def patch_reading(read: Callable[[], None]) -> Undo:
    """Report each batch that a loader gives."""
    return _after(dataloader._BaseDataLoaderIter, "__next__", lambda _self, _result: read())


def patch_orders(begun: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> None:
    """Let `begun` replace the positions of each pass that a loader begins over data with positions.

    It is given the loader and its iterator, and returns the one that is read.
    """
    original = dataloader._BaseDataLoaderIter.__init__

    @wraps(original)
    def observed(self: Any, loader: Any) -> None:
        original(self, loader)
        if self._dataset_kind == dataloader._DatasetKind.Map:
            self._sampler_iter = begun(loader, self._sampler_iter)

    setattr(dataloader._BaseDataLoaderIter, "__init__", observed)  # noqa: B010


def patch_saving(saved: Callable[[Any], None]) -> Undo:
    """Report where `torch.save` is about to write."""
    original = torch.save

    @wraps(original)
    def observed(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        saved(f)
        original(obj, f, *args, **kwargs)

    return _set(torch, "save", observed)


def patch_loading(loaded: Callable[[Any, list[str], list[str]], None]) -> Undo:
    """Report what `load_state_dict` of a module could not place."""

    def report(self: Any, result: Any) -> None:
        if result is not None:
            loaded(self, list(result.missing_keys), list(result.unexpected_keys))

    return _after(torch.nn.Module, "load_state_dict", report)


def _after(kind: type, name: str, call: Callable[[Any, Any], None]) -> Undo:
    original = getattr(kind, name)

    @wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call(self, result)
        return result

    return _set(kind, name, observed)


# ---- random numbers ----

Drawn = Callable[[str, Callable[[], Any]], Any]
"""Is given the name of a draw, and a call that makes it; returns the numbers for the script."""

_OF_TORCH = (
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
)
_OF_TENSORS = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)
_OF_NUMPY = (
    "beta",
    "binomial",
    "choice",
    "dirichlet",
    "exponential",
    "gamma",
    "integers",
    "laplace",
    "lognormal",
    "multinomial",
    "normal",
    "permutation",
    "poisson",
    "rand",
    "randint",
    "randn",
    "random",
    "random_sample",
    "standard_normal",
    "triangular",
    "uniform",
)
_OF_PYTHON = (
    "betavariate",
    "expovariate",
    "gauss",
    "normalvariate",
    "randint",
    "random",
    "randrange",
    "triangular",
    "uniform",
)
_OF_POPULATIONS = ("choice", "choices", "sample")
PERMUTATIONS = (
    "torch.randperm",
    "numpy.random.permutation",
    "numpy.random.shuffle",
    "random.shuffle",
)


def patch_draws(drawn: Drawn) -> None:
    """Let `drawn` make each draw of random numbers: of torch, NumPy and Python, by name.

    It makes those of generators of the script's own, too.
    """
    once = _not_within_draws(drawn)
    places: tuple[tuple[Any, int], ...] = ((random, 0), (random.Random, 1))
    for chooser, generators in places:
        for name in _OF_POPULATIONS:
            chosen = _choosing(getattr(chooser, name), f"random.{name}", generators, once)
            _set(chooser, name, chosen)
    for owner, prefix, names in (
        (torch, "torch", _OF_TORCH),
        (torch.Tensor, "Tensor", _OF_TENSORS),
        (np.random, "numpy.random", _OF_NUMPY),
        (random, "random", _OF_PYTHON),
        (random.Random, "random", _OF_PYTHON),
    ):
        for name in names:
            if hasattr(owner, name):
                _set(owner, name, _drawing(getattr(owner, name), f"{prefix}.{name}", once))
    for owner, name in (
        (np.random, "numpy.random.shuffle"),
        (random, "random.shuffle"),
        (random.Random, "random.shuffle"),
    ):
        _set(owner, "shuffle", _shuffling(owner.shuffle, name, once))
    bit_generator_of = np.random.default_rng
    generator = _observed_class(np.random.Generator, once)
    _set(np.random, "Generator", generator)
    _set(np.random, "RandomState", _observed_class(np.random.RandomState, once))
    _set(
        np.random,
        "default_rng",
        lambda seed=None: generator(bit_generator_of(seed).bit_generator),
    )


def _not_within_draws(drawn: Drawn) -> Drawn:
    """Return what leaves a draw within another alone, as `random.randint` calls `randrange`."""
    nesting = _Nesting()

    def observed(name: str, call: Callable[[], Any]) -> Any:
        return call() if nesting.is_within() else drawn(name, nesting.entered(call))

    return observed


class _InstancesOfBase(type):
    """Takes the instances of a class's base for its own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _observed_class(original: type, drawn: Drawn) -> Any:
    """Return a class of NumPy's generators whose draws are made by `drawn`."""
    methods: dict[str, Any] = {
        name: _drawing(getattr(original, name), f"numpy.random.{name}", drawn)
        for name in _OF_NUMPY
        if hasattr(original, name)
    }
    methods["shuffle"] = _shuffling(getattr(original, "shuffle"), "numpy.random.shuffle", drawn)  # noqa: B009
    return _InstancesOfBase(original.__name__, (original,), methods)


def _drawing(original: Callable[..., Any], name: str, drawn: Drawn) -> Callable[..., Any]:
    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if _has_no_values():
            return original(*args, **kwargs)
        return drawn(name, lambda: original(*args, **kwargs))

    return observed


def _choosing(
    original: Callable[..., Any], name: str, generators: int, drawn: Drawn
) -> Callable[..., Any]:
    """Return a function or method that chooses objects by positions, so that these are drawn.

    Numbers are drawn themselves. `generators`: number of arguments before the population.
    """

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        """Choose as the function does, with what is drawn in place of its own draw."""
        if _has_no_values():
            return original(*args, **kwargs)
        before = args[:generators]
        rest = args[generators + 1 :]
        objects = args[generators] if len(args) > generators else ()
        has_counts = kwargs.get("counts") is not None
        are_objects = isinstance(objects, Sequence) and not isinstance(objects, str | bytes | range)
        if not are_objects or has_counts or all(isinstance(x, int | float) for x in objects):
            return drawn(name, lambda: original(*args, **kwargs))
        positions = range(len(objects))
        chosen = drawn(name, lambda: original(*before, positions, *rest, **kwargs))
        if isinstance(chosen, list):
            return [objects[at] for at in chosen if at < len(objects)]
        return objects[chosen]

    return observed


def patch_reads(indexed: Callable[[Any, Any], Any], made: Callable[[str, Any], Any]) -> None:
    """Let `indexed` replace the index of tensors and memory maps, and `made` new tensors.

    These are made of numbers of Python or NumPy. What is indexed by a tensor is left alone.
    """

    def reading(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @wraps(original)
        def observed(self: Any, index: Any) -> Any:
            if isinstance(index, Tensor) or _has_no_values():
                return original(self, index)
            return original(self, indexed(self, index))

        return observed

    def making(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            of_tensor = bool(args) and isinstance(args[0], Tensor)
            return value if of_tensor or _has_no_values() else made(name, value)

        return observed

    kinds: tuple[type, ...] = (Tensor, np.memmap)
    for owner in kinds:
        _set(owner, "__getitem__", reading(getattr(owner, "__getitem__")))  # noqa: B009
    for name in ("as_tensor", "from_numpy", "tensor"):
        _set(torch, name, making(getattr(torch, name), f"torch.{name}"))


def _shuffling(original: Callable[..., Any], name: str, drawn: Drawn) -> Callable[..., Any]:
    """Return a function or method that shuffles by positions, so that these are what is drawn."""

    def positions(generator: tuple[Any, ...], count: int) -> list[int]:
        order = list(range(count))
        original(*generator, order)
        return order

    def observed(*args: Any, **kwargs: Any) -> Any:
        *generator, values = args or (None,)
        has_axis = len(generator) > 1 or bool(kwargs)
        if has_axis or not isinstance(values, list | np.ndarray):
            return original(*args, **kwargs)
        order = drawn(name, lambda: positions(tuple(generator), len(values)))
        values[:] = values[order] if isinstance(values, np.ndarray) else [values[i] for i in order]
        return None

    return observed
