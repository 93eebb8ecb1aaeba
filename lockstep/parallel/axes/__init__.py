"""Axes whose ranks run the same micro-batches, or parts of them: each has a file and a class."""
