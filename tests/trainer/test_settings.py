"""The keyword arguments of `Trainer` are the config's keys: their names and their types."""

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from torch import nn

from lockstep import Trainer
from lockstep.config.flags import apply_flags
from lockstep.config.keys import all_keys
from lockstep.config.schema import Config
from lockstep.config.schema_training import Section
from lockstep.errors import UsageError
from lockstep.trainer.settings import PlacementSettings, TrainerSettings

SECTIONS = {"training", "distributed", "data", "checkpoint", "monitor"}
# Two sections have `name` and `args`, `async` is a word of Python's, and `optimizer` is an argument
# of its own.
NOT_KEYWORDS = {
    "model.name",
    "model.args",
    "model.auto",
    "model.adapter",
    "model.lora",
    "data.name",
    "data.args",
    "checkpoint.async",
    "training.optimizer",
    # two keys of one name: each is written with its section
    "checkpoint.on_failure",
    "distributed.on_failure",
}
HINTS = get_type_hints(TrainerSettings)
BY_KEY = {apply_flags({name: None}).popitem()[0]: name for name in HINTS if name not in SECTIONS}


def schema_type(key: str) -> Any:
    section, _, name = key.partition(".")
    return Config.model_fields[section].annotation.model_fields[name].annotation  # type: ignore[union-attr]


def options(annotation: Any) -> set[Any]:
    """What an annotation allows; a section and an object are written as mappings, and an object as
    a name, too.
    """
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found: set[Any] = set()
    for part in parts:
        if get_origin(part) is Literal:
            found |= set(get_args(part))
        elif getattr(get_origin(part), "__name__", "") in ("list", "Sequence"):
            found.add("sequence")
        elif part in (str, int, float, bool, NoneType):
            found.add(part)
        elif getattr(part, "__name__", "") == "ObjectSpec":
            found |= {str, "mapping"}
        elif (
            (isinstance(part, type) and issubclass(part, Section))
            or "ict" in str(part)
            or "Mapping" in str(part)
        ):
            found.add("mapping")
        else:
            found.add("sequence")
    return found


def test_each_key_right_under_a_section_is_listed_and_nothing_else() -> None:
    keys = {key for key in all_keys() if key.count(".") == 1} - NOT_KEYWORDS
    assert set(BY_KEY) == keys
    assert {name for key, name in BY_KEY.items() if name != key.partition(".")[2]} == {"precision"}


def test_their_types_are_the_schemas() -> None:
    # These also take None, to switch off what a config sets, and a number for a norm.
    further = {
        "lr_schedule": {NoneType},
        "warmup_steps": {NoneType},
        "gradient_clip": {NoneType, float},
        "precision": {"mapping"},
    }
    for key, name in BY_KEY.items():
        assert options(HINTS[name]) - further.get(name, set()) == options(schema_type(key)), name


def test_what_place_takes_is_what_it_lists() -> None:
    from lockstep.trainer.placed_model import _OF_TRAINING, _SECTIONS

    keys = [apply_flags({name: None}).popitem()[0] for name in get_type_hints(PlacementSettings)]
    for key in keys:
        section, _, name = key.partition(".")
        assert section in _SECTIONS or (section == "training" and name in _OF_TRAINING), key


def test_two_names_of_one_key_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"gradient_clip and grad_clip are both training.gradient_clip"
    ):
        Trainer(nn.Linear(1, 1), gradient_clip=1.0, grad_clip=2.0)  # type: ignore[call-arg]
