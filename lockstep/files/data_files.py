"""Tells what files of data hold: text, records, or something else, by their names and first bytes.

A file of records (JSON lines, a table) is characters, too, and a model of text would learn its
braces and keys. So whoever wants text asks here first, and the launcher does before ranks start.

Does not import torch.
"""

import csv
import gzip
import importlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from glob import glob
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import IO, Any

import yaml

from lockstep.errors import UsageError, first_line, listed
from lockstep.files.paths import local_path
from lockstep.files.row_fields import (
    field_of_row,
    has_field,
    is_conversation,
    names_of_fields,
    with_messages_read,
)

HEADER = "tokens.json"  # is in a folder that `lockstep data prepare` made
HEAD = 1 << 16  # bytes that are looked at
LONGEST_LINE = 1 << 24  # bytes of a first line that is looked at

COMPRESSED = (".zst", ".xz", ".bz2", ".zip", ".gz", ".tar", ".tgz", ".7z")
_LINES = re.compile(r"\.(jsonl|ndjson)(\.gz|\.zst)?$")
_COLUMNS = re.compile(r"\.(csv|tsv)(\.gz|\.zst)?$")
_TEXTS = re.compile(r"\.txt(\.gz|\.zst)?$")
_PACKED_JSON = re.compile(r"\.json(\.gz|\.zst)$")
_MAGIC = {  # what files begin with, and the ending of their names
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"\x93NUMPY": ".npy",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\xfd7zXZ": ".xz",
    b"PK\x03\x04": ".zip",
    b"SQLite format 3": ".sqlite",
    b"\x89HDF": ".h5",
}


# The keys of a source that say what is trained of a row.
FIELD_KEYS = ("text_field", "messages_field", "prompt_field", "answer_field")

# Names under which data sets hold a prompt and its answer.
_PROMPTS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
# What stands before a prompt, or belongs to an instruction, in a field of its own.
_BEFORE = ("system", "system_prompt")
_AFTER_INSTRUCTION = ("input", "context")


# Names under which data sets hold two answers, of which the first was preferred, and their prompt.
_PAIRS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
PROMPTS_OF_PAIRS = ("prompt", "input", "instruction", "question")


class Kind(Enum):
    """Names what a file of data holds."""

    TEXT = "text"
    LINES = "an object of JSON on each line"
    PARQUET = "rows of a table"
    ARROW = "rows of a table, of Arrow"
    TOKENS = "an array"
    JSON_ARRAY = "one array of JSON"
    COLUMNS = "columns"
    COMPRESSED = "compressed bytes"
    BINARY = "bytes that are not text"


_BY_ENDING = {
    ".parquet": Kind.PARQUET,
    ".arrow": Kind.ARROW,
    ".npy": Kind.TOKENS,
    **dict.fromkeys(COMPRESSED, Kind.COMPRESSED),
}
# Kinds of files with rows, and those of which the data set `documents` makes documents.
ROWS = (Kind.LINES, Kind.PARQUET, Kind.ARROW, Kind.JSON_ARRAY, Kind.COLUMNS)
READ = (Kind.TEXT, Kind.TOKENS, *ROWS)


def kind_of(file: Path) -> Kind:
    """Return what a file holds.

    A name that ends with `.txt` is believed to be of text, also where that is JSON.
    """
    name = file.name.lower()
    if _LINES.search(name):
        return Kind.LINES
    if _COLUMNS.search(name):
        return Kind.COLUMNS
    if _PACKED_JSON.search(name):
        return _of_packed_json(file)
    if _TEXTS.search(name) and not name.endswith(".txt"):
        return Kind.TEXT
    if (kind := _BY_ENDING.get(file.suffix.lower())) is not None:
        return kind
    with file.open("rb") as opened:
        head = opened.read(HEAD)
    if b"\0" in head or any(head.startswith(magic) for magic in _MAGIC):
        return Kind.BINARY
    return Kind.TEXT if name.endswith(".txt") else _of_json(file, head) or Kind.TEXT


def told_of_json(files: Sequence[Path]) -> list[str]:
    """Return a line on files that are named as texts, and look like JSON of records."""
    found = []
    for file in files:
        if _TEXTS.search(file.name.lower()):
            with (
                suppress(*DAMAGED),
                opened_lines(file) as opened,
            ):  # who reads it says what is wrong
                if _of_json(file, opened.read(HEAD)) is not None:
                    found.append(str(file))
    if not found:
        return []
    return [
        f"JSON is trained as it stands, braces and keys, in {listed(found)}: rows become documents"
        " where the name ends with .jsonl"
    ]


def _of_packed_json(file: Path) -> Kind:
    """Return what kind of records a compressed file of JSON has.

    Of a file that is damaged, its lines are read: who does it says what is wrong.
    """
    try:
        with opened_lines(file) as opened:
            head = opened.read(HEAD)
        return _of_json(file, head) or Kind.COMPRESSED
    except DAMAGED:
        return Kind.LINES


def _of_json(file: Path, head: bytes) -> Kind | None:
    """Return what kind of records a file of JSON has; None for other files.

    A single object, such as a file of settings, is a text among others.
    """
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"\[\s*\{", begin):
        return Kind.JSON_ARRAY
    if not begin.startswith(b"{"):
        return None
    with opened_lines(file) as opened:
        lines = iter(lambda: opened.readline(LONGEST_LINE), b"")
        first_two = list(islice((line for line in lines if line.strip()), 2))
    with suppress(ValueError, RecursionError):
        if len(first_two) == 2 and all(isinstance(json.loads(line), dict) for line in first_two):
            return Kind.LINES
    return None


# What reading compressed lines raises where the file is damaged or cut off.
DAMAGED = (OSError, EOFError, zlib.error)


@contextmanager
def opened_lines(file: Path) -> Iterator[IO[bytes]]:
    """Open a file of lines to read, which may be compressed.

    Who reads it gets one of `DAMAGED` if it is damaged or cut off.
    """
    name = file.name.lower()
    if name.endswith(".zst"):
        with file.open("rb") as packed:
            yield io.BufferedReader(_Unpacked(packed, file), HEAD)
        return
    opens: Any = gzip.open if name.endswith(".gz") else open
    with opens(file, "rb") as opened:
        yield opened


class _Unpacked(io.RawIOBase):
    """Reads what a file holds that zstandard has packed.

    The library's own reader passes over the end of a file that is cut off.
    """

    def __init__(self, packed: IO[bytes], file: Path) -> None:
        try:
            self._library = importlib.import_module("zstandard")
        except ImportError:
            what = f"reading {file} needs the package zstandard"
            fix = 'pip install "lockstep-train[zstd]"'
            raise UsageError(what, where="data.args", fix=fix) from None
        self._packed = packed
        self._rest = b""  # of the packed bytes
        self._ready = b""
        self._frame: Any = None  # a file consists of one or more

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what is unpacked next; return how many bytes, 0 at the end."""
        while not self._ready:
            chunk = self._rest or self._packed.read(HEAD)
            self._rest = b""
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the file ends in the midst of compressed data")
                return 0
            if self._frame is None:
                unpacker = self._library.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = unpacker.decompressobj()
            try:
                self._ready = self._frame.decompress(chunk)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def row_of_line(file: Path, number: int, line: bytes, name: str) -> dict[str, Any]:
    """Return the object of a line of JSON, or raise a UsageError with its number.

    Args:
        name: of a field that an object would have, for an example.
    """
    where = f"{file}:{number}"
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        what = f"line {number} of {file.name} is not UTF-8"
        fix = "write the file as UTF-8: iconv -f latin1 -t utf-8, or -f utf-16, as it was written"
        raise UsageError(what, where=where, why=str(error), fix=fix) from None
    except RecursionError:
        what = f"line {number} of {file.name} is nested too deep"
        raise UsageError(what, where=where, fix="leave the line out") from None
    except ValueError as error:
        # json's own line and column are those within this line
        why = getattr(error, "msg", str(error))
        column = f", at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        what = f"line {number} of {file.name} is not JSON"
        fix = "write an object on each line, or leave the line out"
        raise UsageError(what, where=where, why=f"{why}{column}", fix=fix) from None
    if not isinstance(row, dict):
        what = f"line {number} of {file.name} is a {type(row).__name__}, not an object"
        raise UsageError(what, where=where, fix=f'write {{"{name}": "…"}}')
    return row


def rows_of_array(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that is one array of JSON, or raise a UsageError."""
    try:
        with opened_lines(file) as opened:
            rows = json.loads(opened.read())
    except (*DAMAGED, ValueError, RecursionError) as error:  # UTF-8 that is none is one, too
        what = f"{file} is not JSON"
        why = first_line(error)
        raise UsageError(what, where="data.args", why=why, fix="mend it, or leave it out") from None
    wrong = next((n for n, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        what = f"row {wrong} of {file} is a {type(rows[wrong]).__name__}, not an object"
        raise UsageError(what, where=f"{file}, row {wrong}", fix='write {"text": "…"}')
    return list(rows)


def separator_of(file: Path) -> str:
    """Return what stands between the columns of a file of them."""
    found = _COLUMNS.search(file.name.lower())
    return "\t" if found is not None and found[1] == "tsv" else ","


def first_row(file: Path) -> Mapping[str, Any]:
    """Return the first row of a file of records; nothing if it can't be read."""
    kind = kind_of(file)
    with suppress(Exception):  # whoever reads all of it says what is wrong
        if kind is Kind.LINES:
            with opened_lines(file) as opened:
                line = next(line for line in opened if line.strip())
            row = json.loads(line)
            return row if isinstance(row, dict) else {}
        if kind is Kind.JSON_ARRAY:
            return dict(rows_of_array(file)[0])
        if kind is Kind.COLUMNS:
            with opened_lines(file) as opened:
                text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
                return dict(next(csv.DictReader(text, delimiter=separator_of(file))))
        if kind is Kind.PARQUET:
            parquet = importlib.import_module("pyarrow.parquet").ParquetFile(file)
            return dict(next(parquet.iter_batches(1)).to_pylist()[0])
        if kind is Kind.ARROW:
            return dict(importlib.import_module("datasets").Dataset.from_file(str(file))[0])
    return {}


def files_of(path: Path, where: str = "data.args.path") -> list[Path]:
    """Return the files that `path` names, by their relative names, without hidden ones.

    Raise a UsageError if none.
    """
    fix = "give the path of a text file, or of a folder of them"
    matching = [] if path.exists() else _matching(path)
    if matching:
        return matching
    if not path.exists():
        raise UsageError(f"there is no file or folder {str(path)!r}", where=where, fix=fix)
    files = [path]
    if path.is_dir():
        inside = {
            file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()
        }
        # without hidden ones
        files = [inside[name] for name in sorted(inside) if not re.search(r"(^|/)\.", name)]
    if not any(file.stat().st_size for file in files):
        what = "is empty" if path.is_file() else "has no text: no file in it, or only empty ones"
        raise UsageError(f"{path} {what}", where=where, fix=fix)
    return files


def _matching(path: Path) -> list[Path]:
    """Return the files that a path with `*` matches, in order, without hidden or empty ones."""
    if not any(sign in str(path) for sign in "*?["):
        return []
    found = (Path(each) for each in glob(str(path), recursive=True))
    return sorted(each for each in found if each.is_file() and each.stat().st_size)


def require_text(file: Path, where: str = "data.args.path") -> None:
    """Raise a UsageError, with what to write instead, unless a file holds text."""
    kind = kind_of(file)
    if kind in READ and kind is not Kind.TEXT:
        raise UsageError(
            f"{file} holds {kind.value}, not text",
            where=where,
            why="its brackets, keys and numbers would be trained as they stand",
            fix=f"write {as_documents(source_of(file))}" + _or_as_text(file, kind),
        )
    require_read(file, where)


def require_read(file: Path, where: str) -> None:
    """Raise a UsageError, with what to do, unless documents are made of files of its kind."""
    kind = kind_of(file)
    if kind in READ:
        return
    fix = (
        "convert it to text, JSON lines or parquet, or name the files that are meant:"
        f' path: "{file.parent}/**/*.py"'
    )
    if kind is Kind.COMPRESSED:
        fix = "unpack it; compressed are read .txt.gz, .jsonl.gz, .csv.gz and the like, and .zst"
    elif found := _by_magic(file):
        names = f"{quote(str(file))} {quote(str(file.with_suffix(found)))}"
        fix = f"it is a {found} file: name it so, mv {names}"
    elif file.suffix == ".bin":
        tokens = file.with_suffix(".npy")
        read = f"np.fromfile({json.dumps(str(file))}, np.uint16)"
        code = f"import numpy as np; np.save({json.dumps(str(tokens))}, {read})"
        fix = (
            f"of tokens in 16 bits make an array, python -c {quote(code)}, and write"
            f" {as_documents(str(tokens))}"
        )
    raise UsageError(f"{file} holds {kind.value}", where=where, fix=fix)


def _or_as_text(file: Path, kind: Kind) -> str:
    if kind not in (Kind.LINES, Kind.JSON_ARRAY, Kind.COLUMNS):
        return ""
    return f"; to train its characters as they are, name it {file.stem}.txt"


def _by_magic(file: Path) -> str | None:
    with file.open("rb") as opened:
        head = opened.read(16)
    return next((ending for magic, ending in _MAGIC.items() if head.startswith(magic)), None)


def as_documents(source: str | Mapping[str, Any]) -> str:
    """Return the line of a config that trains on the documents of a source."""
    return line_of_data("documents", sources=[source])


def line_of_data(name: str, **args: Any) -> str:
    """Return the line of a config that names a data set, whatever signs a path holds."""
    return f"data: {{{as_keys({'name': name, 'args': args})}}}"


def source_of(file: Path) -> str | dict[str, Any]:
    """Return what a config has for a file of records as a source of `documents`."""
    row = first_row(file)
    if not row or isinstance(row.get("text", 0), str | None):  # a row may have no text
        return str(file)
    if keys := conversation_keys(row):
        return {"path": str(file), **keys}
    texts = {name: field_of_row(row, name) for name in names_of_fields(row)}
    lengths = {name: len(text) for name, text in texts.items() if isinstance(text, str)}
    named = max(lengths, key=lambda name: lengths[name]) if lengths else "NAME"
    return {"path": str(file), "text_field": str(named)}


def conversation_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a source that say where its rows hold conversations; none without any.

    Of other names than `messages` those of a prompt and its answer come first: TRL's prompts
    are lists of messages, too.
    """
    chats = [str(key) for key, value in row.items() if _is_chat(value)]
    if "messages" in chats or row.get("messages", 0) is None:  # a row may have none
        return {"messages_field": "messages"}
    for prompt, answer in _PROMPTS:
        if all(_says_something(row.get(key)) for key in (prompt, answer)):
            return {"prompt_field": _prompt_fields(row, prompt), "answer_field": answer}
    return {"messages_field": chats[0]} if chats else {}


def preference_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a source that say where its rows hold pairs of answers; none without any.

    The prompt is named where the answers do not begin with it.
    """
    for chosen, rejected in _PAIRS:
        if all(isinstance(row.get(key), str | list | dict) for key in (chosen, rejected)):
            keys = {"chosen_field": chosen, "rejected_field": rejected}
            answer = with_messages_read(row[chosen])
            first = answer[0] if isinstance(answer, list) and answer else answer
            roles = {first.get("role"), first.get("from")} if isinstance(first, dict) else set()
            named = next((key for key in PROMPTS_OF_PAIRS if row.get(key)), None)
            if named is not None and not roles & {"system", "user", "human", "developer"}:
                return {"prompt_field": _prompt_fields(row, named), **keys}
            return keys
    return {}


def _prompt_fields(row: Mapping[str, Any], prompt: str) -> str | list[str]:
    """Return the field of a prompt, or with what belongs to it several; of messages, that one."""
    if not isinstance(with_messages_read(row[prompt]), str):
        return prompt
    before = [name for name in _BEFORE if name in row]
    after = [name for name in _AFTER_INSTRUCTION if name in row and prompt == "instruction"]
    names = [*before[:1], prompt, *after[:1]]
    return names if len(names) > 1 else prompt


def _says_something(value: Any) -> bool:
    """Return whether a field of a row holds a text or messages."""
    return isinstance(value, str) or is_conversation(value)


def _is_chat(value: Any) -> bool:
    """Return whether a field of a row holds messages, also as JSON in a text."""
    return is_conversation(with_messages_read(value))


def source_like(path: Path, trained_on: Sequence[Any]) -> str | dict[str, Any]:
    """Return a source of a path whose rows are read as those of other sources, where they can be.

    Args:
        path: a file, a folder of files, or one of tokens.
        trained_on: sources as a config lists them; of those, the first whose fields the rows have
            says what of a row is a document. Without one, the names of the row's fields do.
    """
    if (path / HEADER).exists():
        return str(path)
    row = first_row(files_of(path)[0])
    for source in trained_on:
        given = source if isinstance(source, Mapping) else {}
        keys = {key: given[key] for key in FIELD_KEYS if key in given}
        named = [name for value in keys.values() for name in _listed(value)] or ["text"]
        if all(has_field(row, name) for name in named):
            if "special_tokens" in given:
                keys["special_tokens"] = given["special_tokens"]
            return {"path": str(path), **keys} if keys else str(path)
    keys = conversation_keys(row) if row and "text" not in row else {}
    return {"path": str(path), **keys} if keys else str(path)


def pairs_like(path: Path, trained_on: Sequence[Any]) -> str | dict[str, Any]:
    """Return a source of pairs of answers at a path, whose rows are read as those of another one.

    Args:
        path: a file, a folder of files, or one of tokens.
        trained_on: sources as a config lists them, of which the first one counts.
    """
    if (path / HEADER).exists():
        return str(path)
    source = trained_on[0] if trained_on else {}
    given = source if isinstance(source, Mapping) else {}
    keys = ("prompt_field", "chosen_field", "rejected_field", "special_tokens")
    return {"path": str(path), **{key: given[key] for key in keys if key in given}}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_keys(keys: Mapping[str, Any]) -> str:
    """Return keys and values as a config has them between braces."""
    flow = yaml.safe_dump(
        dict(keys), default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return flow.strip()[1:-1]


# Data sets of rows with two fields, and what these are called.
_ROWS_OF = {"labelled": ("text", "label"), "seq2seq": ("text", "target")}


def check_named_files(name: str | None, args: Mapping[str, Any]) -> None:
    """Raise the UsageError of a run about the files that a config names for its data.

    It is raised before ranks start. What else is wrong with the arguments is not looked at here.
    """
    if name == "text" and isinstance(args.get("path"), str):
        for file in files_of(local_path(args["path"], "data.args.path")):
            require_text(file)
    elif name in _ROWS_OF:
        for key in ("path", "validation"):
            where = f"data.args.{key}"
            path = args.get(key)
            files = files_of(local_path(path, where), where) if isinstance(path, str) else []
            for file in files:
                _require_rows(file, where, *_ROWS_OF[name])
    elif name == "masked" and isinstance(args.get("path"), str):
        folder = local_path(args["path"], "data.args.path")
        is_prepared = (folder / HEADER).exists()
        for file in [] if is_prepared else files_of(folder):
            require_read(file, "data.args.path")
    elif name in ("documents", "stream", "preferences"):
        for key in ("sources", "validation"):
            for where, path in _paths_of(args.get(key), f"data.args.{key}"):
                folder = local_path(path, where)
                is_prepared = (folder / HEADER).exists()
                for file in [] if is_prepared else files_of(folder, where):
                    require_read(file, where)
                    if name == "preferences":
                        _require_rows(file, where, "prompt", "chosen", "rejected")


def _require_rows(file: Path, where: str, *fields: str) -> None:
    """Refuse a file that holds no rows with these fields."""
    kind = kind_of(file)
    if kind not in ROWS:
        what = f"{file} holds {kind.value}, and no rows with {listed(fields)}"
        example = ", ".join(f'"{field}": "…"' for field in fields)
        fix = f"write lines of {{{example}}}, as .jsonl, .csv, .parquet or .arrow"
        raise UsageError(what, where=where, fix=fix)


def _paths_of(given: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of each source that is written as it should be."""
    entries = [given] if isinstance(given, str | Mapping) else given
    for number, entry in enumerate(entries if isinstance(entries, Sequence) else ()):
        path = entry.get("path") if isinstance(entry, Mapping) else entry
        if isinstance(path, str) and not path.startswith("hf:"):
            yield f"{where}[{number}].path", path
