"""torch's policy keeps its classes where Lockstep reads their names."""

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lockstep.torch_compat.wrap_policy import classes_of


def test_the_classes_of_a_policy_are_named() -> None:
    assert classes_of(ModuleWrapPolicy({nn.Linear, nn.LayerNorm})) == ["LayerNorm", "Linear"]
    assert classes_of("transformer") == []
