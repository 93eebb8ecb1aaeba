"""Computes the costs of steps without torch.

These are devices and links, collectives over them, and tasks on streams.
"""
