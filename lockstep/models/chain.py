"""A model's forward pass as a chain of segments, some of which borrow parameters.

`segments()` lists (canonical name, module): what one returns (a tensor, or a tuple) are the positional arguments of the
next. The whole pass is the fold of that list, so one process and the stages of a pipeline run the same text.

A parameter that several segments use has one owner and is lent to the others. `shared_parameters()` says so:

    {segment name: {keyword of that segment's forward: canonical name of the parameter}}

The borrower owns nothing and gets the tensor at each call, looked up through its owner there and then. So

- FSDP2, which swaps an owner's parameters for gathered ones around its forward pass, needs to know nothing of it, and
  so do `DataParallel` and `torch.func.functional_call`;
- a stage of a pipeline needs the parameters that its segments name, under their canonical names, and no other;
- whoever needs the gradient of each *use* on its own (the same bits on any number of ranks) lends each segment its own
  leaf in place of the parameter;
- a tie cannot come undone: there is one parameter, not two that were once the same.

What a segment returns is neither a view nor one of its own inputs: torch's pipeline runtime detaches outputs in place.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def run_segments(model: nn.Module, *inputs: Any, keywords: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Fold `inputs` through `model.segments()`; returns what the last segment returns.

    Args:
        keywords: further keyword arguments, by segment name.
    """
    borrowed = shared_parameters_of(model)
    values: tuple[Any, ...] = inputs
    outputs: Any = inputs
    segments: list[tuple[str, nn.Module]] = model.segments()  # type: ignore[operator]
    for name, segment in segments:
        own = (keywords or {}).get(name, {})
        outputs = segment(*values, **lent(model, borrowed.get(name, {})), **own)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs


def run_segment(
    segment: nn.Module, values: tuple[Any, ...], keywords: Mapping[str, Any],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> Any:  # fmt: skip
    """Call one segment.

    Args:
        values: what the segment before returned.
        inputs: (positional, keyword) arguments of the whole model, for a segment that says `takes_inputs`.
    """
    if getattr(segment, "takes_inputs", False):
        keywords = {**keywords, "inputs": inputs}
    return segment(*values, **keywords)


def shared_parameters_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """Which parameters which segments borrow: {segment: {keyword: canonical name}}; empty where the model says none."""
    own: Callable[[], dict[str, dict[str, str]]] | None = getattr(model, "shared_parameters", None)
    return own() if own else {}


def lent(owner: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters named, as they are now, by keyword. Parts of `owner` may be wrapped; names stay canonical."""
    return {keyword: look_up(owner, name) for keyword, name in names.items()}


def look_up(owner: nn.Module, name: str) -> Tensor:
    """The tensor that is registered in `owner` by its name with dots."""
    found: Any = owner
    for part in name.split("."):  # not get_parameter(): a replica's or a leaf's stand-in is a plain tensor
        found = getattr(found, part)
    assert isinstance(found, Tensor), name
    return found
