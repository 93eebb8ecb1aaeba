"""Which tests test which file of the package: by name, or by a line `Tests:` in its docstring.

`lockstep/checkpoint/keep.py` has `tests/checkpoint/test_keep.py`, and `parallel/fsdp/order.py` has
`tests/parallel/fsdp/test_fsdp_order.py`. A file without a test of its name says in the docstring of
its module which files of tests hold it, as the last paragraph:

    Tests: tests/parity/test_context.py, tests/models/test_documents.py

`python -m tests.rooms checkpoint` prints what `make room ROOM=checkpoint` runs: the room's folder
of tests, and all that its files name.
"""

import ast
import re
import sys
from pathlib import Path

from tests.house import PACKAGE, parsed
from tests.ranks import REPOSITORY

TESTS = REPOSITORY / "tests"
_NAMED = re.compile(r"^Tests: (.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)


def sources() -> list[Path]:
    """Return the files of the package that contain more than a docstring."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if len(parsed(path).body) > 1]


def of_its_name(source: Path) -> list[Path]:
    """Return the test files that have a source file's name, in the folder of its room or below."""
    inside = source.relative_to(PACKAGE)
    stem = inside.parent.name if inside.name == "__init__.py" else inside.stem
    if len(inside.parts) == 1:
        return sorted(TESTS.glob(f"test_{stem}.py"))
    folder = TESTS / inside.parts[0]
    names = (f"test_{stem}.py", f"test_{inside.parent.name}_{stem}.py")
    return sorted(path for name in names for path in folder.rglob(name))


def named_in(source: Path) -> list[Path]:
    """Return the test files that a source file's docstring names."""
    match = _NAMED.search(ast.get_docstring(parsed(source)) or "")
    if match is None:
        return []
    return [REPOSITORY / name for name in re.split(r",\s+", match[1].strip())]


def of_room(room: str) -> list[Path]:
    """Return a room's folder of tests, and the test files elsewhere that its files have.

    Args:
        room: a package or a module of `lockstep/`, such as `checkpoint` or `step`.
    """
    files = [
        path for path in sources() if path.relative_to(PACKAGE).with_suffix("").parts[0] == room
    ]
    if not files:
        raise SystemExit(f"there is no room lockstep/{room}: write ROOM=checkpoint, for instance")
    folder = TESTS / room
    found = {test for path in files for test in (*of_its_name(path), *named_in(path))}
    elsewhere = sorted(test for test in found if not test.is_relative_to(folder))
    return ([folder] if folder.is_dir() else []) + elsewhere


if __name__ == "__main__":
    print(*(path.relative_to(REPOSITORY) for path in of_room(sys.argv[1])))
