"""Makes samples of language models.

These are tokenizers, the split into training and validation, and windows of tokens.

A sample is `{"input_ids", "targets"}`, both int64 [block_size]; `targets[t]` is the token after
`input_ids[t]`: targets are shifted here and nowhere else. −100 marks a target that does not count.

Tests: tests/data/test_datasets.py, tests/data/test_special_tokens.py
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.data.batches import CollatingDataset, Data
from lockstep.errors import UsageError
from lockstep.files.paths import local_path


@dataclass(frozen=True)
class EncodedText:
    """Holds the tokens of a text for a classifier."""

    tokens: NDArray[np.int64]
    words: list[int | None]  # the number of each token's word; None: it is of no word
    is_cut: bool  # tokens are left out at the end


class Tokenizer:
    """A tokenizer: `bytes` (256 tokens), the path of a `tokenizer.json`, or of a folder with one.

    Anything else raises a UsageError.
    """

    def __init__(self, name: str = "bytes") -> None:
        self.name = name
        self.file = tokenizer_file(name)
        self._model: Any = None if self.file is None else _load(self.file)
        self.vocab_size: int = 256 if self._model is None else self._model.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        if self._model is None:
            return list(text.encode())
        return list(self._model.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> NDArray[Any]:
        if self._model is None:
            return np.frombuffer(text.encode(), dtype=np.uint8)
        return np.asarray(self.encode(text), dtype=self.dtype)

    def encode_with_ranges(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the tokens of a text, and the range of its characters that each stands for.

        The ranges, [tokens, 2], leave nothing out between them: what a tokenizer drops, or does not
        count to a token, such as a space before a word, belongs to the token after it.
        """
        if self._model is None:
            lengths = [len(character.encode()) for character in text]
            begins = np.repeat(np.arange(len(text)), lengths)
            return self.encode_array(text), np.stack([begins, begins + 1], axis=1)
        encoded = self._model.encode(text, add_special_tokens=False)
        ranges = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(ranges[:, 1]) if len(ranges) else ranges[:, 1]
        before = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
        begins = np.minimum(ranges[:, 0], before)
        return np.asarray(encoded.ids, dtype=self.dtype), np.stack([begins, ends], axis=1)

    def encode_as_text(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text in which what looks like a special token is none."""
        if self._model is None:
            return self.encode_array(text)
        before = self._model.encode_special_tokens
        self._model.encode_special_tokens = True
        try:
            return self.encode_array(text)
        finally:
            self._model.encode_special_tokens = before

    def encode_for_classifier(self, text: str | Sequence[str], length: int) -> "EncodedText":
        """Return the tokens of a text, or of words, as a classifier reads them.

        The special tokens that the tokenizer puts around a text are there, and stay where it is cut
        off at `length` tokens. What a text holds of them is text.
        """
        if self._model is None:
            return _bytes_of(text, length)
        model = self._model
        before = model.encode_special_tokens
        model.encode_special_tokens = True
        model.enable_truncation(length)
        try:
            given = text if isinstance(text, str) else list(text)
            encoded = model.encode(given, is_pretokenized=not isinstance(text, str))
        finally:
            model.no_truncation()
            model.encode_special_tokens = before
        ids = np.asarray(encoded.ids, np.int64)
        return EncodedText(ids, list(encoded.word_ids), bool(encoded.overflowing))

    def number_of(self, token: str) -> int | None:
        """Return the number of a token; None if there is no such token."""
        number = None if self._model is None else self._model.token_to_id(token)
        return None if number is None else int(number)

    def encode_document(
        self, text: str, *, special_tokens: bool, where: str = "a document"
    ) -> tuple[NDArray[Any], bool]:
        """Return the tokens of a document, and whether it holds the text of a special token.

        That is encoded as text, as nanoGPT and Llama do it: who writes `<|im_end|>` into a page
        ends nothing. With `special_tokens` it becomes the token; a UsageError, with `where`, if
        tokenizer.json has no such token.
        """
        tokens = self.encode_array(text)
        if special_tokens:
            self.require_its_own(text, where)
        if self._model is None or not np.isin(tokens, self._special).any():
            return tokens, False
        as_text = self.encode_as_text(text)
        holds = not np.array_equal(tokens, as_text)  # else it is what stands for unknown words
        return (tokens if special_tokens else as_text), holds

    @cached_property
    def _special(self) -> NDArray[np.int64]:
        return np.array(sorted(self.special_tokens().values()), np.int64)

    def special_tokens(self) -> dict[str, int]:
        """Return text → number of special tokens, such as the one that ends a turn."""
        added = {} if self._model is None else self._model.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def require_its_own(self, text: str, where: str, lacking: Sequence[str] | None = None) -> None:
        """Raise a UsageError if a text holds a token that tokenizer.json has not: it is letters.

        Args:
            where: what holds the text.
            lacking: such tokens; unset: those that the files beside tokenizer.json name.
        """
        unknown = (
            [token for token in self._lacking if token in text] if lacking is None else lacking
        )
        if not unknown:
            return
        folder = str(Path(self.name) if self.file is None else self.file.parent)
        what = f"the tokenizer.json of {folder} has no token {unknown[0]!r}"
        why = (
            f"tokenizer_config.json names it, and {where} has it: its letters would be trained in"
            " its place"
        )
        loaded = f"transformers.AutoTokenizer.from_pretrained({json.dumps(folder)})"
        code = f"import transformers; {loaded}.save_pretrained({json.dumps(folder)})"
        fix = f"save the tokenizer anew: python -c {quote(code)}"
        raise UsageError(what, where="data.args.tokenizer", why=why, fix=fix)

    @cached_property
    def _lacking(self) -> list[str]:
        """Tokens that the files beside tokenizer.json name, and it has not, longest first."""
        if self.file is None:
            return []
        named = {text for name in _BESIDE for text in _tokens_named_in(self.file.with_name(name))}
        own = self._model.token_to_id
        lacking = [text for text in named if text and self.encode(text) != [own(text)]]
        return sorted(lacking, key=lambda text: (-len(text), text))

    @property
    def contents(self) -> bytes:
        """Return the content of its file, by which tokenizers are compared; empty: bytes."""
        return b"" if self.file is None else self.file.read_bytes()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become replacement characters.

        Special tokens are left out, unless `special`.
        """
        if self._model is None:
            return bytes(int(token) for token in tokens).decode(errors="replace")
        numbers = [int(token) for token in tokens]
        return str(self._model.decode(numbers, skip_special_tokens=not special))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds the vocabulary: uint8, uint16 or uint32."""
        return np.min_scalar_type(self.vocab_size - 1)


def _bytes_of(text: str | Sequence[str], length: int) -> EncodedText:
    """Return the bytes of a text, or of words with spaces between them."""
    given = [text] if isinstance(text, str) else text
    tokens: list[int] = []
    words: list[int | None] = []
    for number, word in enumerate(given):
        letters = ([32] if number else []) + list(word.encode())
        tokens += letters
        words += [None] * bool(number) + [number] * (len(letters) - bool(number))
    is_cut = len(tokens) > length
    return EncodedText(np.array(tokens[:length], np.int64), words[:length], is_cut)


def tokenizer_file(name: str) -> Path | None:
    """Return the file of a tokenizer that a config names; None for `bytes`."""
    if name == "bytes":
        return None
    path = local_path(name, "data.args.tokenizer")
    return path / "tokenizer.json" if path.is_dir() else path


# Files beside tokenizer.json that may name further tokens, which transformers adds.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def _tokens_named_in(file: Path) -> Iterator[str]:
    """Yield the texts of the tokens that a file beside tokenizer.json names; none if it is bad."""
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return
    if not isinstance(described, dict):
        return
    if file.name == "added_tokens.json":  # text → number
        yield from described
    more: list[Any] = []
    for key, value in described.items():
        if key.endswith("_token"):
            more.append(value)
        elif key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
            # lists of tokens, or each by its name or number
            inside = value.values() if isinstance(value, dict) else value
            more += inside if isinstance(inside, Iterable) else []
    for token in more:
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield text


def _load(path: Path) -> Any:
    """Load a Hugging Face tokenizer.

    Raises UsageError: the file or the package is missing or broken.
    """
    if not path.is_file():
        fix = "write bytes, or the path of a Hugging Face tokenizer.json"
        raise UsageError(
            f"there is no tokenizer {str(path)!r}", where="data.args.tokenizer", fix=fix
        )
    try:
        import tokenizers
    except ImportError:
        what = "reading a tokenizer.json needs the package tokenizers"
        fix = "pip install tokenizers, or use tokenizer: bytes"
        raise UsageError(what, where="data.args.tokenizer", fix=fix) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        where = "data.args.tokenizer"
        raise UsageError(
            f"{path} is not a Hugging Face tokenizer.json", where=where, why=str(error)
        ) from None
    # A file keeps the length to which its last user truncated or padded batches; here documents
    # are encoded in full.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def note_of_special(special_tokens: bool) -> str:
    """Return what is told, after their number, of texts that hold the text of a special token."""
    if special_tokens:
        return "texts hold the text of a special token, which becomes that token"
    return (
        "texts hold the text of a special token, which is encoded as text (special_tokens: true"
        " makes it that token)"
    )


@dataclass
class DocumentEncoder:
    """Encodes the documents of a data set, and counts what is worth telling of them.

    Args:
        special_tokens: whether the text of a special token becomes that token.
    """

    tokenizer: Tokenizer
    special_tokens: bool = False
    notes: Counter[str] = field(default_factory=Counter)

    def encode(self, text: str, where: str = "a document") -> NDArray[Any]:
        """Return the tokens of a document, or of a part of it; `where` it is, for messages."""
        special = self.special_tokens
        tokens, holds = self.tokenizer.encode_document(text, special_tokens=special, where=where)
        if holds:
            self.notes[note_of_special(self.special_tokens)] += 1
        return tokens

    def notices(self, source: str) -> list[str]:
        """Return lines on what was counted."""
        return [f"{source}: {count:,} {note}" for note, count in sorted(self.notes.items())]


IGNORED = -100  # torch's cross entropy skips targets of this value
Sample = dict[str, torch.Tensor]


class Tokens(Protocol):
    """A sequence of token numbers: an array, or a file that is read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> NDArray[Any]: ...


class TokenWindows(CollatingDataset):
    """Windows of `block_size` + 1 tokens, one every `stride` (unset: `block_size`).

    A shorter text is a UsageError.
    """

    def __init__(
        self, tokens: Tokens, block_size: int, stride: int | None = None, *, where: str = "the text"
    ) -> None:
        self.tokens = tokens
        self.block_size = at_least_one("block_size", block_size)
        self.stride = at_least_one("stride", stride if stride is not None else block_size)
        spare = len(tokens) - (block_size + 1)
        if spare < 0:
            what = f"{where} has {len(tokens)} tokens, but one sample needs {block_size + 1}"
            why = (
                f"a sample is block_size + 1 = {block_size} + 1 tokens: inputs, and targets one"
                " further"
            )
            fix = (
                "give more text, or a smaller block_size (for validation: a larger"
                " validation_fraction)"
            )
            raise UsageError(what, where="data.args", why=why, fix=fix)
        self._length = spare // self.stride + 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        window = torch.from_numpy(self._window(index).astype(np.int64))
        return {"input_ids": window[:-1], "targets": window[1:]}

    def collated(self, indices: Sequence[int]) -> Sample:
        windows = np.stack([self._window(index) for index in indices])
        input_ids = windows[:, :-1].astype(np.int64)
        targets = windows[:, 1:].astype(np.int64)
        return {"input_ids": torch.from_numpy(input_ids), "targets": torch.from_numpy(targets)}

    def _window(self, index: int) -> NDArray[Any]:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        start = index % self._length * self.stride
        return self.tokens[start : start + self.block_size + 1]


class Documents(Dataset[Sample]):
    """Samples of one document each, padded to `block_size` with targets that do not count.

    A UsageError without any.

    A longer document than `block_size` + 1 tokens makes several samples; one of less than two
    tokens makes none.
    """

    deterministic = True

    def __init__(
        self, documents: Sequence[Tokens], block_size: int, *, where: str = "the text"
    ) -> None:
        self.documents = documents
        self.block_size = at_least_one("block_size", block_size)
        self._pieces = [
            (n, start)
            for n, each in enumerate(documents)
            for start in range(0, len(each) - 1, block_size)
        ]
        if not self._pieces:
            what = f"{where} has {len(documents)} documents, none of at least 2 tokens"
            raise UsageError(
                what, where="data.args", why="a document needs a token to read and one to predict"
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
    """Return `value`, or raise a UsageError if it is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = f"{name} should be a whole number of at least 1, but is {value!r}"
        raise UsageError(what, where=f"data.args.{name}", fix="write a whole number: 256")
    return value


@dataclass(frozen=True)
class TextOptions:
    """The options of `data.args` that turn text into samples."""

    block_size: int = 256
    stride: int | None = None  # unset: block_size
    validation_fraction: float = 0.1

    def __post_init__(self) -> None:
        at_least_one("block_size", self.block_size)
        check_fraction(self.validation_fraction)

    def border(self, length: int) -> int:
        """Return where the validation part begins.

        It is the last `validation_fraction` of `length`, rounded down.
        """
        return length - int(length * self.validation_fraction)

    def split(self, whole: Any) -> tuple[Any, Any]:
        border = self.border(len(whole))
        return whole[:border], whole[border:]


def language_data(
    train: Any,
    validation: Any,
    options: TextOptions,
    source: str,
    tokenizer: Tokenizer,
    *,
    documents: bool = False,
) -> Data:
    """Return data of windows of a long text, or of documents, or raise a UsageError.

    `validation` may be empty.
    """
    if documents and options.stride is not None:
        raise UsageError(
            "documents are not cut by a stride",
            where="data.args.stride",
            fix="drop it, or documents",
        )

    def samples(part: Any, role: str) -> TokenWindows | Documents:
        where = f"the {role} part of {source}"
        if documents:
            return Documents(part, options.block_size, where=where)
        return TokenWindows(part, options.block_size, options.stride, where=where)

    cut = samples(train, "training")
    held_out = samples(validation, "validation") if len(validation) else None
    facts = {"vocab_size": tokenizer.vocab_size, "block_size": options.block_size, "source": source}
    return Data(cut, held_out, facts, tokenizer.encode, tokenizer.decode)


def check_fraction(fraction: Any) -> None:
    """Raise a UsageError unless `validation_fraction` is from 0 to below 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        what = f"validation_fraction should be from 0 to below 1, but is {fraction!r}"
        where = "data.args.validation_fraction"
        raise UsageError(what, where=where, fix="0.1 keeps a tenth of the text for validation")
