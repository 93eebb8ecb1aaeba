"""Takes the arguments of a model's forward pass from a batch, and calls it with them.

    the batch is {"input_ids": x, "targets": y}, and the model has
        inputs(batch) -> (batch["input_ids"],)     forward(x)
        forward(self, input_ids)                   forward(input_ids=x)
    the batch is (x, y), and there is a loss_fn    forward(x)

What forward or a method of the model does not get is refused with the names that the batch has.

Tests: tests/models/test_offers.py, tests/models/test_builders.py, tests/models/test_documents.py
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.errors import UsageError, listed
from lockstep.models.batch_parts import DOCUMENTS

Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""batch → (positional, keyword) arguments of forward."""


def inputs_by_method(
    method: Callable[..., Any], loss_inputs: Callable[..., Any] | None, owner: str
) -> Inputs:
    """Return the inputs that the methods `inputs` and `loss_inputs` of a model take from a batch.

    `owner` is the model's class, for messages.
    """
    inputs_of_batch = naming_missing_keys(method)

    def inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = inputs_of_batch(batch)
        if isinstance(arguments, Iterable) and not isinstance(arguments, Mapping | Tensor):
            return tuple(arguments), {} if loss_inputs is None else loss_inputs(batch)
        what = f"inputs() of {owner} returns a {type(arguments).__name__}"
        fix = "return a tuple, the positional arguments of forward"
        raise UsageError(what, where="the model", fix=fix)

    return _with_documents(inputs, owner)


def inputs_by_signature(forward: Callable[..., Any], owner: str, *, has_loss_fn: bool) -> Inputs:
    """Return the inputs of a model whose `forward` names them, or takes them in order.

    the batch is         forward gets
    a dict               the keys that it names; all, if it takes any; the dict, if it names none
    a tuple or list      its members in order, without the last where a loss function takes that
    anything else        the batch
    """
    parameters = inspect.signature(forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # `forward(*args, **kwargs)` names nothing: it calls a model that does, as PEFT's does.
    hands_on = takes_any and all(
        p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()
    )
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, p in parameters.items() if p.kind in by_place]
    most = len(positional)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        most = sys.maxsize

    def inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments that a batch holds."""
        # `dict` first, the quicker check: this runs in each micro-batch
        if isinstance(batch, dict | Mapping):
            accepted = {key: value for key, value in batch.items() if key in parameters}
            if hands_on or (takes_any and accepted):
                accepted = dict(batch)
            return ((), accepted) if accepted else ((batch,), {})
        if isinstance(batch, tuple | list):
            arguments = tuple(batch[:-1]) if has_loss_fn and len(batch) > 1 else tuple(batch)
            if len(arguments) > most and (has_loss_fn or _look_like_samples(batch)):
                raise _too_many(owner, batch, len(arguments), positional)
            return arguments, {}
        return (batch,), {}

    return _with_documents(inputs, owner)


def naming_missing_keys(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a model that raises a UsageError for a key that a batch lacks.

    The last argument of the method is the batch.
    """

    def asked(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (KeyError, TypeError) as error:
            _refuse_other_keys(method, arguments[-1], error)
            raise

    return asked


def _refuse_other_keys(method: Callable[..., Any], batch: Any, error: KeyError | TypeError) -> None:
    """Raise a UsageError if a method of the model asked the batch for a key that it has not.

    Return if it failed for another reason.
    """
    if isinstance(batch, Mapping):
        asked = error.args[0] if isinstance(error, KeyError) and error.args else None
        if not isinstance(asked, str) or asked in batch:
            return
        why = f"it asks the batch for {asked!r}, and a batch has {listed([*map(str, batch)])}"
    elif isinstance(batch, tuple | list) and "indices must be" in str(error):
        why = f"it asks the batch for a key, and a batch is a {type(batch).__name__}"
    else:
        return
    owner = getattr(method, "__self__", None)
    name = method.__qualname__ if owner is None else f"{type(owner).__name__}.{method.__name__}"
    what = f"{name}(…) can't read the batch"
    fix = "let the samples of the data set be dicts with the names that the model asks for"
    raise UsageError(what, where="the training or validation data", why=why, fix=fix) from error


def _look_like_samples(batch: Sequence[Any]) -> bool:
    return all(isinstance(item, Mapping | tuple | list) for item in batch)


def _too_many(owner: str, batch: Sequence[Any], count: int, positional: list[str]) -> UsageError:
    """Return the error for a batch with more items than the model takes.

    A list of samples is such a batch.
    """
    what = (
        f"a batch is a {type(batch).__name__} of {len(batch)}, which gives"
        f" {owner}.forward {count} arguments, and it takes {len(positional)}:"
        f" {', '.join(positional)}"
    )
    why = (
        "the items of a batch are the model's arguments, and with a loss_fn the last are the"
        " targets"
    )
    if _look_like_samples(batch):
        why += "; these look like samples, as a collate function returns that does not stack them"
    key = positional[0] if positional else "x"
    fix = (
        f'let the collate function return {{"{key}": …, "targets": …}}, with lists where shapes'
        " differ, or give the model a method inputs(batch) that returns its positional arguments"
    )
    return UsageError(what, where="the training or validation data", why=why, fix=fix)


def _with_documents(inputs: Inputs, owner: str) -> Inputs:
    """Refuse batches with numbers of documents if the model is not given them.

    The model would look across documents.
    """

    def checked(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs; refuse a batch whose documents do not reach the model."""
        args, kwargs = inputs(batch)
        documents = batch.get(DOCUMENTS) if isinstance(batch, dict | Mapping) else None
        if documents is None:
            return args, kwargs
        arguments = (*args, *kwargs.values())
        if not any(argument is documents or argument is batch for argument in arguments):
            what = f"{owner} does not take {DOCUMENTS}, which this batch has"
            why = "it would let the documents of a sequence see each other"
            fix = (
                f"leave {DOCUMENTS} out of the samples, or let the model's forward take it and hand"
                " it to its attention: self.attend(q, k, v, document_ids),"
                " self.attend.positions(length, device, document_ids)"
            )
            raise UsageError(what, where="the data set", why=why, fix=fix)
        return args, kwargs

    return checked


def outputs_of(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Any,
    *,
    has_loss: bool = True,
) -> Any:
    """Return the model's outputs.

    UsageError: given the whole batch, since `forward` names no key, it failed.
    """
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        if not (isinstance(batch, Mapping) and args and args[0] is batch):
            _refuse_arguments(model, args, kwargs, has_loss=has_loss)
            raise
        what = (
            "forward of the model has no argument named like a key of the batch:"
            f" {listed([*map(str, batch)])}"
        )
        why = f"it was given the whole batch, and raised {type(error).__name__}: {error}"
        fix = (
            "name its arguments like the batch's keys, or give the model inputs(batch) ->"
            " (arguments,)"
        )
        raise UsageError(what, where="forward of the model", why=why, fix=fix) from error


def _refuse_arguments(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_loss: bool
) -> None:
    """Raise a UsageError if `forward` does not take what the batch gives it.

    Return if it failed for another reason.
    """
    module = getattr(model, "module", model)
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except ValueError:
        return
    except TypeError as error:
        given = listed([*kwargs]) if kwargs else f"{len(args)} argument{'s' * (len(args) != 1)}"
        what = f"forward of {type(module).__name__} can't be called with {given} of a batch"
        fix = "let a sample be (inputs, targets), or a dict named like forward's arguments"
        if not has_loss:
            what = f"no loss_fn was given, and {what}"
            fix = (
                "pass one, such as loss_fn=torch.nn.CrossEntropyLoss(): it gets the batch's last"
                " member, and forward the others; or let forward take all of them, and return the"
                " loss"
            )
        raise UsageError(what, where="the samples and the model", why=str(error), fix=fix) from None
