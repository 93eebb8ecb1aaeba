"""`lockstep/torch_compat/module_members.py`: the dicts follow what is assigned to a module."""

import torch
from torch import nn

from lockstep.torch_compat.module_members import registered


def test_what_is_assigned_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    _, modules = registered(model)
    parameters, _ = registered(model[0])
    assert list(modules.values()) == [model[0]]
    assert parameters["weight"] is model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert parameters["weight"] is model[0].weight
    model[0] = nn.Linear(2, 2)
    assert list(modules.values()) == [model[0]]
