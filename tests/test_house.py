"""Rules of the house that no linter knows."""

import re

from tests.house import PACKAGE, circles
from tests.ranks import REPOSITORY

_STRATEGIES = re.compile(r"""["'](single|dp|ddp|fsdp|accelerate|diloco)["']""")
_OWN_FILES = {"single", "data_parallel", "ddp", "fsdp", "accelerate", "diloco"}  # under parallel/


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles() == []


def test_a_strategy_is_named_in_its_own_file_and_in_the_tables_alone() -> None:
    """The registry has those that ship, `strategy.py` and `layout.py` defaults, `names*` those of other trainers."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.parent.name == "parallel" and path.stem in _OWN_FILES
        table = path.parent.name == "config" and path.stem.startswith("names")
        if own or table or path.name in ("registry.py", "strategy.py", "layout.py"):
            continue
        for number, line in enumerate(_code(path.read_text()).splitlines(), start=1):
            if _STRATEGIES.search(line):
                found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def _code(text: str) -> str:
    """The text without docstrings, whose lines stay, empty."""
    return re.sub(r'"""(.*?)"""', lambda match: "\n" * match[1].count("\n"), text, flags=re.DOTALL)
