"""The state of FSDP2's units.

Gradients to be reduced, forward passes within a backward pass, and messages alone.

Public torch: none for any of them, before 2.15. From torch 2.15 on `finalize_backward` reduces, but
only units whose forward pass ran in the same step; a pipeline reduces once for several runs of its
schedule, in the last of which a unit may have had no forward pass. A unit that reentrant
checkpoints call twice loses the gradient of one of the calls: when the second is repeated, the
unit's state still says that its backward pass is about to come. And calling a unit for its messages
alone would run everybody's hooks on it. Seen to work: torch 2.11.0, 2.13.0 and 2.15.0. When gone:
AttributeError in the first step of a pipeline with FSDP2, or of a model on FSDP2 that recomputes
itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# Whether a unit reduces zeros where a rank has no gradients, from torch 2.13 on. Before, a rank
# can't take part in the backward pass of a unit that its data leave out.
TAKES_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def reduces_by_hand(unit: Any) -> None:
    """Announce, before a forward pass, that gradients are reduced on request.

    FSDP2 needs this from torch 2.15 on.
    """
    if hasattr(unit, "set_manual_backward_finalization") and torch.is_grad_enabled():
        unit.set_manual_backward_finalization(True)


def reduce_gradients(unit: Any, *, begun: bool) -> None:
    """Sum the gradients of an FSDP2 unit over its replicas and shards.

    Its backward passes are over.

    `begun`: forward passes of the unit ran in this step; of one whose parameters are gathered by
    hand none did.
    """
    unit.set_is_last_backward(True)
    unit.set_reshard_after_backward(True)
    unit.set_requires_gradient_sync(True)
    state = unit._get_fsdp_state()
    groups = [group for each in state._state_ctx.all_states for group in _groups_of(each)]
    # before torch 2.15: as torch's own stages of pipelines did
    if not hasattr(unit, "finalize_backward"):
        for group in groups:
            group.post_backward()
        state._root_post_backward_final_callback()
        return
    if not begun:
        reduces_by_hand(unit)
        for group in groups:
            group._post_backward_pending = True
    unit.finalize_backward()
    unit.set_manual_backward_finalization(False)


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit's state; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def begin_anew(unit: Any) -> None:
    """Let the unit's next forward pass, within a backward pass, be a new one.

    It comes after the unit's own backward pass.
    """
    state = unit._get_fsdp_state()
    groups = {group._training_state.name for group in _groups_of(state)}
    if state._training_state.name == "PRE_BACKWARD" and groups == {"POST_BACKWARD"}:
        state._training_state = type(state._training_state).IDLE


def repeats_apart(unit: Any) -> bool:
    """Return whether a unit is idle where a forward pass within a backward pass finds it.

    It has not begun its own backward pass, or its parameters are freed.
    """
    state = unit._get_fsdp_state()
    gathered = all(group.is_unsharded for group in _groups_of(state))
    return state._training_state.name != "PRE_BACKWARD" or not gathered


def pass_through(unit: Any, given: Tensor, made: Tensor | None) -> Tensor:
    """Have a unit gather its parameters as in a forward pass.

    It gathers and reduces in the backward pass of the result.

    Args:
        given: [1], in the place of its inputs; gradients are reduced when that of `given` is there,
            or at the end.
        made: [1], in the place of what it makes of them; None: `given`.
    """
    state = unit._get_fsdp_state()
    (given,), _ = state._pre_forward(unit, (given,), {})
    return state._post_forward(unit, (given,), (given if made is None else made).clone())  # type: ignore[no-any-return]
