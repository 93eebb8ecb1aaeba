"""Runs a rank's passes of a step, under every strategy, with one list of objects around each.

A rank without a pipeline is a pipeline of one stage: it runs F0 B0 F1 B1 …, a micro-batch after the
other. Under a pipeline a rank runs the program of its schedule
(`lockstep.parallel.execution.programs`): passes, with sends and receives between them. What one
pass makes for a later one is kept here, by stage and by position of the micro-batch in the run:

    F of stage s    takes the activations of stage s-1; keeps its inputs and outputs; leaves
                    activations for s+1
    B of stage s    takes the gradients of its outputs from s+1; adds those of weights to `.grad`;
                    leaves those of its inputs for s-1
    I and W         the two halves of B: I does all of it but the gradients of weights, which W
                    computes later

What a pass leaves for a stage of the same rank is taken from here, what it leaves for another rank
is sent. The loss is not multiplied by its weight: the weight is the gradient with which its
backward pass starts, under all strategies.

Tests: tests/parallel/execution/test_executor.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.costs.steps import ScheduledPass
from lockstep.data.batches import MicroBatch
from lockstep.heartbeat.writer import recorder_of_work
from lockstep.models.objective import Objective
from lockstep.parallel.execution.backward import Gradients, backward, first_half, whole_second_half
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.execution.programs import Message, Program, Receive, Send
from lockstep.parallel.execution.transport import KnownMessages, Rehearsed, Tensors, Transport
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.precision import Precision
from lockstep.randomness import RandomState

# (micro-batch, activations of the stage before, which are leaves) → activations, tensors that
# nothing else writes to; or the result of the last stage, in training the `Loss`
Forward = Callable[[MicroBatch, Tensors], Any]
Done = Callable[[MicroBatch, Any], None]  # takes the result of the last stage

_NOTHING_KNOWN = KnownMessages()


class Carrier(Protocol):
    """Takes gradients of each micro-batch, and carries their sums back from stage to stage.

    A sum travels in the message that has the gradients of a stage's inputs. See
    `lockstep.parallel.pipeline.trees`.
    """

    def roots(self, stage: int, carried: Tensors) -> list[tuple[Tensor, Tensor]]:
        """Return (weight, sum that has arrived): a backward pass starts from these weights, too."""

    def done(self, stage: int, position: int, carried: Tensors) -> Tensors:
        """Take the gradients of the stage's weights; return the sums that the stage before gets."""


@dataclass
class Stage:
    """The part of a model that this rank runs: all of it, or a stage of a pipeline."""

    forward: Forward
    around: Sequence[AroundMicroBatch] = ()  # outermost first
    index: int = 0
    count: int = 1  # of stages in the pipeline
    # segment → how often it ran in earlier stages, after which its random numbers continue
    earlier: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_first = self.index == 0
        self.is_last = self.index == self.count - 1
        self.before = _own_methods(self.around, "before")
        self.after_forward = _own_methods(self.around[::-1], "after_forward")
        self.before_backward = _own_methods(self.around, "before_backward")
        self.after_backward = _own_methods(self.around[::-1], "after_backward")
        self.after = _own_methods(self.around[::-1], "after")
        self.after_step = _own_methods(self.around[::-1], "after_step")


def stage_of_model(
    model: Callable[..., Any],
    objective: Objective,
    precision: Precision,
    around: Sequence[AroundMicroBatch],
) -> Stage:
    """Return the only stage of a model that is on this rank, or gathers itself.

    `around`: outermost first.
    """
    autocast = precision.autocast()

    def forward(micro_batch: MicroBatch, _activations: Tensors) -> Loss:
        with autocast:
            return Loss(*objective.of(model, micro_batch.batch))

    return Stage(forward, around)


def _own_methods(around: Sequence[AroundMicroBatch], name: str) -> list[Any]:
    """Return the method `name` of each object that overrides it; empty methods are not called."""
    inherited = getattr(AroundMicroBatch, name)
    overriding = [step for step in around if getattr(type(step), name) is not inherited]
    return [getattr(step, name) for step in overriding]


class Executor:
    """Runs passes of this rank's stages.

    Args:
        stages: of this rank, ascending.
        random_state: what random numbers depend on; a backward pass may repeat parts of a forward
            pass.
        transport: carries messages to other ranks.
        multiplier: of the loss, which undoes a mean that the strategy's own reduction takes.
        carrier: takes the gradients of each micro-batch; None: they add up in `.grad`.
        halves: compute the gradients of weights in W where a schedule has one; else with those of
            inputs, in I.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        random_state: RandomState,
        transport: Transport | None = None,
        *,
        multiplier: float = 1.0,
        carrier: Carrier | None = None,
        halves: bool = True,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self._random_state = random_state
        self._transport = transport or Rehearsed()
        self._multiplier = multiplier
        self._carrier = carrier
        self._halves = halves
        self._record_work = recorder_of_work()
        # what passes here have made for another stage, of this rank or of another
        self._outgoing: dict[Message, Tensors] = {}
        # (stage, position) → after F, until B or W
        self._under_way: dict[tuple[int, int], MicroBatchPass] = {}

    # ---- programs ----

    def run(
        self,
        program: Program,
        micro_batches: Sequence[MicroBatch],
        accumulator: LossAccumulator,
        factor: float,
        *,
        last: bool,
        known: KnownMessages = _NOTHING_KNOWN,
    ) -> None:
        """Run a program of forward and backward passes; with `last`, the last one of the step.

        `known`: what the transport has to know of its messages.
        """
        self._transport.begin(known)
        per_step = accumulator.micro_batches_per_step
        try:
            for instruction in program:
                if not isinstance(instruction, ScheduledPass):
                    self._exchange(instruction)
                    continue
                if instruction.kind == "F":
                    position = instruction.micro_batch
                    passing = MicroBatchPass(
                        micro_batches[position],
                        per_step,
                        factor,
                        last=last and position == len(micro_batches) - 1,
                        stage=instruction.stage,
                        position=position,
                    )
                    self.forward(passing, accumulator)
                else:
                    self.backward(instruction)
                self._record_progress()
            self._transport.finish()
            if last:
                self.after_step(per_step)
        except BaseException as error:
            self._fail(error)
            raise

    def run_forward(
        self,
        program: Program,
        micro_batches: Sequence[MicroBatch],
        done: Done,
        known: KnownMessages = _NOTHING_KNOWN,
    ) -> None:
        """Run a program of forward passes alone, with nothing around them.

        `done` takes the last stage's results.
        """
        self._transport.begin(known)
        try:
            for instruction in program:
                if not isinstance(instruction, ScheduledPass):
                    self._exchange(instruction)
                    continue
                stage = self.stages[instruction.stage]
                position = instruction.micro_batch
                micro_batch = micro_batches[position]
                inputs = () if stage.is_first else self._take(Message("F", stage.index, position))
                self._random_state.at(micro_batch.index, stage.earlier)
                outputs = stage.forward(micro_batch, inputs)
                if stage.is_last:
                    done(micro_batch, outputs)
                else:
                    self._outgoing[Message("F", stage.index + 1, position)] = outputs
                self._record_progress()
            self._transport.finish()
        except BaseException:
            self._clear()
            raise

    def _exchange(self, instruction: Send | Receive) -> None:
        """Start to send what a pass has made, or to receive what one will need."""
        message, peer = instruction
        if isinstance(instruction, Send):
            self._transport.send(message, peer, self._outgoing.pop(message))
        else:
            self._transport.receive(message, peer)

    def _record_progress(self) -> None:
        """Record that a pass has run, where a launcher or other ranks look for hangs."""
        if self._record_work is not None:
            self._record_work()

    def alone(self, passing: MicroBatchPass, kind: str) -> None:
        """Run one pass by itself, for a rehearsal; drop what it makes for other stages."""
        if kind == "F":
            self.forward(passing, None)
        else:
            self.backward(ScheduledPass(kind, passing.stage, passing.position))
        self._outgoing.clear()

    # ---- a model that is one stage ----

    def run_micro_batch(
        self, micro_batch: MicroBatch, accumulator: LossAccumulator, factor: float, last: bool
    ) -> Loss:
        """Run one micro-batch forward and backward through a model that is one stage."""
        passing = MicroBatchPass(micro_batch, accumulator.micro_batches_per_step, factor, last)
        try:
            loss = self.forward(passing, accumulator)
            if last:
                passing.further_roots.extend(accumulator.before_last_backward())
            self.backward(_BACKWARD)
            if last:
                self.after_step(passing.micro_batches_per_step)
        except BaseException as error:
            self._fail(error)
            raise
        assert loss is not None
        return loss

    def in_order(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        """Run the micro-batches of a step one after the other through a model that is one stage."""
        count = len(micro_batches)
        for number, micro_batch in enumerate(micro_batches, start=1):
            self.run_micro_batch(micro_batch, accumulator, factor, number == count)
            self._record_progress()

    # ---- passes ----

    def forward(self, passing: MicroBatchPass, accumulator: LossAccumulator | None) -> Loss | None:
        """Run F; return the loss, if the stage is the last one, and add it to the accumulator."""
        stage = self.stages[passing.stage]
        inputs = () if stage.is_first else self._take(Message("F", stage.index, passing.position))
        for enter in stage.before:
            enter(passing)
        # Hooks of the stage's segments take their keys from it: see `key_segments`.
        self._random_state.at(passing.micro_batch.index, stage.earlier)
        outputs = stage.forward(passing.micro_batch, inputs)
        for leave in stage.after_forward:
            leave(passing)
        self._under_way[stage.index, passing.position] = passing
        passing.inputs = inputs
        if not stage.is_last:
            passing.outputs = outputs
            leaves = tuple(
                output.detach().requires_grad_(output.requires_grad) for output in outputs
            )
            self._outgoing[Message("F", stage.index + 1, passing.position)] = leaves
            return None
        loss: Loss = outputs
        if accumulator is not None:
            accumulator.add(passing.micro_batch, loss)
        # A dummy has weight zero: its backward pass is there for the collectives inside of it.
        weight = passing.factor * self._multiplier * loss.times if passing.micro_batch.real else 0.0
        passing.outputs = (loss.value,)
        passing.gradient = torch.full_like(loss.value, weight)
        return loss

    def backward(self, scheduled: ScheduledPass) -> None:
        """Run B, I or W of a micro-batch whose forward pass has run."""
        kind, index, position = scheduled
        splits = self._halves and kind != "B"
        if kind == "W" and not splits:
            return  # I has computed the gradients of weights, too
        completes = kind == "W" or not splits  # the gradients of weights are there after this pass
        stage = self.stages[index]
        passing = self._under_way[index, position]

        output_gradients: Gradients = (passing.gradient,)
        carried: Tensors = ()
        if kind != "W" and not stage.is_last:
            output_gradients, carried = self._take_gradients(stage, passing)
        self._random_state.micro_batch = passing.micro_batch.index
        for enter in stage.before_backward:
            enter(passing)

        input_gradients: Gradients = ()
        if stage.count == 1 and not passing.further_roots:
            # the shortest way: each call of a function costs here
            torch.autograd.backward(passing.outputs[0], passing.gradient)
        elif not splits:
            input_gradients = self._backward_at_once(stage, passing, output_gradients, carried)
        elif kind == "I":
            input_gradients = self._first_half(stage, passing, output_gradients)
        else:
            assert passing.second_half is not None
            passing.second_half.run()
        for leave in stage.after_backward:
            leave(passing)

        sums: Tensors = ()
        if completes:
            del self._under_way[index, position]
            if self._carrier is not None:
                sums = self._carrier.done(index, position, carried)
            for leave in stage.after:
                leave(passing)
            if not self._under_way:
                self._random_state.backward_done()
        if kind != "W" and not stage.is_first:
            pairs = zip(passing.inputs, input_gradients, strict=True)
            back = [_sendable(value, gradient) for value, gradient in pairs if value.requires_grad]
            self._outgoing[Message("B", index - 1, position)] = (*back, *sums)

    def after_step(self, micro_batches_per_step: int) -> None:
        """Call what comes once a step, after this rank's last pass."""
        for stage in self.stages.values():
            for leave in stage.after_step:
                leave(micro_batches_per_step)

    def _take(self, message: Message) -> Tensors:
        """Take a message: from a stage of this rank if one has made it, else from another rank."""
        local = self._outgoing.pop(message, None)
        return self._transport.take(message) if local is None else local

    def _take_gradients(self, stage: Stage, passing: MicroBatchPass) -> tuple[Gradients, Tensors]:
        """Take from the next stage the gradients of this one's outputs, and the carried sums."""
        arrived = iter(self._take(Message("B", stage.index, passing.position)))
        gradients = tuple(
            next(arrived) if output.requires_grad else None for output in passing.outputs
        )
        return gradients, tuple(arrived)

    def _backward_at_once(
        self, stage: Stage, passing: MicroBatchPass, gradients: Gradients, carried: Tensors
    ) -> Gradients:
        """Compute the gradients of inputs and weights at once; return those of the inputs."""
        outputs = passing.outputs
        for root, gradient in passing.further_roots:
            outputs = (*outputs, root)
            gradients = (*gradients, gradient)
        if stage.count == 1:
            torch.autograd.backward(outputs, gradients)
            return ()
        if carried and self._carrier is not None:
            for weight, arrived in self._carrier.roots(stage.index, carried):
                outputs = (*outputs, weight)
                gradients = (*gradients, arrived)
        return backward(outputs, gradients, passing.inputs, as_made=self._carrier is not None)

    def _first_half(self, stage: Stage, passing: MicroBatchPass, gradients: Gradients) -> Gradients:
        """Compute the gradients of the inputs, and keep what is left for W."""
        outputs = passing.outputs
        passing.outputs = ()  # what the graph does not keep of them can be freed
        input_gradients: Gradients = ()
        if stage.is_first:  # it has no inputs whose gradients could come first
            half = whole_second_half(outputs, gradients)
        else:
            input_gradients, half = first_half(outputs, gradients, passing.inputs)
        half.further_roots = passing.further_roots
        passing.second_half = half
        return input_gradients

    # ---- errors ----

    def _fail(self, error: BaseException) -> None:
        """Let what stands around the passes clean up; raise a clearer error, if there is one."""
        explanations = [
            around.failed(error) for stage in self.stages.values() for around in stage.around[::-1]
        ]
        self._clear()
        clearer = next((each for each in explanations if each is not None), None)
        if clearer is not None:
            raise clearer from error

    def _clear(self) -> None:
        """Drop what passes have left; after an error."""
        self._outgoing.clear()
        self._under_way.clear()
        self._transport.forget()


_BACKWARD = ScheduledPass("B", 0, 0)  # of a model that is one stage


def _sendable(value: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a gradient as the stage before waits for it: zeros for an input that was not used."""
    if gradient is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    return gradient
