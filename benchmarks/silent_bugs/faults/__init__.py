"""Faults and sound models for `lockstep verify`; each function builds one, in every process.

`FAULTS` says for each fault what its cause must name, `SOUND` lists models that must pass. Where a
fault is planted on one rank, that is rank 1; the process that is the reference is rank 0 of 1.
"""

from benchmarks.silent_bugs.faults import (
    axes,
    data,
    forward,
    gradients,
    held_out_faults,
    held_out_mixed,
    held_out_sound,
    memory,
    sound,
    sound_kinds,
    update,
)
from benchmarks.silent_bugs.faults.registry import FAULTS, SOUND, Fault

__all__ = [
    "FAULTS",
    "SOUND",
    "Fault",
    "axes",
    "data",
    "forward",
    "gradients",
    "held_out_faults",
    "held_out_mixed",
    "held_out_sound",
    "memory",
    "sound",
    "sound_kinds",
    "update",
]
