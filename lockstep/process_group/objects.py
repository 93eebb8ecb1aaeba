"""Sends Python objects between ranks; small ones take one collective.

torch's collectives of objects send sizes first and then what is sent, in two or three collectives,
and all ranks wait for each. Most of what Lockstep sends is a few bytes: an answer, an error, the
name of a checkpoint. Here the first message holds the size and up to `_ROOM` bytes of the object.
If an object of any rank is longer, all ranks learn so from that message, and a second one follows.

    first message    size of this object, size of the longest │ its first bytes
    second message   the whole object, padded to the longest; only if that did not fit

Without a group of several ranks nothing is sent.

Tests: tests/process_group/test_objects.py
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.process_group.collectives import device_of_numbers

_HEAD = 16  # bytes of the two sizes
_ROOM = 1024 - _HEAD


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank; every rank calls it."""
    message = pickle.dumps(value)
    device = _device(group)
    first = _gathered(_first(message, len(message)).to(device), group)
    longest = max(_sizes(each)[0] for each in first)
    if longest <= _ROOM:
        return [_object_in(each) for each in first]
    second = _gathered(_padded(message, longest).to(device), group)
    return [_object_of(*pair) for pair in zip(first, second, strict=True)]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks on the group's rank 0, by rank; on others an empty list.

    Every rank calls it.
    """
    message = pickle.dumps(value)
    device = _device(group)
    first = _gathered(_first(message, len(message)).to(device), group)
    is_main = dist.get_rank(group) == 0
    longest = max(_sizes(each)[0] for each in first)
    if longest <= _ROOM:
        return [_object_in(each) for each in first] if is_main else []
    mine = _padded(message, longest).to(device)
    second = [torch.empty_like(mine) for _ in first] if is_main else None
    dist.gather(mine, second, dst=_main(group), group=group)
    if second is None:
        return []
    return [_object_of(*pair) for pair in zip(first, second, strict=True)]


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the group's rank 0; every rank calls it."""
    message = pickle.dumps(value)
    device = _device(group)
    first = _first(message, len(message)).to(device)
    dist.broadcast(first, _main(group), group)
    longest = _sizes(first)[1]
    if longest <= _ROOM:
        return _object_in(first)
    second = _padded(message, longest).to(device)
    dist.broadcast(second, _main(group), group)
    return _object_of(first, second)


def scatter_objects(values: Sequence[Any], group: dist.ProcessGroup | None = None) -> Any:
    """Return this rank's one of the values that the group's rank 0 has, by rank.

    Every rank calls it; the values of others than rank 0 are not looked at.
    """
    device = _device(group)
    mine = torch.empty(_HEAD + _ROOM, dtype=torch.uint8, device=device)
    is_main = dist.get_rank(group) == 0
    messages = [pickle.dumps(value) for value in values] if is_main else []
    longest = max(map(len, messages), default=0)
    sent = [_first(message, longest).to(device) for message in messages] if is_main else None
    dist.scatter(mine, sent, src=_main(group), group=group)
    longest = _sizes(mine)[1]
    if longest <= _ROOM:
        return _object_in(mine)
    whole = torch.empty(longest, dtype=torch.uint8, device=device)
    sent = [_padded(message, longest).to(device) for message in messages] if is_main else None
    dist.scatter(whole, sent, src=_main(group), group=group)
    return _object_of(mine, whole)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for messages: the CPU, if the group can send from there."""
    if group is None:
        return device_of_numbers()
    serves = dist.get_backend_config(group)
    return torch.device("cpu") if "cpu:" in serves else device_of_numbers()


def _main(group: dist.ProcessGroup | None) -> int:
    """Return the number of the group's rank 0 among all ranks."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def _gathered(mine: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return equally long messages of all ranks, by rank, on the CPU."""
    messages = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(messages, mine, group)
    return [message.cpu() for message in messages]


def _first(message: bytes, longest: int) -> Tensor:
    """Return the first message: both sizes, and as much of the object as there is room for."""
    head = len(message).to_bytes(8, "little") + longest.to_bytes(8, "little")
    return _padded(head + message[:_ROOM], _HEAD + _ROOM)


def _padded(message: bytes, length: int) -> Tensor:
    """Return a message as a tensor of so many bytes."""
    return torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8)[:length]


def _sizes(first: Tensor) -> tuple[int, int]:
    """Return the size of the object, and that of the longest, from a first message."""
    sizes = first[:_HEAD].cpu().numpy().tobytes()
    return int.from_bytes(sizes[:8], "little"), int.from_bytes(sizes[8:], "little")


def _object_in(first: Tensor) -> Any:
    """Return the object that a first message holds entirely."""
    return _object_of(first, first[_HEAD:])


def _object_of(first: Tensor, content: Tensor) -> Any:
    """Return the object with these bytes, whose size the first message says."""
    length, _ = _sizes(first)
    return pickle.loads(content[:length].cpu().numpy().tobytes())
