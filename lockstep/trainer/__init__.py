"""Trains models: `Trainer` for Python, `run` for a config."""

from lockstep.trainer.run import run
from lockstep.trainer.trainer import Trainer

__all__ = ["Trainer", "run"]
