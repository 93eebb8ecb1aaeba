"""The plan by which a model's layers are cut over ranks: its ways, and what can't be followed.

A plan maps patterns of names to ways: {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}. A
`*` stands for one part of a name, so the first is layers.0.mlp.up, layers.1.mlp.up and so on. On
two ranks a weight [4, 6] (outputs, inputs) is cut so:

    way                    on each rank      its outputs
    column, heads          [2, 6]            this rank's, [B, T, 2]
    row                    [4, 3]            all, summed over ranks; its inputs are this rank's
    vocabulary             [2, 6]            all, of a table of 4 rows
    head                   [2, 6]            all, gathered; this rank's for a loss in the plan
    fused, fused_heads     [4, 6], all       this rank's of each layer in it

Between a column cut and a row cut nothing is sent. docs/how_to/tensor.md lists all ways (Shoeybi et
al. 2019, Megatron-LM, section 3).

Tests: tests/parity/test_tensor.py, tests/parity/test_known_mistakes.py
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lockstep.errors import UsageError
from lockstep.models.hf_layers import advice_for_object, hf_tensor_plan, is_transposed

PRODUCTS = ("column", "heads", "fused", "fused_heads", "row", "vocabulary", "head")
WAYS = (*PRODUCTS, "loss", "routed", "experts", "scope", "inner", "sequence")
# of a module: its name, itself, a parameter's attribute or None, way
Planned = tuple[str, nn.Module, str | None, str]
_PLAIN = (nn.Linear.forward, nn.Embedding.forward)


OwnPlan = Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class TensorPlan:
    """The layers of a model that can be cut."""

    layers: list[Planned]
    # name of a layer that is cut by heads → the module around it, and the width of a head
    heads: Mapping[str, tuple[nn.Module, int]]
    has_loss: bool  # it describes the model's `loss`, too

    @property
    def ways(self) -> set[str]:
        """The ways in which it cuts layers."""
        return {way for *_, way in self.layers}


def plan_of(model: nn.Module, own: OwnPlan | None) -> Mapping[str, str] | None:
    """Return a model's plan: its own, or that of transformers for its family; None: it has none."""
    return hf_tensor_plan(model) if own is None else own()


def checked_plan(model: nn.Module, own: OwnPlan | None) -> TensorPlan:
    """Return what the model's plan names, and check that its layers can be cut in these ways.

    `own`: the model's method `tensor_plan`, if it has one.
    """
    plan = list(_planned(model, own))
    heads: dict[str, tuple[nn.Module, int]] = {}
    for name, module, attribute, way in plan:
        forward = type(module).forward
        known = hasattr(module, "product") or forward in _PLAIN or is_transposed(module)
        if way in PRODUCTS and attribute is None and not known:
            raise UsageError(
                f"{name}, a {type(module).__name__}, has a forward pass of its own, of which its"
                " product can't be cut",
                where="distributed.tensor_size",
                fix=(
                    "give it a method product(x, weight), which its forward pass calls, or leave it"
                    " out of the plan"
                ),
            )
        # What is made anew in each forward pass has all rows, whatever is cut of its parameters.
        if (computed := _computed_weight(module, way)) is not None:
            what = (
                f"{f'{name}.{computed}'.strip('.')} is computed from other parameters, so its layer"
                " can't be cut"
            )
            why = (
                "a parametrization or a hook makes it anew in each forward pass, from all of its"
                " rows"
            )
            fix = (
                "take it off (torch.nn.utils.parametrize.remove_parametrizations), or leave the"
                " layer out of the plan"
            )
            raise UsageError(what, where="distributed.tensor_size", why=why, fix=fix)
        if way == "sequence" and not isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.Dropout):
            what = f'tensor_plan() says "sequence" of {name}, a {type(module).__name__}'
            fix = "say so of nn.RMSNorm, nn.LayerNorm and nn.Dropout only"
            raise UsageError(what, where="distributed.sequence_parallel", fix=fix)
        if way.endswith("heads"):
            heads[name] = _module_around(model, name)
    losses = [name for name, *_, way in plan if way == "loss"]
    if losses and "head" not in {way for *_, way in plan}:
        what = (
            f'tensor_plan() of {type(model).__name__} says "loss" of {losses[0]}, and "head" of no'
            " layer"
        )
        why = "each rank would take the whole vocabulary for its own part of it"
        raise UsageError(
            what, why=why, fix='say "head" of the output layer, or leave the loss out of the plan'
        )
    return TensorPlan(plan, heads, has_loss=bool(losses) and _is_for_loss(model, own))


def _computed_weight(module: nn.Module, way: str) -> str | None:
    """Return the name of a weight in a module to be cut that is not a parameter.

    None if all of them are.
    """
    if way in ("loss", "scope"):
        return None
    for name, inner in module.named_modules():
        if is_parametrized(inner):
            return f"{name}.{next(iter(inner.parametrizations))}".strip(".")
    weight = getattr(module, "weight", None)
    return "weight" if way in PRODUCTS and not isinstance(weight, nn.Parameter | None) else None


def _is_for_loss(model: nn.Module, own: OwnPlan | None) -> bool:
    """Return whether a plan that names a loss means this one: a subclass may have replaced it."""
    if "loss" in vars(model):
        return False
    # Of loss and plan, whichever class wrote one last: a loss that came after the plan may want
    # complete logits.
    first = next(
        (each for each in type(model).__mro__ if {"loss", "tensor_plan"} & vars(each).keys()), None
    )
    return first is None or "tensor_plan" in vars(first) or own is None


def _planned(model: nn.Module, own: OwnPlan | None) -> Iterator[Planned]:
    """Yield (name, module, attribute, way) for each module or parameter that the plan names.

    `attribute` names a parameter of the module, or is None.
    """
    plan = plan_of(model, own)
    if plan is None:
        what = f"{type(model).__name__} does not say how its layers are cut"
        fix = (
            'give the model tensor_plan() -> {"layers.*.attention.query": "heads",'
            ' "layers.*.attention.out": "row"}'
            f"; the ways are {', '.join(WAYS)}"
        )
        fix = advice_for_object(model, "tensor") or fix
        raise UsageError(what, where="distributed.tensor_size", fix=fix)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for pattern, way in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        of_modules = [name for name in modules if expression.fullmatch(name)]
        of_parameters = [name for name in parameters if expression.fullmatch(name)]
        if way not in WAYS or not (of_modules or of_parameters):
            what = f"tensor_plan() of {type(model).__name__} says {pattern!r}: {way!r}"
            why = "there is no such way" if way not in WAYS else "no module has such a name"
            fix = (
                f"write one of {', '.join(WAYS)}"
                if way not in WAYS
                else "* stands for one part of a name"
            )
            raise UsageError(what, why=why, fix=fix)
        yield from ((name, modules[name], None, way) for name in of_modules)
        for name in of_parameters:
            owner, _, attribute = name.rpartition(".")
            yield owner, modules[owner], attribute, way


def _module_around(model: nn.Module, name: str) -> tuple[nn.Module, int]:
    """Return the module around a layer that is cut by heads, and the width of a head."""
    around = model.get_submodule(name.rpartition(".")[0])
    width = getattr(around, "head_width", None) or getattr(around, "head_dim", None)
    if not isinstance(width, int):
        what = f"tensor_plan() of {type(model).__name__} says {name!r}: cut by heads"
        why = f"{type(around).__name__}, the module around it, has no head_width"
        raise UsageError(
            what, why=why, fix="give it the width of a head, in numbers, as self.head_width"
        )
    return around, width
