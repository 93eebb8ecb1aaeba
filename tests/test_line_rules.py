"""The rules of lines hold: no file breaks one more often than `line_exceptions.txt`
still allows.
"""

from pathlib import Path

import pytest

from tests.line_rules import allowed, breaches, counted, found, write

_SWEPT = ("cli", "config", "costs", "data", "diagnose", "launch", "report", "submit")


def test_no_file_breaks_a_rule_more_often_than_is_listed() -> None:
    there = found()
    limits = allowed()
    worse = {key for key, count in counted(there).items() if count > limits.get(key, 0)}
    lines = [
        f"{path}:{breach.line} {breach.rule} (listed: {limits.get((path, breach.rule), 0)})"
        for path, each in there.items()
        for breach in each
        if (path, breach.rule) in worse
    ]
    assert not worse, "tests/line_rules.py says what is meant:\n" + "\n".join(lines)


def test_the_list_has_no_room_that_keeps_the_rules() -> None:
    again = [
        path
        for path, _ in allowed()
        if path.startswith(tuple(f"lockstep/{room}/" for room in _SWEPT))
    ]
    assert not again


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("a, b = 1, 2", ["packed"]),
        ("self.a, self.b = a, b", ["packed"]),
        ("[a, b] = [1, 2]", ["packed"]),
        ("a, b = b, a", []),
        ("a, b = b, a + b", []),
        ("a, b = a + 1, b + 1", ["packed"]),
        ("a, b = call()", []),
        ("a, *b = 1, 2, 3", []),
        ("a = 1, 2", []),
        ("x = [1,  2]  # fmt: skip", ["skipped"]),
        ("x = '# fmt: skip'", []),
        ("if (a := f()) and a > 1: pass", ["walrus"]),
        ("while x and (a := f()): pass", ["walrus"]),
        ("y = [a for x in z if x and (a := f(x) or 1)]", ["walrus"]),
        ("if (a := f()) is not None: pass", []),
        ("if a and f(lambda: b): pass", []),
        ("x = 1 if a else 2 if b else 3", ["nested"]),
        ("x = (1 if a else 2) if b else 3", ["nested"]),
        ("x = 1 if (a if b else c) else 2", ["nested"]),
        ("if a if b else c: pass", ["nested"]),
        ("while a if b else c: pass", ["nested"]),
        ("x = 1 if a else f(2 if b else 3)", []),
        ("if x or (a if b else c): pass", []),
        ("def f():" + "\n    a = 1" * 10, []),
        ("def f():" + "\n    a = 1" * 11, ["undocumented"]),
        ('def f():\n    """Do it."""' + "\n    a = 1" * 11, []),
        ("def __init__():" + "\n    a = 1" * 11, []),
    ],
)
def test_what_breaks_a_rule(line: str, rules: list[str]) -> None:
    assert [breach.rule for breach in breaches(line + "\n")] == rules


def test_counts_only_fall(tmp_path: Path) -> None:
    """`--write` refuses higher numbers: a rule is not relaxed by running a program."""
    listed = tmp_path / "listed.txt"
    listed.write_text("a.py packed 2\nb.py walrus 1\n")
    write({("c.py", "packed"): 1}, listed)
    assert listed.read_text() == "c.py packed 1\n"
    for more in (
        {("c.py", "packed"): 2},
        {("c.py", "walrus"): 1},
        {("a.py", "packed"): 1, ("c.py", "packed"): 1},
    ):
        with pytest.raises(SystemExit, match="higher than before"):
            write(more, listed)
    assert listed.read_text() == "c.py packed 1\n"
