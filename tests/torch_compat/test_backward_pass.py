"""`lockstep/torch_compat/backward_pass.py`: a node is known inside of a backward pass, and nowhere
else.
"""

import torch

from lockstep.torch_compat.backward_pass import running_node


def test_nodes_are_told_apart_and_outside_there_is_none() -> None:
    seen: list[int | None] = []
    first = torch.ones(2, requires_grad=True) * 2
    second = first * 3
    for tensor in (first, second):
        tensor.register_hook(lambda _gradient: seen.append(running_node()))
    second.sum().backward()
    assert running_node() is None
    later, earlier = seen
    assert later is not None
    assert earlier is not None
    assert later > earlier, "nodes are numbered in the order in which they were made"
