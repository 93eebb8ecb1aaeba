"""The page that reads the results reads all of them, and only what is there."""

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_every_result_is_read_and_every_link_leads_to_one() -> None:
    linked = re.findall(
        r"\(results/(\S+?\.md)\)", (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    )
    there = [path.name for path in (BENCHMARKS / "results").glob("*.md")]
    assert sorted(linked) == sorted(there), (
        "benchmarks/README.md has one row for each file of benchmarks/results"
    )


def test_every_program_that_the_page_names_is_there() -> None:
    named = re.findall(
        r"python (?:-m )?(benchmarks[\w./]+)",
        (BENCHMARKS / "README.md").read_text(encoding="utf-8"),
    )
    for name in named:
        path = BENCHMARKS.parent / (
            name if name.endswith(".py") else name.replace(".", "/") + ".py"
        )
        assert path.exists() or (path.with_suffix("") / "__main__.py").exists(), name
