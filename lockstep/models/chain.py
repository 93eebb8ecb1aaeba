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
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError


def run_segments(
    model: nn.Module, *inputs: Any, keywords: Mapping[str, Mapping[str, Any]] | None = None
) -> Any:
    """Run `inputs` through `model.segments()`, with `keywords` by segment name.

    Return the last one's result.
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
    segment: nn.Module,
    values: tuple[Any, ...],
    keywords: Mapping[str, Any],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> Any:
    """Call one segment with the previous one's result.

    UsageError if it does not accept these arguments.

    `inputs` are the (positional, keyword) arguments of the whole model, for a segment with
    `takes_inputs`.
    """
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
                " keys name; each "
                "further one the result of the segment before it"
            )
            fix = (
                "name the first segment's arguments like the batch's keys, or give the model a"
                " method "
                "inputs(batch) that returns (arguments, keyword arguments)"
            )
            raise UsageError(what, where="segments() of the model", why=why, fix=fix) from error
        raise


def with_carried(x: Tensor, carried: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return x, or a tuple of x and copies of further values of a chain (copies: see above)."""
    return (x, *(tensor.clone() for tensor in carried)) if carried else x


def split_documents(carried: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Return the numbers of documents, or None, and the other values of a chain.

    The numbers of documents come first, and are the only integers.
    """
    if carried and not carried[0].is_floating_point():
        return carried[0], carried[1:]
    return None, carried


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
    found: Any = owner
    # not get_parameter(): a replica or a leaf may hold a plain tensor instead
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor), name
    return found
