"""Run a rank's stages: a step's micro-batches by the schedule; evaluation and samples forward only."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.data.batches import MicroBatch
from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers, restored
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.pipeline.relay import Agreement, Relay, Shapes
from lockstep.parallel.pipeline.stage_module import CurrentMicroBatch, StageModule
from lockstep.parallel.pipeline.torch_stage import Stage, reduce_gradients
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.randomness import RandomState


@dataclass
class Runner:
    """The stages of a rank, and all that runs them."""

    parts: list[StageModule]  # the stages' modules, ascending
    buffers: list[RunningBuffers]  # the running statistics of each part
    objective: Objective
    random_state: RandomState
    work: CurrentMicroBatch  # the micro-batch that the parts work on
    relay: Relay  # forward passes alone
    shapes: Shapes  # of the tensors that are sent
    make_run: Callable[[Sequence[Stage], int], Callable[[], None]]  # (stages, number of micro-batches) → a run of them
    padded: Callable[[int], int]  # number of micro-batches → the number that the schedule takes
    per_run: int | None = None  # micro-batches that one run takes; None: all of a step
    shared_unit: nn.Module | None = None  # FSDP2's unit of parameters that several stages use
    frees: bool = False  # FSDP2 frees gathered parameters after each forward pass
    trees: StageTrees | None = None  # take the gradients of each micro-batch; None: they add up
    stages: list[Stage] = field(default_factory=list)
    _runs: dict[int, Callable[[], None]] = field(default_factory=dict)  # number of micro-batches → a run of them
    _run: Sequence[MicroBatch] = ()
    _accumulator: LossAccumulator | None = None
    _factor: float = 1.0

    # ---- training ----

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        runs = cut_into_runs(micro_batches, self.per_run, self.padded)
        self._accumulator, self._factor = accumulator, factor
        agreement = self._learn_shapes(micro_batches)
        keys = {micro_batch.index: key for micro_batch, key in zip(micro_batches, agreement.signatures, strict=True)}
        if self.shared_unit is not None:
            _unshard(self.shared_unit)
        if self.trees is not None:
            self.trees.begin(accumulator.micro_batches_per_step)
        size = self.per_run or len(micro_batches)
        for number, run in enumerate(runs):
            if self.trees is not None:
                self.trees.run, self.trees.places = run, range(number * size, (number + 1) * size)
            self._run, self.work.finish = run, self._loss
            for stage in self.stages:
                metas = [self.shapes.of(keys[micro_batch.index], stage.stage_index) for micro_batch in run]
                stage.begin([m[0] for m in metas], [m[1] for m in metas], reduces=number == len(runs) - 1)
            if len(run) not in self._runs:
                self._runs[len(run)] = self.make_run(self.stages, len(run))
            self._runs[len(run)]()
        if self.shared_unit is not None:
            reduce_gradients(self.shared_unit)
        for buffers in self.buffers:
            buffers.finish_step(accumulator.micro_batches_per_step)
        self._run, self._accumulator = (), None

    @contextmanager
    def forward_at(self, stage: int, place: int) -> Iterator[None]:
        """Prepare for a stage's forward pass of the micro-batch at `place` of the run, which happens inside."""
        micro_batch = self._run[place]
        part, buffers = self._part(stage)
        self._take_up(part, micro_batch)
        with buffers.micro_batch(micro_batch.index, real=micro_batch.real):
            yield
            buffers.forward_done()

    @contextmanager
    def backward_at(self, stage: int, place: int) -> Iterator[None]:
        """Prepare for its backward pass. Recomputed forward passes write to statistics that nobody reads."""
        micro_batch = self._run[place]
        with self._part(stage)[1].micro_batch(micro_batch.index, real=False):
            yield

    def _part(self, stage: int) -> tuple[StageModule, RunningBuffers]:
        return next((p, b) for p, b in zip(self.parts, self.buffers, strict=True) if p.index == stage)

    def _take_up(self, part: StageModule, micro_batch: MicroBatch) -> None:
        self._micro_batch = micro_batch
        part.enter(self.random_state, micro_batch.index)
        self.work.inputs = partial(self.objective.inputs, micro_batch.batch)

    def _loss(self, outputs: Any) -> Tensor:
        """Add the last stage's loss to the accumulator; return the part of it that is differentiated here."""
        micro_batch = self._micro_batch
        loss = Loss(*self.objective.factors(outputs, micro_batch.batch, self.work.calls))
        assert self._accumulator is not None
        self._accumulator.add(micro_batch, loss)
        return loss.value * (self._factor * loss.times if micro_batch.real else 0.0)

    # ---- shapes ----

    def _learn_shapes(self, micro_batches: Sequence[MicroBatch]) -> Agreement:
        """Send each new shape of batch through the stages once, up to the last one, which sends nothing."""
        agreement = self.shapes.agree([self._inputs_of(micro_batch) for micro_batch in micro_batches], training=True)
        if agreement.anyone:
            with self._gathered(keep=True), restored([buffer for part in self.parts for buffer in part.buffers()]):
                for place in agreement.new:
                    learn = partial(self.shapes.learn, agreement.signatures[place])
                    self.relay.one(
                        lambda part, i: self._take_up(part, micro_batches[i]), place, learn=learn, to_last=False
                    )
        return agreement

    def _inputs_of(self, micro_batch: MicroBatch) -> Any:
        return self.objective.inputs(micro_batch.batch) if self.parts[0].is_first else None

    # ---- forward alone ----

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator) -> None:

        def enter(outputs: Any) -> None:
            micro_batch = self._micro_batch
            accumulator.add(micro_batch, Loss(*self.objective.factors(outputs, micro_batch.batch, self.work.calls)))

        def start(part: StageModule, place: int) -> None:
            self._take_up(part, micro_batches[place])

        self.work.finish = enter
        agreement = self.shapes.agree([self._inputs_of(micro_batch) for micro_batch in micro_batches], training=False)
        keys = agreement.signatures
        with self._gathered(keep=False):
            for place in agreement.new:
                self.relay.one(start, place, learn=partial(self.shapes.learn, keys[place]))
            others = [place for place in range(len(micro_batches)) if place not in agreement.new]
            self.relay.many(start, others, lambda place, stage: self.shapes.of(keys[place], stage))

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass outside of the step; all ranks call it with the same arguments and get the outputs."""
        self.work.inputs, self.work.finish = (lambda: (args, kwargs)), (lambda outputs: outputs)
        at = self.random_state.micro_batch
        with self._gathered(keep=False):
            outputs = self.relay.one(lambda part, _place: part.enter(self.random_state, at))
        return self.relay.share_result(outputs)

    @contextmanager
    def _gathered(self, *, keep: bool) -> Iterator[None]:
        """Gather parameters, so that forward passes inside need no collectives: parallel pipelines may differ.

        `keep` leaves the parameters gathered: a run of the schedule follows.
        """
        roots: list[nn.Module] = [*self.parts, *([self.shared_unit] if self.shared_unit is not None else [])]
        sharded = [root for root in roots if isinstance(root, FSDPModule)]
        for root in sharded:
            _unshard(root)
            root.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for root in sharded:
                root.set_reshard_after_forward(self.frees)
                for module in () if keep else root.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()


def _unshard(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def cut_into_runs(
    micro_batches: Sequence[MicroBatch], per_run: int | None, padded: Callable[[int], int]
) -> list[list[MicroBatch]]:
    """Return the runs of a schedule, padded with dummies, copies of the last micro-batch, to lengths that it takes."""
    size = per_run or len(micro_batches)
    runs = [list(micro_batches[begin : begin + size]) for begin in range(0, len(micro_batches), size)]
    for run in runs:
        last = run[-1]
        run += [MicroBatch(last.index, last.batch, real=False)] * (padded(len(run)) - len(run))
    return runs
