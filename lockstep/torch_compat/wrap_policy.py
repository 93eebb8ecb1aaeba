"""The classes of a `torch.distributed.fsdp.wrap.ModuleWrapPolicy`, which keeps them to itself.

Public torch: none; the policy can only be asked about the modules of a model, and an error has
none. Seen to work: torch 2.13. When gone: the error does not say which classes to write.
"""

from typing import Any


def classes_of(policy: Any) -> list[str]:
    """Return the names of the classes that the policy wraps; none if it is something else."""
    return sorted(kind.__name__ for kind in getattr(policy, "_module_classes", ()))
