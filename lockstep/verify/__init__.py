"""Prove with `lockstep verify` that every topology takes the same step.

It is proved on the user's own model and data.

    one process takes N steps and writes them to disk           (the reference)
    each topology takes them in its own launch, and compares    samples, loss, norm, gradients,
                                                                values, buffers
    where it differs: the step part by part                     the first module, gradient or sum
                                                                that differs
    experiments that undo one thing each                        the cause
    the reference's samples cut otherwise, and a plain pass     the reference is right itself

proof.py is the way above; configs.py starts its processes, in which worker.py takes the steps, with
the changes of experiments.py. trace.py records a step, comparisons.py and flow.py compare it,
differences.py says what differs, and causes.py why. Scripts are judged in `script/`; watch.py and
training_checks.py look at any training loop while it runs.

In plain mode each step starts from the reference's state, and gradients may differ by the rounding
of another summation order. With `distributed.reproducible` a topology continues from its own state,
and every bit must be equal.

Tests: tests/verify/test_command.py, tests/verify/test_faults.py, tests/verify/test_ready_configs.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.verify.comparison_result import Cause, Difference, Outcome
    from lockstep.verify.proof import Verdict, verify
    from lockstep.verify.subject import Subject

# A script that is observed imports what observes it from this package, and none of these.
_HOME = {
    "Cause": "comparison_result",
    "Difference": "comparison_result",
    "Outcome": "comparison_result",
    "Subject": "subject",
    "Verdict": "proof",
    "verify": "proof",
}

__all__ = ["Cause", "Difference", "Outcome", "Subject", "Verdict", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
