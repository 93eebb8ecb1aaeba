"""What a process that a command starts is to be: a rank, the only one, or the launcher of ranks.

Tests: tests/cli/test_cli.py, tests/launch/test_local.py, tests/launch/test_torchrun.py
"""

import os
import socket

from lockstep.launch.options import LaunchOptions
from lockstep.machine.environment import rank_facts


def is_rank(options: LaunchOptions) -> bool:
    """Return whether this process is a rank itself."""
    # srun and mpirun start either ranks or one launcher per machine: options that only a launcher
    # needs show which.
    starts_ranks = options.nproc_per_node is not None or options.several_nodes
    if starts_ranks and ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        return False  # a job script exports only one of them; started ranks get both
    launcher = rank_facts().launcher
    return launcher == "torchrun" or (launcher != "none" and not starts_ranks)


def in_this_process(processes: int, options: LaunchOptions) -> bool:
    """Return whether to run without a launcher: one process, and no option asks for a launcher."""
    return (
        processes == 1
        and options.nproc_per_node is None
        and not options.several_nodes
        and not options.max_restarts
    )


def prepare(options: LaunchOptions, *, may_be_alone: bool, compiles: bool = False) -> str | None:
    """Make forks of this process possible, before it looks for devices, if it starts ranks.

    Return why ranks must be fresh processes ("": it is not worth a line), or None.

    Args:
        may_be_alone: whether a command that names no number of ranks trains in this process.
        compiles: whether ranks will use torch's compiler.
    """
    if options.fresh_processes:
        return ""
    if may_be_alone and in_this_process(1, options):
        return None
    from lockstep.prepared import fork_server

    return fork_server.split_off(compiles=compiles)


def describe_processes(processes: int, options: LaunchOptions) -> str:
    """Return the number of processes in words, and where they are."""
    on_one = f"{processes} process{'es' * (processes != 1)}"
    several = f" on this machine ({socket.gethostname()}), {options.nnodes} machines"
    return on_one + several * options.several_nodes
