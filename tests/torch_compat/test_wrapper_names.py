"""`lockstep/torch_compat/wrapper_names.py`: torch's wrappers still put these names into the keys of
a state dict.
"""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES


def test_each_wrapper_has_the_name_that_is_known() -> None:
    compiled, checkpointed, sharded = WRAPPER_NAMES
    assert f"{compiled}.weight" in torch.compile(nn.Linear(2, 2)).state_dict()
    assert checkpointed in dict(checkpoint_wrapper(nn.Linear(2, 2)).named_children())
    assert sharded == FSDP_WRAPPED_MODULE
    assert issubclass(FullyShardedDataParallel, nn.Module)
