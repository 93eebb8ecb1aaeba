"""How the package reads, in figures, beside other projects': `make style`.

A mirror, not a limit: no file is written to please these numbers. What is measured, over all `.py`
files of a folder:

- *characters a line*: with indentation; blank lines count, as a page with air has fewer;
- *above 100*: the share of the lines that are longer than 100 characters;
- *tuples*: assignments that pack and unpack (`a, b = x, y`) in 1,000 lines; unpacking a call is
  none;
- *comments*: the share of the lines that hold nothing but a comment;
- *long, no docstring*: functions of more than 40 lines without a docstring.

    python -m benchmarks.style                 # the package
    python -m benchmarks.style FOLDER …        # anybody's
    python -m benchmarks.style --where         # and the lines and functions that are meant
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lockstep"
WIDEST = 100
LONG = 40
# Counted on 2026-11-25 on each project's main branch, by a program much like this one.
OTHERS = {
    "torchtitan": ("29", "0.2 %", "0.9", "6.4 %"),
    "OLMo-core": ("32", "0.9 %", "0.8", "3.6 %"),
    "Lingua": ("31", "1.0 %", "2.5", "5.2 %"),
    "nanochat": ("43", "7 %", "7.5", "12.7 %"),
}


@dataclass
class Style:
    """Counts over some files."""

    lines: int = 0
    characters: int = 0
    comments: int = 0
    wide: list[str] = field(default_factory=list)
    tuples: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count one file."""
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            self.lines += 1
            self.characters += len(line)
            if len(line) > WIDEST:
                self.wide.append(f"{path}:{number}")
        self.comments += sum(1 for _ in _comment_lines(text))
        for node in ast.walk(ast.parse(text)):
            if _packs_and_unpacks(node):
                self.tuples.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG and ast.get_docstring(node) is None:
                    self.undocumented.append(f"{path}:{node.lineno} {node.name}, {length} lines")

    def row(self, name: str) -> str:
        """Return the figures, as a row of the table."""
        return (
            f"| {name} | {self.characters / self.lines:.0f}"
            f" | {100 * len(self.wide) / self.lines:.1f} %"
            f" | {1000 * len(self.tuples) / self.lines:.1f}"
            f" | {100 * self.comments / self.lines:.1f} %"
            f" | {len(self.undocumented)} |"
        )


def _packs_and_unpacks(node: ast.AST) -> bool:
    """Tell whether a statement assigns several values to several names at once."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def _comment_lines(text: str) -> Iterator[int]:
    """Numbers of the lines that hold a comment and nothing else."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            yield token.start[0]


def measured(folder: Path) -> Style:
    """Count all Python files below a folder."""
    style = Style()
    for path in sorted(folder.rglob("*.py")):
        style.add(path)
    return style


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[PACKAGE])
    parser.add_argument("--where", action="store_true", help="list the lines that are meant")
    asked = parser.parse_args()
    print("| | characters a line | above 100 | tuples in 1,000 | comments | long, no docstring |")
    print("|---|---|---|---|---|---|")
    styles = {folder: measured(folder) for folder in asked.folders}
    for folder, style in styles.items():
        print(style.row(folder.name))
    for name, figures in OTHERS.items():
        print(f"| {name} | {' | '.join(figures)} | |")
    if asked.where:
        for style in styles.values():
            for title in ("wide", "tuples", "undocumented"):
                print(f"\n{title}:", *getattr(style, title), sep="\n  ")


if __name__ == "__main__":
    main()
