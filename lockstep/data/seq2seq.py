"""The data set `seq2seq`: texts to read and texts to write, for models with encoder and decoder.

    model: {name: "hf:base", auto: AutoModelForSeq2SeqLM}
    data:
      name: seq2seq
      args: {path: pairs.jsonl, tokenizer: base}

A row of `.jsonl`, an array of JSON, or a table has a `text` and a `target`. Both are read with the
special tokens that the tokenizer puts around a text, and a target ends with its `eos_token`.

A sample is `{"input_ids", "attention_mask"}`, int64 [the longest text], and `"labels"`, int64 [the
longest target], −100 where it is filled. The model makes what its decoder reads of the labels.

Tests: tests/data/test_seq2seq.py, tests/parity/test_kinds_of_data.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.batches import Data
from lockstep.data.labelled import LabelledRow, LabelledTexts, padding_of, rows_of
from lockstep.data.language import IGNORED, Tokenizer, at_least_one, check_fraction
from lockstep.data.special_names import number_named
from lockstep.errors import UsageError

_WHERE = "data.args"
_ENDS = ("</s>", "[SEP]")


@dataclass(frozen=True)
class _TextAndTarget:
    """Holds the tokens of a text and of its target, and whether either was cut off."""

    text: NDArray[np.int64]
    target: NDArray[np.int64]
    is_cut: bool


def seq2seq(
    *,
    path: str,
    tokenizer: str,
    text_field: str = "text",
    target_field: str = "target",
    max_length: int = 256,
    max_target_length: int = 128,
    pad_token: str | None = None,
    validation: str | None = None,
    validation_fraction: float = 0.0,
) -> Data:
    """Return texts with their targets, or raise a UsageError.

    `path` is a file of rows, or a folder of such files. Texts of more than `max_length` tokens are
    cut off, and targets of more than `max_target_length`. `pad_token` fills shorter texts; unset:
    the tokenizer's. `validation` is another path, or else the last rows are held out, by
    `validation_fraction`.
    """
    at_least_one("max_length", max_length)
    at_least_one("max_target_length", max_target_length)
    check_fraction(validation_fraction)
    chosen = Tokenizer(tokenizer)
    padding = padding_of(chosen, pad_token)
    end = number_named(chosen, "eos_token", None, _ENDS)
    fields = {"text_field": text_field, "target_field": target_field}

    def read(named: str, key: str) -> list[_TextAndTarget]:
        rows = rows_of(named, f"{_WHERE}.{key}", fields)
        return [_encoded(chosen, row, max_length, max_target_length, end) for row in rows]

    pairs = read(path, "path")
    held_out = [] if validation is None else read(validation, "validation")
    border = len(pairs) - (0 if held_out else int(len(pairs) * validation_fraction))
    parts = [pairs[:border], held_out or pairs[border:]]
    everything = [pair for part in parts for pair in part]
    length = max(len(pair.text) for pair in everything)
    targets = max(len(pair.target) for pair in everything)
    samples = [
        LabelledTexts([pair.text for pair in part], _stacked(part, targets), length, padding)
        for part in parts
        if part
    ]
    notices = []
    cut = sum(pair.is_cut for pair in everything)
    if cut:
        notices.append(
            f"{path}: {cut:,} of {len(everything):,} texts or targets are longer than {max_length}"
            f" and {max_target_length} tokens, and cut off; raise data.args.max_length or"
            " max_target_length"
        )
    facts = {"vocab_size": chosen.vocab_size, "block_size": length, "source": path}
    return Data(samples[0], samples[1] if len(samples) > 1 else None, facts, notices=notices)


def _encoded(
    tokenizer: Tokenizer, row: LabelledRow, longest: int, longest_target: int, end: int
) -> _TextAndTarget:
    """Return the tokens of a row's text and target, or raise a UsageError."""
    for key, value in (("text", row.text), ("target", row.label)):
        if not isinstance(value, str):
            what = f"the {key} of {row.where} is {type(value).__name__}, not text"
            raise UsageError(what, where=row.where, fix="write a text, or leave the row out")
    text = tokenizer.encode_for_classifier(row.text, longest)
    if not len(text.tokens):
        what = f"the text of {row.where} has no tokens"
        raise UsageError(what, where=row.where, fix="leave the row out")
    target = tokenizer.encode_for_classifier(row.label, longest_target)
    tokens = target.tokens
    is_cut = target.is_cut
    if not len(tokens) or tokens[-1] != end:
        is_cut = is_cut or len(tokens) == longest_target
        tokens = np.append(tokens[: longest_target - 1], end)
    return _TextAndTarget(text.tokens, tokens, text.is_cut or is_cut)


def _stacked(pairs: Sequence[_TextAndTarget], length: int) -> Tensor:
    """Return the targets of all pairs, int64 [pairs, length]."""
    labels = np.full((len(pairs), length), IGNORED, np.int64)
    for row, pair in enumerate(pairs):
        labels[row, : len(pair.target)] = pair.target
    return torch.from_numpy(labels)
