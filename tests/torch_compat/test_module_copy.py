"""`lockstep/torch_compat/module_copy.py`: children of a copy are exchanged, the original keeps its
own.
"""

from torch import nn

from lockstep.torch_compat.module_copy import with_own_children


def test_a_child_is_exchanged_in_the_copy_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    copied = with_own_children(module)
    assert isinstance(copied, nn.Sequential)
    copied[0] = nn.Identity()
    assert [type(child) for child in module] == [nn.Linear, nn.ReLU]
    assert [type(child) for child in copied] == [nn.Identity, nn.ReLU]
    assert copied[1] is module[1]
