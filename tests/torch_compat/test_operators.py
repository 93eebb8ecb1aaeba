"""`lockstep/torch_compat/operators.py`: attention on a CPU calls these operators, and schemas say
what they do.
"""

from typing import Any

import torch
import torch.nn.functional as F

from lockstep.torch_compat import operators
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_attention_on_a_cpu_is_what_it_is_taken_for() -> None:
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Calls() as calls:
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert operators.CPU_ATTENTION in calls.found
    assert operators.CPU_ATTENTION_BACKWARD in calls.found
    assert operators.CPU_ATTENTION in operators.FUSED_ATTENTION
    assert all(hasattr(attention, "default") for attention in operators.FUSED_ATTENTION)


def test_a_product_reshapes_by_the_view_that_moves_nothing() -> None:
    with Calls() as calls:
        torch.randn(2, 3, 4) @ torch.randn(4, 5)
    assert operators.UNSAFE_VIEW in calls.found
    assert operators.UNSAFE_VIEW.__name__ == "_unsafe_view"


def test_schemas_say_what_is_written_and_how_arguments_are_called() -> None:
    add = operators.schema_of(torch.ops.aten.add_.Tensor)
    assert add.is_mutable
    assert [argument.name for argument in add.arguments] == ["self", "other", "alpha"]
    assert [argument.default_value for argument in add.arguments] == [None, None, 1]
    assert not operators.schema_of(torch.ops.aten.add.Tensor).is_mutable
    assert operators.schema_of(len) is None
