"""The page of faults is the table that the tests make."""

from tests.faults.table import PAGE, page, read_faults


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.faults.table` writes it."""
    assert PAGE.read_text() == page(read_faults())


def test_at_least_forty_faults_each_named_once() -> None:
    names = [f"{fault.kind}: {fault.name}" for fault in read_faults()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
