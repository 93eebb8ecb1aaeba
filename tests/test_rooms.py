"""Tests are found: each source file has some, and each test file belongs to a source file.

Those that test the repository itself are listed below.
"""

import pytest

from tests.house import PACKAGE
from tests.ranks import REPOSITORY
from tests.rooms import TESTS, named_in, of_its_name, of_room, sources

# These do not test a file of the package: they test pages, the rules of the house, and the tests.
_OF_THE_REPOSITORY = {
    "docs/test_daily.py",
    "docs/test_glossary.py",
    "docs/test_sentences.py",
    "docs/test_site.py",
    "docs/test_snippets.py",
    "faults/test_table.py",
    "test_advice.py",
    "test_benchmarks_page.py",
    "test_contributing.py",
    "test_house.py",
    "test_leftovers.py",
    "test_line_rules.py",
    "test_readme.py",
    "test_rooms.py",
}


def test_each_source_file_has_tests_of_its_name_or_names_them() -> None:
    without = [
        str(source.relative_to(REPOSITORY))
        for source in sources()
        if not of_its_name(source) and not named_in(source)
    ]
    assert not without, (
        "add a last paragraph to the docstring of the module, such as"
        f" 'Tests: tests/parity/test_tensor.py': {without}"
    )


def test_each_test_file_that_is_named_exists() -> None:
    missing = [
        f"{source.relative_to(REPOSITORY)}: {test.relative_to(REPOSITORY)}"
        for source in sources()
        for test in named_in(source)
        if not (test.is_file() and test.name.startswith("test_") and test.is_relative_to(TESTS))
    ]
    assert not missing, missing


def test_each_test_file_belongs_to_a_source_file() -> None:
    """So a failure leads to the code, and `make room` leaves no test of the room out."""
    found = {test for source in sources() for test in (*of_its_name(source), *named_in(source))}
    lost = {str(test.relative_to(TESTS)) for test in TESTS.rglob("test_*.py") if test not in found}
    assert lost == _OF_THE_REPOSITORY


def test_a_room_has_its_folder_and_the_parity_cases_that_its_files_name() -> None:
    rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in sources()}
    assert {"checkpoint", "parallel", "step"} <= rooms
    assert all(of_room(room) for room in rooms)
    parallel = of_room("parallel")
    assert TESTS / "parallel" in parallel
    assert TESTS / "parity/test_tensor.py" in parallel
    assert TESTS / "parity/test_elementwise.py" in of_room("step")
    with pytest.raises(SystemExit, match="there is no room lockstep/stpe"):
        of_room("stpe")
