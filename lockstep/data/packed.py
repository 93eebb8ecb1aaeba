"""The data set `documents`: documents of several sources, mixed by weight, packed into sequences.

    data:
      name: documents
      args:
        sources:
          - {path: wiki, weight: 0.7}         # a folder that `lockstep data prepare` made
          - {path: notes.jsonl, weight: 0.3}  # or files, which each process tokenizes at its start
        sequence_length: 512
        packing: first_fit

Sources of conversations, with `messages_field` or `answer_field`, are packed without being cut, and
have targets where somebody answers (`conversations`).

A sample is `{"input_ids", "targets", "document_ids"}`, each int64 [sequence_length]. The numbers of
the documents keep them apart in attention, and positions count from each one's begin
(`lockstep.models.attention.Attend`). Which pieces make a sequence follows from lengths alone
(`packing`), and which sequence comes when from (seed, step) (`mixing`).

Tests: tests/data/test_packed.py, tests/parity/test_packed.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.batches import CollatingDataset, Data
from lockstep.data.language import IGNORED, Tokenizer, Tokens, at_least_one, check_fraction
from lockstep.data.mixing import MixedOrder
from lockstep.data.packing import PACKINGS, PackingPlan, Piece, WholePlan
from lockstep.data.permutation import EpochOrder
from lockstep.data.sources import (
    DescribedSource,
    Source,
    described,
    draws_of,
    opened,
    require_one_tokenizer,
    require_sequences,
    require_shares,
)
from lockstep.errors import UsageError, did_you_mean


class PackedDocuments(CollatingDataset):
    """Sequences of packed documents, those of one source after those of another.

    Args:
        tokens: of each source.
        plans: of each source.
        draws: of each source in a block of the mixture; unset: each source once an epoch.
        num_samples: sequences in an epoch; unset: as many as there are.
        names: of the sources, to tell their losses apart.
        trained: of each source, which tokens are targets; None, or unset: all are.
        spreads: whether the sequences of sources stand between each other, so that the first of
            them, which an evaluation of a few batches reads, are of all sources.
    """

    def __init__(
        self,
        tokens: Sequence[Tokens],
        plans: Sequence[PackingPlan | WholePlan],
        draws: Sequence[int] | None = None,
        num_samples: int | None = None,
        names: Sequence[str] = (),
        trained: Sequence[Tokens | None] | None = None,
        *,
        spreads: bool = False,
    ) -> None:
        self._tokens = list(tokens)
        self._trained = [None] * len(tokens) if trained is None else list(trained)
        self._plans = list(plans)
        self._sizes = [len(plan) for plan in plans]
        self._bounds = np.cumsum([0, *self._sizes])
        self._draws = self._sizes if draws is None else list(draws)
        self._num_samples = int(self._bounds[-1]) if num_samples is None else num_samples
        self._names = list(names)
        self._spread = _spread(self._sizes) if spreads and len(self._sizes) > 1 else None
        self.sequence_length = plans[0].sequence_length

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def by_source(self) -> dict[str, "PackedDocuments"]:
        """Return the sequences of each source by its name; nothing if there is one source.

        The name of a source that another one has, too, is followed by the source's number.
        """
        by_name: dict[str, PackedDocuments] = {}
        if len(self._names) < 2:
            return by_name
        for number, name in enumerate(self._names):
            unique = f"{name} [{number}]" if name in by_name else name
            by_name[unique] = type(self)(
                [self._tokens[number]],
                [self._plans[number]],
                trained=[self._trained[number]],
            )
        return by_name

    def epoch_order(self, seed: int, *, shuffle: bool) -> EpochOrder | None:
        """Return the order of the mixture; None where the usual order serves.

        A UsageError is raised for a mixture that is not shuffled.
        """
        if len(self._sizes) == 1 and self._num_samples == len(self):
            return None
        if not shuffle:
            what = "sources are mixed at random, and data.shuffle is false"
            raise UsageError(what, where="data.shuffle", fix="leave it out, or give one source")
        return MixedOrder(self._sizes, self._draws, self._num_samples, seed)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: column[0] for key, column in self.collated([index]).items()}

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        shape = (len(indices), self.sequence_length)
        input_ids = np.zeros(shape, np.int64)
        targets = np.full(shape, IGNORED, np.int64)
        document_ids = np.empty(shape, np.int64)
        for row, index in enumerate(indices):
            self._fill(index, input_ids[row], targets[row], document_ids[row])
        columns = {"input_ids": input_ids, "targets": targets, "document_ids": document_ids}
        return {key: torch.from_numpy(column) for key, column in columns.items()}

    def _fill(
        self,
        index: int,
        input_ids: NDArray[np.int64],
        targets: NDArray[np.int64],
        document_ids: NDArray[np.int64],
    ) -> None:
        """Write a sequence into three rows; what is left of them is a document without targets.

        A piece of L positions takes L + 1 tokens of its source. With sequence_length 6 and the
        pieces `5 6 7` and `8 9 1` of two documents, which fill 2 + 2 positions, − for `IGNORED`:

            input_ids      5 6 | 8 9 | 0 0
            targets        6 7 | 9 1 | − −
            document_ids   0 0 | 1 1 | 2 2
        """
        source, pieces = self._pieces(index)
        tokens = self._tokens[source]
        trained = self._trained[source]
        begin = 0
        number = 0
        for piece in pieces:
            end = begin + piece.length
            piece_tokens = tokens[piece.token : piece.token + piece.length + 1]
            input_ids[begin:end] = piece_tokens[:-1]
            targets[begin:end] = piece_tokens[1:]
            if trained is not None:
                is_trained = trained[piece.token + 1 : piece.token + piece.length + 1]
                targets[begin:end][is_trained != 1] = IGNORED
            marks = None if trained is None else trained[piece.token : piece.token + piece.length]
            number = self._number(document_ids[begin:end], marks, number)
            begin = end
        document_ids[begin:] = number

    def _pieces(self, index: int) -> tuple[int, list[Piece]]:
        """Return the number of a sequence's source, and its pieces."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        if self._spread is not None:
            index = int(self._spread[index])
        source = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return source, self._plans[source].pieces(index - int(self._bounds[source]))

    def _number(
        self, document_ids: NDArray[np.int64], trained: NDArray[Any] | None, number: int
    ) -> int:
        """Write the numbers of a piece's documents, from `number` on; return the next one.

        `trained`: which of the piece's inputs are.
        """
        document_ids[:] = number
        return number + 1


def documents(
    *,
    sources: Any,
    sequence_length: int = 512,
    packing: str = "first_fit",
    tokenizer: str | None = None,
    validation: Any = None,
    validation_fraction: float = 0.0,
) -> Data:
    """Return packed sequences of several sources' documents, or raise a UsageError.

    `sources` lists paths, or dicts with a `path` and a `weight`, the source's share of all
    sequences, or `epochs`, how often it comes in an epoch (1 if neither is written); also
    `text_field` (`text`) or, of conversations, `messages_field`, or `prompt_field` and
    `answer_field`; and of files `min_tokens`, `max_tokens` and `keep`. `validation` lists others,
    or else the last documents of each source are held out, by `validation_fraction`. The
    `tokenizer` of files is `bytes`, or the path of a `tokenizer.json`, or of a folder with one and,
    for conversations, a chat template. `packing` is that of texts: conversations are not cut.
    """
    require_packable(sequence_length, packing)
    check_fraction(validation_fraction)
    return packed_data(
        described(sources, "data.args.sources"),
        None if validation is None else described(validation, "data.args.validation"),
        tokenizer,
        partial(_plan, sequence_length=sequence_length, packing=packing),
        validation_fraction,
    )


def packed_data(
    listed: Sequence[DescribedSource],
    validation: Sequence[DescribedSource] | None,
    tokenizer: str | None,
    plan: Callable[[Source, int, int], PackingPlan | WholePlan],
    validation_fraction: float,
    kind: type[PackedDocuments] = PackedDocuments,
) -> Data:
    """Return packed sequences of sources, as `documents` does, or raise a UsageError.

    Args:
        listed: the sources to train on.
        validation: others to evaluate on; None: the last documents of each source.
        tokenizer: of files.
        plan: which pieces of documents make sequences: of a source, from one document to another.
        validation_fraction: of the documents, if there are no sources for validation.
        kind: what makes samples of the pieces.
    """
    require_shares(listed)  # weights that are wrong are told before files are read
    train_sources = [opened(each, tokenizer) for each in listed]
    held_sources = train_sources
    if validation is not None:
        held_sources = [opened(each, tokenizer) for each in validation]
    require_one_tokenizer([*train_sources, *held_sources])

    # Of each source the documents before its border are trained; without sources for validation,
    # those behind it are held out.
    borders = [
        len(source.ends) - int(len(source.ends) * validation_fraction) for source in train_sources
    ]
    train_plans = [
        plan(source, 0, border) for source, border in zip(train_sources, borders, strict=True)
    ]
    begins = borders if validation is None else [0] * len(held_sources)
    held_plans = [
        plan(source, begin, len(source.ends))
        for source, begin in zip(held_sources, begins, strict=True)
    ]

    sizes = [len(each) for each in train_plans]
    require_sequences(train_sources, sizes)
    draws, num_samples = draws_of(listed, sizes)
    train = _packed(kind, train_sources, train_plans, draws, num_samples)
    notices = [line for source in train_sources for line in source.notices]
    for source, its_plan in zip(train_sources, train_plans, strict=True):
        notices += shortened(source, its_plan)
    paths = ", ".join(source.path for source in train_sources)
    return data_of_sequences(
        train,
        _held_out(kind, held_sources, held_plans),
        train_sources[0].tokenizer,
        train.sequence_length,
        paths,
        notices,
    )


def require_packable(sequence_length: Any, packing: Any) -> None:
    """Raise a UsageError for a length that predicts nothing, or a packing that there is not."""
    if at_least_one("sequence_length", sequence_length) == 1:
        what = "sequence_length is 1: nothing is before a token that is predicted"
        raise UsageError(what, where="data.args.sequence_length", fix="write 2 or more")
    if packing not in PACKINGS:
        what = f"there is no packing {packing!r}{did_you_mean(str(packing), PACKINGS)}"
        raise UsageError(what, where="data.args.packing", fix=f"write {' or '.join(PACKINGS)}")


def _plan(
    source: Source, first: int, last: int, *, sequence_length: int, packing: str
) -> PackingPlan | WholePlan:
    """Return which pieces of the documents `first` … `last` − 1 make sequences."""
    if source.trained is not None:  # conversations are not cut
        return WholePlan(source.ends, sequence_length, first, last)
    return PackingPlan(source.ends, sequence_length, packing, first, last)


def _packed(
    kind: type[PackedDocuments],
    sources: Sequence[Source],
    plans: Sequence[PackingPlan | WholePlan],
    draws: Sequence[int] | None = None,
    num_samples: int | None = None,
    *,
    spreads: bool = False,
) -> PackedDocuments:
    return kind(
        [source.tokens for source in sources],
        plans,
        draws,
        num_samples,
        [source.path for source in sources],
        [source.trained for source in sources],
        spreads=spreads,
    )


def _held_out(
    kind: type[PackedDocuments], sources: Sequence[Source], plans: Sequence[PackingPlan | WholePlan]
) -> PackedDocuments | None:
    """Return the sequences of the sources that have any; None if none has."""
    pairs = [(source, plan) for source, plan in zip(sources, plans, strict=True) if len(plan)]
    if not pairs:
        return None
    of_pairs = [source for source, _ in pairs]
    return _packed(kind, of_pairs, [plan for _, plan in pairs], spreads=True)


def _spread(sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return the sequences of all sources in an order in which each comes evenly.

    >>> _spread([2, 4]).tolist()
    [2, 0, 3, 4, 1, 5]
    """
    positions = [(np.arange(size) + 0.5) / size for size in sizes]
    return np.argsort(np.concatenate(positions), kind="stable")


def data_of_sequences(
    train: Any,
    validation: Any,
    tokenizer: Tokenizer,
    sequence_length: int,
    source: str,
    notices: Sequence[str],
) -> Data:
    """Return data of packed sequences, with what a model has to know of them.

    Args:
        train: the sequences to train on, a dataset.
        validation: others; None: there are none.
        tokenizer: of all documents.
        sequence_length: of each sequence.
        source: the paths of the documents, for records.
        notices: lines on what was left out.
    """
    facts = {
        "vocab_size": tokenizer.vocab_size,
        "block_size": sequence_length,
        "source": source,
    }
    with_special = partial(tokenizer.decode, special=True)
    return Data(train, validation, facts, tokenizer.encode, tokenizer.decode, with_special, notices)


def shortened(source: Source, plan: PackingPlan | WholePlan) -> list[str]:
    """Return a line on documents that are longer than a sequence, if none is to be cut."""
    if not isinstance(plan, WholePlan) or not plan.too_long:
        return []
    assert source.trained is not None
    length = plan.sequence_length
    if not plan.shortens:
        line = f"{source.path}: left out {len(plan.too_long):,} longer than {length + 1} tokens"
        return [f"{line}; raise data.args.sequence_length"]
    lost_tokens = 0  # of answers
    without_answer = 0  # conversations of which nothing is trained
    for begin, end in plan.too_long:
        # A sequence of L tokens predicts the tokens 1 … L of its conversation.
        answers_kept = int(source.trained[begin + 1 : begin + length + 1].sum())
        lost_tokens += int(source.trained[begin + length + 1 : end].sum())
        without_answer += answers_kept == 0
    line = (
        f"{len(plan.too_long):,} of {len(source.ends):,} conversations of {source.path} are longer"
        f" than a sequence of {length} tokens, which loses {lost_tokens:,} tokens of answers"
    )
    if without_answer:
        line += f"; nothing is trained of {without_answer:,}"
    return [f"{line}; raise data.args.sequence_length, or leave them out by max_tokens"]
