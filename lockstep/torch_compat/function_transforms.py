"""Whether code runs within a transform of functions: `vmap`, `grad` and others of `torch.func`.

Public torch: nothing says so. Tensors stand for others there, and their values can't be kept. Seen
to work: torch 2.13.0. When gone: importing this file raises ImportError, and
`tests/torch_compat/test_function_transforms.py` fails.
"""

import torch
from torch._C._functorch import peek_interpreter_stack


def is_transforming() -> bool:
    """Return whether a transform of functions runs what calls this."""
    return peek_interpreter_stack() is not None


def has_no_values() -> bool:
    """Return whether torch compiles or transforms what runs: its tensors have no values then."""
    return torch.compiler.is_compiling() or is_transforming()
