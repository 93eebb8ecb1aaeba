"""Reads the folders of tokens that `lockstep data prepare` writes.

They are written once, for many runs, and read from the disk on demand:

    DIR/tokens.bin      the token numbers, little-endian uint16 or uint32
    DIR/documents.bin   where each document ends among the tokens, little-endian uint64
    DIR/trained.bin     of conversations: for each token 1 if it is trained, else 0, uint8; of pairs
                        of answers 2 for the first token of the rejected one
    DIR/tokens.json     {"format", "dtype", "num_tokens", "vocab_size", "tokenizer", "source",
                        "documents", "left_out", "has_answers", "holds_pairs"}
    DIR/tokenizer.json  the Hugging Face tokenizer, if one was used

Folders that were made without `documents.bin` are read as one document.

Tests: tests/data/test_datasets.py, tests/data/test_prepare.py
"""

import json
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.language import Tokenizer, Tokens
from lockstep.data.packing import Ends
from lockstep.errors import UsageError
from lockstep.files.data_files import HEADER

FORMAT = "lockstep-tokens-1"
TOKENS = "tokens.bin"
TOKENIZER = "tokenizer.json"
DOCUMENTS = "documents.bin"
TRAINED = "trained.bin"
ENDS = "uint64"  # the numbers in it
DTYPES = ("uint16", "uint32")


class TokenFile:
    """The tokens `begin` to `end` of a token file, or other numbers that lie in a file.

    Each process maps them into memory when it first reads them.
    """

    def __init__(self, path: Path, dtype: str, begin: int, end: int) -> None:
        self.path = path
        self.dtype = dtype
        self.begin = begin
        self.end = end
        self._mapped: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, where: slice) -> NDArray[Any]:
        if self._mapped is None:
            mapped = np.memmap(self.path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
            self._mapped = mapped.view(np.ndarray)  # slicing it takes a quarter of the time
        start, stop, step = where.indices(len(self))
        assert step == 1
        return self._mapped[self.begin + start : self.begin + stop]

    def __getstate__(self) -> dict[str, Any]:
        # each worker maps the file itself; tokens are not sent
        return {**self.__dict__, "_mapped": None}


def part_of(tokens: Tokens, begin: int, end: int) -> Tokens:
    """Return the tokens `begin` to `end` of others, which stay in their file if they lie in one."""
    if isinstance(tokens, TokenFile):
        first = tokens.begin
        return TokenFile(tokens.path, tokens.dtype, first + begin, first + end)
    return tokens[begin:end]


def read_header(folder: Path) -> dict[str, Any]:
    """Return the contents of `tokens.json`; raise a UsageError if the files disagree with it."""
    if folder.is_file() or (folder.is_dir() and not (folder / HEADER).exists()):
        what = f"{folder} is not a folder that `lockstep data prepare` made: it has no {HEADER}"
        out = quote(f"{folder.parent / folder.stem}-tokens")
        fix = f"lockstep data prepare {quote(str(folder))} --out {out}, and name {out}"
        raise UsageError(what, where="data.args.path", fix=fix)
    try:
        header = json.loads((folder / HEADER).read_text())
    except FileNotFoundError:
        fix = f"lockstep data prepare SOURCE --out {quote(str(folder))}"
        raise UsageError(f"{folder} has no {HEADER}", where="data.args.path", fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, f"{HEADER}: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _damaged(folder, f"{HEADER} is not of the format {FORMAT}")
    kinds = {"dtype": str, "num_tokens": int, "vocab_size": int, "tokenizer": str, "source": str}
    wrong = [key for key, kind in kinds.items() if not isinstance(header.get(key), kind)]
    if wrong or header["dtype"] not in DTYPES:
        raise _damaged(folder, f"{HEADER} has no usable {(wrong or ['dtype'])[0]}")
    sizes = {TOKENS: header["num_tokens"] * np.dtype(header["dtype"]).itemsize}
    if "documents" in header:
        sizes[DOCUMENTS] = header["documents"] * np.dtype(ENDS).itemsize
    if header.get("has_answers"):
        sizes[TRAINED] = header["num_tokens"]
    for name, expected in sizes.items():
        file = folder / name
        size = file.stat().st_size if file.exists() else 0
        if size != expected:
            raise _damaged(folder, f"{name} has {size} bytes, but {HEADER} expects {expected}")
    return header


def tokenizer_of(folder: Path, header: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer with which a folder was made."""
    return Tokenizer("bytes" if header["tokenizer"] == "bytes" else str(folder / TOKENIZER))


def ends_of(folder: Path, header: dict[str, Any]) -> Ends:
    """Return where each document of a folder ends among its tokens."""
    if "documents" not in header:
        return np.array([header["num_tokens"]])
    return TokenFile(folder / DOCUMENTS, ENDS, 0, header["documents"])


def holds_pairs(header: dict[str, Any]) -> bool:
    """Return whether the documents of a folder are pairs of answers."""
    return bool(header.get("holds_pairs"))


def trained_of(folder: Path, header: dict[str, Any]) -> Tokens | None:
    """Return which tokens of a folder of conversations are trained; None for other documents."""
    if not header.get("has_answers"):
        return None
    return TokenFile(folder / TRAINED, "uint8", 0, header["num_tokens"])


def _damaged(folder: Path, why: str) -> UsageError:
    what = f"the tokens in {folder} can't be used"
    return UsageError(what, where="data.args.path", why=why, fix="prepare them again")
