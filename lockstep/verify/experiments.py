"""Changes one thing in a step, on both sides, to find the cause of a difference.

If the difference disappears, that thing was its cause.

An experiment is a `Case` (see `lockstep.verify.subject`) that changes settings, or switches of the
running trainer.
"""

import ast
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.config import Config
from lockstep.data.batches import MicroBatch
from lockstep.layout import SAME_BATCH
from lockstep.machine.accelerator import default_generator
from lockstep.models.protocol import pipeline_segments_of
from lockstep.strategy import parse_topology
from lockstep.tensors import local
from lockstep.torch_compat.gradient_hooks import remove_hooks
from lockstep.torch_compat.module_hooks import remove_backward_hooks
from lockstep.torch_compat.optimizer_step import remove_step_pre_hooks, run_first
from lockstep.verify.memory import ModelMemory
from lockstep.verify.modes import alone
from lockstep.verify.operation_modes import FullPrecision, MeanDraws, SameDraws
from lockstep.verify.subject import Case, Spec

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

# Experiments that change settings.
AGAIN = "again"
AGAIN_TOO = "again too"
COMPRESSION = "without compression"
RECOMPUTATION = "without recomputation"
CLIP = "without clipping"
COMPILE = "without compilation"
FLOAT32 = "in float32"
ONE_EACH = "one micro-batch a rank"
# Experiments that change the running trainer; a case names them in `switches`, too.
SEEDS = "with one seed"  # every segment uses the same seed
# each draw gives the mean of what it draws from; of the reference's checks
DRAWS = "without random numbers"
SAME_DRAWS = "with one seed for each draw"
DOUBLE = "in float64"  # the reference computes in float64
# the last bits of the reference's parameters are changed at the start
PERTURB = "with other last bits"
FORCED = "each module given the reference's inputs and gradients"
NUDGED = "each module given inputs with other last bits"  # of the reference; on one process
# each micro-batch starts with the attributes and globals of the first
MEMORY = "with the memory of before the step"
ALONE = "with a forward pass that knows of no other rank"
PRECISE = "without conversions to 16 bits"
MODES = "with every module in training mode"
HOOKS = "without hooks on gradients"
COMPLETE = "with whole sequences on each rank"  # which keeps its part of what the model returns
CHAIN = "with the segments in place of the forward pass"  # in the reference, too
SETTINGS = "with the reference's settings of modules"  # such as a rate of dropout
SAMPLES = "with the reference's samples"
START = "with the reference's first values"
OPTIONS = "with the reference's options of the optimizer"
STATE = "with the optimizer's state of the start of the step"
OPTIMIZER_HOOKS = "without hooks before the optimizer's update"
BEFORE = "with the values of the start of the step at the optimizer's update"
AFTER = "with the values that the optimizer's update leaves"


def apply(trainer: "Trainer", switches: frozenset[str], model: torch.nn.Module) -> None:
    """Change a trainer before its first step; `model`: as its author made it.

    Its modules are those of the trainer. What `SETTINGS`, `SAMPLES`, `START`, `OPTIONS`, `FORCED`
    and `COMPLETE` need of the reference, `worker.py` gives.
    """
    for name, change in _CHANGES.items():
        if name in switches:
            change(trainer)
    if CHAIN in switches and not trainer.placed.layout.has_stages:
        segments = pipeline_segments_of(model)
        if segments is not None:
            model.forward = _chain(segments)


def _use_one_seed(trainer: "Trainer") -> None:
    """Seed each segment with 0, in place of its own key."""
    generator = default_generator(trainer.device)

    def enter(_segment: str) -> None:
        generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    trainer.placed.random_state.enter = enter  # type: ignore[assignment, method-assign]


def _draw_the_same(trainer: "Trainer") -> None:
    _around_step(trainer, partial(SameDraws, default_generator(trainer.device)))


def _remove_gradient_hooks(trainer: "Trainer") -> None:
    for parameter in trainer.placed.parameters.values():
        remove_hooks(parameter)
    for part in trainer.placed.parts:
        for module in part.modules():
            remove_backward_hooks(module)


def _set_training_mode(trainer: "Trainer") -> None:
    for part in trainer.placed.parts:
        part.train()


def _restore_memory(trainer: "Trainer") -> None:
    """Give each micro-batch the attributes and globals with which the first one begins."""
    memory = ModelMemory(trainer.placed.parts)
    random_state = trainer.placed.random_state
    at = random_state.at

    def restored(micro_batch: int, earlier: Mapping[str, int] | None = None) -> None:
        memory.restore_first()
        at(micro_batch, earlier)

    random_state.at = restored  # type: ignore[method-assign]


def _restore_values(trainer: "Trainer") -> None:
    """Give the parameters, at the optimizer's update, the values of the start of the step."""
    values = dict[str, Tensor]()
    before_step(trainer, lambda _micro_batches: values.update(_values(trainer)))
    trainer.optimizer.register_step_pre_hook(lambda *_: _set_values(trainer, values))


def _chain(segments: Sequence[tuple[str, torch.nn.Module]]) -> Callable[..., Any]:
    """Return a forward pass that calls the segments, each with what the one before it returns."""

    def forward(*values: Any, **keywords: Any) -> Any:
        for _, segment in segments:
            outputs = segment(*values, **keywords)
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            keywords = {}
        return outputs

    return forward


def _keep_state(trainer: "Trainer") -> None:
    """Give the optimizer the state that it had at the start of the step."""
    optimizer = trainer.optimizer
    states = dict[Any, Any]()  # parameter → its state at the start

    def keep(_micro_batches: Sequence[MicroBatch]) -> None:
        states.clear()
        for parameter, state in optimizer.state.items():
            states[parameter] = {
                k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()
            }

    def restore(*_: Any) -> None:
        optimizer.state.clear()
        optimizer.state.update(states)

    before_step(trainer, keep)
    optimizer.register_step_pre_hook(restore)


def _keep_update(trainer: "Trainer") -> None:
    """Give the parameters, at the end of a step, the values that the optimizer's update left."""
    kept: dict[str, Tensor] = {}
    optimizer = trainer.optimizer
    run_first(
        optimizer, optimizer.register_step_post_hook(lambda *_: kept.update(_values(trainer)))
    )

    trainer.placed.update_finishers.append(lambda _skipped: _set_values(trainer, kept))


def _values(trainer: "Trainer") -> dict[str, Tensor]:
    return {name: local(p.detach()).clone() for name, p in trainer.placed.parameters.items()}


@torch.no_grad()
def _set_values(trainer: "Trainer", values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        local(trainer.placed.parameters[name].detach()).copy_(value)


def use_options(trainer: "Trainer", right: Mapping[str, Mapping[str, str]]) -> None:
    """Set options of the optimizer before each update.

    `right`: parameter → option → the reference's value as text.
    """
    names = {id(parameter): name for name, parameter in trainer.placed.parameters.items()}

    def use(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            name = next((names[id(p)] for p in group["params"] if id(p) in names), "")
            for key, text in right.get(name, {}).items():
                with suppress(ValueError, SyntaxError):
                    group[key] = ast.literal_eval(text)

    trainer.optimizer.register_step_pre_hook(use)


def use_settings(
    trainer: "Trainer", names: Mapping[int, str], right: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set plain attributes of modules to the reference's."""
    for part in trainer.placed.parts:
        for module in part.modules():
            mine = settings_of_module(module)
            for key, value in right.get(names.get(id(module), "?"), {}).items():
                if key in mine:
                    setattr(module, key, value)


def settings_of_module(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are plain values.

    These are numbers, texts, switches, None, and tuples of them.
    """
    own = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and key != "training"
    }
    return {key: value for key, value in own.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _around_step(trainer: "Trainer", mode: Callable[[], Any]) -> None:
    """Enter a mode for the forward and backward passes of a step.

    The samples are read outside of it.
    """

    def observed(run: Any, micro_batches: Any, accumulator: Any, factor: float) -> None:
        with mode():
            run(micro_batches, accumulator, factor)

    trainer.placed.around_passes.append(observed)


def before_step(
    trainer: "Trainer", call: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch] | None]
) -> None:
    """Call a function with a step's micro-batches before its first forward pass.

    It may return others.
    """

    def observed(
        run: Any, micro_batches: Sequence[MicroBatch], accumulator: Any, factor: float
    ) -> None:
        run(call(micro_batches) or micro_batches, accumulator, factor)

    trainer.placed.around_passes.append(observed)


def _forward_alone(trainer: "Trainer") -> None:
    """Hide other ranks from the forward pass and the loss of each micro-batch."""
    if trainer.placed.layout.world_size == 1:
        return
    random_state = trainer.placed.random_state
    at = random_state.at
    opened = ExitStack()

    def observed_at(micro_batch: int, earlier: Mapping[str, int] | None = None) -> None:
        opened.close()
        opened.enter_context(alone())
        at(micro_batch, earlier)

    def observed_run(run: Any, micro_batches: Any, accumulator: Any, factor: float) -> None:
        accumulator.watch(lambda _micro_batch, _loss: opened.close())
        with opened:
            run(micro_batches, accumulator, factor)

    random_state.at = observed_at  # type: ignore[method-assign]
    trainer.placed.around_passes.append(observed_run)


# Each changes one thing in the running trainer.
_CHANGES: dict[str, Callable[["Trainer"], None]] = {
    SEEDS: _use_one_seed,
    DRAWS: partial(_around_step, mode=MeanDraws),
    SAME_DRAWS: _draw_the_same,
    PRECISE: partial(_around_step, mode=FullPrecision),
    HOOKS: _remove_gradient_hooks,
    MODES: _set_training_mode,
    MEMORY: _restore_memory,
    OPTIMIZER_HOOKS: lambda trainer: remove_step_pre_hooks(trainer.optimizer),
    AFTER: _keep_update,
    STATE: _keep_state,
    BEFORE: _restore_values,
    ALONE: _forward_alone,
}


# ---- which experiments are made ----


def is_indexed(data: Any) -> bool:
    """Return whether samples can be converted.

    They can in an indexed data set, and not in a loader or a list of batches.
    """
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexed and not isinstance(data, list | tuple | IterableDataset)


def first_experiments(spec: Spec, topology: str, at: int) -> list[Case]:
    """Return the experiments that tell what differs in a step: the step twice, and part by part."""
    again = [Case(name, start=at, switches=frozenset({AGAIN})) for name in (AGAIN, AGAIN_TOO)]
    values, _ = parse_topology(topology)
    if any((values.get(f"{axis}_size") or 1) > 1 for axis in SAME_BATCH):
        return again  # a rank's inputs and gradients are pieces of the reference's
    # Part by part, without what only rounds, or acts on the gradient as a whole.
    plain = {
        key: value
        for settings in switched_off(spec.config).values()
        for key, value in settings.items()
    }
    forced = Case(FORCED, plain, start=at, switches=frozenset({FORCED}))
    return [*again, forced, Case(NUDGED, plain, start=at, switches=frozenset({NUDGED, FORCED}))]


def further_experiments(
    spec: Spec, topology: str, at: int, wanted: Sequence[str], data: Any
) -> list[Case]:
    """Return those of the wanted experiments that are possible."""
    _, ranks = parse_topology(topology)
    off = switched_off(spec.config)
    size = spec.config.training.batch_size * ranks
    one_each = {"training.global_batch_size": size, "training.gradient_accumulation_steps": None}
    cases = []
    for name in dict.fromkeys(wanted):
        if name in off:
            cases.append(Case(name, off[name], start=at))
        elif name == COMPLETE:
            settings = {key: value for each in off.values() for key, value in each.items()}
            settings["distributed.reproducible"] = False  # where layers sum chunks of their own
            cases.append(Case(name, settings, start=at, switches=frozenset({name})))
        elif name == ONE_EACH and ranks > 1:
            # other micro-batches: comparable from the first step alone
            cases += [Case(name, one_each)] if at == 0 else []
        elif name != ONE_EACH and (name != DOUBLE or (is_indexed(data) and FLOAT32 not in off)):
            cases.append(Case(name, start=at, switches=frozenset({name})))
    return cases


def switched_off(config: Config) -> dict[str, dict[str, Any]]:
    """Return experiment → settings, for what the config uses and a step can do without."""
    training = config.training
    precision = config.precision
    distributed = config.distributed
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
        keys = ("precision.mode", "precision.param_dtype", "distributed.fsdp.reduce_dtype")
        off[FLOAT32] = dict.fromkeys(keys, "fp32")
    return off
