"""The data set `preferences`: pairs of answers, of which one was preferred, for the loss `dpo`.

    data:
      name: preferences
      args:
        sources: [{path: pairs.jsonl}]
        tokenizer: FOLDER            # of the model, with its chat template
        sequence_length: 1024
    loss_fn: {name: dpo, args: {beta: 0.1}}

Both conversations of a pair stand in one sequence, as documents that do not see each other
(`answer_pairs`), and several pairs share a sequence where they fit. So no cut of a batch parts a
pair, and nothing is padded but the ends of sequences. With sequence_length 9 and one pair, of the
answers `4` and `5` to `1 2 3`:

    input_ids      1 2 3 4 | 1 2 3 | 0 0
    targets        − − 4 − | − − 5 | − −
    document_ids   0 0 0 0 | 1 1 1 | 2 2

A sample is `{"input_ids", "targets", "document_ids"}`, each int64 [sequence_length], and `"pairs"`,
float32 [the most pairs of a sequence], 1 where the sequence has a pair of that number.

Tests: tests/data/test_preferences.py, tests/parity/test_preferences.py
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.batches import Data
from lockstep.data.encoding import REJECTED
from lockstep.data.language import check_fraction
from lockstep.data.packed import PackedDocuments, packed_data, require_packable
from lockstep.data.packing import WholePlan
from lockstep.data.sources import Source, described_pairs
from lockstep.errors import UsageError


class PackedPairs(PackedDocuments):
    """Sequences of packed pairs, each of which is one document of its source."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._most = max(len(plan.pieces(n)) for plan in self._plans for n in range(len(plan)))

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        columns = super().collated(indices)
        pairs = torch.zeros(len(indices), self._most)
        for row, index in enumerate(indices):
            _, pieces = self._pieces(index)
            pairs[row, : len(pieces)] = 1
        return {**columns, "pairs": pairs}

    def _number(
        self, document_ids: NDArray[np.int64], trained: NDArray[Any] | None, number: int
    ) -> int:
        assert trained is not None
        (begin,) = np.flatnonzero(trained == REJECTED)
        document_ids[:begin] = number
        document_ids[begin:] = number + 1
        return number + 2


def preferences(
    *,
    sources: Any,
    sequence_length: int = 1024,
    tokenizer: str | None = None,
    validation: Any = None,
    validation_fraction: float = 0.0,
) -> Data:
    """Return packed pairs of answers, or raise a UsageError.

    `sources` lists paths of files of rows, or of folders that `lockstep data prepare` made of them,
    or dicts with a `path`, `chosen_field` and `rejected_field` (`chosen`, `rejected`), and
    `prompt_field`, a name or a list of them (`prompt`, where a row has one); `weight` or `epochs`,
    `special_tokens`, `min_tokens`, `max_tokens` and `keep` are those of the data set `documents`.
    Pairs that are longer than a sequence are left out. The `tokenizer` of files is a folder, with a
    chat template where rows hold messages, or a prompt of its own. `validation` lists others, or
    else the last pairs of each source are held out, by `validation_fraction`.
    """
    require_packable(sequence_length, "first_fit")
    check_fraction(validation_fraction)
    longest = sequence_length + 1  # a sequence of L positions takes L + 1 tokens
    listed = described_pairs(sources, "data.args.sources", longest)
    held_out = None
    if validation is not None:
        held_out = described_pairs(validation, "data.args.validation", longest)
    data = packed_data(
        listed,
        held_out,
        tokenizer,
        partial(_plan, sequence_length=sequence_length),
        validation_fraction,
        PackedPairs,
    )
    return replace(data, facts={**data.facts, "pairs": True})


def _plan(source: Source, first: int, last: int, *, sequence_length: int) -> WholePlan:
    plan = WholePlan(source.ends, sequence_length, first, last, shortens=False)
    if plan.too_long and not len(plan):
        what = f"no pair of {source.path} has at most {sequence_length + 1} tokens"
        fix = "raise data.args.sequence_length: a sequence holds both answers of a pair"
        raise UsageError(what, where=source.where, fix=fix)
    return plan
