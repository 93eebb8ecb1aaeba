"""Defines the types of data sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class Data:
    """Training and validation data, with facts about them.

    Attributes:
        train: a map-style dataset, or an iterable one.
        validation: likewise, or None.
        facts: values for constructor arguments of the model that the config leaves unset: vocab_size and block_size of
            text, image_size and channels of images. `source` describes the data.
        encode, decode: from text to tokens and back.
    """

    train: Any
    validation: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None


class CollatingDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset that draws no random numbers, and reads a micro-batch faster in one call than in samples."""

    deterministic = True

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the result of `default_collate` for these samples.

        Args:
            indices: B indices.

        Returns:
            tensors of shape [B, …].
        """
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]
