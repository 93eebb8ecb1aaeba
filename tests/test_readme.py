"""What the README claims about the tree is true."""

import re
from pathlib import Path

from tests.parity.table import in_readme

REPOSITORY = Path(__file__).parent.parent


def test_the_tree_in_the_readme_is_the_tree() -> None:
    """Each module and package of `lockstep/` is in the tree, and each name in the tree exists."""
    text = (REPOSITORY / "README.md").read_text()
    block = re.search(r"```\nlockstep/\n(.*?)```", text, re.DOTALL)
    assert block is not None
    named = {line.split()[0].rstrip("/") for line in block[1].splitlines() if re.match(r"  \S", line)}
    package = REPOSITORY / "lockstep"
    there = {p.name for p in package.iterdir() if not p.name.startswith(("_", ".")) and p.suffix in ("", ".py")}
    there = {name for name in there if (package / name).is_file() or any((package / name).glob("*.py"))}
    assert named == there | {"__init__.py"}


def test_the_table_of_strategies_is_what_the_parity_tests_run() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert text == in_readme(text), "python -m tests.parity.table --write"
