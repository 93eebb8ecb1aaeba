"""What the contributing guide points at is there."""

import importlib
import re

from tests.ranks import REPOSITORY

GUIDE = (REPOSITORY / "CONTRIBUTING.md").read_text()


def test_each_path_in_it_exists() -> None:
    named = re.findall(r"`([\w./*-]+(?:/|\.py|\.yaml|\.yml|\.toml|\.md))`", GUIDE) + re.findall(r"\]\(([\w./]+)", GUIDE)
    assert len(named) > 25
    for name in named:
        pattern = name.removeprefix("lockstep/").rstrip("/")
        assert any(any(place.glob(pattern)) for place in (REPOSITORY, REPOSITORY / "lockstep")), name


def test_each_door_in_the_tour_opens() -> None:
    for room, doors in re.findall(r"^\| `([\w/.]+)` \| (.*?) \|", GUIDE, re.MULTILINE):
        module = importlib.import_module("lockstep." + room.removesuffix(".py").strip("/").replace("/", "."))
        for door in re.findall(r"`(\w+)[.(`,]", doors):
            assert hasattr(module, door), f"{room}: {door}"


def test_each_make_target_in_it_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make ([\w-]+)", GUIDE)) <= set(targets)
