"""Each config of the five guides, with our names, passes `lockstep config check`; the table says
how it came about.

A file of `mapped/` names in its head what it is called elsewhere. Every one of these names is
answered by the table, or is one of ours as it stands; and what the answer says to write is written
in the file.
"""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from lockstep.config import commands, load_config
from lockstep.config.keys import keys_named
from lockstep.config.names import ForeignName, _matches

MAPPED = sorted((Path(__file__).parent / "mapped").rglob("*.yaml"))
NEEDED = ("model.name=transformer", "data.name=python-docs")  # by a config that only has a part


def overrides(path: Path) -> list[str]:
    text = path.read_text()
    return [
        word
        for word in NEEDED
        if not re.search(rf"^{word.split('.')[0]}:.*name", text, re.MULTILINE)
    ]


def written(section: BaseModel, prefix: str = "") -> set[str]:
    """The dotted keys that a config was given."""
    found = set()
    for name in section.model_fields_set:
        value = getattr(section, name)
        found.add(key := prefix + (type(section).model_fields[name].alias or name))
        if isinstance(value, BaseModel):
            found |= written(value, f"{key}.")
        elif isinstance(value, dict):
            found |= {f"{key}.{inside}" for inside in value}
    return found


def answers(theirs: str) -> list[str]:
    """Keys, any of which is what `theirs` is called here; empty where it is not a key or
    is left out.
    """
    rows: list[ForeignName] = _matches(theirs)
    if rows:
        return [] if any(not row.is_key for row in rows) else [row.ours for row in rows]
    ours = keys_named(theirs.rpartition(".")[2].lstrip("-"))
    assert ours, f"the table does not know {theirs}"
    return ours


@pytest.mark.parametrize("path", MAPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_config_of_a_guide_passes_with_our_names(path: Path) -> None:
    given = overrides(path)
    assert commands.run("check", path, given).startswith("ok: ")
    here = written(load_config(path, given))
    names = re.search(r"^# names:(.*)$", path.read_text(), re.MULTILINE)
    assert names is not None
    for theirs in names[1].split():
        ours = answers(theirs)
        assert not ours or any(key in here for key in ours), f"{theirs}: none of {ours} is written"


def test_each_guide_is_there() -> None:
    assert {path.parent.name for path in MAPPED} == {
        "bdh",
        "forgather",
        "frameworm",
        "free_transformer",
        "geometry_os",
    }
