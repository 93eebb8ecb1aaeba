"""Runs the passes of a step: one executor for every strategy, and what carries tensors."""
