"""Shared parts of all text data sets: the split, samples, facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.dataset import Data
from lockstep.data.tokenizers import Tokenizer
from lockstep.data.windows import Documents, Tokens, TokenWindows, at_least_one
from lockstep.errors import UsageError


@dataclass(frozen=True)
class TextOptions:
    """How text becomes samples: the options of `data.args`."""

    block_size: int = 256
    stride: int | None = None  # unset: block_size
    validation_fraction: float = 0.1

    def __post_init__(self) -> None:
        at_least_one("block_size", self.block_size)
        check_fraction(self.validation_fraction)

    def border(self, length: int) -> int:
        """Return where the validation part begins: the last `validation_fraction` of `length`, rounded down."""
        return length - int(length * self.validation_fraction)

    def split(self, whole: Any) -> tuple[Any, Any]:
        """Return the training and the validation part of tokens, or of documents."""
        border = self.border(len(whole))
        return whole[:border], whole[border:]


def text_data(
    train: Tokens,
    validation: Tokens | None,
    options: TextOptions,
    source: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> Data:
    """Return data whose samples are windows of one long text; without validation data if that part is empty.

    Raises:
        UsageError: a part is shorter than one sample.
    """
    windows = TokenWindows(train, options.block_size, options.stride, where=f"the training part of {source}")
    if validation is None or not len(validation):
        return _data(windows, None, options, source, tokenizer, vocab_size)
    held_out = TokenWindows(validation, options.block_size, options.stride, where=f"the validation part of {source}")
    return _data(windows, held_out, options, source, tokenizer, vocab_size)


def document_data(
    train: Sequence[Tokens], validation: Sequence[Tokens], options: TextOptions, source: str, tokenizer: Tokenizer
) -> Data:
    """Return data with one document per sample.

    Raises:
        UsageError: no document has two tokens, or `stride` is set.
    """
    if options.stride is not None:
        raise UsageError("documents are not cut by a stride", where="data.args.stride", fix="drop it, or documents")
    padded = Documents(train, options.block_size, where=f"the training part of {source}")
    held_out = None
    if validation:
        held_out = Documents(validation, options.block_size, where=f"the validation part of {source}")
    return _data(padded, held_out, options, source, tokenizer, tokenizer.vocab_size)


def check_fraction(fraction: Any) -> None:
    """Check that `validation_fraction` is from 0 to below 1.

    Raises:
        UsageError: it is not.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise UsageError(
            f"validation_fraction should be from 0 to below 1, but is {fraction!r}",
            where="data.args.validation_fraction",
            fix="0.1 keeps a tenth of the text for validation",
        )


def _data(
    train: Any, validation: Any, options: TextOptions, source: str, tokenizer: Tokenizer | None, vocab_size: int
) -> Data:
    facts = {"vocab_size": vocab_size, "block_size": options.block_size, "source": source}
    encode, decode = (tokenizer.encode, tokenizer.decode) if tokenizer is not None else (None, None)
    return Data(train, validation, facts, encode, decode)
