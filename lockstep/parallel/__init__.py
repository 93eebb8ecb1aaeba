"""Places a model on ranks: `place.py` is the ordered list of steps, and each strategy is one file beside it."""
