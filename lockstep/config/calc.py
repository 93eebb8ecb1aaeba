"""Evaluate arithmetic over config values: `!calc "max(1, 64 // batch_size)"`.

This happens once files and overrides are merged.

A name is looked up among the neighbours of the expression, then among the variables that the
template sets, then as a dotted key, as the last name of a key, in the table of foreign names, and
among the schema's defaults.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config.names import foreign_key
from lockstep.config.tree import Calc, Node, Path
from lockstep.errors import UsageError

Number = int | float
MAX_POWER = 1024
MAX_BITS = 1024
MAX_LENGTH = 1000

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}


def evaluate(expression: str, lookup: Callable[[str], Number]) -> Number:
    """Return the value of an expression; `lookup` returns the value of a name.

    Raises ValueError: it is not arithmetic, divides by zero, or has a number that is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"it is longer than {MAX_LENGTH} characters")
    try:
        parsed = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is not an expression") from None
    try:
        return _number(_value(parsed.body, lookup))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None


def _value(node: ast.expr, lookup: Callable[[str], Number]) -> Number:
    """Compute a parsed expression; `lookup` gives the numbers of its names. Raises ValueError."""
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return lookup(ast.unparse(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inside = _value(node.operand, lookup)
        return -inside if isinstance(node.op, ast.USub) else inside
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = _value(node.left, lookup)
        right = _value(node.right, lookup)
        if isinstance(node.op, ast.Pow) and (abs(right) > MAX_POWER or abs(left) > 1e9):
            raise ValueError("the power is too large")
        return _number(_BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
    ):
        if node.keywords or not node.args:
            raise ValueError(f"{node.func.id} takes numbers")
        values = [_value(argument, lookup) for argument in node.args]
        return _number(_FUNCTIONS[node.func.id](values))
    raise ValueError(
        f"`{ast.unparse(node)}` is not arithmetic; there are + - * / // % **, min, max, numbers and"
        " names"
    )


def _number(value: Any) -> Number:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    is_too_large = value.bit_length() > MAX_BITS if isinstance(value, int) else math.isinf(value)
    if is_too_large:
        raise ValueError("the result is too large")
    return value


def resolve(tree: Node) -> Node:
    """Return the tree with the value of each `Calc` in its place.

    Raises UsageError: an expression is not arithmetic, has an unknown name, or refers to itself.
    """
    return _Resolver(tree).resolved(tree, ())


class _Resolver:
    def __init__(self, tree: Node) -> None:
        self.tree = tree
        # the expressions being evaluated, to find those that refer to themselves
        self.busy: list[Path] = []

    def resolved(self, node: Node, path: Path) -> Node:
        """Return a copy of a tree in which each calculation is replaced by its number."""
        if isinstance(node.value, dict):
            return Node(
                {key: self.resolved(child, (*path, key)) for key, child in node.value.items()},
                node.origin,
            )
        if isinstance(node.value, list):
            return Node(
                [self.resolved(child, (*path, i)) for i, child in enumerate(node.value)],
                node.origin,
            )
        if isinstance(node.value, Calc):
            return Node(self.number(node, path), node.origin)
        return node

    def number(self, node: Node, path: Path) -> Number:
        """Return the number at a path of the tree, computed if it is an expression.

        Raises UsageError.
        """
        if not isinstance(node.value, Calc):
            return _number(node.value)
        if path in self.busy:
            fix = "give one of its names a number"
            raise UsageError(
                f'!calc "{node.value.expression}" refers to itself', where=str(node.origin), fix=fix
            )
        self.busy.append(path)
        try:
            variables = node.value.variables
            return evaluate(node.value.expression, lambda name: self.lookup(name, path, variables))
        except ValueError as error:
            fix = "names, numbers and + - * / // % ** with parentheses make an expression"
            raise UsageError(
                f'!calc "{node.value.expression}": {error}', where=str(node.origin), fix=fix
            ) from None
        finally:
            self.busy.pop()

    def lookup(self, name: str, path: Path, variables: Mapping[str, Any]) -> Number:
        """Return the number that a name stands for. Raises ValueError: the name is ambiguous.

        Looked at are, in this order: the keys beside the expression, the template's variables, the
        name as a dotted path, any key of that name, and the default of the schema.
        """
        parts = tuple(name.split("."))
        beside = (*path[:-1], *parts)
        if beside != path and self.tree.has(beside):
            return self.number(self.tree.find(beside), beside)
        if name in variables:
            return _number(variables[name])
        if parts != path and self.tree.has(parts):
            return self.number(self.tree.find(parts), parts)
        if len(parts) == 1:
            named = [
                p
                for p, _ in self.tree.walk()
                if p and p[-1] == name and p != path and self.tree.has(p)
            ]
            if len(named) == 1:
                return self.number(self.tree.find(named[0]), named[0])
            if len(named) > 1:
                options = " or ".join(".".join(map(str, p)) for p in named)
                raise ValueError(f"{name!r} could be {options}; write the whole name")
        ours = foreign_key(name) if len(parts) == 1 else None
        if ours is not None and ours not in (name, ".".join(map(str, path))):
            return self.lookup(ours, path, variables)
        return self.default(name)

    def default(self, name: str) -> Number:
        """Return the default of a key that a calculation names and no file sets."""
        from lockstep.config.keys import all_keys, keys_named, near_keys

        keys = [name] if name in all_keys() else keys_named(name)
        if len(keys) == 1 and all_keys()[keys[0]].default is None:
            raise ValueError(f"{keys[0]} is not set")
        if len(keys) == 1:
            return _number(all_keys()[keys[0]].default)
        near = near_keys(name, "")
        raise ValueError(
            f"no key is named {name!r}" + (f"; did you mean {near[0]}?" if near else "")
        )
