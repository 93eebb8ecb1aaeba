"""What the package's files import and define, read from their text; nothing is imported."""

import ast
import gc
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.ranks import REPOSITORY

PACKAGE = REPOSITORY / "lockstep"


@cache
def files() -> dict[str, Path]:
    """Module name → file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@contextmanager
def without_collections() -> Iterator[None]:
    """Parse many files in this: collections of garbage would take three times as long as that, and
    find nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def parsed(path: Path) -> ast.Module:
    """The tree of a file of the package, which many tests read."""
    return _all_parsed()[path]


@cache
def _all_parsed() -> dict[Path, ast.Module]:
    with without_collections():
        return {path: ast.parse(path.read_text()) for path in files().values()}


def tree(module: str) -> ast.Module:
    """The parsed text of a module."""
    return parsed(files()[module])


def nodes(module: str) -> list[ast.AST]:
    """All nodes of a module; to walk through its tree takes as long as to parse it."""
    return _all_nodes()[module]


@cache
def _all_nodes() -> dict[str, list[ast.AST]]:
    with without_collections():
        return {module: list(ast.walk(tree(module))) for module in files()}


@cache
def imports(module: str, *, everywhere: bool = False) -> set[str]:
    """Modules of the package that a module imports as it is loaded.

    Args:
        everywhere: also what its functions import when they are called, and what it imports for
            its types alone (`if TYPE_CHECKING:`).
    """
    found: set[str] = set()
    for node in nodes(module) if everywhere else _when_loaded(tree(module).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = names & files().keys()
            found |= modules
            if modules != names:
                found.add(node.module)
    return (found & files().keys()) - {module}


def _when_loaded(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _when_loaded([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _when_loaded(
                [*node.body, *node.orelse, *(n for h in node.handlers for n in h.body)]
            )
        else:
            yield node


def circles(without: Collection[tuple[str, str]] = ()) -> list[list[str]]:
    """Groups of modules that import each other, in functions and for types too (Tarjan's
    algorithm).

    Args:
        without: (importing module, imported module) that do not count.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(
            o for o in imports(module, everywhere=True) if (module, o) not in without
        ):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = []
            while not group or group[-1] != module:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for module in files():
        if module not in index:
            visit(module)
    return found


def classes() -> dict[str, list[str]]:
    """Class name → modules that define one of that name, nested ones and private ones included."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in files():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return found
