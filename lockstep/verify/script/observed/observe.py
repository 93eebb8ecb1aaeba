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
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.failures.failure import read_all, short_path
from lockstep.files.paths import RUNS
from lockstep.launch.script import run_script
from lockstep.launch.worker import mark_done
from lockstep.machine.environment import RANK_0_OF_1, rank_facts
from lockstep.machine.output import flush_both
from lockstep.tensors import local
from lockstep.torch_compat import draw_patches, parallel_patches, replaced_calls, script_patches
from lockstep.torch_compat.function_transforms import has_no_values
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.verify.accelerate_variables import accelerate_variables
from lockstep.verify.loop.models import ids_of_parameters
from lockstep.verify.loop.updates import Nesting
from lockstep.verify.own_lines import is_own, line_of_definition, own_line
from lockstep.verify.script.observed import values
from lockstep.verify.script.observed.broadcasts import product_in, watch_losses
from lockstep.verify.script.observed.draws import BatchKey, LoopDraw, ObservedDraws
from lockstep.verify.script.observed.given_updates import GivenUpdates
from lockstep.verify.script.observed.hangs import ScriptHangWatch
from lockstep.verify.script.observed.loaders import ObservedLoaders, number_of
from lockstep.verify.script.observed.noted_calls import NotedCalls
from lockstep.verify.script.observed.observed_models import STATISTICS, ObservedModels
from lockstep.verify.script.observed.observed_pass import AppliedConditions, GeneratorStates
from lockstep.verify.script.observed.orders import ObservedOrders
from lockstep.verify.script.observed.passed_on import PassedOn
from lockstep.verify.script.observed.reads import LoopRead, ObservedReads
from lockstep.verify.script.observed.saved_files import SavedFiles
from lockstep.verify.script.observed.traced_operations import (
    BACKWARD,
    BEFORE,
    FORWARD,
    UPDATE,
    TracedOperations,
)
from lockstep.verify.script.observed.untrained import UntrainedNetworks
from lockstep.verify.script.record import AUTOCAST, CLIP, RecordedStep, ScriptRecord
from lockstep.verify.script.task import ScriptTask, for_ranks
from lockstep.verify.training_checks import TrainingChecks
from lockstep.verify.watch import verified_part

# seconds to wait for the other ranks to finish their last step; longer than `ScriptHangWatch` does
_WAIT = 60.0
_MOST_COLLECTIVES = 10_000


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
    if task.accelerate is not None:
        os.environ.update(accelerate_variables(task.accelerate, facts.world_size))
    run_script(
        task.module or task.script,
        [for_ranks(argument, facts.world_size) for argument in task.arguments],
        kind="module" if task.module else "file",
    )
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
        self._models = ObservedModels(
            task,
            self.record,
            rank,
            world,
            lambda: self._checks.made.of_kind(torch.optim.Optimizer),
            self._own_gradient,
        )

        # where the script is in its step
        self._inside: list[str] = []  # modules that call each other; empty names are not known yet
        self._in_backward = False
        self._in_schedule = False  # of a pipeline
        self._has_passed = False  # whether the last batch of the step has passed backward
        self._is_traced = False
        self._passes = 0  # backward passes
        self._is_between = True  # two steps: nothing of the next was read, drawn or called yet
        self._calls_backward = False  # else the script gives parameters their gradients by hand
        self._generators = GeneratorStates()
        self._conditions = AppliedConditions(task.conditions, rank)
        self._noted = NotedCalls(
            self.record, task.conditions, self._generators, self._conditions, lambda: self.active
        )

        # its optimizers
        self._nesting = Nesting()
        self._given_updates = GivenUpdates(task.given, rank)

        # others that observe
        self._checks = TrainingChecks(
            task.steps, 1, lambda finding: self.record.findings.append(vars(finding))
        )
        self._loaders = ObservedLoaders(task, self.record, rank, self._batch_read)
        self._draws = ObservedDraws(
            task.given.draws,
            self._sources,
            lambda: self._loaders.last or (-1, self._passes),
            self._drawn,
            self.record.unkeyed.append,
            lambda: bool(self._inside),
            self._draw,
            is_own,
            self.record.early.append,
        )
        reads = ObservedReads(
            task.given.reads,
            lambda: self._passes,
            self._is_reading,
            is_own,
            self._read,
        )
        script_patches.patch_reads(reads.indexed, reads.made)
        self._untrained = UntrainedNetworks(
            lambda: ids_of_parameters(self._checks.made.of_kind(torch.optim.Optimizer))
        )
        self._orders = ObservedOrders(
            number_of,
            lambda: len(self.record.steps),
            lambda: self._draws.count,
            self._checks.find,
        )
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
        parallel_patches.patch_collectives(self._collective)
        script_patches.patch_made(self._made)
        parallel_patches.patch_hooks(self._noted.hook_registered)
        script_patches.patch_samplers(self._checks.sampler_begun)
        script_patches.patch_orders(self._orders.begun)
        script_patches.patch_loading(self._loaded)
        script_patches.patch_scalers(self._checks.scaled, self._checks.unscaled)
        parallel_patches.patch_synchronisation(self._checks.synchronised)
        saved = SavedFiles(self.task.saved, lambda: bool(self.record.first))
        script_patches.patch_saving(saved.save)
        saved.watch()
        parallel_patches.patch_model_parallel(self.record.together.update, self._around_schedule)
        parallel_patches.patch_sharding(self._noted.module_sharded)
        script_patches.patch_modes(self._checks.left_training)
        script_patches.patch_modules(self._module_made)
        script_patches.patch_schedules(self._schedule_stepped)
        script_patches.patch_plateaus(self._noted.plateau_looked_for)
        draw_patches.patch_seeds(self._noted.seeded)
        script_patches.patch_products(self._multiplied)
        replaced_calls.patch_names()
        watch_losses(self._noted.broadcast)
        if self.task.conditions.traced:  # what is made before a step, too
            passed_on = PassedOn()
            passed_on.start()
            traced = TracedOperations(
                self._module_and_phase,
                lambda operation: self._step.operations.append(operation),
                passed_on.line_of,
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
        self.record.note_orders(self._orders.complete())
        task = self.task
        task.write_record(self.rank, self.record)
        deadline = time.monotonic() + _WAIT
        while time.monotonic() < deadline and not read_all(task.folder):  # the failures of others
            # Looked at first: a rank that hangs writes its record once all are idle.
            all_have_ended = all(task.record_file(rank).exists() for rank in range(self.world))
            if self._hang_watch.are_idle():
                time.sleep(_WAIT)  # `ScriptHangWatch` ends this process
            if all_have_ended:
                break
            time.sleep(0.01)
        mark_done()  # where the command is Lockstep's launcher
        os._exit(0)

    def _collective(self, name: str, given: Any) -> None:
        """Note a collective that the script calls: where, and what it does to gradients there."""
        size = sum(leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        frame = traceback.extract_stack(limit=3)[0]
        if len(self.record.collectives) < _MOST_COLLECTIVES:
            self.record.collectives.append(
                (name, size, f"{short_path(frame.filename)}:{frame.lineno}")
            )
        is_forward = not self._is_between and not self._in_backward and not self._has_passed
        if size and is_forward:
            self._step.note_exchange()
        if is_forward and is_own(frame.filename) and _requires_gradients(given):
            self._step.note_cut(f"{short_path(frame.filename)}:{frame.lineno}")
        if size and is_own(frame.filename):
            self._step.calls.append((name, f"{short_path(frame.filename)}:{frame.lineno}"))

    # ---- what is made, read and drawn ----

    def _made(self, made: Any) -> None:
        self._checks.note_made(made)
        if isinstance(made, torch.optim.Optimizer):
            self.record.lines.optimizers.append(own_line())
            self._draws.begin()

    def _schedule_stepped(self, schedule: LRScheduler) -> None:
        self._checks.schedule_stepped(schedule)
        self._noted.schedule_stepped(schedule)

    def _module_made(self, module: nn.Module) -> None:
        if self.active and not self._generators.in_pass:
            self._models.module_made(module)

    def _loaded(self, module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
        self._untrained.loaded(module)
        self._checks.loaded(module, missing, unexpected)

    def _multiplied(self, mine: Tensor, other: Tensor) -> None:
        # Within modules a product of two shapes is part of a model.
        in_loop = self._generators.in_pass and not self._inside and not self._in_backward
        if in_loop and not torch.compiler.is_compiling():
            text = product_in(mine, other)
            if text:
                self._noted.broadcast(text)

    def _batch_read(self) -> None:
        self._checks.batch_read()
        self._has_passed = False
        self._draws.begin()
        self._trace()

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

    def _drawn(self, draw: LoopDraw) -> None:
        self._is_between = False
        self.record.draws.append(replace(draw, after=self._has_passed))

    def _read(self, read: LoopRead) -> None:
        self._is_between = False
        self.record.reads.append(read)

    def _is_reading(self) -> bool:
        """Return whether the loop reads samples by itself, outside of modules and passes."""
        return not self._inside and not self._in_backward and self._loaders.last is None

    def _draw(self, call: Callable[[], Any]) -> Any:
        """Draw: outside of modules the numbers themselves, which one process is given, too."""
        return call() if self._inside else self._conditions.draw_outside_of_modules(call)

    # ---- forward ----

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Note a module that is called; a micro-batch begins with an entire model in training."""
        if has_no_values():
            return
        self._is_between = False
        self._inside.append(self._models.module_name(module) or "")
        device = next(module.parameters(), torch.empty(0)).device.type
        if torch.is_autocast_enabled(device):
            self._step.dtypes.add(f"{AUTOCAST} to {torch.get_autocast_dtype(device)}")
        if self._generators.in_pass and not self._in_backward:
            # also where a part of a model runs without gradients
            self._checks.module_called(module)
        is_inner = len(self._inside) > 1
        if self.active and not is_inner and not self._in_backward:
            self._untrained.called(module)
        if is_inner or not torch.is_grad_enabled() or self._in_backward or not self.active:
            return
        self._generators.note_call()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return  # a module for the loss
        self._checks.model_called(module)
        if not module.training:
            if not self._generators.in_pass:  # it is evaluated, with gradients that nobody uses
                self._loaders.note_evaluation()
            return
        if module not in self._models:
            self.watch()
            self._models.begin_with(module)
        self._models.note_call(module)
        if self.task.conditions.fixed_statistics:
            for inner in module.modules():
                if isinstance(inner, STATISTICS):
                    inner.eval()
        if not self._generators.in_pass:
            self._begin_pass()

    def _trace(self) -> None:
        """Trace operations from here to the update, if the task says so."""
        self._is_traced = self.task.conditions.traced

    def _module_and_phase(self) -> tuple[str, str] | None:
        """Return the module that runs, and the phase of the step; None if it is not traced."""
        if self._is_traced:
            return self._inside[-1] if self._inside else "", self._phase()
        has_begun = self._passes or self._generators.in_pass or self.record.steps
        return ("", BEFORE) if self.task.conditions.traced_whole and not has_begun else None

    def _phase(self) -> str:
        if self._in_backward:
            return BACKWARD
        return UPDATE if self._has_passed else FORWARD

    def _begin_pass(self) -> None:
        """Note the generators' states, and change how this pass draws and rounds if told so."""
        self._generators.begin()
        self._has_passed = False
        self._trace()
        self._conditions.begin(self._passes)
        self._generators.note_call()

    def _after_forward(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note what a module returned, and the inputs of an entire model."""
        # torch leaves out the keyword arguments where a forward pass has raised.
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        if has_no_values():
            return
        self._inside.pop()
        if not self._generators.in_pass or self._in_backward or not torch.is_grad_enabled():
            return
        if not self._inside:
            self._generators.note_moved()
        name = self._models.module_name(module)
        if name is not None:
            self._step.flow.append((name, *values.two_numbers(output)))
        if not self._inside and module in self._models:
            self._step.add_inputs(values.rows((args, kwargs)), values.elements((args, kwargs)))

    # ---- backward ----

    def _around_backward(self, call: Any, first: Any) -> Any:
        """Record what a backward pass starts from, and look at the loop when it is done."""
        if self._in_backward or not self.active:  # recomputation starts backward passes of its own
            return call()
        self._calls_backward = True
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
        self._calls_backward = True
        loss = parallel_patches.loss_of_schedule(schedule)
        self.record.lines.note_loss(line_of_definition(loss))
        self._step.calls.append((BACKWARD, own_line()))
        self._begin_pass()
        self._in_schedule = True
        self._step.losses.append(0.0)
        self._step.read.append(self._loaders.take_unused())
        self._checks.backward(None)
        try:
            return call()
        finally:
            self._checks.backward_done()
            self._generators.note_moved()
            self._record_draws()
            self._in_schedule = False
            self._end_pass()

    def _record_draws(self) -> None:
        draw = self._generators.draw()
        if draw is not None:
            self._step.draws.append(draw)

    def _end_pass(self) -> None:
        self._conditions.end(self._generators.before)
        self._generators.end()
        self._has_passed = True
        self._passes += 1

    def _own_gradient(self, name: str, gradient: Tensor) -> None:
        """Add what a backward pass computes of a gradient, before ranks are reduced.

        Those that `torch.autograd.grad` returns, as for an inner step, are not accumulated.
        """
        if not self._in_backward and not self._in_schedule:
            return
        piece = values.piece_of(gradient)
        of_step = self._step.own.setdefault(name, piece)
        if of_step is not piece:
            of_step.add(piece)

    def _around_clipping(self, call: Any, parameters: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._checks.clipped(tensors)
        self._step.calls.append((CLIP, own_line()))
        self._step.unclipped.update(self._models.gradients(tensors))
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
        if not self._calls_backward:
            self._note_pass_by_hand()
        self._step.calls.append((UPDATE, own_line()))
        self._checks.begin_update(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = self._models.name_by_position(parameters)
        if not self.record.steps:
            self.record.note_framework()
        self._step.dtypes.update(str(parameter.dtype) for parameter in parameters)
        self._step.dtypes.update(self._noted.sharded_dtypes)
        self._step.begin_update(
            self._models.gradients(parameters),
            {name: values.fingerprint(local(p)) for name, p in zip(names, parameters, strict=True)},
            [values.settings_of(group) for group in optimizer.param_groups],
            [schedule.last_epoch for schedule in schedules_alive()],
            type(optimizer).__name__,
        )
        self._given_updates.begin(len(self.record.steps), optimizer, names, parameters)

    def _note_pass_by_hand(self) -> None:
        """Take what comes before an update for a pass, where no backward pass is called."""
        self._step.losses.append(0.0)
        self._step.read.append(self._loaders.take_unused())
        self._record_draws()
        self._end_pass()

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record the updated parameters; end the process after the task's last step."""
        if not self.active or not self._nesting.ends(optimizer):
            return
        self._given_updates.end(optimizer)
        self._checks.end_update(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._step.end_update(
            {
                name: self._models.piece(p)
                for p in parameters
                if (name := self._models.name_of(p)) is not None
            },
            *self._untrained.take(),
        )
        number = len(self.record.steps)
        self.record.steps.append(self.task.keep_step(self.rank, number, self._step))
        self._step = RecordedStep()
        self._is_between = True
        if not self._loaders.were_made:  # what comes before the next pass may read samples
            self._has_passed = False
            self._trace()
        if len(self.record.steps) == self.task.steps:
            self.finish()


def _requires_gradients(tree: Any) -> bool:
    """Return whether gradients go through a tensor of a tree here."""
    leaves = tree_leaves(tree) if torch.is_grad_enabled() else []
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def schedules_alive() -> list[LRScheduler]:
    """Return all schedules of this process.

    There is no list of them; they hold the optimizer, and not the other way round. Objects are
    asked for their type alone: one that stands for another (`weakref.proxy`) answers `isinstance`
    for that, or raises if it has gone.
    """
    return [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
