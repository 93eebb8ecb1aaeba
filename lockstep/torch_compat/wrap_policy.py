"""The classes of a `torch.distributed.fsdp.wrap.ModuleWrapPolicy`, which keeps them to itself."""

from typing import Any


def classes_of(policy: Any) -> list[str]:
    """Return the names of the classes that the policy wraps; none if it is something else."""
    return sorted(kind.__name__ for kind in getattr(policy, "_module_classes", ()))
