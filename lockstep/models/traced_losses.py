"""Makes loss functions in graphs that torch.export captured record their divisors.

A captured graph calls operators, not the functions of `torch.nn.functional` that `lockstep.models.observed` replaces.
The argument names of an operator are in its `_schema`, a private name: torch offers no public one.
"""

from typing import Any

import torch
from torch import Tensor, fx

from lockstep.models.observed import calls_noted
from lockstep.torch_compat.operators import schema_of

_NAMES = {  # operator → the equivalent function
    **{
        getattr(torch.ops.aten, name): name
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "ctc_loss", "soft_margin_loss",
                     "poisson_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    },
    torch.ops.aten.cross_entropy_loss: "cross_entropy",
    torch.ops.aten.nll_loss_nd: "nll_loss",
}  # fmt: skip
_MEAN = 1  # value of an operator's `reduction`


def note_losses(module: fx.GraphModule) -> None:
    """Make a captured graph, and those that it calls, record the loss functions in them."""
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            if getattr(node.target, "overloadpacket", None) in _NAMES:
                node.args, node.target = (node.target, *node.args), noted
        inner.recompile()


def noted(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call an operator that computes a loss, and record it; graphs find this function by its name."""
    result: Tensor = operator(*args, **kwargs)
    calls = calls_noted()
    if calls is not None and not torch.compiler.is_compiling():
        names = schema_of(operator).arguments
        call = {each.name: each.default_value for each in names} | kwargs
        call |= {each.name: value for each, value in zip(names, args, strict=False)}
        call.setdefault("input", call.get("self"))
        calls.note(_NAMES[operator.overloadpacket], call, is_mean=call["reduction"] == _MEAN)
    return result
