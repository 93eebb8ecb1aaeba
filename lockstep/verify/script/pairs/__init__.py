"""Compares two scripts, A and B, that should be the same training, or are meant to differ.

Runs, records and their comparison are those of a script and one process.

    pair.py           both runs, their first difference, and its cause
    differences.py    what is other in B beside what it computes
    given.py          what B is given of A
    losses.py         of two trainings that are meant to differ
"""
