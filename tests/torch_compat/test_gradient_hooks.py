"""`lockstep/torch_compat/gradient_hooks.py`: hooks on a gradient are listed in order, and taken
off.
"""

import torch

from lockstep.torch_compat.gradient_hooks import (
    has_hooks_after_accumulation,
    hooks_of,
    remove_hooks,
)


def test_hooks_are_listed_and_taken_off() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert hooks_of(tensor) == []
    hooks = [lambda gradient: gradient * 2, lambda gradient: gradient + 1]
    for hook in hooks:
        tensor.register_hook(hook)
    assert hooks_of(tensor) == hooks
    remove_hooks(tensor)
    tensor.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [1.0, 1.0]


def test_hooks_after_accumulation_are_seen() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not has_hooks_after_accumulation(tensor)
    tensor.register_post_accumulate_grad_hook(lambda _: None)
    assert has_hooks_after_accumulation(tensor)
