"""Text data sets: `text`, `python-docs` and `tokens`.

They are the user's files, a part of Python, and what was tokenized beforehand.

`lockstep data prepare` turns text into a folder of tokens once, for many runs, which are read from
the disk on demand:

    DIR/tokens.bin      the token numbers, little-endian uint16 or uint32
    DIR/tokens.json     {"format", "dtype", "num_tokens", "vocab_size", "tokenizer", "source"}
    DIR/tokenizer.json  the Hugging Face tokenizer, if one was used

The folder appears complete or not at all: it is written under a temporary name, and renamed.

Tests: tests/data/test_datasets.py
"""

import argparse
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lockstep.data.batches import Data
from lockstep.data.language import TextOptions, Tokenizer, language_data
from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.paths import local_path
from lockstep.progress import Advance, progress_of

PYTHON_DOCS = f"the topics of Python {platform.python_version()}'s own documentation"
CHUNK = 1 << 20  # characters encoded at once; a chunk ends at the end of a line


def text(
    *,
    path: str,
    block_size: int = 256,
    stride: int | None = None,
    validation_fraction: float = 0.1,
    tokenizer: str = "bytes",
    documents: bool = False,
) -> Data:
    """Return the text of a file, or of all files in a folder, sorted by name.

    Raise a UsageError if it can't be used.

    With `documents`, each file of a folder, or each line of a single file, is a document, padded to
    `block_size`.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    chosen = Tokenizer(tokenizer)
    files = text_files(local_path(path, "data.args.path"))
    if documents:
        if Path(path).is_file():
            lines = (line for chunk in read_chunks(files[0]) for line in chunk.splitlines())
            pieces = [chosen.encode_array(line) for line in lines if line.strip()]
        else:
            pieces = [chosen.encode_array("".join(read_chunks(file))) for file in files]
        return language_data(*options.split(pieces), options, path, chosen, documents=True)
    size = sum(file.stat().st_size for file in files)
    # every rank tokenizes
    with progress_of(f"tokens of {path}", size, shows=rank_facts().is_main) as advance:
        tokens = np.concatenate(list(token_pieces(files, chosen, advance)))
    return language_data(*options.split(tokens), options, path, chosen)


def token_pieces(
    files: list[Path], tokenizer: Tokenizer, advance: Advance
) -> Iterator[NDArray[Any]]:
    """Yield the tokens of text files in pieces, and call `advance` with the bytes of each."""
    for file in files:
        for chunk in read_chunks(file):
            yield tokenizer.encode_array(chunk)
            advance(len(chunk.encode()))


def text_files(path: Path) -> list[Path]:
    """Return the files that `path` names, by their relative names, without hidden ones.

    Raise a UsageError if none.
    """
    fix = "give the path of a text file, or of a folder of them"
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {str(path)!r}", where="data.args.path", fix=fix
        )
    files = [path]
    if path.is_dir():
        inside = {
            file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()
        }
        # without hidden ones
        files = [inside[name] for name in sorted(inside) if not re.search(r"(^|/)\.", name)]
    if not any(file.stat().st_size for file in files):
        what = "is empty" if path.is_file() else "has no text: no file in it, or only empty ones"
        raise UsageError(f"{path} {what}", where="data.args.path", fix=fix)
    return files


def read_chunks(file: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of whole lines; raise a UsageError if it is not UTF-8."""
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            while chunk := opened.read(CHUNK):
                yield chunk + opened.readline()
    except UnicodeDecodeError as error:
        why = f"{error.reason}: byte 0x{error.object[error.start]:02x}"
        fix = "convert it (`iconv -t utf-8`), or move files without text out of the folder"
        raise UsageError(
            f"{file} is not UTF-8 text", where="data.args.path", why=why, fix=fix
        ) from None


def topics() -> list[str]:
    """Return the texts, sorted by their topic's name.

    Raise a UsageError if this Python was built without them.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        what = "this Python comes without its documentation (the module pydoc_data)"
        fix = (
            "use another data set (text, with a path of your own), or a Python with its whole"
            " library"
        )
        raise UsageError(what, where="data.name: python-docs", fix=fix) from None
    return [texts[name] for name in sorted(texts)]


def python_docs(
    *,
    block_size: int = 256,
    stride: int | None = None,
    validation_fraction: float = 0.1,
    tokenizer: str = "bytes",
    documents: bool = False,
) -> Data:
    """Return the language reference that is part of every CPython, 0.5 MB.

    `documents`: a topic is one, padded.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    chosen = Tokenizer(tokenizer)
    pieces = [
        chosen.encode_array(text) for text in (topics() if documents else ["\n\n".join(topics())])
    ]
    whole = pieces if documents else pieces[0]
    return language_data(*options.split(whole), options, PYTHON_DOCS, chosen, documents=documents)


FORMAT = "lockstep-tokens-1"
TOKENS = "tokens.bin"
HEADER = "tokens.json"
TOKENIZER = "tokenizer.json"
DTYPES = ("uint16", "uint32")


class TokenFile:
    """The tokens `begin` to `end` of a token file.

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


def tokens(
    *, path: str, block_size: int = 256, stride: int | None = None, validation_fraction: float = 0.1
) -> Data:
    """Return the tokens in the folder `path`, which `lockstep data prepare` made.

    Or raise a UsageError.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    folder = local_path(path, "data.args.path")
    header = read_header(folder)
    count = header["num_tokens"]
    dtype = header["dtype"]
    border = options.border(count)
    train = TokenFile(folder / TOKENS, dtype, 0, border)
    validation = TokenFile(folder / TOKENS, dtype, border, count)
    tokenizer = Tokenizer("bytes" if header["tokenizer"] == "bytes" else str(folder / TOKENIZER))
    return language_data(train, validation, options, f"{path} ({header['source']})", tokenizer)


def read_header(folder: Path) -> dict[str, Any]:
    """Return the contents of `tokens.json`; raise a UsageError if the files disagree with it."""
    try:
        header = json.loads((folder / HEADER).read_text())
    except FileNotFoundError:
        what = f"{folder} has no {HEADER}"
        raise UsageError(
            what,
            where="data.args.path",
            fix=f"lockstep data prepare SOURCE --out {quote(str(folder))}",
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
    what = f"the tokens in {folder} can't be used"
    return UsageError(what, where="data.args.path", why=why, fix="prepare them again")


def prepare(
    source: Path | str,
    out: Path | str,
    tokenizer: str = "bytes",
    *,
    advance: Advance = lambda _bytes: None,
) -> tuple[int, int]:
    """Write the tokens of `source` into the new folder `out`.

    `source` is a text file, a folder of them, or `python-docs`.

    `advance` gets the bytes of text of each piece. Return the number of tokens, and the size of the
    vocabulary.
    """
    out = local_path(out, "--out")
    chosen = Tokenizer(tokenizer)
    if out.exists():
        raise UsageError(
            f"{out} exists already", where="--out", fix="choose another folder, or remove it"
        )
    if str(source) == "python-docs":  # in one piece, like the data set: it is small
        name = PYTHON_DOCS
        pieces = iter([chosen.encode_array("\n\n".join(topics()))])
    else:
        name = str(source)
        pieces = token_pieces(text_files(local_path(source, "SOURCE")), chosen, advance)
    dtype = np.dtype("<u2" if chosen.vocab_size <= 1 << 16 else "<u4")
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        count = 0
        with (temporary / TOKENS).open("wb") as file:
            for piece in pieces:
                file.write(piece.astype(dtype).tobytes())
                count += len(piece)
            file.flush()
            os.fsync(file.fileno())
        header = {
            "format": FORMAT,
            "dtype": dtype.name,
            "num_tokens": count,
            "vocab_size": chosen.vocab_size,
            "tokenizer": "bytes" if tokenizer == "bytes" else TOKENIZER,
            "source": name,
        }
        if tokenizer != "bytes":
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
        (temporary / HEADER).write_text(json.dumps(header, indent=2) + "\n")
        temporary.rename(out)
    except OSError as error:
        raise UsageError(f"{out} can't be written", where="--out", why=str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count, chosen.vocab_size


def prepare_command(argv: Sequence[str]) -> int:
    """Run `lockstep data prepare SOURCE --out DIR [--tokenizer bytes|FILE]`."""
    parser = _Parser(
        "lockstep data prepare",
        description="Turn text into tokens, for the data set `tokens`.",
        epilog="example:\n  lockstep data prepare text.txt --out tokens",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=("prepare",), help=argparse.SUPPRESS)
    parser.add_argument(
        "source", metavar="SOURCE", help="a text file, a folder of them, or python-docs"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes (default), or a Hugging Face tokenizer.json"
    )
    given = parser.parse_args(list(argv))
    files = [] if given.source == "python-docs" else text_files(local_path(given.source, "SOURCE"))
    with progress_of(
        f"tokens of {given.source}", sum(file.stat().st_size for file in files)
    ) as advance:
        num_tokens, vocab_size = prepare(given.source, given.out, given.tokenizer, advance=advance)
    print(f"{given.out}: {num_tokens:,} tokens of {vocab_size:,} kinds")
    print(f"use it with   data: {{name: tokens, args: {{path: {given.out}}}}}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            message,
            where="the command 'lockstep data'",
            fix="`lockstep data prepare --help` lists all",
        )
