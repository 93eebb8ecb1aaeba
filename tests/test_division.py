"""Quotients that are rounded up."""

import pytest

from lockstep.division import ceil_div, round_up


@pytest.mark.parametrize(
    ("dividend", "divisor", "quotient"),
    [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (-5, 4, -1), (2**60 + 1, 2, 2**59 + 1)],
)
def test_a_quotient_is_rounded_up(dividend: int, divisor: int, quotient: int) -> None:
    assert ceil_div(dividend, divisor) == quotient


@pytest.mark.parametrize(("number", "multiple"), [(0, 0), (7, 10), (10, 10)])
def test_a_number_is_rounded_up_to_a_multiple(number: int, multiple: int) -> None:
    assert round_up(number, 5) == multiple
