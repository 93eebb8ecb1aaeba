"""Runs a rank's stages: steps by the schedule, evaluation and samples by forward passes alone.

All of it is programs for an executor (`lockstep.parallel.execution.executor`), which differ in what
a stage does with its activations, and in what carries them: micro-batches whose shapes the ranks
have seen (`Shapes`) go through together, into buffers that wait for them; those of new shapes go
one by one, each message after its description.

Tests: tests/parallel/execution/test_executor.py, tests/parallel/pipeline/test_pipeline.py,
tests/parity/test_pipeline.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.data.batches import MicroBatch
from lockstep.models.objective import Objective
from lockstep.models.observed import LossCalls
from lockstep.parallel.execution.executor import Executor, Stage
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.parallel.execution.programs import Program
from lockstep.parallel.execution.transport import Described, Meta, PeerToPeer, Transport
from lockstep.parallel.forward_effects.buffers import restored
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.pipeline.shapes import Agreement, RunDescriptions, Shapes
from lockstep.parallel.pipeline.stage_module import NO_INPUTS, StageCall, StageModule
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.randomness import RandomState
from lockstep.torch_compat.fsdp_state import reduce_gradients
from lockstep.torch_compat.pytree import tree_leaves, tree_map

# (module, micro-batch, activations of the stage before) → activations, or the last one's result
RunStage = Callable[[StageModule, MicroBatch, Sequence[Tensor]], Any]


@dataclass
class Runner:
    """The stages of a rank, and all that runs them."""

    parts: list[StageModule]  # the stages' modules, ascending
    # stage → what stands around its passes in training
    around: Mapping[int, Sequence[AroundMicroBatch]]
    objective: Objective
    random_state: RandomState
    rank_of: Sequence[int]  # of each stage of the pipeline, its pipeline rank
    group: dist.ProcessGroup  # the ranks of the pipeline
    device: torch.device
    objects_on: torch.device  # the device on which the group carries pickled objects
    shapes: Shapes  # of the tensors that are sent
    # number of micro-batches → this rank's program of a training run
    program: Callable[[int], Program]
    forward_program: Callable[[int], Program]  # the same of forward passes alone
    padded: Callable[[int], int]  # number of micro-batches → the number that the schedule takes
    # gradients of weights apart from those of inputs, where the schedule has them apart
    halves: bool = True
    per_run: int | None = None  # micro-batches that one run takes; None: all of a step
    shared_unit: nn.Module | None = None  # FSDP2's unit of parameters that several stages use
    frees: bool = False  # FSDP2 frees gathered parameters after each forward pass
    trees: StageTrees | None = None  # take the gradients of each micro-batch; None: they add up
    # index of a micro-batch → signature
    _key_of: Mapping[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        sums = self.trees.metas if self.trees is not None else lambda _stage: ()
        # Where bits count, gradients lie as they were made.
        self._descriptions = RunDescriptions(
            self.shapes,
            [part.index for part in self.parts],
            len(self.rank_of),
            sums,
            with_strides=self.trees is not None,
        )
        self._known = PeerToPeer(self.group, self.device)
        self._described = Described(self.group, self.device, self.objects_on)
        self._training = Executor(
            self._stages(self._call, self.around),
            self.random_state,
            self._known,
            carrier=self.trees,
            halves=self.halves,
        )
        self._evaluation = self._forward_only(self._call, self._known)

    def _stages(
        self, run: RunStage, around: Mapping[int, Sequence[AroundMicroBatch]] | None = None
    ) -> list[Stage]:
        """Return this rank's stages, whose forward pass is `run`."""
        return [
            Stage(
                partial(run, part),
                around=() if around is None else around[part.index],
                index=part.index,
                count=len(self.rank_of),
                earlier=part.earlier,
            )
            for part in self.parts
        ]

    def _forward_only(self, run: RunStage, transport: Transport) -> Executor:
        """Return what runs forward passes alone, with nothing around them."""
        return Executor(self._stages(run), self.random_state, transport)

    # ---- training ----

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        """Run the micro-batches of a step (`ForwardBackward`)."""
        runs = cut_into_runs(micro_batches, self.per_run, self.padded)
        self._learn_shapes(micro_batches)
        if self.shared_unit is not None:
            _unshard(self.shared_unit)
        if self.trees is not None:
            self.trees.begin(accumulator.micro_batches_per_step)
        size = self.per_run or len(micro_batches)
        for number, run in enumerate(runs):
            if self.trees is not None:
                self.trees.begin_run(run, range(number * size, (number + 1) * size))
            keys = [self._key_of[micro_batch.index] for micro_batch in run]
            self._training.run(
                self.program(len(run)),
                run,
                accumulator,
                factor,
                last=number == len(runs) - 1,
                known=self._descriptions.of_run(keys, training=True),
            )
            if self._known.strides:
                self._descriptions.note_strides(keys, self._known.strides)
        if self.shared_unit is not None:
            reduce_gradients(self.shared_unit, begun=False)

    def _call(self, part: StageModule, micro_batch: MicroBatch, received: Sequence[Tensor]) -> Any:
        """Run a stage; the last one returns the loss."""

        def finish(outputs: Any, calls: LossCalls | None) -> Loss:
            return Loss(*self.objective.factors(outputs, micro_batch.batch, calls))

        wanted = part.is_first or part.is_last
        inputs = self.objective.arguments(micro_batch.batch) if wanted else NO_INPUTS
        return part(StageCall(inputs, finish), *received)

    # ---- shapes ----

    def _learn_shapes(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Send each new shape of batch through the stages once; the last stage sends nothing."""
        agreement = self._agree(micro_batches, training=True)
        if agreement.anyone:
            with self._gathered(keep=True), restored(self.parts):
                for position in agreement.new:
                    self._learn(
                        micro_batches[position],
                        agreement.signatures[position],
                        lambda *_: None,
                        to_last=False,
                    )

    def _agree(self, micro_batches: Sequence[MicroBatch], *, training: bool) -> Agreement:
        """Exchange the signatures of micro-batches, and keep this pipeline's.

        A micro-batch is signed by what its first stage is called with, on the rank that has it.
        """
        signed = [
            self.objective.arguments(micro_batch.batch) if self.parts[0].is_first else None
            for micro_batch in micro_batches
        ]
        agreement = self.shapes.agree(signed, training=training)
        pairs = zip(micro_batches, agreement.signatures, strict=True)
        self._key_of = {micro_batch.index: key for micro_batch, key in pairs}
        return agreement

    def _learn(
        self,
        micro_batch: MicroBatch,
        key: int,
        done: Callable[[MicroBatch, Any], None],
        *,
        to_last: bool,
    ) -> None:
        """Send a micro-batch of a new shape through the stages; note what each takes and sends."""

        def learn(part: StageModule, micro_batch: MicroBatch, received: Sequence[Tensor]) -> Any:
            """Run a stage, and note the shapes that it takes and sends."""
            metas = tuple(map(Meta.of, received))
            inputs = [value.detach().requires_grad_(value.requires_grad) for value in received]
            # before it runs: the ranks count these shapes as known, even if it fails
            if part.is_last:
                self.shapes.learn(key, part.index, metas, ())
                return self._call(part, micro_batch, inputs) if to_last else None
            outputs = self._call(part, micro_batch, inputs)
            self.shapes.learn(key, part.index, metas, tuple(map(Meta.of, outputs)))
            return outputs

        self._forward_only(learn, self._described).run_forward(
            self.forward_program(1), [micro_batch], done
        )

    # ---- forward passes alone ----

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator) -> None:
        """Run forward passes (`Evaluate`)."""
        agreement = self._agree(micro_batches, training=False)
        known = [
            micro_batch
            for position, micro_batch in enumerate(micro_batches)
            if position not in agreement.new
        ]
        with self._gathered(keep=False):
            for position in agreement.new:
                self._learn(
                    micro_batches[position],
                    agreement.signatures[position],
                    accumulator.add,
                    to_last=True,
                )
            if known:
                keys = [self._key_of[micro_batch.index] for micro_batch in known]
                self._evaluation.run_forward(
                    self.forward_program(len(known)),
                    known,
                    accumulator.add,
                    self._descriptions.of_run(keys, training=False),
                )

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass outside of the step.

        All ranks call it with the same arguments and get the outputs.
        """
        call = StageCall((args, kwargs), lambda outputs, _calls: outputs)
        results: list[Any] = [None]  # by ranks that do not hold the last stage

        def run(part: StageModule, _micro_batch: MicroBatch, received: Sequence[Tensor]) -> Any:
            return part(call, *received)

        with self._gathered(keep=False):
            executor = self._forward_only(run, self._described)
            at = MicroBatch(self.random_state.micro_batch, None)
            executor.run_forward(
                self.forward_program(1), [at], lambda _, outputs: results.append(outputs)
            )
        return self._share_result(results[-1])

    def _share_result(self, result: Any) -> Any:
        """Broadcast the last stage's result, and return it on all ranks of the pipeline."""

        def described(leaf: Any) -> Any:
            return Meta.of(leaf) if isinstance(leaf, Tensor) else leaf

        def buffer(leaf: Any) -> Any:
            return leaf.empty(self.device) if isinstance(leaf, Meta) else leaf

        def contiguous(leaf: Any) -> Any:
            return leaf.contiguous() if isinstance(leaf, Tensor) else leaf

        source = self.rank_of[-1]
        holds = dist.get_rank(self.group) == source
        box: list[Any] = [tree_map(described, result) if holds else None]
        dist.broadcast_object_list(box, group_src=source, group=self.group, device=self.objects_on)
        result = tree_map(contiguous, result) if holds else tree_map(buffer, box[0])
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                dist.broadcast(leaf, group_src=source, group=self.group)
        return result

    @contextmanager
    def _gathered(self, *, keep: bool) -> Iterator[None]:
        """Gather parameters, so that forward passes in the block need no collectives.

        So parallel pipelines may run different numbers of them. `keep` leaves the parameters
        gathered: a run of the schedule follows.
        """
        roots: list[nn.Module] = list(self.parts)
        if self.shared_unit is not None:
            roots.append(self.shared_unit)
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
    """Return the runs of a schedule, padded with dummies to lengths that it takes.

    A dummy is a copy of the run's last micro-batch.
    """
    size = per_run or len(micro_batches)
    runs = [
        list(micro_batches[begin : begin + size]) for begin in range(0, len(micro_batches), size)
    ]
    for run in runs:
        last = run[-1]
        run += [MicroBatch(last.index, last.batch, real=False)] * (padded(len(run)) - len(run))
    return runs
