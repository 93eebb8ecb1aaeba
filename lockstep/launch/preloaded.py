"""Imported last by a server of `multiprocessing`, whose forks are ranks: what it has imported stays.

Else each collection of garbage in each rank looks at a million objects of torch, and unshares their
memory: a third of the processor time of a verdict.

Tests: tests/launch/test_spawn.py
"""

import gc

gc.freeze()
