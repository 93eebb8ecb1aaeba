"""`text`: text files of the user's own; `python-docs`: the documentation that is part of Python."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import Data
from lockstep.data.language import TextOptions, document_data, text_data
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
    """Return the text of a file, or of all files in a folder, sorted by name.

    With `documents`, each file of a folder, or each line of a single file, is a document, padded to `block_size`.

    Raises:
        UsageError: no such path, no text in it, text that is not UTF-8, or too little for one sample.
    """
    options, chosen, files = (
        TextOptions(block_size, stride, validation_fraction),
        Tokenizer(tokenizer),
        text_files(Path(path)),
    )
    if documents:
        return document_data(*options.split(_documents(Path(path), files, chosen)), options, path, chosen)
    size = sum(file.stat().st_size for file in files)
    with progress_of(f"tokens of {path}", size, shows=rank_facts().is_main) as advance:  # every rank tokenizes
        tokens = np.concatenate(list(token_pieces(files, chosen, advance)))
    return text_data(*options.split(tokens), options, path, chosen, chosen.vocab_size)


def token_pieces(files: list[Path], tokenizer: Tokenizer, advance: Advance) -> Iterator[NDArray[Any]]:
    """Yield the tokens of text files in pieces, and call `advance` with the bytes of each."""
    for file in files:
        for chunk in read_chunks(file):
            yield tokenizer.encode_array(chunk)
            advance(len(chunk.encode()))


def text_files(path: Path) -> list[Path]:
    """Return the files that `path` names, those of a folder by their relative names; hidden ones are left out.

    Raises:
        UsageError: the path does not exist, or has no text.
    """
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {str(path)!r}",
            where="data.args.path",
            fix="give the path of a text file, or of a folder of them",
        )
    files = [path] if path.is_file() else sorted(_inside(path), key=lambda file: file.relative_to(path).as_posix())
    if not any(file.stat().st_size for file in files):
        what = "is empty" if path.is_file() else "has no text: no file in it, or only empty ones"
        raise UsageError(
            f"{path} {what}", where="data.args.path", fix="give the path of a text file, or of a folder of them"
        )
    return files


def read_chunks(file: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of whole lines.

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
            fix="convert it (`iconv -t utf-8`), or move files without text out of the folder",
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


def topics() -> list[str]:
    """Return the texts, sorted by their topic's name.

    Raises:
        UsageError: this Python was built without them.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        raise UsageError(
            "this Python comes without its documentation (the module pydoc_data)",
            where="data.name: python-docs",
            fix="use another data set (text, with a path of your own), or a Python with its whole library",
        ) from None
    return [texts[name] for name in sorted(texts)]


def source_line() -> str:
    """Return a description of the source."""
    return f"the topics of Python {platform.python_version()}'s own documentation"


def python_docs(
    *,
    block_size: int = 256,
    stride: int | None = None,
    validation_fraction: float = 0.1,
    tokenizer: str = "bytes",
    documents: bool = False,
) -> Data:
    """Return the language reference that is part of every CPython (`pydoc_data.topics`), about 0.5 MB of text.

    It needs no download and no file. It differs a little between versions of Python: `source` names the version. With
    `documents`, a topic is a document, padded to `block_size`.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    chosen = Tokenizer(tokenizer)
    source = source_line()
    if documents:
        return document_data(*options.split([chosen.encode_array(text) for text in topics()]), options, source, chosen)
    tokens = chosen.encode_array("\n\n".join(topics()))
    return text_data(*options.split(tokens), options, source, chosen, chosen.vocab_size)
