"""Changes one thing in a step, on both sides: if the difference disappears, that thing was its cause.

An experiment is a `Case` (see `lockstep.verify.subject`) that changes settings, or switches of the running trainer.
"""

import ast
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.accelerator import default_generator
from lockstep.config import Config
from lockstep.models.protocol import pipeline_segments_of
from lockstep.strategy import parse_topology
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.torch_compat.gradient_hooks import remove_hooks
from lockstep.torch_compat.module_hooks import remove_backward_hooks
from lockstep.torch_compat.optimizer_step import remove_step_hooks
from lockstep.verify.memory import ModelMemory
from lockstep.verify.subject import Case, Spec

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

# Experiments that change settings.
AGAIN, AGAIN_TOO = "again", "again too"
COMPRESSION, RECOMPUTATION, CLIP, COMPILE = (
    "without compression", "without recomputation", "without clipping", "without compilation",
)  # fmt: skip
FLOAT32, ONE_EACH = "in float32", "one micro-batch a rank"
# Experiments that change the running trainer; a case names them in `switches`, too.
SEEDS = "with one seed"  # every segment uses the same seed
DRAWS = "without random numbers"  # each draw gives the mean of what it draws from
DOUBLE = "in float64"  # the reference computes in float64
PERTURB = "with other last bits"  # the last bits of the reference's parameters are changed at the start
FORCED = "each module given the reference's inputs and gradients"
NUDGED = "each module given inputs with other last bits"  # of the reference; on one process
MEMORY = "with the memory of before the step"  # each micro-batch starts with the attributes and globals of the first
ALONE = "with a forward pass that knows of no other rank"
PRECISE = "without conversions to 16 bits"
MODES = "with every module in training mode"
HOOKS = "without hooks on gradients"
WHOLE = "with whole sequences on each rank"  # which keeps its part of what the model returns
CHAIN = "with the segments in place of the forward pass"  # in the reference, too
SETTINGS = "with the reference's settings of modules"  # such as a rate of dropout
OPTIONS = "with the reference's options of the optimizer"
STATE = "with the optimizer's state of the start of the step"
OPTIMIZER_HOOKS = "without hooks before the optimizer's update"
AFTER = "without what changes values after the optimizer's update"


def apply(trainer: "Trainer", switches: frozenset[str], model: torch.nn.Module) -> None:
    """Change a trainer before its first step.

    Args:
        model: as its author made it; its modules are those of the trainer.
    """
    placed = trainer.placed
    if SEEDS in switches:
        generator = default_generator(trainer.device)

        def enter(_segment: str) -> None:
            generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)

        placed.random_state.enter = enter  # type: ignore[assignment, method-assign]
    if DRAWS in switches:
        _around_step(trainer, MeanDraws)
    if PRECISE in switches:
        _around_step(trainer, FullPrecision)
    if HOOKS in switches:
        for parameter in placed.parameters.values():
            remove_hooks(parameter)
        for part in placed.parts:
            for module in part.modules():
                remove_backward_hooks(module)
    if MODES in switches:
        for part in placed.parts:
            part.train()
    if MEMORY in switches:
        memory = ModelMemory(placed.parts)
        _before_each(trainer, memory.restore_first)
    if OPTIMIZER_HOOKS in switches:
        remove_step_hooks(trainer.optimizer, before=True)
    if AFTER in switches:
        remove_step_hooks(trainer.optimizer, before=False)
        trainer.step.after_update.clear()
    if STATE in switches:
        _keep_state(trainer)
    if ALONE in switches and placed.layout.world_size > 1:
        _around_each_forward(trainer, alone)
    if CHAIN in switches and placed.layout.pipeline == 1 and (segments := pipeline_segments_of(model)) is not None:
        model.forward = _chain(segments)


def _chain(segments: Sequence[tuple[str, torch.nn.Module]]) -> Callable[..., Any]:
    def forward(*values: Any, **keywords: Any) -> Any:
        for _, segment in segments:
            outputs = segment(*values, **keywords)
            values, keywords = outputs if isinstance(outputs, tuple) else (outputs,), {}
        return outputs

    return forward


def _keep_state(trainer: "Trainer") -> None:
    """Give the optimizer the state that it had at the start of the step."""
    run, optimizer = trainer.placed.forward_backward, trainer.optimizer
    kept: dict[Any, Any] = {}

    def observed(micro_batches: Any, accumulator: Any, factor: float) -> None:
        kept.clear()
        for parameter, state in optimizer.state.items():
            kept[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        run(micro_batches, accumulator, factor)

    def restore(*_: Any) -> None:
        optimizer.state.clear()
        optimizer.state.update(kept)

    trainer.placed.forward_backward = observed
    optimizer.register_step_pre_hook(restore)


def use_options(trainer: "Trainer", right: Mapping[str, Mapping[str, str]]) -> None:
    """Set the options of the optimizer to the reference's before each update.

    Args:
        right: parameter → option → its value as text.
    """
    names = {id(parameter): name for name, parameter in trainer.placed.parameters.items()}

    def use(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            name = next((names[id(p)] for p in group["params"] if id(p) in names), "")
            for key, text in right.get(name, {}).items():
                with suppress(ValueError, SyntaxError):
                    group[key] = ast.literal_eval(text)

    trainer.optimizer.register_step_pre_hook(use)


def use_settings(trainer: "Trainer", names: Mapping[int, str], right: Mapping[str, Mapping[str, Any]]) -> None:
    """Set numbers, texts and switches that are attributes of modules to the reference's."""
    for part in trainer.placed.parts:
        for module in part.modules():
            for key, value in right.get(names.get(id(module), "?"), {}).items():
                setattr(module, key, value)


def settings_of_module(module: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers, texts and switches that are attributes of a module."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    return {key: value for key, value in own.items() if isinstance(value, bool | int | float | str)}


def _around_step(trainer: "Trainer", mode: Callable[[], Any]) -> None:
    """Enter a mode for the forward and backward passes of a step; the samples are read outside of it."""
    run = trainer.placed.forward_backward

    def observed(micro_batches: Any, accumulator: Any, factor: float) -> None:
        with mode():
            run(micro_batches, accumulator, factor)

    trainer.placed.forward_backward = observed


def _before_each(trainer: "Trainer", call: Callable[[], None]) -> None:
    """Call a function before the forward pass of each micro-batch."""
    random_state = trainer.placed.random_state
    at = random_state.at

    def observed(micro_batch: int) -> None:
        call()
        at(micro_batch)

    random_state.at = observed  # type: ignore[method-assign]


def _around_each_forward(trainer: "Trainer", around: Callable[[], Any]) -> None:
    """Enter a context for the forward pass and the loss of each micro-batch."""
    random_state, run = trainer.placed.random_state, trainer.placed.forward_backward
    at, opened = random_state.at, ExitStack()

    def observed_at(micro_batch: int) -> None:
        opened.close()
        opened.enter_context(around())
        at(micro_batch)

    def observed_run(micro_batches: Any, accumulator: Any, factor: float) -> None:
        add = accumulator.add

        def observed_add(*args: Any) -> None:
            opened.close()
            add(*args)

        accumulator.add = observed_add
        with opened:
            run(micro_batches, accumulator, factor)

    random_state.at = observed_at  # type: ignore[method-assign]
    trainer.placed.forward_backward = observed_run


@contextmanager
def alone() -> Iterator[None]:
    """Let code in the block believe that there are no other ranks; its collectives do nothing."""

    def gathered(outputs: Any, tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        for output in outputs if isinstance(outputs, list) else outputs.view(-1, *tensor.shape):
            output.copy_(tensor)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    replaced: dict[str, Any] = {
        "is_initialized": lambda: False, "get_world_size": lambda *_: 1, "get_rank": lambda *_: 0,
        "all_gather": gathered, "all_gather_into_tensor": gathered, "all_reduce": nothing, "broadcast": nothing,
        "barrier": nothing,
    }  # fmt: skip
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch.object(dist, name, function))
        for name, value in variables.items():
            if name in os.environ:
                stack.enter_context(patch.dict(os.environ, {name: value}))
        yield


class MeanDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces each random number by the mean of its distribution; training mode and all else stay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli" and len(args) == 1:
            return args[0].clone()
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices
        drawn = func(*args, **kwargs)
        if name in _MEANS and isinstance(drawn, Tensor):
            mean = _MEANS[name](args, kwargs)
            drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)
        elif name == "randperm":
            drawn.copy_(torch.arange(drawn.numel()))
        return drawn


def _argument(place: int, key: str, default: float) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: args[place] if len(args) > place else kwargs.get(key, default)


def _middle(args: Any, _kwargs: Any) -> int:
    low, high = (args[0], args[1]) if isinstance(args[1], int) else (0, args[0])
    return int(low + high) // 2


_MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "rand": lambda *_: 0.5,
    "rand_like": lambda *_: 0.5,
    "randn": lambda *_: 0.0,
    "randn_like": lambda *_: 0.0,
    "randint": _middle,
    "normal": lambda args, _: args[0],
    "normal_": _argument(1, "mean", 0.0),
    "uniform_": lambda args, kw: (_argument(1, "from", 0.0)(args, kw) + _argument(2, "to", 1.0)(args, kw)) / 2,
    "exponential_": lambda args, kw: 1 / _argument(1, "lambd", 1.0)(args, kw),
    "bernoulli": _argument(1, "p", 0.5),
    "bernoulli_": _argument(1, "p", 0.5),
}


class FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves values in float32 where they would be converted to 16 bits: under autocast, and by `.half()`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.bfloat16, torch.float16):
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@torch.no_grad()
def perturb(trainer: "Trainer") -> None:
    """Move each parameter up or down by its last bit, at random."""
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.placed.parameters.values():
        if parameter.is_floating_point():
            parameter.copy_(with_other_last_bits(parameter, generator))


def with_other_last_bits(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor whose elements are moved up or down by their last bit, at random."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)


def is_indexed(data: Any) -> bool:
    """Return whether samples can be converted: an indexed data set, not a loader and not a list of batches."""
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexed and not isinstance(data, list | tuple | IterableDataset)


def in_float64(tree: Any) -> Any:
    """Convert floating-point tensors in a batch to float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: in_float64(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(in_float64, tree))
    return tree


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 the default dtype in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def first_experiments(spec: Spec, topology: str, at: int) -> list[Case]:
    """Return the experiments that tell what differs in a step: the step twice, and part by part.

    Not part by part where sequences or layers are cut: a rank's inputs and gradients are pieces of the reference's.
    """
    # Part by part, without what only rounds, or acts on the gradient as a whole.
    plain = {key: value for settings in switched_off(spec.config).values() for key, value in settings.items()}
    again = [Case(name, start=at, switches=frozenset({AGAIN})) for name in (AGAIN, AGAIN_TOO)]
    values, _ = parse_topology(topology)
    if any((values.get(f"{axis}_size") or 1) > 1 for axis in ("context", "tensor")):
        return again
    return [
        *again,
        Case(FORCED, plain, start=at, switches=frozenset({FORCED})),
        Case(NUDGED, plain, start=at, switches=frozenset({NUDGED, FORCED})),
    ]


def further_experiments(spec: Spec, topology: str, at: int, wanted: Sequence[str], data: Any) -> list[Case]:
    """Return those of the wanted experiments that are possible."""
    _, ranks = parse_topology(topology)
    off = switched_off(spec.config)
    one_each = {
        "training.global_batch_size": spec.config.training.batch_size * ranks,
        "training.gradient_accumulation_steps": None,
    }
    cases = []
    for name in dict.fromkeys(wanted):
        if name in off:
            cases.append(Case(name, off[name], start=at))
        elif name == WHOLE:
            settings = {key: value for each in off.values() for key, value in each.items()}
            settings["distributed.reproducible"] = False  # where layers sum chunks of their own
            cases.append(Case(name, settings, start=at, switches=frozenset({name})))
        elif name == ONE_EACH and ranks > 1:
            cases.append(Case(name, one_each))
        elif name != ONE_EACH and (name != DOUBLE or (is_indexed(data) and FLOAT32 not in off)):
            cases.append(Case(name, start=at, switches=frozenset({name})))
    return cases


def switched_off(config: Config) -> dict[str, dict[str, Any]]:
    """Return experiment → settings, for what the config uses and a step can do without."""
    training, precision, distributed = config.training, config.precision, config.distributed
    off: dict[str, dict[str, Any]] = {}
    if distributed.ddp.compression.kind != "none":
        off[COMPRESSION] = {"distributed.ddp.compression.kind": "none"}
    if training.gradient_checkpointing != "none":
        off[RECOMPUTATION] = {"training.gradient_checkpointing": "none"}
    if training.gradient_clip.strategy != "none":
        off[CLIP] = {"training.gradient_clip.strategy": "none"}
    if training.compile:
        off[COMPILE] = {"training.compile": False}
    low = precision.param_dtype != "fp32" or distributed.fsdp.reduce_dtype != "fp32"
    if low or precision.mode != "fp32":
        off[FLOAT32] = {
            "precision.mode": "fp32", "precision.param_dtype": "fp32", "distributed.fsdp.reduce_dtype": "fp32",
        }  # fmt: skip
    return off
