"""Axes along which ranks run the same micro-batches, or parts of them together: a file and a class each."""
