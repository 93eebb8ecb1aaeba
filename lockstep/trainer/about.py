"""What a run's first event says of the machines and programs."""

import os
import platform
import socket
from importlib.metadata import version
from typing import Any

import torch

from lockstep.cluster import Cluster


def describe(cluster: Cluster) -> dict[str, Any]:
    """This rank: where it runs and on what."""
    if cluster.device.type == "cuda":
        device = torch.cuda.get_device_name(cluster.device)
    else:
        device = f"CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    return {"rank": cluster.facts.rank, "host": socket.gethostname(), "device": device, "process": os.getpid()}


def versions() -> dict[str, str]:
    """Of what can change numbers."""
    found = {"lockstep": version("lockstep-train"), "torch": torch.__version__, "python": platform.python_version()}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
