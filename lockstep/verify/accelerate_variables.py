"""Gives ranks that are started without `accelerate launch` the variables that it would give them.

Accelerate's own parser and functions make them, so that what a version of it writes is right.

Tests: tests/verify/test_launchers.py
"""

import os
from collections.abc import Sequence

# What the start of ranks sets by itself; threads are counted when torch is loaded.
_OF_THE_START = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def accelerate_variables(options: Sequence[str], ranks: int) -> dict[str, str]:
    """Return the variables by which `accelerate launch` tells a script its options.

    Args:
        options: of `accelerate launch`, but those for the number of ranks.
        ranks: their number.
    """
    import torch
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = [*options, "--num_processes", str(ranks), "train.py"]
    arguments = launch.launch_command_parser().parse_args(words)
    unsaid = {
        "debug": False,
        "dynamo_backend": "no",
        "mixed_precision": "no",
        "num_cpu_threads_per_process": 1,
        "num_machines": 1,
        # Where there is no accelerator, its ranks share out nothing unless they are told so.
        "use_cpu": arguments.cpu or not torch.accelerator.is_available(),
    }
    for name, value in unsaid.items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, value)
    _, environment = prepare_simple_launcher_cmd_env(arguments)
    return {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value and name not in _OF_THE_START
    }
