"""The table of faults: what the tests that carry the marker `fault` promise. `python -m
tests.faults.table` writes it.

A test says `@pytest.mark.fault(name, what_happens, promise)`, in literals; a name is "kind: fault".
In the same way `@pytest.mark.promise(words)` quotes what docs/security.md promises: the last
section of that page names the tests.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "faults.md"
SECURITY = TESTS.parent / "docs" / "security.md"
KEPT = "## Each promise and its test"
KINDS = {
    "process": "Processes",
    "hang": "Hangs",
    "storage": "Storage",
    "checkpoint": "Damaged checkpoints",
    "hostile": "Hostile checkpoints",
    "numbers": "Numbers",
    "data": "Data",
    "network": "Network",
    "configuration": "Configuration and command",
}
_INTRO = """# What can go wrong, and what happens then

Each row is kept by a test of the same meaning; this page is made from them by `python -m tests.faults.table`.

What a failure costs: the steps since the last committed checkpoint, which are trained again to the same bits, and the
time to notice, start, load and take the next step (measured in `benchmarks/results/recovery.md`). What is committed is
never lost: a checkpoint is whole or invisible, and the newest one goes only when a later one is proved.

Exit codes: 0 done · 1 the run failed · 2 the command or the config is wrong · 75 preempted and saved, start it again.
"""


@dataclass(frozen=True)
class Fault:
    """One row."""

    kind: str
    name: str
    what_happens: str
    promise: str
    test: str


def read_faults() -> list[Fault]:
    """All rows, in the order of the page."""
    found = [_row(path, test, mark) for path, test, mark in _marks("fault")]
    kinds = list(KINDS)
    return sorted(found, key=lambda fault: (kinds.index(fault.kind), fault.test, fault.name))


def read_promises() -> dict[str, list[str]]:
    """Words of the page of security → the tests that keep them, in the order of the page."""
    found: dict[str, list[str]] = {}
    for path, test, mark in _marks("promise"):
        found.setdefault(ast.literal_eval(mark.args[0]), []).append(
            f"{path.relative_to(TESTS.parent)}::{test}"
        )
    text = " ".join(security_text().split())
    return dict(sorted(found.items(), key=lambda pair: text.find(pair[0])))


def security_text() -> str:
    """The page of security, without the section that is made from the tests."""
    return SECURITY.read_text().partition(KEPT)[0]


def security_page() -> str:
    """The page of security, with that section."""
    rows = [
        f"| {words.replace('|', chr(92) + '|')} | {', '.join(f'`{test}`' for test in tests)} |"
        for words, tests in read_promises().items()
    ]
    made = "Made from the tests by `python -m tests.faults.table`."
    return (
        security_text()
        + "\n".join([KEPT, "", made, "", "| promise | test |", "|---|---|", *rows])
        + "\n"
    )


def _marks(name: str) -> Iterator[tuple[Path, str, ast.Call]]:
    """Each mark of this name: the file, the test, the call."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if f"mark.{name}(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{name}":
                    yield path, node.name, mark


def _row(path: Path, test: str, mark: ast.Call) -> Fault:
    name, what_happens, promise = (ast.literal_eval(argument) for argument in mark.args)
    kind, _, fault = name.partition(": ")
    assert kind in KINDS, f"{path}: {name}"
    return Fault(kind, fault, what_happens, promise, f"{path.relative_to(TESTS.parent)}::{test}")


def page(faults: list[Fault]) -> str:
    """The page in Markdown."""
    parts = [_INTRO]
    for kind, title in KINDS.items():
        rows = [fault for fault in faults if fault.kind == kind]
        lines = [f"| {f.name} | {f.what_happens} | {f.promise} | `{f.test}` |" for f in rows]
        header = ["| fault | what happens | what is promised | test |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *header, *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(read_faults()))
    print(f"{PAGE}: {len(read_faults())} faults")
    SECURITY.write_text(security_page())
    print(f"{SECURITY}: {len(read_promises())} promises")
