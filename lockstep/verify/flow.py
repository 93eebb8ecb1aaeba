"""Compares a step part by part: each module, the loss, each gradient, the reduction over ranks.

Each module of a rank is given the reference's inputs, and its backward pass the reference's
gradients, so that a difference does not travel: what deviates is wrong by itself. The bounds are
those of one module, measured by the reference itself with inputs whose last bits are changed, as in
TTrace (arXiv:2506.09280).

Tests: tests/verify/test_updates.py, tests/verify/test_faults.py
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.data.batches import MicroBatch
from lockstep.parallel.execution.passes import ForwardBackward
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.strategy import strategy_named
from lockstep.tensors import local, shard_like, with_other_last_bits
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten
from lockstep.trainer import Trainer
from lockstep.verify import recorded_flow
from lockstep.verify.algebra import (
    CEILING,
    OTHER_COUNT,
    Relation,
    distance,
    in_words,
    multiple,
    reduced_relation,
    relation,
)
from lockstep.verify.experiments import settings_of_module
from lockstep.verify.memory import ModelMemory
from lockstep.verify.recorded_flow import (
    BACKWARD,
    FORWARD,
    LEAST,
    LOSS,
    REDUCTION,
    SLACK,
    Key,
    RankFlow,
    RecordedFlow,
)
from lockstep.verify.trace import GRADIENT, Stored

_LARGEST = 4 << 30  # bytes that the reference stores of one step
_MOST_OTHERS = 64  # micro-batches with which a wrong tensor is compared
_HERE_ALONE = Relation("is there on this rank alone")


class FlowRecorder:
    """Records the parts of a trainer's steps, or compares them with those of a reference.

    `names`: id of a module → its name in the author's model; `nudge`: change the last bits of what
    modules are given.
    """

    def __init__(
        self,
        trainer: Trainer,
        names: dict[int, str],
        reference: RecordedFlow | None = None,
        *,
        nudge: bool = False,
    ) -> None:
        self.stored = RecordedFlow()
        self.flow = RankFlow()
        self._trainer = trainer
        self._names = names
        self._reference = reference
        self._generator = torch.Generator().manual_seed(1) if nudge else None
        self._calls: dict[tuple[int, str], int] = {}
        # modules that run, outermost first, with the number of their call
        self._inside: list[tuple[str, int]] = []
        self._forward = False
        self._bytes = 0
        self._dummies: set[int] = set()  # micro-batches that count nothing
        self._deviations: list[recorded_flow.Deviation] = []
        self._seen: set[Key] = set()  # that deviate
        self._memory = ModelMemory(trainer.placed.parts)
        self._watched = recorded_flow.ObservedOperations(
            self._now, self.flow, self.stored.operations
        )
        self._opened = ExitStack()
        placed = trainer.placed
        self._at = placed.random_state.at
        placed.around_passes.append(self._observed)
        placed.random_state.at = self._begin  # type: ignore[method-assign]
        self._watch_modules()
        self._watch_parameters()

    def _watch_modules(self) -> None:
        """Watch each module that has a name, and note how its settings differ."""
        for part in self._trainer.placed.parts:
            for module in part.modules():
                name = self._names.get(id(module))
                if name is None:
                    continue
                self._hook(module, name)
                settings = settings_of_module(module)
                self.stored.settings[name] = settings
                if self._reference is None:
                    continue
                right = self._reference.settings.get(name, {})
                for key, value in settings.items():
                    if right.get(key, value) != value:
                        text = f"{name}.{key} {value!r} instead of {right[key]!r}"
                        self.flow.settings.append(text)

    def _watch_parameters(self) -> None:
        """Watch the gradient of each parameter that is complete on this rank."""
        placed = self._trainer.placed
        if placed.layout.shards_parameters or placed.layout.has_stages:
            return
        for name, parameter in placed.parameters.items():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                hook = parameter.register_hook(partial(self._see_parameter_gradient, name))  # type: ignore[no-untyped-call]
                self._opened.callback(hook.remove)

    # ---- the step ----

    def _observed(
        self,
        run: ForwardBackward,
        micro_batches: Sequence[MicroBatch],
        accumulator: LossAccumulator,
        factor: float,
    ) -> None:
        """Run a step's passes with each operation and each loss watched."""
        self._dummies = {micro_batch.index for micro_batch in micro_batches if not micro_batch.real}
        self._calls.clear()

        def see(micro_batch: MicroBatch, loss: Loss) -> None:
            self._remember()
            self._forward = False
            if micro_batch.real:
                self._see_loss(micro_batch.index, loss)

        accumulator.watch(see)
        with self._watched:
            run(micro_batches, accumulator, factor)
        self._forward = False

    def _begin(self, micro_batch: int, earlier: Mapping[str, int] | None = None) -> None:
        self._remember()
        self._memory.begin()
        self._forward = True
        self._inside.clear()
        for key in [key for key in self._calls if key[0] == micro_batch]:
            del self._calls[key]
        self._at(micro_batch, earlier)

    def _remember(self) -> None:
        """Note what the forward pass that ends here has changed in the model's memory."""
        if self._forward:
            self.flow.moved.extend(
                [name for name in self._memory.moved() if name not in self.flow.moved]
            )

    def _now(self) -> tuple[int, str | None]:
        """Return the micro-batch, and the module whose own code runs in a forward pass.

        None outside of one.
        """
        micro_batch = self._trainer.placed.random_state.micro_batch
        if not self._forward or micro_batch in self._dummies:
            return micro_batch, None
        return micro_batch, self._inside[-1][0] if self._inside else ""

    # ---- modules ----

    def _hook(self, module: nn.Module, name: str) -> None:
        """Watch what enters and leaves a module, and put the reference's in its place."""

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            """Note a call of the module, and return the inputs that it is given instead."""
            micro_batch, running = self._now()
            if running is None:
                return None
            number = self._calls.get((micro_batch, name), 0)
            self._calls[micro_batch, name] = number + 1
            self._inside.append((name, number))
            self.stored.state[micro_batch, name, number] = self._state_of(module)
            return self._see_tree((args, kwargs), (micro_batch, name, number), "input")

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            """Return the output that the module is taken to have returned."""
            micro_batch, running = self._now()
            if not self._inside or running != name:
                return None
            return self._see_tree(output, (micro_batch, *self._inside.pop()), "output")

        self._opened.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._opened.callback(module.register_forward_hook(after).remove)

    def _state_of(self, module: nn.Module) -> str:
        """Return a module's mode and dtypes: `training mode, autocast off, parameters float32`."""
        dtypes = sorted({str(p.dtype) for p in module.parameters(recurse=False)})
        device = self._trainer.device.type
        autocast = "off"
        if torch.is_autocast_enabled(device):
            autocast = str(torch.get_autocast_dtype(device))
        mode = "training" if module.training else "evaluation"
        state = f"{mode} mode, autocast {autocast}, parameters {', '.join(dtypes) or 'none'}"
        return state.replace("torch.", "")

    def _see_tree(self, tree: Any, call: tuple[int, str, int], side: str) -> Any:
        """Record the tensors of a call's inputs or outputs; return what takes their place."""
        leaves, spec = tree_flatten(tree)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for position in positions:
            leaves[position] = self._see((*call, f"{side} {position}"), leaves[position])
        return tree_unflatten(leaves, spec) if positions else tree

    def _see(self, key: Key, tensor: Tensor) -> Tensor:
        """Record a tensor of the forward pass; return what takes its place."""
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        if self._reference is None:
            self._store(key, tensor)
            return _Seen.put(tensor, tensor, self, key) if differentiable else tensor
        right = self._reference.tensors.get(key)
        if right is None:
            if tensor.numel():
                self._deviates(FORWARD, key, float("inf"), _HERE_ALONE)
            return tensor
        self._compare(FORWARD, key, tensor, right)
        if right.shape != tensor.shape:
            return tensor
        value = right.to(device=tensor.device, dtype=tensor.dtype)
        if self._generator is not None and value.is_floating_point():
            value = with_other_last_bits(value, self._generator)
        gradient = (*key[:3], f"gradient of {key[3]}")
        if not differentiable:
            if gradient in self._reference.tensors:
                self._deviates(BACKWARD, gradient, 1.0, Relation("is not computed"))
            return value.clone()
        return _Seen.put(tensor, value, self, key)

    def see_gradient(self, key: Key, gradient: Tensor) -> Tensor:
        """Record a gradient that enters or leaves a module; return what takes its place."""
        right = self._compare_gradient((*key[:3], f"gradient of {key[3]}"), gradient)
        if right is None or right.shape != gradient.shape:
            return gradient
        if self._generator is not None and right.is_floating_point():
            return with_other_last_bits(right, self._generator)
        return right

    def _compare_gradient(self, key: Key, gradient: Tensor) -> Tensor | None:
        """Record a gradient; return the reference's, if there is one."""
        if self._reference is None:
            self._store(key, gradient)
            return None
        right = self._reference.tensors.get(key)
        if right is None:
            return None
        right = (right * self._unit(key[0])).to(gradient)
        self._compare(BACKWARD, key, gradient, right)
        return right

    def _see_parameter_gradient(self, name: str, gradient: Tensor) -> Tensor | None:
        micro_batch = self._trainer.placed.random_state.micro_batch
        if micro_batch in self._dummies:
            return None
        key = (micro_batch, name, 0, "gradient")
        if self._reference is not None and key not in self._reference.tensors:
            self._deviates(BACKWARD, key, float("inf"), _HERE_ALONE)
        return self._compare_gradient(key, gradient)

    # ---- the loss ----

    def _see_loss(self, number: int, loss: Loss) -> None:
        """Compare a micro-batch's loss, its targets, and what its backward pass starts from."""
        value = float(loss.summed())
        targets = float(loss.targets)
        self.stored.losses[number] = value, targets
        if self._reference is not None and number in self._reference.losses:
            key = (number, "", 0, "loss")
            right, right_targets = self._reference.losses[number]
            off = abs(value - right) / max(abs(right), 1e-300)
            self.stored.bounds[key] = off
            times = value / right if right else 0.0
            if targets != right_targets:
                difference = Relation(
                    f"counts {targets:g} targets instead of {right_targets:g}", OTHER_COUNT
                )
                # With another count alone, either the sum or the mean is the reference's.
                mean_is_off = abs(value * right_targets - right * targets)
                is_same_mean = mean_is_off <= LEAST * abs(right * targets)
                if off > self._bound(key) and not is_same_mean:
                    size = in_words(times) if right else value
                    difference = Relation(f"is {size} the reference, and {difference}")
                self._deviates(LOSS, key, max(off, LEAST), difference)
            elif off > self._bound(key):
                self._deviates(LOSS, key, off, Relation(f"is {in_words(times)} the reference"))
        if loss.value.requires_grad:
            loss.value.register_hook(partial(self._see_begin_of_backward, number))  # type: ignore[no-untyped-call]

    def _see_begin_of_backward(self, number: int, gradient: Tensor) -> Tensor | None:
        """Compare the gradient with which a backward pass begins; go on with the right one."""
        self.stored.units[number] = float(gradient)
        right = None if self._reference is None else self._reference.units.get(number)
        if not right:
            return None
        unit = self._unit(number)
        times = float(gradient) / right / unit
        if abs(times - 1) > LEAST and (number, "", 0, "loss") not in self._seen:
            key = (number, "", 0, "weight in the backward pass")
            difference = Relation(f"is {in_words(times)} the reference")
            self._deviates(LOSS, key, abs(times - 1), difference)
        return torch.full_like(gradient, right * unit)

    def _unit(self, micro_batch: int) -> float:
        """Return the factor between this rank's gradients and the reference's.

        DDP takes a mean over the ranks, which undoes the factor.
        """
        assert self._reference is not None
        mine = self.stored.units.get(micro_batch)
        right = self._reference.units.get(micro_batch)
        world = float(self._trainer.layout.world_size)
        if mine and right:
            for unit in (1.0, world):
                if abs(mine / right - unit) <= LEAST * unit:
                    return unit
        by_ddp = strategy_named(self._trainer.layout.strategy).in_buckets
        return world if by_ddp and not self._trainer.placed.reproducible else 1.0

    # ---- the reduction ----

    def see_reduced(self, gradients: dict[str, Tensor], stored: Stored, scale: float) -> None:
        """Compare the gradients before the update with the reference's.

        The reference's were made of the same terms.

        `scale` is the factor by which the sum over the micro-batches was multiplied after its
        reduction.
        """
        assert self._reference is not None
        every = {key[0] for key in self._reference.tensors if key[3] == "gradient"}
        micro_batches = sorted(every)
        on_this_rank = sorted(every & set(self.stored.units))
        unit = self._unit(on_this_rank[0]) if on_this_rank else 1.0
        for name, gradient in gradients.items():
            expected = stored.get(GRADIENT, name)
            if expected is None:
                continue
            expected = shard_like(expected, gradient)
            gradient = local(gradient).cpu()
            if gradient.shape != expected.shape:
                continue
            key = (-1, name, 0, "reduced gradient")
            off = distance(gradient, expected)
            self.stored.bounds[key] = off
            self.flow.count_part()
            bounds = [
                self._reference.bounds.get((number, name, 0, "gradient"), 0.0)
                for number in micro_batches
            ]
            largest = max([self._reference.bounds.get(key, 0.0), *bounds])
            if off > max(LEAST, SLACK * largest):
                difference = reduced_relation(
                    gradient,
                    expected,
                    self._reference.terms(name, micro_batches, expected),
                    on_this_rank,
                    self._trainer.layout.world_size,
                    unit,
                    scale,
                )
                self._deviates(REDUCTION, key, off, difference)

    def _store(self, key: Key, tensor: Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > _LARGEST:
            raise RuntimeError(
                f"what flows through this model in a step takes more than {_LARGEST >> 30} GiB"
            )
        self.stored.tensors[key] = tensor.detach().cpu().clone()

    def _compare(self, stage: str, key: Key, mine: Tensor, right: Tensor) -> None:
        """Compare a part with the reference's, and note it if it deviates."""
        assert self._reference is not None
        mine = mine.cpu()
        right = right.cpu()
        off = distance(mine, right)
        self.flow.count_part()
        self.stored.bounds[key] = off
        if off <= self._bound(key):
            return
        too_far = self._reference.bounds.get(key, 0.0) > CEILING
        if too_far and bool(mine.any()) and multiple(mine, right) is None:
            self.flow.unjudged.append(f"{key[1] or 'the model'}, {key[3]}")
            return
        others = [
            (Relation(f"is the reference of micro-batch {other[0]}"), tensor)
            for other, tensor in self._reference.tensors.items()
            if other[1:] == key[1:] and other[0] != key[0] and tensor.shape == mine.shape
        ]
        if len(others) >= _MOST_OTHERS:
            others = []
        self._deviates(stage, key, off, relation(mine, right, others))

    def _bound(self, key: Key) -> float:
        """Return how far a part may deviate, relatively; whole numbers have to be the same."""
        assert self._reference is not None
        tensor = self._reference.tensors.get(key)  # None: a loss
        is_float = tensor is None or tensor.is_floating_point()
        return max(LEAST if is_float else 0.0, SLACK * self._reference.bounds.get(key, 0.0))

    def _deviates(self, stage: str, key: Key, off: float, difference: Relation) -> None:
        """Note that a part deviates, and how the module's mode and types differ."""
        assert self._reference is not None
        micro_batch, name, call, part = key
        note = ""
        state = self.stored.state.get((micro_batch, name, call))
        right_state = self._reference.state.get((micro_batch, name, call))
        if state is not None and right_state is not None and state != right_state:
            pairs = zip(state.split(", ", 2), right_state.split(", ", 2), strict=True)
            note = "; ".join(f"{mine} instead of {right}" for mine, right in pairs if mine != right)
        self._seen.add(key)
        module_class = self._class_of(name) if stage in (FORWARD, BACKWARD) else ""
        rank = self._trainer.state.cluster.facts.rank
        self._deviations.append(
            recorded_flow.Deviation(
                stage, rank, micro_batch, name, part, off, difference, note, module_class
            )
        )

    def _class_of(self, name: str) -> str:
        """Return the name of a module's class; empty if this rank has no such module."""
        for part in self._trainer.placed.parts:
            for module in part.modules():
                if self._names.get(id(module)) == name:
                    return type(module).__name__
        return ""

    def finish(self) -> RankFlow:
        """Return what was found; the recorder is of no use afterwards."""
        self._opened.close()
        self.flow.deviations[:] = sorted(
            self._deviations, key=lambda deviation: recorded_flow.STAGES.index(deviation.stage)
        )
        if self._reference is not None and self.flow.deviations:
            first = self.flow.deviations[0]
            is_of_forward = first.stage in (FORWARD, LOSS)
            if is_of_forward and not self._trainer.layout.shards_parameters:
                line = recorded_flow.first_line(
                    self.stored.operations, self._reference.operations, first
                )
                self.flow.deviations[0] = replace(
                    first, note="; ".join(filter(None, (first.note, line)))
                )
        return self.flow


class _Seen(torch.autograd.Function):
    """Puts a value in place of a tensor, and what the recorder returns in place of its gradient."""

    @classmethod
    def put(cls, tensor: Tensor, value: Tensor, recorder: FlowRecorder, key: Key) -> Tensor:
        seen: Tensor = cls.apply(tensor, value.detach(), recorder, key)  # type: ignore[no-untyped-call]
        return seen

    @staticmethod
    def forward(
        ctx: Any, _tensor: Tensor, value: Tensor, recorder: FlowRecorder, key: Key
    ) -> Tensor:
        ctx.recorder = recorder
        ctx.key = key
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.recorder.see_gradient(ctx.key, gradients[0]), None, None, None
