"""`ParallelModel`: a model as a strategy has placed it on this rank, with all that a step needs.

A strategy decides where a micro-batch runs and where a parameter lies. It never decides what a step
is: the samples, the random numbers, the loss and its normalisation are the same for all of them.

Tests: tests/parallel/execution/test_executor.py, tests/parity/test_law_one.py
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.data.batches import MicroBatch
from lockstep.layout import Layout
from lockstep.machine import accelerator
from lockstep.models.objective import Objective
from lockstep.parallel.changes import ModuleChange, changes_of
from lockstep.parallel.context.attention import SequenceCut
from lockstep.parallel.execution.passes import (
    AroundPasses,
    Evaluate,
    ForwardBackward,
    RunMicroBatch,
)
from lockstep.parallel.gradient_hooks import GradientHooks, run_hooks
from lockstep.parallel.loss_accumulator import (
    CarriedFigures,
    CarriedLossAccumulator,
    HostLossAccumulator,
    LossAccumulator,
    Number,
    tensor_of,
)
from lockstep.parallel.reproducible.exact_norm import SMALL, exact_norm
from lockstep.parallel.state_form import StateForm
from lockstep.randomness import RandomState
from lockstep.tensors import local
from lockstep.torch_compat import foreach

if TYPE_CHECKING:
    from lockstep.parallel.diloco.workers import LocalWorkers
    from lockstep.parallel.loss_weights import LossWeights

_NOTHING = nullcontext()  # one for all uses: making it is a call


@dataclass(frozen=True)
class ModelUpdate:
    """One update of the optimizer: for the only model, or for one that trains by itself here."""

    to_mean: Number  # what its gradients are multiplied by to be those of its mean loss
    norm: Number  # of that gradient, before clipping
    gradients: list[Tensor] | None = None  # None: as they are while it is in place
    # Puts its tensors and state in place.
    in_place: Callable[[Optimizer], AbstractContextManager[None]] = lambda _optimizer: _NOTHING


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model as a rank holds it.

    Nobody assigns to its fields: what adds to a placed model returns another one, by
    `dataclasses.replace`. What watches or changes a run from outside, as `lockstep verify` does,
    appends to the lists `around_passes`, `finishers`, `update_finishers` and `checks`.
    """

    # ---- what this rank holds ----

    layout: Layout  # the number of ranks along each axis
    parts: list[nn.Module]  # the modules that this rank holds, unwrapped: what has parameters
    root: nn.Module | None = None  # the model that was given, which a pipeline has taken apart
    # canonical name → parameter (a DTensor where it is sharded), of this rank
    parameters: dict[str, nn.Parameter]
    num_parameters: int = 0  # of the whole model, tied ones counted once
    # canonical name → others, of tied weights
    aliases: dict[str, list[str]] = field(default_factory=dict)
    # canonical name → persistent buffer, of this rank
    buffers: dict[str, Tensor] = field(default_factory=dict)
    # what the model makes of its `state_dict`; None: its tensors by name
    form: StateForm | None = None
    loss: "LossWeights | None" = None  # the weights of a loss function that is a module
    # kept in checkpoints: the strategy's
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # groups of ranks that hold and train the same parameters, and the names of those they do not
    replicas: Sequence[tuple[dist.ProcessGroup, AbstractSet[str]]] = ()

    # ---- its passes ----

    objective: Objective  # how a batch becomes a loss
    random_state: RandomState  # what the model's random numbers depend on
    # micro-batches in a step → (index, real) of this rank's, in order
    assign: Callable[[int], list[tuple[int, bool]]]
    wants_data: bool = True  # whether this rank's micro-batches need their batches
    passes: ForwardBackward  # runs the micro-batches of a step; see `forward_backward`
    # what watches or changes the passes of a step, innermost first
    around_passes: list[AroundPasses] = field(default_factory=list)
    # None where micro-batches can't be run one at a time
    run_micro_batch: RunMicroBatch | None = None
    evaluate: Evaluate
    # the model's forward pass outside of the step, for sampling from it
    forward: Callable[..., Any]
    context: SequenceCut | None = None  # the way in which sequences are cut; None: they are whole
    # of ranks that run the same micro-batches, the first adds their losses
    adds_losses: bool = True
    # carries losses and counts with the gradients; None: they take an all-reduce of their own
    carried_figures: CarriedFigures | None = None

    # ---- the end of a step ----

    reproducible: bool = False  # the step must be the same in every bit on any layout
    local_training: "LocalWorkers | None" = None  # where models train by themselves
    # complete `.grad` after the last backward pass, in this order
    finishers: list[Callable[[], None]] = field(default_factory=list)
    # the user's hooks on parameters, called once a step
    gradient_hooks: GradientHooks = field(default_factory=dict)
    # over which squared norms add up
    norm_groups: list[dist.ProcessGroup] = field(default_factory=list)
    # Names whose gradients this rank counts in a norm; None: all. Of what several ranks hold whole,
    # one counts it.
    counted: set[str] | None = None
    # called after each update, in this order: was it skipped?
    update_finishers: list[Callable[[bool], None]] = field(default_factory=list)
    # called with the number of steps made
    checks: list[Callable[[int], None]] = field(default_factory=list)

    # ---- what it has to say ----

    log_lines: list[str] = field(default_factory=list)  # logged at start
    later_log_lines: list[str] = field(default_factory=list)  # see `take_log_lines`

    # ---- methods ----

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        """Run this rank's micro-batches of a step forward and backward; see `ForwardBackward`."""
        run = self.passes
        for around in self.around_passes:
            run = partial(around, run)
        run(micro_batches, accumulator, factor)

    def finish_gradients(self) -> None:
        """Complete `.grad` after the last backward pass of a step; all ranks call it.

        What the strategy itself adds comes first, then what each axis has added
        (`Axis.add_to_step_end`), in the order of the axes.
        """
        for finish in self.finishers:
            finish()

    def finish_update(self, skipped: bool) -> None:
        """Tell those that keep something from step to step that an update was made, or skipped."""
        for call in self.update_finishers:
            call(skipped)

    @property
    def modules(self) -> list[nn.Module]:
        """This rank's modules: its parts of the model, and the loss function if it is a module."""
        return self.parts if self.loss is None else [*self.parts, self.loss.module]

    @property
    def loss_names(self) -> list[str]:
        """Names of the weights and buffers of a loss function, over all ranks."""
        return [] if self.loss is None else sorted({*self.loss.own, *self.loss.buffers})

    @cached_property
    def loss_accumulator(self) -> Callable[[int], LossAccumulator]:
        """A function that makes an empty accumulator, for a step or a window of an evaluation.

        Its argument is the number of micro-batches, over all ranks.
        """
        if self.local_training is not None:
            return self.local_training.loss_accumulator
        if self.carried_figures is not None:
            return partial(
                CarriedLossAccumulator, carrier=self.carried_figures, adds=self.adds_losses
            )
        device = self.random_state.device
        shared = self.layout.world_size > 1
        if device.type == "cpu" or accelerator.widest_float(device) is not torch.float64:
            return partial(HostLossAccumulator, shared=shared, adds=self.adds_losses)
        return partial(LossAccumulator, device=device, shared=shared, adds=self.adds_losses)

    def model_updates(
        self, accumulator: LossAccumulator, factor: float, count: Number
    ) -> tuple[list[ModelUpdate], Number]:
        """Return what is to be updated once the gradients are finished, and the norm to record.

        `factor` is what the summed loss was multiplied by before backward, `count` the step's valid
        targets.
        """
        if self.local_training is not None:
            return self.local_training.model_updates(accumulator)
        gradients = self.gradients()
        to_mean = 1.0 / factor / count
        if self.gradient_hooks:  # they see the gradient of the mean loss
            foreach.mul_(gradients, tensor_of(to_mean))
            run_hooks(self.gradient_hooks, self.parameters)
            to_mean = 1.0
        norm = self.norm(gradients if self.counted is None else self.counted_gradients()) * to_mean
        return [ModelUpdate(to_mean, norm, gradients)], norm

    def norm(self, gradients: list[Tensor]) -> Number:
        """Return the 2-norm over all ranks of gradients that each count once."""
        device = self.random_state.device
        if self.reproducible:
            norm = exact_norm(gradients, self.norm_groups, device, self.num_parameters)
        else:
            norm = gradient_norm(gradients, self.norm_groups, device)
        return norm.item() if device.type == "cpu" else norm

    def synchronize(self, step: int, *, last: bool) -> None:
        """Let models that train by themselves exchange what is due.

        Every rank calls it after each step.
        """
        if self.local_training is not None:
            self.local_training.synchronize(step, last=last)

    def kept(self) -> dict[str, Tensor]:
        """Return name → parameter or buffer of the model that is evaluated and saved.

        Replicas are compared by these tensors, too.
        """
        if self.local_training is not None:
            return self.local_training.common
        return {name: p.detach() for name, p in self.parameters.items()} | self.buffers

    @property
    def named_aliases(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(others) for name, others in self.aliases.items() if name in self.parameters
        }

    def groups_alike(self) -> dict[Tensor, list[dist.ProcessGroup]]:
        """Return parameter → the groups of ranks that hold the same of it."""
        return {
            parameter: [group for group, left_out in self.replicas if name not in left_out]
            for name, parameter in self.parameters.items()
        }

    def gradients(self) -> list[Tensor]:
        """Return the local pieces of all gradients, in the parameters' order.

        Writing to them changes `.grad`.
        """
        gradients = [grad for p in self.parameters.values() if (grad := p.grad) is not None]
        return [_piece(gradient) for gradient in gradients] if self._holds_pieces else gradients

    @cached_property
    def _holds_pieces(self) -> bool:
        """Return whether parameters are DTensors."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters.values())

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients that this rank counts for the norm.

        Over the norm groups, their squares add up to the square of the full gradient.
        """
        if self.counted is None:
            return self.gradients()
        return [
            _piece(p.grad)
            for name, p in self.parameters.items()
            if name in self.counted and p.grad is not None
        ]

    def changes(self) -> list[ModuleChange]:
        """Return what placement has changed on this rank's modules: methods, and hooks."""
        return changes_of(self.modules)

    def warnings(self) -> list[str]:
        """Return the warnings among the lines logged at start.

        They are reported in every way to train.
        """
        return [line for line in self.log_lines if line.startswith("warning: ")]

    def take_log_lines(self) -> list[str]:
        """Return the lines that became known since the last call."""
        lines = list(self.later_log_lines)
        self.later_log_lines.clear()
        return lines

    def clear_gradients(self) -> None:
        """Clear all parameters' gradients as `Optimizer.zero_grad` does.

        Unlike it, this leaves no record for torch's profiler.
        """
        for parameter in self.parameters.values():
            parameter.grad = None


def _piece(gradient: Tensor) -> Tensor:
    """Return this rank's piece of a gradient: `tensors.local`, in the file that a step is in."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def gradient_norm(
    gradients: list[Tensor], groups: list[dist.ProcessGroup], device: torch.device
) -> Tensor:
    """Return the 2-norm over all gradients of all shards and stages, 0-dim float32.

    It is the same number on every rank.
    """
    # what `torch.nn.utils.get_total_norm` does, in half of its time: it sorts by device and dtype
    # first
    norms = []
    if device.type == "cpu":
        small = [gradient for gradient in gradients if gradient.numel() < SMALL]
        gradients = [gradient for gradient in gradients if gradient.numel() >= SMALL]
        if small:
            # in float64: a float32 sum of so many squares is less exact than that of their norms
            with torch.inference_mode():  # views are cheaper there
                flat = foreach.flatten(small)
                flat = torch.view_as_real(flat) if flat.is_complex() else flat
                norms.append(torch.linalg.vector_norm(flat, dtype=torch.float64).float())
    if gradients:
        norms += foreach.norm(gradients)
    local = (
        torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
    )
    if not groups:
        return local
    square = local.double().square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt().float()


def layer_norms(placed: ParallelModel, factor: Number) -> dict[str, float]:
    """Return layer → 2-norm of its gradient times `factor`.

    All ranks call it together; it waits for the device.
    """
    squares: dict[str, Any] = {}
    counted = placed.parameters if placed.counted is None else placed.counted
    for name, parameter in placed.parameters.items():
        if name in counted and parameter.grad is not None:
            square = local(parameter.grad).double().square().sum()
            # `layers.3` of `layers.3.attention.weight`
            numbered = re.match(r".*?\.\d+(?=\.|$)", name)
            layer = numbered[0] if numbered else name.partition(".")[0]
            squares[layer] = squares.get(layer, 0.0) + square
    values = torch.stack(list(squares.values())).tolist() if squares else []
    sums = Counter(dict(zip(squares, values, strict=True)))
    for group in placed.norm_groups:  # by name: ranks along a pipeline hold different layers
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, sums, group=group)
        sums = Counter()
        for part in parts:
            sums.update(part)
    scale = float(factor)
    return {name: float(f"{value**0.5 * scale:.6g}") for name, value in sums.items()}
