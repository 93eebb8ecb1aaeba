"""Refuses models that can't be placed, before anything about them is changed.

Tests: tests/parallel/test_foreign.py, tests/test_errors.py
"""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.config import StepConfig
from lockstep.config.checks import step_contradictions
from lockstep.errors import UsageError, listed, refuse
from lockstep.layout import Layout
from lockstep.models.hf_cache import without_cache
from lockstep.parallel.facts import ModelFacts
from lockstep.strategy import strategy_named
from lockstep.torch_compat.module_hooks import has_hooks


def refuse_unplaceable(
    facts: ModelFacts, layout: Layout, config: StepConfig, device_type: str, *, in_stages: bool
) -> None:
    """Refuse a model or a config that this layout can't have.

    Args:
        facts: of the model.
        layout: the number of ranks along each axis.
        config: the sections that say how a step is made.
        device_type: of the ranks.
        in_stages: a pipeline runs the model's segments.
    """
    sharded = strategy_named(layout.strategy).cuts_parameters(layout)
    refuse_wrapped(facts.model)
    refuse(step_contradictions(config, layout, device_type))
    refuse_parameters(facts.model, sharded=sharded, reproducible=config.distributed.reproducible)
    _refuse_scripted(facts, sharded=sharded)
    if in_stages:
        _refuse_hooks_outside_segments(facts)


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is wrapped already: its gradients would be reduced twice."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        name = type(model).__name__
        what = f"the model is already wrapped in {name}"
        why = "Lockstep places it, and would synchronise it twice"
        raise UsageError(
            what, why=why, fix=f"delete the line model = {name}(model, …) and pass the model itself"
        )


def refuse_parameters(model: nn.Module, *, sharded: bool, reproducible: bool) -> None:
    """Refuse parameters that do not exist yet, and gradients that this layout can't sum."""
    parameters = dict(model.named_parameters())
    lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
    if lazy:
        what = (
            f"{listed(lazy)} has no shape yet: a lazy module makes its parameters at its first"
            " forward pass"
        )
        why = "they are laid over the ranks before that"
        raise UsageError(
            what,
            why=why,
            fix="call the model once before it is handed over: model(*inputs of one batch)",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            what = f"{name or type(model).__name__} makes sparse gradients"
            why = "gradients are summed over micro-batches and ranks, and clipped, as dense tensors"
            raise UsageError(what, why=why, fix=f"write {type(module).__name__}(…, sparse=False)")
    empty = [name for name, parameter in parameters.items() if not parameter.numel()]
    if sharded and empty:
        what = f"the parameter {listed(empty)} has no elements, so FSDP can't cut it"
        raise UsageError(
            what, where="distributed.strategy: fsdp", fix="leave it out, or write strategy: ddp"
        )
    of_complex = [name for name, parameter in parameters.items() if parameter.is_complex()]
    if of_complex and (sharded or reproducible):
        where = "distributed.strategy: fsdp" if sharded else "distributed.reproducible"
        why = "gradients are cut and summed there as real numbers"
        fix = (
            "keep it real, with a last dim of 2, and take torch.view_as_complex(…) of it in"
            " forward; or write strategy: ddp and reproducible: false"
        )
        raise UsageError(
            f"the parameter {listed(of_complex)} is complex", where=where, why=why, fix=fix
        )


def _refuse_scripted(facts: ModelFacts, *, sharded: bool) -> None:
    """Refuse TorchScript in modules that get hooks.

    These are the model, its blocks and segments, its loss function, and on FSDP all of its modules.
    """
    hooked = [("", facts.model), *facts.blocks, *(facts.segments or ())]
    looked_at = list(facts.model.named_modules()) if sharded else hooked
    if facts.loss is not None:
        looked_at.append(("the loss function", facts.loss.module))
    scripted = [name for name, module in looked_at if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        what = f"{scripted[0] or 'the model'} is TorchScript (torch.jit.script or trace)"
        why = "it takes no hooks, which key random numbers and gather parameters"
        fix = "give the module as it was before, and training.compile: true for speed"
        raise UsageError(what, why=why, fix=fix + ("; or write strategy: ddp" if sharded else ""))


def _refuse_hooks_outside_segments(facts: ModelFacts) -> None:
    """Refuse hooks on modules that a pipeline does not call.

    It runs the model's segments one by one.
    """
    model = facts.model
    called = {id(module) for _, segment in facts.required_chain() for module in segment.modules()}
    hooked = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if id(module) not in called and has_hooks(module, but=without_cache)
    ]
    if hooked:
        what = f"{listed(hooked)} has a hook that a pipeline does not call"
        why = "its stages run the model's segments one by one, not the modules that hold them"
        fix = "register it on a segment, or on a module inside of one; or use ddp or fsdp"
        raise UsageError(what, where="distributed.strategy: pipeline", why=why, fix=fix)
