"""The glossary is in order, and explains words that the code and the other pages use."""

import re

import pytest

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
