"""`ModelFacts`: what a model offers, read in one place, before placement has changed anything.

A model declares things (`blocks`, `segments`, `tensor_plan` …) and has others (names, tied weights,
buffers that checkpoints keep). Placement needs most of them several times, and some of them
disappear on the way: FSDP2 replaces parameters, a pipeline puts what other ranks hold on meta. So
`place` reads them once, and hands them on.

What an axis alone asks for (its plan) is read when the axis asks for it, and kept: a method of
somebody's model is not called without need, and transformers note a layout on their layers when
their plan is read.

Tests: tests/parallel/test_facts.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from lockstep.models.chain import shared_parameters_of
from lockstep.models.protocol import blocks_of, no_chain, offered, pipeline_segments_of, segments_of
from lockstep.parallel.state_form import StateForm
from lockstep.parallel.tensor_plan import Planned, checked_plan
from lockstep.torch_compat.module_state import persistent_buffers

Named = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that placement needs.

    It holds no tensor, so that nothing keeps alive what FSDP2 replaces.
    """

    model: nn.Module
    names: Mapping[int, str]  # id of a parameter → canonical name
    aliases: dict[str, list[str]]  # canonical name → others, of tied weights
    attributes: Mapping[str, Mapping[str, Any]]  # canonical name → what hangs on the parameter
    num_parameters: int  # tied ones counted once
    persistent: frozenset[str]  # names of the buffers that checkpoints keep; all names of tied ones
    blocks: Named  # repeated blocks, in order
    segments: Named | None  # the chain that the model declares to be its forward pass
    chain: Named | None  # the chain that a pipeline runs; read only where the model is split
    borrowed: Mapping[
        str, Mapping[str, str]
    ]  # segment → {keyword: canonical name of a parameter that it borrows}
    on_meta: bool  # whether its values are still to be made
    form: StateForm | None  # what the model makes of its `state_dict`; None: its tensors by name

    @property
    def lent(self) -> set[str]:
        """Names of the parameters that segments borrow."""
        return {name for names in self.borrowed.values() for name in names.values()}

    @cached_property
    def context_plan(self) -> Mapping[str, int] | None:
        """Name of a batch's part → the dim along which its sequences lie.

        None: the model does not say.
        """
        own = offered(self.model, "context_plan")
        return None if own is None else own()

    @cached_property
    def tensor_plan(self) -> list[Planned]:
        """The layers that can be cut, checked.

        Raises UsageError: the model has no plan, or an impossible one.
        """
        return checked_plan(self.model)

    @cached_property
    def experts(self) -> Named:
        """The modules of stacked experts; empty if there are none."""
        return experts_of(self.model)

    @property
    def parameters_of_experts(self) -> list[nn.Parameter]:
        """The parameters of the experts, as they are now."""
        return [parameter for _, module in self.experts for parameter in module.parameters()]

    def required_chain(self) -> Named:
        """Return the chain that a pipeline runs.

        Raises UsageError: the model does not define one.
        """
        if self.chain is None:
            raise no_chain(self.model)
        return self.chain

    def after_new_parameters(self) -> "ModelFacts":
        """Return the facts with the identities of the current parameters.

        A model that leaves meta gets new ones.
        """
        names, _ = canonical_names(self.model)
        return replace(self, names=names, on_meta=False)


def canonical_names(model: nn.Module) -> tuple[dict[int, str], dict[str, list[str]]]:
    """Return id of a parameter → canonical name, and canonical name → aliases.

    The canonical name is the first that the model lists.
    """
    names: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases.setdefault(first, []).append(name)
    return names, aliases


def on_meta(model: nn.Module) -> bool:
    """Return whether the model is on meta, and its values are still to be made."""
    return any(p.is_meta for p in model.parameters())


def experts_of(model: nn.Module) -> Named:
    """Return the modules of stacked experts that a model names."""
    own = offered(model, "experts")
    return [] if own is None else own()


def facts_of(model: nn.Module, *, split: bool = False) -> ModelFacts:
    """Read what a model offers.

    `split`: its chain for a pipeline, too, which wraps layers of known decoders.
    """
    names, aliases = canonical_names(model)
    parameters = dict(model.named_parameters())
    segments = segments_of(model)
    persistent = frozenset(persistent_buffers(model))
    return ModelFacts(
        model=model,
        names=names,
        aliases=aliases,
        attributes={name: dict(vars(parameter)) for name, parameter in parameters.items()},
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        persistent=persistent,
        blocks=blocks_of(model),
        segments=segments,
        chain=pipeline_segments_of(model) if split and not segments else segments,
        borrowed=shared_parameters_of(model),
        on_meta=on_meta(model),
        form=StateForm.of(model, persistent),
    )
