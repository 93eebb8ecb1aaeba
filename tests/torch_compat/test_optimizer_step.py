"""`lockstep/torch_compat/optimizer_step.py`: hooks are seen."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.torch_compat.optimizer_step import pre_hooks


def test_hooks_before_a_step_are_seen() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    hooks = pre_hooks(optimizer)
    assert not any(hooks)
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        hook = register(lambda *_: None)
        assert any(hooks)
        hook.remove()
        assert not any(hooks)
