"""`lockstep/torch_compat/foreach.py`: each operation does to many tensors, in place, what its name
says of one.
"""

import torch

from lockstep.torch_compat import foreach


def test_each_operation_gives_the_bits_of_a_loop() -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, 2), torch.randn(5)]
    others = [torch.randn(3, 2), torch.randn(5)]
    expected = [value.clone() for value in values]
    foreach.add_(values, others)
    foreach.add_(values, 0.25)
    foreach.mul_(values, torch.tensor(3.0))
    foreach.div_(values, 7.0)
    foreach.clamp_min_(values, -0.2)
    foreach.clamp_max_(values, 0.2)
    for value, other, found in zip(expected, others, values, strict=True):
        value.add_(other).add_(0.25).mul_(torch.tensor(3.0)).div_(7.0).clamp_(-0.2, 0.2)
        assert torch.equal(value, found)
    assert [float(norm) for norm in foreach.norm(values)] == [
        float(value.norm()) for value in expected
    ]
    copies = [torch.zeros(3, 2), torch.zeros(5)]
    foreach.copy_(copies, values)
    for value, copied in zip(values, copies, strict=True):
        assert torch.equal(value, copied)
