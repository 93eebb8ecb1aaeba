"""How a model is laid over ranks: `place.py` is the ordered list, and each strategy is one file beside it."""
