"""Short names for the most used keys.

They are options of the command line and keywords of Python's `Trainer`.

`--grad-clip 0` is `training.gradient_clip=0` is `Trainer(…, grad_clip=0)`. `Trainer` also accepts
any key by its last name, and whole sections as dictionaries. Importing this loads neither torch nor
the schema.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.names import SECTIONS, advice_for_keyword, advice_to_leave_out
from lockstep.errors import UsageError
from lockstep.registry import STRATEGIES


@dataclass(frozen=True)
class Flag:
    """A short name of a key; with `switch`, the option has no value and means true."""

    name: str
    key: str
    metavar: str
    help: str
    switch: bool = False

    @property
    def option(self) -> str:
        """The option of the command line."""
        return "--" + self.name.replace("_", "-")


FLAGS: tuple[Flag, ...] = (
    Flag("strategy", "distributed.strategy", "NAME", f"auto, {STRATEGIES.names()}"),
    Flag("batch_size", "training.batch_size", "N", "samples in a micro-batch"),
    Flag(
        "gradient_accumulation_steps",
        "training.gradient_accumulation_steps",
        "N",
        "micro-batches per rank and step",
    ),
    Flag(
        "grad_clip",
        "training.gradient_clip",
        "NORM",
        "clip the global norm of the gradient; unset or 0: off",
    ),
    Flag("precision", "precision.mode", "MODE", "auto, fp32, bf16 or fp16"),
    Flag("compile", "training.compile", "", "compile the model's blocks", switch=True),
    Flag("max_steps", "training.max_steps", "N", "optimizer updates in the whole run"),
    Flag("learning_rate", "training.learning_rate", "LR", "the peak learning rate"),
    Flag(
        "allow_changes",
        "checkpoint.allow_changes",
        "",
        "resume though model, data, seed or batch changed",
        switch=True,
    ),
    Flag("seed", "training.seed", "N", "first values, order of samples, random numbers"),
)
_CUTOFF = 0.75  # below it, names that share a few letters seem near: `save` and `active`
BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}


def apply_flags(settings: Mapping[str, Any], where: str = "the settings") -> dict[str, Any]:
    """Return settings by dotted key.

    They are given by short name, by the last name of a key, or by dotted key. Dashes are `_`.

    Raises UsageError: a name is none of these, with the nearest one; or two names of one key are
    given.
    """
    by_key: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in settings.items():
        key = _key(name.replace("-", "_"), where)
        if key in by_key:
            fix = f"leave {names[key]} or {name} out"
            raise UsageError(f"{names[key]} and {name} are both {key}", where=where, fix=fix)
        by_key[key] = value
        names[key] = name
    return by_key


def as_overrides(dotted: Mapping[str, Any]) -> list[str]:
    """Return overrides such as `training.batch_size=4` for `load_config`.

    Text is taken as YAML, as if typed.
    """
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in dotted.items()
    ]


def keyword_for(key: str, value: str) -> str:
    """Return how `Trainer` takes a key and its value.

    By its last name if that is enough, as in `max_steps=10`, else inside of a mapping, as in
    `early_stopping={"patience": 3}`.
    """
    names = key.split(".")
    for position in reversed(range(1, len(names))):
        name = names[position]
        known = [BY_NAME[name].key] if name in BY_NAME else _keys_named(name)
        if advice_to_leave_out(name) is None and known == [".".join(names[: position + 1])]:
            return f"{name}={_inside(names[position + 1 :], value)}"
    return f"{names[0]}={_inside(names[1:], value)}"


def _inside(names: Iterable[str], value: str) -> str:
    for name in reversed(list(names)):
        value = f'{{"{name}": {value}}}'
    return value


def _keys_named(name: str) -> list[str]:
    from lockstep.config.keys import all_keys

    return shallowest(info.key for info in all_keys().values() if info.name == name)


def _key(name: str, where: str) -> str:
    """Return the key of the config that a short name means.

    Raises UsageError: there is none, or several.
    """
    if name in BY_NAME:
        return BY_NAME[name].key
    if name in SECTIONS or "." in name:
        return name  # the schema checks it
    left_out = advice_to_leave_out(name)
    if left_out is not None:
        raise UsageError(f"unknown setting {name}", where=where, fix=left_out)
    from lockstep.config.keys import all_keys

    keys = _keys_named(name)
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise UsageError(
            f"{name} could be {' or '.join(keys)}", where=where, fix="write the dotted key"
        )
    fix = advice_for_keyword(name, keyword_for)
    if fix is None:
        names = (key.rpartition(".")[2] for key in all_keys())
        known = dict.fromkeys(
            [*BY_NAME, *SECTIONS, *(name for name in names if advice_to_leave_out(name) is None)]
        )
        near = difflib.get_close_matches(name, known, n=1, cutoff=_CUTOFF)
        fix = _advice_on(near[0]) if near else f"the short names are {', '.join(BY_NAME)}"
    raise UsageError(f"unknown setting {name}", where=where, fix=fix)


def _advice_on(name: str) -> str:
    """Return the advice to write a known name.

    Where several keys have the name, the advice is a dotted key.
    """
    if name in BY_NAME or name in SECTIONS:
        return f"write {name}"
    from lockstep.config.keys import all_keys

    keys = shallowest(info.key for info in all_keys().values() if info.name == name)
    if len(keys) > 1:
        return f"write {' or '.join(keys)}"
    return f"write {name}" + (f", which is {keys[0]}" if keys[0].count(".") > 1 else "")


def shallowest(keys: Iterable[str]) -> list[str]:
    """Return the keys nearest to the root, so that `strategy` means `distributed.strategy`."""
    names = list(keys)
    depth = min((key.count(".") for key in names), default=0)
    return [key for key in names if key.count(".") == depth]
