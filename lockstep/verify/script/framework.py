"""Finds out whose training loop a script has."""

import sys

from lockstep.verify.script.record import ACCELERATE, DEEPSPEED, FABRIC, LIGHTNING, LOCKSTEP, TORCH, TRANSFORMERS

# Whose code calls the optimizer, by the names of modules; the first that calls it, if several do.
_FRAMEWORKS = {
    "transformers.trainer": TRANSFORMERS, "lightning.pytorch": LIGHTNING, "pytorch_lightning": LIGHTNING,
    "lightning.fabric": FABRIC, "lightning_fabric": FABRIC, "deepspeed": DEEPSPEED, "accelerate.optimizer": ACCELERATE,
    "lockstep.trainer": LOCKSTEP,
}  # fmt: skip


def calling_framework() -> str:
    """Return whose code calls the optimizer."""
    frame, found = sys._getframe(), set()
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        found |= {name for start, name in _FRAMEWORKS.items() if module == start or module.startswith(start + ".")}
    return next((name for name in _FRAMEWORKS.values() if name in found), TORCH)
