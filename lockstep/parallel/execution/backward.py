"""Backward passes of a stage: at once, or gradients of inputs first and those of weights later.

The first half, I, computes the gradients of the stage's inputs, which the rank before waits for.
The second half, W, computes those of the weights, when the schedule has time for it. Together they
compute what one backward pass does, as long as W begins where I has come by. For y = relu(x · Wᵀ)
with x [n, a], W [b, a], y [n, b]:

    graph      y ← ReluBackward ← MmBackward ← x
                                      ↖ TBackward ← W
    I          dy [n, b] → relu → dz [n, b], which is kept at MmBackward → dz · W = dx [n, a]
    W          MmBackward again, from dz, towards W alone → dWᵀ = xᵀ · dz [a, b] → dW [b, a]

So I keeps, for each operation that lies on the way from the outputs to the inputs and uses a
weight, the gradients that have reached it, and W starts there. Where a weight is not reached from
exactly one such operation, it starts at the outputs, and goes all the way again: layers share the
weight (the graph between its two uses would be freed by the first), or its gradient does not meet
that of an input.

Tests: tests/parallel/execution/test_backward.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lockstep.parallel.strides import laid_out

Gradients = tuple[Tensor | None, ...]
Node = Any  # an operation in torch's graph: its class is made in C++

# In torch 2.11 the operation of an `autograd.Function` is gone with the graph before it, though
# Python still names it.
_KEEPS_FUNCTIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def backward(
    outputs: Sequence[Tensor],
    gradients: Gradients,
    inputs: Sequence[Tensor],
    *,
    as_made: bool = False,
) -> Gradients:
    """Add the gradients of weights to their `.grad`, and return those of the inputs.

    None for an input without one.

    Args:
        outputs: where the pass starts; those that need no gradient are left out.
        gradients: of the outputs, of the same shapes.
        inputs: leaves of the graph.
        as_made: return gradients with the strides with which they were made: autograd lays them
            like the inputs.
    """
    roots = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    if not roots:
        return (None,) * len(inputs)
    strides: dict[int, tuple[int, ...]] = {}  # position of an input → of its gradient
    if as_made:
        for position, value in enumerate(inputs):
            if value.requires_grad:
                value.register_hook(partial(_note_strides, strides, position))  # type: ignore[no-untyped-call]
    torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
    of_inputs: list[Tensor | None] = []
    for position, value in enumerate(inputs):
        gradient = value.grad
        value.grad = None
        of_inputs.append(
            gradient if gradient is None or not as_made else laid_out(gradient, strides[position])
        )
    return tuple(of_inputs)


def _note_strides(strides: dict[int, tuple[int, ...]], position: int, gradient: Tensor) -> None:
    strides[position] = gradient.stride()


@dataclass
class SecondHalf:
    """The gradients of weights that are still to be computed; holds the graph until then."""

    starts: list[GradientEdge] = field(default_factory=list)  # the outputs of the stage
    gradients: list[Tensor | None] = field(default_factory=list)  # of these
    weights: list[Tensor] = field(
        default_factory=list
    )  # those that get gradients; empty: all leaves
    # Instead of all the way from the outputs: (operation, the weights that it uses).
    operations: list[tuple[Node, list[Tensor]]] = field(default_factory=list)
    # operation → gradients that have reached it
    arrived: dict[Node, Gradients] = field(default_factory=dict)
    # Tensors that lead to no input, each with its gradient, where a backward pass begins for its
    # messages alone.
    further_roots: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def run(self) -> None:
        """Add the gradients of weights to `.grad` as autograd does, with their layout and hooks."""
        if self.starts:
            torch.autograd.backward(self.starts, self.gradients, inputs=self.weights or None)
        while self.operations:  # each is freed before the next one runs
            operation, weights = self.operations.pop()
            numbered = enumerate(self.arrived.pop(operation, ()))
            given = [
                (GradientEdge(operation, position), each)
                for position, each in numbered
                if each is not None
            ]
            if given:
                _continue_from(operation, given, weights)
        if self.further_roots:
            roots, gradients = zip(*self.further_roots, strict=True)
            torch.autograd.backward(roots, gradients)


# On CPUs the kernel for tensors whose channels lie together ends the process where the input's
# gradient is not wanted.
_WANTS_ALL = ("NativeGroupNormBackward0",)


def _continue_from(
    operation: Node, given: Sequence[tuple[GradientEdge, Tensor]], weights: Sequence[Tensor]
) -> None:
    """Add the gradients of an operation's weights to `.grad`, from the gradients of its outputs."""
    edges = [edge for edge, _ in given]
    gradients = [gradient for _, gradient in given]
    if operation.name() not in _WANTS_ALL:
        torch.autograd.backward(edges, gradients, inputs=weights)
        return
    node, position = operation.next_functions[0]
    wanted = [*map(get_gradient_edge, weights), GradientEdge(node, position)]
    *of_weights, _ = torch.autograd.grad(edges, wanted, gradients, allow_unused=True)
    torch.autograd.backward(weights, of_weights)


def whole_second_half(outputs: Sequence[Tensor], gradients: Gradients) -> SecondHalf:
    """Return a second half that is the full backward pass, for inputs that need no gradients."""
    roots = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    return SecondHalf(
        [get_gradient_edge(output) for output, _ in roots], [gradient for _, gradient in roots]
    )


def first_half(
    outputs: Sequence[Tensor], gradients: Gradients, inputs: Sequence[Tensor]
) -> tuple[Gradients, SecondHalf]:
    """Return the gradients of the inputs, and the second half for the gradients of the weights.

    Inputs without a gradient get None.

    Args:
        outputs: where the pass starts; those that need no gradient are left out.
        gradients: of the outputs, of the same shapes.
        inputs: leaves of the graph. All other leaves are weights.
    """
    half = whole_second_half(outputs, gradients)
    position_of = {
        get_gradient_edge(value).node: position
        for position, value in enumerate(inputs)
        if value.requires_grad
    }
    order = _postorder([edge.node for edge in half.starts])
    weight_of = {
        node: node.variable
        for node in order
        if hasattr(node, "variable") and node not in position_of
    }
    half.weights = list(weight_of.values())
    used = [position_of[node] for node in order if node in position_of]
    starts = half.starts
    given = half.gradients
    of_inputs: list[Tensor | None] = [None] * len(inputs)
    if not used:
        return tuple(of_inputs), half
    operations = _operations(
        order, {edge.node for edge in starts}, set(position_of), set(weight_of)
    )
    if operations is not None:
        half.operations = [
            (node, [weight_of[weight] for weight in nodes]) for node, nodes in operations
        ]
        half.starts = []
        half.gradients = []
    # While the gradients of the inputs are computed, each operation keeps what reaches it.
    hooks = [node.register_prehook(_keep(half.arrived, node)) for node, _ in half.operations]
    try:
        wanted = [inputs[position] for position in used]
        pulled = torch.autograd.grad(starts, wanted, given, retain_graph=bool(weight_of))
    finally:
        for hook in hooks:
            hook.remove()
    for position, gradient in zip(used, pulled, strict=True):
        of_inputs[position] = gradient
    return tuple(of_inputs), half


def _operations(
    order: Sequence[Node], roots: set[Node], inputs: set[Node], weights: set[Node]
) -> list[tuple[Node, list[Node]]] | None:
    """Return the operations between outputs and inputs that use weights, with these weights' nodes.

    None if some weight is not reached from exactly one of them, or if torch can't continue from
    one.

    Args:
        order: the nodes of the graph, each after those that follow it.
        roots: where the backward pass starts.
        inputs: the nodes of the inputs.
        weights: the nodes that accumulate the gradients of weights.
    """
    # For y = relu(x · Wᵀ) the order is W, TBackward, x, MmBackward, ReluBackward. TBackward leads
    # to no input, and has W behind it; MmBackward leads to x and has TBackward next to it, so it is
    # an operation, with W; ReluBackward leads to x and uses no weight.
    leads_to_input = set(inputs)
    behind: dict[Node, frozenset[Node]] = {}  # node that leads to no input → the weights behind it
    operations: list[tuple[Node, list[Node]]] = []
    for node in order:
        if node in inputs:
            continue
        following = [after for after, _ in node.next_functions if after is not None]
        if any(after in leads_to_input for after in following):
            leads_to_input.add(node)
            used = [behind[after] for after in following if after not in leads_to_input]
            if any(used):
                operations.append((node, list(frozenset().union(*used))))
        elif node in weights:
            behind[node] = frozenset([node])
        else:
            behind[node] = frozenset().union(*(behind[after] for after in following))
    used_weights = [weight for _, nodes in operations for weight in nodes]
    reached = {node for node in order if node in weights}
    # used by several operations, or by none of them
    if len(used_weights) != len(reached) or set(used_weights) != reached:
        return None
    # an output is made of weights alone: they may be used here, too
    if any(behind.get(root) for root in roots):
        return None
    if not _KEEPS_FUNCTIONS and any(isinstance(node, BackwardCFunction) for node, _ in operations):
        return None
    return operations


def _keep(arrived: dict[Node, Gradients], node: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        arrived[node] = gradients

    return hook


def _postorder(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes of a graph, each after all that follow it on the way to the leaves."""
    # A stack in place of recursion: graphs are deeper than Python's calls may be.
    seen: set[Node] = set()
    order: list[Node] = []
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions]
    return order
