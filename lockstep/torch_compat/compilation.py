"""Tells whether code runs to be recorded for the compiler.

Public torch: `torch.compiler.is_compiling()` is true while Python is read. It is false where the
graph that was read is run once more to be lowered to operators; until torch 2.11 that run calls the
functions of `torch.nn.functional` by their names, as a program does. Seen to work: torch 2.11.0 to
2.14.1. When gone: importing this file raises ImportError.
"""

from torch.fx.experimental.proxy_tensor import get_proxy_mode


def is_traced() -> bool:
    """Return whether operators are recorded in a graph, instead of computed for their results."""
    return get_proxy_mode() is not None
