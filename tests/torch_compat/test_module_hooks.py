"""`lockstep/torch_compat/module_hooks.py`: hooks that were registered in torch's public ways are
found.
"""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.torch_compat.module_hooks import (
    forward_hooks,
    forward_pre_hooks,
    has_hooks,
    remove_backward_hooks,
)


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_a_hook_is_found(register: str) -> None:
    module = nn.Linear(2, 2)
    assert not has_hooks(module)

    def hook(*_: Any) -> None:
        """Look at nothing."""

    handle = getattr(module, register)(hook)
    assert has_hooks(module)
    assert list(forward_pre_hooks(module)) == (
        [hook] if register == "register_forward_pre_hook" else []
    )
    assert list(forward_hooks(module)) == ([hook] if register == "register_forward_hook" else [])
    handle.remove()
    assert not has_hooks(module)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_hooks_on_gradients_are_taken_off(register: str) -> None:
    module = nn.Linear(2, 2)
    called = []
    getattr(module, register)(lambda *_: called.append(True))
    remove_backward_hooks(module)
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert not called
