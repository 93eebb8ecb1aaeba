"""Finds out why a step differs, by experiments that change one thing at a time.

The first step in which a topology differs is taken again by it and the reference, from the reference's state before
it, with one thing changed on both sides. If the difference disappears, that thing was the cause.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lockstep.accelerator import default_generator
from lockstep.config import Config
from lockstep.strategy import parse_topology
from lockstep.verify.differences import StepResult
from lockstep.verify.subject import Case, Spec
from lockstep.verify.trace import StepFacts, Trace

if TYPE_CHECKING:
    from lockstep.trainer import Trainer


# ---- the experiments ----


# Experiments that change settings.
AGAIN, AGAIN_TOO = "again", "again too"
COMPRESSION, RECOMPUTATION, CLIP, COMPILE = (
    "without compression", "without recomputation", "without clipping", "without compilation",
)  # fmt: skip
FLOAT32, ONE_EACH = "in float32", "one micro-batch a rank"
# Experiments that change the running trainer; a case names them in `switches`, too.
SEEDS = "with one seed"  # every segment uses the same seed
DRAWS = "without random numbers"  # evaluation mode: dropout draws no random numbers
SAME = "with equal samples"  # every sample is the first one
DOUBLE = "in float64"  # the reference computes in float64
PERTURB = "with other last bits"  # the last bits of the reference's parameters are changed at the start
OUTPUTS = "outputs"  # changes nothing; records the output of each module


def apply(trainer: "Trainer", switches: frozenset[str]) -> None:
    """Change a trainer before its first step."""
    if SEEDS in switches:
        generator = default_generator(trainer.device)

        def enter(_segment: str) -> None:
            generator.manual_seed(0)

        trainer.placed.random_state.enter = enter  # type: ignore[assignment, method-assign]
    if DRAWS in switches:
        for part in trainer.placed.parts:
            part.eval()


@torch.no_grad()
def perturb(trainer: "Trainer") -> None:
    """Move each parameter up or down by its last bit, at random."""
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.placed.parameters.values():
        if parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)


class SameData(Dataset[Any]):
    """Repeats the first sample of another data set, as many times as that has samples."""

    deterministic = True

    def __init__(self, dataset: Any) -> None:
        self._sample, self._length = dataset[0], len(dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample


def is_indexed(data: Any) -> bool:
    """Return whether samples can be replaced: an indexed data set, not a loader and not a list of batches."""
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexed and not isinstance(data, list | tuple | IterableDataset)


def in_float64(tree: Any) -> Any:
    """Convert floating-point tensors in a batch to float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: in_float64(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(in_float64, tree))
    return tree


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 the default dtype in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def experiments_for(spec: Spec, topology: str, found: StepResult, data: Any) -> list[Case]:
    """Return the experiments for the step in which `found` differs."""
    config, at = spec.config, found.step
    _, ranks = parse_topology(topology)
    cases = [
        Case(AGAIN, start=at, switches=frozenset({OUTPUTS})),
        Case(AGAIN_TOO, start=at, switches=frozenset({OUTPUTS})),
        Case(SEEDS, start=at, switches=frozenset({SEEDS})),
        Case(DRAWS, start=at, switches=frozenset({DRAWS})),
        Case(PERTURB, start=at, switches=frozenset({PERTURB})),
    ]
    for name, settings in _switched_off(config).items():
        cases.append(Case(name, settings, start=at))
    if ranks > 1:
        size = config.training.batch_size * ranks
        one_each = {"training.global_batch_size": size, "training.gradient_accumulation_steps": None}
        cases.append(Case(ONE_EACH, one_each))
    if is_indexed(data):
        cases.append(Case(SAME, start=at, switches=frozenset({SAME})))
        if FLOAT32 not in _switched_off(config):
            cases.append(Case(DOUBLE, start=at, switches=frozenset({DOUBLE})))
    return cases


def _switched_off(config: Config) -> dict[str, dict[str, Any]]:
    training, precision, distributed = config.training, config.precision, config.distributed
    off: dict[str, dict[str, Any]] = {}
    if distributed.ddp.compression.kind != "none":
        off[COMPRESSION] = {"distributed.ddp.compression.kind": "none"}
    if training.gradient_checkpointing != "none":
        off[RECOMPUTATION] = {"training.gradient_checkpointing": "none"}
    if training.gradient_clip.strategy != "none":
        off[CLIP] = {"training.gradient_clip.strategy": "none"}
    if training.compile:
        off[COMPILE] = {"training.compile": False}
    low = precision.param_dtype != "fp32" or distributed.fsdp.reduce_dtype != "fp32"
    if low or precision.mode != "fp32":
        off[FLOAT32] = {
            "precision.mode": "fp32", "precision.param_dtype": "fp32", "distributed.fsdp.reduce_dtype": "fp32",
        }  # fmt: skip
    return off


# ---- the causes ----


GONE = 1e-2  # an experiment that leaves less than this fraction of a difference has removed it
LOW_ROUNDING = 8 * 2.0**-8  # largest relative rounding of a gradient by bfloat16 when the same terms are summed


@dataclass
class Cause:
    """Cause of a difference.

    Attributes:
        kind: one word or two: data order, random numbers, loss normalisation …
        text: one sentence.
        found_by: the experiments that show it.
        is_error: False for rounding.
    """

    kind: str
    text: str
    found_by: list[str] = field(default_factory=list)
    is_error: bool = True


@dataclass
class Evidence:
    """All that is known about one topology's difference.

    Attributes:
        found: the first step that differs, in the main run.
        tried: experiment → the topology's result.
        left_out: experiment that could not be made → reason.
        folder: of the reference's traces.
        config: of the run.
    """

    found: StepResult
    tried: dict[str, StepResult]
    left_out: dict[str, str]
    folder: Path
    config: Config

    def agrees(self, name: str) -> bool:
        """Return whether the experiment was made and removed the difference of gradients and values.

        Rounding counts: a difference that is not larger than the experiment's rounding is not explained by it.
        """
        result = self.tried.get(name)
        if result is None or result.has("start"):
            return False
        if self.found.has("gradient") and result.rounding > GONE * self.found.distance("gradient"):
            return False
        return all(result.distance(a) <= GONE * self.found.distance(a) for a in ("gradient", "value"))

    def facts(self, name: str) -> StepFacts | None:
        """Return the reference's facts of an experiment; None if it was not made."""
        trace = Trace(self.folder / name)
        step = self.tried[name].step if name in self.tried else self.found.step
        try:
            return trace.facts(step)
        except FileNotFoundError:
            return None


Rule = Callable[[Evidence], Cause | None]


def cause_of(evidence: Evidence) -> Cause:
    """Return the cause by the first rule that applies: direct evidence before experiments, narrow before wide ones."""
    for rule in RULES:
        cause = rule(evidence)
        if cause is not None:
            return cause
    text = "none of the experiments makes the difference go away"
    for name, why in evidence.left_out.items():
        text += f"; {name}: not possible ({why})"
    return Cause("unknown", text, list(evidence.tried))


def _data(e: Evidence) -> Cause | None:
    seen = [d for d in e.found.differences if d.aspect == "samples"]
    if not seen:
        return None
    return Cause("data order", f"ranks train on other data: {seen[0].name}", ["hashes of each micro-batch"])


def _start(e: Evidence) -> Cause | None:
    first = [d for d in e.found.differences if d.aspect == "start"]
    if not first:
        return None
    names = ", ".join(d.name for d in first[:3]) + (" …" if len(first) > 3 else "")
    return Cause(
        "first values", f"{_ranks(first[0].ranks)} started from other values of {names}", ["values before step 1"]
    )


def _nondeterminism(e: Evidence) -> Cause | None:
    once, twice = e.facts(AGAIN), e.facts(AGAIN_TOO)
    if once is not None and twice is not None and once.outputs != twice.outputs:
        pairs = zip(once.outputs, twice.outputs, strict=False)
        module = next((a[0] for a, b in pairs if a != b), "the model")
        text = f"{module or 'the model'} returns something else each time: an operation that is not deterministic, or "
        return Cause(
            "non-deterministic operation", text + "random numbers from outside torch's generator",
            ["the same step twice in one process"],
        )  # fmt: skip
    first, second = e.tried.get(AGAIN), e.tried.get(AGAIN_TOO)
    if first is not None and second is not None and first.fingerprints != second.fingerprints:
        name = next(n for n in first.fingerprints if first.fingerprints[n] != second.fingerprints.get(n))
        return Cause(
            "non-deterministic operation",
            f"the gradient of {name} is another one each time that these ranks take the step, not so in one process",
            ["the same step twice on the same ranks"],
        )
    return None


def _not_synchronized(e: Evidence) -> Cause | None:
    seen = e.tried.get(CLIP, e.found)  # where the norm differs, clipping makes all gradients differ
    unsynchronized = seen.unsynchronized
    if not unsynchronized:
        return None
    everything = len(unsynchronized) == len(seen.fingerprints)
    if not everything:
        more = len(unsynchronized) - 4
        listed = ", ".join(unsynchronized[:4]) + (f" and {more} more" if more > 0 else "")
        return Cause(
            "unsynchronised parameter",
            f"replicas keep their own gradients of {listed}: they are not reduced",
            ["gradients compared between ranks"],
        )
    if e.agrees(ONE_EACH):
        return Cause(
            "synchronisation",
            "gradients of some micro-batches are not reduced: the reducing backward pass is not the last of the step",
            ["gradients compared between ranks", ONE_EACH],
        )
    return Cause("synchronisation", "no gradient is reduced over the replicas", ["gradients compared between ranks"])


def _buffers(e: Evidence) -> Cause | None:
    names = [d.name for d in e.found.differences if d.aspect == "buffer"]
    if not names or e.found.has("gradient", "value", "loss"):
        return None
    return Cause("buffer", f"the buffer {names[0]} drifts; its gradients do not", ["values of buffers"])


def _record_only(e: Evidence) -> Cause | None:
    """Return a cause if gradients and values agree, but a number of the record does not."""
    if e.found.has("gradient", "value"):
        return None
    for aspect, kind in (("loss", "loss"), ("norm", "clip norm")):
        if e.found.has(aspect):
            return Cause(kind, f"the {aspect} is another one, gradients and updated values are not", [f"the {aspect}"])
    return None


def _update(e: Evidence) -> Cause | None:
    if e.found.has("gradient", "samples", "start") or not e.found.has("value"):
        return None
    return Cause("optimizer", "the optimizer gets the same gradients, and makes other values of them", ["values"])


def _when(name: str, kind: str, text: str) -> Rule:
    def rule(e: Evidence) -> Cause | None:
        return Cause(kind, text, [name]) if e.agrees(name) else None

    return rule


def _recomputation(e: Evidence) -> Cause | None:
    if not e.agrees(RECOMPUTATION):
        return None
    if e.agrees(DRAWS):
        return Cause(
            "random numbers in recomputation",
            "activation checkpointing draws other numbers when it recomputes than in the forward pass",
            [RECOMPUTATION, DRAWS],
        )
    return Cause("recomputation", "activation checkpointing recomputes something else", [RECOMPUTATION])


def _random(e: Evidence) -> Cause | None:
    seeds = e.found.seeds
    odd = sorted(rank for rank, seed in seeds.items() if seed != e.config.training.seed)
    if e.agrees(SEEDS):
        who = f"{_ranks(odd)} {'has' if len(odd) == 1 else 'have'} another seed" if odd else "keys of random numbers"
        return Cause("random numbers", f"{who}: dropout or noise is not the reference's", [SEEDS])
    if e.agrees(DRAWS):
        return Cause(
            "random numbers", "ranks draw numbers that do not depend on (seed, step, micro-batch, block) alone", [DRAWS]
        )
    return None


def _clip(e: Evidence) -> Cause | None:
    if not e.agrees(CLIP):
        return None
    norms = [d.name for d in e.found.differences if d.aspect == "norm"]
    seen = f": {norms[0]}" if norms else ""
    return Cause("clip norm", f"gradients are right until they are clipped, by another norm{seen}", [CLIP])


def _rounding(e: Evidence) -> Cause | None:
    if e.agrees(FLOAT32):
        if e.found.distance("gradient") <= LOW_ROUNDING:
            text = "low precision rounds differently here; in float32 the steps agree"
            return Cause("rounding", text, [FLOAT32], False)
        return Cause("low precision", "more than rounding goes wrong in low precision, and not in float32", [FLOAT32])
    if e.agrees(COMPILE):
        return Cause("compilation", "compiled code computes something else than on one rank", [COMPILE])
    return None


def _reference_rounds_as_much(e: Evidence) -> Cause | None:
    """Return rounding if the reference rounds as much: against float64, or else when last bits are changed."""
    texts = {
        DOUBLE: "about as near to a float64 reference ({:.1e}) as one process in float32",
        PERTURB: "about as far ({:.1e}) as the last bits of parameters move the reference",
    }
    for name, text in texts.items():
        result = e.tried.get(name)
        if e.found.has("gradient") and result is not None and not result.has("gradient"):
            return Cause("rounding", text.format(result.rounding), [name], False)
    return None


RULES: Sequence[Rule] = (
    _data,
    _start,
    _nondeterminism,
    _reference_rounds_as_much,
    _when(COMPRESSION, "compression", "what is sent in place of gradients does not add up to them"),
    _not_synchronized,
    _buffers,
    _record_only,
    _update,
    _recomputation,
    _random,
    _clip,
    _when(
        SAME, "loss normalisation",
        "micro-batches do not weigh by their valid targets; with equal samples the steps agree",
    ),
    _rounding,
    _when(
        ONE_EACH, "accumulation", "accumulating over micro-batches gives another sum than one micro-batch a rank"
    ),
)  # fmt: skip


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
