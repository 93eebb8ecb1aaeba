"""Changes one thing in a trainer and takes a step again, to see whether a difference disappears."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lockstep.config import Config
from lockstep.randomness import generator_of
from lockstep.strategy import parse_topology
from lockstep.verify.differences import StepResult
from lockstep.verify.subject import Case, Spec

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

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
        generator = generator_of(trainer.device)

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
