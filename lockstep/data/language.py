"""What all text data sets share: the split, the cut into samples, the facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.dataset import Data
from lockstep.data.tokenizers import Tokenizer
from lockstep.data.windows import Documents, Tokens, TokenWindows, at_least_one
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Cut:
    """How text becomes samples."""

    block_size: int = 256
    stride: int | None = None  # unset: block_size
    validation_fraction: float = 0.1

    def __post_init__(self) -> None:
        at_least_one("block_size", self.block_size)
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise UsageError(
                f"validation_fraction should be from 0 to below 1, but is {fraction!r}",
                where="data.args.validation_fraction",
            )


def text_data(tokens: Tokens, cut: Cut, tokenizer: Tokenizer | None, vocab_size: int, source: str) -> Data:
    """One long text: windows of it; the last `validation_fraction` of its tokens are the validation data.

    Raises:
        UsageError: either part is shorter than one sample.
    """
    border = split_at(len(tokens), cut.validation_fraction)
    train = TokenWindows(tokens[:border], cut.block_size, cut.stride, where=f"the training part of {source}")
    validation = None
    if border < len(tokens):
        validation = TokenWindows(tokens[border:], cut.block_size, cut.stride, where=f"the validation part of {source}")
    return _data(train, validation, cut, tokenizer, vocab_size, source)


def document_data(documents: Sequence[Tokens], cut: Cut, tokenizer: Tokenizer, source: str) -> Data:
    """One document a sample; the last `validation_fraction` of the documents are the validation data.

    Raises:
        UsageError: no document has two tokens, or `stride` is set.
    """
    if cut.stride is not None:
        raise UsageError("documents are not cut by a stride", where="data.args.stride", fix="drop it, or documents")
    border = split_at(len(documents), cut.validation_fraction)
    train = Documents(documents[:border], cut.block_size, where=f"the training part of {source}")
    validation = None
    if border < len(documents):
        validation = Documents(documents[border:], cut.block_size, where=f"the validation part of {source}")
    return _data(train, validation, cut, tokenizer, tokenizer.vocab_size, source)


def split_at(length: int, validation_fraction: float) -> int:
    """Where the validation part begins."""
    return length - int(length * validation_fraction)


def _data(train: Any, validation: Any, cut: Cut, tokenizer: Tokenizer | None, vocab_size: int, source: str) -> Data:
    facts = {"vocab_size": vocab_size, "block_size": cut.block_size, "source": source}
    encode, decode = (tokenizer.encode, tokenizer.decode) if tokenizer is not None else (None, None)
    return Data(train, validation, facts, encode, decode)
