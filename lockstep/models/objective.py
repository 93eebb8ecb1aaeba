"""The way from a batch to a loss, which each micro-batch takes.

    inputs     the batch → the arguments of forward
    loss       outputs and batch → a number: by a loss function, by the model, or in its outputs
    count      the batch → the number of valid targets

An `Objective` has all three. Losses become sums over valid targets, beside their counts, so that
micro-batches and ranks can be added up: the step divides once, by the count of all. Which of them a
model has is read in `protocol.py`; this file is given functions, and no model.

Tests: tests/models/test_offers.py, tests/models/test_builders.py, tests/models/test_documented.py
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.models.chain import LOSS_TARGETS
from lockstep.models.left_out import refuse_uneven, stop_gradients_unless, sum_of_outputs
from lockstep.models.loss_modules import module_of
from lockstep.models.observed import LossCalls
from lockstep.torch_compat.fake_tensors import FakeTensor

IGNORED_TARGET = -100  # torch's default `ignore_index`
DOCUMENTS = "document_ids"  # the part of a batch that numbers the documents of a sequence
_TARGET_KEYS = ("targets", "target", "labels", "label", "y")


Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""batch → (positional, keyword) arguments of forward."""


@dataclass
class Observed:
    """Observations about a loss when it was last computed."""

    # whether torch's loss functions showed its divisor; None: not computed in this process
    told: bool | None = None
    accumulates: bool = False  # whether the step that runs has several micro-batches
    # whether to look for auxiliary terms and divisors, while losses are compared
    looks: bool = False
    # whether terms depend on how a batch is divided: the load balancing of experts
    auxiliary: bool = False
    divisors: tuple[float, ...] = ()  # of its terms, and the count that was used; empty if unknown

    def begin_step(self, micro_batches_per_step: int) -> None:
        """Say into how many micro-batches the samples are cut that follow."""
        self.accumulates = micro_batches_per_step > 1

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look for auxiliary terms and divisors in the block, where losses are compared."""
        self.looks = True
        try:
            yield
        finally:
            self.looks = False


TakeOutputs = Callable[[Any, Any], tuple[Tensor, int, int | Tensor] | None]
"""Maps (outputs, batch) to (loss, times, count) in place of the objective's own factors.

See `Objective.factors`. A result of None leaves them to the objective.
"""


@dataclass
class Tap:
    """Shows the model's outputs for each micro-batch to metrics and predictions."""

    # called before the loss is computed, where the outputs are; None: nobody asks
    take: TakeOutputs | None = None

    @contextmanager
    def opened(self, take: TakeOutputs) -> Iterator[None]:
        """Call `take` for each micro-batch in the block."""
        before = self.take
        self.take = take
        try:
            yield
        finally:
            self.take = before


@dataclass(frozen=True)
class Objective:
    """The way from a batch to a loss."""

    inputs: Inputs
    # (outputs, batch) → 0-dim float32 tensor, the sum over the batch's valid targets, or their mean
    loss: Callable[[Any, Any], Tensor]
    # batch → number of valid targets, an int or a 0-dim tensor; not used where the loss is observed
    # and shows it
    count: Callable[[Any], int | Tensor]
    is_mean: bool = False  # whether `loss` is a mean
    in_outputs: bool = False  # the loss is computed by the model's forward pass
    observed: Observed | None = None  # observations of a mean without a declared count
    # reject an unknown divisor, unless a comparison shows a mean over samples
    must_be_told: bool = False
    of_model: bool = False  # whether `loss` is the model's own method
    # the loss function, if it is one, whose weights train with the model's
    module: nn.Module | None = None
    tap: Tap = field(default_factory=Tap)
    # outputs of this rank → outputs for the whole batch, where ranks share its sequences
    gather_outputs: Callable[[Any], Any] = lambda outputs: outputs

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward pass, which returns outputs where somebody asks."""
        args, kwargs = self.inputs(batch)
        if self.tap.take is not None:
            kwargs.pop(LOSS_TARGETS, None)
        return args, kwargs

    def of(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, int, int | Tensor]:
        """Run one forward pass: (loss, times, number of valid targets), as in `factors`."""
        args, kwargs = self.arguments(batch)
        if self.observed is None or not self.in_outputs:
            outputs = _outputs(model, args, kwargs, batch, has_loss=not self.in_outputs)
            return self.factors(outputs, batch)
        with LossCalls() as calls:
            outputs = _outputs(model, args, kwargs, batch, has_loss=False)
        return self.factors(outputs, batch, calls)

    def summed(self, outputs: Any, batch: Any) -> Tensor:
        """Return the sum over the batch's valid targets, a 0-dim float32 tensor."""
        loss, times, _count = self.factors(outputs, batch)
        return loss if times == 1 else loss * times

    def factors(
        self, outputs: Any, batch: Any, calls: LossCalls | None = None
    ) -> tuple[Tensor, int, int | Tensor]:
        """Return (loss, times, number of valid targets): the summed loss is loss × times.

        A mean therefore needs no multiplication in the graph: the initial gradient of backward is
        multiplied instead. `calls` are those of torch's loss functions in the forward pass, if the
        loss was computed there.

        A mean of 2.5 over 4 valid targets is (2.5, 4, 4), and a sum of 10 over them (10, 1, 4). On
        a GPU the count is not read: the sum is computed there, (2.5 × count, 1, count).
        """
        if self.tap.take is not None:
            of_tap = self.tap.take(self.gather_outputs(outputs), batch)
            if of_tap is not None:
                return of_tap
        if self.observed is None:
            loss = self.loss(outputs, batch)
            count = self.count(batch)
        else:
            loss, count = self._observe(self.observed, outputs, batch, calls)
        if not self.is_mean:
            return loss, 1, count
        if isinstance(count, int) and count > 0:
            return loss, count, count
        n = torch.as_tensor(count, device=loss.device)
        # A batch without a valid target has the mean 0/0: its sum is 0, and so are its gradients,
        # which torch's own loss functions see to; those of a mean that is written by hand are not
        # numbers. In `lockstep plan`, where nothing has values, it has some.
        if n.device.type != "cpu" or not (isinstance(n, FakeTensor) or n > 0):
            if not self.in_outputs:
                stop_gradients_unless(n > 0, outputs)
            elif n.device.type == "cpu" and (self.observed is None or not self.observed.told):
                loss = sum_of_outputs(outputs, loss)
        return torch.where(n > 0, loss * n, 0.0), 1, count

    def _observe(
        self, observed: Observed, outputs: Any, batch: Any, calls: LossCalls | None
    ) -> tuple[Tensor, int | Tensor]:
        """Return the loss and its divisor.

        The divisor is the one that torch's loss functions show, or else the declared count.
        """
        with LossCalls() if calls is None else nullcontext(calls) as loss_calls:
            loss = self.loss(outputs, batch)
        shown = loss_calls.count(batch, num_samples)
        count = self.count(batch) if shown is None else shown
        observed.told = shown is not None
        if observed.accumulates and loss_calls.uneven:
            refuse_uneven(loss_calls.uneven)
        if observed.looks:
            observed.auxiliary = _has_auxiliary_losses(outputs)
            divisors = loss_calls.divisors()
            observed.divisors = (*divisors, float(count)) if divisors else ()
        return loss, count

    def estimate(self, batch: Any) -> int | Tensor:
        """Estimate the number of valid targets before the forward pass.

        It is the provisional divisor of the backward pass.

        A batch without a valid target says nothing about the others, so its samples are counted.
        """
        # host waits for the device, as the caller does
        return self._estimate(batch) or num_samples(batch)

    def _estimate(self, batch: Any) -> int | Tensor:
        targets = targets_of(batch, default=None) if self.observed is not None else None
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            valid: Tensor = targets != IGNORED_TARGET
            return valid.sum()
        return self.count(batch)


def _has_auxiliary_losses(outputs: Any) -> bool:
    """Return whether outputs hold losses that balance experts, by the library's names for them."""
    if not isinstance(outputs, Mapping):
        return False
    endings = ("aux_loss", "aux_losses", "z_loss", "z_losses")
    return any(str(key).endswith(endings) and value is not None for key, value in outputs.items())


def _outputs(
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


# ---- a loss, as a sum ----


def objective_of_loss_fn(
    inputs: Inputs, loss_fn: Callable[..., Tensor], declared: Callable[[Any], int | Tensor] | None
) -> Objective:
    """Return the objective of a loss function of (outputs, targets); `declared` counts targets."""
    count = declared or _count_for(loss_fn)
    objective = _reduced(
        inputs,
        _with_targets(loss_fn),
        str(getattr(loss_fn, "reduction", "mean")),
        count or num_samples,
        observes=count is None,
    )
    return replace(objective, module=module_of(loss_fn))


def objective_of_outputs(
    inputs: Inputs,
    reduction: str,
    declared: Callable[[Any], int | Tensor] | None,
    *,
    must_be_told: bool,
) -> Objective:
    """Return the objective of a model whose forward pass computes the loss."""
    count = declared or num_samples
    objective = _reduced(inputs, _loss_in_outputs, reduction, count, observes=declared is None)
    return replace(objective, in_outputs=True, must_be_told=must_be_told)


def _reduced(
    inputs: Inputs,
    loss: Callable[[Any, Any], Tensor],
    reduction: str,
    count: Callable[[Any], int | Tensor],
    *,
    observes: bool,
) -> Objective:
    """Return an objective whose loss is a sum, whatever its function's reduction is."""
    if reduction == "sum":
        return Objective(inputs, lambda outputs, batch: loss(outputs, batch).float(), count)
    if reduction == "none":
        return Objective(inputs, lambda outputs, batch: loss(outputs, batch).float().sum(), count)
    if reduction in ("mean", "batchmean"):  # nn.KLDivLoss: a sum, divided by the samples

        def one_number(outputs: Any, batch: Any) -> Tensor:
            mean = loss(outputs, batch)
            if not isinstance(mean, Tensor):
                raise _no_tensor(mean)
            if mean.ndim:
                what = f"the loss has the shape {tuple(mean.shape)}, but a mean is one number"
                raise UsageError(
                    what,
                    fix='declare it with reduction = "none" (it is summed), or return one number',
                )
            return mean.float()

        return Objective(
            inputs, one_number, count, is_mean=True, observed=Observed() if observes else None
        )
    raise UsageError(f"a loss with reduction {reduction!r}", fix="use mean, batchmean, sum or none")


def _no_tensor(returned: Any) -> UsageError:
    what = f"the loss function returned {returned!r:.60}, not a tensor"
    fix = "return the loss itself: without .item(), float(…) or .backward(), which the step does"
    return UsageError(what, where="loss_fn", fix=fix)


def _with_targets(loss_fn: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return a loss of (outputs, batch), which takes logits and targets out of them."""
    over_classes = isinstance(loss_fn, nn.CrossEntropyLoss)

    def loss(outputs: Any, batch: Any) -> Tensor:
        """Call the loss function, with [B · T, V] outputs for [B, T, V] where that is meant."""
        outputs = logits_of(outputs)
        targets = targets_of(batch)
        if (
            over_classes
            and isinstance(outputs, Tensor)
            and outputs.shape[:-1] == targets.shape
            and targets.ndim > 1
        ):
            fits_torch = targets.ndim > 2 and outputs.shape[:1] + outputs.shape[2:] == targets.shape
            # [B, T, V] and [B, T], and not torch's [B, C, H, W] and [B, H, W] with equal sizes
            if not fits_torch:
                outputs = outputs.flatten(0, -2)
                targets = targets.flatten()
        return loss_fn(outputs, targets)

    return loss


def _count_for(loss_fn: Callable[..., Tensor]) -> Callable[[Any], int | Tensor] | None:
    """Return the count that a loss function of torch's kind implies; None if it implies none."""
    ignored = getattr(loss_fn, "ignore_index", None)
    if ignored is None:
        return None
    weight = getattr(loss_fn, "weight", None)

    def count(batch: Any) -> int | Tensor:
        """Return the number of targets in torch's mean, or the sum of their weights."""
        targets = targets_of(batch)
        if not isinstance(targets, Tensor):
            what = (
                f"no targets for {type(loss_fn).__name__} in a batch of the type"
                f" {type(batch).__name__}"
            )
            if isinstance(batch, tuple | list):
                what += f" with {len(batch)} member{'s' * (len(batch) != 1)}"
            fix = "let a sample be (inputs, targets), or a dict with `inputs` and `targets`"
            raise UsageError(what, where="the samples that the trainer was given", fix=fix)
        if targets.is_floating_point():  # class probabilities: every sample counts
            return num_samples(batch)
        valid: Tensor = targets != ignored
        if weight is not None:  # torch's weighted mean divides by the weights of the targets
            return torch.where(valid, weight.to(targets.device)[targets.clamp(min=0)], 0.0).sum()
        return valid.sum()

    return count


def _loss_in_outputs(outputs: Any, _batch: Any) -> Tensor:
    """Return the loss that a model's outputs hold."""
    if isinstance(outputs, Tensor) and outputs.ndim == 0:
        return outputs
    if isinstance(outputs, dict | Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, tuple):
        numbers = [member for member in outputs if isinstance(member, Tensor) and not member.ndim]
        loss = numbers[0] if len(numbers) == 1 else None  # (logits, loss), as nanoGPT returns them
    if not isinstance(loss, Tensor):
        what = f"the model returned {type(outputs).__name__}, in which there is no loss"
        fix = (
            'pass a loss_fn, return {"loss": …}, or give the model loss(outputs, batch) and'
            " count(batch)"
        )
        if type(outputs).__module__.startswith("transformers."):
            fix = (
                'models of transformers compute it where the batch has "labels"; or pass a loss_fn'
            )
        raise UsageError(what, fix=fix)
    return loss


# ---- the arguments of forward ----


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


# ---- what is in a batch, and in outputs ----


def num_samples(batch: Any) -> int:
    """Return the size of the first dim of the first tensor in `batch`, at any depth.

    UsageError if there is none.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        what = f"a batch of type {type(batch).__name__} holds no tensor to count samples in"
        raise UsageError(
            what, fix="give the model a method count(batch) -> number of valid targets"
        )
    return tensor.shape[0] if tensor.ndim else 1


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if not isinstance(batch, tuple | list):
        batch = batch.values() if isinstance(batch, Mapping) else ()
    for member in batch:
        tensor = member if isinstance(member, Tensor) else _first_tensor(member)
        if tensor is not None:
            return tensor
    return None


_REQUIRED: Any = object()


def targets_of(batch: Any, default: Any = _REQUIRED) -> Any:
    """Return the targets in a batch: a pair's last, or one named targets, labels ….

    Else `default`, or a UsageError.
    """
    if isinstance(batch, Mapping):
        for key in _TARGET_KEYS:
            if key in batch:
                return batch[key]
        if default is not _REQUIRED:
            return default
        what = (
            "no targets for the loss function in a batch with the keys"
            f" {', '.join(map(str, batch))}"
        )
        fix = (
            f"name them one of {', '.join(_TARGET_KEYS)}, or give the model loss(outputs, batch)"
            " and count(batch)"
        )
        raise UsageError(what, fix=fix)
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[-1]
    return batch  # an autoencoder's target is its input


def logits_of(outputs: Any) -> Any:
    """Return the member `logits` of a model's outputs; the outputs themselves if they have none."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)
