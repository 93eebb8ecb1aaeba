"""The rules of the room: no circle of imports, and no function takes the config."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lockstep import checkpoint

FILES = sorted(Path(checkpoint.__file__).parent.glob("*.py"))
ROOM = "lockstep.checkpoint."


def imports_of(file: Path) -> list[tuple[str, list[str]]]:
    """Module → names, of each import of a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.append((node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {
        file.stem: {
            module.removeprefix(ROOM) for module, _ in imports_of(file) if module.startswith(ROOM)
        }
        for file in FILES
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_function_takes_the_whole_config(file: Path) -> None:
    """The command line's side may be given a config's path, and reads in it where to look."""
    taken = [names for module, names in imports_of(file) if module == "lockstep.config"]
    allowed = [["ObjectSpec", "load_config"]] if file.stem == "commands" else [["ObjectSpec"]]
    assert not taken or taken == allowed
