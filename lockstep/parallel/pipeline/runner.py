"""Runs a rank's stages: a step's micro-batches by the schedule; evaluation and samples forward only (`Relay`).

A receiver must know the shape of a tensor, and stages in the middle never see a batch. So each shape of batch gets a
*signature*, a number that the first stage sends to all others before a run, and a new one is sent through the stages
once. The signatures of all data-parallel ranks are gathered together: FSDP2's collectives need these ranks to do the
same things. Micro-batches of known shapes go through a window at a time, others one by one, a description before each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.data.batches import MicroBatch
from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers, restored
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.pipeline.stage_module import CurrentMicroBatch, StageModule
from lockstep.parallel.pipeline.stage_parameters import wait_for
from lockstep.parallel.pipeline.torch_stage import Meta, Metas, Stage, reduce_gradients
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.parallel.strides import laid_out
from lockstep.randomness import RandomState, derive_key
from lockstep.torch_compat.pytree import tree_flatten, tree_leaves, tree_map

# (stage, place among the micro-batches): called before the stage's forward pass of this micro-batch
Start = Callable[[StageModule, int], None]


@dataclass
class Relay:
    """Forward passes that send tensors from stage to stage."""

    parts: Sequence[StageModule]  # this rank's stages, ascending
    rank_of: Sequence[int]  # of each stage of the pipeline, its pipeline rank
    group: dist.ProcessGroup  # the ranks of the pipeline
    device: torch.device
    objects_on: torch.device  # the device on which the group carries pickled objects

    def __post_init__(self) -> None:
        self._me = dist.get_rank(self.group)

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.rank_of[stage])

    def _is_here(self, stage: int) -> bool:
        return self.rank_of[stage] == self._me

    def one(
        self, start: Start, place: int = 0, *, learn: Callable[[int, Metas, Metas], None] | None = None,
        to_last: bool = True,
    ) -> Any:  # fmt: skip
        """Run one micro-batch of any shape; return the last stage's result, None on ranks that do not hold it.

        `learn` is called with (stage, received, sent) descriptions; `to_last`: run the last stage, too.
        """
        result, kept = None, ()
        for part in self.parts:
            received, metas = self._receive(part, kept)
            if part.is_last:
                if learn is not None:  # before it runs: the ranks count these shapes as known, even if it fails
                    learn(part.index, metas, ())
                if to_last:
                    start(part, place)
                    result = part(*received)
                break
            start(part, place)
            outputs = part(*received)
            sent = tuple(map(Meta.of, outputs))
            if learn is not None:
                learn(part.index, metas, sent)
            if self._is_here(part.index + 1):
                kept = outputs
                continue
            target = self._global(part.index + 1)
            dist.send_object_list([sent], dst=target, group=self.group, device=self.objects_on)
            for output in outputs:
                dist.send(output.detach().contiguous(), dst=target, group=self.group)
        return result

    def _receive(self, part: StageModule, kept: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Metas]:
        if part.is_first:
            return (), ()
        if self._is_here(part.index - 1):
            metas = tuple(map(Meta.of, kept))
            return tuple(meta.input_of(tensor.detach()) for tensor, meta in zip(kept, metas, strict=True)), metas
        source = self._global(part.index - 1)
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=self.group, device=self.objects_on)
        metas = box[0]
        tensors = tuple(meta.empty(self.device) for meta in metas)
        for tensor in tensors:
            dist.recv(tensor, src=source, group=self.group)
        return tuple(meta.input_of(tensor) for tensor, meta in zip(tensors, metas, strict=True)), metas

    def many(self, start: Start, places: Sequence[int], shapes: Callable[[int, int], tuple[Metas, Metas]]) -> None:
        """Run micro-batches of known shapes, (place, stage) → (received, sent), a window at a time, on all stages."""
        window = dist.get_world_size(self.group)
        works: list[tuple[dist.Work | None, Tensor]] = []  # a tensor must be kept until it has been sent
        for begin in range(0, len(places), window):
            now = places[begin : begin + window]
            kept: dict[int, tuple[Tensor, ...]] = {}  # place → inputs of the next of this rank's stages
            for part in self.parts:
                arriving = {}
                if not part.is_first and not self._is_here(part.index - 1):
                    source = self._global(part.index - 1)
                    kept = {at: tuple(m.empty(self.device) for m in shapes(at, part.index)[0]) for at in now}
                    arriving = {at: [dist.irecv(t, src=source, group=self.group) for t in kept[at]] for at in now}
                for place in now:
                    wait_for(arriving.get(place, ()))
                    start(part, place)
                    metas = shapes(place, part.index)[0]
                    outputs = part(*(laid_out(t, m.strides) for t, m in zip(kept.pop(place, ()), metas, strict=True)))
                    if part.is_last:
                        continue
                    if self._is_here(part.index + 1):
                        kept[place] = outputs
                    else:
                        target = self._global(part.index + 1)
                        sent = [output.contiguous() for output in outputs]
                        works += [(dist.isend(out, dst=target, group=self.group), out) for out in sent]
        wait_for([work for work, _ in works])

    def share_result(self, result: Any) -> Any:
        """Broadcast the last stage's result, and return it on all ranks of the pipeline."""
        source = self._global(len(self.rank_of) - 1)
        holds = self._is_here(len(self.rank_of) - 1)
        box: list[Any] = [None]
        if holds:
            box = [tree_map(lambda leaf: Meta.of(leaf) if isinstance(leaf, Tensor) else leaf, result)]
        dist.broadcast_object_list(box, src=source, group=self.group, device=self.objects_on)
        if not holds:
            result = tree_map(lambda leaf: leaf.empty(self.device) if isinstance(leaf, Meta) else leaf, box[0])
        result = tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                dist.broadcast(leaf, src=source, group=self.group)
        return result


@dataclass(frozen=True)
class Agreement:
    """The signatures that the ranks exchanged before a run."""

    signatures: list[int]  # of each of this pipeline's micro-batches
    # Places in the run of micro-batches with signatures new to this pipeline, one for each signature; where pipelines
    # run together, all places if any pipeline has new ones.
    new: list[int]
    anyone: bool  # whether any pipeline has new ones


@dataclass
class Shapes:
    """The shapes that a rank's stages receive and send, by signature."""

    dp_rank: int  # which of the `dp_size` parallel pipelines this rank belongs to
    dp_size: int
    knows_batches: bool  # this rank has the first stage
    device: torch.device  # on which all ranks exchange small messages
    together: bool  # pipelines exchange rows of experts in each pass, so that all of them run the same number of passes
    _seen: set[tuple[int, int]] = field(default_factory=set)  # (dp_rank, signature)
    _metas: dict[tuple[int, int], tuple[Metas, Metas]] = field(default_factory=dict)  # (signature, stage) → in, out

    def agree(self, batches: Sequence[Any], *, training: bool) -> Agreement:
        """Exchange signatures; all ranks call it together, with the same number of micro-batches."""
        table = torch.zeros(self.dp_size, len(batches), dtype=torch.int64, device=self.device)
        if self.knows_batches:
            table[self.dp_rank] = torch.tensor([signature(batch, training) for batch in batches])
        dist.all_reduce(table)
        rows = table.tolist()  # the hosts agree here; no device is waited for where the CPU has a process group
        mine: list[int] = rows[self.dp_rank]
        known = {key for dp_rank, key in self._seen if dp_rank == self.dp_rank}
        new = [place for place, key in enumerate(mine) if key not in known and key not in mine[:place]]
        received = {(dp_rank, key) for dp_rank, keys in enumerate(rows) for key in keys}
        anyone = bool(received - self._seen)
        if anyone and self.together:
            new = list(range(len(mine)))
        self._seen |= received
        return Agreement(mine, new, anyone)

    def learn(self, key: int, stage: int, received: Metas, sent: Metas) -> None:
        self._metas[key, stage] = (received, sent)

    def of(self, key: int, stage: int) -> tuple[Metas, Metas]:
        return self._metas[key, stage]


def signature(batch: Any, training: bool) -> int:
    """Return a hash of the shapes and the plain values in a batch."""
    leaves, structure = tree_flatten(batch)
    return derive_key(training, str(structure), [_leaf(leaf) for leaf in leaves])


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float) else type(leaf).__name__


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
                of_run = [keys[micro_batch.index] for micro_batch in run]
                metas = [self.shapes.of(key, stage.stage_index) for key in of_run]
                stage.begin(of_run, [m[0] for m in metas], [m[1] for m in metas], reduces=number == len(runs) - 1)
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
        """Prepare for its backward pass, which may recompute forward passes."""
        micro_batch = self._run[place]
        self.random_state.micro_batch = micro_batch.index  # of the calls that it may repeat
        with self._part(stage)[1].repeating(micro_batch.index, real=micro_batch.real):
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
            with self._gathered(keep=True), restored(self.parts):
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
