"""Faults that change training without an error, planted to see whether `lockstep verify` finds
them.
"""
