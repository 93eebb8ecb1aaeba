"""Environment variables of NCCL, gloo and torch that do not do what people set them for."""

import re
from collections.abc import Mapping

_USELESS: tuple[tuple[str, str], ...] = (
    (r"NCCL_TIMEOUT\w*", "does nothing in torch; the timeout is distributed.timeout_seconds"),
    (r"NCCL_(BLOCKING_WAIT|ASYNC_ERROR_HANDLING|DESYNC_DEBUG|ENABLE_TIMING|DUMP_ON_TIMEOUT)",
     "is deprecated; it is called TORCH_{} now"),
    (r"NCCL_SOCKET_NAME|NCCL_IFNAME|NCCL_SOCKET_INTERFACE", "does nothing; it is called NCCL_SOCKET_IFNAME"),
    (r"NCCL_(LL_THRESHOLD|TREE_THRESHOLD)", "does nothing since NCCL 2.5; NCCL_ALGO and NCCL_PROTO choose"),
    (r"NCCL_RINGS", "does nothing since NCCL 2.5"),
    (r"NCCL_MAX_NRINGS|NCCL_MIN_NRINGS", "is deprecated; it is called NCCL_MAX_NCHANNELS, NCCL_MIN_NCHANNELS"),
    (r"GLOO_TIMEOUT\w*", "does nothing in torch; the timeout is distributed.timeout_seconds"),
    (r"GLOO_SOCKET_NAME|GLOO_IFNAME", "does nothing; it is called GLOO_SOCKET_IFNAME"),
    (r"TORCH_DISTRIBUTED_TIMEOUT\w*|TORCH_NCCL_TIMEOUT\w*",
     "does nothing in torch; the timeout is distributed.timeout_seconds"),
    (r"TORCH_DISTRIBUTED_BACKEND", "does nothing in torch; it is distributed.backend"),
)  # fmt: skip
_DANGEROUS = {
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait for the last; for debugging only",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "checks every collective over the network; for debugging only",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "NCCL_P2P_DISABLE": "sends between GPUs of one machine through the host's memory",
    "NCCL_IB_DISABLE": "leaves InfiniBand and RoCE unused",
    "NCCL_SHM_DISABLE": "sends between ranks of one machine over the network",
}


def remarks(variables: Mapping[str, str]) -> list[str]:
    """What is to be said about those that are set."""
    found = []
    for name, value in sorted(variables.items()):
        for pattern, text in _USELESS:
            if re.fullmatch(pattern, name):
                found.append(f"{name} {text.format(name)}")
        text = _DANGEROUS.get(f"{name}={value}") or ("" if value in ("", "0") else _DANGEROUS.get(name, ""))
        if text:
            found.append(f"{name} {text}")
    return found
