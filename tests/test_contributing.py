"""What the contributing guide points at is there, and what it says is so."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.checkpoint import Storage
from tests.house import files, imports
from tests.ranks import REPOSITORY
from tests.seams.test_strategy import STRATEGY

GUIDE = (REPOSITORY / "CONTRIBUTING.md").read_text()


def test_each_path_in_it_exists() -> None:
    named = re.findall(r"`([\w./*-]+(?:/|\.py|\.yaml|\.yml|\.toml|\.md))`", GUIDE) + re.findall(
        r"\]\(([\w./]+)", GUIDE
    )
    assert len(named) > 25
    for name in named:
        pattern = name.removeprefix("lockstep/").rstrip("/")
        assert any(any(place.glob(pattern)) for place in (REPOSITORY, REPOSITORY / "lockstep")), (
            name
        )


def test_the_tree_in_it_is_the_tree() -> None:
    """Each module and package of `lockstep/` is in the tree, and each name in the tree exists."""
    block = re.search(r"```\nlockstep/\n(.*?)```", GUIDE, re.DOTALL)
    assert block is not None
    named = {
        line.split()[0].rstrip("/") for line in block[1].splitlines() if re.match(r"  \S", line)
    }
    package = REPOSITORY / "lockstep"
    there = {
        p.name
        for p in package.iterdir()
        if not p.name.startswith(("_", ".")) and p.suffix in ("", ".py")
    }
    there = {
        name for name in there if (package / name).is_file() or any((package / name).glob("*.py"))
    }
    assert named == there | {"__init__.py"}


def test_each_door_in_the_tour_opens() -> None:
    for room, doors in re.findall(r"^\| `([\w/.]+)` \| (.*?) \|", GUIDE, re.MULTILINE):
        module = importlib.import_module(
            "lockstep." + room.removesuffix(".py").strip("/").replace("/", ".")
        )
        for door in re.findall(r"`(\w+)[.(`,]", doors):
            assert hasattr(module, door), f"{room}: {door}"


def test_a_question_is_answered_in_four_files_whose_functions_exist() -> None:
    rows = re.findall(r"^\| ([A-Z][^|]+\?) \| ([^|]+) \|$", GUIDE, re.MULTILINE)
    assert len(rows) == 6
    for question, way in rows:
        stops = way.split(" → ")
        assert 1 <= len(stops) <= 4, question
        for stop in stops:
            found = re.match(r"`([\w/]+\.py)` \((.+)\)", stop)
            assert found is not None, stop
            text = (REPOSITORY / "lockstep" / found[1]).read_text()
            for name in re.findall(r"`(?:\w+\.)?(\w+)`", found[2].replace("`tensor`", "")):
                defined = rf"\b(?:def|class) {name}\b|^ +{name}: "
                assert re.search(defined, text, re.MULTILINE), f"{found[1]} defines no {name}"


def test_each_make_target_in_it_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make ([\w-]+)", GUIDE)) <= set(targets)


def test_rooms_load_without_torch_where_it_says_so() -> None:
    sentence = re.search(r"it\. (`errors\.py`.*?)\sload without torch", GUIDE, re.DOTALL)
    assert sentence is not None
    rooms = [
        name.removesuffix(".py").strip("/").replace("/", ".")
        for name in re.findall(r"`([\w/.]+)`", sentence[1])
    ]
    assert {"config", "cli", "launch", "run_directory.records"} <= set(rooms)
    loaded = ", ".join(f"lockstep.{room}" for room in rooms)
    code = f"import sys, {loaded}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_what_looks_back_at_a_run_imports_nothing_that_trains() -> None:
    trains = {"trainer", "step", "parallel", "models", "data", "optim", "monitor", "checkpoint"}
    found = [
        f"{module}: {other}"
        for module in files()
        if _room(module) in ("report", "diagnose")
        for other in imports(module, everywhere=True)
        if _room(other) in trains
    ]
    assert not found, found


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_examples_are_as_short_as_it_says() -> None:
    storage = (REPOSITORY / "tests/checkpoint/memory_storage.py").read_text()
    strategy = STRATEGY.partition("\n\nclass NotOne")[0].strip()
    for words, text in (("in a hundred lines", storage), ("in forty lines", strategy)):
        assert words in GUIDE
        limit = 100 if "hundred" in words else 40
        assert 0.7 * limit < len(text.splitlines()) <= limit, words


def test_a_docstring_of_each_kind_is_asked_for_by_ruff() -> None:
    """The guide says that pydocstyle holds them: what `pyproject.toml` leaves out is this and no
    more.
    """
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert {"D", "D401"} <= set(settings["select"])
    assert {rule for rule in settings["ignore"] if rule.startswith("D")} == {"D105", "D107", "D417"}


@pytest.mark.full
def test_a_storage_of_another_package_passes_the_tests_of_commit_kill_and_damage(
    tmp_path: Path,
) -> None:
    """As the guide tells a newcomer: a copy of the example in a package elsewhere, and no edit in
    the repository.
    """
    section = GUIDE.split("**A storage for checkpoints.**")[1].split("\n**")[0]
    assert set(re.findall(r"^\| `(\w+)\(", section, re.MULTILINE)) == Storage.__abstractmethods__
    (command,) = re.findall(
        r"^LOCKSTEP_TEST_STORAGE=(\S+) pytest (\S+) -k (\S+)$", section, re.MULTILINE
    )
    named, tests, chosen = command
    module = tmp_path.joinpath(*named.partition(":")[0].split(".")).with_suffix(".py")
    module.parent.mkdir()
    shutil.copy(REPOSITORY / "tests/checkpoint/memory_storage.py", module)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", tests, "-k", chosen],
        cwd=REPOSITORY,
        env={**os.environ, "LOCKSTEP_TEST_STORAGE": named, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for kind in (
        "test_commit.py::test_a_kill",
        "test_damage.py::test_trap_50",
        "test_storage.py::test_everything",
    ):
        assert re.search(rf"PASSED .*{kind}.*\[{re.escape(named)}\]", ended.stdout), ended.stdout
