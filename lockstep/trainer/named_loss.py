"""The loss function that a config names (`loss_fn`).

Tests: tests/test_errors.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lockstep.config import Config, ObjectSpec, build_object
from lockstep.config.schema_training import check_object
from lockstep.errors import UsageError
from lockstep.models.loss_arguments import FurtherArguments
from lockstep.models.torch_losses import class_of
from lockstep.registry import load_object, require_call


def loss_fn_of(config: Config) -> Callable[..., Any] | None:
    """Return the config's loss; None: the model's own."""
    spec = config.loss_fn
    if spec is None:
        return None
    named: Callable[..., Any] = check_named_loss(spec)
    return build_object(_of_class(spec), "loss_fn") if isinstance(named, type) else named


def check_named_loss(spec: ObjectSpec) -> Any:
    """Return the object named by a loss's spec, after checking that it accepts its arguments.

    Nothing is created.
    """
    spec = _of_class(spec)
    named = load_object(spec.name, "loss_fn")
    if isinstance(named, type):
        call = "forward" if issubclass(named, nn.Module) else "__call__"
        if call not in dir(named):
            fix = "give the class __call__(self, outputs, targets)"
            raise UsageError(f"objects of {spec.name} can't be called", where="loss_fn", fix=fix)
        method = getattr(named, call)
        further = FurtherArguments(partial(method, None))  # beside self, too
        arguments = ("self", "outputs", "targets")
        require_call(further.filled(method), arguments, f"{spec.name}.{call}", "loss_fn")
        return check_object(spec, "loss_fn")
    further = FurtherArguments(named)
    require_call(further.filled(named), ("outputs", "targets"), spec.name, "loss_fn")
    if spec.args or spec.positional:
        what = f"{spec.name} is not a class, and its arguments are outputs and targets"
        fix = (
            "leave args out, or name a class that takes them, whose objects are called with outputs"
            " and targets"
        )
        raise UsageError(what, where="loss_fn.args", fix=fix)
    return named


def _of_class(spec: ObjectSpec) -> ObjectSpec:
    """Return the spec of the class that does what a loss function of torch's does.

    Any other spec itself.
    """
    kind = class_of(load_object(spec.name, "loss_fn"))
    return spec if kind is None else spec.model_copy(update={"name": f"torch.nn:{kind.__name__}"})
