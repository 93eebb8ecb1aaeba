"""Types for data sets and for the batches of a step, and functions on batches.

Tests: tests/data/test_loader.py, tests/data/test_adopt.py
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class Data:
    """Training and validation data.

    `facts`: the `source`, and arguments of the model that the config leaves unset.
    `notices`: lines that a run logs at its start, as on what was left out.
    """

    train: Any  # a map-style dataset, or an iterable one
    validation: Any = None
    # vocab_size and block_size; image_size and channels; source
    facts: dict[str, Any] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None  # from text to tokens
    decode: Callable[[Sequence[int]], str] | None = None
    decode_special: Callable[[Sequence[int]], str] | None = None  # with special tokens
    notices: Sequence[str] = ()


class CollatingDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset that reads a micro-batch faster in one call.

    It draws no random numbers.
    """

    deterministic = True

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the result of `default_collate` for these samples: tensors of shape [B, …]."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]


# The M micro-batches of a step → this rank's, in running order: (index in 0 … M − 1, whether it
# counts).
Assign = Callable[[int], list[tuple[int, bool]]]
# (micro-batches, rank=, ranks=) → the same of any of the ranks that share out a step.
AssignAnyRank = Callable[..., list[tuple[int, bool]]]


def assign_contiguous(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """Assign runs of neighbours, as evenly as possible; a rank without any runs one dummy."""
    first = (micro_batches * rank) // ranks
    last = (micro_batches * (rank + 1)) // ranks
    return [(i, True) for i in range(first, last)] or [(0, False)]


def assign_strided(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """Assign every `ranks`-th micro-batch to a rank.

    All ranks get the same number: those with fewer run a dummy at the end.
    """
    indices = [first + rank for first in range(0, micro_batches, ranks)]
    return [(i, True) if i < micro_batches else (i % micro_batches, False) for i in indices]


@dataclass
class MicroBatch:
    """One micro-batch as a rank runs it."""

    index: int  # its index in the step's global list of micro-batches
    # the samples as collated, on this rank's device; None where this rank needs none of them
    batch: Any
    real: bool = True  # False: a dummy with weight zero, which a rank with fewer micro-batches runs
    tokens: int = 0  # token ids in the batch, padding included


@dataclass
class StepBatches:
    """This rank's micro-batches of one step."""

    step: int
    epoch: int
    num_micro_batches: int  # in the step, over all ranks
    samples: int  # in the step, over all ranks; for a rank-sharded iterable: on this rank
    last_of_epoch: bool
    mine: list[MicroBatch]


@dataclass(frozen=True)
class BatchSizes:
    """The samples in a micro-batch, and those in a step of all ranks."""

    batch_size: int
    global_batch_size: int

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches in a step of all ranks."""
        return self.global_batch_size // self.batch_size

    def with_batch_size(self, batch_size: int) -> "BatchSizes":
        """Return the sizes of as many micro-batches a step with other numbers of samples."""
        return BatchSizes(batch_size, self.micro_batches_per_step * batch_size)


@dataclass(frozen=True)
class SourceSettings:
    """The settings of every source of steps, whatever its data are."""

    start_step: int
    stop_step: int | None  # the steps are those before it; None: until the data, or `epochs`, end
    seed: int
    device: torch.device | str  # where the micro-batches go
    epochs: int | None = None  # how often the data are gone through, at most
    wanted: bool = True  # False on a rank that reads no data
    notice: str | None = None  # a line to log at the start
    reproducible: bool = False  # whether data that no run repeats are refused
    compares: bool = False  # whether ranks compare their data before the first step


class StepSource(Protocol):
    """A source of steps: a `StepLoader` or `IterableSteps`."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None if unknown before the epoch ends."""

    @property
    def notice(self) -> str | None:
        """A line to log at the start, if any."""

    def __iter__(self) -> Iterator[StepBatches]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed source needs besides the step."""

    def close(self) -> None:
        """End workers."""


def num_tokens(batch: Any) -> int:
    """Return the number of token ids in a batch, padding included; 0 if it holds none.

    Samples of several whole numbers are tokens: `input_ids`, or else the first tensor.
    """
    if isinstance(batch, dict | Mapping):  # `dict` first: it is the quicker check
        values = [batch["input_ids"]] if "input_ids" in batch else list(batch.values())
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None or first.ndim < 2 or first.is_floating_point() or first.is_complex():
        return 0
    return first.numel()


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`, without waiting for the copies.

    Other leaves are unchanged.
    """
    if isinstance(batch, torch.Tensor):
        # MPS reads pageable memory later, without keeping it alive (pytorch/pytorch#189690); CUDA
        # copies it at once.
        return batch.to(device, non_blocking=device.type != "mps")
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(
            batch, **{name: move(getattr(batch, name), device) for name in names}
        )
    return batch


def known_length(iterable: Any) -> int | None:
    """Return `len(iterable)`; None if it has none."""
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


def batch_length(batch: Any) -> int:
    """Return the number of samples in a collated batch.

    It is the first dim of the first tensor, else 1.
    """
    return counted_samples(batch) or 1


def counted_samples(batch: Any) -> int | None:
    """Return the number of samples in a collated batch; None if it has no tensor with samples."""
    tensor = _first_tensor(batch)
    return int(tensor.shape[0]) or None if tensor is not None and tensor.dim() > 0 else None


def _first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in a nested batch, or None."""
    if isinstance(batch, torch.Tensor):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        children: Any = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, list | tuple):
        children = batch
    else:
        return None
    tensors = (_first_tensor(child) for child in children)
    return next((tensor for tensor in tensors if tensor is not None), None)
