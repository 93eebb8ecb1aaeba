"""`lockstep/torch_compat/optimizer_step.py`: hooks are seen, and torch wraps a step as it is known
to.
"""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.torch_compat.optimizer_step import bare_step, has_pre_hooks


def test_torch_wraps_a_step_as_is_known() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    assert bare_step(optimizer) != optimizer.step
    hook = optimizer.register_step_post_hook(lambda *_: None)
    assert bare_step(optimizer) == optimizer.step
    hook.remove()
    with torch.profiler.profile():
        assert bare_step(optimizer) == optimizer.step


def test_hooks_before_a_step_are_seen() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert not has_pre_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        hook = register(lambda *_: None)
        assert has_pre_hooks(optimizer)
        hook.remove()
        assert not has_pre_hooks(optimizer)
