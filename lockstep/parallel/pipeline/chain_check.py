"""Compares a model with its chain of segments on one small batch, before a pipeline cuts it.

Every rank does so for itself, in evaluation mode and without gradients; random states, buffers and
numbers of modules are restored. The chain of a decoder of transformers is compared with the version
of the library that is installed. For `segments()` of anybody else a batch is made from the first
layer: a model that does not take it, returns something of another shape without targets, or draws
random numbers in evaluation mode, is not compared.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.batch_parts import logits_of
from lockstep.models.chain import lent, run_segment
from lockstep.parallel.facts import ModelFacts, Named
from lockstep.parallel.forward_effects.buffers import restored, restored_attributes
from lockstep.randomness import preserve_states
from lockstep.torch_compat.pytree import tree_leaves

_SAMPLES = 2
_LENGTH = 16
_IMAGE = 32  # pixels along a side
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative to the largest output
_COARSE = 3e-2  # of other dtypes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_chain(facts: ModelFacts) -> list[str]:
    """Refuse a model whose chain of segments computes something else than its forward pass.

    Returns lines to log: that it could not be compared, and why.
    """
    model = facts.model
    own = facts.declares_segments
    if type(model).forward is nn.Sequential.forward and not own:
        return []
    segments = facts.required_chain()
    guessed = own or isinstance(model, nn.Sequential)
    arguments = _guessed(segments) if guessed else _texts(model)
    distance, first, reason = _compared(facts, segments, arguments)
    name = type(model).__name__
    where = "distributed.strategy: pipeline"
    if distance is None and isinstance(model, nn.Sequential) and not own:
        what = (
            f"{name} is an nn.Sequential with a forward pass of its own, which may be more than its"
            " members in turn"
        )
        raise UsageError(
            what, where=where, fix="give the model a method segments() -> [(name, module)]"
        )
    if distance is None:
        if own and type(model).__module__.startswith("lockstep."):
            return []  # the chains of models that ship are compared by tests
        unknown = f"the chain of segments was not compared with the model ({reason})"
        return [
            f"warning: pipeline: {unknown}; `lockstep verify` compares training with one process"
        ]
    if distance <= max(
        (_TOLERANCE.get(p.dtype, _COARSE) for p in model.parameters()), default=_COARSE
    ):
        return []
    what = (
        f"the chain of segments of {name} computes something else than its forward pass: outputs"
        " differ by "
    )
    what += f"{distance:.2g} of the largest" + (f", from the segment {first} on" if first else "")
    why = (
        "a pipeline would train another model than one process; seen on one small batch, in"
        " evaluation mode"
    )
    fix = (
        "let segments() list all that forward does"
        if own
        else "give the model a method segments() of its own"
    )
    raise UsageError(what, where=where, why=why, fix=f"{fix}, or use strategy: ddp or fsdp")


def _compared(
    facts: ModelFacts, segments: Named, arguments: Arguments | None
) -> tuple[float | None, str | None, str]:
    """Return how far the chain's outputs are from the model's, and the first segment that differs.

    The distance is None where they can't be compared; then the last value says why.
    """
    if arguments is None:
        return None, None, "nothing tells what its first layer takes"
    model = facts.model
    with _unchanged(model, segments), torch.no_grad():
        try:
            expected, seen = _run_model(model, segments, arguments)
            again, _ = _run_model(model, segments, arguments, seed=1)
            outputs, first = _run_chain(facts, segments, arguments, seen)
        except Exception as error:  # a model of somebody's, which may need other inputs than these
            return None, None, f"{type(error).__name__}: {error}".splitlines()[0]
    if _distance(again, expected) != 0:
        return (
            None,
            None,
            "it draws random numbers in evaluation mode, or its outputs are not finite",
        )
    return _distance(outputs, expected), first, "its outputs have another shape"


def _texts(model: nn.Module) -> Arguments:
    """Return two texts for a decoder, of which one is padded, or has two documents.

    A model that takes the numbers of documents is given no mask.
    """
    config: Any = getattr(model, "config", None)
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    device = next(model.parameters()).device
    ids = (
        torch.arange(1, 1 + _SAMPLES * length, device=device).view(_SAMPLES, length)
        % config.vocab_size
    )
    is_last_quarter = torch.zeros_like(ids)
    is_last_quarter[1, -(length // 4) :] = 1
    if getattr(model, "takes_documents", False):
        return (ids, is_last_quarter), {}
    return (ids,), {"attention_mask": 1 - is_last_quarter}


def _guessed(segments: Named) -> Arguments | None:
    """Return a batch for the first layer of a chain.

    None where that is none of those that show what they take.
    """
    leaves = (
        module
        for _, segment in segments
        for module in segment.modules()
        if not [*module.children()]
    )
    layer = next((module for module in leaves if [*module.parameters()]), None)
    if layer is None:
        return None
    device = next(layer.parameters()).device
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    if isinstance(layer, nn.Embedding):
        ids = torch.arange(_SAMPLES * _LENGTH, device=device) % layer.num_embeddings
        return (ids.view(_SAMPLES, _LENGTH),), {}
    if isinstance(layer, nn.Linear):
        return (random(_SAMPLES, layer.in_features).to(device, layer.weight.dtype),), {}
    if isinstance(layer, nn.Conv2d):
        return (
            random(_SAMPLES, layer.in_channels, _IMAGE, _IMAGE).to(device, layer.weight.dtype),
        ), {}
    return None


def _run_model(
    model: nn.Module, segments: Named, arguments: Arguments, *, seed: int = 0
) -> tuple[Any, dict[str, Tensor]]:
    """Return a model's outputs, and the outputs of its modules after which segments are named."""
    seen: dict[str, Tensor] = {}

    def note(name: str, _module: nn.Module, _args: Any, returned: Any) -> None:
        seen[name] = _first(returned)

    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for name, _ in segments:
            if name in modules:
                hooks.enter_context(modules[name].register_forward_hook(partial(note, name)))
        torch.default_generator.manual_seed(seed)
        args, kwargs = arguments
        return model(*args, **kwargs), seen


def _run_chain(
    facts: ModelFacts, segments: Named, arguments: Arguments, seen: dict[str, Tensor]
) -> tuple[Any, str | None]:
    """Return the last segment's result, and the name of the first that differs from `seen`.

    `seen` holds the results of the modules in the model, by name.
    """
    first = None
    torch.default_generator.manual_seed(0)
    values, keywords = arguments
    outputs: Any = None
    for name, segment in segments:
        lends = lent(facts.model, facts.borrowed.get(name, {}))
        outputs = run_segment(segment, values, {**keywords, **lends}, arguments)
        if (
            first is None
            and name in seen
            and (_distance(_first(outputs), seen[name]) or 0) > _TOLERANCE[torch.float32]
        ):
            first = name
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        keywords = {}
    return outputs, first


def _first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


def _distance(outputs: Any, expected: Any) -> float | None:
    """Return the largest difference, relative to the largest output.

    None where shapes differ, or none is finite.
    """
    tensors = _floating_tensors(outputs)
    references = _floating_tensors(expected)
    same_shapes = [each.shape for each in tensors] == [each.shape for each in references]
    if not references or not same_shapes:
        return None
    pairs = [
        (tensor.double(), reference.double())
        for tensor, reference in zip(tensors, references, strict=True)
        if reference.numel()
    ]
    largest = max((float(reference.abs().max()) for _, reference in pairs), default=0.0)
    if not math.isfinite(largest):
        return None
    differences = (float((tensor - reference).abs().max()) for tensor, reference in pairs)
    distance = max(differences, default=0.0)
    return distance / largest if largest else distance


def _floating_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of a model's outputs that have differences worth measuring."""
    leaves = tree_leaves(logits_of(outputs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextmanager
def _unchanged(model: nn.Module, segments: Named) -> Iterator[None]:
    """Run the block in evaluation mode, and leave no trace in the model or in random states."""
    roots = [model, *(segment for _, segment in segments)]
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    training = [module.training for module in modules]
    with preserve_states(), restored([model]), restored_attributes(modules):
        for root in roots:
            root.eval()
        try:
            yield
        finally:
            for module, mode in zip(modules, training, strict=True):
                module.training = mode
