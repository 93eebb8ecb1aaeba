"""A stage's backward pass, whole or in the two halves of schedules that split it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

Gradients = tuple[Tensor | None, ...]

# In torch 2.11 the operation of an `autograd.Function` is gone with the graph before it, though Python still names it.
_KEEPS_FUNCTIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@dataclass
class Backward:
    """A backward pass of one micro-batch through one stage, whole or in two halves.

    The first half computes gradients of the inputs, and keeps the gradient that reached each operation with a weight.
    The second half goes on from there: torch finds, for each weight, these operations. It goes wrong where a weight has
    several of them in a row (layers that share it): what lies between them is gone through anew, and freed, for each
    such weight. A weight that has none, because its gradient does not meet the inputs', is passed over. And torch 2.11
    adds up the gradients of an operation's several outputs, and can't go on from an `autograd.Function`. In these cases
    the second half starts from the outputs.
    """

    outputs: tuple[Tensor, ...]
    sent_back: Gradients | None  # None: the output is the loss
    inputs: tuple[Tensor, ...]
    groups: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.differentiable = any(output.requires_grad for output in self.outputs)
        self.nothing: Gradients = (None,) * len(self.inputs)

    def arguments(self) -> dict[str, Any]:
        """Of a whole backward pass, as torch takes them."""
        sent_back = (None,) if self.sent_back is None else self.sent_back
        return {"stage_output": self.outputs, "output_grads": sent_back, "input_values": list(self.inputs)}

    def remember(self) -> None:
        """Before the first half, which cuts the outputs off."""
        pairs = zip(self.outputs, self.sent_back or (None,), strict=True)
        kept = [(output, gradient) for output, gradient in pairs if output.requires_grad]
        self._ends = [output for output, _ in kept]
        self._edges = [get_gradient_edge(output) for output in self._ends]
        self._gradients = [gradient for _, gradient in kept]
        leaves = _leaves(self._edges)
        inputs, used = {id(value) for value in self.inputs}, {id(node.variable) for node in leaves}
        self._weights = {node for node in leaves if id(node.variable) not in inputs}
        self._uses = [id(value) in used for value in self.inputs]
        self.reaches_inputs = any(self._uses)

    def arguments_of_first_half(self) -> dict[str, Any]:
        """As torch takes them, and only what has a gradient.

        torch 2.11 stops at outputs and inputs that have none, like integers, or leaves them out of what it returns.
        """
        return {
            "stage_output": self._ends,
            "output_grads": None if self.sent_back is None else self._gradients,
            "input_values": [value for value, uses in zip(self.inputs, self._uses, strict=True) if uses],
        }

    def of_all_inputs(self, gradients: Gradients) -> Gradients:
        """What torch's first half returned, by input."""
        found = iter(gradients)
        return tuple(next(found) if uses else None for uses in self._uses)

    def go_on_from(self, groups: list[dict[str, Any]] | None) -> None:
        """After the first half: keep what it found if torch's second half is right for this graph, else the outputs."""
        assert groups is not None
        found = {node for group in groups for node in group["params"]}
        if found >= self._weights and all(map(_is_simple, groups)):
            self.groups = groups
            self._edges.clear()  # what lies behind the weights' operations can go

    def weights_anew(self, weights: list[Tensor]) -> None:
        """Gradients of the weights from the outputs."""
        found = torch.autograd.grad(self._edges, weights, self._gradients, allow_unused=True)
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _is_simple(group: dict[str, Any]) -> bool:
    """A group of weights with one operation to go on from, of whose outputs only the first has a gradient."""
    operations, gradients = list(group["intermediates"]), group["grads"]
    return len(operations) == 1 and _can_start(operations[0]) and all(g is None for g in gradients[0][1:])


def _can_start(operation: Any) -> bool:
    """Whether the second half can start at an operation."""
    return _KEEPS_FUNCTIONS or not isinstance(operation, BackwardCFunction)


def _leaves(edges: Sequence[Any]) -> set[Any]:
    """The nodes of a graph that accumulate gradients."""
    seen: set[Any] = set()
    open_nodes = [edge.node for edge in edges]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_nodes += [following for following, _ in node.next_functions]
    return {node for node in seen if hasattr(node, "variable")}
