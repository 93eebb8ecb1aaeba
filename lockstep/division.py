"""Division of whole numbers that rounds up, exactly for numbers of any size.

Tests: tests/test_division.py
"""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up: 7 samples in batches of 3 are 3 batches.

    `math.ceil(dividend / divisor)` is wrong where a float can't hold the quotient, from 2**53 on.
    """
    return -(-dividend // divisor)


def round_up(number: int, divisor: int) -> int:
    """Return the least multiple of the divisor that is not below the number: 10 of 7 and 5."""
    return ceil_div(number, divisor) * divisor
