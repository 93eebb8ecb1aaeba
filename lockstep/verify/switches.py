"""What an experiment changes in a trainer: one thing at a time, to see whether a difference goes away."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from lockstep.parallel.divergence import fingerprint
from lockstep.randomness import generator_of

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

SEEDS = "one seed"  # every segment draws from the same seed
DRAWS = "no draws"  # evaluation mode: dropout draws nothing
SAME = "same data"  # every sample is the first one
OUTPUTS = "outputs"  # changes nothing; writes down what each module returns
DOUBLE = "float64"  # the reference computes in float64
NUDGE = "last bits"  # the reference starts from parameters whose last bits are others


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
def nudge(trainer: "Trainer") -> None:
    """Move each parameter up or down by its last bit, at random."""
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.placed.parameters.values():
        if parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)


class SameData(Dataset[Any]):
    """As many samples as another dataset has, all of them its first one."""

    deterministic = True

    def __init__(self, dataset: Any) -> None:
        self._sample, self._length = dataset[0], len(dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample


def is_indexed(data: Any) -> bool:
    """Whether samples can be exchanged: a dataset that is indexed, not a loader, not a list of batches."""
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexed and not isinstance(data, list | tuple | IterableDataset)


@contextmanager
def outputs_of(parts: list[nn.Module], into: list[tuple[str, int]]) -> Iterator[None]:
    """Write down what each module returns in the forward passes inside: the innermost ones come first."""

    def watch(name: str) -> Any:
        def after(_module: nn.Module, _args: object, output: object) -> None:
            for tensor in _tensors(output):
                into.append((name, int(fingerprint(tensor.detach()))))

        return after

    handles = [m.register_forward_hook(watch(name)) for part in parts for name, m in part.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)


def in_double(tree: Any) -> Any:
    """Floating-point tensors in a batch, as float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: in_double(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(in_double, tree))
    return tree


@contextmanager
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
