"""Pipeline parallelism: segments of the model form stages, and micro-batches run through them.

Nothing is imported here: torch's pipelining loads its compiler, which takes seconds.
"""
