"""Records the parts of a step: those of the reference, and on a rank what deviates from them.

Also the operations of a forward pass, which tell the line of the user's code at which two passes
first differ.

Tests: tests/verify/test_updates.py
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.tensors import fingerprint
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.verify.algebra import Relation
from lockstep.verify.own_lines import line_of_code

# micro-batch, module, number of its call, what: "input 0", "gradient of output 1" …
Key = tuple[int, str, int, str]

Operation = tuple[str, int, float, str]  # its name, fingerprint of its result, norm, line
Operations = dict[tuple[int, str], list[Operation]]  # by micro-batch and module

FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
REDUCTION = "reduction"
STAGES = (FORWARD, LOSS, BACKWARD, REDUCTION)
SLACK = 4.0  # a part may deviate by this many times what changed last bits do
LEAST = 1e-5  # relative; a smaller deviation of a part is rounding in any case


@dataclass(frozen=True)
class Deviation:
    """One part of a step that differs on a rank, although it was given what the reference had."""

    stage: str  # one of `STAGES`
    rank: int  # rank, micro_batch: where
    micro_batch: int
    module: str  # its name, and its class; of a parameter its name, and ""
    what: str  # input, output or gradient
    relative: float  # size of the difference
    relation: Relation  # to the reference
    # what else differs: autocast, evaluation mode, the line of the first operation that does
    note: str = ""
    kind: str = ""


@dataclass
class RankFlow:
    """The findings of one rank, part by part."""

    deviations: list[Deviation] = field(default_factory=list)  # in the order of the step
    # parts that differ, where last bits do too much
    unjudged: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)  # modules that draw random numbers
    collectives: list[str] = field(default_factory=list)  # collectives that the forward pass calls
    # attributes, globals, generators that it changes
    moved: list[str] = field(default_factory=list)
    # others than the reference's: "drop.p 0.4 instead of 0.1"
    settings: list[str] = field(default_factory=list)
    parts: int = 0  # number of parts that were compared

    def count_part(self) -> None:
        """Note that one more part was compared."""
        self.parts += 1


@dataclass
class RecordedFlow:
    """A recording of the reference."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)  # of each part
    # by micro-batch, module, call: mode, dtypes
    state: dict[tuple[int, str, int], str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # module → plain attributes
    operations: Operations = field(default_factory=dict)  # of each module's own code
    # micro-batch → (loss, number of targets)
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    # micro-batch → gradient with which its backward pass began
    units: dict[int, float] = field(default_factory=dict)
    bounds: dict[Key, float] = field(default_factory=dict)  # how far each part may deviate

    def terms(self, name: str, micro_batches: Sequence[int], full: Tensor) -> dict[int, Tensor]:
        """Return what each micro-batch adds to a gradient.

        The result is empty if that is not known, as for a shard.
        """
        terms = {m: self.tensors.get((m, name, 0, "gradient")) for m in micro_batches}
        known = {m: term.double() for m, term in terms.items() if term is not None}
        fits = all(term.shape == full.shape for term in known.values())
        return known if fits and len(known) == len(micro_batches) else {}


def load(path: Path) -> RecordedFlow:
    """Read what the reference recorded."""
    flow = RecordedFlow(**torch.load(path, weights_only=False, mmap=True))
    bounds = path.with_suffix(".bounds")
    if bounds.exists():
        flow.bounds = pickle.loads(bounds.read_bytes())
    return flow


class ObservedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a forward pass.

    `where`: the micro-batch and the module that runs, None outside of one.
    """

    def __init__(
        self, where: Callable[[], tuple[int, str | None]], flow: RankFlow, operations: Operations
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._flow = flow
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        micro_batch, module = self._where()
        if module is None:
            return result
        if torch.Tag.nondeterministic_seeded in func.tags and module not in self._flow.draws:
            self._flow.draws.append(module)
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            if name not in self._flow.collectives:
                self._flow.collectives.append(name)
        elif func.namespace == "aten" and type(result) is Tensor and not result.is_meta:
            line = line_of_code()
            if line:
                bits = int(fingerprint(result.detach()))
                norm = float(result.detach().double().abs().sum()) if result.numel() else 0.0
                self._operations.setdefault((micro_batch, module), []).append(
                    (name, bits, norm, line)
                )
        return result


def first_line(mine: Operations, right: Operations, first: Deviation) -> str:
    """Return the first operation that differs where a forward pass or a loss deviates.

    The text also names its line of code.
    """
    own = first.what.startswith("output") or first.stage == LOSS
    names = [first.module] if own else []
    parts = first.module.split(".")
    parents = [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
    names += [name for name in ("", *parents) if name not in names]
    at = [(first.micro_batch, name) for name in names]
    operations = (_first_operation(mine.get(key, []), right.get(key, [])) for key in at)
    return next(filter(None, operations), "")


def _first_operation(mine: Sequence[Operation], right: Sequence[Operation]) -> str:
    for (op, bits, norm, line), (right_op, right_bits, right_norm, _) in zip(
        mine, right, strict=False
    ):
        if op != right_op:
            return f"first at {line}: {op} where the reference calls {right_op}"
        if bits != right_bits and (
            abs(norm - right_norm) > 1e-6 * abs(right_norm) or norm == right_norm
        ):
            return f"first at {line}, in {op}"
    if len(mine) != len(right) and mine and right:
        longer, text = (
            (mine, "only here") if len(mine) > len(right) else (right, "only in the reference")
        )
        op, _, _, line = longer[min(len(mine), len(right))]
        return f"first at {line}: {op} {text}"
    return ""
