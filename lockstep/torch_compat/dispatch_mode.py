"""A mode that sees every operation on tensors, below autograd.

Public torch: `TorchFunctionMode` sees calls above autograd, and nothing of a backward pass.
Seen to work: torch 2.13.0.
When gone: importing this file raises ImportError: no FLOPs of a first step, no `lockstep plan`.
"""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
