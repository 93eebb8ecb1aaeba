"""Who assigns to the fields of the package's classes, read from the text; nothing is imported.

The type of what stands before the dot is followed through annotations, constructors and what
functions return. Where it can't be known, the field's name decides: it counts if classes of the
package alone are known to have such a field.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from tests.house import files, nodes, tree

# Fields of others (torch, the standard library) that classes of the package have, too.
_OF_OTHERS = {
    *("data", "device", "dtype", "forward", "grad", "name", "requires_grad", "shape", "training"),
    *("buffer", "bias", "weight", "sampler", "optimizer", "epilog", "tensor", "seed", "module"),
    *("closed", "process", "text", "args", "state", "order"),
}
# Fields that are assigned to objects of libraries, whose class the text does not show: module →
# names. They are looked at one by one, and a test sees to it that each is still assigned.
OF_LIBRARIES = {
    "lockstep.cli.arguments": {"default", "help"},  # argparse's actions
    "lockstep.models.hf": {"vocab_size"},  # a config of transformers
    "lockstep.models.hf_causal": {"attend"},  # layers of transformers
    "lockstep.models.hf_layers": {"config"},  # layers of transformers
    "lockstep.models.observed": {"target"},  # nodes of torch.fx
    "lockstep.monitor.exporters": {"width"},  # a message of TensorBoard's protocol
    "lockstep.plan.candidates": {"value"},  # multiprocessing's, shared by processes
    "lockstep.torch_compat.elastic_agent": {"close"},  # processes of torch's agent
    "lockstep.torch_compat.work_wait": {"wait"},  # torch.distributed.Work
}
_ANY = {"Any", "object", "Module", "Self", "T"}  # annotations that leave the class open
_FOREIGN = ""  # the class of something that no class of the package is
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Assignment(NamedTuple):
    """A field that is assigned outside of the module of its class."""

    module: str
    field: str  # Class.field, or ?.field where the class is not known
    line: int


@dataclass
class _Class:
    module: str
    bases: list[str]
    fields: dict[str, str | None] = field(default_factory=dict)  # name → class of the package
    methods: dict[str, str | None] = field(default_factory=dict)  # name → class that it returns


def assignments() -> list[Assignment]:
    """All assignments to fields of a class of the package outside of the class's module."""
    found = []
    for module in files():
        for scope, body in _functions(tree(module)):
            variables = _variables(scope, body)
            for target, line in _targets(body):
                name = _owner(target, variables, module)
                if name is not None:
                    found.append(Assignment(module, f"{name}.{target.attr}", line))
    return found


def _owner(target: ast.Attribute, variables: Mapping[str, str | None], module: str) -> str | None:
    """The class in another module whose field this is; "?" if it is one of several."""
    # `ctx` is a node of torch's graph, in which an autograd function keeps what it likes.
    if isinstance(target.value, ast.Name) and target.value.id in ("self", "cls", "ctx"):
        return None
    known = _type_of(target.value, variables)
    if known == _FOREIGN:
        return None
    if known is not None:
        lineage = list(_lineage(known))
        with_it = [name for name in lineage if target.attr in _classes()[name].fields]
        homes = {_classes()[name].module for name in with_it or lineage}
        return None if module in homes else (with_it or lineage)[0]
    having = [name for name, found in _classes().items() if target.attr in found.fields]
    if not having or target.attr in _OF_OTHERS:
        return None
    if any(_classes()[name].module == module for name in having):
        return None
    return having[0] if len(having) == 1 else "?"


@cache
def _classes() -> dict[str, _Class]:
    """Class name → what is known of it. Names of classes are unique, which a test holds."""
    found: dict[str, _Class] = {}
    defined = []
    for module in files():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                found[node.name] = _Class(module, bases)
                defined.append(node)
    for node in defined:
        _read(node, found)
    return found


def _read(node: ast.ClassDef, known: Mapping[str, _Class]) -> None:
    own = known[node.name]
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            own.fields[inner.target.id] = _named(inner.annotation, known)
        elif isinstance(inner, _Function):
            returned = _named(inner.returns, known)
            if any("property" in ast.unparse(one) for one in inner.decorator_list):
                own.fields[inner.name] = returned
            else:
                own.methods[inner.name] = returned
            arguments = {one.arg: _named(one.annotation, known) for one in _arguments(inner)}
            for target, value in _pairs(inner):
                if _is_of_self(target):
                    kind = None
                    if isinstance(value, ast.Name):
                        kind = arguments.get(value.id)
                    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                        kind = value.func.id if value.func.id in known else None
                    own.fields[target.attr] = own.fields.get(target.attr) or kind
            for statement in ast.walk(inner):
                if isinstance(statement, ast.AnnAssign) and _is_of_self(statement.target):
                    assert isinstance(statement.target, ast.Attribute)
                    own.fields[statement.target.attr] = _named(statement.annotation, known)


def _is_of_self(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def _named(annotation: ast.expr | None, known: Mapping[str, _Class]) -> str | None:
    """The class of the package that an annotation names, beside None; not the items of a list.

    None: it leaves the class open.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if annotation is None or isinstance(annotation, ast.Constant):
        return None
    if isinstance(annotation, ast.BinOp):
        return _named(annotation.left, known) or _named(annotation.right, known)
    name = ast.unparse(annotation).split("[")[0].split(".")[-1]
    if name in known:
        return name
    return None if name in _ANY else _FOREIGN


@cache
def _returned() -> dict[str, str | None]:
    """Name of a function outside of classes → the class that it returns; None if several differ."""
    found: dict[str, set[str | None]] = defaultdict(set)
    for module in files():
        for node in tree(module).body:
            if isinstance(node, _Function):
                found[node.name].add(_named(node.returns, _classes()))
    return {name: next(iter(kinds)) if len(kinds) == 1 else None for name, kinds in found.items()}


def _lineage(name: str) -> Iterator[str]:
    """A class and those of the package that it extends."""
    if name in _classes():
        yield name
        for base in _classes()[name].bases:
            yield from _lineage(base)


def _type_of(value: ast.expr, variables: Mapping[str, str | None]) -> str | None:
    if isinstance(value, ast.Name):
        return value.id if value.id in _classes() else variables.get(value.id)
    if isinstance(value, ast.Attribute):
        owner = _type_of(value.value, variables)
        for name in _lineage(owner) if owner is not None else ():
            if value.attr in _classes()[name].fields:
                return _classes()[name].fields[value.attr]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        called = value.func.id
        return called if called in _classes() else _returned().get(called)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        owner = _type_of(value.func.value, variables)
        for name in _lineage(owner) if owner is not None else ():
            if value.func.attr in _classes()[name].methods:
                return _classes()[name].methods[value.func.attr]
        if owner is None and value.func.attr in _classes():  # module.Class(…)
            return value.func.attr
    return None


_Scope = tuple[
    str | None, list[_Function]
]  # the class around it, and the functions, outermost first


def _functions(parsed: ast.Module) -> Iterator[tuple[_Scope, list[ast.stmt]]]:
    """Each function, and the module itself, with its own statements."""
    stack: list[tuple[_Scope, list[ast.stmt]]] = [((None, []), parsed.body)]
    while stack:
        (around, functions), body = stack.pop()
        yield (around, functions), body
        for node in _own(body):
            if isinstance(node, ast.ClassDef):
                stack.append(((node.name, functions), node.body))
            elif isinstance(node, _Function):
                stack.append(((around, [*functions, node]), node.body))


def _own(body: Sequence[ast.stmt]) -> list[ast.AST]:
    """Nodes of a body without those of the functions and classes in it, which come themselves."""
    return _own_of(tuple(body))


@cache
def _own_of(body: tuple[ast.AST, ...]) -> list[ast.AST]:
    """Return them in their order; those of a function are asked for once for each one in it."""
    found: list[ast.AST] = []
    waiting = list(reversed(body))
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.ClassDef | _Function):
            waiting += reversed(list(ast.iter_child_nodes(node)))
    return found


def _variables(scope: _Scope, body: list[ast.stmt]) -> dict[str, str | None]:
    around, functions = scope
    found: dict[str, str | None] = {"self": around, "cls": around}
    bodies = [function.body for function in functions] or [body]
    for function in functions:
        for argument in _arguments(function):
            if argument.arg not in ("self", "cls"):
                found[argument.arg] = _named(argument.annotation, _classes())
    for each in bodies:
        for node in _own(each):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = _named(node.annotation, _classes())
            elif isinstance(node, ast.Assign):
                for target, value in _pairs_of(node):
                    if isinstance(target, ast.Name):
                        found[target.id] = _type_of(value, found) or found.get(target.id)
    return found


def _arguments(function: _Function) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def _pairs(function: _Function) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target, value in _pairs_of(node):
                if isinstance(target, ast.Attribute):
                    yield target, value


def _pairs_of(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            for number, one in enumerate(target.elts):
                yield one, values[number] if number < len(values) else ast.Constant(None)
        else:
            yield target, node.value


def _targets(body: list[ast.stmt]) -> Iterator[tuple[ast.Attribute, int]]:
    """Attributes that are assigned, deleted, or set by `setattr` with a name."""
    for node in _own(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node, node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield ast.Attribute(node.args[0], name.value, ast.Store()), node.lineno
