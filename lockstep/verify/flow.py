"""Compares a step part by part: each module, the loss, each gradient, the reduction over ranks.

The reference stores what enters and leaves each module, forward and backward. A rank takes the same step, but each
module is given the reference's inputs, and its backward pass the reference's gradients, so that a difference does not
travel: what deviates is wrong by itself. This needs no bound on how a deep or chaotic network magnifies a last bit; the
bounds are those of one module, measured by the reference itself, with inputs whose last bits are changed.

The idea of comparing traces with bounds from a perturbed reference: TTrace (arXiv:2506.09280).
"""

import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.launch.failures import short_path
from lockstep.parallel.divergence import fingerprint
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.parallel_model import local
from lockstep.strategy import strategy_named
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten
from lockstep.trainer import Trainer
from lockstep.verify.experiments import with_other_last_bits
from lockstep.verify.memory import ModelMemory
from lockstep.verify.relations import SAME, distance, in_words, multiple, relation

Key = tuple[int, str, int, str]  # micro-batch, module, number of its call, what: "input 0", "gradient of output 1" …

FORWARD, LOSS, BACKWARD, REDUCTION = "forward", "loss", "backward", "reduction"
STAGES = (FORWARD, LOSS, BACKWARD, REDUCTION)
NOT_REDUCED = "not reduced"
SLACK = 4.0  # a part may deviate by this many times what changed last bits do
LEAST = 1e-5  # relative; a smaller deviation of a part is rounding in any case
CEILING = 1e-2  # where changed last bits do more than this, a part can't be judged
_MOST_TERMS = 32  # micro-batches of a step whose weights in a sum are solved for
_LARGEST = 4 << 30  # bytes that the reference stores of one step


@dataclass(frozen=True)
class Deviation:
    """One part of a step that differs on a rank, although it was given what the reference had.

    Attributes:
        stage: one of `STAGES`.
        rank, micro_batch: where.
        module: its name, and its class; of a parameter its name, and "".
        what: input, output or gradient.
        relative: size of the difference.
        relation: a clause: "is 2 × the reference".
        note: what else is different there: autocast, evaluation mode, the line of the first operation that differs.
    """

    stage: str
    rank: int
    micro_batch: int
    module: str
    what: str
    relative: float
    relation: str
    note: str = ""
    kind: str = ""


@dataclass
class RankFlow:
    """The findings of one rank, part by part.

    Attributes:
        deviations: in the order of the step.
        unjudged: parts that differ, and where last bits do too much to judge them.
        draws: modules that draw random numbers.
        collectives: that the forward pass calls.
        moved: attributes, globals and own generators that the forward pass changes.
        parts: number of parts that were compared.
    """

    deviations: list[Deviation] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    parts: int = 0


@dataclass
class RecordedFlow:
    """A recording of the reference.

    Attributes:
        tensors: of each part.
        state: (micro-batch, module, call) → what the module was like: training flag, autocast, dtypes.
        operations: (micro-batch, module) → (operation, fingerprint of its result, norm, line) in its own code.
        losses: micro-batch → (loss, number of targets).
        units: micro-batch → gradient with which its backward pass began.
        bounds: how far each part may deviate.
        flow: draws, and what the model remembers.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    state: dict[tuple[int, str, int], str] = field(default_factory=dict)
    operations: dict[tuple[int, str], list[tuple[str, int, float, str]]] = field(default_factory=dict)
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    units: dict[int, float] = field(default_factory=dict)
    bounds: dict[Key, float] = field(default_factory=dict)
    flow: RankFlow = field(default_factory=RankFlow)


class FlowRecorder:
    """Records the parts of a trainer's steps, or compares them with those of a reference.

    Args:
        model: as its author made it, whose modules are those of the trainer.
        names: id of a module → its name in that model.
        reference: what to compare with; None: record.
        nudge: change the last bits of what modules are given.
    """

    def __init__(
        self, trainer: Trainer, names: dict[int, str], reference: RecordedFlow | None = None, *, nudge: bool = False
    ) -> None:
        self.stored, self.flow = RecordedFlow(), RankFlow()
        self._trainer, self._names, self._reference = trainer, names, reference
        self._generator = torch.Generator().manual_seed(1) if nudge else None
        self._calls: dict[tuple[int, str], int] = {}
        self._inside: list[tuple[str, int]] = []  # modules that run, outermost first, with the number of their call
        self._forward, self._bytes = False, 0
        self._unreal: set[int] = set()
        self._found: list[tuple[int, int, Deviation]] = []
        self._seen: set[Key] = set()  # that deviate
        self._memory = ModelMemory(trainer.placed.parts)
        self._watched = _Operations(self)
        self._opened = ExitStack()
        placed = trainer.placed
        self._run, self._at = placed.forward_backward, placed.random_state.at
        placed.forward_backward = self._observed
        placed.random_state.at = self._begin  # type: ignore[method-assign]
        for part in placed.parts:
            for module in part.modules():
                if id(module) in names:
                    self._hook(module, names[id(module)])
        if placed.layout.shard == placed.layout.pipeline == 1:
            for name, parameter in placed.parameters.items():
                if parameter.requires_grad:
                    self._opened.callback(parameter.register_hook(self._gradient_of(name)).remove)  # type: ignore[no-untyped-call]

    @property
    def nudged(self) -> bool:
        """Return whether last bits are changed."""
        return self._generator is not None

    # ---- the step ----

    def _observed(self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float) -> None:
        self._unreal = {micro_batch.index for micro_batch in micro_batches if not micro_batch.real}
        self._calls.clear()
        add = accumulator.add

        def observed_add(micro_batch: MicroBatch, loss: Loss) -> None:
            self._remember()
            self._forward = False
            self._see_loss(micro_batch, loss)
            add(micro_batch, loss)

        accumulator.add = observed_add  # type: ignore[method-assign]
        with self._watched:
            self._run(micro_batches, accumulator, factor)
        self._forward = False

    def _begin(self, micro_batch: int) -> None:
        self._remember()
        self._memory.begin()
        self._forward = True
        self._inside.clear()
        for key in [key for key in self._calls if key[0] == micro_batch]:
            del self._calls[key]
        self._at(micro_batch)

    def _remember(self) -> None:
        """Note what the forward pass that ends here has changed in the model's memory."""
        if self._forward:
            self.flow.moved += [name for name in self._memory.moved() if name not in self.flow.moved]

    @property
    def micro_batch(self) -> int:
        """The micro-batch whose forward pass runs."""
        return self._trainer.placed.random_state.micro_batch

    @property
    def where(self) -> str | None:
        """The module whose own code runs in a forward pass; None outside of one."""
        if not self._forward or self.micro_batch in self._unreal:
            return None
        return self._inside[-1][0] if self._inside else ""

    # ---- modules ----

    def _hook(self, module: nn.Module, name: str) -> None:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.where is None:
                return None
            number = self._calls.get((self.micro_batch, name), 0)
            self._calls[self.micro_batch, name] = number + 1
            self._inside.append((name, number))
            self._see_state(module, name, number)
            return self._see_tree((args, kwargs), name, number, "input")

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self.where is None or not self._inside or self._inside[-1][0] != name:
                return None
            _, number = self._inside.pop()
            return self._see_tree(output, name, number, "output")

        self._opened.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._opened.callback(module.register_forward_hook(after).remove)

    def _see_state(self, module: nn.Module, name: str, number: int) -> None:
        kinds = sorted({str(p.dtype) for p in module.parameters(recurse=False)})
        device = self._trainer.device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
        mode = "training" if module.training else "evaluation"
        state = f"{mode} mode, autocast {autocast}, parameters {', '.join(kinds) or 'none'}".replace("torch.", "")
        self.stored.state[self.micro_batch, name, number] = state

    def _see_tree(self, tree: Any, name: str, number: int, what: str) -> Any:
        leaves, spec = tree_flatten(tree)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for place in places:
            leaves[place] = self._see((self.micro_batch, name, number, f"{what} {place}"), leaves[place])
        return tree_unflatten(leaves, spec) if places else tree

    def _see(self, key: Key, tensor: Tensor) -> Tensor:
        """Record a tensor of the forward pass; return what takes its place."""
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        if self._reference is None:
            self._store(key, tensor)
            if not differentiable:
                return tensor
            recorded: Tensor = _Recorded.apply(tensor, self, key)  # type: ignore[no-untyped-call]
            return recorded
        right = self._reference.tensors.get(key)
        order = STAGES.index(FORWARD)
        if right is None:
            if tensor.numel():
                self._deviates(order, key, float("inf"), "is there on this rank alone")
            return tensor
        self._compare(order, key, tensor, right)
        if right.shape != tensor.shape:
            return tensor
        value = right.to(device=tensor.device, dtype=tensor.dtype)
        if self._generator is not None and value.is_floating_point():
            value = with_other_last_bits(value, self._generator)
        if not differentiable:
            return value.clone()
        forced: Tensor = _Forced.apply(tensor, value, self, key)  # type: ignore[no-untyped-call]
        return forced

    def see_gradient(self, key: Key, gradient: Tensor) -> Tensor:
        """Record a gradient that enters or leaves a module; return what takes its place."""
        key = (*key[:3], f"gradient of {key[3]}")
        if self._reference is None:
            self._store(key, gradient)
            return gradient
        right = self._reference.tensors.get(key)
        if right is None:
            return gradient
        right = (right * self._unit(key[0])).to(gradient)
        self._compare(STAGES.index(BACKWARD), key, gradient, right)
        if self._generator is not None and right.is_floating_point():
            right = with_other_last_bits(right, self._generator)
        return right if right.shape == gradient.shape else gradient

    def _gradient_of(self, name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            micro_batch = self.micro_batch
            if micro_batch in self._unreal:
                return None
            key = (micro_batch, name, 0, "gradient")
            if self._reference is None:
                self._store(key, gradient)
                return None
            right = self._reference.tensors.get(key)
            if right is None:
                self._deviates(STAGES.index(BACKWARD), key, float("inf"), "is there on this rank alone")
                return None
            right = (right * self._unit(micro_batch)).to(gradient)
            self._compare(STAGES.index(BACKWARD), key, gradient, right)
            return right

        return hook

    # ---- the loss ----

    def _see_loss(self, micro_batch: MicroBatch, loss: Loss) -> None:
        if not micro_batch.real:
            return
        number = micro_batch.index
        value, targets = float(loss.summed()), float(loss.targets)
        self.stored.losses[number] = value, targets
        if self._reference is not None and number in self._reference.losses:
            right, right_targets = self._reference.losses[number]
            off = abs(value - right) / max(abs(right), 1e-300)
            key = (number, "", 0, "loss")
            self.stored.bounds[key] = off
            if targets != right_targets:
                self._deviates(
                    STAGES.index(LOSS), key, max(off, LEAST), f"counts {targets:g} targets instead of {right_targets:g}"
                )
            elif off > self._bound(key):
                times = value / right if right else 0.0
                self._deviates(STAGES.index(LOSS), key, off, f"is {in_words(times)} the reference")

        def began(gradient: Tensor) -> Tensor | None:
            self.stored.units[number] = float(gradient)
            right_unit = None if self._reference is None else self._reference.units.get(number)
            if not right_unit:
                return None
            unit = self._unit(number)
            times = float(gradient) / right_unit / unit
            if abs(times - 1) > LEAST and (number, "", 0, "loss") not in self._seen:
                how = f"is {in_words(times)} the reference"
                self._deviates(STAGES.index(LOSS), (number, "", 0, "weight in the backward pass"), abs(times - 1), how)
            return torch.full_like(gradient, right_unit * unit)

        if loss.value.requires_grad:
            loss.value.register_hook(began)  # type: ignore[no-untyped-call]

    def _unit(self, micro_batch: int) -> float:
        """Return the factor between this rank's gradients and the reference's: DDP takes a mean, which undoes it."""
        assert self._reference is not None
        mine, right = self.stored.units.get(micro_batch), self._reference.units.get(micro_batch)
        world = float(self._trainer.layout.world_size)
        if mine and right:
            for unit in (1.0, world):
                if abs(mine / right - unit) <= LEAST * unit:
                    return unit
        by_ddp = strategy_named(self._trainer.layout.strategy).reduces_by_ddp
        return world if by_ddp and not self._trainer.placed.reproducible else 1.0

    # ---- the reduction ----

    def see_reduced(self, gradients: dict[str, Tensor], right: Callable[[str, Tensor], Tensor | None]) -> None:
        """Compare the gradients before the update with the reference's, which were made of the same terms.

        Args:
            right: (name, gradient) → the reference's; of a shard, the same part of it.
        """
        assert self._reference is not None
        mine = sorted({key[0] for key in self._reference.tensors if key[3] == "gradient"} & set(self.stored.units))
        every = sorted({key[0] for key in self._reference.tensors if key[3] == "gradient"})
        for name, gradient in gradients.items():
            whole, gradient = right(name, gradient), local(gradient).cpu()
            if whole is None or gradient.shape != whole.shape:
                continue
            key = (-1, name, 0, "reduced gradient")
            off = distance(gradient, whole)
            self.stored.bounds[key] = off
            self.flow.parts += 1
            terms = [self._reference.bounds.get((m, name, 0, "gradient"), 0.0) for m in every]
            if off > max(LEAST, SLACK * max([self._reference.bounds.get(key, 0.0), *terms])):
                how = relation(gradient, whole, self._sums(name, whole, mine, every))
                if how.startswith("differs"):
                    how = self._weights(name, gradient, whole, mine, every) or how
                self._deviates(STAGES.index(REDUCTION), key, off, how)

    def _terms(self, name: str, every: list[int], whole: Tensor) -> dict[int, Tensor]:
        """Return what each micro-batch adds to a gradient; empty if that is not known, as of a shard."""
        assert self._reference is not None
        terms = {m: self._reference.tensors.get((m, name, 0, "gradient")) for m in every}
        known = {m: term.double() for m, term in terms.items() if term is not None}
        fits = all(term.shape == whole.shape for term in known.values())
        return known if fits and len(known) == len(every) else {}

    def _weights(self, name: str, gradient: Tensor, whole: Tensor, mine: list[int], every: list[int]) -> str:
        """Return by what each micro-batch weighs in a sum, if it is one."""
        terms = self._terms(name, every, whole)
        if not 1 < len(terms) <= _MOST_TERMS or gradient.numel() < len(terms):
            return ""
        columns = torch.stack([term.flatten() for term in terms.values()], dim=1)
        both = torch.stack([gradient.double().flatten(), whole.double().flatten()], dim=1)
        solved = torch.linalg.lstsq(columns, both).solution
        if distance(columns @ solved, both) > SAME:
            return ""
        weights = {m: round(float(a / b), 3) for m, (a, b) in zip(terms, solved.tolist(), strict=True) if b}
        missing = any(weight == 0 for m, weight in weights.items() if m not in mine)
        listed = ", ".join(f"micro-batch {m} by {weight:g}" for m, weight in weights.items())
        return f"weighs {listed}" + (f": those of other ranks are {NOT_REDUCED}" if missing else "")

    def _sums(self, name: str, whole: Tensor, mine: list[int], every: list[int]) -> dict[str, Tensor]:
        """Return what a reduction that goes wrong may leave, by a name."""
        known = self._terms(name, every, whole)
        if not known:
            return {}
        total = sum(known.values())
        assert isinstance(total, Tensor)
        size = float((total * total).sum())
        scale = float((total * whole.double()).sum()) / size if size else 0.0
        world = self._trainer.layout.world_size
        unit = self._unit(mine[0]) if mine else 1.0  # what a mean over ranks would have undone
        own = sum(known[m] for m in mine) if mine else torch.zeros_like(total)
        assert isinstance(own, Tensor)
        sums = {"this rank's own sum": own, "the sum of the other ranks": total - own}
        if mine:
            sums["this rank's last micro-batch's"] = known[mine[-1]]
            sums["this rank's first micro-batch's"] = known[mine[0]]
        found: dict[str, Tensor] = {}
        for what, each in sums.items():
            if bool(each.any()):
                found[f"{what}, {NOT_REDUCED}" if each is own else what] = each * scale * unit
                found[f"{world} × {what}"] = each * scale * unit * world
                found[f"1/{world} of {what}"] = each * scale * unit / world
        found["the reference plus this rank's own sum"] = (total + own) * scale
        return found

    # ---- small things ----

    def _store(self, key: Key, tensor: Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > _LARGEST:
            raise RuntimeError(f"what flows through this model in a step takes more than {_LARGEST >> 30} GiB")
        self.stored.tensors[key] = tensor.detach().cpu().clone()

    def _compare(self, order: int, key: Key, mine: Tensor, right: Tensor) -> None:
        assert self._reference is not None
        mine, right = mine.cpu(), right.cpu()
        off = distance(mine, right)
        self.flow.parts += 1
        self.stored.bounds[key] = off
        if off <= self._bound(key):
            return
        if self._reference.bounds.get(key, 0.0) > CEILING and bool(mine.any()) and multiple(mine, right) is None:
            self.flow.unjudged.append(f"{key[1] or 'the model'}, {key[3]}")
            return
        others = {
            f"the reference of micro-batch {m}": tensor
            for (m, *rest), tensor in self._reference.tensors.items()
            if tuple(rest) == key[1:] and m != key[0] and tensor.shape == mine.shape
        }
        self._deviates(order, key, off, relation(mine, right, others if len(others) < 64 else None))

    def _bound(self, key: Key) -> float:
        assert self._reference is not None
        least = LEAST if self._reference.tensors.get(key, torch.empty(0)).is_floating_point() else 0.0
        return max(least, SLACK * self._reference.bounds.get(key, 0.0))

    def _deviates(self, order: int, key: Key, relative: float, how: str) -> None:
        assert self._reference is not None
        micro_batch, name, number, what = key
        note, state = "", self.stored.state.get((micro_batch, name, number))
        right_state = self._reference.state.get((micro_batch, name, number))
        if state is not None and right_state is not None and state != right_state:
            pairs = zip(state.split(", ", 2), right_state.split(", ", 2), strict=True)
            note = "; ".join(f"{a} instead of {b}" for a, b in pairs if a != b)
        self._seen.add(key)
        cls = next((type(m).__name__ for part in self._trainer.placed.parts for m in part.modules()
                    if self._names.get(id(m)) == name), "") if STAGES[order] in (FORWARD, BACKWARD) else ""  # fmt: skip
        rank = self._trainer.cluster.facts.rank
        found = Deviation(STAGES[order], rank, micro_batch, name, what, relative, how, note, cls)
        self._found.append((order, len(self._found), found))

    def finish(self) -> RankFlow:
        """Return what was found; the recorder is of no use afterwards."""
        self._opened.close()
        self._found.sort(key=lambda found: found[:2])
        self.flow.deviations = [found for *_, found in self._found]
        if self._reference is not None and self.flow.deviations:
            first = self.flow.deviations[0]
            line = self._line_of(first)
            if line:
                self.flow.deviations[0] = Deviation(
                    **{**vars(first), "note": "; ".join(filter(None, (first.note, line)))}
                )
        return self.flow

    def _line_of(self, first: Deviation) -> str:
        """Return the first operation that differs in the code where a forward pass or a loss deviates."""
        assert self._reference is not None
        if first.stage not in (FORWARD, LOSS) or self._trainer.layout.shard > 1:
            return ""
        own = first.what.startswith("output") or first.stage == LOSS
        names = [first.module] if own else []
        names += [name for name in ("", *_parents(first.module)) if name not in names]
        for name in names:
            mine = self.stored.operations.get((first.micro_batch, name), [])
            right = self._reference.operations.get((first.micro_batch, name), [])
            for (op, bits, norm, line), (right_op, right_bits, right_norm, _) in zip(mine, right, strict=False):
                if op != right_op:
                    return f"first at {line}: {op} where the reference calls {right_op}"
                if (bits != right_bits and abs(norm - right_norm) > 1e-6 * abs(right_norm)) or (
                    bits != right_bits and norm == right_norm
                ):
                    return f"first at {line}, in {op}"
            if len(mine) != len(right) and mine and right:
                longer, text = (mine, "only here") if len(mine) > len(right) else (right, "only in the reference")
                op, _, _, line = longer[min(len(mine), len(right))]
                return f"first at {line}: {op} {text}"
        return ""


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a forward pass: draws, collectives, and the results with the line of the user's code."""

    def __init__(self, recorder: FlowRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        recorder = self._recorder
        where = recorder.where
        if where is None:
            return result
        if torch.Tag.nondeterministic_seeded in func.tags and where not in recorder.flow.draws:
            recorder.flow.draws.append(where)
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            if name not in recorder.flow.collectives:
                recorder.flow.collectives.append(name)
        elif func.namespace == "aten" and type(result) is Tensor and not result.is_meta:
            line = _line()
            if line:
                bits = int(fingerprint(result.detach()))
                norm = float(result.detach().double().abs().sum()) if result.numel() else 0.0
                row = (func.overloadpacket.__name__, bits, norm, line)
                recorder.stored.operations.setdefault((recorder.micro_batch, where), []).append(row)
        return result


def _line() -> str:
    """Return the line of the user's code, or of a model that ships, that calls torch; "" if something else does."""
    frame = inspect.currentframe()
    frame = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    ours = "/lockstep/" in file and ("/lockstep/models/" not in file or file.endswith("/protocol.py"))
    return "" if ours else f"{short_path(file)}:{frame.f_lineno}"


class _Recorded(torch.autograd.Function):
    """Passes a tensor on, and shows its gradient to the recorder."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recorder: FlowRecorder, key: Key) -> Tensor:
        ctx.recorder, ctx.key = recorder, key
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.recorder.see_gradient(ctx.key, gradients[0]), None, None


class _Forced(torch.autograd.Function):
    """Puts a value in place of a tensor, and the reference's gradient in place of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, recorder: FlowRecorder, key: Key) -> Tensor:
        ctx.recorder, ctx.key = recorder, key
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.recorder.see_gradient(ctx.key, gradients[0]), None, None, None


def save(stored: RecordedFlow, path: Path) -> None:
    """Write what the reference recorded."""
    torch.save(vars(stored), path)


def save_bounds(stored: RecordedFlow, path: Path) -> None:
    """Write, beside what the reference recorded, how far its parts deviate with other last bits."""
    path.with_suffix(".bounds").write_bytes(pickle.dumps(stored.bounds))


def load(path: Path) -> RecordedFlow:
    """Read what the reference recorded."""
    found = RecordedFlow(**torch.load(path, weights_only=False, mmap=True))
    bounds = path.with_suffix(".bounds")
    if bounds.exists():
        found.bounds = pickle.loads(bounds.read_bytes())
    return found
