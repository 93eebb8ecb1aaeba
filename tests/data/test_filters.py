"""What is left out of documents, and the reasons."""

import pytest

from lockstep.data.filters import Filters, told
from lockstep.errors import UsageError


def is_english(row: dict[str, object]) -> bool:
    return row["language"] == "en"


def misspelt(row: dict[str, object]) -> bool:
    return row["lang"] == "en"


def test_reasons_are_counted() -> None:
    filters = Filters(min_tokens=3, max_tokens=9, keep=f"{__name__}:is_english")
    assert filters.takes({"language": "en"}, "a")
    assert not filters.takes({"language": "de"}, "b")
    filters.refuse()
    assert [filters.fits(tokens) for tokens in (0, 2, 3, 9, 10)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert filters.kept == 2
    assert told(filters.left_out) == (
        "left out 1 empty, 1 longer than 9 tokens, 1 refused by tests.data.test_filters:is_english,"
        " 1 shorter than 3 tokens"
    )
    assert told({}) == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_tokens": -1}, "min_tokens -1 leaves nothing out"),
        ({"min_tokens": 5, "max_tokens": 4}, "max_tokens 4 is below min_tokens 5"),
        ({"keep": "nowhere_at_all:f"}, "there is no module"),
        ({"keep": "math:pi"}, "pi"),
    ],
)
def test_bad_conditions_are_one_clear_message(settings, message):
    with pytest.raises((UsageError), match=message):
        Filters(**settings)


def test_a_function_that_fails_is_named_with_the_row() -> None:
    filters = Filters(keep=f"{__name__}:misspelt")
    with pytest.raises(UsageError, match=r"misspelt failed for d.jsonl:3") as caught:
        filters.takes({"language": "en"}, "d.jsonl:3")
    assert "KeyError" in str(caught.value)
    assert "test_filters.py" in str(caught.value)
    with pytest.raises(UsageError, match=r"is asked about rows, and a.txt has none"):
        filters.takes(None, "a.txt")
