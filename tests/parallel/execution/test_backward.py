"""A backward pass in two halves: the gradients, and the bits, of the pass at once, and no more
memory.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.execution.backward import backward, first_half, whole_second_half

WIDTH = 6
Run = Callable[["Weights", Tensor], tuple[Tensor, ...]]


class Weights(nn.Module):
    """What the functions below use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.images = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3), nn.GroupNorm(2, WIDTH), nn.BatchNorm2d(WIDTH)
        )
        self.alone = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)


class Doubled(torch.autograd.Function):
    """An operation in Python with a weight, and two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        first, second = gradients
        return first * weight + second, (first * x + second).sum(0)


def block(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    return (x + w.other(F.gelu(w.one(w.norm(x)))),)


def shared(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    return (w.one(torch.tanh(w.one(x))),)


def beside_the_inputs(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    """One output is made of a weight alone, which is used on the way to the inputs, too."""
    return w.one(x) * w.alone, w.alone.exp().sum()


def one_gradient_for_two(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    """The gradients of both weights are one tensor: adding to one must not change the other."""
    return (x * 2 + (w.alone + w.unused),)


def several_outputs(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    first, second = Doubled.apply(w.one(x), w.alone)  # type: ignore[no-untyped-call]
    return first * second, torch.arange(3)


def recomputed(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    return (w.other(checkpoint(lambda y: torch.relu(w.one(y)), x, use_reentrant=False)),)


def without_inputs(w: Weights, _x: Tensor) -> tuple[Tensor, ...]:
    return (w.one(w.frozen) * w.alone,)


def without_weights(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    return (torch.tanh(x * w.frozen),)


def channels_together(w: Weights, x: Tensor) -> tuple[Tensor, ...]:
    """Convolutions and norms of images in `channels_last`."""
    images = (
        x.view(3, WIDTH, 1, 1).expand(3, WIDTH, 4, 4).contiguous(memory_format=torch.channels_last)
    )
    return (w.images(images),)


EVERY = [
    channels_together,
    block,
    shared,
    beside_the_inputs,
    one_gradient_for_two,
    several_outputs,
    recomputed,
    without_inputs,
]
EVERY += [without_weights]


def in_halves(outputs: Sequence[Tensor], gradients: Any, x: Tensor) -> Tensor | None:
    (found,), half = first_half(outputs, gradients, [x])
    assert x.grad is None
    half.run()
    return found


def at_once(outputs: Sequence[Tensor], gradients: Any, x: Tensor) -> Tensor | None:
    return backward(outputs, gradients, [x])[0]


def gradients_of(
    run: Run, way: Callable[..., Tensor | None]
) -> tuple[Tensor | None, dict[str, Tensor | None], list[str]]:
    """Of two micro-batches: the last one's gradient of x, those of the weights, and whose hooks
    were called.
    """
    w = Weights()
    called = []
    for name, parameter in w.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _p, name=name: called.append(name))  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    found = None
    for _ in range(2):
        x = torch.randn(3, WIDTH, requires_grad=True)
        outputs = run(w, x)
        gradients = tuple(torch.randn_like(o) if o.requires_grad else None for o in outputs)
        found = way(outputs, gradients, x)
    return found, {name: parameter.grad for name, parameter in w.named_parameters()}, sorted(called)


@pytest.mark.parametrize("run", EVERY, ids=lambda run: run.__name__)
def test_both_halves_have_the_bits_of_the_pass_at_once(run: Run) -> None:
    x, weights, called = gradients_of(run, at_once)
    x_in_halves, weights_in_halves, called_in_halves = gradients_of(run, in_halves)
    assert (x is None) == (x_in_halves is None)
    assert x is None or torch.equal(x, x_in_halves)  # type: ignore[arg-type]
    for name, gradient in weights.items():
        found = weights_in_halves[name]
        assert (gradient is None) == (found is None), name
        assert gradient is None or (
            torch.equal(gradient, found) and gradient.stride() == found.stride()
        ), name  # type: ignore[arg-type, union-attr]
    assert called == called_in_halves


def test_a_stage_without_inputs_runs_all_of_it_in_the_second_half() -> None:
    w = Weights()
    (output,) = without_inputs(w, torch.empty(0))
    half = whole_second_half([output], (torch.ones_like(output),))
    assert w.alone.grad is None
    half.run()
    assert w.alone.grad is not None
    assert w.one.weight.grad is not None


def test_the_second_half_continues_where_the_first_has_come_by() -> None:
    """Else it would compute the gradients on the way to the inputs once more."""
    w = Weights()
    counted = []
    x = torch.randn(3, WIDTH, requires_grad=True)
    activated = F.gelu(w.one(w.norm(x)))
    activated.register_hook(lambda _gradient: counted.append("on the way"))  # type: ignore[no-untyped-call]
    output = w.other(activated)
    _, half = first_half([output], (torch.ones_like(output),), [x])
    assert counted == ["on the way"]
    half.run()
    assert counted == ["on the way"]


def test_what_is_saved_for_the_backward_pass_is_let_go_by_the_second_half() -> None:
    w = Weights()
    alive = []

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.append(self)

    def dropped(held: Held) -> Tensor:
        return held.tensor

    x = torch.randn(3, WIDTH, requires_grad=True)
    with saved_tensors_hooks(Held, dropped):
        outputs = block(w, x)
    count = len(alive)
    references = [weakref.ref(each) for each in alive]
    alive.clear()
    assert sum(each() is not None for each in references) == count > 0
    _, half = first_half(outputs, (torch.ones_like(outputs[0]),), [x])
    del outputs
    half.run()
    assert not any(each() is not None for each in references)
