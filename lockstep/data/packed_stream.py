"""The data set `stream`: documents whose number and lengths nobody knows, packed window by window.

    data:
      name: stream
      args:
        sources:
          - {path: "hf:allenai/c4", config: en, weight: 0.8}   # a stream of the package datasets
          - {path: notes.jsonl.zst, weight: 0.2}               # files, which are read line by line
        sequence_length: 512
        window: 64

Documents are read until they fill `window` sequences; these are packed like those of the data set
`documents`, and come in an order of their own. Then the next window is read. What a window holds
follows from what was read before it, so each rank reads everything, and keeps its share. A state
says where the window begins in each source, and how many of its sequences were given: a run that
is resumed reads at most one window again, at step 1,000,000 as at step 10.

With weights the next document comes from the source that is furthest behind its share of tokens.
An epoch ends when each source has ended; one that ends before others begins again.

Tests: tests/data/test_packed_stream.py
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.batches import Data
from lockstep.data.conversations import ChatTemplate
from lockstep.data.document_files import Field, Record, record_of, records_of
from lockstep.data.encoding import Encoder, Piece
from lockstep.data.filters import Filters
from lockstep.data.gathering import Gathered, Gatherer
from lockstep.data.language import Tokenizer, at_least_one
from lockstep.data.packed import PackedDocuments, data_of_sequences, require_packable
from lockstep.data.packing import PackingPlan, WholePlan
from lockstep.data.permutation import permuted, round_keys
from lockstep.data.sources import (
    KEYS_OF_STREAMS,
    DescribedSource,
    described,
    field_of,
    filters_of,
    require_shares,
    special_tokens_in,
)
from lockstep.errors import UsageError, first_line, warn_at_caller
from lockstep.files.data_files import HEADER, as_documents, files_of, told_of_json
from lockstep.files.paths import local_path
from lockstep.machine.environment import rank_facts

_OF_THE_HUB = "hf:"


class RecordReader(Protocol):
    """Reads the records of a source one after another, from any position that it has had."""

    def go_to(self, position: Any) -> None:
        """Go to a position; None is the begin."""

    def position(self) -> Any:
        """Return where the next record is, as JSON."""

    def __next__(self) -> Record: ...


class FileReader:
    """Reads the records of files."""

    def __init__(self, files: Sequence[Path], field: Field) -> None:
        self._files = files
        self._field = field
        self.go_to(None)

    def go_to(self, position: Any) -> None:
        file, record = position or (0, 0)
        self._file = int(file)
        self._record = int(record)  # the next one
        self._records: Iterator[Record | None] | None = None

    def position(self) -> Any:
        return [self._file, self._record]

    def __next__(self) -> Record:
        while self._file < len(self._files):
            if self._records is None:
                self._records = records_of(self._files[self._file], self._field, self._record)
            for record in self._records:
                self._record += 1
                if record is not None:
                    return record
            self.go_to((self._file + 1, 0))
        raise StopIteration


class HubReader:
    """Reads the rows of a stream of the package `datasets`, which says itself where it is."""

    def __init__(self, rows: Any, name: str, field: Field) -> None:
        self._unread = rows
        self._name = name
        self._field = field
        self.go_to(None)

    def go_to(self, position: Any) -> None:
        self._at = position
        self._number = 0
        self._rows = copy.copy(self._unread)  # a state that is loaded stays with the object
        if position is not None:
            self._number, state = position
            self._rows.load_state_dict(state)
        self._iterator = iter(self._rows)
        self._is_read = False

    def position(self) -> Any:
        return [self._number, self._rows.state_dict()] if self._is_read else self._at

    def __next__(self) -> Record:
        row = next(self._iterator)
        self._is_read = True
        where = f"{self._name}, row {self._number}"
        self._number += 1
        return record_of(row, self._field, where, 0)


class StreamSource:
    """Gives the documents of a source, and begins again where it is at its end."""

    def __init__(
        self, name: str, reader: RecordReader, encoder: Encoder, filters: Filters, weight: float
    ) -> None:
        self.name = name
        self.weight = weight
        self._reader = reader
        self._encoder = encoder
        self._filters = filters
        self._told: set[str] = set()
        self.begin(None)

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Go to where a state was taken; None: before everything."""
        begin = state or {"position": None, "passes": 0, "tokens": 0, "found": 0}
        self._reader.go_to(begin["position"])
        self.passes: int = begin["passes"]  # how often it has ended
        self.tokens: int = begin["tokens"]  # that were taken of it in this epoch
        self._found: int = begin["found"]  # documents of this pass

    def state(self) -> dict[str, Any]:
        return {
            "position": self._reader.position(),
            "passes": self.passes,
            "tokens": self.tokens,
            "found": self._found,
        }

    def documents(self) -> list[Piece]:
        """Return the documents of the next record that has any; none where the source ends.

        A long text comes in several records, which make one document.
        """
        kept = Gathered()
        gatherer = Gatherer(kept, self._filters)
        while True:
            try:
                record = next(self._reader)
            except StopIteration:
                if not self._found:
                    why = "no record of it has a document that is kept"
                    raise UsageError(
                        f"{self.name} has no document to train on",
                        where="data.args.sources",
                        why=why,
                    ) from None
                self._reader.go_to(None)
                self.passes += 1
                self._found = 0
                return []
            encoded = self._encoder.encode(record)
            self._tell(encoded.notes, record.where)
            gatherer.take(encoded)
            pieces = kept.documents() if record.ends else []
            if pieces:
                self._found += len(pieces)
                self.tokens += sum(len(tokens) for tokens, _ in pieces)
                return pieces

    def _tell(self, notes: Mapping[str, int], where: str) -> None:
        """Warn of what is worth knowing where it is met for the first time; nothing is counted."""
        for note in notes:
            if note not in self._told and rank_facts().is_main:
                warn_at_caller(f"{self.name}: {note} (the first: {where})")
            self._told.add(note)


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Yields sequences of packed documents of several streams; see the module.

    Args:
        sources: with the weights of all, or 0 of all: one after another.
        window: about how many sequences are packed together.
        whole: whether documents are never cut, as conversations.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        tokenizer: Tokenizer,
        sequence_length: int,
        *,
        packing: str = "first_fit",
        window: int = 64,
        seed: int = 0,
        whole: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self._sources = list(sources)
        self._tokenizer = tokenizer
        self._packing = packing
        self._window = window
        self._seed = seed
        self._whole = whole
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which windows have other orders."""
        self._epoch = epoch
        self._number = 0  # of the window
        self._given = 0  # sequences of it
        self._begins: list[dict[str, Any] | None] = [None] * len(self._sources)

    def state_dict(self) -> dict[str, Any]:
        """Return where to go on, as JSON."""
        return {
            "epoch": self._epoch,
            "window": self._number,
            "given": self._given,
            "sources": self._begins,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._number = state["window"]
        self._given = state["given"]
        self._begins = list(state["sources"])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the sequences from the state on; the state is that after the newest one."""
        for source, begin in zip(self._sources, self._begins, strict=True):
            source.begin(begin)
        while True:
            packed = self._read_window()
            if packed is None:
                self.set_epoch(self._epoch)  # whoever iterates again begins anew
                return
            order = np.arange(len(packed))
            keys = round_keys(self._seed, self._epoch, "window", self._number)
            order = permuted(order, len(packed), keys)
            while self._given < len(packed):
                self._given += 1
                yield packed[int(order[self._given - 1])]
            self._number += 1
            self._given = 0
            self._begins = [source.state() for source in self._sources]

    def _read_window(self) -> PackedDocuments | None:
        """Return the sequences of the next window; None where the epoch has ended."""
        gathered = Gathered()
        positions = 0
        while positions < self._window * self.sequence_length:
            source = self._next_source()
            if source is None:
                break
            for tokens, trained in source.documents():
                gathered.add(tokens, trained)
                gathered.end()
                positions += max(len(tokens) - 1, 0)
        if not positions:
            return None
        ends = gathered.ends()
        length = self.sequence_length
        plan = WholePlan(ends, length) if self._whole else PackingPlan(ends, length, self._packing)
        tokens = gathered.tokens(self._tokenizer.dtype)
        return PackedDocuments([tokens], [plan], trained=[gathered.trained()])

    def _next_source(self) -> StreamSource | None:
        """Return the source of the next document; None where each has ended."""
        going_on = [source for source in self._sources if not source.passes]
        if not going_on:
            return None
        if not going_on[0].weight:
            return going_on[0]
        return min(self._sources, key=lambda source: source.tokens / source.weight)


def stream(
    *,
    sources: Any,
    sequence_length: int = 512,
    packing: str = "first_fit",
    window: int = 64,
    tokenizer: str | None = None,
    validation: Any = None,
    seed: int = 0,
) -> Data:
    """Return packed sequences of streams of documents, or raise a UsageError.

    `sources` lists paths of files or folders, or `hf:NAME` (a data set of the hub, or a folder, as
    a stream), or dicts with a `path` and a `weight`, the source's share of all tokens (of all, or
    of none: then one comes after another); also `text_field` (`text`), `messages_field`, or
    `prompt_field` and `answer_field`, `min_tokens`, `max_tokens` and `keep`, and of `hf:` `config`
    and `split` (`train`). `window` is about how many sequences are packed together, and mixed.
    `validation` lists others. `tokenizer` and `packing` are those of `documents`.
    """
    require_packable(sequence_length, packing)
    at_least_one("window", window)
    chosen = Tokenizer(tokenizer or "bytes")
    notices: list[str] = []

    def packed_stream(listed: Sequence[DescribedSource]) -> PackedStream:
        _require_shares(listed)
        return PackedStream(
            [_opened(each, chosen, notices) for each in listed],
            chosen,
            sequence_length,
            packing=packing,
            window=window,
            seed=seed,
            whole=any(field_of(each.settings).holds_messages for each in listed),
        )

    listed = described(sources, "data.args.sources", KEYS_OF_STREAMS)
    train = packed_stream(listed)
    held_out = None
    if validation is not None:
        held_out = packed_stream(described(validation, "data.args.validation", KEYS_OF_STREAMS))
    paths = ", ".join(each.path for each in listed)
    return data_of_sequences(train, held_out, chosen, sequence_length, paths, notices)


def _require_shares(listed: Sequence[DescribedSource]) -> None:
    """Refuse shares that a stream can't keep, and conversations beside other documents."""
    require_shares(listed)
    for each in listed:
        if "epochs" in each.settings:
            what = f"{each.path} has epochs, and nobody knows how long a stream is"
            fix = "write a weight, its share of all tokens; or use data.name: documents"
            raise UsageError(what, where=f"{each.where}.epochs", fix=fix)
        if each.settings.get("weight") == 0:
            what = f"{each.path} has the weight 0"
            raise UsageError(what, where=f"{each.where}.weight", fix="leave it out of the sources")
    kinds = {field_of(each.settings).holds_messages for each in listed}
    if len(kinds) > 1:
        what = "some of the sources are conversations, and some are not"
        fix = "use data.name: documents, which packs each source by itself"
        raise UsageError(what, where=listed[0].where.rpartition("[")[0], fix=fix)


def _opened(source: DescribedSource, tokenizer: Tokenizer, notices: list[str]) -> StreamSource:
    """Open a source, of which nothing is read yet."""
    filters = filters_of(source.settings)
    field = field_of(source.settings)
    template = ChatTemplate(tokenizer) if field.holds_messages else None
    weight = float(source.settings.get("weight", 0))
    special = special_tokens_in(source.settings)
    encoder = Encoder(tokenizer, filters, template, special_tokens=special)
    if source.path.startswith(_OF_THE_HUB):
        reader: RecordReader = HubReader(_rows_of(source), source.path, field)
        return StreamSource(source.path, reader, encoder, filters, weight)
    path = local_path(source.path, f"{source.where}.path")
    if (path / HEADER).exists():
        what = f"{source.path} is prepared, and its lengths are known"
        fix = f"write {as_documents(source.path)}"
        raise UsageError(what, where=f"{source.where}.path", fix=fix)
    for key in KEYS_OF_STREAMS:
        if key in source.settings:
            what = f"{key} beside {source.path}, which is not a data set of the package datasets"
            fix = f"leave it out, or write path: hf:{source.path}"
            raise UsageError(what, where=f"{source.where}.{key}", fix=fix)
    files = files_of(path, where=f"{source.where}.path")
    notices += told_of_json(files)
    return StreamSource(source.path, FileReader(files, field), encoder, filters, weight)


def _rows_of(source: DescribedSource) -> Any:
    """Return the stream of rows of a data set of the hub, or of a folder."""
    try:
        import datasets
    except ImportError:
        what = f"{source.path} needs the package datasets"
        fix = 'pip install "lockstep-train[datasets]"'
        raise UsageError(what, where=source.where, fix=fix) from None
    name = source.path.removeprefix(_OF_THE_HUB)
    split = source.settings.get("split", "train")
    try:
        config = source.settings.get("config")
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the package and its dependencies raise many kinds
        what = f"{source.path} can't be opened"
        fix = "check its name, config and split, and the network; a local folder works without one"
        raise UsageError(what, where=source.where, why=first_line(error), fix=fix) from error
