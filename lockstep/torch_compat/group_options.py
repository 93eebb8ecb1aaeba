"""What a process group was made with: the timeout of its collectives, and whether it checks them.

Public torch: none once the group exists. Seen to work: torch 2.13.0. When gone: `timeout_of` gives
None and `checks_collectives` False, so that settings are not compared with the group.
"""

import datetime
from typing import Any

import torch


def timeout_of(group: Any, device: torch.device) -> float | None:
    """Return the timeout of a group's collectives on a device, in seconds.

    None if the backend does not say it.
    """
    backend = _backend_of(group, device)
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else None


def checks_collectives(group: Any, device: torch.device) -> bool:
    """Return whether a group compares each collective between ranks.

    It does if it was made under the debug level DETAIL.
    """
    return hasattr(_backend_of(group, device), "wrapped_pg")


def _backend_of(group: Any, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):  # RuntimeError: the group has no backend for the device
        return None
