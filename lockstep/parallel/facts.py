"""`ModelFacts`: what a model offers, read in one place, before placement has changed anything.

A model declares things (`blocks`, `segments`, `tensor_plan` …) and has others (names, tied weights,
buffers that checkpoints keep). Placement needs most of them several times, and some of them
disappear on the way: FSDP2 replaces parameters, a pipeline puts what other ranks hold on meta. So
`place` reads them once, and hands them on.

What an axis alone asks for (its plan, the chain that a pipeline runs) is read when the axis asks
for it, and kept: a method of somebody's model is not called without need, and transformers note a
layout on their layers when their plan is read.

Tests: tests/parallel/test_facts.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import UsageError
from lockstep.models.attention import Attend
from lockstep.models.hf_decoder import decoder_segments
from lockstep.models.hf_layers import advice_for_object
from lockstep.models.loss_modules import LossModule, read_loss
from lockstep.models.objective import Objective
from lockstep.models.protocol import Borrowed, no_chain, offers_of
from lockstep.parallel.state_form import StateForm
from lockstep.parallel.tensor.plan import TensorPlan, checked_plan
from lockstep.torch_compat.module_state import registered_state

Named = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that placement needs.

    It holds no tensor, so that nothing keeps alive what FSDP2 replaces.
    """

    model: nn.Module
    objective: Objective  # how a batch becomes a loss
    loss: LossModule | None  # the loss function, if it is a module
    names: Mapping[int, str]  # id of a parameter → canonical name
    aliases: dict[str, list[str]]  # canonical name → others, of tied weights
    attributes: Mapping[str, Mapping[str, Any]]  # canonical name → what hangs on the parameter
    num_parameters: int  # tied ones counted once
    persistent: frozenset[str]  # names of the buffers that checkpoints keep; all names of tied ones
    blocks: Named  # repeated blocks, in order
    segments: Named | None  # the chain that the model declares to be its forward pass
    declares_segments: bool  # by a method `segments`
    # segment → {keyword: canonical name of a parameter that it borrows}
    borrowed: Borrowed
    methods: Mapping[str, Callable[[], Any]]  # the model's plans and experts, by name
    on_meta: bool  # whether its values are still to be made
    form: StateForm | None  # what the model makes of its `state_dict`; None: its tensors by name

    @property
    def lent(self) -> set[str]:
        """Names of the parameters that segments borrow."""
        return {name for names in self.borrowed.values() for name in names.values()}

    @cached_property
    def chain(self) -> Named | None:
        """The chain that a pipeline runs: the model's own, or that of a known decoder.

        It wraps layers of the decoder, so only a pipeline asks for it.
        """
        return self.segments or decoder_segments(self.model)

    @cached_property
    def context_plan(self) -> Mapping[str, int] | None:
        """Name of a batch's part → the dim along which its sequences lie.

        None: the model does not say.
        """
        own = self.methods.get("context_plan")
        return None if own is None else own()

    @cached_property
    def tensor_plan(self) -> TensorPlan:
        """The layers that can be cut, checked.

        Raises UsageError: the model has no plan, or an impossible one.
        """
        return checked_plan(self.model, self.methods.get("tensor_plan"))

    @cached_property
    def experts(self) -> Named:
        """The modules of stacked experts; empty if there are none."""
        own = self.methods.get("experts")
        return [] if own is None else own()

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

    def required_context_plan(self) -> Mapping[str, int]:
        """Return name of a batch's part → the dim along which its sequences lie.

        Raises UsageError: the model does not say, or has no module that attends.
        """
        plan = self.context_plan
        if not plan or not any(isinstance(module, Attend) for module in self.model.modules()):
            raise _uncut_sequences(self.model, plan)
        return plan

    def after_new_parameters(self) -> "ModelFacts":
        """Return the facts with the identities of the current parameters.

        A model that leaves meta gets new ones.
        """
        names, _ = canonical_names(self.model)
        return replace(self, names=names, on_meta=False)


def _uncut_sequences(model: nn.Module, plan: Mapping[str, int] | None) -> UsageError:
    """Return the error for a model whose sequences can't be cut over ranks."""
    missing = (
        "does not say how its sequences are cut"
        if plan is None
        else "has no lockstep.models.attention.Attend"
    )
    what = f"sequences of {type(model).__name__} can't be cut over ranks: it {missing}"
    why = "each rank has a part of every sequence, and positions meet in attention"
    fix = (
        "let its attention be self.attend = Attend(), called as self.attend(q, k, v), and give it"
        ' context_plan() -> {"input_ids": 1, "targets": 1}: the dims of a batch along which its'
        " sequences lie"
    )
    fix = advice_for_object(model, "context") or fix
    return UsageError(what, where="distributed.context_size", why=why, fix=fix)


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


def facts_of(model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> ModelFacts:
    """Read what a model offers, with `loss_fn` or with the loss that the model has.

    Raises:
        UsageError: what it offers does not fit together.
    """
    offers = offers_of(model, loss_fn)
    module = offers.objective.module
    names, aliases = canonical_names(model)
    parameters = dict(model.named_parameters())
    registered = registered_state(model)
    return ModelFacts(
        model=model,
        objective=offers.objective,
        loss=None if module is None else read_loss(module, model),
        names=names,
        aliases=aliases,
        attributes={name: dict(vars(parameter)) for name, parameter in parameters.items()},
        num_parameters=sum(p.numel() for p in parameters.values() if not is_lazy(p)),
        persistent=registered.persistent,
        blocks=offers.blocks,
        segments=offers.segments,
        declares_segments=offers.declares_segments,
        borrowed=offers.borrowed,
        methods=offers.methods,
        on_meta=on_meta(model),
        form=StateForm.of(model, registered),
    )
