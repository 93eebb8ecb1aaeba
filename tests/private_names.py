"""Finds private names of torch in a file's text, and functions of torch that it replaces.

A name that begins with one underscore is a file's own if the file defines it, or one that it
imports from does. All others belong to somebody else: to torch, or to one of the few in `OTHERS`.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.house import imports, nodes

# Of the standard library, of named tuples, and of transformers.
OTHERS = {
    "_current_frames",
    "_exit",
    "_getframe",
    "_inheriting",
    "_actions",
    "_option_string_actions",
    "_asdict",
    "_replace",
    "_fields",
    "_no_split_modules",
    "_model_mapping",
}
# What every tensor, module, optimizer and hook has: on anything but `self` these are torch's,
# whoever else has such.
_TORCHS = {
    name
    for kind in (nn.Linear(1, 1), Tensor, torch.optim.SGD([torch.zeros(1)]))
    for name in (*dir(kind),)
    if name.startswith("_")
}
_SETTINGS = ("torch.backends.", "torch.utils.deterministic.")  # public, and there to be assigned


def found_in(module: str) -> list[tuple[int, str]]:
    """Return (line, what) of each private name of torch in a module of the package."""
    known = _defined(module).union(*map(_defined, imports(module, everywhere=True))) | OTHERS
    found = set()
    for node in nodes(module):
        for name in _private_imports(node):
            found.add((node.lineno, name))
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            above = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            if above or node.attr not in known or (node.attr in _TORCHS - OTHERS and not own):
                found.add((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
            "delattr",
        ):
            name = node.args[1]
            if (
                isinstance(name, ast.Constant)
                and _is_private(name.value)
                and name.value not in known
            ):
                found.add((node.lineno, ast.unparse(node)))
    return sorted(found | set(_overridden(module)) | set(_replaced(module)))


def _is_private(name: Any) -> bool:
    return (
        isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"
    )


def _private_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    yield from (
        n for n in names if n.split(".")[0] == "torch" and any(map(_is_private, n.split(".")))
    )


@cache
def _defined(module: str) -> frozenset[str]:
    """Private names that a module defines: functions, classes, variables, and attributes that it
    assigns to `self`.
    """
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "made") else set()
    return frozenset(found)


def _of_torch(module: str) -> dict[str, Any]:
    """The names that a module imports from torch and from `lockstep.torch_compat`, with what they
    stand for.
    """
    found: dict[str, Any] = {}
    for node in nodes(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    loaded = import_module(alias.name)
                    found[alias.asname or "torch"] = loaded if alias.asname else torch
        elif isinstance(node, ast.ImportFrom) and re.match(
            r"torch(\.|$)|lockstep\.torch_compat", node.module or ""
        ):
            for alias in node.names:
                home = import_module(str(node.module))
                found[alias.asname or alias.name] = getattr(home, alias.name, None)
    return found


def _overridden(module: str) -> Iterator[tuple[int, str]]:
    """Private methods and attributes of torch's classes that a subclass defines or reads."""
    names = _of_torch(module)
    for node in nodes(module):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [
            eval(ast.unparse(b), dict(names))
            for b in node.bases
            if ast.unparse(b).split(".")[0] in names
        ]
        private = set().union(*map(_private_of, bases))
        for inner in ast.walk(node):
            name = getattr(inner, "name", getattr(inner, "attr", None))
            if _is_private(name) and name in private:
                yield getattr(inner, "lineno", node.lineno), f"{node.name}.{name}"


@cache
def _private_of(base: Any) -> frozenset[str]:
    """Private names of a class of torch: what it has, and what its methods assign to `self`."""
    found = set(dir(base))
    for kind in getattr(base, "__mro__", ()):
        with suppress(TypeError, OSError):  # of classes that are not written in Python
            found |= set(re.findall(r"self\.(_[a-z]\w*)", inspect.getsource(kind)))
    return frozenset(filter(_is_private, found))


def _replaced(module: str) -> Iterator[tuple[int, str]]:
    """Assignments to attributes of torch's modules and classes."""
    names = _of_torch(module)
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            target = ast.unparse(node)
            if target.split(".")[0] in names and not target.startswith(_SETTINGS):
                yield node.lineno, target
