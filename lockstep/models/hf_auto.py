"""Chooses the Auto class of transformers by which a model is built.

A config names it, `model.auto: AutoModelForSequenceClassification`; unset, a folder's own
`architectures` say it, and a bare model type is a causal language model.

Tests: tests/models/test_hf_auto.py
"""

from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from lockstep.errors import UsageError, did_you_mean

CAUSAL_LM = "AutoModelForCausalLM"
_WHERE = "model.auto"
# Its table repeats classes of the others.
_LAST = "AutoModelForPreTraining"


@cache
def auto_classes() -> tuple[str, ...]:
    """Return the names of the library's Auto classes of models with a head, causal ones first."""
    # not `dir(transformers)`: it looks up every module of the library, a third of a second
    names = [name for name in modeling_auto.__all__ if name.startswith("AutoModelFor")]
    rest = sorted(name for name in names if name not in (CAUSAL_LM, _LAST))
    return (CAUSAL_LM, *rest, _LAST)


def _table(auto: str) -> Any:
    """Return the table of an Auto class: class of a config → class of a model, or several."""
    return getattr(transformers, auto)._model_mapping


def _classes(auto: str, config: Any) -> tuple[Any, ...]:
    """Return the classes of a table for a config; importing them takes the library a while."""
    if type(config) not in _table(auto):
        return ()
    classes = _table(auto)[type(config)]
    return tuple(classes) if isinstance(classes, list | tuple) else (classes,)


def auto_of(config: Any, name: str) -> str:
    """Return the Auto class of this name.

    Raises UsageError: there is none, or it makes no model of this config.
    """
    fitting = [each for each in auto_classes() if type(config) in _table(each)]
    fix = f"write {_WHERE}: {' or '.join(fitting)}" if fitting else "name another model"
    if name not in auto_classes():
        raise UsageError(
            f"transformers {transformers.__version__} has no Auto class"
            f" {name!r}{did_you_mean(name, auto_classes())}",
            where=_WHERE,
            fix=fix,
        )
    if name not in fitting:
        raise UsageError(
            f"transformers has no {name} of the model type {config.model_type}",
            where=_WHERE,
            fix=fix,
        )
    return name


def auto_of_folder(config: Any) -> str:
    """Return the Auto class that makes what a config's `architectures` name.

    A model without a head, and a config that names none, is taken as a causal language model.
    """
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    if named is None:
        return CAUSAL_LM
    for auto in auto_classes():
        if any(kind.__name__ == named for kind in _classes(auto, config)):
            return auto
    return CAUSAL_LM


def model_class(auto: str, config: Any) -> type[nn.Module]:
    """Return the library's class that an Auto class makes of a config.

    Where a table has several, the library takes the one that `architectures` names, or the first.
    """
    kinds = _classes(auto, config)
    named = getattr(config, "architectures", None) or ()
    chosen: type[nn.Module] = next((kind for kind in kinds if kind.__name__ in named), kinds[0])
    return chosen
