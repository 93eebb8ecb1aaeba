"""Resolves names of shipped and user objects.

One rule holds for strategies, models, data sets, sinks and the rest.

A config names an object by a short name from a table, or as `package.module:Name`. The table has
the same form, so that a module is imported only when it is used.

Tests: tests/config/test_objects.py, tests/seams/test_names.py
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.config.names import advice_for_object
from lockstep.errors import UsageError, did_you_mean


def load_object(name: str, where: str) -> Any:
    """Return the object named `package.module:Name`.

    Or raise a UsageError that names `where`, the config key.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(
            f"{name!r} does not name an object", where=where, fix="write package.module:Name"
        )
    try:
        here: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        what = f"there is no module {error.name or module_name!r}, needed by {name}"
        fix = advice_for_object(name) or "set PYTHONPATH to the folder that holds it, or install it"
        raise UsageError(what, where=where, fix=fix) from None
    except Exception as error:  # a user's module may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"the module {module_name} does not import", where=where, why=why
        ) from error
    for part in attribute.split("."):
        if not hasattr(here, part):
            near = difflib.get_close_matches(
                part, [n for n in dir(here) if not n.startswith("_")], n=1
            )
            raise UsageError(
                f"{module_name} has no {attribute}",
                where=where,
                fix=f"write {near[0]}" if near else None,
            )
        here = getattr(here, part)
    return here


def require_call(
    found: Any, arguments: Sequence[str], name: str, where: str, *, fix: str | None = None
) -> None:
    """Raise a UsageError unless a user's class or function takes these positional arguments.

    It is not called. The error says what to write: `fix`, or a definition with the arguments.
    """
    listed = f"({', '.join(arguments)})"
    try:
        inspect.signature(found).bind(*arguments)
    except ValueError:
        return  # a builtin without a signature
    except TypeError as error:
        definition = f"__init__({', '.join(['self', *arguments])})"
        if not inspect.isclass(found):
            definition = f"{name.rpartition(':')[2].rpartition('.')[2]}{listed}"
        raise UsageError(
            f"{name} can't be called with {listed if arguments else 'no arguments'}",
            where=where,
            why=str(error),
            fix=fix or f"write def {definition}",
        ) from None


def keywords_of(found: Any) -> list[str] | None:
    """Return the names of a callable's keyword arguments; None if it accepts any name."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # a builtin without a signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def require_arguments(
    found: Any, keywords: Mapping[str, Any], name: str, where: str, *positional: Any
) -> None:
    """Raise a UsageError unless a class or function takes the arguments of a config's `where`.

    It is not called.
    """
    accepted = keywords_of(found)
    unknown = [] if accepted is None else [key for key in keywords if key not in accepted]
    if accepted is not None and unknown:
        what = f"{name} takes no argument {unknown[0]!r}{did_you_mean(unknown[0], accepted)}"
        raise UsageError(
            what, where=f"{where}.{unknown[0]}", fix=f"it takes {', '.join(accepted) or 'none'}"
        )
    # a builtin without a signature, which checks its arguments when it is called
    with suppress(ValueError):
        parameters = inspect.signature(found).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = [p.name for p in parameters if p.kind in named and p.default is p.empty]
        missing = [
            parameter for parameter in required[len(positional) :] if parameter not in keywords
        ]
        if missing:
            what = f"{name} needs the argument {missing[0]!r}"
            raise UsageError(what, where=where, fix=f"write {where}.{missing[0]}: VALUE")
        try:
            inspect.signature(found).bind(*positional, **keywords)
        except TypeError as error:
            raise UsageError(
                f"{name} does not take these arguments", where=where, why=str(error)
            ) from None


def require_methods(
    found: Any, interface: type, name: str, where: str, *, required: Collection[str] = ()
) -> None:
    """Check that a user's class or object has the methods of an interface.

    Each must take its arguments.

    Args:
        found: what `name` names, or an object that it made.
        interface: the abstract ones of its methods must be written; any other that is there must
            take the arguments.
        required: methods that must be written although they are not abstract.
    """
    for method, defined in vars(interface).items():
        if method.startswith("_") or not inspect.isfunction(defined):
            continue
        own = getattr(found, method, None)
        is_inherited = getattr(own, "__func__", own) is defined
        if is_inherited and not getattr(defined, "__isabstractmethod__", False):
            continue
        arguments = list(inspect.signature(defined).parameters)
        line = (
            f"write def {method}({', '.join(arguments)}); {interface.__module__} says what it"
            " promises"
        )
        if own is None or getattr(own, "__isabstractmethod__", False):
            if own is not None or method in required:
                raise UsageError(f"{name} has no method {method}", where=where, fix=line)
            continue
        unbound = inspect.isclass(found) and inspect.isfunction(
            inspect.getattr_static(found, method)
        )
        require_call(
            own, arguments if unbound else arguments[1:], f"{name}.{method}", where, fix=line
        )


@dataclass(frozen=True)
class Registry:
    """The shipped names of one kind of object."""

    kind: str  # the noun for messages, as in `there is no strategy 'dpp'`
    where: str  # the config key
    shipped: Mapping[str, str]  # name → `package.module:Name`
    further: str = "package.module:Name"  # other forms of names, for messages

    def load(self, name: str) -> Any:
        """Return the object called `name`, or raise a UsageError with the nearest shipped name."""
        self.require(name)
        return load_object(self.shipped.get(name, name), self.where)

    def load_callable(self, name: str) -> Callable[..., Any]:
        """Return the class or function called `name`.

        Or raise a UsageError if it is something else.
        """
        found = self.load(name)
        if not callable(found):
            what = f"{name} is a {type(found).__name__}, not a class or a function"
            raise UsageError(
                what, where=self.where, fix="name a class or a function, as package.module:Name"
            )
        checked: Callable[..., Any] = found
        return checked

    def require(self, name: str) -> None:
        """Raise a UsageError unless `name` ships or has the form `package.module:Name`.

        Nothing is imported.
        """
        if name not in self.shipped and ":" not in name:
            what = f"there is no {self.kind} {name!r}{did_you_mean(name, self.shipped)}"
            raise UsageError(what, where=self.where, fix=f"write {self.names()}")

    def names(self) -> str:
        """Return the possible names, for messages and help."""
        last = ", " if " or " in self.further else " or "
        return ", ".join(self.shipped) + last + self.further


# ---- what ships: a line for each ----

AXES = Registry(
    "axis",
    "axes of the strategy",
    {  # in the order in which they are asked
        "pipeline": "lockstep.parallel.axes.pipeline:PipelineAxis",
        "replicate": "lockstep.parallel.axes.replicate:ReplicateAxis",
        "shard": "lockstep.parallel.axes.shard:ShardAxis",
        "batch_norm": "lockstep.parallel.axes.rows:RowsAxis",
        "context": "lockstep.parallel.axes.context:ContextAxis",
        "expert": "lockstep.parallel.axes.expert:ExpertAxis",
        "tensor": "lockstep.parallel.axes.tensor:TensorAxis",
    },
)
# Those that no strategy lists: any may have them, by their sizes.
BY_SIZE = ("batch_norm", "context", "expert", "tensor")
STRATEGIES = Registry(
    "strategy",
    "distributed.strategy",
    {
        "single": "lockstep.parallel.replicas.single:Single",
        "dp": "lockstep.parallel.replicas.data_parallel:DP",
        "ddp": "lockstep.parallel.replicas.ddp:DDP",
        "fsdp": "lockstep.parallel.fsdp.sharding:FSDP",
        "context": "lockstep.parallel.replicas.single:ContextParallel",
        "tensor": "lockstep.parallel.replicas.single:TensorParallel",
        "pipeline": "lockstep.parallel.pipeline.strategy:Pipeline",
        "accelerate": "lockstep.parallel.replicas.accelerate:Accelerate",
        "diloco": "lockstep.parallel.diloco.strategy:DiLoCo",
    },
)

MODELS = Registry(
    "model",
    "model.name",
    {
        "bdh": "lockstep.models.bdh:BDH",
        "transformer": "lockstep.models.transformer:Transformer",
        "free_transformer": "lockstep.models.free_transformer:FreeTransformer",
        "mixture": "lockstep.models.mixture:Mixture",
        "vae": "lockstep.models.vae:VAE",
    },
    further="hf:FOLDER_OR_TYPE or package.module:Class",
)

DATA_SETS = Registry(
    "data set",
    "data.name",
    {
        "python-docs": "lockstep.data.text:python_docs",
        "text": "lockstep.data.text:text",
        "tokens": "lockstep.data.text:tokens",
        "documents": "lockstep.data.packed:documents",
        "stream": "lockstep.data.packed_stream:stream",
        "labelled": "lockstep.data.labelled:labelled",
        "seq2seq": "lockstep.data.seq2seq:seq2seq",
        "masked": "lockstep.data.masked:masked",
        "images": "lockstep.data.images:images",
        "preferences": "lockstep.data.preferences:preferences",
        "digits": "lockstep.data.datasets:digits",
    },
    further="hf:NAME or package.module:Class",
)

OPTIMIZERS = Registry(
    "optimizer",
    "training.optimizer",
    {
        "adamw": "torch.optim:AdamW",
        "adam": "torch.optim:Adam",
        "sgd": "torch.optim:SGD",
        "muon": "lockstep.muon:Muon",
    },
)

SCHEDULES = Registry(
    "schedule",
    "training.lr_schedule",
    {
        "constant": "lockstep.optim:constant",
        "linear": "lockstep.optim:linear",
        "cosine": "lockstep.optim:cosine",
        "wsd": "lockstep.optim:warmup_stable_decay",
    },
)

LOSSES = Registry(
    "loss",
    "loss_fn",
    {
        "cross_entropy": "torch.nn:CrossEntropyLoss",
        "mse": "torch.nn:MSELoss",
        "l1": "torch.nn:L1Loss",
        "bce_with_logits": "torch.nn:BCEWithLogitsLoss",
        "dpo": "lockstep.models.preferences:DirectPreferences",
    },
)

SINKS = Registry(
    "sink",
    "monitor.sinks",
    {
        "console": "lockstep.monitor.console:Console",
        "jsonl": "lockstep.monitor.sinks:Jsonl",
        "tensorboard": "lockstep.monitor.exporters:TensorBoard",
        "wandb": "lockstep.monitor.exporters:WeightsAndBiases",
        "mlflow": "lockstep.monitor.exporters:Mlflow",
    },
)
