"""Checks the arguments of `Trainer` and `lockstep.place` before anything is started.

So a first mistake is one error.

Tests: tests/trainer/test_arguments.py, tests/test_interop.py
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from lockstep.config import Config
from lockstep.config.flags import keyword_for
from lockstep.config.keys import keys_named
from lockstep.config.names import SECTIONS, advice_for_keyword
from lockstep.errors import UsageError
from lockstep.models.loss_arguments import FurtherArguments
from lockstep.models.protocol import offered
from lockstep.models.torch_losses import class_names
from lockstep.registry import require_call

_LIGHTNING = "LightningModule"


def check_model(model: Any, where: str, *, has_loss_fn: bool) -> None:
    """Raise a UsageError unless `model` is a module that can be called and has values.

    A module without values must be able to create them itself.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {_described(model)}, not an nn.Module", where=where, fix=_instead(model)
        )
    lightning = next((kind for kind in type(model).__mro__ if kind.__name__ == _LIGHTNING), None)
    runs = type(model).forward not in (nn.Module.forward, getattr(lightning, "forward", None))
    if lightning is not None and not (runs and (has_loss_fn or offered(model, "loss") is not None)):
        what = f"{type(model).__name__} is a {_LIGHTNING}, and its training_step is not called"
        why = "Lockstep runs forward, computes the loss from its outputs, and takes the step itself"
        fix = (
            "give it forward(self, inputs) with the forward pass, and pass loss_fn=… and the"
            " optimizer of configure_optimizers; docs/coming_from/lightning.md has the rest"
        )
        raise UsageError(what, where=where, why=why, fix=fix)
    if not runs and "forward" not in vars(model) and offered(model, "segments") is None:
        what = f"{type(model).__name__} has no forward()"
        raise UsageError(
            what, where=where, fix="give the class def forward(self, inputs) -> outputs"
        )
    on_meta = next(
        (name for name, parameter in model.named_parameters() if parameter.is_meta), None
    )
    if on_meta is not None and offered(model, "init_weights") is None:
        what = f"the parameter {on_meta} is on the device meta, without a value"
        fix = (
            "give the model init_weights(self), which fills every parameter and buffer in place, or"
            ' make it without torch.device("meta")'
        )
        raise UsageError(what, where=where, fix=fix)


def check_loss_fn(loss_fn: Any, where: str) -> None:
    """Raise a UsageError unless `loss_fn` is None or can be called with (outputs, targets).

    Further arguments come from the batch, by name.
    """
    if loss_fn is None:
        return
    if isinstance(loss_fn, str):
        fix = (
            f"write loss_fn=torch.nn.{_loss_named(loss_fn)}(); names belong into a config's key"
            " loss_fn"
        )
        raise UsageError(f"loss_fn is the text {loss_fn!r}, not a function", where=where, fix=fix)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if isinstance(loss_fn, type):
        what = f"loss_fn is the class {name}, not an object of it"
        raise UsageError(
            what, where=where, fix=f"write loss_fn={_as_in_torch(loss_fn)}(), with brackets"
        )
    if not callable(loss_fn):
        what = f"loss_fn is {_described(loss_fn)}, which can't be called"
        raise UsageError(
            what,
            where=where,
            fix="pass a function (outputs, targets) -> loss, or nn.CrossEntropyLoss()",
        )
    call = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    fix = (
        "write def loss_fn(outputs, targets), which returns a tensor of one number; the model's"
        " own loss can be its method loss(outputs, batch)"
    )
    call = FurtherArguments(loss_fn).filled(call)
    _require_call(call, ("outputs", "targets"), f"loss_fn ({name})", where, fix)


def check_of_trainer(
    optimizer: Any, loss_fn: Any, scheduler: Any, config: Any, after_update: Any
) -> None:
    """Raise a UsageError for arguments of a `Trainer` that are of another kind than it takes."""
    where = "Trainer"
    if config is not None and not isinstance(config, Config):
        what = f"config is {_described(config)}, not a lockstep.Config"
        if isinstance(config, Mapping):
            fix = "write config=lockstep.Config.model_validate({…})"
        else:
            fix = f"write config=lockstep.config.load_config({str(config)!r})"
        raise UsageError(what, where=where, fix=fix)
    if isinstance(optimizer, nn.Module) or isinstance(loss_fn, Optimizer):
        what = (
            f"Trainer's second argument is the optimizer, and {type(optimizer).__name__} is a"
            " module"
        )
        if not isinstance(optimizer, nn.Module):
            what = f"loss_fn is the optimizer {type(loss_fn).__name__}"
        fix = (
            "write Trainer(model, optimizer, loss_fn), or loss_fn=…; without an optimizer it is"
            " AdamW"
        )
        raise UsageError(what, where=where, fix=fix)
    if not (optimizer is None or isinstance(optimizer, Optimizer | str)):
        _check_factory(
            optimizer, "optimizer", "parameters", "torch.optim.AdamW(parameters, lr=1e-3)", where
        )
    if not (scheduler is None or isinstance(scheduler, LRScheduler | ReduceLROnPlateau)):
        example = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
        _check_factory(scheduler, "scheduler", "optimizer", example, where)
    for call in after_update if isinstance(after_update, list) else [after_update]:
        if call is not None and not callable(call):
            what = f"after_update is {_described(call)}, which can't be called"
            raise UsageError(
                what, where=where, fix="pass a function (updates) -> None, or a list of them"
            )


def check_settings(settings: Mapping[str, Any], methods: Sequence[Callable[..., Any]]) -> None:
    """Raise a UsageError for a keyword of a `Trainer` that belongs to one of its methods.

    Such a keyword is not a key of the config.
    """
    for name in settings:
        takers = [
            method.__name__ for method in methods if name in inspect.signature(method).parameters
        ]
        if (
            takers
            and not keys_named(name)
            and name not in SECTIONS
            and advice_for_keyword(name, keyword_for) is None
        ):
            fix = "write " + " or ".join(f"trainer.{taker}(…, {name}=…)" for taker in takers)
            what = f"{name} is an argument of {' and '.join(takers)}, not of the Trainer"
            raise UsageError(what, where=f"Trainer({name}=…)", fix=fix)


def check_made(made: Any, kind: type, given: Any, where: str) -> None:
    """Raise a UsageError unless what a user's function has made is of this kind."""
    if not isinstance(made, kind):
        name = getattr(given, "__name__", type(given).__name__)
        what = (
            f"{name} returned {_described(made)}, not an object of"
            f" {kind.__module__.partition('._')[0]}.{kind.__name__}"
        )
        raise UsageError(what, where=where, fix="let the function return the object that it makes")


def check_epochs(epochs: Any) -> None:
    """Raise a UsageError unless `epochs` is unset or a number.

    Further data are often given in its place.
    """
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int)):
        what = f"epochs is {_described(epochs)}, not a number of passes over the data"
        fix = (
            "write train(train_data, val_data, epochs=3); other data are evaluated by"
            " trainer.evaluate(data)"
        )
        raise UsageError(what, where="Trainer.train", fix=fix)


def check_metrics(metrics: Any, where: str) -> None:
    """Raise a UsageError unless metrics have names, or are an object that returns several."""
    if metrics is not None and not isinstance(metrics, Mapping) and not _computes(metrics):
        what = f"metrics is {_described(metrics)}, without names"
        raise UsageError(what, where=where, fix='write metrics={"accuracy": function}')


def _computes(metrics: Any) -> bool:
    """Return whether this is an object as torchmetrics' MetricCollection is.

    What it returns is looked at later.
    """
    return (
        not isinstance(metrics, type) and hasattr(metrics, "update") and hasattr(metrics, "compute")
    )


def check_trains(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a UsageError if no parameter is to be trained."""
    if any(parameter.requires_grad for parameter in parameters.values()):
        return
    what = f"nothing can be trained: all {len(parameters)} parameters of the model are frozen"
    fix = (
        "set requires_grad_(True) on the parts that are to be trained, before the Trainer is made;"
        " trainer.evaluate(data) and trainer.predict(data) need no training"
    )
    why = None
    if any(".lora_" in name for name in parameters):
        why = "peft freezes adapters that it loads, unless it is told that they are trained"
        fix = "load them with peft.PeftModel.from_pretrained(base, FOLDER, is_trainable=True)"
    raise UsageError(what, where="the model", why=why, fix=fix)


def _check_factory(given: Any, name: str, argument: str, example: str, where: str) -> None:
    if not callable(given):
        what = f"{name} is {_described(given)}, not an object of torch's and not a function"
        raise UsageError(what, where=where, fix=f"write {name}=lambda {argument}: {example}")
    fix = f"write {name}=lambda {argument}: {example}"
    if isinstance(given, type):
        fix = (
            f"write {name}=lambda {argument}: {_as_in_torch(given)}({argument}, …), with the"
            " arguments that it needs"
        )
    _require_call(given, (argument,), getattr(given, "__name__", name), where, fix)


def _require_call(given: Any, arguments: Sequence[str], name: str, where: str, fix: str) -> None:
    try:
        inspect.signature(given)
    except (TypeError, ValueError):
        return  # compiled code does not show what it takes
    require_call(given, arguments, name, where, fix=fix)


def _described(given: Any) -> str:
    if given is None:
        return "None"
    if isinstance(given, str):
        return f"the text {given!r:.60}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if callable(given) and hasattr(given, "__name__"):
        return f"the function {given.__name__}"
    article = "an" if type(given).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(given).__name__}"


def _instead(model: Any) -> str:
    """Return what to write in place of something that is not a model."""
    if isinstance(model, str):
        return (
            f'write transformers.AutoModelForCausalLM.from_pretrained("{model}"), or a config with'
            f" model.name: hf:{model} for `lockstep train`; lockstep.get_model(NAME) makes those"
            " that ship"
        )
    if isinstance(model, type):
        return f"make an object of it: Trainer({model.__name__}(…), …)"
    if isinstance(model, DataLoader | Dataset):
        return "the model comes first, and the data go to train: Trainer(model, …).train(data)"
    if (
        isinstance(model, list | tuple)
        and all(isinstance(part, nn.Module) for part in model)
        and model
    ):
        return (
            "one Trainer trains one model: nn.Sequential(*models) makes one of a chain,"
            " nn.ModuleList of several"
        )
    if isinstance(model, Iterator):
        return "pass the model itself, not model.parameters()"
    return "pass an object of a class that extends torch.nn.Module"


def _as_in_torch(kind: type) -> str:
    for home in ("torch.nn", "torch.optim.lr_scheduler", "torch.optim"):
        if kind.__module__.startswith(home):
            return f"{home}.{kind.__name__}"
    return kind.__name__


def _loss_named(text: str) -> str:
    """Return the class of torch's losses that a text, as `mse` or `cross_entropy`, may name."""
    known = class_names()
    plain = _plain(text)
    for name in known:
        if _plain(name) in (plain, f"{plain}loss"):
            return name
    similar = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return similar[0] if similar else "CrossEntropyLoss"


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
