"""What is left out of documents, and the reasons."""

import json
from pathlib import Path

import pytest

from lockstep.config import DataConfig
from lockstep.data import build_data
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


def has_text(row: dict[str, object]) -> bool:
    return isinstance(row.get("text"), str)


ROWS = [{"text": "words of a page"}, {"text": None}, {"text": "and more"}]


def _write(kind: str, folder: Path) -> str:
    """Write rows, of which some have no text; return the path of a source."""
    file = folder / f"rows.{kind}"
    if kind in ("jsonl", "hf"):
        more: list[dict[str, object]] = [{"title": "none"}, {"text": 3}] if kind == "jsonl" else []
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *more]))
        return f"hf:{folder}" if kind == "hf" else str(file)
    made = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    if kind == "parquet":
        made.to_parquet(file)
    else:
        made.save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(file)
    return str(file)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("documents", "jsonl"),
        ("documents", "parquet"),
        ("documents", "arrow"),
        ("stream", "jsonl"),
        ("stream", "hf"),
    ],
)
def test_rows_without_a_text_are_left_out_before_it_is_asked_for(
    name: str, kind: str, tmp_path: Path
) -> None:
    if kind == "hf":
        pytest.importorskip("datasets")
    source = {"path": _write(kind, tmp_path), "text_field": "text"}

    def texts(**more: str) -> bytes:
        args = {"sources": [{**source, **more}], "sequence_length": 64}
        train = build_data(DataConfig(name=name, args=args)).train
        sample = next(iter(train)) if name == "stream" else train[0]
        return bytes(sample["targets"][sample["targets"] >= 0].tolist())

    assert texts(keep=f"{__name__}:has_text") == b"ords of a pagend more"
    with pytest.raises(UsageError, match=r"'text' is NoneType, not text, in .*(:2|row 1)"):
        texts()
