"""A mode that sees every operation on tensors, below autograd.

Public torch: `TorchFunctionMode` sees calls above autograd, and nothing of a backward pass.
Seen to work: torch 2.13.0.
When gone: importing this file raises ImportError: no FLOPs of a first step, no `lockstep plan`.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "UntracedDispatchMode", "without_modes"]


class UntracedDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode without torch's guard against `torch.compile` tracing it.

    The guard takes a third of a call's time.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_modes(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator below all modes."""
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)
