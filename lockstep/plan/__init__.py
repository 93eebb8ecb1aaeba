"""What a run will need, before it runs: memory, time, and which layout is best.

rehearsal, stages    one rank's step on tensors that hold nothing → live bytes by kind, and costs of operations
tracker, hooks       who counts them, and who says what they are for
hardware, network    what GPUs and links can do → seconds
timeline, steptime   a step as tasks on streams → step time, exposed communication, bubble
candidates, report   all layouts of a config on a cluster, ranked
goodput              failures and checkpoints of long runs
resources            without a config: from the number of parameters
"""

from lockstep.plan.resources import Resources, calculate_resources

__all__ = ["Resources", "calculate_resources"]
