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
                                     (`lockstep.parallel.context.sequences`)
    tensor_plan() -> {name: way}     how its layers are cut over ranks
                                     (`lockstep.parallel.tensor.cuts`)
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
number of samples. A run's first steps check this (`lockstep.trainer.loss_check`). A loss function
with a method `bind_model(model)` gets the model, before it is placed.

`offers_of` reads all of it once. `objective.py` is the way from a batch to a loss, which each
micro-batch takes.

Tests: tests/models/test_offers.py, tests/models/test_builders.py, tests/models/test_documented.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.chain import shared_parameters_of
from lockstep.models.forward_arguments import (
    Inputs,
    inputs_by_method,
    inputs_by_signature,
    naming_missing_keys,
)
from lockstep.models.hf_decoder import decoder_segments, refuse_balanced_experts
from lockstep.models.loss_arguments import count_of
from lockstep.models.loss_reductions import objective_of_loss_fn, objective_of_outputs
from lockstep.models.objective import Objective
from lockstep.models.torch_losses import as_object

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
    member = getattr(model, name, None)
    return member if callable(member) and not isinstance(member, nn.Module) else None


def objective_of(model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> Objective:
    """Return the objective of `model`, with `loss_fn` or with what the model offers.

    Raises:
        UsageError: the model has a loss without a count, or a reduction that there is not.
    """
    loss_fn = as_object(loss_fn)
    bind_model = getattr(loss_fn, "bind_model", None)
    if bind_model is not None:
        bind_model(model)
    inputs = _inputs_of(model, has_loss_fn=loss_fn is not None)
    count = count_of(loss_fn) or offered(model, "count")
    if count is not None:
        count = naming_missing_keys(count)
    if loss_fn is not None:
        return objective_of_loss_fn(inputs, loss_fn, count)
    loss = offered(model, "loss")
    if loss is not None and count is None and "loss" in vars(model):
        loss = None  # a function that the model uses in its forward pass: self.loss = F.mse_loss
    if loss is None:
        is_hugging_face = all(
            hasattr(model, name) for name in ("loss_function", "config", "_no_split_modules")
        )
        return objective_of_outputs(
            inputs,
            getattr(model, "loss_reduction", "mean"),
            count,
            must_be_told=count is None and is_hugging_face,
        )
    if count is None:
        what = (
            f"{type(model).__name__} has loss(), which returns a sum, but no count() to divide it"
            " by"
        )
        raise UsageError(what, fix="add count(batch) -> number of valid targets in the batch")
    return Objective(inputs, naming_missing_keys(loss), count, of_model=True)


def _inputs_of(model: nn.Module, *, has_loss_fn: bool) -> Inputs:
    """Return the function that takes the arguments of the forward pass from a batch."""
    owner = type(model).__name__
    method = offered(model, "inputs")
    if method is None:
        return inputs_by_signature(model.forward, owner, has_loss_fn=has_loss_fn)
    loss_inputs = None if has_loss_fn else offered(model, "loss_inputs")
    return inputs_by_method(method, loss_inputs, owner)


def blocks_of(model: nn.Module, borrowed: Borrowed | None = None) -> list[tuple[str, nn.Module]]:
    """Return (canonical name, module) of the repeated blocks of `model`, in order.

    The list is empty if there are none.

    They come from the first of: `model.blocks()`; the classes that a Hugging Face model must not
    split; the longest `ModuleList` or `Sequential` whose members have one class, run, and own
    parameters that segments do not all borrow (`borrowed`, if it has been read already).
    """
    list_blocks = offered(model, "blocks")
    if list_blocks is not None:
        return list(list_blocks())
    unsplittable = set(getattr(model, "_no_split_modules", None) or ())
    if unsplittable:
        return [(name, m) for name, m in model.named_modules() if type(m).__name__ in unsplittable]
    if borrowed is None:
        borrowed = shared_parameters_of(model)
    lent = {name for names in borrowed.values() for name in names.values()}
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and _repeats_a_block(name, module, lent)
    ]
    if not lists:
        return []
    name, longest = max(lists, key=lambda item: len(item[1]))
    return _without_containers(name, longest)


def _repeats_a_block(name: str, modules: nn.ModuleList | nn.Sequential, lent: set[str]) -> bool:
    """Return whether a list has several members of one class, with parameters of their own.

    `lent` names the parameters that segments borrow.
    """
    has_one_class = len({type(module) for module in modules}) == 1
    parameters = (f"{name}.{inner}" for inner, _ in modules.named_parameters())
    return len(modules) > 1 and has_one_class and any(each not in lent for each in parameters)


def _without_containers(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a list's members.

    Members that are lists themselves, and are never called, are replaced by theirs.
    """
    members = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            members += _without_containers(path, child)
        elif any(True for _ in child.parameters()):
            members.append((path, child))
    return members


def segments_of(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the forward pass of `model` as a chain of modules, or None if it defines none."""
    list_segments = offered(model, "segments")
    if list_segments is not None:
        segments = list(list_segments())
        for each in segments:
            is_pair = isinstance(each, tuple | list) and len(each) == 2
            if not is_pair or not isinstance(each[1], nn.Module):
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
