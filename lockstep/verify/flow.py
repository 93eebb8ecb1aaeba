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
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.passes import ForwardBackward
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
        self._unreal: set[int] = set()
        self._found: list[recorded_flow.Deviation] = []
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
        for part in placed.parts:
            for module in part.modules():
                if id(module) in names:
                    name = names[id(module)]
                    self._hook(module, name)
                    mine = self.stored.settings[name] = settings_of_module(module)
                    right = mine if reference is None else reference.settings.get(name, {})
                    both = [
                        (key, value, right[key])
                        for key, value in mine.items()
                        if right.get(key, value) != value
                    ]
                    self.flow.settings.extend(
                        f"{name}.{key} {a!r} instead of {b!r}" for key, a, b in both
                    )
        if placed.layout.shard == placed.layout.pipeline == 1:
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
        self._unreal = {micro_batch.index for micro_batch in micro_batches if not micro_batch.real}
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
        if not self._forward or micro_batch in self._unreal:
            return micro_batch, None
        return micro_batch, self._inside[-1][0] if self._inside else ""

    # ---- modules ----

    def _hook(self, module: nn.Module, name: str) -> None:
        """Watch what enters and leaves a module, and put the reference's in its place."""

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            """Note a call of the module, and return the inputs that it is given instead."""
            micro_batch, where = self._now()
            if where is None:
                return None
            number = self._calls.get((micro_batch, name), 0)
            self._calls[micro_batch, name] = number + 1
            self._inside.append((name, number))
            kinds = sorted({str(p.dtype) for p in module.parameters(recurse=False)})
            device = self._trainer.device.type
            autocast = (
                str(torch.get_autocast_dtype(device))
                if torch.is_autocast_enabled(device)
                else "off"
            )
            mode = "training" if module.training else "evaluation"
            state = f"{mode} mode, autocast {autocast}, parameters {', '.join(kinds) or 'none'}"
            self.stored.state[micro_batch, name, number] = state.replace("torch.", "")
            return self._see_tree((args, kwargs), (micro_batch, name, number), "input")

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            micro_batch, where = self._now()
            if not self._inside or where != name:
                return None
            return self._see_tree(output, (micro_batch, *self._inside.pop()), "output")

        self._opened.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._opened.callback(module.register_forward_hook(after).remove)

    def _see_tree(self, tree: Any, call: tuple[int, str, int], what: str) -> Any:
        leaves, spec = tree_flatten(tree)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for position in positions:
            leaves[position] = self._see((*call, f"{what} {position}"), leaves[position])
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
        if micro_batch in self._unreal:
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
            right, right_targets = self._reference.losses[number]
            off = abs(value - right) / max(abs(right), 1e-300)
            key = (number, "", 0, "loss")
            self.stored.bounds[key] = off
            if targets != right_targets:
                how = Relation(
                    f"counts {targets:g} targets instead of {right_targets:g}", OTHER_COUNT
                )
                # With another count alone, either the sum or the mean is the reference's.
                as_mean = abs(value * right_targets - right * targets) <= LEAST * abs(
                    right * targets
                )
                if off > self._bound(key) and not as_mean:
                    how = Relation(
                        f"is {in_words(value / right) if right else value} the reference, and {how}"
                    )
                self._deviates(LOSS, key, max(off, LEAST), how)
            elif off > self._bound(key):
                times = value / right if right else 0.0
                self._deviates(LOSS, key, off, Relation(f"is {in_words(times)} the reference"))

        def began(gradient: Tensor) -> Tensor | None:
            """Compare the gradient with which a backward pass begins; go on with the right one."""
            self.stored.units[number] = float(gradient)
            right_unit = None if self._reference is None else self._reference.units.get(number)
            if not right_unit:
                return None
            unit = self._unit(number)
            times = float(gradient) / right_unit / unit
            if abs(times - 1) > LEAST and (number, "", 0, "loss") not in self._seen:
                how = Relation(f"is {in_words(times)} the reference")
                self._deviates(
                    LOSS, (number, "", 0, "weight in the backward pass"), abs(times - 1), how
                )
            return torch.full_like(gradient, right_unit * unit)

        if loss.value.requires_grad:
            loss.value.register_hook(began)  # type: ignore[no-untyped-call]

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
        mine = sorted(
            {key[0] for key in self._reference.tensors if key[3] == "gradient"}
            & set(self.stored.units)
        )
        every = sorted({key[0] for key in self._reference.tensors if key[3] == "gradient"})
        for name, gradient in gradients.items():
            expected = stored.get(GRADIENT, name)
            if expected is not None:
                expected = shard_like(expected, gradient)
                gradient = local(gradient).cpu()
            if expected is None or gradient.shape != expected.shape:
                continue
            key = (-1, name, 0, "reduced gradient")
            off = distance(gradient, expected)
            self.stored.bounds[key] = off
            self.flow.count_part()
            bounds = [self._reference.bounds.get((m, name, 0, "gradient"), 0.0) for m in every]
            if off > max(LEAST, SLACK * max([self._reference.bounds.get(key, 0.0), *bounds])):
                unit = self._unit(mine[0]) if mine else 1.0
                terms = self._reference.terms(name, every, expected)
                how = reduced_relation(
                    gradient, expected, terms, mine, self._trainer.layout.world_size, unit, scale
                )
                self._deviates(REDUCTION, key, off, how)

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
            (Relation(f"is the reference of micro-batch {m}"), tensor)
            for (m, *rest), tensor in self._reference.tensors.items()
            if tuple(rest) == key[1:] and m != key[0] and tensor.shape == mine.shape
        ]
        self._deviates(
            stage, key, off, relation(mine, right, others if len(others) < _MOST_OTHERS else ())
        )

    def _bound(self, key: Key) -> float:
        assert self._reference is not None
        least = (
            LEAST if self._reference.tensors.get(key, torch.empty(0)).is_floating_point() else 0.0
        )
        return max(least, SLACK * self._reference.bounds.get(key, 0.0))

    def _deviates(self, stage: str, key: Key, relative: float, how: Relation) -> None:
        """Note that a part deviates, and how the module's mode and types differ."""
        assert self._reference is not None
        micro_batch, name, number, what = key
        note = ""
        state = self.stored.state.get((micro_batch, name, number))
        right_state = self._reference.state.get((micro_batch, name, number))
        if state is not None and right_state is not None and state != right_state:
            pairs = zip(state.split(", ", 2), right_state.split(", ", 2), strict=True)
            note = "; ".join(f"{a} instead of {b}" for a, b in pairs if a != b)
        self._seen.add(key)
        modules = (m for part in self._trainer.placed.parts for m in part.modules())
        of_module = stage in (FORWARD, BACKWARD)
        cls = next(
            (type(m).__name__ for m in modules if of_module and self._names.get(id(m)) == name), ""
        )
        rank = self._trainer.state.cluster.facts.rank
        self._found.append(
            recorded_flow.Deviation(stage, rank, micro_batch, name, what, relative, how, note, cls)
        )

    def finish(self) -> RankFlow:
        """Return what was found; the recorder is of no use afterwards."""
        self._opened.close()
        self.flow.deviations[:] = sorted(
            self._found, key=lambda deviation: recorded_flow.STAGES.index(deviation.stage)
        )
        if self._reference is not None and self.flow.deviations:
            first = self.flow.deviations[0]
            if first.stage in (FORWARD, LOSS) and self._trainer.layout.shard == 1:
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
