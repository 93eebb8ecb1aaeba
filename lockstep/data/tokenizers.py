"""Turns text into tokens and back: bytes, or a Hugging Face `tokenizer.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError


class Tokenizer:
    """A tokenizer: `bytes` (256 tokens, no file) or the path of a `tokenizer.json`.

    Raises:
        UsageError: there is no such file, it is not a tokenizer, or the package that reads it is missing.
    """

    def __init__(self, name: str = "bytes") -> None:
        self.name = name
        self._model: Any = None if name == "bytes" else _load(Path(name))
        self.vocab_size: int = 256 if self._model is None else self._model.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        if self._model is None:
            return list(text.encode())
        return list(self._model.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> NDArray[Any]:
        """Return the tokens in the smallest type that holds the vocabulary (uint8, uint16 or uint32)."""
        if self._model is None:
            return np.frombuffer(text.encode(), dtype=np.uint8)
        return np.asarray(self.encode(text), dtype=self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become replacement characters."""
        if self._model is None:
            return bytes(int(token) for token in tokens).decode(errors="replace")
        return str(self._model.decode([int(token) for token in tokens]))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint8, uint16 and uint32 that holds the vocabulary."""
        limits = ((1 << 8, np.uint8), (1 << 16, np.uint16))
        return np.dtype(next((kind for limit, kind in limits if self.vocab_size <= limit), np.uint32))


def _load(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(
            f"there is no tokenizer {str(path)!r}",
            where="data.args.tokenizer",
            fix="write bytes, or the path of a Hugging Face tokenizer.json",
        )
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "reading a tokenizer.json needs the package tokenizers",
            where="data.args.tokenizer",
            fix="pip install 'lockstep-train[transformers]', or use tokenizer: bytes",
        ) from None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise UsageError(
            f"{path} is not a Hugging Face tokenizer.json", where="data.args.tokenizer", why=str(error)
        ) from None
