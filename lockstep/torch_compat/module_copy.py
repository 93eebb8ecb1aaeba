"""A shallow copy of a module, whose children can be exchanged without changing the original.

Public torch: `copy.copy` of a module shares the table of its children with the original, and fails
for one that FSDP2 has wrapped.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: AttributeError when a causal model of transformers is cut into stages.
"""

from torch import nn


def with_own_children(module: nn.Module) -> nn.Module:
    """Copy a module with a table of children of its own.

    Parameters, buffers and children are the same.
    """
    # not copy.copy, which makes an object of the class before where FSDP2 has wrapped the module
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    found.__dict__["_modules"] = dict(module._modules)
    return found
