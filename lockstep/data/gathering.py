"""Gathers what records become into documents, and leaves out those that filters refuse.

Tests: tests/data/test_prepare.py, tests/data/test_packed.py
"""

from collections import Counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.data.encoding import Encoded, Piece
from lockstep.data.filters import Filters


class DocumentSink(Protocol):
    """Takes the tokens of documents, one document after another."""

    def add(self, tokens: NDArray[Any], trained: NDArray[Any] | None = None) -> None:
        """Take further tokens of the current document; of a conversation also which are trained."""

    def end(self) -> None:
        """End the current document."""

    def drop(self) -> None:
        """Forget the current document."""


class Gathered:
    """Keeps documents in memory."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[Any]] = []
        self._trained: list[NDArray[Any]] = []  # of conversations, a piece each
        self._kept = 0  # pieces of documents that have ended
        self._ends = [0]

    def add(self, tokens: NDArray[Any], trained: NDArray[Any] | None = None) -> None:
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

    def documents(self) -> list[Piece]:
        """Return the documents that have ended, and forget them."""
        pieces: list[Piece] = []
        begin = 0
        tokens = np.concatenate(self._pieces[: self._kept]) if self._kept else None
        trained = np.concatenate(self._trained) if self._trained else None
        for end in self._ends[1:]:
            assert tokens is not None
            pieces.append((tokens[begin:end], None if trained is None else trained[begin:end]))
            begin = end
        del self._pieces[: self._kept]
        self._trained.clear()
        self._kept = 0
        self._ends = [0]
        return pieces

    def tokens(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *self._pieces])

    def trained(self) -> NDArray[Any] | None:
        """Return which tokens of conversations are trained; None for other documents."""
        return np.concatenate(self._trained) if self._trained else None

    def ends(self) -> NDArray[np.int64]:
        return np.array(self._ends[1:], np.int64)


class Gatherer:
    """Puts what records become into a sink, and leaves out what filters refuse.

    Args:
        open_tokens: those of a document that the sink has from an earlier process, in part.
        notes: where to count what is worth knowing of conversations.
    """

    def __init__(
        self,
        sink: DocumentSink,
        filters: Filters,
        open_tokens: int = 0,
        notes: Counter[str] | None = None,
    ) -> None:
        self._sink = sink
        self._filters = filters
        self._notes = Counter() if notes is None else notes
        self.open_tokens = open_tokens  # of the document that has not ended

    def take(self, encoded: Encoded) -> None:
        """Add a record to its document, and decide about that where it ends."""
        self._notes.update(encoded.notes)
        if encoded.refused:
            self._filters.refuse()
            return
        if encoded.is_conversation and not encoded.pieces:
            self._filters.left_out[encoded.why_none] += 1
        for tokens, trained in encoded.pieces:
            if encoded.is_conversation and not self._filters.fits(len(tokens)):
                continue  # each answer decides for itself
            self._sink.add(tokens, trained)
            self.open_tokens += len(tokens)
            if encoded.is_conversation:
                self._end()
        if not encoded.is_conversation and encoded.ends:
            if self._filters.fits(self.open_tokens):
                self._end()
            else:
                self._sink.drop()
                self.open_tokens = 0

    def _end(self) -> None:
        self._sink.end()
        self.open_tokens = 0
