"""Puts low-rank adapters of the package peft into the layers of a Hugging Face model.

peft writes the layers, their first values and the saved form; here is no adapter of our own. It
injects them in place, so the model stays the object that meets the protocol: its loss, its chain
for pipelines and its blocks are as before. All other parameters are frozen: no strategy exchanges
their gradients, and no optimizer holds state of them.

Tests: tests/models/test_adapters.py, tests/parity/test_adapters.py,
tests/parity/test_fine_tuning.py
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import UsageError, did_you_mean, first_line, listed

if TYPE_CHECKING:
    from lockstep.config.schema_training import LoraConfig

ADAPTER = "default"  # peft's name of the only adapter
_WHERE = "model.lora"
_FIT = "write target_modules: all-linear, or ends of names that the model's layers have"

# The Auto class → what peft calls the task. By it, peft loads an adapter into the right class.
_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}

# What peft itself trains and saves in full, for these tasks, when it loads an adapter.
_HEADS = {
    "SEQ_CLS": ["classifier", "score"],
    "TOKEN_CLS": ["classifier", "score"],
    "QUESTION_ANS": ["qa_outputs"],
}


def peft_package(where: str = _WHERE) -> Any:
    """Return the package peft; `where` is the key that asks for it.

    Raises UsageError: it is missing.
    """
    try:
        import peft
    except ImportError as error:
        what = "adapters need the package peft"
        raise UsageError(what, where=where, fix="install it: pip install peft") from error
    return peft


def task_of(auto: str) -> str | None:
    """Return what peft calls the task of an Auto class; None if it has no name for it."""
    return _TASKS.get(auto)


def auto_of_task(task: str) -> str | None:
    """Return the Auto class of a task of peft."""
    return next((auto for auto, name in _TASKS.items() if name == task), None)


def peft_config(
    lora: "LoraConfig", auto: str, base: str | None = None, drawn: Sequence[str] = ()
) -> Any:
    """Return peft's own config of the adapters.

    Args:
        lora: the section `model.lora`.
        auto: the name of the model's Auto class.
        base: the folder or the name of the model without adapters.
        drawn: names of parameters that no weights fill: their modules are part of a new head.

    Raises:
        UsageError: peft is missing, or refuses the settings.
    """
    peft = peft_package()
    task = _TASKS.get(auto)
    arguments = lora.model_dump()
    if arguments["modules_to_save"] is None:
        arguments["modules_to_save"] = _heads(_HEADS.get(task or ""), drawn)
    try:
        return peft.LoraConfig(task_type=task, base_model_name_or_path=base, **arguments)
    except (ValueError, TypeError) as error:
        raise UsageError("peft refuses the adapters", where=_WHERE, why=first_line(error)) from None


def _heads(names: list[str] | None, drawn: Sequence[str]) -> list[str] | None:
    """Return what is trained in full: the head that peft names, and what else is new, a pooler."""
    if names is None:
        return None
    modules = {name.rpartition(".")[0] for name in drawn}
    others = [each for each in sorted(modules) if not any(name in each for name in names)]
    return [*names, *others]


def add_adapters(
    model: nn.Module, lora: "LoraConfig", auto: str, drawn: Sequence[str] = ()
) -> None:
    """Put adapters into a model's layers, in place, and freeze everything else.

    `drawn`: names of parameters that no weights fill, and that are trained with a new head.
    """
    layers = [name for name, _ in model.named_modules()]
    adapted = inject(model, peft_config(lora, auto, drawn=drawn), where=_WHERE)
    _require_effect(lora, layers, adapted)


def inject(model: nn.Module, config: Any, *, where: str) -> list[str]:
    """Let peft put adapters into a model's layers, in place; return the names of these layers.

    Args:
        config: peft's own.
        where: the key that asks for them.

    Raises:
        UsageError: peft can't, or the adapters are of a kind that is not supported.
    """
    peft = peft_package(where)
    try:
        peft.inject_adapter_in_model(config, model, ADAPTER)
    except (ValueError, TypeError, RuntimeError, re.error) as error:
        raise UsageError(
            f"peft can't put these adapters into a {type(model).__name__}",
            where=where,
            why=first_line(error),
            fix=_FIT
            if where == _WHERE
            else "name as model the base that the adapter was trained on",
        ) from error
    of_parameters = getattr(peft.tuners.lora.layer, "ParamWrapper", ())
    stacked = [name for name, each in model.named_modules() if isinstance(each, of_parameters)]
    if stacked:
        raise UsageError(
            f"adapters of stacked experts are not supported: {listed(stacked)}",
            where=f"{where}.target_modules" if where == _WHERE else where,
            why="peft exchanges such a parameter in each forward pass, which shards do not survive",
            fix="write target_modules: [q_proj, k_proj, v_proj, o_proj], the layers of attention",
        )
    return [
        name for name, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)
    ]


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has layers of peft."""
    return any(True for _ in _switches(model))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it would without its adapters, in evaluation mode, in the block."""
    modes = [(module, module.training) for module in model.modules()]
    switches = list(_switches(model))
    # peft's switch also says which parameters require gradients.
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for each in switches:
        each.enable_adapters(False)
    try:
        yield
    finally:
        for each in switches:
            each.enable_adapters(True)
        for parameter, is_trained in trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        for module, mode in modes:
            module.training = mode


def _switches(model: nn.Module) -> Iterator[Any]:
    """Yield the modules of peft that can be told to compute as if they had no adapters."""
    for module in model.modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):
            yield module


def _require_effect(lora: "LoraConfig", layers: Sequence[str], adapted: Sequence[str]) -> None:
    """Refuse names in the settings which no layer has: peft passes over them without a word.

    Args:
        layers: names of all modules.
        adapted: names of those that have adapters.
    """
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        names = getattr(lora, key)
        for name in names if isinstance(names, list) else ():
            dot = "" if key == "modules_to_save" else "."  # as peft compares them
            if not any(f".{each}".endswith(f"{dot}{name}") for each in layers):
                raise _without_effect(key, name, layers)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            # as peft.utils.other.get_pattern_key
            if not any(re.match(rf"(.*\.)?({pattern})$", each) for each in adapted):
                raise _without_effect(key, pattern, adapted)


def _without_effect(key: str, name: str, layers: Sequence[str]) -> UsageError:
    """Return the error about a name that no layer has."""
    ends = sorted({each.rpartition(".")[2] for each in layers if each} - set(map(str, range(999))))
    what = f"{key} names {name!r}, and no layer has that name{did_you_mean(name, ends)}"
    if key.endswith("pattern"):
        what = f"{key} names {name!r}, and no layer with adapters has that name"
    fix = f"leave it out, or write the end of a name: {listed(ends)}"
    return UsageError(what, where=f"{_WHERE}.{key}", fix=fix)
