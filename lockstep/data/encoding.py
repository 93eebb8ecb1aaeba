"""Turns records into tokens, in this process or in several, always in the order of the records.

Tests: tests/data/test_encoding.py
"""

import ctypes
import json
import multiprocessing
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.answer_pairs import AnswerPair
from lockstep.data.conversations import ChatTemplate, Trained
from lockstep.data.document_files import Record
from lockstep.data.filters import Filters
from lockstep.data.language import DocumentEncoder, Tokenizer
from lockstep.data.text_pairs import TextPairs
from lockstep.errors import RunError, UsageError
from lockstep.files.row_fields import tools_of_row

BATCH_BYTES = 1 << 20  # of records that are handed to a worker at once
BATCH_RECORDS = 4096
_AHEAD = 3  # batches for each worker that are read before they are needed
_PR_SET_PDEATHSIG = 1

Piece = tuple[NDArray[Any], NDArray[Any] | None]  # tokens, and which of them are trained

# In place of whether a token is trained: it is the first of the worse one of two conversations.
REJECTED = 2


@dataclass(frozen=True)
class Encoded:
    """Holds what a record becomes."""

    pieces: list[Piece]  # of a text, one: the record's part of it; of a conversation, documents
    is_conversation: bool
    refused: bool = False  # by the user's function
    ends: bool = True  # the document ends with it
    notes: Counter[str] = field(default_factory=Counter)  # what is worth telling, counted
    why_none: str = "without an answer"  # why a conversation has no documents


class Encoder:
    """Turns a record into tokens, without knowing of other records.

    Args:
        filters: whose function of the user's decides about rows.
        template: by which rows are rendered that are conversations; unset: the tokenizer's, where
            one is needed.
        special_tokens: whether the text of a special token, in a document that is none, becomes
            that token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        filters: Filters,
        template: ChatTemplate | None = None,
        *,
        special_tokens: bool = False,
    ) -> None:
        self._documents = DocumentEncoder(tokenizer, special_tokens)
        self._texts = TextPairs(self._documents)
        self._tokenizer = tokenizer
        self._filters = filters
        self._template = template

    def encode(self, record: Record) -> Encoded:
        """Return the tokens of a record; a UsageError if it is bad."""
        try:
            return self._encoded(record)
        except (UnicodeEncodeError, TypeError):  # of bytes, and of the package tokenizers
            half = _half_of_a_pair(record)
            if half is None:
                raise
            what = f"the text of {record.where} holds {half}, which is not a character"
            why = "it is half of a surrogate pair, and UTF-8 has no such"
            fix = "take it out, or write the character whole"
            raise UsageError(what, where=record.where, why=why, fix=fix) from None

    def _encoded(self, record: Record) -> Encoded:
        """Return the tokens of a record, unless the user's function refuses its row."""
        if not self._filters.takes(record.row, record.where):
            return Encoded([], False, refused=True, ends=record.ends)
        if record.fault is not None:
            raise record.fault
        if isinstance(record.content, AnswerPair):
            return self._encoded_pair(record.content, record.where)
        if not isinstance(record.content, list):
            self._documents.notes.clear()
            tokens = self._tokens_of(record.content, record.where)
            notes = Counter(self._documents.notes)
            return Encoded([(tokens, None)], False, ends=record.ends, notes=notes)
        template = self._cleared_template(record.where)
        tools = _tools((record.row or {}).get("tools"), record.where)
        documents = template.documents(record.content, record.where, tools)
        pieces: list[Piece] = [(each.tokens, each.trained) for each in documents]
        return Encoded(pieces, True, notes=Counter(template.notes))

    def _cleared_template(self, where: str) -> ChatTemplate:
        """Return the template of messages, without notes; a UsageError if there is none."""
        if self._documents.special_tokens:
            what = f"special tokens are asked for in texts, and {where} holds messages"
            why = "in conversations the chat template writes special tokens, and messages hold text"
            fix = "leave special_tokens out"
            raise UsageError(what, where="special_tokens", why=why, fix=fix)
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer)
        self._template.notes.clear()
        return self._template

    def _encoded_pair(self, pair: AnswerPair, where: str) -> Encoded:
        """Return the tokens of two conversations, one behind the other, as those of a document."""
        if pair.chosen == pair.rejected:
            return Encoded([], True, why_none="with two answers that are the same")
        if isinstance(pair.chosen, str) and isinstance(pair.rejected, str):
            self._documents.notes.clear()
            both = self._texts.encode(pair.chosen, pair.rejected, where)
            notes = self._documents.notes
        else:
            template = self._cleared_template(where)
            tools = _tools(pair.tools, where)
            answered = [
                self._answered(template, messages, where, tools)
                for messages in (pair.chosen, pair.rejected)
            ]
            both = [each for each in answered if each is not None]
            notes = template.notes
        if len(both) < 2:
            return Encoded([], True)
        chosen, rejected = both
        tokens = np.concatenate([chosen.tokens, rejected.tokens])
        trained = np.concatenate([chosen.trained, rejected.trained]).astype(np.uint8)
        trained[len(chosen.tokens)] = REJECTED
        return Encoded([(tokens, trained)], True, notes=Counter(notes))

    @staticmethod
    def _answered(template: ChatTemplate, messages: Any, where: str, tools: Any) -> Trained | None:
        """Return the tokens of one conversation of a pair; None if no answer in it is trained."""
        documents = list(template.documents(messages, where, tools))
        if len(documents) > 1:
            what = f"an answer of {where} consists of several, which the chat template rewords"
            why = "each would be a document of its own, and the likelihood of the pair is of one"
            fix = "let both conversations have one answer after what they have in common"
            raise UsageError(what, where=where, why=why, fix=fix)
        return documents[0] if documents else None

    def _tokens_of(self, content: str | NDArray[Any], where: str) -> NDArray[Any]:
        """Return the tokens of a record; a UsageError if the tokenizer has no such tokens."""
        if isinstance(content, str):
            return self._documents.encode(content, f"the document of {where}")
        size = self._tokenizer.vocab_size
        wrong = content[(content < 0) | (content >= size)]
        if len(wrong):
            what = f"there is a token {wrong[0]} in {where}"
            why = f"the tokenizer {self._tokenizer.name} has the tokens 0 to {size - 1}"
            fix = "give the tokenizer.json with which the tokens were made"
            raise UsageError(what, where="tokenizer", why=why, fix=fix)
        return content.astype(self._tokenizer.dtype)


def _tools(given: Any, where: str) -> Sequence[Any] | None:
    """Return the tools of a row, which a table may keep as JSON; a UsageError if they are none."""
    tools = tools_of_row(given)
    if tools in (None, "") or isinstance(tools, list):
        return tools or None
    what = f"the tools of {where} are {type(given).__name__}, not a list"
    fix = "write a list of tools, or leave the field out"
    raise UsageError(what, where=where, fix=fix)


def _half_of_a_pair(record: Record) -> str | None:
    """Return half of a surrogate pair in a record, which JSON may hold, escaped; None without."""
    read = [record.content, record.row]
    half = re.search("[\ud800-\udfff]", json.dumps(read, ensure_ascii=False, default=str))
    return None if half is None else ascii(half[0]).strip("'")


Numbered = tuple[int, Record | None]  # the number of its file, and a record; None: a blank line


def encoded(
    records: Iterable[Numbered], encoder: Encoder, workers: int, lock: int | None = None
) -> Iterator[tuple[int, Record | None, Encoded | None]]:
    """Yield what each record becomes, in order; with workers, that many processes encode.

    A UsageError about a record comes where its turn is. Workers close `lock`, a descriptor: a lock
    on it is this process's alone.
    """
    if not workers:
        for number, record in records:
            yield number, record, None if record is None else encoder.encode(record)
        return
    yield from _in_processes(records, encoder, workers, lock)


def _in_processes(
    records: Iterable[Numbered], encoder: Encoder, workers: int, lock: int | None
) -> Iterator[tuple[int, Record | None, Encoded | None]]:
    """Yield the same as `encoded`; batches of records are with workers while others are read."""
    forks = multiprocessing.get_context("fork")  # the tokenizer is loaded already
    pool = ProcessPoolExecutor(workers, forks, _begin_work, (encoder, os.getpid(), lock))
    waiting: deque[tuple[list[Numbered], Future[list[Any]]]] = deque()
    failed: UsageError | None = None  # of the reader; an error of a record before it comes first
    batches = _batches(records)
    try:
        while True:
            try:
                batch = next(batches, None)
            except UsageError as error:
                failed = error
                break
            if batch is None:
                break
            waiting.append((batch, pool.submit(_encode, [record for _, record in batch])))
            if len(waiting) > workers * _AHEAD:
                yield from _results(*waiting.popleft())
        while waiting:
            yield from _results(*waiting.popleft())
        if failed is not None:
            raise failed
    except BrokenProcessPool as error:
        what = "a process that tokenizes has ended"
        why = "the system may have had no memory left for it"
        fix = "run the same command again: it goes on where it was; or write fewer --workers"
        raise RunError(what, why=why, fix=fix) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(
    batch: Sequence[Numbered], future: "Future[list[Any]]"
) -> Iterator[tuple[int, Record | None, Encoded | None]]:
    """Yield the results of a batch; raise the error of its first bad record at its place."""
    for (number, record), outcome in zip(batch, future.result(), strict=False):
        if isinstance(outcome, BaseException):
            raise outcome
        yield number, record, outcome


def _batches(records: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Yield records in lists of about `BATCH_BYTES`.

    An error of the reader comes after the records before it, as without workers.
    """
    batch: list[Numbered] = []
    size = 0
    iterator = iter(records)
    while True:
        try:
            number, record = next(iterator)
        except StopIteration:
            break
        except UsageError:
            yield batch
            raise
        batch.append((number, record))
        size += 0 if record is None else record.size
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


_encoder: Encoder | None = None  # of a worker


def _begin_work(encoder: Encoder, parent: int, lock: int | None) -> None:
    """Prepare a worker, which ends with its parent, however that ends."""
    global _encoder
    _encoder = encoder
    if lock is not None:
        os.close(lock)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is a worker, not each core of it


def _encode(records: Sequence[Record | None]) -> list[Any]:
    """Return what records become, up to the first that is bad, whose error is the last."""
    assert _encoder is not None
    done: list[Any] = []
    for record in records:
        try:
            done.append(None if record is None else _encoder.encode(record))
        except Exception as error:
            return [*done, error]
    return done


def in_one_process(records: Iterable[Record | None], encoder: Encoder) -> Iterator[Encoded]:
    """Yield what each record becomes, without blank lines."""
    for _, _, document in encoded(zip(repeat(0), records, strict=False), encoder, 0):
        if document is not None:
            yield document
