"""The glossary is in order, explains words that are in use, and has the terms that the code
introduces.
"""

import ast
import re

import pytest

from lockstep.layout import SIZED
from lockstep.registry import STRATEGIES
from tests import house
from tests.docs.blocks import REPOSITORY

_GLOSSARY = REPOSITORY / "docs" / "glossary.md"
_TERMS = re.findall(r"^## (.+)$", _GLOSSARY.read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def text() -> str:
    """The package and the other pages, with single spaces."""
    files = [*(REPOSITORY / "lockstep").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.md")]
    whole = " ".join(file.read_text() for file in files if file != _GLOSSARY)
    return re.sub(r"\s+", " ", whole).lower()


def test_terms_are_in_order() -> None:
    assert sorted(_TERMS, key=str.lower) == _TERMS
    assert len(set(_TERMS)) == len(_TERMS) > 30


@pytest.mark.parametrize("term", _TERMS)
def test_a_term_is_in_use(text: str, term: str) -> None:
    assert re.search(rf"\b{re.escape(term.lower())}s?\b", text)


def test_a_definition_is_a_sentence_or_two() -> None:
    for entry in _GLOSSARY.read_text().split("\n## ")[1:]:
        term, _, definition = entry.partition("\n")
        sentences = re.findall(r"[.](?:\s|$)", definition)
        assert 1 <= len(sentences) <= 3, term


# Words that docstrings print in italics for emphasis, or because they are the title of a paper.
_NO_TERMS = {"all", "roformer", "whole"}


def test_terms_that_the_code_introduces_are_explained() -> None:
    """A docstring prints a term in italics where it defines it: those, and the words of
    concepts.md.
    """
    terms = {term: module for module in house.files() for term in _italics(module)}
    terms |= dict.fromkeys(_words_of_concepts(), "docs/concepts.md")
    known = {term.lower() for term in _TERMS}
    missing = {term: where for term, where in terms.items() if term not in known | _NO_TERMS}
    assert not missing, f"write an entry into docs/glossary.md: {missing}"
    assert {"program", "signature", "micro-batch"} <= terms.keys()


def _italics(module: str) -> list[str]:
    """Return the words in italics in the docstrings of a module."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in house.nodes(module) if isinstance(node, kinds)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    found = re.findall(r"(?<![\w*`])\*([A-Za-z][\w-]+(?: [\w-]+)?)\*(?![\w*])", "\n".join(texts))
    return [term.lower() for term in found]


def _words_of_concepts() -> list[str]:
    """Return the words that the first table of concepts.md explains, without those of torchrun."""
    page = (REPOSITORY / "docs" / "concepts.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("\n## 1")[0], re.MULTILINE)
    return [word for word, meaning in rows[1:] if "torchrun" not in meaning]


@pytest.mark.parametrize(
    ("term", "names"), [("axis", [*SIZED, "expert"]), ("strategy", list(STRATEGIES.shipped))]
)
def test_an_entry_names_all_that_there_are(term: str, names: list[str]) -> None:
    entry = re.search(
        rf"^## {term}$(.*?)(?:^## |\Z)", _GLOSSARY.read_text(), re.MULTILINE | re.DOTALL
    )
    assert entry is not None
    assert [name for name in names if not re.search(rf"\b{name}\b", entry[1])] == []
