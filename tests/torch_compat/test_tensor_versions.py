"""`lockstep/torch_compat/tensor_versions.py`: a write changes the version, and a view has a base.

A hook stays on a view that is returned as none.
"""

import torch
from torch import Tensor, nn

from lockstep.torch_compat.tensor_versions import base_of, return_no_views, version_of


def test_a_write_changes_the_version() -> None:
    tensor = torch.zeros(4)
    before = version_of(tensor)
    tensor[1:].add_(1)
    assert version_of(tensor) == before + 1


def test_a_view_has_the_tensor_that_it_views() -> None:
    tensor = torch.zeros(4)
    assert base_of(tensor) is None
    assert base_of(tensor.view(2, 2)[0]) is tensor


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = self.linear(x)
        return {"logits": outputs.flatten(), "hidden": outputs}


def gradient_with_a_hook(model: Flat) -> tuple[Tensor | None, list[Tensor]]:
    seen: list[Tensor] = []
    outputs = model(torch.ones(2, 4))["logits"]
    outputs.register_hook(seen.append)
    outputs /= 2
    outputs.square().sum().backward()
    return model.linear.weight.grad, seen


def test_a_hook_stays_on_an_output_that_is_changed_in_place() -> None:
    torch.manual_seed(0)
    plain = Flat()
    model = Flat()
    model.load_state_dict(plain.state_dict())
    return_no_views(model)
    right, lost = gradient_with_a_hook(plain)
    gradient, seen = gradient_with_a_hook(model)
    assert lost == [], "torch keeps the hook by now: return_no_views is not needed any more"
    assert len(seen) == 1
    assert right is not None
    assert gradient is not None
    assert torch.equal(right, gradient)
    assert model(torch.ones(2, 4))["logits"]._base is None
