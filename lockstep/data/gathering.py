"""Turns the records of files into tokens of documents, and leaves out those that filters refuse.

Tests: tests/data/test_prepare.py, tests/data/test_packed.py
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.data.conversations import ChatTemplate
from lockstep.data.document_files import Record
from lockstep.data.filters import Filters
from lockstep.data.language import Tokenizer
from lockstep.errors import UsageError


class DocumentSink(Protocol):
    """Takes the tokens of documents, one document after another."""

    def add(self, tokens: NDArray[Any], trained: NDArray[np.bool_] | None = None) -> None:
        """Take further tokens of the current document; of a conversation also which are trained."""

    def end(self) -> None:
        """End the current document."""

    def drop(self) -> None:
        """Forget the current document."""


class Gathered:
    """Keeps documents in memory."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[Any]] = []
        self._trained: list[NDArray[np.bool_]] = []  # of conversations, a piece each
        self._kept = 0  # pieces of documents that have ended
        self._ends = [0]

    def add(self, tokens: NDArray[Any], trained: NDArray[np.bool_] | None = None) -> None:
        self._pieces.append(tokens)
        if trained is not None:
            self._trained.append(trained)

    def end(self) -> None:
        added = sum(map(len, self._pieces[self._kept :]))
        self._ends.append(self._ends[-1] + added)
        self._kept = len(self._pieces)

    def drop(self) -> None:
        del self._pieces[self._kept :]
        del self._trained[self._kept :]

    def tokens(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *self._pieces])

    def trained(self) -> NDArray[np.bool_] | None:
        """Return which tokens of conversations are trained; None for other documents."""
        return np.concatenate(self._trained) if self._trained else None

    def ends(self) -> NDArray[np.int64]:
        return np.array(self._ends[1:], np.int64)


class Gatherer:
    """Tokenizes records into a sink.

    Args:
        template: by which rows are rendered that are conversations.
        open_tokens: those of a document that the sink has from an earlier process, in part.
    """

    def __init__(
        self,
        sink: DocumentSink,
        tokenizer: Tokenizer,
        filters: Filters,
        template: ChatTemplate | None = None,
        open_tokens: int = 0,
    ) -> None:
        self._sink = sink
        self._tokenizer = tokenizer
        self._template = template
        self._filters = filters
        self.open_tokens = open_tokens  # of the document that has not ended

    def take(self, records: Iterable[Record | None]) -> None:
        for record in records:
            if record is not None:
                self.take_one(record)

    def take_one(self, record: Record) -> None:
        """Add a record to its document, and decide about that where it ends."""
        if not self._filters.takes(record.row, record.where):
            return
        if isinstance(record.content, list):
            self._take_conversation(record.content, record)
            return
        tokens = self._tokens_of(record.content, record.where)
        self.open_tokens += len(tokens)
        self._sink.add(tokens)
        if record.ends:
            if self._filters.fits(self.open_tokens):
                self._sink.end()
            else:
                self._sink.drop()
            self.open_tokens = 0

    def _take_conversation(self, messages: list[Any], record: Record) -> None:
        """Add the documents of a conversation, and decide about each."""
        assert self._template is not None
        tools = (record.row or {}).get("tools")
        found = False
        for document in self._template.documents(messages, record.where, tools):
            found = True
            if self._filters.fits(len(document.tokens)):
                self._sink.add(document.tokens, document.trained)
                self.open_tokens = len(document.tokens)
                self._sink.end()
                self.open_tokens = 0
        if not found:
            self._filters.left_out["without an answer"] += 1

    def _tokens_of(self, content: str | NDArray[Any], where: str) -> NDArray[Any]:
        """Return the tokens of a record; a UsageError if the tokenizer has no such tokens."""
        if isinstance(content, str):
            return self._tokenizer.encode_array(content)
        size = self._tokenizer.vocab_size
        wrong = content[(content < 0) | (content >= size)]
        if len(wrong):
            what = f"there is a token {wrong[0]} in {where}"
            why = f"the tokenizer {self._tokenizer.name} has the tokens 0 to {size - 1}"
            fix = "give the tokenizer.json with which the tokens were made"
            raise UsageError(what, where="tokenizer", why=why, fix=fix)
        return content.astype(self._tokenizer.dtype)
