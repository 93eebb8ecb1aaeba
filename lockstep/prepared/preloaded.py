"""Imported last by a server of `multiprocessing` whose forks are ranks: its imports stay.

Else each collection of garbage in each rank would look at a million objects of torch, and unshare
their memory: a quarter of the processor time of a verdict.

Tests: tests/launch/test_spawn.py
"""

import gc

gc.freeze()
