"""Every error that a user may meet, read off the source: what it says, how it is built, and which
test provokes it.

    python -m tests.errors [--untested]

A test counts as provoking an error if it holds a piece of its message of ten characters or more.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import house
from tests.ranks import REPOSITORY

KINDS = ("UsageError", "RunError", "DamagedError", "BadNumbersError")
_SHORTEST = 10
_SEPARATOR = "\0"  # in no string


@dataclass
class Site:
    """A place where an error is made.

    Attributes:
        pieces: the constant pieces of what it says; empty where another part of the code words it.
        parts: which of where, why and fix it has.
        tests: files of tests that hold a piece of it.
    """

    file: str
    line: int
    kind: str
    pieces: tuple[str, ...]
    parts: frozenset[str]
    tests: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        return " … ".join(" ".join(piece.split()) for piece in self.pieces)


def sites() -> list[Site]:
    """All of the package, by file and line."""
    found = []
    for module, path in house.files().items():
        name = str(path.relative_to(REPOSITORY))
        nodes = house.nodes(module)
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in KINDS
            ):
                parts = frozenset(keyword.arg or "**" for keyword in node.keywords)
                pieces = tuple(_constants(_worded(node.args[0], assigned))) if node.args else ()
                found.append(Site(name, node.lineno, node.func.id, pieces, parts))
    return sorted(found, key=lambda site: (site.file, site.line))


@cache
def with_tests() -> list[Site]:
    """The same, with the tests that provoke them."""
    found = sites()
    of_package = _SEPARATOR.join(piece for site in found for piece in site.pieces)
    texts = {
        str(path.relative_to(REPOSITORY)): _Strings.of(_strings(path), of_package)
        for path in sorted((REPOSITORY / "tests").rglob("*.py"))
    }
    for site in found:
        site.tests = [name for name, strings in texts.items() if strings.meet(site.pieces)]
    return found


@dataclass(frozen=True)
class _Strings:
    """Strings of a file of tests.

    Attributes:
        joined: all of them.
        parts: those that are part of some message of the package.
    """

    joined: str
    parts: list[str]

    @classmethod
    def of(cls, strings: list[str], of_package: str) -> "_Strings":
        parts = sorted({string for string in strings if string in of_package})
        return cls(_SEPARATOR.join(strings), parts)

    def meet(self, pieces: tuple[str, ...]) -> bool:
        """Return whether one of them is part of a long piece of a message, or it of one."""
        long = [piece.strip() for piece in pieces if len(piece.strip()) >= _SHORTEST]
        return any(
            piece in self.joined or any(part in piece for part in self.parts) for piece in long
        )


def _worded(what: ast.expr, assigned: list[ast.Assign]) -> ast.expr:
    """Return the message, or what was assigned to its name just before."""
    if not isinstance(what, ast.Name):
        return what
    targets = [
        node
        for node in assigned
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id == what.id
    ]
    before = [node for node in targets if 0 < what.lineno - node.lineno < 12]
    return max(before, key=lambda node: node.lineno).value if before else what


def _constants(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.strip():
            yield part.value


def _strings(path: Path) -> list[str]:
    """Literal runs of the strings in a file of tests, patterns taken apart at what is not a literal
    text.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            plain = re.sub(r"\\([^\w\s])", r"\1", node.value)
            found += [
                run.strip() for run in re.split(r"\.\*|\(\.\|\\n\)\*|\n|\\d\+?|\\S\+?", plain)
            ]
    return [run for run in found if len(run) >= _SHORTEST]


def main(arguments: list[str]) -> int:
    for site in with_tests():
        if "--untested" not in arguments or not site.tests:
            said = ", ".join(sorted(site.parts)) or "what alone"
            print(
                f"{site.file}:{site.line}  {site.message or '(worded elsewhere)'}\n    {said};"
                f" {', '.join(site.tests)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
