"""The dicts in which a module has its own parameters and modules.

Public torch: `named_parameters` and `named_children` build lists anew, too slow for each step.
Seen to work: torch 2.13.0.
When gone: AttributeError after a run's first steps.
"""

from typing import Any

from torch import nn


def registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own parameters, and the modules in it, by name; they change with it."""
    return module._parameters, module._modules
