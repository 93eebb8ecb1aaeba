from pathlib import Path

from benchmarks.choosing import page


def test_the_page_is_as_generated() -> None:
    found = Path(__file__).parents[2] / "docs" / "choosing.md"
    assert found.read_text() == page(), "python -m benchmarks.choosing > docs/choosing.md"
