"""Strategies whose ranks hold the whole model, and the guard against replicas that drift."""
