"""Finds mistakes of a training loop while it runs, on each rank alone and without a second run.

Parameters are looked at in the first steps and every so often; what is done at each step costs some
microseconds.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from lockstep.errors import listed
from lockstep.tensors import local
from lockstep.torch_compat.loss_functions import is_mean
from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES
from lockstep.verify.own_lines import own_line

_WRAPPERS = {*WRAPPER_NAMES, "module", "_forward_module"}
_DRAWS_OR_NORMALISES = (
    nn.Dropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)


@dataclass(frozen=True)
class LoopFinding:
    """Describes a mistake: its kind, what was seen, what to write, and the user's own line."""

    kind: str
    text: str
    fix: str = ""
    line: str = ""  # at which it shows, as `train.py:40`; empty if none is known


def plain_name(name: str) -> str:
    """Return a parameter's name as the unwrapped model has it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of wrappers, such as DistributedDataParallel.

    A wrapper's own mode says nothing.
    """
    while inner := [child for name, child in model.named_children() if name in _WRAPPERS]:
        (model,) = inner[:1]
    return model


def _in_training(model: nn.Module) -> bool:
    """Return whether a model is in training mode.

    The stage of a pipeline has no mode of its own, its segments do.
    """
    inner = _unwrapped(model)
    return any(part.training for part in getattr(inner, "segments_here", (inner,)))


def _name_in(model: nn.Module, name: str) -> str:
    """Return the unwrapped model's name of a parameter.

    The stage of a pipeline knows that of the model it is of.
    """
    naming = getattr(_unwrapped(model), "name_in_model", None)
    return plain_name(name) if naming is None else str(naming(plain_name(name)))


class Nesting:
    """Tells an optimizer's step from those inside of it, as ZeroRedundancyOptimizer takes them."""

    def __init__(self) -> None:
        self._outermost: Optimizer | None = None

    def begins(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer's step begins, and return whether it is the outermost one."""
        if self._outermost is None or self._outermost is optimizer:
            self._outermost = optimizer
            return True
        return False

    def ends(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer's step has ended, and return whether it was the outermost one."""
        if self._outermost is not optimizer:
            return False
        self._outermost = None
        return True


@dataclass(frozen=True)
class _LastUpdate:
    """The facts that are known of an optimizer's last update."""

    passes: int = -1  # backward passes that this process had begun by then
    cleared: bool = True  # whether its gradients were seen cleared since


class TrainingChecks:
    """Checks what one rank sees of a training loop.

    It checks the `first` steps, and then every `every`-th one.
    """

    def __init__(
        self,
        first: int = 3,
        every: int = 100,
        report: Callable[[LoopFinding], None] = lambda _finding: None,
    ) -> None:
        self.first = first
        self.every = every
        self.report = report
        self.findings: dict[str, LoopFinding] = {}
        self.steps = 0
        self.models: list[nn.Module] = []
        self.names: dict[int, str] = {}
        # Wrappers and schedules: models and optimizers know of none.
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: list[Any] = []  # weak references
        self.called: set[int] = set()  # ids of modules that were called in the first steps
        self._calls: Counter[tuple[int, bool]] = Counter()  # (model, in training mode) → calls
        self._batches = 0  # read from loaders since the last step
        # one, and its norm after the last backward pass
        self._gradient: tuple[Tensor, float] | None = None
        self._tied: dict[tuple[str, ...], None] = {}
        self._frozen: dict[str, Tensor] = {}
        self._before: dict[int, tuple[Tensor, bool]] = {}
        self._unmoved: Counter[str] = Counter()  # name → steps that left it, in spite of a gradient
        self._without_gradient: Counter[str] = Counter()  # name → steps in which it got none
        self._passes = 0  # backward passes since the last step
        self._all_passes = 0
        self._undivided_losses = True  # of this step: each is a mean that nothing has divided
        self._updates: dict[int, _LastUpdate] = {}  # by the id of the optimizer
        # of each optimizer: a parameter that had one at its last update
        self._with_gradient: dict[int, Tensor] = {}
        # a parameter whose gradient was clipped since the last step
        self._clipped: Tensor | None = None
        # of each sampler: the epoch of its last pass, and the number of steps when that began
        self._epochs: dict[int, tuple[int, int]] = {}
        self._trained: set[tuple[int, int]] = set()  # samplers and epochs of which a step was taken
        self._repeated: dict[int, bool] = {}  # sampler → whether its pass repeats an epoch's order
        # of the user's own: where wrappers, optimizers and schedules were made
        self._made_at: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._called_at: dict[int, str] = {}  # id of a module → where it was called last
        self._stepped_at: dict[int, str] = {}  # id of a schedule → where it was stepped last
        # modules that were put into evaluation mode, and where, in order
        self._evaluated: list[tuple[weakref.ref[nn.Module], str]] = []
        self._backward_at = ""  # where the last backward pass was begun
        self._clipped_at = ""
        self._epoch_at = ""  # where a pass was begun that repeats the order of another

    @property
    def looks(self) -> bool:
        """Return whether parameters are looked at in this step."""
        return self.steps < self.first or self.steps % self.every == 0

    def find(self, kind: str, text: str, fix: str = "", line: str = "") -> None:
        """Keep a finding, the first of its kind, and the user's own line at which it shows."""
        if kind not in self.findings:
            self.findings[kind] = LoopFinding(kind, text, fix, line)
            self.report(self.findings[kind])

    def note_made(self, made: Any) -> None:
        """Note a wrapper, an optimizer or a learning rate schedule, and where it is made."""
        self.made.add(made)
        self._made_at[made] = own_line()

    def left_training(self, module: nn.Module) -> None:
        """Note a module that is put into evaluation mode."""
        others = []
        for ref, line in self._evaluated:
            other = ref()
            if other is not None and other is not module:
                others.append((ref, line))
        self._evaluated = [*others, (weakref.ref(module), own_line())]

    def schedule_stepped(self, schedule: LRScheduler) -> None:
        """Note where a schedule is stepped."""
        if self.looks:
            self._stepped_at[id(schedule)] = own_line()

    # ---- forward ----

    def module_called(self, module: nn.Module) -> None:
        """Note a module that takes part in training, and where it is called."""
        self.called.add(id(module))
        if self.looks:
            self._called_at[id(module)] = own_line()

    def model_called(self, model: nn.Module) -> None:
        """Look at a model that is called from outside, with gradients."""
        if not any(model is each for each in self.models):
            self._begin_with(model)
        self._calls[id(model), _in_training(model)] += 1

    def batch_read(self) -> None:
        """Note a batch that a loader gives."""
        self._batches += 1

    def _begin_with(self, model: nn.Module) -> None:
        """Learn a model's names, tied and frozen parameters; note where a wrapper is bypassed."""
        self.models.append(model)
        shared: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(parameter), []).append(name)
            self.names.setdefault(id(parameter), _name_in(model, name))
            if not parameter.requires_grad and not isinstance(parameter, DTensor):
                self._frozen[name] = parameter.detach().clone()
        self._tied |= {tuple(names): None for names in shared.values() if len(names) > 1}
        if isinstance(model, DistributedDataParallel):
            return
        for wrapper in self._alive(DistributedDataParallel):
            inside = {id(module) for module in wrapper.modules()} - {id(wrapper)}
            if id(model) in inside:
                text = (
                    f"{type(model).__name__} is called beside the DistributedDataParallel that"
                    " wraps it: its gradients are not reduced"
                )
                fix = "call the wrapper, and not what it wraps"
                self.find("gradient synchronisation", text, fix, own_line())

    def _living_optimizers(self) -> list[Any]:
        """Return the optimizers that have stepped, and that are still there."""
        optimizers = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def _alive(self, kind: type) -> list[Any]:
        """Return the wrappers or schedules of a kind that are still there."""
        return [item for item in self.made if isinstance(item, kind)]

    # ---- backward ----

    def backward(self, loss: Any) -> None:
        """Look at a backward pass that begins."""
        for optimizer in self._living_optimizers():
            update = self._updates.get(id(optimizer), _LastUpdate())
            if not update.cleared and self._has_cleared(optimizer):
                self._updates[id(optimizer)] = replace(update, cleared=True)
        if self._clipped is not None and not _has_gradient(self._clipped):
            # set to zero since: the loop has updated without an optimizer
            self._clipped = None
            self._passes = 0
        if self._clipped is not None:
            text = (
                "a backward pass adds to the gradients after they are clipped, so that the step is"
                " longer than the norm allows"
            )
            fix = "clip once, when all gradients are there"
            self.find("clipping", text, fix, self._clipped_at)
        if self.looks:
            self._backward_at = own_line()
        self._passes += 1
        self._all_passes += 1
        self._undivided_losses &= isinstance(loss, Tensor) and is_mean(loss)
        if (
            self.looks
            and isinstance(loss, Tensor)
            and loss.numel() == 1
            and not bool(torch.isfinite(loss.detach()))
        ):
            text = f"the loss is {float(loss.detach())} in step {self.steps + 1}"
            self.find("not finite", text, line=self._backward_at)

    def _has_cleared(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimizer's last update are gone."""
        parameter = self._with_gradient.get(id(optimizer))
        if parameter is None or parameter.grad is None:
            return True
        return self.looks and not _has_gradient(parameter)

    def backward_done(self) -> None:
        """Note a gradient at the end of a backward pass."""
        optimizer = self._optimizers[0]() if self.looks and self._optimizers else None
        if optimizer is not None:
            parameters = optimizer.param_groups[0]["params"]
            parameter = next((p for p in parameters if p.grad is not None), None)
            self._gradient = None
            if parameter is not None:
                self._gradient = (parameter, float(local(parameter.grad).detach().norm()))

    def clipped(self, parameters: Iterable[Tensor]) -> None:
        """Look at gradients that are clipped."""
        if self.looks and self._clipped is None:
            self._check_accumulation()
        self._clipped = next((p for p in reversed(list(parameters)) if p.grad is not None), None)
        if self.looks:
            self._clipped_at = own_line()
        if self.looks and self._clipped is None:
            text = (
                "gradients are clipped where there are none: before the backward pass, or of a"
                " model that is not trained"
            )
            fix = "clip between loss.backward() and optimizer.step()"
            self.find("clipping", text, fix, self._clipped_at)

    # ---- the optimizer ----

    def begin_update(self, optimizer: Optimizer) -> None:
        """Look at what an optimizer is about to use."""
        if not any(reference() is optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        own = [p for group in optimizer.param_groups for p in group["params"]]
        self._check_new_gradients(optimizer, own)
        if not self.looks:
            return
        trained = [p for p in own if p.requires_grad]
        if trained and not any(p.grad is not None for p in trained):
            text = (
                "the optimizer's parameters get no gradient: it was made for another model, or"
                " before the model was converted or wrapped"
            )
            fix = "make the optimizer from the model that is called"
            self.find("stale optimizer", text, fix, self._made_at.get(optimizer, ""))
        self._before = {id(p): (local(p).detach().clone(), _has_gradient(p)) for p in own}
        if not _are_finite(own):
            text = f"a gradient of step {self.steps + 1} is not finite, and the optimizer uses it"
            self.find("not finite", text, line=own_line())
        if self._clipped is None:
            self._check_accumulation()

    def _check_new_gradients(self, optimizer: Optimizer, own: list[Tensor]) -> None:
        """Find an update with the gradients of the one before it, or with a sum of both."""
        last = self._updates.get(id(optimizer), _LastUpdate())
        with_gradient = [p for p in own if p.grad is not None]
        if last.passes == self._all_passes and with_gradient:
            text = (
                f"step {self.steps + 1} uses the gradients of the step before: no backward pass"
                " came between them"
            )
            fix = "call optimizer.step() once for each step's backward passes"
            self.find("update without a gradient", text, fix, own_line())
        elif not last.cleared and self.looks:
            names = [self.names.get(id(p), "a parameter") for p in with_gradient]
            text = (
                f"step {self.steps + 1} adds to the gradients of the step before in"
                f" {listed(names, 5)}"
            )
            fix = "optimizer.zero_grad() after each optimizer.step()"
            self.find("gradients not zeroed", text, fix, own_line())

    def _check_accumulation(self) -> None:
        """Find a step that adds up the gradients of micro-batches, and divides by nothing.

        The gradient after the last backward pass is then still the one that is used.
        """
        # Losses of several networks, or terms that are differentiated one by one, belong to the
        # same batch.
        if not (
            1 < self._passes <= self._batches
            and self._undivided_losses
            and self.steps
            and self._gradient
        ):
            return
        parameter, norm = self._gradient
        if (
            parameter.grad is not None
            and abs(float(local(parameter.grad).norm()) - norm) <= 1e-6 * norm
        ):
            text = (
                f"a step adds up the gradients of {self._passes} micro-batches, and nothing divides"
                f" their mean losses: it is {self._passes} × as long as that of one batch"
            )
            fix = f"(loss / {self._passes}).backward()"
            self.find("gradient accumulation", text, fix, self._backward_at)

    def end_update(self, optimizer: Optimizer) -> None:
        """Look at what an optimizer has done."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if self.looks:
            self._check_moved(optimizer, own)
            self._check_schedules(optimizer)
            self._check_frozen()
        self._updates[id(optimizer)] = _LastUpdate(self._all_passes, cleared=False)
        with_gradient = next((p for p in own if p.grad is not None), None)
        if with_gradient is not None:
            self._with_gradient[id(optimizer)] = with_gradient
        self._check_order()
        self.steps += 1
        self._passes = 0
        self._batches = 0
        self._clipped = None
        self._undivided_losses = True
        if self.steps == self.first:
            self._check_models()
        if self.steps > 1 and not all(map(_in_training, self.models)):
            self._check_modes(own)

    def _check_frozen(self) -> None:
        """Find parameters that require no gradient, and have changed."""
        for model in self.models:
            moved = [
                _name_in(model, name)
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if name in self._frozen
                and not parameter.requires_grad
                and parameter.shape == self._frozen[name].shape
                and not torch.equal(parameter, self._frozen[name])
            ]
            if moved:
                text = f"{listed(moved, 5)} do not require gradients, and have changed"
                self.find("frozen parameters", text, line=own_line())

    def _check_modes(self, own: list[Tensor]) -> None:
        """Find a model that evaluation code has left in evaluation mode."""
        updated = {id(p) for p in own if p.grad is not None}
        for model in self.models:
            was_in_training = self._calls[id(model), True] > 0
            is_updated = not updated.isdisjoint(map(id, model.parameters()))
            if (
                was_in_training
                and is_updated
                and not _in_training(model)
                and _draws_or_normalises(model)
            ):
                self._find_evaluation_mode(model, f", from step {self.steps} on")

    def _find_evaluation_mode(self, model: nn.Module, since: str) -> None:
        text = (
            f"the model is trained in evaluation mode{since}: without dropout, and with the running"
            " statistics of its normalisations"
        )
        fix = "model.train() before the training loop and after evaluation"
        parts = set(map(id, model.modules()))
        lines = [line for module, line in self._evaluated if id(module()) in parts]
        self.find("evaluation mode", text, fix, lines[-1] if lines else "")

    def _check_moved(self, optimizer: Optimizer, own: list[Tensor]) -> None:
        """Note parameters that an update with a gradient left unchanged, or that have none."""
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        for p in own:
            before, has_gradient = self._before.get(id(p), (None, False))
            name = self.names.get(id(p), "a parameter")
            if before is None or not before.numel() or before.shape != local(p).shape:
                continue
            if (
                has_gradient
                and max(rates, default=1.0) > 0
                and torch.equal(before, local(p).detach())
            ):
                self._unmoved[name] += 1
            elif p.requires_grad and p.grad is None:
                self._without_gradient[name] += 1
        self._before = {}

    def _check_schedules(self, optimizer: Optimizer) -> None:
        """Find rates that no schedule has set, and schedules that are stepped wrongly."""
        schedules = [schedule for schedule in self._alive(LRScheduler) if schedule.last_epoch > 0]
        for schedule in schedules:
            rates = [float(rate) for rate in schedule.get_last_lr()]
            mine = [float(group["lr"]) for group in optimizer.param_groups]
            if (
                _steps(schedule, optimizer)
                and len(rates) == len(mine)
                and len(schedules) == 1
                and rates != mine
            ):
                text = (
                    f"the optimizer steps with learning rate {mine[0]:.6g}, and its schedule says"
                    f" {rates[0]:.6g}"
                )
                fix = "let nothing but the schedule set the learning rate"
                self.find("learning rate schedule", text, fix)
        optimizers = (optimizer, *self._living_optimizers())
        if schedules and not any(
            _steps(schedule, each) for schedule in schedules for each in optimizers
        ):
            text = "the schedule changes the learning rate of an optimizer that never steps"
            fix = "make the schedule for the optimizer that steps"
            line = self._made_at.get(schedules[-1], "")
            self.find("learning rate schedule", text, fix, line)
        stepped = max((schedule.last_epoch for schedule in schedules), default=0)
        updates = self.steps + 1
        if (
            updates > 1
            and self._all_passes >= 1.5 * updates
            and stepped >= self._all_passes - 1 > updates
        ):
            text = (
                f"the schedule was stepped {stepped} times in {updates} optimizer steps: once for"
                " each micro-batch"
            )
            fix = "step it once for each optimizer.step()"
            line = self._stepped_at.get(id(schedules[-1]), "")
            self.find("learning rate schedule", text, fix, line)

    def _check_models(self) -> None:
        """Look at the models after the first steps: who trains their parameters, in which mode."""
        optimizers = self._living_optimizers()
        in_optimizers = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for model in self.models:
            self._check_optimizers_of(model, optimizers, in_optimizers)
            self._check_tied_weights(model)
        self._check_unmoved()
        self._check_detached()
        for model in self.models:
            calls = self._calls[id(model), False]
            in_training = self._calls[id(model), True]
            is_trained = any(id(p) in in_optimizers for p in model.parameters())
            if calls > 1 and not in_training and is_trained and _draws_or_normalises(model):
                self._find_evaluation_mode(model, "")

    def _check_optimizers_of(
        self, model: nn.Module, optimizers: list[Any], in_optimizers: set[int]
    ) -> None:
        """Find parameters that require gradients, and that no optimizer has.

        A model none of whose parameters is in an optimizer is frozen on purpose, and one that is
        flattened has other parameters than its optimizer.
        """
        trained = {
            _name_in(model, name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        missing = [
            name
            for name, parameter in trained.items()
            if id(parameter) not in in_optimizers and parameter.is_leaf
        ]
        is_flattened = any(
            "FullyShardedDataParallel" in type(module).__name__ for module in model.modules()
        )
        if missing and len(missing) < len(trained) and not is_flattened:
            text = f"{listed(missing, 5)} require gradients, and no optimizer has them"
            fix = "give the optimizer all of model.parameters(), after the last of them is made"
            line = self._made_at.get(optimizers[-1], "") if optimizers else ""
            self.find("parameters without an optimizer", text, fix, line)

    def _check_tied_weights(self, model: nn.Module) -> None:
        """Find weights that were one tensor when the model was first seen, and are several now."""
        now = dict(model.named_parameters(remove_duplicate=False))
        for names in self._tied:
            tensors = {id(now[name]) for name in names if name in now}
            if len(tensors) > 1 and all(name in now for name in names):
                text = " and ".join(map(plain_name, names))
                self.find("tied weights", f"{text} were one tensor, and are trained apart now")

    def _check_unmoved(self) -> None:
        """Find parameters with gradients that no update has changed."""
        names = [name for name, steps in self._unmoved.items() if steps >= self.first]
        if names:
            text = f"{listed(names, 5)} have gradients, and no update changes them"
            self.find("parameters that do not move", text)

    def _check_detached(self) -> None:
        """Find parameters of modules that are called, and that never get a gradient."""
        modules = [
            (_name_in(model, name), module)
            for model in self.models
            for name, module in model.named_modules()
        ]
        called = {name for name, module in modules if id(module) in self.called}
        detached = [
            name
            for name, steps in self._without_gradient.items()
            if steps >= self.first and _owner(name) in called
        ]
        if not detached or "stale optimizer" in self.findings:
            return
        text = (
            f"{listed(detached, 5)} take part in the forward pass, and got no gradient in"
            f" {self.first} steps"
        )
        fix = "let no detach(), no_grad() or .data cut them off from the loss"
        owner = _owner(detached[0])
        lines = [self._called_at.get(id(module), "") for name, module in modules if name == owner]
        self.find("parameters without gradients", text, fix, next(filter(None, lines), ""))

    # ---- data and checkpoints ----

    def sampler_begun(self, sampler: DistributedSampler[Any]) -> None:
        """Look at a pass over the data that begins."""
        epoch, steps = self._epochs.get(id(sampler), (-1, self.steps))
        if self.steps > steps:  # else it was a look at a batch, and not an epoch
            self._trained.add((id(sampler), epoch))
        self._epochs[id(sampler)] = (sampler.epoch, self.steps)
        again = (id(sampler), sampler.epoch) in self._trained
        self._repeated[id(sampler)] = again and sampler.shuffle
        if self._repeated[id(sampler)]:
            self._epoch_at = own_line()

    def _check_order(self) -> None:
        """Find an epoch that repeats the order of another, when a step is taken of it."""
        if any(self._repeated.values()):
            text = (
                "each epoch reads the samples in the same order: DistributedSampler.set_epoch is"
                " not called"
            )
            fix = "sampler.set_epoch(epoch) before each epoch"
            self.find("order of samples", text, fix, self._epoch_at)

    def loaded(self, model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
        """Look at the result of `load_state_dict(strict=False)`."""
        if missing and unexpected and 2 * len(missing) > len(list(model.state_dict())):
            text = (
                f"load_state_dict(strict=False) left out {len(missing)} tensors, such as"
                f" {missing[0]}, and did not know {len(unexpected)}, such as {unexpected[0]}"
            )
            fix = "give the names of the checkpoint the prefix of the model's"
            self.find("checkpoint not loaded", text, fix, own_line())


def _owner(parameter_name: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter_name.rpartition(".")[0]


def _draws_or_normalises(model: nn.Module) -> bool:
    return any(isinstance(module, _DRAWS_OR_NORMALISES) for module in model.modules())


def _steps(schedule: LRScheduler, optimizer: Optimizer) -> bool:
    """Return whether a schedule belongs to an optimizer.

    It may also belong to a wrapper around the optimizer, which has its groups.
    """
    return (
        schedule.optimizer is optimizer or schedule.optimizer.param_groups is optimizer.param_groups
    )


def _are_finite(parameters: list[Tensor]) -> bool:
    """Return whether all gradients are numbers; sparse ones are not read."""
    norms = [
        local(p.grad).detach().norm().float().cpu()
        for p in parameters
        if p.grad is not None and not p.grad.is_sparse
    ]
    return not norms or bool(torch.isfinite(torch.stack(norms)).all())


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(local(parameter.grad).any())
