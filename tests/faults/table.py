"""The table of faults: what the tests that carry the marker `fault` promise. `python -m tests.faults.table` writes it.

A test says `@pytest.mark.fault(name, what_happens, promise)`, in literals; a name is "kind: fault".
"""

import ast
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "faults.md"
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
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.fault(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                found += [_row(path, node.name, mark) for mark in node.decorator_list if _is_fault(mark)]
    kinds = list(KINDS)
    return sorted(found, key=lambda fault: (kinds.index(fault.kind), fault.test, fault.name))


def _is_fault(mark: ast.expr) -> bool:
    return isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault"


def _row(path: Path, test: str, mark: ast.expr) -> Fault:
    assert isinstance(mark, ast.Call)
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
