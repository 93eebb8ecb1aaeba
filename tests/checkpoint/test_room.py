"""The rules of the room: no circle of imports, torch's private names in one file, and no function takes the config."""

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
        file.stem: {module.removeprefix(ROOM) for module, _ in imports_of(file) if module.startswith(ROOM)}
        for file in FILES
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_torchs_private_names_are_in_one_file(file: Path) -> None:
    if file.stem == "torch_internals":
        return
    names = [name for module, names in imports_of(file) if module.startswith("torch") for name in names]
    used = [ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]
    assert not [name for name in used if name.startswith("torch.") and "._" in name.replace("torch.__version__", "")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_function_takes_the_whole_config(file: Path) -> None:
    taken = [names for module, names in imports_of(file) if module == "lockstep.config"]
    assert not taken or taken == [["ObjectSpec"]]
