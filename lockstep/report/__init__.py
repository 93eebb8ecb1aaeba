"""Implements `lockstep report RUN`: shows a run in one self-contained HTML page.

Nothing here imports torch.
"""
