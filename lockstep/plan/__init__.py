"""Predicts a run's memory and time, and which layout is best.

rehearsal, stages    one rank's step on fake tensors → live bytes by kind, and costs of operations
tracker              counts them, and marks the passes and blocks of a step
candidates           all layouts of a config on a cluster, ranked
command, auto        `lockstep plan`, and `strategy: auto`
segments             equal stages of a pipeline, measured
resources            without a config: from the number of parameters
"""

from lockstep.plan.resources import Resources, calculate_resources

__all__ = ["Resources", "calculate_resources"]
