"""FSDP2's note of parameters whose gradients are still to be reduced.

Public torch: from torch 2.15 on `finalize_backward` reduces only units whose forward pass ran in the same step. A
pipeline reduces once for several runs of its schedule, in the last of which a unit may have had no forward pass.
Seen to work: torch 2.15.0; earlier ones have no `finalize_backward`, and this is not called.
When gone: AttributeError in the first step of a pipeline with FSDP2.
"""

from typing import Any


def expect_reduction(unit: Any) -> None:
    """Have `unit.finalize_backward` reduce all parameters of an FSDP2 unit."""
    for state in unit._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group._post_backward_pending = True
