"""`lockstep/torch_compat/module_state.py`: what was registered in torch's public ways is found."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.torch_compat.module_state import persistent_buffers, registered_state


def test_persistent_buffers_are_those_of_a_state_dict() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("kept", torch.ones(1))
    model[1].register_buffer("left_out", torch.ones(1), persistent=False)
    model[1].register_buffer("none", None)
    model.register_state_dict_post_hook(lambda _model, state, *_: state.clear())
    statistics = {f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert persistent_buffers(model) == {*statistics, "1.kept"}
    assert registered_state(model).persistent == persistent_buffers(model)


@pytest.mark.parametrize(
    "register",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_a_hook_is_found(register: str) -> None:
    module = nn.Linear(2, 2)
    calls = []

    def hook(*_: Any) -> None:
        calls.append(True)

    assert registered_state(module).hooks == {"": []}
    getattr(module, register)(hook)
    (found,) = registered_state(module).hooks[""]
    assert found.__module__ == __name__
    module.load_state_dict(module.state_dict())
    assert calls
