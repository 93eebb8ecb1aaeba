"""Text data sets: `text`, `python-docs` and `tokens`.

They are the user's files, a part of Python, and what was tokenized beforehand.

Tests: tests/data/test_datasets.py
"""

import io
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.batches import Data
from lockstep.data.language import DocumentEncoder, TextOptions, Tokenizer, language_data
from lockstep.data.token_folder import (
    TOKENS,
    TokenFile,
    holds_pairs,
    read_header,
    tokenizer_of,
)
from lockstep.errors import UsageError, first_line
from lockstep.files.data_files import (
    DAMAGED,
    as_documents,
    files_of,
    line_of_data,
    opened_lines,
    require_text,
    told_of_json,
)
from lockstep.files.paths import local_path
from lockstep.machine.environment import rank_facts
from lockstep.machine.progress import Advance, progress_of

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
    special_tokens: bool = False,
) -> Data:
    """Return the text of a file, or of all files in a folder, sorted by name.

    Raise a UsageError if it can't be used.

    With `documents`, each file of a folder, or each line of a single file, is a document, padded to
    `block_size`. With `special_tokens`, the text of a special token becomes that token.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    chosen = Tokenizer(tokenizer)
    encoder = DocumentEncoder(chosen, special_tokens)
    files = files_of(local_path(path, "data.args.path"))
    for file in files:
        require_text(file)
    notices = told_of_json(files)
    if documents:
        if Path(path).is_file():
            lines = (line for chunk in read_chunks(files[0]) for line in chunk.splitlines())
            pieces = [encoder.encode(line) for line in lines if line.strip()]
        else:
            pieces = [encoder.encode("".join(read_chunks(file))) for file in files]
        data = language_data(*options.split(pieces), options, path, chosen, documents=True)
        return replace(data, notices=[*notices, *encoder.notices(path)])
    size = sum(file.stat().st_size for file in files)
    # every rank tokenizes
    with progress_of(f"tokens of {path}", size, shows=rank_facts().is_main) as advance:
        tokens = np.concatenate(list(token_pieces(files, encoder, advance)))
    data = language_data(*options.split(tokens), options, path, chosen)
    return replace(data, notices=[*notices, *encoder.notices(path)])


def token_pieces(
    files: list[Path], encoder: DocumentEncoder, advance: Advance
) -> Iterator[NDArray[Any]]:
    """Yield the tokens of text files in pieces, and call `advance` with the bytes of each."""
    for file in files:
        for chunk in read_chunks(file):
            yield encoder.encode(chunk)
            advance(len(chunk.encode()))


def read_chunks(file: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of whole lines; raise a UsageError if it is not UTF-8.

    It may be compressed, which its name says.
    """
    try:
        with opened_lines(file) as packed:
            opened = io.TextIOWrapper(packed, encoding="utf-8", newline="")
            while chunk := opened.read(CHUNK):
                yield chunk + opened.readline()
    except DAMAGED as error:
        what = f"{file} can't be read"
        fix = "mend it, or move it out of the folder"
        raise UsageError(what, where="data.args.path", why=first_line(error), fix=fix) from None
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


def tokens(
    *, path: str, block_size: int = 256, stride: int | None = None, validation_fraction: float = 0.1
) -> Data:
    """Return the tokens in the folder `path`, which `lockstep data prepare` made.

    A UsageError is raised if there are none.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    folder = local_path(path, "data.args.path")
    header = read_header(folder)
    if holds_pairs(header):
        what = f"{path} holds pairs of answers, and the data set tokens trains every token"
        fix = f"write {line_of_data('preferences', sources=[path])}"
        raise UsageError(what, where="data.name", fix=fix)
    if header.get("has_answers"):
        what = f"{path} holds conversations, and the data set tokens trains every token"
        fix = f"write {as_documents(path)}"
        raise UsageError(what, where="data.name", fix=fix)
    count = header["num_tokens"]
    dtype = header["dtype"]
    border = options.border(count)
    train = TokenFile(folder / TOKENS, dtype, 0, border)
    validation = TokenFile(folder / TOKENS, dtype, border, count)
    source = f"{path} ({header['source']})"
    return language_data(train, validation, options, source, tokenizer_of(folder, header))
