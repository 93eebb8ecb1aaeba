"""`lockstep/torch_compat/module_hooks.py`: hooks that were registered in torch's public ways are found."""

from typing import Any

import pytest
from torch import nn

from lockstep.torch_compat.module_hooks import forward_pre_hooks, has_hooks


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_hook_is_found(register: str) -> None:
    module = nn.Linear(2, 2)
    assert not has_hooks(module)

    def hook(*_: Any) -> None:
        """Look at nothing."""

    handle = getattr(module, register)(hook)
    assert has_hooks(module)
    assert list(forward_pre_hooks(module)) == ([hook] if register == "register_forward_pre_hook" else [])
    handle.remove()
    assert not has_hooks(module)
