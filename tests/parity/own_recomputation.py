"""Models that recompute parts of their forward pass themselves, in each way that PyTorch's users
know.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from lockstep.config import config_from
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer

FEATURES = 6
WIDTH = 8
SAMPLES = 48

# (loss, gradient norm) of each step, as exact text, and a sum of the parameters' values
Numbers = tuple[list[tuple[str, str]], str]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.inner = False  # recompute a part of the block
        # draw from Python's generator, too, which PyTorch does not restore
        self.depth_by_python = False

    def perceptron(self, x: Tensor) -> Tensor:
        return self.drop(self.narrow(torch.relu(self.wide(x))))

    def forward(self, x: Tensor) -> Tensor:
        kept = random.random() < 0.7 if self.depth_by_python else True  # stochastic depth
        added = (
            checkpoint(self.perceptron, x, use_reentrant=False)
            if self.inner
            else self.perceptron(x)
        )
        return self.drop(x) + kept * added


def selective() -> Any:
    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.native_dropout.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def each(layers: Iterable[nn.Module], x: Tensor, **options: Any) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, **{"use_reentrant": False, **options})
    return x


def in_row(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def all_at_once(layers: nn.ModuleList, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(
        lambda y: torch.dropout(in_row(layers, y), 0.2, True), x, use_reentrant=reentrant
    )


def nested(layers: nn.ModuleList, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(lambda y: each(layers, y), x, use_reentrant=reentrant)


def in_pairs(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for begin in range(0, len(layers), 2):
        x = checkpoint(partial(in_row, layers[begin : begin + 2]), x, use_reentrant=False)
    return x


def of_parts(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        layer.inner = True
    return in_row(layers, x)


class Reversible(torch.autograd.Function):
    """Computes y1 = x1 + f(x2), y2 = x2 + g(y1), keeps y alone, and runs g and f again to come back
    to x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, draws: Callable[[], Any], *_weights: Tensor
    ) -> Tensor:
        ctx.f = f
        ctx.g = g
        ctx.at = draws()
        x1, x2 = x.chunk(2, dim=-1)
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        y = torch.cat([y1, y2], dim=-1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        y1, y2 = y.chunk(2, dim=-1)
        d1, d2 = gradients[0].chunk(2, dim=-1)
        weights_f = list(ctx.f.parameters())
        weights_g = list(ctx.g.parameters())
        with torch.enable_grad():
            start = y1.detach().requires_grad_()
            again = ctx.g(start)
        of_y1, *of_g = torch.autograd.grad(again, [start, *weights_g], d2)
        x2 = (y2 - again).detach()
        d1 = d1 + of_y1
        with torch.enable_grad():
            start = x2.requires_grad_()
            again = ctx.f(start)
        of_x2, *of_f = torch.autograd.grad(again, [start, *weights_f], d1)
        return torch.cat([d1, d2 + of_x2], dim=-1), None, None, None, *of_f, *of_g


def reversible(layers: nn.ModuleList, x: Tensor, *, recompute: bool) -> Tensor:
    x = torch.cat([x, x], dim=-1)
    for f, g in zip(layers[::2], layers[1::2], strict=True):
        if recompute:
            x = Reversible.apply(x, f, g, torch.get_rng_state, *f.parameters(), *g.parameters())  # type: ignore
        else:
            x1, x2 = x.chunk(2, dim=-1)
            x1 = x1 + f(x2)
            x = torch.cat([x1, x2 + g(x1)], dim=-1)
    return x.chunk(2, dim=-1)[0]


def shared(layers: nn.ModuleList, x: Tensor, **options: Any) -> Tensor:
    """Call each layer twice."""
    return each([*layers, *layers], x, **options)


def shared_without(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return in_row([*layers, *layers], x)


def repeated_at_once(layers: nn.ModuleList, x: Tensor, *, recompute: bool) -> Tensor:
    """Recompute, at once, calls of which the first and the last are of one layer, and
    do so twice.
    """
    for _ in range(2):
        run = partial(in_row, [*layers, layers[0]])
        x = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
    return x


Way = Callable[[nn.ModuleList, Tensor], Tensor]

# name → (how the layers run, the same without recomputation)
WAYS: dict[str, tuple[Way, Way]] = {
    "each": (each, in_row),
    "each, reentrant": (partial(each, use_reentrant=True), in_row),
    "each, selective": (partial(each, context_fn=selective), in_row),
    "each, generator not restored": (partial(each, preserve_rng_state=False), in_row),
    "sequential": (
        lambda ls, x: checkpoint_sequential(list(ls), 2, x, use_reentrant=False),
        in_row,
    ),
    "sequential, reentrant": (
        lambda ls, x: checkpoint_sequential(list(ls), 2, x, use_reentrant=True),
        in_row,
    ),
    "pairs": (in_pairs, in_row),
    "nested": (partial(nested, reentrant=False), in_row),
    "nested in reentrant": (partial(nested, reentrant=True), in_row),
    "parts": (of_parts, in_row),
    "reversible": (partial(reversible, recompute=True), partial(reversible, recompute=False)),
    "shared": (shared, shared_without),
    "shared, reentrant": (partial(shared, use_reentrant=True), shared_without),
    "shared, generator not restored": (partial(shared, preserve_rng_state=False), shared_without),
    "repeated at once": (
        partial(repeated_at_once, recompute=True),
        partial(repeated_at_once, recompute=False),
    ),
    "lambda": (
        partial(all_at_once, reentrant=False),
        lambda ls, x: torch.dropout(in_row(ls, x), 0.2, True),
    ),
    "lambda, reentrant": (
        partial(all_at_once, reentrant=True),
        lambda ls, x: torch.dropout(in_row(ls, x), 0.2, True),
    ),
}


class Net(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.way = way
        for layer in self.layers:
            layer.depth_by_python = True

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{place}", layer) for place, layer in enumerate(self.layers)]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self.layers, self.stem(x)))


class Segment(nn.Module):
    """Layers of a chain that recomputes them; a pipeline has one or more in a stage."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.layers, x)


class Recomputed(nn.Module):
    """A segment that recomputes itself, as the blocks of Hugging Face models do."""

    def __init__(self, reentrant: bool | None, **options: Any) -> None:
        super().__init__()
        self.layer = Layer()
        self.reentrant = reentrant
        self.options = options

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.reentrant is None or not torch.is_grad_enabled():
            return super().__call__(x)
        return checkpoint(super().__call__, x, use_reentrant=self.reentrant, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def chain(way: Way) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(FEATURES, WIDTH), *(Segment(way) for _ in range(3)), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*parts)


def chain_of_recomputed(reentrant: bool | None, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [
        nn.Linear(FEATURES, WIDTH),
        *(Recomputed(reentrant, **options) for _ in range(4)),
        nn.Linear(WIDTH, 1),
    ]
    return nn.Sequential(*parts)


def train(model: nn.Module, topology: str, settings: dict[str, Any], data: Any = None) -> Numbers:
    values, _ = parse_topology(topology)
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.max_steps": 3,
        "training.optimizer": "sgd",
        "training.learning_rate": 0.01,
        "precision.mode": "fp32",
    }
    config = config_from(
        {**common, **{f"distributed.{key}": value for key, value in values.items()}, **settings}
    )
    loss_fn = nn.MSELoss() if data is None else None
    if data is None:
        x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(7))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(model.train(), loss_fn=loss_fn, config=config)
    records = [(float(r.loss).hex(), float(r.grad_norm).hex()) for r in trainer.steps(data)]
    # on the first rank
    total = sum((float(value.double().sum()) for value in trainer.state_dict().values()), 0.0)
    return records, total.hex()
