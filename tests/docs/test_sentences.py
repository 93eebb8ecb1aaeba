"""Sentences that pages repeat, and that a change of the code makes wrong, are compared with the
code.
"""

import re
from pathlib import Path

import pytest

from lockstep.layout import SIZED
from tests.docs.blocks import REPOSITORY

_AXIS = "|".join(SIZED)
_PRODUCT = re.compile(rf"\b(?:{_AXIS})(?:\s+(?:×|x)\s+(?:{_AXIS}))+\b")


def _pages() -> list[Path]:
    folders = (REPOSITORY / "lockstep", REPOSITORY / "docs")
    inside = [
        path
        for folder in folders
        for end in ("*.py", "*.md", "*.yaml")
        for path in folder.rglob(end)
    ]
    return [*REPOSITORY.glob("*.md"), *inside]


def test_no_page_calls_the_mesh_by_some_of_its_axes() -> None:
    """A product that begins with `pipeline` is the mesh, and names all axes of it, in any order."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}: {said}"
        for path in _pages()
        for said in _partial(path.read_text())
    ]
    assert not wrong, f"the mesh is {' × '.join(SIZED)}: {wrong}"


def _partial(text: str) -> list[str]:
    products = [" ".join(match[0].split()) for match in _PRODUCT.finditer(text)]
    meshes = [
        product for product in products if product.startswith("pipeline") and product.count("×") > 1
    ]
    return [mesh for mesh in meshes if set(re.split(r" [×x] ", mesh)) != set(SIZED)]


@pytest.mark.parametrize(
    ("sentence", "is_wrong"),
    [
        ("the axes pipeline × replicate × shard", True),
        ("the axes pipeline × replicate\n× shard.", True),
        ("pipeline × replicate × shard × context × tensor", False),
        ("pipeline × replicate × context × tensor × shard", False),
        ("data-parallel size: replicate × shard", False),
    ],
)
def test_such_a_sentence_is_seen(sentence: str, is_wrong: bool) -> None:
    assert bool(_partial(sentence)) == is_wrong
