"""`lockstep data prepare`: text into a folder of tokens, once, for many runs.

The folder appears whole or not at all: it is written beside, and renamed.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lockstep.data.python_docs import source_line, topics
from lockstep.data.text import read_chunks, text_files
from lockstep.data.tokenizers import Tokenizer
from lockstep.data.tokens import FORMAT, HEADER, TOKENIZER, TOKENS
from lockstep.errors import UsageError

Progress = Callable[[int, int], None]  # what is done and what there is, in bytes (of python-docs: in topics)


@dataclass(frozen=True)
class Prepared:
    """What was written."""

    path: Path
    num_tokens: int
    vocab_size: int


def prepare(
    source: Path | str, out: Path | str, tokenizer: str = "bytes", *, progress: Progress | None = None
) -> Prepared:
    """Write the tokens of `source` into the new folder `out`.

    Args:
        source: a text file, a folder of them, or `python-docs`.
        tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json`, which is copied along.
        progress: told after each piece.

    Raises:
        UsageError: `out` exists or can't be written, or the source is not readable text.
    """
    out, chosen = Path(out), Tokenizer(tokenizer)
    if out.exists():
        raise UsageError(f"{out} exists already", where="--out", fix="choose another folder, or remove it")
    pieces, name = _pieces(source, chosen, progress or _silent)
    dtype = np.dtype("<u2" if chosen.vocab_size <= 1 << 16 else "<u4")
    beside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        count = _write(beside / TOKENS, pieces, dtype)
        header = {
            "format": FORMAT,
            "dtype": dtype.name,
            "num_tokens": count,
            "vocab_size": chosen.vocab_size,
            "tokenizer": "bytes" if tokenizer == "bytes" else TOKENIZER,
            "source": name,
        }
        if tokenizer != "bytes":
            shutil.copyfile(tokenizer, beside / TOKENIZER)
        (beside / HEADER).write_text(json.dumps(header, indent=2) + "\n")
        beside.rename(out)
    except OSError as error:
        raise UsageError(f"{out} can't be written", where="--out", why=str(error)) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Prepared(out, count, chosen.vocab_size)


def run(argv: Sequence[str]) -> int:
    """`lockstep data prepare SOURCE --out DIR [--tokenizer bytes|FILE]`."""
    parser = _Parser("lockstep data prepare", description="Turn text into tokens, for the data set `tokens`.")
    parser.add_argument("verb", choices=("prepare",), help=argparse.SUPPRESS)
    parser.add_argument("source", metavar="SOURCE", help="a text file, a folder of them, or python-docs")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), or a Hugging Face tokenizer.json")
    given = parser.parse_args(list(argv))
    from rich.progress import Progress as Bar  # 0.1 s, wanted here only

    with Bar(transient=True) as bar:
        task = bar.add_task(f"tokens of {given.source}", total=None)
        made = prepare(
            given.source,
            given.out,
            given.tokenizer,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(f"{made.path}: {made.num_tokens:,} tokens of {made.vocab_size:,} kinds")
    print(f"use it with   data: {{name: tokens, args: {{path: {made.path}}}}}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where="the command 'lockstep data'", fix="`lockstep data prepare --help` says more")


def _pieces(source: Path | str, tokenizer: Tokenizer, progress: Progress) -> tuple[Iterator[NDArray[Any]], str]:
    """The tokens a piece at a time, and the source in words."""
    if str(source) == "python-docs":
        return _of_topics(tokenizer, progress), source_line()
    return _of_files(text_files(Path(source)), tokenizer, progress), str(source)


def _of_topics(tokenizer: Tokenizer, progress: Progress) -> Iterator[NDArray[Any]]:
    texts = topics()
    yield tokenizer.encode_array("\n\n".join(texts))  # as the data set python-docs has them
    progress(len(texts), len(texts))


def _of_files(files: list[Path], tokenizer: Tokenizer, progress: Progress) -> Iterator[NDArray[Any]]:
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        for chunk in read_chunks(file):
            yield tokenizer.encode_array(chunk)
            done += len(chunk.encode())
            progress(done, total)


def _write(path: Path, pieces: Iterator[NDArray[Any]], dtype: np.dtype[Any]) -> int:
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.astype(dtype).tobytes())
            count += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return count


def _silent(_done: int, _total: int) -> None:
    return None
