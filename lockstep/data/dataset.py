"""What a data set is to the rest of the package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class Data:
    """Training and validation data, and what a model and a person need to know about them."""

    train: Any  # a map-style dataset, or an iterable one
    validation: Any = None
    # Fill constructor arguments of the model that the config leaves unset: vocab_size and block_size of text,
    # image_size and channels of images. `source` says in words what the data are.
    facts: dict[str, Any] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None


class Collating(Dataset[dict[str, Tensor]]):
    """A map-style dataset that draws no random numbers, and reads a micro-batch faster at once than in samples."""

    deterministic = True

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """What `default_collate` makes of these samples.

        Args:
            indices: B of them.

        Returns:
            tensors of shape [B, …].
        """
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]
