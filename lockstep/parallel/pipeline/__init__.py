"""Pipeline parallelism: the model's segments are cut into stages, and micro-batches run through them.

Nothing is imported here: torch's pipelining loads its compiler, which takes seconds.
"""
