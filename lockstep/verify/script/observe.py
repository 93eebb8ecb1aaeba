"""Runs a training script unchanged, and records what flows through its steps.

It calls no collective of its own, so it neither hangs a script nor repairs one. Loaders read
samples in the same process. What is recorded is a `ScriptRecord` (record.py), to which a
`RecordedStep` is added with each step of the optimizer:

    forward     hooks of all modules: samples, generators, the names of a model at its first call
    backward    what the pass starts from, each rank's own gradients
    clipping    the gradients before it
    update      gradients and settings before it, values after it

`ScriptHangWatch` (hangs.py) ends a rank that waits for others in vain.

Tests: tests/verify/test_script.py, tests/verify/test_watch.py
"""

import atexit
import gc
import os
import random
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.environment import RANK_0_OF_1, rank_facts
from lockstep.launch.failures import read_all, short_path
from lockstep.launch.script import run_script
from lockstep.launch.worker import mark_done
from lockstep.output import flush_both
from lockstep.paths import RUNS
from lockstep.tensors import local, with_other_last_bits
from lockstep.torch_compat import script_patches
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.verify.operation_modes import FullPrecision, MeanDraws
from lockstep.verify.own_lines import (
    is_own,
    line_of_definition,
    line_outside_of_modules,
    own_line,
)
from lockstep.verify.script import values
from lockstep.verify.script.broadcasts import watch_losses
from lockstep.verify.script.draws import BatchKey, ObservedDraws
from lockstep.verify.script.hangs import ScriptHangWatch
from lockstep.verify.script.operations import BACKWARD, FORWARD, UPDATE, TracedOperations
from lockstep.verify.script.record import CLIP, RandomDraw, RecordedStep, ScriptRecord, TensorPiece
from lockstep.verify.script.task import ScriptTask, for_ranks
from lockstep.verify.script.values import ObservedLoaders
from lockstep.verify.training_checks import Nesting, TrainingChecks, plain_name
from lockstep.verify.watch import verified_part

# seconds to wait for the other ranks to finish their last step; longer than `ScriptHangWatch` does
_WAIT = 60.0
_MOST_COLLECTIVES = 10_000
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def observe(task: ScriptTask, *, alone: bool) -> None:
    """Run a task's script in this process until it has taken the steps, and end the process.

    If `alone`, the process is a world of one, though the launcher has numbered it.
    """
    if alone:
        os.environ.update(RANK_0_OF_1)
    os.environ[RUNS] = str(task.runs)
    # by which Fabric knows torchrun
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "lockstep-verify")
    facts = rank_facts()
    log = os.open(task.folder / f"output-{facts.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    observer = _ScriptObserver(task, facts.rank, facts.world_size)
    observer.watch()
    run_script(task.script, [for_ranks(argument, facts.world_size) for argument in task.arguments])
    observer.finish()


def observe_command(folder: str) -> None:
    """Observe this process of a command, whose task is in a folder."""
    task = ScriptTask.read(Path(folder))
    facts = rank_facts()
    observer = _ScriptObserver(task, facts.rank, facts.world_size)

    def end() -> None:
        if observer.record.first:  # a launcher ends without a forward pass
            observer.finish()

    atexit.register(end)


class _ScriptObserver:
    """Records one rank's steps, and gives the script what its task names, as samples and values."""

    def __init__(self, task: ScriptTask, rank: int, world: int) -> None:
        self.task = task
        self.rank = rank
        self.world = world
        self.record = ScriptRecord()
        self.active = True  # whether what happens now is recorded
        self._step = RecordedStep()
        self._names: dict[int, str] = {}
        self._flat: set[int] = set()  # parameters in modules that FSDP1 cuts
        self._models: list[nn.Module] = []
        self._prefixes: dict[int, str] = {}  # number of a model → of its parameters' names
        self._depth = 0  # of modules that call each other
        self._inside: list[str] = []  # their names; empty before they are known
        self._is_traced = False
        self._in_backward = False
        self._in_schedule = False  # of a pipeline
        self._modes = ExitStack()  # from the forward pass to the end of the backward pass
        self._mean_draws = MeanDraws()
        self._states: dict[str, Any] | None = None  # of the generators, when the micro-batch began
        self._called_with: dict[str, Any] = {}  # those when the outermost module was called
        self._moved: dict[str, Any] = {}  # generator that a forward pass has moved → its state then
        self._passes = 0  # backward passes
        self._nesting = Nesting()
        self._modules: dict[int, str] = {}
        # where modules were made
        self._modules_made: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._seeds_pass = False  # whether this observer gives seeds itself
        self._has_passed = False  # whether the last batch of the step has passed backward
        self._checks = TrainingChecks(
            task.steps, 1, lambda finding: self.record.findings.append(vars(finding))
        )
        self._loaders = ObservedLoaders(task, self.record, rank, self._batch_read)
        self._draws = ObservedDraws(
            task.given.draws,
            self._sources,
            lambda: self._loaders.last or (-1, self._passes),
            self.record.draws.append,
            self.record.unkeyed.append,
            lambda: self._depth > 0,
            self._draw,
            is_own,
        )
        # settings of the parameter groups to put back after the step
        self._own: list[list[dict[str, Any]]] = []
        self._hang_watch = ScriptHangWatch(task, rank, world, self.record)
        self._watch_calls()
        verified_part.append((partial(setattr, self, "active", True), self.finish))
        # A command's script is not known; it is observed whole until a part begins.
        with suppress(OSError):
            text = Path(self.task.script).read_text(errors="replace")
            self.active = "lockstep.observe(" not in text

    def _watch_calls(self) -> None:
        """Let the calls of torch that make up a step come by here, for the rest of the process."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        script_patches.patch_backward(self._around_backward)
        script_patches.patch_clipping(self._around_clipping)
        script_patches.patch_collectives(self._collective)
        script_patches.patch_made(self._made)
        script_patches.patch_hooks(self._hook_registered)
        script_patches.patch_samplers(self._checks.sampler_begun)
        script_patches.patch_loading(self._checks.loaded)
        script_patches.patch_model_parallel(self.record.together.update, self._around_schedule)
        script_patches.patch_modes(self._checks.left_training)
        script_patches.patch_modules(self._module_made)
        script_patches.patch_schedules(self._schedule_stepped)
        script_patches.patch_seeds(self._seeded)
        watch_losses(self._broadcast)
        if self.task.conditions.traced:  # what is made before a step, too
            traced = TracedOperations(
                self._place, lambda operation: self._step.operations.append(operation)
            )
            traced.__enter__()  # type: ignore[no-untyped-call]

    def watch(self) -> None:
        """End this process when all ranks wait for each other."""
        self._hang_watch.start()

    def finish(self) -> None:
        """Write the record, wait for the other ranks, and end this process.

        The rest of the script does not run.
        """
        self._hang_watch.script_has_ended()
        flush_both()
        task = self.task
        task.write_record(self.rank, self.record)
        deadline = time.monotonic() + _WAIT
        while time.monotonic() < deadline and not read_all(task.folder):  # the failures of others
            if any(task.hang_file(rank).exists() for rank in range(self.world)):
                time.sleep(_WAIT)  # `ScriptHangWatch` ends this process
            if all(task.record_file(rank).exists() for rank in range(self.world)):
                break
            time.sleep(0.01)
        mark_done()  # where the command is Lockstep's launcher
        os._exit(0)

    def _collective(self, name: str, given: Any) -> None:
        size = sum(leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        frame = traceback.extract_stack(limit=3)[0]
        if len(self.record.collectives) < _MOST_COLLECTIVES:
            self.record.collectives.append(
                (name, size, f"{short_path(frame.filename)}:{frame.lineno}")
            )
        if size and is_own(frame.filename):
            self._step.calls.append((name, f"{short_path(frame.filename)}:{frame.lineno}"))

    # ---- what is made, read and drawn ----

    def _made(self, made: Any) -> None:
        self._checks.note_made(made)
        if isinstance(made, torch.optim.Optimizer):
            self.record.lines.optimizers.append(own_line())
            self._draws.begin()

    def _module_made(self, module: nn.Module) -> None:
        if self.active and self._states is None:
            self._modules_made[id(module)] = (weakref.ref(module), line_outside_of_modules())

    def _schedule_stepped(self, schedule: LRScheduler) -> None:
        self._checks.schedule_stepped(schedule)
        if schedule.last_epoch > 0:  # else it is made
            self.record.lines.note_schedule(own_line())

    def _broadcast(self, text: str) -> None:
        if torch.is_grad_enabled():  # else it may be a metric
            self.record.broadcasts.setdefault(own_line(), text)

    def _seeded(self, seed: Any) -> None:
        begun = self.record.batches or self.record.steps
        if not self._seeds_pass and self._states is None and not begun:
            self.record.lines.seeds.append((own_line(), str(seed)))

    def _batch_read(self) -> None:
        self._checks.batch_read()
        self._has_passed = False
        self._draws.begin()
        self._trace()

    def _hook_registered(self, name: str, of_torch: bool) -> bool:
        self.record.hooks.append((name, of_torch))
        self.record.lines.note_hook(own_line())
        return not self.task.conditions.plain_reduction

    def _sources(self) -> list[BatchKey]:
        """Return which ranks' numbers belong to the samples that this process has now."""
        if self.task.given.by_rank:
            return [(self.rank, (self._loaders.last or (-1, self._passes))[1])]
        if self._loaders.last is not None:
            return self._loaders.sources
        ranks = list(self.task.given.draws)
        if not self.task.given.in_turn:
            return [(rank, self._passes) for rank in ranks]
        index, turn = divmod(self._passes, len(ranks))
        return [(ranks[turn], index)]

    def _draw(self, call: Callable[[], Any]) -> Any:
        """Draw: outside of modules the numbers themselves, which one process is given, too."""
        if self._depth:
            return call()
        with self._mean_draws.paused():
            return call()

    # ---- forward ----

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Note a module that is called; a micro-batch begins with an entire model in training."""
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        self._inside.append(self._modules.get(id(module), ""))
        device = next(module.parameters(), torch.empty(0)).device.type
        if torch.is_autocast_enabled(device):
            self._step.dtypes.add(f"autocast to {torch.get_autocast_dtype(device)}")
        if self._states is not None and not self._in_backward:
            # also where a part of a model runs without gradients
            self._checks.module_called(module)
        if self._depth > 1 or not torch.is_grad_enabled() or self._in_backward or not self.active:
            return
        self._called_with = {} if self._states is None else values.generator_states()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return  # a module for the loss
        self._checks.model_called(module)
        if not module.training:
            if self._states is None:  # it is evaluated, with gradients that nobody uses
                self._loaders.note_evaluation()
            return
        if not any(module is model for model in self._models):
            self._begin_with(module)
        self._note_call(module)
        if self.task.conditions.fixed_statistics:
            for inner in module.modules():
                if isinstance(inner, _STATISTICS):
                    inner.eval()
        if self._states is None:
            self._states = self._begin_pass()
            self._called_with = values.generator_states()

    def _trace(self) -> None:
        """Trace operations from here to the update, if the task says so."""
        self._is_traced = self.task.conditions.traced

    def _place(self) -> tuple[str, str] | None:
        """Return the module that runs, and the phase of the step; None if it is not traced."""
        if not self._is_traced:
            return None
        return self._inside[-1] if self._inside else "", self._phase()

    def _phase(self) -> str:
        if self._in_backward:
            return BACKWARD
        return UPDATE if self._has_passed else FORWARD

    def _note_call(self, model: nn.Module) -> None:
        """Note where a model of the script is called, and whether a wrapper reduces for it."""
        number = next(at for at, each in enumerate(self._models) if each is model)
        prefix = self._prefixes.get(number)
        if prefix is None:
            return
        lines = self.record.lines
        line = own_line()
        if line:
            lines.models[prefix] = line
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            lines.wrapped.add(prefix)

    def _begin_pass(self) -> dict[str, Any]:
        """Return the generators' states, and change how this pass draws and rounds if told so."""
        states = values.generator_states()
        self._has_passed = False
        self._seeds_pass = True
        self._trace()
        if self.task.conditions.mean_draws:
            random.seed(0)
            np.random.seed(0)
            self._modes.enter_context(self._mean_draws)
        if self.task.conditions.full_precision:
            self._modes.enter_context(FullPrecision())  # type: ignore[no-untyped-call]
        if self.task.conditions.keyed_passes:
            torch.manual_seed(self.rank * 1_000_003 + self._passes)
        self._seeds_pass = False
        return states

    def _after_forward(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note what a module returned, and the inputs of an entire model."""
        # torch leaves out the keyword arguments where a forward pass has raised.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        self._inside.pop()
        if self._states is None or self._in_backward or not torch.is_grad_enabled():
            return
        if self._depth == 0:
            self._note_moved()
        name = self._modules.get(id(module))
        if name is not None:
            self._step.flow.append((name, *values.two_numbers(output)))
        if self._depth == 0 and any(module is model for model in self._models):
            self._step.add_inputs(values.rows((args, kwargs)), values.elements((args, kwargs)))

    def _begin_with(self, model: nn.Module) -> None:
        """Learn the names of a model at its first call, and give it the task's first values."""
        self.watch()
        parameters = dict(model.named_parameters())
        is_new = not any(id(parameter) in self._names for parameter in parameters.values())
        prefix = f"{len(self._models)}:" if self._models and is_new else ""
        if is_new or not self._models:
            self._prefixes[len(self._models)] = prefix
            self.record.lines.made[prefix] = self._line_that_made(model)
        self._models.append(model)
        modules = list(model.modules())
        if any(isinstance(module, _STATISTICS) for module in modules):
            self.record.note_statistics()
        classes = {cls.__name__ for module in modules for cls in type(module).__mro__}
        is_flat = "FullyShardedDataParallel" in classes
        for name, module in model.named_modules():
            self._modules.setdefault(id(module), self._name_of_module(prefix + plain_name(name)))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in parameters.items():
            if id(parameter) in self._names:  # a part of a model that was called before, or around
                continue
            plain = prefix + plain_name(name)
            plain = self.task.given.names.get(plain, plain)
            self._begin_with_parameter(plain, parameter, is_flat=is_flat)
            can_be_nudged = parameter.is_floating_point() and not isinstance(parameter, DTensor)
            if self.task.conditions.nudged and can_be_nudged:
                with torch.no_grad():
                    parameter.copy_(with_other_last_bits(parameter, generator))

    def _begin_with_parameter(self, name: str, parameter: nn.Parameter, *, is_flat: bool) -> None:
        """Record a parameter's first value, and give it that of the task; watch its gradient.

        `is_flat`: FSDP1 has put it into one flat parameter with others, and has its gradients.
        """
        if is_flat:
            self._flat.add(id(parameter))
        elif parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_hook(partial(self._own_gradient, name))  # type: ignore[no-untyped-call]
        self._names[id(parameter)] = name
        self.record.first[name] = self._piece(parameter)
        given = self.task.given.for_rank(self.task.given.first.get(name, ()), self.rank)
        if given:
            with torch.no_grad():
                joined = values.give(parameter, given)
            if joined is not None:
                self.record.joined[name] = joined

    def _line_that_made(self, model: nn.Module) -> str:
        """Return the line that made the innermost of a model's modules; empty if none is known."""
        lines = []
        for part in model.modules():
            reference, line = self._modules_made.get(id(part), (None, ""))
            if reference is not None and reference() is part and line:
                lines.append(line)
        return lines[-1] if lines else ""

    def _name_of_module(self, name: str) -> str:
        """Return the name that the ranks have for a module of this process."""
        return (self.task.given.prefix + name).rstrip(".")

    # ---- backward ----

    def _around_backward(self, call: Any, first: Any) -> Any:
        """Record what a backward pass starts from, and look at the loop when it is done."""
        if self._in_backward or not self.active:  # recomputation starts backward passes of its own
            return call()
        if not self._in_schedule:
            losses = [first] if isinstance(first, Tensor) else list(first)
            self._step.losses.append(
                sum(float(local(loss).detach().double().sum()) for loss in losses)
            )
            self._step.note_backward(own_line(), losses[0])
            self._step.read.append(self._loaders.take_unused())
            self._record_draws()
            self._checks.backward(first)
        self._in_backward = True
        try:
            return call()
        finally:
            self._in_backward = False
            if not self._in_schedule:
                self._checks.backward_done()
                self._end_pass()

    def _around_schedule(self, call: Any, schedule: Any) -> Any:
        """Take a pipeline's step, with the passes of all its micro-batches, as one pass."""
        loss = script_patches.loss_of_schedule(schedule)
        self.record.lines.note_loss(line_of_definition(loss))
        self._step.calls.append((BACKWARD, own_line()))
        self._states = self._begin_pass()
        self._called_with = values.generator_states()
        self._in_schedule = True
        self._step.losses.append(0.0)
        self._step.read.append(self._loaders.take_unused())
        self._checks.backward(None)
        try:
            return call()
        finally:
            self._checks.backward_done()
            self._note_moved()
            self._record_draws()
            self._in_schedule = False
            self._end_pass()

    def _record_draws(self) -> None:
        if self._states is not None:
            before = {name: values.fingerprint(state) for name, state in self._states.items()}
            moved = {name: values.fingerprint(state) for name, state in self._moved.items()}
            self._step.draws.append(RandomDraw(before, {**before, **moved}))

    def _note_moved(self) -> None:
        """Note the generators that have moved since the outermost module was called."""
        now = values.generator_states()
        for name, state in self._called_with.items():
            if values.fingerprint(state) != values.fingerprint(now[name]):
                self._moved[name] = now[name]

    def _end_pass(self) -> None:
        self._modes.close()
        self._has_passed = True
        if self.task.conditions.mean_draws and self._states is not None:
            random.setstate(self._states["python"])
            np.random.set_state(self._states["numpy"])
        if self.task.conditions.keyed_passes and self._states is not None:
            torch.set_rng_state(self._states["torch"])
        self._states = None
        self._moved = {}
        self._passes += 1

    def _own_gradient(self, name: str, gradient: Tensor) -> None:
        """Add what a backward pass computes of a gradient, before ranks are reduced."""
        piece = values.piece_of(gradient)
        of_step = self._step.own.setdefault(name, piece)
        if of_step is not piece:
            of_step.add(piece)

    def _around_clipping(self, call: Any, parameters: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._checks.clipped(tensors)
        self._step.calls.append((CLIP, own_line()))
        self._step.unclipped.update(self._gradients(tensors))
        return call()

    # ---- the optimizer ----

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Record the gradients before an update, or when its closure has computed them."""
        if not self.active or not self._nesting.begins(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begin_update(optimizer)
            return None
        begun: list[bool] = []

        def observed() -> Any:  # several times, where an optimizer searches along a line
            result = closure()
            if not begun:
                self._begin_update(optimizer)
            begun.append(True)
            return result

        if len(args) > 1:
            return (args[0], observed, *args[2:]), kwargs
        return args, {**kwargs, "closure": observed}

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record gradients and settings, and put the task's in their place."""
        self._is_traced = False
        self._step.calls.append((UPDATE, own_line()))
        self._checks.begin_update(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for position, parameter in enumerate(parameters):
            name = f"parameter {position}"
            self._names.setdefault(id(parameter), self.task.given.names.get(name, name))
        if not self.record.steps:
            self.record.note_framework()
        self._step.dtypes.update(str(parameter.dtype) for parameter in parameters)
        self._step.begin_update(
            self._gradients(parameters),
            {self._names[id(p)]: values.fingerprint(local(p)) for p in parameters},
            [values.settings_of(group) for group in optimizer.param_groups],
            [schedule.last_epoch for schedule in schedules_alive()],
            type(optimizer).__name__,
        )
        self._give_gradients(parameters)
        self._own.append(self._give_settings(optimizer))

    def _give_gradients(self, parameters: list[Tensor]) -> None:
        """Put the task's gradients of this step in place of the script's."""
        number = len(self.record.steps)
        if number >= len(self.task.given.gradients):
            return
        of_step = self.task.given.gradients[number]
        for parameter in parameters:
            given = self.task.given.for_rank(of_step.get(self._names[id(parameter)], ()), self.rank)
            if given and parameter.grad is not None and not parameter.grad.is_sparse:
                values.give(parameter.grad, given)

    def _give_settings(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Give the parameter groups the task's settings of this step; return the script's own."""
        number = len(self.record.steps)
        if number >= len(self.task.given.settings):
            return []
        own = []
        groups = zip(optimizer.param_groups, self.task.given.settings[number], strict=False)
        for group, given in groups:
            own.append({key: group[key] for key in given if key in group})
            group.update({key: value for key, value in given.items() if key in group})
        return own

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record the updated parameters; end the process after the task's last step."""
        if not self.active or not self._nesting.ends(optimizer):
            return
        own_settings = self._own.pop() if self._own else []
        for group, settings in zip(optimizer.param_groups, own_settings, strict=False):
            group.update(settings)
        self._checks.end_update(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._step.end_update(
            {self._names[id(p)]: self._piece(p) for p in parameters if id(p) in self._names}
        )
        number = len(self.record.steps)
        self.record.steps.append(self.task.keep_step(self.rank, number, self._step))
        self._step = RecordedStep()
        if len(self.record.steps) == self.task.steps:
            self.finish()

    def _gradients(self, parameters: list[Tensor]) -> dict[str, TensorPiece]:
        """Return this rank's pieces of the gradients, by the names of their parameters."""
        pieces = {}
        for position, parameter in enumerate(parameters):
            if parameter.grad is not None:
                name = self._names.get(id(parameter), f"parameter {position}")
                pieces[name] = self._piece(parameter.grad, parameter)
        return pieces

    def _piece(self, tensor: Tensor, parameter: Tensor | None = None) -> TensorPiece:
        """Return this rank's piece of a parameter, or of its gradient."""
        is_flat = id(tensor if parameter is None else parameter) in self._flat
        return values.piece_of(tensor, flat=self.world > 1 and is_flat)


def schedules_alive() -> list[LRScheduler]:
    """Return all schedules of this process.

    There is no list of them; they hold the optimizer, and not the other way round. Objects are
    asked for their type alone: one that stands for another (`weakref.proxy`) answers `isinstance`
    for that, or raises if it has gone.
    """
    return [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
