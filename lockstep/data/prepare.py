"""`lockstep data prepare`: turns text into a folder of tokens once, for many runs.

The folder appears complete or not at all: it is written under a temporary name, and renamed.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lockstep.data.text import source_line, text_files, token_pieces, topics
from lockstep.data.tokenizers import Tokenizer
from lockstep.data.tokens import FORMAT, HEADER, TOKENIZER, TOKENS
from lockstep.errors import UsageError
from lockstep.progress import Advance, progress_of


@dataclass(frozen=True)
class PreparedTokens:
    """The result of `prepare`."""

    path: Path
    num_tokens: int
    vocab_size: int


def prepare(
    source: Path | str, out: Path | str, tokenizer: str = "bytes", *,
    advance: Advance = lambda _bytes: None,
) -> PreparedTokens:  # fmt: skip
    """Write the tokens of `source` into the new folder `out`.

    Args:
        source: a text file, a folder of them, or `python-docs`.
        out: the folder.
        tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json`, which is copied.
        advance: called after each piece with its bytes of text.

    Raises:
        UsageError: `out` exists or can't be written, or the source is not readable text.
    """
    out, chosen = Path(out), Tokenizer(tokenizer)
    if out.exists():
        raise UsageError(f"{out} exists already", where="--out", fix="choose another folder, or remove it")
    pieces, name = _pieces(source, chosen, advance)
    dtype = np.dtype("<u2" if chosen.vocab_size <= 1 << 16 else "<u4")
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        count = _write(temporary / TOKENS, pieces, dtype)
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
    return PreparedTokens(out, count, chosen.vocab_size)


def run(argv: Sequence[str]) -> int:
    """Run `lockstep data prepare SOURCE --out DIR [--tokenizer bytes|FILE]`."""
    parser = _Parser("lockstep data prepare", description="Turn text into tokens, for the data set `tokens`.")
    parser.add_argument("verb", choices=("prepare",), help=argparse.SUPPRESS)
    parser.add_argument("source", metavar="SOURCE", help="a text file, a folder of them, or python-docs")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), or a Hugging Face tokenizer.json")
    given = parser.parse_args(list(argv))
    with progress_of(f"tokens of {given.source}", size_of(given.source)) as advance:
        made = prepare(given.source, given.out, given.tokenizer, advance=advance)
    print(f"{made.path}: {made.num_tokens:,} tokens of {made.vocab_size:,} kinds")
    print(f"use it with   data: {{name: tokens, args: {{path: {made.path}}}}}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where="the command 'lockstep data'", fix="`lockstep data prepare --help` lists all")


def _pieces(source: Path | str, tokenizer: Tokenizer, advance: Advance) -> tuple[Iterator[NDArray[Any]], str]:
    """Return the tokens in pieces, and a description of the source."""
    if str(source) == "python-docs":
        # In one piece, like the data set python-docs: it is small.
        return iter([tokenizer.encode_array("\n\n".join(topics()))]), source_line()
    return token_pieces(text_files(Path(source)), tokenizer, advance), str(source)


def size_of(source: Path | str) -> int:
    """Return the bytes of text that `prepare` will read; 0 for python-docs."""
    return 0 if str(source) == "python-docs" else sum(file.stat().st_size for file in text_files(Path(source)))


def _write(path: Path, pieces: Iterator[NDArray[Any]], dtype: np.dtype[Any]) -> int:
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.astype(dtype).tobytes())
            count += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return count
