"""Rules of the house that no linter knows."""

import ast
import re
import tomllib

from tests.fields import OF_LIBRARIES, assignments
from tests.house import PACKAGE, circles, classes, files, nodes, tree
from tests.private_names import found_in
from tests.ranks import REPOSITORY

_STRATEGIES = re.compile(r"""["'](single|dp|ddp|fsdp|accelerate|diloco)["']""")
_NO_SENTENCE = re.compile(
    r"(Of|What|Whether|Who|Whom|Whose|Which|How|Where|When|While|Why|Since|Until|So|As|For|In|From|Before|After|By|If|It"
    r"|The|A|An|All|Its|Their|There) "
)
_OWN_FILES = {
    *(f"parallel/replicas/{name}.py" for name in ("single", "data_parallel", "ddp", "accelerate")),
    "parallel/fsdp/sharding.py",
    "parallel/diloco/strategy.py",
}


# A promised method (docs/reference/python.md) that does what a function above its class does.
_CALLS_UPWARDS = {
    # Config.from_file, Config.replaced, Config.to_yaml
    ("lockstep.config.schema", "lockstep.config.loading"),
}
# Imports for types alone. The list may only become shorter.
_TYPED_UPWARDS = {
    ("lockstep.strategy", "lockstep.config"),
    ("lockstep.strategy", "lockstep.parallel.axes.axis"),
    ("lockstep.parallel.parallel_model", "lockstep.parallel.diloco.workers"),
    ("lockstep.parallel.parallel_model", "lockstep.parallel.loss_weights"),
}


def test_no_files_import_each_other_in_a_circle_not_in_functions_and_not_for_types() -> None:
    known = _CALLS_UPWARDS | _TYPED_UPWARDS
    assert circles(known) == []
    for edge in known:
        assert circles(known - {edge}), f"{edge} makes no circle: take it off the list"


_ASSIGNED = REPOSITORY / "tests" / "field_exceptions.txt"


def test_a_field_is_assigned_in_the_module_of_its_class_alone() -> None:
    """Who else wants it changed calls a method, or passes an argument (`tests/fields.py`)."""
    assigned = [(one, one.field.rpartition(".")[2]) for one in assignments()]
    of_libraries = {
        (one.module, name) for one, name in assigned if name in OF_LIBRARIES.get(one.module, ())
    }
    gone = {(module, name) for module, names in OF_LIBRARIES.items() for name in names}
    assert not gone - of_libraries, "take what is gone out of OF_LIBRARIES"
    found = {
        f"{one.module} {one.field}": one.line
        for one, name in assigned
        if (one.module, name) not in of_libraries
    }
    listed = set(_ASSIGNED.read_text().splitlines())
    new = {f"{name}, line {line}" for name, line in found.items() if name not in listed}
    assert not new, "fields of a class are assigned in another module than its own"
    assert not listed - found.keys(), "take what is gone off tests/field_exceptions.txt"


def test_a_strategy_is_named_in_its_own_file_and_in_the_tables_alone() -> None:
    """The registry has those that ship, `strategy.py` and `layout.py` defaults, `names*` those of
    other trainers.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).as_posix() in _OWN_FILES
        table = path.parent.name == "config" and path.stem.startswith("names")
        if own or table or path.name in ("registry.py", "strategy.py", "layout.py"):
            continue
        for number, line in enumerate(_code(path.read_text()).splitlines(), start=1):
            if _STRATEGIES.search(line):
                found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_docstring_of_a_function_begins_with_what_it_does() -> None:
    """`D401` knows some verbs that are not imperative; this knows the words with which no sentence
    of a verb begins.
    """
    found = []
    for module, path in files().items():
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
                first_line = (ast.get_docstring(node) or "").partition("\n")[0]
                if _NO_SENTENCE.match(first_line):
                    found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {first_line}")
    assert not found, "\n".join(found)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_private_names_of_torch_are_in_torch_compat_alone() -> None:
    found = [
        f"{files()[module].relative_to(REPOSITORY)}:{line}: {what}"
        for module in files()
        if not module.startswith("lockstep.torch_compat")
        for line, what in found_in(module)
    ]
    assert not found, "\n".join(found)


def test_each_file_of_torch_compat_has_a_test_that_watches_it() -> None:
    parts = {
        module.rpartition(".")[2]
        for module in files()
        if module.startswith("lockstep.torch_compat.")
    }
    tests = {
        path.stem.removeprefix("test_")
        for path in (REPOSITORY / "tests/torch_compat").glob("test_*.py")
    }
    assert parts == tests
    for module in files():
        if module.startswith("lockstep.torch_compat."):
            text = " ".join((ast.get_docstring(tree(module)) or "").split())
            assert all(
                part in text for part in ("Public torch: ", "Seen to work: ", "When gone: ")
            ), module


def test_names_of_classes_are_unique() -> None:
    assert not {name: modules for name, modules in classes().items() if len(modules) > 1}


def _code(text: str) -> str:
    """The text without docstrings, whose lines stay, empty."""
    return re.sub(r'"""(.*?)"""', lambda match: "\n" * match[1].count("\n"), text, flags=re.DOTALL)


def test_no_component_below_the_trainer_is_given_the_whole_config() -> None:
    """It gets a section, a plain value, or `StepConfig`, on which a step depends. `config/` itself
    is left out.
    """
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    rooms = {room.strip(" ()") for layer in contract["layers"] for room in re.split(r"[|:]", layer)}
    first = contract["layers"].index("trainer")
    above = {
        room.strip(" ()")
        for layer in contract["layers"][: first + 1]
        for room in re.split(r"[|:]", layer)
    }
    below = rooms - above - {"config"}
    assert {"parallel", "checkpoint", "strategy", "data", "monitor"} <= below
    found = [
        f"{files()[module].relative_to(REPOSITORY)}:{node.lineno}"
        for module in files()
        if module.split(".")[1:2] and module.split(".")[1] in below
        for node in nodes(module)
        for annotation in _annotations(node)
        if re.search(r"\bConfig\b", ast.unparse(annotation))
    ]
    assert not found, "\n".join(found)


def _annotations(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.returns] if node.returns is not None else []
    if isinstance(node, ast.arg | ast.AnnAssign):
        return [node.annotation] if node.annotation is not None else []
    return []


def test_all_warnings_have_one_form() -> None:
    """Python writes the kind of warning before those of `warnings`; those that are logged begin
    with the word.
    """
    found = []
    calls = 0
    for module, path in files().items():
        for node in nodes(module):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = ast.unparse(node.func)
            text = _beginning(node.args[0])
            is_logged = called.endswith(".warning") and "log" in called.lower()
            if not is_logged and called not in ("warnings.warn", "warn_at_caller"):
                continue
            calls += 1
            if text.startswith("warning: ") != is_logged:
                found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {called}({text!r} …")
    assert not found, "\n".join(found)
    assert calls > 40


def _beginning(text: ast.expr) -> str:
    """Return the constant text with which an argument begins; nothing if it is computed."""
    first = text.values[0] if isinstance(text, ast.JoinedStr) and text.values else text
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
