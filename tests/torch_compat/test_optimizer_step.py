"""`lockstep/torch_compat/optimizer_step.py`: hooks are seen."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.torch_compat.optimizer_step import has_pre_hooks


def test_hooks_before_a_step_are_seen() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert not has_pre_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        hook = register(lambda *_: None)
        assert has_pre_hooks(optimizer)
        hook.remove()
        assert not has_pre_hooks(optimizer)
