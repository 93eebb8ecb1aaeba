"""Rules of lines that no linter knows, and where they are still broken.

- *skipped*: `fmt: skip` and `fmt: off`, which keep the formatter away;
- *packed*: `a, b = x, y`, two assignments in one statement. It is none where one value reads
  another's target before that is assigned, as in `a, b = b, a`: statements one after the other
  would compute something else;
- *walrus*: `:=` within `and` or `or`, where a reader has to tell whether it is reached;
- *nested*: in the package, `a if b else c` directly within another one, or as the condition of an
  `if` or a `while`: `x if a else y if b else z` is read from its middle;
- *undocumented*: a function of the package of twelve lines or more, at a line for a statement,
  that has no docstring; methods such as `__init__` are left out, as their class has one.

`line_exceptions.txt` counts what each file has of them. No file may have more, and the total of a
rule only falls:

    python -m tests.line_rules            # what each file has, line by line
    python -m tests.line_rules --write    # writes the counts, if no total is higher than before
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

from tests import house
from tests.ranks import REPOSITORY

EXCEPTIONS = REPOSITORY / "tests" / "line_exceptions.txt"
LONG = 12
_FOLDERS = ("lockstep", "tests", "benchmarks", "examples", "docs")
_KEEPS_THE_FORMATTER_AWAY = re.compile(r"#\s*fmt:\s*(skip|off)|#\s*yapf:\s*disable")


class Breach(NamedTuple):
    """A line that breaks a rule."""

    rule: str
    line: int


def breaches(
    text: str, *, of_package: bool = True, nodes: list[ast.AST] | None = None
) -> Iterator[Breach]:
    """Find the lines of a file that break a rule; some rules are for the package alone.

    Args:
        nodes: of the file, by `ast.walk`, where they are known.
    """
    if _KEEPS_THE_FORMATTER_AWAY.search(text):  # in a comment, or in a string
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and _KEEPS_THE_FORMATTER_AWAY.search(token.string):
                yield Breach("skipped", token.start[0])

    nodes = nodes or list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Assign) and any(_packs(target, node) for target in node.targets):
            yield Breach("packed", node.lineno)

        if of_package and _nests(node):
            yield Breach("nested", node.lineno)

        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if of_package and is_function and _lacks_words(node):
            yield Breach("undocumented", node.lineno)

    if not any(isinstance(node, ast.NamedExpr) for node in nodes):
        return
    for condition in _outermost_conditions(nodes[0]):
        if any(isinstance(node, ast.NamedExpr) for node in ast.walk(condition)):
            yield Breach("walrus", condition.lineno)


def _nests(node: ast.AST) -> TypeGuard[ast.IfExp | ast.If | ast.While]:
    """Tell whether a choice is made directly within another one."""
    if isinstance(node, ast.IfExp):
        return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))
    return isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.IfExp)


def _lacks_words(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a function is long for one without a docstring."""
    if function.end_lineno is not None and function.end_lineno - function.lineno < LONG // 2:
        return False  # at a line for a statement it has an empty line more before each def
    is_special = function.name.startswith("__") and function.name.endswith("__")
    if is_special or ast.get_docstring(function) is not None:
        return False
    return len(ast.unparse(function).splitlines()) >= LONG  # however the formatter lays it out


def _packs(target: ast.expr, assignment: ast.Assign) -> bool:
    """Tell whether a target could be assigned by one statement for each of its names."""
    value = assignment.value
    if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, ast.Tuple | ast.List):
        return False

    if any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts)):
        return False

    names = [ast.unparse(each) for each in target.elts]
    for position, later in enumerate(value.elts):
        read = {ast.unparse(node) for node in ast.walk(later) if isinstance(node, ast.expr)}
        if read.intersection(names[:position]):
            return False
    return True


def _outermost_conditions(node: ast.AST) -> Iterator[ast.BoolOp]:
    """Find the conditions of two parts or more, those within such a condition left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.BoolOp):
            yield child
        else:
            yield from _outermost_conditions(child)


def found() -> dict[str, list[Breach]]:
    """Return the breaches of each Python file of the repository that has some."""
    paths = [path for folder in _FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    of_package = {path: house.nodes(module) for module, path in house.files().items()}
    found: dict[str, list[Breach]] = {}
    for path in paths:
        name = str(path.relative_to(REPOSITORY))
        nodes = of_package.get(path)
        there = list(breaches(path.read_text(), of_package=nodes is not None, nodes=nodes))
        if there:
            found[name] = there
    return found


def counted(there: dict[str, list[Breach]]) -> dict[tuple[str, str], int]:
    """Count breaches by (file, rule)."""
    return Counter((path, breach.rule) for path, each in there.items() for breach in each)


def allowed(listed: Path = EXCEPTIONS) -> dict[tuple[str, str], int]:
    """Read the counts that are allowed, by (file, rule)."""
    rows = [line.split() for line in listed.read_text().splitlines() if line]
    return {(path, rule): int(count) for path, rule, count in rows}


def write(counts: dict[tuple[str, str], int], listed: Path = EXCEPTIONS) -> None:
    """Write the counts. Raises SystemExit: a rule is broken more often than before.

    What moves from one file to another is counted there, so a rule's total decides.
    """
    before = _totals(allowed(listed))
    now = _totals(counts)
    higher = {rule: f"{before[rule]} → {now[rule]}" for rule in now if now[rule] > before[rule]}
    if higher:
        raise SystemExit(f"higher than before, and so not written: {higher}")
    rows = [f"{path} {rule} {count}\n" for (path, rule), count in sorted(counts.items())]
    listed.write_text("".join(rows))


def _totals(counts: dict[tuple[str, str], int]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (_, rule), count in counts.items():
        totals[rule] += count
    return totals


def main() -> None:
    """List the breaches, or write their counts."""
    there = found()
    if "--write" in sys.argv[1:]:
        write(counted(there))
        return
    for path, each in there.items():
        for breach in sorted(each, key=lambda breach: breach.line):
            print(f"{Path(path)}:{breach.line} {breach.rule}")


if __name__ == "__main__":
    main()
