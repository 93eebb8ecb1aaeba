"""Defines what a model may offer, and the defaults where it offers nothing.

Any `nn.Module` can be trained. A model may help with

    inputs(batch) -> tuple           positional arguments of forward
    loss_inputs(batch) -> dict       further keywords, by which forward returns losses, not logits
    loss(outputs, batch) -> Tensor   0-dim SUM over the batch's valid targets
    count(batch) -> int | Tensor     number of valid targets
    blocks() -> [(name, module)]     its repeated blocks, for wrapping, checkpointing and compiling
    segments() -> [(name, module)]   the whole forward pass as a chain, for pipelines; the first
                                     takes the arguments of forward
    context_plan() -> {name: dim}    the dims of a batch's parts along which sequences lie
                                     (`lockstep.parallel.context`)
    tensor_plan() -> {name: way}     how its layers are cut over ranks
                                     (`lockstep.parallel.tensor_cuts`)
    experts() -> [(name, module)]    its experts, stacked in dim 0 of parameters
                                     (`lockstep.models.mixture.Experts`)
    init_weights()                   fills every parameter and buffer in place; then the model can
                                     be built on `meta`

A batch whose sequences hold several documents numbers them in `document_ids`, int64 [B, T], an
argument of forward.

A module that counts over a step has a buffer `step_counts` of integers, to which its forward passes
add in training, and a method `end_step(counts)`, which gets the sum over the step's micro-batches
after their backward passes.

Without `loss`, the loss comes from `loss_fn(outputs, targets)` or from the outputs
(`outputs["loss"]`, `outputs.loss`, a 0-dim tensor). It is a mean unless `loss_fn.reduction` (or the
model's `loss_reduction`) is "sum". A mean is multiplied by its count: `count(batch)`; without it,
the divisor of torch's loss functions (`lockstep.models.observed`); if these do not show it, the
number of samples. A run's first steps check this (`lockstep.trainer.loss_check`).

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
from lockstep.models.chain import LOSS_TARGETS, shared_parameters_of
from lockstep.models.hf_decoder import decoder_segments, refuse_balanced_experts
from lockstep.models.left_out import refuse_uneven, stop_gradients_unless, sum_of_outputs
from lockstep.models.loss_modules import module_of
from lockstep.models.observed import LossCalls
from lockstep.models.torch_losses import as_object
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
            return self.factors(
                _outputs(model, args, kwargs, batch, has_loss=not self.in_outputs), batch
            )
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
        """
        if self.tap.take is not None:
            taken = self.tap.take(self.gather_outputs(outputs), batch)
            if taken is not None:
                return taken
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
        with LossCalls() if calls is None else nullcontext(calls) as seen:
            loss = self.loss(outputs, batch)
        shown = seen.count(batch, num_samples)
        count = self.count(batch) if shown is None else shown
        observed.told = shown is not None
        if observed.accumulates and seen.uneven:
            refuse_uneven(seen.uneven)
        if observed.looks:
            # by the names that the library gives the losses that balance experts
            observed.auxiliary = isinstance(outputs, Mapping) and any(
                str(key).endswith(("aux_loss", "aux_losses", "z_loss", "z_losses"))
                and value is not None
                for key, value in outputs.items()
            )
            divisors = seen.divisors()
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


def objective_of(model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> Objective:
    """Return the objective of `model`, with `loss_fn` or with what the model offers."""
    loss_fn = as_object(loss_fn)
    inputs = _with_documents(model, _inputs_of(model, has_loss_fn=loss_fn is not None))
    own = offered(model, "loss")
    declared = offered(model, "count")
    if declared is not None:
        declared = _asks_the_batch(declared)
    if own is not None and declared is None and "loss" in vars(model):
        own = None  # a function that the model uses in its forward pass: self.loss = F.mse_loss
    if loss_fn is None and own is not None:
        if declared is None:
            what = (
                f"{type(model).__name__} has loss(), which returns a sum, but no count() to divide"
                " it by"
            )
            raise UsageError(what, fix="add count(batch) -> number of valid targets in the batch")
        return Objective(inputs, _asks_the_batch(own), declared, of_model=True)
    if loss_fn is not None:
        counted = declared or _count_for(loss_fn)
        reduction = str(getattr(loss_fn, "reduction", "mean"))
        objective = _reduced(
            inputs,
            _with_targets(loss_fn),
            reduction,
            counted or num_samples,
            observes=counted is None,
        )
        return replace(objective, module=module_of(loss_fn))
    objective = _reduced(
        inputs,
        _loss_in_outputs,
        getattr(model, "loss_reduction", "mean"),
        declared or num_samples,
        observes=declared is None,
    )
    is_hugging_face = all(
        hasattr(model, name) for name in ("loss_function", "config", "_no_split_modules")
    )
    return replace(objective, in_outputs=True, must_be_told=declared is None and is_hugging_face)


Borrowed = Mapping[str, Mapping[str, str]]
"""segment → {keyword: canonical name of a parameter that it borrows}."""


@dataclass(frozen=True)
class Offers:
    """Lists the offers of a model, read once.

    The methods of the model that an axis alone asks for are called when that axis does.
    """

    objective: Objective  # how a batch becomes a loss
    blocks: list[tuple[str, nn.Module]]  # repeated ones, in order
    segments: list[tuple[str, nn.Module]] | None  # the chain that is declared to be its forward
    declares_segments: bool  # by a method `segments`: else it is an `nn.Sequential`
    borrowed: Borrowed
    # plans and experts, by the names of these methods, as far as the model has them
    methods: Mapping[str, Callable[[], Any]]


def offers_of(model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> Offers:
    """Return what a model offers, with `loss_fn` or with the loss that the model has.

    Raises:
        UsageError: what it offers does not fit together.
    """
    borrowed = shared_parameters_of(model)
    methods = {name: offered(model, name) for name in ("context_plan", "tensor_plan", "experts")}
    return Offers(
        objective=objective_of(model, loss_fn),
        blocks=blocks_of(model, borrowed),
        segments=segments_of(model),
        declares_segments=offered(model, "segments") is not None,
        borrowed=borrowed,
        methods={name: method for name, method in methods.items() if method is not None},
    )


def offered(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return the method by which a model helps.

    None if it has none, or the name is something else's.

    The name may be a module's: `self.blocks = nn.ModuleList(…)`, `self.loss =
    nn.CrossEntropyLoss()`.
    """
    found = getattr(model, name, None)
    return found if callable(found) and not isinstance(found, nn.Module) else None


def blocks_of(model: nn.Module, borrowed: Borrowed | None = None) -> list[tuple[str, nn.Module]]:
    """Return (canonical name, module) of the repeated blocks of `model`, in order.

    The list is empty if there are none.

    They come from the first of: `model.blocks()`; the classes that a Hugging Face model must not
    split; the longest `ModuleList` or `Sequential` whose members have one class, run, and own
    parameters that segments do not all borrow (`borrowed`, if it has been read already).
    """
    if own := offered(model, "blocks"):
        return list(own())
    unsplittable = set(getattr(model, "_no_split_modules", None) or ())
    if unsplittable:
        return [(name, m) for name, m in model.named_modules() if type(m).__name__ in unsplittable]
    if borrowed is None:
        borrowed = shared_parameters_of(model)
    lent = {name for names in borrowed.values() for name in names.values()}
    lists = [
        (name, child)
        for name, child in model.named_modules()
        if isinstance(child, nn.ModuleList | nn.Sequential)
        and len(child) > 1
        and len({type(m) for m in child}) == 1
        and any(f"{name}.{own}" not in lent for own, _ in child.named_parameters())
    ]
    if not lists:
        return []
    prefix, longest = max(lists, key=lambda item: len(item[1]))
    return _without_containers(prefix, longest)


def _without_containers(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a list's members.

    Members that are lists themselves, and are never called, are replaced by theirs.
    """
    found = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _without_containers(path, child)
        elif any(True for _ in child.parameters()):
            found.append((path, child))
    return found


def segments_of(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the forward pass of `model` as a chain of modules, or None if it defines none."""
    if own := offered(model, "segments"):
        segments = list(own())
        for each in segments:
            if not (
                isinstance(each, tuple | list) and len(each) == 2 and isinstance(each[1], nn.Module)
            ):
                what = f"segments() of {type(model).__name__} lists a {type(each).__name__}"
                fix = (
                    "return [(name, module), …], with the names that the modules have in the model"
                )
                raise UsageError(what, where="the model", fix=fix)
        return segments
    if isinstance(model, nn.Sequential):
        # Not named_children(), which leaves out repeated modules: one ReLU for all layers.
        modules = model.named_modules(remove_duplicate=False)
        return [(name, module) for name, module in modules if name and "." not in name]
    return None


def pipeline_segments_of(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the chain that a pipeline runs: the model's own, or a Hugging Face decoder's."""
    return segments_of(model) or decoder_segments(model)


def require_segments(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the forward pass of `model` as a chain of modules.

    UsageError if it does not define one.
    """
    segments = pipeline_segments_of(model)
    if segments is None:
        raise no_chain(model)
    return segments


def no_chain(model: nn.Module) -> UsageError:
    """Return the error for a model that can't be cut into stages.

    Raises:
        UsageError: the model is a mixture that could be, with other settings.
    """
    refuse_balanced_experts(model)
    what = f"{type(model).__name__} can't be cut into stages"
    why = "a pipeline needs the forward pass as a chain of modules"
    fix = (
        "give the model a method segments() -> [(name, module)], each taking what the one before it"
        " returns; or make it an nn.Sequential; or let torch trace it:"
        " lockstep.models.traced.trace(model, example inputs)"
    )
    return UsageError(what, where="distributed.strategy: pipeline", why=why, fix=fix)


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
        found = member if isinstance(member, Tensor) else _first_tensor(member)
        if found is not None:
            return found
    return None


def _inputs_of(model: nn.Module, *, has_loss_fn: bool) -> Inputs:
    """Return the function that takes the arguments of the forward pass from a batch."""
    own = offered(model, "inputs")
    if own is not None:
        asked = _asks_the_batch(own)
        of_loss = offered(model, "loss_inputs") if not has_loss_fn else None

        def given(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments = asked(batch)
            if isinstance(arguments, Iterable) and not isinstance(arguments, Mapping | Tensor):
                return tuple(arguments), {} if of_loss is None else of_loss(batch)
            what = f"inputs() of {type(model).__name__} returns a {type(arguments).__name__}"
            raise UsageError(
                what, where="the model", fix="return a tuple, the positional arguments of forward"
            )

        return given
    parameters = inspect.signature(model.forward).parameters
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
            accepted = {k: v for k, v in batch.items() if k in parameters}
            if hands_on or (takes_any and accepted):
                accepted = dict(batch)
            return ((), accepted) if accepted else ((batch,), {})
        if isinstance(batch, tuple | list):
            arguments = tuple(batch[:-1]) if has_loss_fn and len(batch) > 1 else tuple(batch)
            if len(arguments) > most and (has_loss_fn or _look_like_samples(batch)):
                raise _too_many(model, batch, len(arguments), positional)
            return arguments, {}
        return (batch,), {}

    return inputs


def _asks_the_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a model, of which the last argument is a batch.

    What it raises is a UsageError where it asks the batch for a key that is not there.
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


def _too_many(
    model: nn.Module, batch: Sequence[Any], count: int, positional: list[str]
) -> UsageError:
    """Return the error for a batch with more items than the model takes.

    A list of samples is such a batch.
    """
    what = (
        f"a batch is a {type(batch).__name__} of {len(batch)}, which gives"
        f" {type(model).__name__}.forward {count} arguments, and it takes {len(positional)}:"
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


def _with_documents(model: nn.Module, inputs: Inputs) -> Inputs:
    """Refuse batches with numbers of documents if the model is not given them.

    The model would look across documents.
    """

    def checked(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs; refuse a batch whose documents do not reach the model."""
        args, kwargs = inputs(batch)
        documents = batch.get(DOCUMENTS) if isinstance(batch, dict | Mapping) else None
        if documents is not None and not any(
            given is documents or given is batch for given in (*args, *kwargs.values())
        ):
            what = f"{type(model).__name__} does not take {DOCUMENTS}, which this batch has"
            why = "it would let the documents of a sequence see each other"
            fix = (
                f"leave {DOCUMENTS} out of the samples, or let the model's forward take it and hand"
                " it to its attention: self.attend(q, k, v, document_ids),"
                " self.attend.positions(length, device, document_ids)"
            )
            raise UsageError(what, where="the data set", why=why, fix=fix)
        return args, kwargs

    return checked


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
    found = (
        outputs.get("loss")
        if isinstance(outputs, dict | Mapping)
        else getattr(outputs, "loss", None)
    )
    if found is None and isinstance(outputs, tuple):
        numbers = [member for member in outputs if isinstance(member, Tensor) and not member.ndim]
        found = numbers[0] if len(numbers) == 1 else None  # (logits, loss), as nanoGPT returns them
    if not isinstance(found, Tensor):
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
    return found
