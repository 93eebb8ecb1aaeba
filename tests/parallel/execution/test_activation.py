"""Each mode of activation checkpointing recomputes the blocks that it says, keeps what it says, and
changes no bit.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.errors import UsageError
from lockstep.models.protocol import blocks_of
from lockstep.parallel.execution.activation import apply_activation_checkpointing
from lockstep.randomness import RandomState, key_segments

SAMPLES = 4
WIDTH = 16
INNER = 64
BLOCKS = 8
INPUT = SAMPLES * WIDTH * 4  # bytes of what a block takes


class Block(nn.Module):
    """Keeps three inner tensors and its input for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, INNER)
        self.narrow = nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor, scale: float, *, shift: Tensor) -> Tensor:
        self.calls += 1
        return x + scale * self.narrow(self.dropout(torch.tanh(self.wide(x)))) + shift


class Model(nn.Module):
    def __init__(self, between: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.between = between

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, 0.5, shift=shift)
            if self.between:
                x = x * 2
        return x


class Parts(nn.Module):
    """Blocks that are lists of modules: nobody calls a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(BLOCKS // 2))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        for first, second in self.layers:
            x = second(first(x, 0.5, shift=shift), 0.5, shift=shift)
        return x


class _Alive(TorchDispatchMode):
    """Which storages of numbers the operations inside have made, beside those of
    `known` tensors.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                storage = leaf.untyped_storage()
                if storage._cdata in self.known:
                    continue
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return outputs

    def bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


def trained(model: nn.Module, mode: str, every: int) -> tuple[list[Tensor], list[int], int]:
    """Run two micro-batches forward, then both backward.

    Returns gradients, calls of each block, and the bytes that were kept for the first micro-batch
    besides its output.
    """
    random_state = RandomState(7, torch.device("cpu"))
    blocks = blocks_of(model)
    key_segments(random_state, [("", model)], chain=True)
    key_segments(random_state, blocks, chain=False)
    apply_activation_checkpointing(blocks, mode, random_state, every=every)
    x = torch.ones(SAMPLES, WIDTH, requires_grad=True)
    shift = torch.full((WIDTH,), 0.1, requires_grad=True)
    losses = []
    kept = []
    with random_state.running("train", 0):
        for micro_batch in range(2):
            random_state.at(micro_batch)
            with _Alive([x, shift, *model.parameters()]) as storages:
                output = model(x, shift)
            kept.append(storages.bytes() - INPUT)
            losses.append(output.square().sum())
            del output
        for loss in losses:
            loss.backward()
    gradients = [p.grad for p in (x, shift, *model.parameters())]
    assert all(g is not None for g in gradients)
    return gradients, [block.calls for _, block in blocks], kept[0]  # type: ignore[return-value, misc]


@pytest.mark.parametrize("make", [Model, Parts], ids=["list", "list of lists"])
@pytest.mark.parametrize(
    ("mode", "every", "twice", "inputs"),
    [
        ("full", 2, range(BLOCKS), BLOCKS),
        ("selective", 2, range(BLOCKS), None),
        ("every_n", 3, range(0, BLOCKS, 3), None),
        ("sequential", 2, range(BLOCKS), 4),
        ("sequential", 3, range(BLOCKS), 3),
        ("sequential", BLOCKS, range(BLOCKS), 1),
    ],
)
def test_blocks_that_are_recomputed_and_what_is_kept(
    make: type[nn.Module], mode: str, every: int, twice: Any, inputs: int | None
) -> None:
    """Of each run one input is kept: of the first block the model's own, which nobody has to keep
    anew.
    """
    plain, once, everything = trained(make(), "none", 2)
    gradients, calls, kept = trained(make(), mode, every)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
    assert once == [2] * BLOCKS
    assert calls == [4 if block in twice else 2 for block in range(BLOCKS)]
    assert kept < everything
    if inputs is not None:
        assert kept == (inputs - 1) * INPUT


def test_a_run_ends_where_the_model_does_something_between_blocks() -> None:
    """What is between blocks is computed once, and right."""
    plain, _, _ = trained(Model(between=True), "none", 2)
    gradients, calls, _ = trained(Model(between=True), "sequential", 4)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
    assert calls == [4] * BLOCKS


class Quantised(nn.Module):
    """Keeps an average that its forward pass follows and reads, as a codebook does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("constant", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.linear(x))) * self.average.clone() + self.constant
        self.average.lerp_(x.detach().mean(0), 0.5)
        return torch.tanh(x)


class Codebooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Quantised() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mode", ["full", "selective", "sequential"])
def test_recomputation_begins_with_the_buffers_of_the_forward_pass_and_leaves_them_alone(
    mode: str,
) -> None:
    def of(mode: str) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = Codebooks()
        random_state = RandomState(7, torch.device("cpu"))
        key_segments(random_state, blocks_of(model), chain=False)
        apply_activation_checkpointing(blocks_of(model), mode, random_state)
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        with random_state.running("train", 0):
            for micro_batch in range(2):
                random_state.at(micro_batch)
                model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], dict(
            model.named_buffers()
        )

    plain, left = of("none")
    gradients, buffers = of(mode)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
    assert all(torch.equal(value, buffers[name]) for name, value in left.items())
    assert not torch.equal(left["layers.0.average"], torch.ones(WIDTH))


def test_runs_of_compiled_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="blocks are compiled one by one"):
        apply_activation_checkpointing(
            blocks_of(Model()), "sequential", RandomState(7, torch.device("cpu")), compiled=True
        )
