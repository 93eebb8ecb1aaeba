"""Cuts samples of language models from tokens.

A sample is `{"input_ids", "targets"}`, both int64 [block_size]; `targets[t]` is the token after `input_ids[t]`: targets
are shifted here and nowhere else. −100 marks a target that does not count.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.data.dataset import CollatingDataset
from lockstep.errors import UsageError

IGNORED = -100  # torch's cross entropy skips targets of this value

Sample = dict[str, torch.Tensor]


class Tokens(Protocol):
    """A sequence of token numbers: an array, or a file that is read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> NDArray[Any]: ...


class TokenWindows(CollatingDataset):
    """Windows of `block_size` + 1 tokens, one every `stride` tokens.

    Args:
        tokens: the text.
        block_size: tokens of a sample.
        stride: unset: `block_size`, so that each token is a target once.
        where: the text's name in errors.

    Raises:
        UsageError: the text is shorter than one sample.
    """

    def __init__(self, tokens: Tokens, block_size: int, stride: int | None = None, *, where: str = "the text") -> None:
        self.tokens = tokens
        self.block_size = at_least_one("block_size", block_size)
        self.stride = at_least_one("stride", stride if stride is not None else block_size)
        spare = len(tokens) - (block_size + 1)
        if spare < 0:
            raise UsageError(
                f"{where} has {len(tokens)} tokens, but one sample needs {block_size + 1}",
                where="data.args",
                why=f"a sample is block_size + 1 = {block_size} + 1 tokens: inputs, and targets one further",
                fix="give more text, or a smaller block_size (for validation: a larger validation_fraction)",
            )
        self._length = spare // self.stride + 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        window = torch.from_numpy(self._window(index).astype(np.int64))
        return {"input_ids": window[:-1], "targets": window[1:]}

    def collated(self, indices: Sequence[int]) -> Sample:
        """Return the samples as one batch."""
        windows = np.stack([self._window(index) for index in indices])
        input_ids, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return {"input_ids": torch.from_numpy(input_ids), "targets": torch.from_numpy(targets)}

    def _window(self, index: int) -> NDArray[Any]:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        start = index % self._length * self.stride
        return self.tokens[start : start + self.block_size + 1]


class Documents(Dataset[Sample]):
    """Samples of one document each, padded to `block_size` with targets that do not count.

    A document longer than `block_size` + 1 tokens makes several samples, of which the last is padded; a document
    shorter than two tokens has no target, and makes none. So samples have different numbers of valid targets.

    Raises:
        UsageError: no document has two tokens.
    """

    deterministic = True

    def __init__(self, documents: Sequence[Tokens], block_size: int, *, where: str = "the text") -> None:
        self.documents = documents
        self.block_size = at_least_one("block_size", block_size)
        self._pieces = [
            (number, start)
            for number, document in enumerate(documents)
            for start in range(0, len(document) - 1, block_size)
        ]
        if not self._pieces:
            raise UsageError(
                f"{where} has {len(documents)} documents, none of at least 2 tokens",
                where="data.args",
                why="a document needs a token to read and one to predict",
            )

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> Sample:
        number, start = self._pieces[index]
        piece = self.documents[number][start : start + self.block_size + 1].astype(np.int64)
        input_ids = torch.zeros(self.block_size, dtype=torch.int64)
        targets = torch.full((self.block_size,), IGNORED, dtype=torch.int64)
        input_ids[: len(piece) - 1] = torch.from_numpy(piece[:-1])
        targets[: len(piece) - 1] = torch.from_numpy(piece[1:])
        return {"input_ids": input_ids, "targets": targets}


def at_least_one(name: str, value: Any) -> int:
    """Return `value` if it is a whole number above 0.

    Raises:
        UsageError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{name} should be a whole number of at least 1, but is {value!r}",
            where=f"data.args.{name}",
            fix="write a whole number: 256",
        )
    return value
