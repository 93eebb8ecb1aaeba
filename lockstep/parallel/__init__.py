"""Places a model on ranks: `place.py` lists the steps in order; each strategy has its file."""
