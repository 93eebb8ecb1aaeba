"""Reads documents from files, record by record.

| files | a document is |
|---|---|
| `.jsonl` | a line: an object with the text, or a conversation, in one of its fields |
| `.parquet`, `.arrow`, `.csv`, `.tsv` | a row, likewise with one in one of its columns |
| one array of JSON | an object in it, likewise; the file is read in full |
| `.npy` | a row of token numbers, or all of them where there is one dimension |
| any other, not compressed | the file, UTF-8 text, which comes in several records |

Files of JSON and of columns may be compressed: `.jsonl.gz`, `.csv.zst`.

A record's number follows from the files alone, so that a reader can go on after any of them.

Tests: tests/data/test_document_files.py
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.answer_pairs import AnswerPair, pair_of
from lockstep.data.prompts import conversation_of
from lockstep.data.text import CHUNK, read_chunks
from lockstep.errors import UsageError, first_line, listed
from lockstep.files.data_files import (
    DAMAGED,
    Kind,
    as_keys,
    conversation_keys,
    kind_of,
    opened_lines,
    require_read,
    row_of_line,
    rows_of_array,
    separator_of,
)
from lockstep.files.row_fields import (
    field_of_row,
    has_field,
    names_of_fields,
    with_messages_read,
)

ROWS = 1024  # that are read at once from a parquet file


@dataclass(frozen=True)
class Field:
    """Names the field of a row that holds the document."""

    name: str = "text"
    holds_messages: bool = False  # it is a conversation, not a text
    prompts: tuple[str, ...] = ()  # the fields of what it answers, where it is an answer
    rejected: str | None = None  # the field of a worse answer, where it is the better of two

    @property
    def key(self) -> str:
        """The key of a config that names it."""
        if self.rejected is not None:
            return "chosen_field"
        if self.prompts:
            return "answer_field"
        return "messages_field" if self.holds_messages else "text_field"


TEXT = Field()


@dataclass(frozen=True)
class Record:
    """A document, or a part of one that is long."""

    # its text, its tokens, or the messages of it; or two conversations
    content: str | NDArray[Any] | list[Any] | AnswerPair
    where: str  # the file, and the line or the row in it
    size: int  # bytes of the file, about
    row: Mapping[str, Any] | None = None  # what else is known of the document
    ends: bool = True  # the document ends with it
    fault: UsageError | None = None  # why its row holds no document: filters are asked first


def records_of(file: Path, field: Field = TEXT, first: int = 0) -> Iterator[Record | None]:
    """Yield the records of a file from the number `first` on; None for a blank line.

    A UsageError names the line or the row that can't be read.
    """
    kind = kind_of(file)
    if kind is Kind.LINES:
        return islice(_of_lines(file, field, first), first, None)
    if kind is Kind.PARQUET:
        return _of_parquet(file, field, first)
    if kind is Kind.ARROW:
        return _of_arrow(file, field, first)
    if kind is Kind.COLUMNS:
        return _of_columns(file, field, first)
    if kind is Kind.JSON_ARRAY:
        return _of_rows(file, rows_of_array(file)[first:], field, first)
    require_read(file, "data.args.sources")
    if field.holds_messages:
        what = f"{file} holds no rows, and so no conversations"
        fix = "write them as .jsonl, .csv, .parquet or .arrow"
        raise UsageError(what, where="messages_field", fix=fix)
    if kind is Kind.TOKENS:
        return islice(_of_tokens(file), first, None)
    return islice(_of_text(file), first, None)


def _of_lines(file: Path, field: Field, first: int) -> Iterator[Record | None]:
    """Yield a record for each line; those before `first` are not looked at."""
    number = 0
    try:
        with opened_lines(file) as opened:
            for number, line in enumerate(opened, start=1):
                skipped = number <= first or not line.strip()
                yield None if skipped else _of_line(file, number, line, field)
    except DAMAGED as error:
        what = f"{file} can't be read after line {number}"
        raise UsageError(what, where=f"{file}:{number + 1}", why=str(error)) from None


def _of_line(file: Path, number: int, line: bytes, field: Field) -> Record:
    """Return the record of a line of JSON, or raise a UsageError with its number."""
    row = row_of_line(file, number, line, field.name)
    return record_of(row, field, f"{file}:{number}", len(line))


def record_of(row: Mapping[str, Any], field: Field, where: str, size: int | None = None) -> Record:
    """Return the record of a row; where it holds no document, one that says why.

    Args:
        size: in bytes; unset: as many as the document has letters.
    """
    try:
        content = content_of(row, field, where)
    except UsageError as fault:
        return Record("", where, size or 0, row, fault=fault)
    return Record(content, where, len(str(content)) if size is None else size, row)


def content_of(row: Mapping[str, Any], field: Field, where: str) -> Any:
    """Return the document in a row, or raise a UsageError that names what is there instead."""
    if field.rejected is not None:
        return pair_of(row, field.prompts, field.name, field.rejected, where)
    if field.prompts:
        return conversation_of(row, field.prompts, field.name, where)
    if not has_field(row, field.name):
        what = f"there is no {field.name!r} in {where}"
        holds = "the messages" if field.holds_messages else "the text"
        fix = f"name the field that holds {holds}: it has {listed(names_of_fields(row)) or 'none'}"
        keys = {} if field.holds_messages else conversation_keys(row)
        if keys:
            fix = f"of conversations write {as_keys(keys)}"
        raise UsageError(what, where=field.key, fix=fix)
    content = field_of_row(row, field.name)
    if field.holds_messages:
        content = with_messages_read(content)
    kind = type(content).__name__
    if field.holds_messages and not isinstance(content, list):
        what = f"{field.name!r} is {kind}, not a list of messages, in {where}"
        raise UsageError(what, where=where, fix="name a field of messages, or leave the row out")
    if not field.holds_messages and not isinstance(content, str):
        what = f"{field.name!r} is {kind}, not text, in {where}"
        raise UsageError(what, where=where, fix="name a field of text, or leave the row out")
    return content


def _of_parquet(file: Path, field: Field, first: int) -> Iterator[Record]:
    """Yield a record for each row of a parquet file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise _needs(file, "pyarrow") from None
    try:
        yield from _of_batches(file, ParquetFile(file).iter_batches(ROWS), field, first)
    except (ArrowException, OSError) as error:
        raise UsageError(
            f"{file} is not a parquet file that can be read",
            where="data.args.sources",
            why=first_line(error),
        ) from None


def _of_columns(file: Path, field: Field, first: int) -> Iterator[Record]:
    """Yield a record for each row of a file with columns of text, which is read in full.

    What is not the document may be numbers, where a column has no other values.
    """
    try:
        import pyarrow
        from pyarrow import csv
    except ImportError:
        raise _needs(file, "pyarrow") from None
    # A text of digits is a text.
    named = [field.name, *field.prompts, *([field.rejected] if field.rejected else [])]
    texts = dict.fromkeys(named, pyarrow.string())
    options = {
        "parse_options": csv.ParseOptions(delimiter=separator_of(file), newlines_in_values=True),
        "convert_options": csv.ConvertOptions(column_types=texts),
    }
    try:
        with opened_lines(file) as opened:
            table = csv.read_csv(opened, **options)
    except (pyarrow.ArrowException, *DAMAGED) as error:
        what = f"{file} holds no columns that can be read"
        fix = "write it as UTF-8, with a first line of names, and commas (.csv) or tabs (.tsv)"
        why = first_line(error)
        raise UsageError(what, where="data.args", why=why, fix=fix) from None
    yield from _of_batches(file, table.to_batches(ROWS), field, first)


def _of_batches(file: Path, batches: Iterable[Any], field: Field, first: int) -> Iterator[Record]:
    """Yield a record for each row of a table from the number `first` on."""
    begin = 0
    for batch in batches:
        skipped = max(0, first - begin)
        rows = batch.slice(skipped).to_pylist() if skipped < len(batch) else []
        yield from _of_rows(file, rows, field, begin + skipped)
        begin += len(batch)


def _of_arrow(file: Path, field: Field, first: int) -> Iterator[Record]:
    """Yield a record for each row of a file that the package `datasets` wrote."""
    try:
        import datasets
    except ImportError:
        raise _needs(file, "datasets") from None
    try:
        rows = datasets.Dataset.from_file(str(file))
    except Exception as error:  # the package and pyarrow raise many kinds
        what = f"{file} is not an Arrow file that can be read"
        why = first_line(error)
        raise UsageError(what, where="data.args.sources", why=why) from None
    yield from _of_rows(file, (rows[n] for n in range(first, len(rows))), field, first)


def _of_rows(file: Path, rows: Any, field: Field, first: int) -> Iterator[Record]:
    for number, row in enumerate(rows, start=first):
        yield record_of(row, field, f"{file}, row {number}")


def _of_tokens(file: Path) -> Iterator[Record]:
    """Yield a record for each row of token numbers; they are mapped into memory."""
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        what = f"{file} is not an array that can be read"
        raise UsageError(what, where="data.args.sources", why=str(error)) from None
    if tokens.dtype.kind not in "ui" or tokens.ndim not in (1, 2):
        what = f"{file} holds {tokens.dtype} of {tokens.ndim} dimensions, which are not tokens"
        fix = "save whole numbers of one dimension, or a document in each row"
        raise UsageError(what, where="data.args.sources", fix=fix)
    for number, row in enumerate(tokens if tokens.ndim == 2 else tokens[None]):
        for begin in range(0, max(len(row), 1), CHUNK):
            part = np.asarray(row[begin : begin + CHUNK])
            ends = begin + CHUNK >= len(row)
            yield Record(part, f"{file}, row {number}", part.nbytes, ends=ends)


def _of_text(file: Path) -> Iterator[Record]:
    """Yield the chunks of a text; the last one ends the document."""
    before: str | None = None
    for chunk in read_chunks(file):
        if before is not None:
            yield Record(before, str(file), len(before.encode()), ends=False)
        before = chunk
    yield Record(before or "", str(file), len((before or "").encode()))


def _needs(file: Path, package: str) -> UsageError:
    fix = 'pip install "lockstep-train[datasets]"'
    return UsageError(f"reading {file} needs the package {package}", where="data.args", fix=fix)
