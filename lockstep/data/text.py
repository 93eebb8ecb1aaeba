"""`text`: text files of the user's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import Data
from lockstep.data.language import Cut, document_data, text_data
from lockstep.data.tokenizers import Tokenizer
from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.progress import Advance, progress_of

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
    """The text of a file, or of all files in a folder, sorted by name.

    With `documents`, each file of a folder, or each line of a single file, is a document, padded to `block_size`.

    Raises:
        UsageError: no such path, no text in it, text that is not UTF-8, or too little for one sample.
    """
    cut, chosen, files = Cut(block_size, stride, validation_fraction), Tokenizer(tokenizer), text_files(Path(path))
    if documents:
        return document_data(*cut.parts(_documents(Path(path), files, chosen)), cut, path, chosen)
    size = sum(file.stat().st_size for file in files)
    with progress_of(f"tokens of {path}", size, shows=rank_facts().is_main) as advance:  # every rank makes its own
        tokens = np.concatenate(list(token_pieces(files, chosen, advance)))
    return text_data(*cut.parts(tokens), cut, path, chosen, chosen.vocab_size)


def token_pieces(files: list[Path], tokenizer: Tokenizer, advance: Advance) -> Iterator[NDArray[Any]]:
    """The tokens of text files, a piece at a time; `advance` is told of the bytes of each."""
    for file in files:
        for chunk in read_chunks(file):
            yield tokenizer.encode_array(chunk)
            advance(len(chunk.encode()))


def text_files(path: Path) -> list[Path]:
    """The files that `path` names, those of a folder by their relative names; hidden ones are left out.

    Raises:
        UsageError: there is nothing there, or nothing in it.
    """
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {str(path)!r}",
            where="data.args.path",
            fix="give the path of a text file, or of a folder of them",
        )
    files = [path] if path.is_file() else sorted(_inside(path), key=lambda file: file.relative_to(path).as_posix())
    if not any(file.stat().st_size for file in files):
        what = "is empty" if path.is_file() else "holds no text: no file in it, or only empty ones"
        raise UsageError(
            f"{path} {what}", where="data.args.path", fix="give the path of a text file, or of a folder of them"
        )
    return files


def read_chunks(file: Path) -> Iterator[str]:
    """The text of a file in pieces of whole lines.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            while chunk := opened.read(CHUNK):
                yield chunk + opened.readline()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 text",
            where="data.args.path",
            why=f"{error.reason}: byte 0x{error.object[error.start]:02x}",
            fix="convert it (`iconv -t utf-8`), or move files that are no text out of the folder",
        ) from None


def _inside(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def _documents(path: Path, files: list[Path], tokenizer: Tokenizer) -> list[NDArray[Any]]:
    if path.is_file():
        lines = (line for chunk in read_chunks(path) for line in chunk.splitlines())
        return [tokenizer.encode_array(line) for line in lines if line.strip()]
    return [tokenizer.encode_array("".join(read_chunks(file))) for file in files]
