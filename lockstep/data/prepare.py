"""Turns files into a folder of tokens once, for many runs: `lockstep data prepare`.

The folder (`lockstep.data.token_folder`) appears complete or not at all: it is written under a
temporary name, and renamed. What a killed process has written there is used by the next one: every
`SAVED_EVERY` bytes of input the folder's files are synced, and `progress.json` says how far they
are good. Another source, tokenizer or filter begins anew.

Tests: tests/data/test_prepare.py, tests/data/test_datasets.py
"""

import argparse
import fcntl
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lockstep.data.conversations import ChatTemplate
from lockstep.data.document_files import TEXT, Field, Record, records_of
from lockstep.data.encoding import Encoded, Encoder, encoded
from lockstep.data.filters import Filters, told
from lockstep.data.gathering import Gatherer
from lockstep.data.language import Tokenizer
from lockstep.data.sources import noted, template_of
from lockstep.data.text import PYTHON_DOCS, topics
from lockstep.data.token_folder import (
    DOCUMENTS,
    ENDS,
    FORMAT,
    TOKENIZER,
    TOKENS,
    TRAINED,
)
from lockstep.errors import UsageError
from lockstep.files.data_files import HEADER, as_documents, files_of, line_of_data, told_of_json
from lockstep.files.paths import local_path
from lockstep.machine.cores import allowed
from lockstep.machine.progress import Advance, progress_of

PROGRESS = "progress.json"
SAVED_EVERY = 1 << 26  # bytes of input, between two syncs
LARGE = 1 << 23  # bytes of input from which on several processes make tokens


def prepare(
    source: Path | str,
    out: Path | str,
    tokenizer: str = "bytes",
    *,
    field: Field = TEXT,
    filters: Filters | None = None,
    special_tokens: bool = False,
    workers: int = 0,
    advance: Advance = lambda _bytes: None,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[int, int]:
    """Write the tokens of `source` into the new folder `out`.

    `source` is a file, a folder of them, or `python-docs`.

    With `special_tokens`, the text of a special token in a document becomes that token. `workers`
    processes make tokens (0: this one); the files are the same, whatever their number.
    `advance` gets the bytes of each piece, and `say` a line where earlier work is continued. Return
    the number of tokens, and the size of the vocabulary.
    """
    out = local_path(out, "--out")
    chosen = Tokenizer(tokenizer)
    template = template_of(chosen, field)
    filters = filters or Filters()
    if out.exists():
        raise UsageError(
            f"{out} exists already", where="--out", fix="choose another folder, or remove it"
        )
    files = [] if str(source) == "python-docs" else files_of(local_path(source, "SOURCE"))
    begun_with = _facts(files, source, chosen, field, filters, template)
    if special_tokens:
        begun_with["special_tokens"] = True
    temporary = out.with_name(f".{out.name}.preparing")
    try:
        with _only_one(temporary, out) as lock:
            draft = _Draft(temporary, begun_with, chosen, filters, field)
            encoder = Encoder(chosen, filters, template, special_tokens=special_tokens)
            encode = partial(encoded, encoder=encoder, workers=workers, lock=lock)
            _write(draft, encode, files, field, advance, say)
            for line in [*noted(draft.notes), *told_of_json(files)]:
                say(line)
            _complete(draft, chosen, str(source) if files else PYTHON_DOCS)
            temporary.rename(out)
    except OSError as error:
        raise UsageError(f"{out} can't be written", where="--out", why=str(error)) from None
    return draft.num_tokens, chosen.vocab_size


def _complete(draft: "_Draft", tokenizer: Tokenizer, source: str) -> None:
    """Write the header and the tokenizer, with which the folder is complete."""
    if tokenizer.file is not None:
        shutil.copyfile(tokenizer.file, draft.folder / TOKENIZER)
    header = {
        "format": FORMAT,
        "dtype": draft.dtype.name,
        "num_tokens": draft.num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": "bytes" if tokenizer.file is None else TOKENIZER,
        "source": source,
        "documents": draft.filters.kept,
        "left_out": dict(draft.filters.left_out),
        "has_answers": draft.field.holds_messages,
        "holds_pairs": draft.field.rejected is not None,
    }
    (draft.folder / HEADER).write_text(json.dumps(header, indent=2) + "\n")
    (draft.folder / PROGRESS).unlink()


def _write(
    draft: "_Draft",
    encode: Callable[..., Iterator[tuple[int, Record | None, Encoded | None]]],
    files: Sequence[Path],
    field: Field,
    advance: Advance,
    say: Callable[[str], None],
) -> None:
    """Write all documents that are left; a UsageError if a file is bad, or none is kept."""
    try:
        with draft:
            if draft.filters.kept:
                say(f"goes on after {draft.filters.kept:,} documents that an earlier process wrote")
            records = _records(files, field, draft.file, draft.record)
            for number, record, tokens in encode(records):
                draft.take(number, record, tokens)
                advance(record.size if record is not None else 0)
            draft.save()
        if not draft.num_tokens:
            why = told(draft.filters.left_out) or None
            raise UsageError("no document is kept", where="SOURCE", why=why)
    except UsageError:  # the files have to change, and then earlier work is of no use
        shutil.rmtree(draft.folder, ignore_errors=True)
        raise


def _facts(
    files: Sequence[Path],
    source: Path | str,
    tokenizer: Tokenizer,
    field: Field,
    filters: Filters,
    template: ChatTemplate | None,
) -> dict[str, Any]:
    """Return what the contents of the folder follow from, as JSON."""
    return {
        "source": str(source),
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "tokenizer": [tokenizer.name, zlib.crc32(tokenizer.contents)],
        "template": None if template is None else template.text,
        field.key: field.name,
        **({"prompt_field": list(field.prompts)} if field.prompts else {}),
        **({"rejected_field": field.rejected} if field.rejected is not None else {}),
        "filters": [filters.min_tokens, filters.max_tokens, filters.keep],
    }


def _records(
    files: Sequence[Path], field: Field, file: int, record: int
) -> Iterator[tuple[int, Record | None]]:
    """Yield all records from a record of a file on, each with the number of its file."""
    if not files and record == 0:  # in one piece, like the data set: it is small
        yield 0, Record("\n\n".join(topics()), PYTHON_DOCS, 0)
    for number in range(file, len(files)):
        for each in records_of(files[number], field, record if number == file else 0):
            yield number, each


@contextmanager
def _only_one(temporary: Path, out: Path) -> Iterator[int]:
    """Refuse a second process that prepares the same folder at the same time.

    Yields the descriptor that holds the lock.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    folder = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        fix = "wait for it, or choose another folder"
        raise UsageError(f"another process prepares {out}", where="--out", fix=fix) from None
    try:
        yield folder
    finally:
        os.close(folder)


class _Draft:
    """The files of a folder that is being written, and how far they are good.

    It is a `DocumentSink` for the documents that are kept.
    """

    def __init__(
        self,
        folder: Path,
        begun_with: dict[str, Any],
        tokenizer: Tokenizer,
        filters: Filters,
        field: Field,
    ) -> None:
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.folder = folder
        self._begun_with = begun_with
        self.filters = filters
        self._unsaved = 0  # bytes of input
        saved = self._saved()
        self.file = saved.get("file", 0)  # the next record's
        self.record = saved.get("record", 0)
        self.num_tokens = saved.get("num_tokens", 0)  # of documents that have ended
        filters.go_on_from(saved.get("documents", 0), saved.get("left_out", {}))
        self.field = field  # of a row, that holds the document
        self.notes: Counter[str] = Counter(saved.get("notes", {}))
        self._gatherer = Gatherer(self, filters, saved.get("open_tokens", 0), self.notes)

    def _saved(self) -> dict[str, Any]:
        """Return what an earlier process has saved, if it did the same work; else nothing."""
        try:
            saved: dict[str, Any] = json.loads((self.folder / PROGRESS).read_text())
        except (FileNotFoundError, ValueError):
            saved = {}
        if saved.get("begun_with") == self._begun_with:
            return saved
        for name in (TOKENIZER, HEADER):
            (self.folder / name).unlink(missing_ok=True)
        return {}

    def __enter__(self) -> "_Draft":
        with ExitStack() as stack:
            self._tokens = stack.enter_context(open(self.folder / TOKENS, "ab"))
            self._ends = stack.enter_context(open(self.folder / DOCUMENTS, "ab"))
            self._files = [self._tokens, self._ends]
            if self.field.holds_messages:
                self._trained = stack.enter_context(open(self.folder / TRAINED, "ab"))
                self._trained.truncate(self.num_tokens)
                self._files.append(self._trained)
            self._stack = stack.pop_all()
        self._truncate(self._tokens, self.num_tokens + self._gatherer.open_tokens)
        self._ends.truncate(self.filters.kept * np.dtype(ENDS).itemsize)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _truncate(self, file: Any, tokens: int) -> None:
        file.truncate(tokens * self.dtype.itemsize)

    def take(self, file: int, record: Record | None, tokens: Encoded | None) -> None:
        """Write what a record of a file becomes, and save now and then."""
        if record is not None and tokens is not None:
            self._gatherer.take(tokens)
            self._unsaved += record.size
        self.record = self.record + 1 if file == self.file else 1
        self.file = file
        if self._unsaved >= SAVED_EVERY:
            self.save()

    def add(self, tokens: NDArray[Any], trained: NDArray[np.bool_] | None = None) -> None:
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        if trained is not None:
            self._trained.write(trained.astype(np.uint8).tobytes())

    def end(self) -> None:
        self.num_tokens += self._gatherer.open_tokens
        self._ends.write(np.array([self.num_tokens], "<u8").tobytes())

    def drop(self) -> None:
        self._tokens.flush()
        self._truncate(self._tokens, self.num_tokens)

    def save(self) -> None:
        """Bring everything to the disk, and then note how far it is good."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        state = {
            "begun_with": self._begun_with,
            "file": self.file,
            "record": self.record,
            "num_tokens": self.num_tokens,
            "documents": self.filters.kept,
            "open_tokens": self._gatherer.open_tokens,
            "left_out": dict(self.filters.left_out),
            "notes": dict(self.notes),
        }
        fresh = self.folder / f"{PROGRESS}.new"
        with fresh.open("w") as written:
            json.dump(state, written)
            written.flush()
            os.fsync(written.fileno())
        fresh.rename(self.folder / PROGRESS)
        self._unsaved = 0


def prepare_command(argv: Sequence[str]) -> int:
    """Run `lockstep data prepare SOURCE --out DIR [--tokenizer bytes|FILE]`."""
    args = _command_parser().parse_args(list(argv))
    if args.workers is not None and args.workers < 0:
        raise UsageError(
            f"--workers {args.workers} is not a number from 0 on",
            where="--workers",
            fix="leave it out",
        )
    filters = Filters(args.min_tokens, args.max_tokens, args.keep)
    field = _field_of(args)
    files = [] if args.source == "python-docs" else files_of(local_path(args.source, "SOURCE"))
    size = sum(file.stat().st_size for file in files)
    workers = _workers_for(size, args.tokenizer) if args.workers is None else args.workers
    with progress_of(f"tokens of {args.source}", size) as advance:
        num_tokens, vocab_size = prepare(
            args.source,
            args.out,
            args.tokenizer,
            field=field,
            filters=filters,
            special_tokens=args.special_tokens,
            workers=workers,
            advance=advance,
            say=print,
        )
    print(f"{args.out}: {num_tokens:,} tokens of {vocab_size:,} kinds, {filters.kept:,} documents")
    left_out = told(filters.left_out)
    if left_out:
        print(left_out)
    path = str(args.out)
    if field.rejected is not None:
        print(f"use it with   {line_of_data('preferences', sources=[path])}")
        return 0
    if field.holds_messages:
        print(f"use it with   {as_documents(path)}")
        return 0
    print(f"use it with   {line_of_data('tokens', path=path)}")
    print(f"or packed     {as_documents(path)}")
    return 0


def _field_of(args: argparse.Namespace) -> Field:
    """Return which fields of a row hold the document, or raise a UsageError."""
    command = "the command 'lockstep data'"
    is_pair = args.chosen_field is not None
    if is_pair != (args.rejected_field is not None):
        what = "--chosen-field and --rejected-field belong together"
        fix = "name both: --chosen-field chosen --rejected-field rejected"
        raise UsageError(what, where=command, fix=fix)
    if bool(args.prompt_field) != (args.answer_field is not None) and not is_pair:
        what = "--prompt-field and --answer-field belong together"
        fix = "name both: --prompt-field instruction --answer-field output"
        raise UsageError(what, where=command, fix=fix)
    named = [
        f"--{name}-field"
        for name in ("chosen", "answer", "messages")
        if getattr(args, f"{name}_field") is not None
    ]
    if len(named) > 1:
        what = f"a document is one or the other: {named[0]} beside {named[1]}"
        raise UsageError(what, where=command, fix="leave one of them out")
    prompts = tuple(args.prompt_field)
    if is_pair:
        return Field(args.chosen_field, True, prompts, args.rejected_field)
    if args.answer_field is not None:
        return Field(args.answer_field, holds_messages=True, prompts=prompts)
    if args.messages_field is not None:
        return Field(args.messages_field, holds_messages=True)
    return Field(args.text_field)


def _workers_for(size: int, tokenizer: str) -> int:
    """Return the processes that make tokens of so many bytes of input; 0: this one."""
    # Bytes are tokens already: handing them over would take longer than using them.
    is_worth_it = size >= LARGE and tokenizer != "bytes"
    return len(allowed()) if is_worth_it else 0


def _command_parser() -> "_Parser":
    """Return the parser of `lockstep data prepare`."""
    parser = _Parser(
        "lockstep data prepare",
        description="Turn documents into tokens, for the data sets `tokens` and `documents`,\n"
        "and pairs of answers for `preferences`.",
        epilog="examples:\n  lockstep data prepare text.txt --out tokens\n"
        "  lockstep data prepare pages.jsonl --out pages --min-tokens 16\n"
        "  lockstep data prepare chat.jsonl --out chat \\\n"
        "      --messages-field messages --tokenizer FOLDER\n"
        "  lockstep data prepare pairs.jsonl --out pairs \\\n"
        "      --chosen-field chosen --rejected-field rejected --tokenizer FOLDER\n"
        "What a killed process has written is used by the next with the same arguments.\n"
        "`lockstep data show CONFIG` prints samples, and what of them is trained.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=("prepare",), help=argparse.SUPPRESS)
    text = "a file or a folder of text, .jsonl, .csv, .parquet, .arrow or .npy; or python-docs"
    parser.add_argument("source", metavar="SOURCE", help=text)
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    text = "bytes (default), a Hugging Face tokenizer.json, or a folder with one"
    parser.add_argument("--tokenizer", default="bytes", help=text)
    only = parser.add_mutually_exclusive_group()
    text = "the field or column that holds the text (text)"
    only.add_argument("--text-field", metavar="NAME", default="text", help=text)
    text = "the one that holds the messages of conversations; --tokenizer has their chat template"
    only.add_argument("--messages-field", metavar="NAME", help=text)
    text = "the one that holds the answer to what is in --prompt-field"
    parser.add_argument("--answer-field", metavar="NAME", help=text)
    text = "the one that holds the prompt; several times, if several make it"
    parser.add_argument("--prompt-field", metavar="NAME", action="append", default=[], help=text)
    text = "the one that holds the better of two answers, for the data set `preferences`"
    parser.add_argument("--chosen-field", metavar="NAME", help=text)
    text = "the one that holds the other one"
    parser.add_argument("--rejected-field", metavar="NAME", help=text)
    text = "make the text of a special token in documents that token; else it is text"
    parser.add_argument("--special-tokens", action="store_true", help=text)
    text = "leave out documents of fewer tokens"
    parser.add_argument("--min-tokens", metavar="N", type=int, default=1, help=text)
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="leave out documents of more tokens"
    )
    text = "package.module:function, which takes a row, a dict, and returns whether it is kept"
    parser.add_argument("--keep", metavar="NAME", help=text)
    text = "processes that make tokens (by default, one a core where the source is large)"
    parser.add_argument("--workers", metavar="N", type=int, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            message,
            where="the command 'lockstep data'",
            fix="`lockstep data prepare --help` lists all",
        )
