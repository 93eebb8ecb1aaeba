"""Pipeline parallelism: the model's segments are cut into stages, and micro-batches run through them.

    survey of the unsplit model → plan → each rank keeps its stages → shard or replicate → torch's schedule

`strategy.py` has the strategy; `place.py` places a model. Nothing is imported here: torch's pipelining loads its
compiler, which takes seconds.
"""
