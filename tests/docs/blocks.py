"""The code blocks of README.md and docs/, with what is said about each.

A block is ```bash, ```python, ```yaml or ```diff. An HTML comment in the line above says what is
special about it:

    <!-- file: NAME -->        it is the file NAME, which the blocks after it may use
    <!-- beside -->            (bash) it runs beside the next block, as in a second terminal
    <!-- run by: TEST -->      that test runs it
    <!-- needs: PACKAGE -->    (python) it runs where the package is installed; else the test says
                               that it did not

What can't run here is only parsed, and its reader sees why: a line `*Not run by the tests: WHY.*`
is above it.

Blocks of a page run in their order in one empty folder; python blocks without a file share their
names. A page that goes on from the tutorial has its files, by `<!-- uses: run.yaml, text.txt -->`.
"""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+)(?:: (?P<text>[^>]*))? -->\n)?"
    r"(?:^\*Not run by the tests: (?P<why>[^\n]+)\.\*\n\n)?"
    r"^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = ("bash", "python", "yaml", "diff")
NOT_RUN = "not run"
MARKS = ("file", "beside", NOT_RUN, "run by", "needs")


@dataclass(frozen=True)
class Block:
    """One block: where it stands, what it says, and what is said about it."""

    page: str
    line: int
    language: str
    body: str
    mark: str = ""
    text: str = ""

    @property
    def lacks(self) -> str:
        """The package without which it can't run here; empty if it can."""
        return self.text if self.mark == "needs" and find_spec(self.text) is None else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """A page and its blocks."""

    name: str
    blocks: list[Block]
    uses: list[str] = field(default_factory=list)

    def prepare(self, folder: Path) -> None:
        """Put what the page uses into an empty folder, and the repository's examples, as after a
        checkout.
        """
        (folder / "examples").symlink_to(REPOSITORY / "examples")
        tutorial = {
            b.text: b.body for b in blocks_in(REPOSITORY / "docs/tutorial.md") if b.mark == "file"
        }
        for name in self.uses:
            (folder / name).write_text(_some_text() if name == "text.txt" else tutorial[name])


def pages() -> list[Page]:
    """README.md and every page of docs/ that has blocks."""
    files = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    found = [
        Page(str(path.relative_to(REPOSITORY)), blocks_in(path), _uses(path)) for path in files
    ]
    return [page for page in found if page.blocks]


def _uses(path: Path) -> list[str]:
    said = re.search(r"^<!-- uses: (.*) -->$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return said[1].split(", ") if said else []


def _some_text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics.values())[:100_000]


def blocks_in(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(REPOSITORY))
    found = []
    for match in _FENCE.finditer(text):
        mark = NOT_RUN if match["why"] else match["mark"] or ""
        language = match["language"]
        line = text.count("\n", 0, match.start()) + 1
        if language in LANGUAGES:
            found.append(
                Block(
                    name, line, language, match["body"], mark, match["why"] or match["text"] or ""
                )
            )
        else:
            assert language == "text" or not language, (
                f"{name}:{line}: ```{language} is not one of {LANGUAGES}, text"
            )
    return found
