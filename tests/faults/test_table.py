"""The page of faults is the table that the tests make."""

import re

from tests.faults.table import (
    PAGE,
    SECURITY,
    page,
    read_faults,
    read_promises,
    security_page,
    security_text,
)

# What the page of security says of others, asks of the reader, or only explains; all else on it is
# a promise.
_NO_PROMISE = (
    "Training runs code",
    "Loading, verifying",
    "`lockstep report`, `top`",
    "- **The rendezvous has no",
    "Please report",
)


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.faults.table` writes it."""
    assert PAGE.read_text() == page(read_faults())


def test_at_least_forty_faults_each_named_once() -> None:
    names = [f"{fault.kind}: {fault.name}" for fault in read_faults()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)


def test_the_page_of_security_names_its_tests() -> None:
    """`python -m tests.faults.table` writes the section."""
    assert SECURITY.read_text() == security_page()


def test_every_promise_of_the_page_of_security_has_a_test() -> None:
    """Each paragraph and each item of a list is quoted by a test, but for those that promise
    nothing.
    """
    text = re.sub(r"^#.*$", "", security_text(), flags=re.MULTILINE)
    blocks = [
        " ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=- )", text) if block.strip()
    ]
    promises = read_promises()
    assert [words for words in promises if not any(words in block for block in blocks)] == [], (
        "the page says otherwise"
    )
    kept = [block for block in blocks if any(words in block for words in promises)]
    assert [
        block for block in blocks if block not in kept and not block.startswith(_NO_PROMISE)
    ] == []
    assert all(any(block.startswith(words) for block in blocks) for words in _NO_PROMISE)
