"""What the benchmarks found: the files of benchmarks/results/ on one page, each with the command
that made it.
"""

import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_INTRODUCTION = """# Measured

What the benchmarks found, and the commands that made it. Each says on what machine; figures of a busy one say so. This
page is made from `benchmarks/results/`.
"""


def page() -> str:
    return "\n".join([_INTRODUCTION, *map(_section, sorted(RESULTS.glob("*.md")))])


def _section(path: Path) -> str:
    """The file, its headings one level deeper; the first one can be linked to by the
    file's name.
    """
    deeper = re.sub(r"^(#+ .*)$", r"#\1", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"\A(## .*)$", rf"\1 {{ #{path.stem} }}", deeper, count=1, flags=re.MULTILINE)


def pictures() -> list[Path]:
    """What the files show."""
    return sorted(RESULTS.glob("*.svg"))
