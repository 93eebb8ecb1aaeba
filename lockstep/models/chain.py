"""Runs a model's forward pass as a chain of segments, some of which borrow parameters.

`segments()` lists (canonical name, module): the result of one (a tensor, or a tuple) is the
positional arguments of the next. A segment returns neither a view nor one of its own inputs,
because torch's pipeline runtime detaches outputs in place. A parameter that several segments use
has one owner, and the others borrow it, as `shared_parameters()` declares:

    {segment name: {keyword of that segment's forward: canonical name of the parameter}}

A borrower gets the tensor at each call, looked up through its owner at that moment: FSDP2 replaces
an owner's parameters around its forward pass.

Tests: tests/models/test_chain.py, tests/models/test_sharded.py
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError

LOSS_TARGETS = "loss_targets"  # the argument with which a forward pass returns losses, not logits


def run_segments(
    model: nn.Module,
    segments: Sequence[tuple[str, nn.Module]],
    borrowed: Mapping[str, Mapping[str, str]],
    *inputs: Any,
    keywords: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Run `inputs` through the segments of a model, and return the last one's result.

    Args:
        model: owns the parameters that segments borrow.
        segments: what `model.segments()` returns.
        borrowed: what `model.shared_parameters()` returns.
        inputs: arguments of the first segment.
        keywords: further arguments, by segment name.
    """
    values: tuple[Any, ...] = inputs
    outputs: Any = inputs
    for name, segment in segments:
        own = {} if keywords is None else keywords.get(name, {})
        lends = lent(model, borrowed[name]) if name in borrowed else {}
        outputs = segment(*values, **lends, **own)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs


def run_segment(
    segment: nn.Module,
    values: tuple[Any, ...],
    keywords: Mapping[str, Any],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> Any:
    """Call one segment with the previous one's result.

    UsageError if it does not accept these arguments.

    `inputs` are the (positional, keyword) arguments of the whole model, for a segment with
    `takes_inputs`. Its LOSS_TARGETS are for the segment with `takes_targets` alone.
    """
    if LOSS_TARGETS in inputs[1]:
        keywords = {key: value for key, value in keywords.items() if key != LOSS_TARGETS}
        if getattr(segment, "takes_targets", False):
            keywords[LOSS_TARGETS] = inputs[1][LOSS_TARGETS]
    if getattr(segment, "takes_inputs", False):
        keywords = {**keywords, "inputs": inputs}
    try:
        return segment(*values, **keywords)
    except TypeError as error:
        try:
            inspect.signature(segment.forward).bind(*values, **keywords)
        except TypeError:
            what = (
                f"a segment of the model, {type(segment).__name__}, does not accept its arguments:"
                f" {error}"
            )
            why = (
                "the first segment gets the arguments of the model's forward pass, which a batch's"
                " keys name; each further one the result of the segment before it"
            )
            fix = (
                "name the first segment's arguments like the batch's keys, or give the model a"
                " method inputs(batch) that returns (arguments, keyword arguments)"
            )
            raise UsageError(what, where="segments() of the model", why=why, fix=fix) from error
        raise


def shared_parameters_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return which segments borrow which parameters: {segment: {keyword: canonical name}}."""
    own: Callable[[], dict[str, dict[str, str]]] | None = getattr(model, "shared_parameters", None)
    return own() if own else {}


def lent(owner: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the current tensors of the named parameters, by keyword.

    Names stay canonical if parts are wrapped.
    """
    return {keyword: look_up(owner, name) for keyword, name in names.items()}


def look_up(owner: nn.Module, name: str) -> Tensor:
    """Return the tensor that is registered in `owner` under a dotted name."""
    member: Any = owner
    # not get_parameter(): a replica or a leaf may hold a plain tensor instead
    for part in name.split("."):
        member = getattr(member, part)
    assert isinstance(member, Tensor), name
    return member
