"""Finds mistakes of a training loop while it runs, on each rank alone and without a second run.

Parameters are looked at in the first steps and every so often; what is done at each step costs some
microseconds. The checks are in `loop/`, by what they look at; `TrainingChecks` hands them what
happens, in the order of a step.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from lockstep.verify.loop.findings import LoopFinding, LoopLog
from lockstep.verify.loop.made import MadeObjects
from lockstep.verify.loop.models import ModelChecks
from lockstep.verify.loop.passes import PassChecks
from lockstep.verify.loop.samplers import SamplerChecks
from lockstep.verify.loop.schedules import ScheduleChecks
from lockstep.verify.loop.updates import UpdateChecks, parameters_of
from lockstep.verify.loop.wrappers import WrapperChecks


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
        self._log = LoopLog(first, every, report)
        self.made = MadeObjects()
        self._models = ModelChecks(self._log, self.made)
        self._passes = PassChecks(self._log)
        self._updates = UpdateChecks(self._log, self.made, self._models, self._passes)
        self._wrappers = WrapperChecks(self._log, self.made)
        self._schedules = ScheduleChecks(self._log, self.made)
        self._samplers = SamplerChecks(self._log)

    @property
    def first(self) -> int:
        """The number of steps that are looked at from the beginning."""
        return self._log.first

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._log.steps

    @property
    def looks(self) -> bool:
        """Return whether parameters are looked at in this step."""
        return self._log.looks

    @property
    def findings(self) -> dict[str, LoopFinding]:
        """The findings so far, by their kind."""
        return self._log.findings

    @property
    def models(self) -> list[nn.Module]:
        """The models that were called from outside, with gradients."""
        return self._models.models

    @property
    def names(self) -> dict[int, str]:
        """The names of the models' parameters, by their ids."""
        return self._models.names

    def find(self, kind: str, text: str, fix: str = "", line: str = "") -> None:
        """Keep a finding, the first of its kind, and the user's own line at which it shows."""
        self._log.find(kind, text, fix, line)

    # ---- what is made, read and loaded ----

    def note_made(self, made: Any) -> None:
        """Note a wrapper, an optimizer or a learning rate schedule, and where it is made."""
        self.made.note(made)

    def batch_read(self) -> None:
        """Note a batch that a loader gives."""
        self._passes.batch_read()

    def sampler_begun(self, sampler: DistributedSampler[Any]) -> None:
        """Look at a pass over the data that begins."""
        self._samplers.begun(sampler)

    def loaded(self, model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
        """Look at the result of `load_state_dict(strict=False)`."""
        self._models.loaded(model, missing, unexpected)

    # ---- a step ----

    def left_training(self, module: nn.Module) -> None:
        """Note a module that is put into evaluation mode."""
        self._models.left_training(module)

    def module_called(self, module: nn.Module) -> None:
        """Note a module that takes part in training, and where it is called."""
        self._models.module_called(module)

    def model_called(self, model: nn.Module) -> None:
        """Look at a model that is called from outside, with gradients."""
        self._models.model_called(model)
        self._wrappers.model_called(model)

    def backward(self, loss: Any) -> None:
        """Look at a backward pass that begins."""
        self._updates.note_cleared()
        self._wrappers.backward()
        self._passes.begin(loss)

    def backward_done(self) -> None:
        """Note a gradient at the end of a backward pass."""
        self._passes.end(self._updates.first_optimizer)

    def synchronised(self, is_so: bool) -> None:
        """Note whether FSDP is told to reduce gradients from now on."""
        self._passes.synchronised(is_so)

    def scaled(self, scaler: Any) -> None:
        """Note the scaler of a loss."""
        self._passes.scaled(scaler)

    def unscaled(self) -> None:
        """Note that gradients are divided by the scale of their losses."""
        self._passes.unscaled()

    def clipped(self, parameters: Iterable[Tensor]) -> None:
        """Look at gradients that are clipped."""
        self._passes.clipped(parameters)

    def begin_update(self, optimizer: Optimizer) -> None:
        """Look at what an optimizer is about to use."""
        self._wrappers.begin_update(parameters_of(optimizer))
        self._updates.begin(optimizer)

    def schedule_stepped(self, schedule: LRScheduler) -> None:
        """Note where a schedule is stepped."""
        self._schedules.stepped(schedule)

    def end_update(self, optimizer: Optimizer) -> None:
        """Look at what an optimizer has done."""
        own = parameters_of(optimizer)
        if self.looks:
            self._updates.check_moved(optimizer, own)
            self._schedules.check(optimizer, self._updates.optimizers, self._passes.total)
        self._updates.end(optimizer, own)
        self._samplers.check_order()
        self._log.end_step()
        self._passes.end_step()
        if self.steps == self.first:
            self._check_first_steps()
        if self.steps > 1 and not self._models.all_in_training:
            self._models.check_modes(own)

    def _check_first_steps(self) -> None:
        """Look at the models after the first steps: who trains their parameters, in which mode."""
        optimizers = self._updates.optimizers
        self._models.check_optimizers(optimizers)
        self._updates.check_unmoved()
        self._models.check_detached(self._updates.without_gradient)
        self._models.check_first_modes(optimizers)
