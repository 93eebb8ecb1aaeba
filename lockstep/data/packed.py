"""The data set `documents`: documents of several sources, mixed by weight, packed into sequences.

    data:
      name: documents
      args:
        sources:
          - {path: wiki, weight: 0.7}         # a folder that `lockstep data prepare` made
          - {path: notes.jsonl, weight: 0.3}  # or files, which each process tokenizes at its start
        sequence_length: 512
        packing: first_fit

Sources of conversations, with `messages_field`, are packed without being cut, and have targets
where somebody answers (`conversations`).

A sample is `{"input_ids", "targets", "document_ids"}`, each int64 [sequence_length]. The numbers of
the documents keep them apart in attention, and positions count from each one's begin
(`lockstep.models.attention.Attend`). Which pieces make a sequence follows from lengths alone
(`packing`), and which sequence comes when from (seed, step) (`mixing`).

Tests: tests/data/test_packed.py, tests/parity/test_packed.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.batches import CollatingDataset, Data
from lockstep.data.language import IGNORED, Tokens, at_least_one, check_fraction
from lockstep.data.mixing import MixedOrder
from lockstep.data.packing import PACKINGS, PackingPlan, WholePlan
from lockstep.data.permutation import EpochOrder
from lockstep.data.sources import (
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
    """

    def __init__(
        self,
        tokens: Sequence[Tokens],
        plans: Sequence[PackingPlan | WholePlan],
        draws: Sequence[int] | None = None,
        num_samples: int | None = None,
        names: Sequence[str] = (),
        trained: Sequence[Tokens | None] | None = None,
    ) -> None:
        self._tokens = list(tokens)
        self._trained = [None] * len(tokens) if trained is None else list(trained)
        self._plans = list(plans)
        self._sizes = [len(plan) for plan in plans]
        self._bounds = np.cumsum([0, *self._sizes])
        self._draws = self._sizes if draws is None else list(draws)
        self._num_samples = int(self._bounds[-1]) if num_samples is None else num_samples
        self._names = list(names)
        self.sequence_length = plans[0].sequence_length

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def by_source(self) -> dict[str, "PackedDocuments"]:
        """Return the sequences of each source by its name; nothing if there is one source.

        The name of a source that another one has, too, is followed by the source's number.
        """
        found: dict[str, PackedDocuments] = {}
        if len(self._names) < 2:
            return found
        for number, name in enumerate(self._names):
            unique = f"{name} [{number}]" if name in found else name
            found[unique] = PackedDocuments(
                [self._tokens[number]],
                [self._plans[number]],
                trained=[self._trained[number]],
            )
        return found

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
        """Write a sequence into three rows; what is left of them is a document without targets."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        source = int(np.searchsorted(self._bounds, index, side="right")) - 1
        tokens = self._tokens[source]
        trained = self._trained[source]
        begin = 0
        number = 0
        for piece in self._plans[source].pieces(index - int(self._bounds[source])):
            end = begin + piece.length
            taken = tokens[piece.token : piece.token + piece.length + 1]
            input_ids[begin:end] = taken[:-1]
            targets[begin:end] = taken[1:]
            if trained is not None:
                counts = trained[piece.token + 1 : piece.token + piece.length + 1]
                targets[begin:end][counts == 0] = IGNORED
            document_ids[begin:end] = number
            begin = end
            number += 1
        document_ids[begin:] = number


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
    `text_field` (`text`) or, of conversations, `messages_field`, and of files `min_tokens`,
    `max_tokens` and `keep`. `validation` lists others, or else the last documents of each source
    are held out, by `validation_fraction`. The `tokenizer` of files is `bytes`, or the path of a
    `tokenizer.json`, or of a folder with one and, for conversations, a chat template. `packing` is
    that of texts: conversations are not cut.
    """
    if at_least_one("sequence_length", sequence_length) == 1:
        what = "sequence_length is 1: nothing is before a token that is predicted"
        raise UsageError(what, where="data.args.sequence_length", fix="write 2 or more")
    check_fraction(validation_fraction)
    if packing not in PACKINGS:
        what = f"there is no packing {packing!r}{did_you_mean(str(packing), PACKINGS)}"
        raise UsageError(what, where="data.args.packing", fix=f"write {' or '.join(PACKINGS)}")

    listed = described(sources, "data.args.sources")
    require_shares(listed)  # weights that are wrong are told before files are read
    found = [opened(each, tokenizer) for each in listed]
    held_out = found
    if validation is not None:
        held_out = [opened(e, tokenizer) for e in described(validation, "data.args.validation")]
    require_one_tokenizer([*found, *held_out])

    def plan(source: Source, first: int, last: int) -> PackingPlan | WholePlan:
        if source.trained is not None:
            return WholePlan(source.ends, sequence_length, first, last)
        return PackingPlan(source.ends, sequence_length, packing, first, last)

    borders = [len(each.ends) - int(len(each.ends) * validation_fraction) for each in found]
    plans = [plan(each, 0, border) for each, border in zip(found, borders, strict=True)]
    require_sequences(found, list(map(len, plans)))
    draws, num_samples = draws_of(listed, list(map(len, plans)))
    paths = [each.path for each in found]
    train = PackedDocuments(
        [each.tokens for each in found],
        plans,
        draws,
        num_samples,
        paths,
        [each.trained for each in found],
    )
    notices = [line for each in found for line in each.notices]
    for source, its in zip(found, plans, strict=True):
        notices += shortened(source, its)

    begins = borders if validation is None else [0] * len(held_out)
    parts = [
        (each, plan(each, begin, len(each.ends)))
        for each, begin in zip(held_out, begins, strict=True)
    ]
    parts = [(source, its) for source, its in parts if len(its)]
    held = None
    if parts:
        held = PackedDocuments(
            [source.tokens for source, _ in parts],
            [its for _, its in parts],
            names=[source.path for source, _ in parts],
            trained=[source.trained for source, _ in parts],
        )
    chosen = found[0].tokenizer
    facts = {
        "vocab_size": chosen.vocab_size,
        "block_size": sequence_length,
        "source": ", ".join(paths),
    }
    with_special = partial(chosen.decode, special=True)
    return Data(train, held, facts, chosen.encode, chosen.decode, with_special, notices)


def shortened(source: Source, plan: PackingPlan | WholePlan) -> list[str]:
    """Return a line on conversations that are longer than a sequence, if there are any."""
    if not isinstance(plan, WholePlan) or not plan.too_long:
        return []
    assert source.trained is not None
    length = plan.sequence_length
    lost = 0
    empty = 0
    for begin, end in plan.too_long:
        kept = int(source.trained[begin + 1 : begin + length + 1].sum())
        lost += int(source.trained[begin + length + 1 : end].sum())
        empty += kept == 0
    line = (
        f"{len(plan.too_long):,} of {len(source.ends):,} conversations of {source.path} are longer"
        f" than a sequence of {length} tokens, which loses {lost:,} tokens of answers"
    )
    if empty:
        line += f"; nothing is trained of {empty:,}"
    return [f"{line}; raise data.args.sequence_length, or leave them out by max_tokens"]
