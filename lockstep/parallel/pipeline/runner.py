"""Runs a rank's stages: a step's micro-batches through the schedule, evaluation and samples forward alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.ledger import Ledger, Loss, Share
from lockstep.parallel.pipeline.forward import Relay
from lockstep.parallel.pipeline.part import Part, Work
from lockstep.parallel.pipeline.shapes import Agreement, Shapes
from lockstep.parallel.pipeline.torch_schedule import Schedule
from lockstep.parallel.pipeline.torch_stage import Metas, Stage, reduce_gradients
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.randomness import Cursor


@dataclass
class Runner:
    """A rank's stages and what runs them.

    Attributes:
        parts: the stages' modules, ascending.
        buffers: of each part, what keeps its running statistics.
        work: what the parts work on.
        relay: forward passes alone.
        shapes: what travels.
        make_schedule: (stages, number of micro-batches) → schedule.
        padded: number of micro-batches → the number that the schedule takes.
        per_run: micro-batches that one run takes; None: all of a step.
        shared_unit: what holds the parameters that several stages use, where FSDP2 shards or replicates them.
        frees: FSDP2 frees gathered parameters after each forward pass.
        trees: take the gradients of each micro-batch; None: they add up.
    """

    parts: list[Part]
    buffers: list[RunningBuffers]
    objective: Objective
    cursor: Cursor
    work: Work
    relay: Relay
    shapes: Shapes
    make_schedule: Callable[[Sequence[Stage], int], Schedule]
    padded: Callable[[int], int]
    per_run: int | None = None
    shared_unit: nn.Module | None = None
    frees: bool = False
    trees: StageTrees | None = None
    stages: list[Stage] = field(default_factory=list)
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _run: Sequence[Share] = ()
    _ledger: Ledger | None = None
    _factor: float = 1.0

    # ---- training ----

    def forward_backward(self, shares: Sequence[Share], ledger: Ledger, factor: float) -> None:
        """See `lockstep.parallel.placed.ForwardBackward`."""
        runs = cut_into_runs(shares, self.per_run, self.padded)
        self._ledger, self._factor = ledger, factor
        agreement = self._learn_shapes(shares)
        keys = {share.index: key for share, key in zip(shares, agreement.signatures, strict=True)}
        if self.shared_unit is not None:
            _unshard(self.shared_unit)
        if self.trees is not None:
            self.trees.begin(ledger.slots)
        for place, run in enumerate(runs, start=1):
            self._start_run(run, [keys[share.index] for share in run], last=place == len(runs))
            self._schedule(len(run)).run()
        if self.shared_unit is not None:
            reduce_gradients(self.shared_unit)
        for buffers in self.buffers:
            buffers.finish_step(ledger.slots)
        self._run, self._ledger = (), None

    def _start_run(self, run: Sequence[Share], keys: Sequence[int], *, last: bool) -> None:
        self._run = run
        self.work.finish = self._loss
        if self.trees is not None:
            self.trees.run = run
        for stage in self.stages:
            metas = [self.shapes.of(key, stage.stage_index) for key in keys]
            stage.begin([received for received, _ in metas], [sent for _, sent in metas], reduces=last)

    def _schedule(self, count: int) -> Schedule:
        if count not in self._schedules:
            self._schedules[count] = self.make_schedule(self.stages, count)
        return self._schedules[count]

    @contextmanager
    def forward_at(self, stage: int, place: int) -> Iterator[None]:
        """A stage's forward pass of the micro-batch at `place` of the run goes on inside."""
        share = self._run[place]
        part, buffers = self._part(stage)
        self._take_up(part, share)
        with buffers.micro_batch(share.index, real=share.real):
            yield
            buffers.forward_done()

    @contextmanager
    def backward_at(self, stage: int, place: int) -> Iterator[None]:
        """Its backward pass. Recomputed forward passes write to statistics that nobody reads."""
        share = self._run[place]
        with self._part(stage)[1].micro_batch(share.index, real=False):
            yield

    def _part(self, stage: int) -> tuple[Part, RunningBuffers]:
        return next((p, b) for p, b in zip(self.parts, self.buffers, strict=True) if p.index == stage)

    def _take_up(self, part: Part, share: Share) -> None:
        self._share = share
        part.enter(self.cursor, share.index)
        self.work.inputs = partial(self.objective.inputs, share.batch)

    def _loss(self, outputs: Any) -> Tensor:
        """What the last stage returns in training: its share of what is differentiated. Enters it in the ledger."""
        share = self._share
        loss = Loss(*self.objective.factors(outputs, share.batch, self.work.calls))
        assert self._ledger is not None
        self._ledger.enter(share, loss)
        return loss.value * (self._factor * loss.times if share.real else 0.0)

    # ---- shapes ----

    def _learn_shapes(self, shares: Sequence[Share]) -> Agreement:
        """Send each new shape of batch through the stages once, up to the last one, which sends nothing on."""
        agreement = self.shapes.agree([self._inputs_of(share) for share in shares], training=True)
        if agreement.anyone:
            with self._gathered(keep=True), _restored_buffers(self.parts):
                for place in agreement.new:
                    learn = partial(self._learn, agreement.signatures[place])
                    self.relay.one(lambda part, i: self._take_up(part, shares[i]), place, learn=learn, to_last=False)
        return agreement

    def _learn(self, key: int, stage: int, received: Metas, sent: Metas) -> None:
        self.shapes.learn(key, stage, received, sent)

    def _inputs_of(self, share: Share) -> Any:
        return self.objective.inputs(share.batch) if self.parts[0].is_first else None

    # ---- forward alone ----

    @torch.no_grad()
    def evaluate(self, shares: Sequence[Share], ledger: Ledger) -> None:
        """See `lockstep.parallel.placed.Evaluate`."""

        def enter(outputs: Any) -> None:
            share = self._share
            ledger.enter(share, Loss(*self.objective.factors(outputs, share.batch, self.work.calls)))

        def start(part: Part, place: int) -> None:
            self._take_up(part, shares[place])

        self.work.finish = enter
        agreement = self.shapes.agree([self._inputs_of(share) for share in shares], training=False)
        keys = agreement.signatures
        with self._gathered(keep=False):
            for place in agreement.new:
                self.relay.one(start, place, learn=partial(self._learn, keys[place]))
            others = [place for place in range(len(shares)) if place not in agreement.new]
            self.relay.many(start, others, lambda place, stage: self.shapes.of(keys[place], stage))

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass outside of the step; all ranks call it with the same arguments and get the outputs."""
        self.work.inputs, self.work.finish = (lambda: (args, kwargs)), (lambda outputs: outputs)
        at = self.cursor.micro_batch
        with self._gathered(keep=False):
            outputs = self.relay.one(lambda part, _place: part.enter(self.cursor, at))
        return self.relay.share_result(outputs)

    @contextmanager
    def _gathered(self, *, keep: bool) -> Iterator[None]:
        """Forward passes inside need no collectives: pipelines side by side may do different things.

        Args:
            keep: leave the parameters gathered; a run of the schedule follows.
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
                if not keep:
                    _reshard(root)


def _unshard(root: nn.Module) -> None:
    """Gather all parameters of a root of FSDP2; those that are gathered already cost nothing."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _reshard(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _restored_buffers(parts: Sequence[Part]) -> Iterator[None]:
    """Forward passes inside leave no trace in buffers."""
    buffers = [buffer for part in parts for buffer in part.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)


def cut_into_runs(shares: Sequence[Share], per_run: int | None, padded: Callable[[int], int]) -> list[list[Share]]:
    """A step's micro-batches, as many at a time as a run takes.

    Runs that a schedule would refuse for their number are filled up with copies of their last micro-batch that weigh
    nothing.
    """
    size = per_run or len(shares)
    runs = [list(shares[begin : begin + size]) for begin in range(0, len(shares), size)]
    for run in runs:
        last = run[-1]
        run += [Share(last.index, last.batch, real=False)] * (padded(len(run)) - len(run))
    return runs
