"""Records what a trainer's steps compute, and stores the reference's steps on disk.

The updates are recorded, too.

    FOLDER/CASE/start.safetensors              first values of parameters and buffers
    FOLDER/CASE/step-00000003.pickle           samples, loss, norm of its fourth step
    FOLDER/CASE/step-00000003.safetensors      gradients before the update, values after it, buffers
    FOLDER/CASE/states/step-00000004/          a checkpoint: the start of each topology's next step

In plain mode, gradients have bounds: by how much a sum of the same micro-batches in another order
may differ. Two sums of M terms differ by at most 2·(M−1)·u·Σ|term|, element by element, with u the
unit roundoff of the sum's dtype (Higham 2002, section 4.2). A fraction of the largest element is
added, for weights that are used several times.

Tests: tests/verify/test_updates.py, tests/verify/test_reference.py
"""

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.parallel.execution.passes import ForwardBackward
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.run_directory.records import StepRecord, plain
from lockstep.tensors import bytes_of, fingerprint, local
from lockstep.torch_compat.optimizer_step import run_first
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.trainer import Trainer

GRADIENT = "gradient"
BOUND = "bound"
VALUE = "value"
BUFFER = "buffer"
# Of a group: what chooses a kernel, and what schedules start from; the learning rate itself is
# compared.
_NOT_COMPARED = {"params", "fused", "foreach", "capturable", "differentiable", "initial_lr"}


@dataclass
class UpdateFacts:
    """Records what one rank saw of an update; keys are names of parameters."""

    # parameter → option of its group at the update → its value as text; {} if the optimizer lacks
    # it
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    # further name of a parameter → the name by which it is listed
    tied: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)  # parameters that want no gradient
    # parameters with a gradient other than zero before the first forward pass
    stale: list[str] = field(default_factory=list)
    # parameters whose state of the optimizer changes between the start and the update
    state_changed: list[str] = field(default_factory=list)
    # parameters whose gradients were changed by hooks of the optimizer
    by_hooks: list[str] = field(default_factory=list)
    # parameters whose values are those of before the step
    unmoved: list[str] = field(default_factory=list)
    # parameters whose values changed before the optimizer's update, or after it
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    called: bool = False  # whether the optimizer was called


@dataclass
class StepFacts:
    """One step, without its tensors."""

    samples: dict[int, str] = field(default_factory=dict)  # micro-batch → hash of its contents
    loss: float = 0.0  # loss, norm: as in the record
    norm: float = 0.0
    learning_rate: float = 0.0  # largest of the optimizer's groups
    scale: float = 1.0  # factor by which the sum of the micro-batches' gradients was multiplied
    skipped: bool = False  # whether the update was left out
    norms: dict[str, float] = field(default_factory=dict)  # parameter → 2-norm of its gradient
    # bound, elements: 2-norm of the bounds of all gradients, and their number of elements
    bound: float = 0.0
    elements: int = 0
    # (module, fingerprint of its output) in the order in which forward passes ended, if they are
    # recorded
    outputs: list[tuple[str, int]] = field(default_factory=list)
    update: UpdateFacts = field(default_factory=UpdateFacts)


class Trace:
    """Folder of one case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states = folder / "states"

    def state(self, step: int) -> Path:
        """Return the path of the checkpoint before step `step`."""
        return self.states / f"step-{step:08d}"

    def write(
        self, step: int | None, facts: StepFacts | None, tensors: Mapping[str, Tensor]
    ) -> None:
        """Write a step; None: the first values."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # The format rejects tied or viewed storage.
        on_host = {
            key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()
        }
        save_file(on_host, self._path(step, "safetensors"))
        if facts is not None:
            self._path(step, "pickle").write_bytes(pickle.dumps(facts))

    def facts(self, step: int) -> StepFacts:
        """Read a step without its tensors."""
        facts: StepFacts = pickle.loads(self._path(step, "pickle").read_bytes())
        return facts

    @contextmanager
    def tensors(self, step: int | None) -> Iterator["Stored"]:
        """Open the tensors of a step, or of the start; each is read when it is used."""
        with safe_open(self._path(step, "safetensors"), framework="pt") as file:
            yield Stored(file)

    def _path(self, step: int | None, suffix: str) -> Path:
        return self.folder / f"{'start' if step is None else f'step-{step:08d}'}.{suffix}"


class Stored:
    """Tensors in one file, by kind and name."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._keys = set(file.keys())

    def get(self, kind: str, name: str) -> Tensor | None:
        """Read a tensor; None if there is none."""
        key = f"{kind}/{name}"
        return self._file.get_tensor(key) if key in self._keys else None


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance between 1 and the next larger number."""
    return float(torch.finfo(dtype).eps) / 2


class StepObserver:
    """Records each step of a trainer and its update, without changing them.

    With `outputs` it also records the output of each module.

    With `bounds` it adds up the absolute values of micro-batches' gradients, in a process that
    holds all parameters.
    """

    def __init__(self, trainer: Trainer, *, bounds: bool = False, outputs: bool = False) -> None:
        self._trainer = trainer
        self._placed = trainer.placed
        self.gradients: dict[str, Tensor] = {}  # of the last step, as the optimizer gets them
        self._samples: dict[int, str] = {}  # micro-batch → hash of its contents
        # sum of the magnitudes of micro-batches' gradients, by parameter
        self._magnitudes: dict[str, Tensor] = {}
        self._outputs: list[tuple[str, int]] = []
        self._micro_batches_per_step = 1
        self._factor = 1.0
        self._update = UpdateFacts()
        # of the step that runs: fingerprints by name
        self._first_values: dict[str, int] = {}
        self._updated_values: dict[str, int] = {}
        self._before_optimizer_hooks: dict[str, int] = {}  # gradients
        self._optimizer_state: dict[str, Any] = {}
        optimizer = trainer.optimizer
        placed = trainer.placed
        placed.around_passes.append(self._observed)
        placed.update_finishers.insert(0, self._finished)
        self._opened = ExitStack()
        self._opened.callback(placed.around_passes.remove, self._observed)
        self._opened.callback(placed.update_finishers.remove, self._finished)
        handles: list[Any] = [
            run_first(optimizer, optimizer.register_step_pre_hook(lambda *_: self._before_hooks())),
            optimizer.register_step_pre_hook(lambda *_: self._before_update()),
            run_first(
                optimizer, optimizer.register_step_post_hook(lambda *_: self._after_update())
            ),
        ]
        for part in placed.parts if outputs else ():
            handles += [
                m.register_forward_hook(partial(self._output, name))
                for name, m in part.named_modules()
            ]
        for name, parameter in placed.parameters.items() if bounds else ():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(partial(self._add_magnitude, name)))  # type: ignore[no-untyped-call]
        for handle in handles:
            self._opened.callback(handle.remove)

    def close(self) -> None:
        """Stop recording."""
        self._opened.close()

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprints of the gradients on this rank."""
        return _fingerprints(self.gradients)

    def facts(self, done: StepRecord) -> StepFacts:
        """Return the facts of the step just made."""
        rate = max(
            (float(group["lr"]) for group in self._trainer.optimizer.param_groups), default=0.0
        )
        values = _fingerprints(self._placed.parameters)
        update = self._update
        update.after = _changed(self._updated_values, values) if update.called else []
        update.unmoved = [
            name for name, value in values.items() if value == self._first_values.get(name)
        ]
        return StepFacts(
            dict(self._samples),
            float(plain(done.loss)),
            float(plain(done.grad_norm)),
            rate,
            self._scale(done),
            bool(done.skipped),
            outputs=list(self._outputs),
            update=update,
        )

    def bounds(self, done: StepRecord) -> dict[str, Tensor]:
        """Return how far a gradient's elements may differ.

        They differ when its micro-batches are summed in another order.
        """
        roundoff = unit_roundoff(torch.float32)
        additions = 2 * max(1, self._micro_batches_per_step - 1) * roundoff * self._scale(done)
        bounds = {}
        for name, gradient in self.gradients.items():
            # For scaling to the mean, clipping, and the gradients' own rounding.
            bounds[name] = 32 * roundoff * gradient.abs()
            if name in self._magnitudes:
                # A pipeline also sums the uses of a shared weight in another order, and kernels
                # round differently when parameters lie elsewhere in memory (FSDP). The sizes of
                # these terms are unknown: the largest element stands for them.
                largest = self._magnitudes[name].max() if gradient.numel() else 0.0
                bounds[name] += (
                    additions * self._magnitudes[name] + 64 * roundoff * self._scale(done) * largest
                )
        return bounds

    def _scale(self, done: StepRecord) -> float:
        scale = 1.0 / (self._factor * max(1.0, float(plain(done.tokens))))
        clip = self._trainer.config.training.gradient_clip
        if clip.strategy == "norm":
            scale *= min(1.0, clip.value / (float(plain(done.grad_norm)) + 1e-6))
        return scale

    def _observed(
        self,
        run: ForwardBackward,
        micro_batches: Sequence[MicroBatch],
        accumulator: LossAccumulator,
        factor: float,
    ) -> None:
        """Run a step's passes; note its samples, and what is there before it."""
        self._samples = {
            micro_batch.index: (
                hashlib.blake2b(bytes_of(micro_batch.batch), digest_size=12).hexdigest()
            )
            for micro_batch in micro_batches
            if micro_batch.real and micro_batch.batch is not None
        }
        self._micro_batches_per_step = accumulator.micro_batches_per_step
        self._factor = factor
        parameters = self._placed.parameters
        self.gradients = {}
        self._before_optimizer_hooks = {}
        self._update = UpdateFacts(
            tied={
                alias: name for name, aliases in self._placed.aliases.items() for alias in aliases
            },
            frozen=[name for name, p in parameters.items() if not p.requires_grad],
            stale=[
                name
                for name, p in parameters.items()
                if p.grad is not None and bool(local(p.grad).any())
            ],
        )
        self._first_values = _fingerprints(parameters)
        self._optimizer_state = self._optimizer_state_now()
        self._outputs.clear()
        self._magnitudes.clear()
        run(micro_batches, accumulator, factor)

    def _add_magnitude(self, name: str, gradient: Tensor) -> None:
        magnitude = gradient.detach().abs().float()
        if name in self._magnitudes:
            magnitude = self._magnitudes[name] + magnitude
        self._magnitudes[name] = magnitude

    def _output(self, name: str, _module: nn.Module, _args: object, output: object) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._outputs.extend((name, int(fingerprint(tensor.detach()))) for tensor in tensors)

    # ---- the update ----

    def _before_hooks(self) -> None:
        self._before_optimizer_hooks = _fingerprints(self._gradients_now())

    def _before_update(self) -> None:
        """Note what has changed between the start of the step and its update."""
        gradients = self._gradients_now()
        facts = self._update
        parameters = self._placed.parameters
        facts.called = True
        facts.before = _changed(self._first_values, _fingerprints(parameters))
        facts.by_hooks = _changed(self._before_optimizer_hooks, _fingerprints(gradients))
        states = self._optimizer_state_now()
        facts.state_changed = [
            name for name in parameters if states.get(name) != self._optimizer_state.get(name)
        ]
        groups = {
            id(p): group for group in self._trainer.optimizer.param_groups for p in group["params"]
        }
        facts.options = {
            name: {
                key: _text(value)
                for key, value in groups.get(id(p), {}).items()
                if key not in _NOT_COMPARED
            }
            for name, p in parameters.items()
        }
        self._keep_gradients(gradients)

    def _after_update(self) -> None:
        self._updated_values = _fingerprints(self._placed.parameters)

    def _finished(self, skipped: bool) -> None:
        if not self._update.called and not skipped:  # somebody has replaced `step`
            self._keep_gradients(self._gradients_now())

    def _gradients_now(self) -> dict[str, Tensor]:
        """Return the gradients that parameters have now, by name."""
        return {name: p.grad for name, p in self._placed.parameters.items() if p.grad is not None}

    def _keep_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        self.gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}

    def _optimizer_state_now(self) -> dict[str, Any]:
        """Return parameter → entry of its state in the optimizer → fingerprint, or text."""
        states = self._trainer.optimizer.state
        now: dict[str, Any] = {}
        for name, parameter in self._placed.parameters.items():
            state = states.get(parameter)
            if state is not None:
                now[name] = {
                    key: int(fingerprint(local(v))) if isinstance(v, Tensor) else repr(v)
                    for key, v in state.items()
                }
        return now


def _changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    return [name for name, value in now.items() if value != before.get(name)]


def _fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: int(fingerprint(local(tensor.detach()))) for name, tensor in tensors.items()}


def _text(value: Any) -> str:
    """Return a value in one form: a checkpoint gives numbers for tensors, and lists for tuples."""
    if isinstance(value, list | tuple):
        return repr(tuple(value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        repr(float(value))
        if number or (isinstance(value, Tensor) and value.numel() == 1)
        else repr(value)
    )
