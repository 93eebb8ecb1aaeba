"""The advice of all errors, as the source has it. `python -m tests.advice` lists it, with `--prose`
what is only read.

What reaches the user as "do:" is an argument `fix` or `do`, or a variable of that name; … stands
for what is computed. What a program can follow is taken out of it: keys of the config, flags,
commands, names of Python. The rest is prose.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.keys import all_keys
from tests.ranks import REPOSITORY

HOLE = "…"  # what the program fills in
_NAMES = ("fix", "do")
_SECTIONS = "training|distributed|data|model|precision|checkpoint|monitor|accelerate"
_KEY = re.compile(rf"(?<![\w./…=-])(?:{_SECTIONS})(?:\.[a-z_]+)+(?![\w(/]|:\w)")
# training.compile: false
_PAIR = re.compile(r"(?<![\w`…])((?:[a-z_]+[.])*[a-z_0-9]+): ([\w.-]+)(?<![.])")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")
_COMMAND = re.compile(
    r"`(lockstep [^`]+)`|(?:^|[:;,] )(lockstep (?:config|data|checkpoint|init|bench|report) [^;,]+)"
)
_PYTHON = re.compile(
    r"(?<![\w.…])((?:torch|lockstep|nn|F|trainer|transformers)(?:\.[A-Za-z_]\w*)+)"
)


@dataclass
class Advice:
    """One text, where it is, and what a program can follow in it."""

    file: str
    line: int
    text: str
    keys: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    # keys, also by their short names, and values
    pairs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_prose(self) -> bool:
        return not (self.keys or self.flags or self.commands or self.names or self.pairs)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


@functools.cache
def all_advice() -> tuple[Advice, ...]:
    """The advice in the source of Lockstep, and in the table of known errors.

    Read when a test asks: all workers import its file, and reading takes seconds.
    """
    root = Path(REPOSITORY)
    found = []
    for path in sorted((root / "lockstep").rglob("*.py")):
        for line, text in _texts(ast.parse(path.read_text())):
            found.append(_parsed(str(path.relative_to(root)), line, text))
    page = root / "lockstep" / "diagnose" / "known_errors.md"
    for line, row in enumerate(page.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if len(cells) in (4, 5) and not cells[0].startswith("-"):
            found.append(_parsed(str(page.relative_to(root)), line, cells[3]))
    return tuple(found)


def _parsed(file: str, line: int, text: str) -> Advice:
    commands = [(one or other).strip() for one, other in _COMMAND.findall(text)]
    without = re.sub(r"\S*[/\\]\S*", "", text)  # paths and addresses
    pairs = [
        (key, value)
        for key, value in _PAIR.findall(text)
        if key.rpartition(".")[2] in _short_names()
    ]
    names = _PYTHON.findall(text)
    return Advice(
        file, line, text, _KEY.findall(without), _FLAG.findall(text), commands, names, pairs
    )


@functools.cache
def _short_names() -> set[str]:
    # words of prose, too
    return {key.rpartition(".")[2] for key in all_keys()} - {"rank", "pipeline"}


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = [word.value for word in node.keywords if word.arg in _NAMES]
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values = (
                [node.value]
                if any(isinstance(t, ast.Name) and t.id in _NAMES for t in targets)
                else []
            )
        for value in values:
            for text in _written(value):
                if text.strip(f"{HOLE} ;,"):
                    yield value.lineno, text


def _written(value: ast.expr) -> list[str]:
    """The texts that an expression may be, with … for what is computed."""
    match value:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            pieces = [
                _written(part)[0] if isinstance(part, ast.Constant) else HOLE for part in parts
            ]
            inner = [
                text
                for part in parts
                if isinstance(part, ast.FormattedValue)
                for text in _written(part.value)
            ]
            return ["".join(pieces), *inner]
        case ast.IfExp(body=one, orelse=other):
            return [*_written(one), *_written(other)]
        case ast.BoolOp(values=ways):
            return [text for way in ways for text in _written(way)]
        case ast.BinOp(left=left, right=right):
            return [
                one + other
                for one in _written(left) or [HOLE]
                for other in _written(right) or [HOLE]
            ]
    return []


def main() -> None:
    found = all_advice()
    shown = [one for one in found if one.is_prose] if "--prose" in sys.argv else found
    print("\n".join(map(str, shown)))
    print(f"{len(found)} texts, of which {sum(one.is_prose for one in found)} are prose")


if __name__ == "__main__":
    main()
