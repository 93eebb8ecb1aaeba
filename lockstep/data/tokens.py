"""`tokens`: text that was tokenized beforehand, read from the disk on demand.

    DIR/tokens.bin      the token numbers, little-endian uint16 or uint32
    DIR/tokens.json     {"format", "dtype", "num_tokens", "vocab_size", "tokenizer", "source"}
    DIR/tokenizer.json  the Hugging Face tokenizer, if one was used

`lockstep data prepare` makes such a folder.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import Data
from lockstep.data.language import TextOptions, text_data
from lockstep.data.tokenizers import Tokenizer
from lockstep.errors import UsageError

FORMAT = "lockstep-tokens-1"
TOKENS, HEADER, TOKENIZER = "tokens.bin", "tokens.json", "tokenizer.json"
DTYPES = ("uint16", "uint32")


class TokenFile:
    """A part of a token file, which each process maps into memory when it first reads it.

    Args:
        path: the file.
        dtype: of its numbers.
        begin, end: the part, in tokens.
    """

    def __init__(self, path: Path, dtype: str, begin: int, end: int) -> None:
        self.path, self.dtype, self.begin, self.end = path, dtype, begin, end
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
        return {**self.__dict__, "_mapped": None}  # each worker maps the file itself; tokens are not sent


def tokens(*, path: str, block_size: int = 256, stride: int | None = None, validation_fraction: float = 0.1) -> Data:
    """Return the tokens in the folder `path`, which `lockstep data prepare` made.

    Raises:
        UsageError: there is no such folder, it is damaged, or it has too few tokens for one sample.
    """
    options, folder = TextOptions(block_size, stride, validation_fraction), Path(path)
    header = read_header(folder)
    count, dtype = header["num_tokens"], header["dtype"]
    border = options.border(count)
    train = TokenFile(folder / TOKENS, dtype, 0, border)
    validation = TokenFile(folder / TOKENS, dtype, border, count)
    named = header["tokenizer"]
    tokenizer = Tokenizer("bytes" if named == "bytes" else str(folder / TOKENIZER))
    return text_data(train, validation, options, f"{path} ({header['source']})", tokenizer, header["vocab_size"])


def read_header(folder: Path) -> dict[str, Any]:
    """Return the contents of `tokens.json`, if the files agree with it.

    Raises:
        UsageError: they do not.
    """
    try:
        header = json.loads((folder / HEADER).read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {HEADER}",
            where="data.args.path",
            fix=f"lockstep data prepare SOURCE --out {folder}",
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{HEADER}: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _damaged(folder, f"{HEADER} is not of the format {FORMAT}")
    kinds = {"dtype": str, "num_tokens": int, "vocab_size": int, "tokenizer": str, "source": str}
    wrong = [key for key, kind in kinds.items() if not isinstance(header.get(key), kind)]
    if wrong or header["dtype"] not in DTYPES:
        raise _damaged(folder, f"{HEADER} has no usable {(wrong or ['dtype'])[0]}")
    file = folder / TOKENS
    size = file.stat().st_size if file.exists() else 0
    expected = header["num_tokens"] * np.dtype(header["dtype"]).itemsize
    if size != expected:
        raise _damaged(folder, f"{TOKENS} has {size} bytes, but {HEADER} expects {expected}")
    return header


def _damaged(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"the tokens in {folder} can't be used", where="data.args.path", why=why, fix="prepare them again"
    )
