"""The data set `labelled`: texts with labels, for classifiers and regression.

    data:
      name: labelled
      args: {path: reviews.jsonl, tokenizer: FOLDER}

A row of `.jsonl`, `.parquet` or `.arrow` has a text and its label. What is learned follows from the
labels of all rows:

| a label is | what is learned | in a sample | classes |
|---|---|---|---|
| a text, true, a whole number | one class of several | int64 [] | names in order, or numbers |
| a number with a fraction | that number | float32 [] | one output |
| a list of texts | any of several classes | float32 [classes] | names in order |
| a list of 0 and 1 | any of several classes | float32 [classes] | as many as the list has |
| a list for a list of words | one class for each word | int64 [length] | names or numbers |

A sample is `{"input_ids", "attention_mask", "labels"}`, padded to the longest text, or cut off at
`max_length`. The first token of a word has its label, the others −100.

Tests: tests/data/test_labelled.py
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.batches import CollatingDataset, Data
from lockstep.data.document_files import Field, records_of
from lockstep.data.language import IGNORED, Tokenizer, at_least_one, check_fraction
from lockstep.data.special_names import number_named
from lockstep.errors import UsageError, did_you_mean, listed
from lockstep.files.data_files import files_of
from lockstep.files.paths import local_path
from lockstep.files.row_fields import field_of_row, names_of_fields

_WHERE = "data.args"


class Learned(Enum):
    """Names what is learned of labels.

    The values are transformers' names of it (`problem_type`).
    """

    CLASS = "single_label_classification"
    CLASSES = "multi_label_classification"
    NUMBER = "regression"
    WORDS = "classes of words"  # one each: the model of tokens knows it by itself


@dataclass(frozen=True)
class LabelledRow:
    """A text or a list of words, its label or its target, and where both stand."""

    text: Any
    label: Any
    where: str


@dataclass(frozen=True)
class Labels:
    """The labels of a data set: what is learned of them, and their names.

    Args:
        learned: what is learned of them.
        names: of the classes, in order; None where labels are numbers.
        size: classes, or numbers of each text.
    """

    learned: Learned
    names: list[str] | None
    size: int

    def number(self, label: Any, where: str) -> int:
        """Return the number of a class, or raise a UsageError."""
        if isinstance(label, str | bool):
            name = _name(label)
            names = self.names or []
            if name not in names:
                what = f"{label!r} of {where} is none of the classes{did_you_mean(name, names)}"
                fix = f"the classes are {listed(names, 8) or f'numbers below {self.size}'}"
                raise UsageError(what, where=where, fix=f"{fix}; data.args.classes names others")
            return names.index(name)
        if isinstance(label, float) or not 0 <= label < self.size:
            what = f"the label {label} of {where} is none of {self.size} classes"
            fix = f"write whole numbers from 0 to {self.size - 1}"
            raise UsageError(what, where=where, fix=fix)
        return int(label)

    def facts(self, padding: int) -> dict[str, Any]:
        """Return what a model has to know; `labels` is as `fit_labels` of `hf_labels.py` takes it.

        `padding`: the token that fills texts.
        """
        of_words = self.learned is Learned.WORDS
        described = {
            "of": "words" if of_words else "texts",
            "problem_type": None if of_words else self.learned.value,
            "size": self.size,
            "names": self.names,
            "padding": padding,
        }
        return {"num_labels": self.size, "labels": described}


class LabelledTexts(CollatingDataset):
    """Texts as tokens, padded to one length, with their labels.

    Args:
        tokens: of each text, int64 [its length].
        labels: of all texts, [texts, …]: classes, numbers, or the tokens of a target.
        length: of each sample.
        padding: the token that fills what is left.
    """

    def __init__(
        self, tokens: Sequence[NDArray[np.int64]], labels: Tensor, length: int, padding: int
    ) -> None:
        self._tokens = tokens
        self._labels = labels
        self._length = length
        self._padding = padding

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: column[0] for key, column in self.collated([index]).items()}

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        input_ids = np.full((len(indices), self._length), self._padding, np.int64)
        attention_mask = np.zeros_like(input_ids)
        for row, index in enumerate(indices):
            tokens = self._tokens[index]
            input_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "labels": self._labels[torch.tensor(indices)],
        }


def labelled(
    *,
    path: str,
    tokenizer: str = "bytes",
    text_field: str = "text",
    label_field: str = "label",
    classes: Sequence[str] | None = None,
    labels_of: str | Sequence[str] | None = None,
    max_length: int = 256,
    pad_token: str | None = None,
    validation: str | None = None,
    validation_fraction: float = 0.0,
) -> Data:
    """Return texts with labels, or raise a UsageError.

    `path` is a file of rows, or a folder of such files. `classes` names the classes in their order;
    unset: the names that labels have, sorted. `labels_of` is a path, or several, whose labels say
    what is learned, in place of these: an evaluation has those of the training.

    Texts of more than `max_length` tokens are cut off. `pad_token` fills shorter ones; unset: the
    tokenizer's, or the one that ends texts. `validation` is another path, or else the last rows are
    held out, by `validation_fraction`.
    """
    at_least_one("max_length", max_length)
    check_fraction(validation_fraction)
    chosen = Tokenizer(tokenizer)
    padding = padding_of(chosen, pad_token)
    fields = {"text_field": text_field, "label_field": label_field}
    rows = list(rows_of(path, f"{_WHERE}.path", fields))
    held_out = []
    if validation is not None:
        held_out = list(rows_of(validation, f"{_WHERE}.validation", fields))
    told_by = [*rows, *held_out]
    if labels_of is not None:
        paths = [labels_of] if isinstance(labels_of, str) else labels_of
        read = (rows_of(each, f"{_WHERE}.labels_of", fields) for each in paths)
        told_by = [row for part in read for row in part]
    labels = labels_in(told_by, classes)
    for row in [*rows, *held_out]:
        _require_kind(row, labels.learned, told_by[0])
    border = len(rows) - (0 if held_out else int(len(rows) * validation_fraction))
    parts = [rows[:border], held_out or rows[border:]]
    encoded = [[_encoded(chosen, row, labels, max_length) for row in part] for part in parts]
    everything = [each for part in encoded for each in part]
    length = max(len(each.tokens) for each in everything)
    samples = [
        LabelledTexts(
            [each.tokens for each in part], _stacked(part, labels, length), length, padding
        )
        for part in encoded
        if part
    ]
    cut = sum(each.is_cut for each in everything)
    notices = [f"{path}: {_told(labels)}"]
    if cut:
        notices.append(
            f"{path}: {cut:,} of {len(everything):,} texts are longer than {max_length} tokens, and"
            " cut off; raise data.args.max_length"
        )
    facts = {"vocab_size": chosen.vocab_size, "block_size": length, "source": path}
    facts |= labels.facts(padding)
    validated = samples[1] if len(samples) > 1 else None
    return Data(samples[0], validated, facts, chosen.encode, chosen.decode, notices=notices)


def _told(labels: Labels) -> str:
    """Return a line on what is learned."""
    kinds = {
        Learned.CLASS: f"one of {labels.size} classes for each text",
        Learned.CLASSES: f"any of {labels.size} classes for each text",
        Learned.NUMBER: f"{_numbers(labels.size)} for each text (regression)",
        Learned.WORDS: f"one of {labels.size} classes for each word",
    }
    names = "" if labels.names is None else f": {listed(labels.names, 8)}"
    return f"{kinds[labels.learned]}{names}"


def _numbers(size: int) -> str:
    return "a number" if size == 1 else f"{size} numbers"


def rows_of(path: str, where: str, fields: Mapping[str, str]) -> Iterator[LabelledRow]:
    """Yield the rows of files; a UsageError for one without a text or without a label.

    `fields`: by the key that names it, the field of the text, and then that of the label.
    """
    count = 0
    text_field, label_field = fields.values()
    for file in files_of(local_path(path, where), where=where):
        for record in records_of(file, Field(text_field)):
            if record is None:
                continue
            row = record.row
            if row is None:
                what = f"{file} holds no rows, and so no labels"
                example = ", ".join(f'"{name}": "…"' for name in fields.values())
                fix = f"write lines of {{{example}}}, as .jsonl, .csv, .parquet or .arrow"
                raise UsageError(what, where=where, fix=fix)
            for key, name in fields.items():
                if field_of_row(row, name) is None:
                    what = f"there is no {name!r} in {record.where}"
                    fix = f"write data.args.{key}: it has {listed(names_of_fields(row))}"
                    raise UsageError(what, where=record.where, fix=fix)
            count += 1
            text = field_of_row(row, text_field)
            yield LabelledRow(text, field_of_row(row, label_field), record.where)
    if not count:
        raise UsageError(f"{path} has no rows", where=where, fix="name a file of rows, or fill it")


# ---- what labels are ----


def labels_in(rows: Sequence[LabelledRow], classes: Sequence[str] | None) -> Labels:
    """Return what the labels of rows are; a UsageError if they are of several kinds."""
    kinds = [(_kind(row), row) for row in rows]
    learned, first = kinds[0]
    if Learned.NUMBER in {kind for kind, _ in kinds} and all(
        _are_numbers(row.label) for row in rows
    ):
        learned = Learned.NUMBER  # some of the numbers are whole
    for row in rows:
        _require_kind(row, learned, first)
    if learned is Learned.NUMBER:
        if classes is not None:
            what = "classes are named, and the labels are numbers with fractions"
            raise UsageError(what, where=f"{_WHERE}.classes", fix="leave classes out")
        return Labels(learned, None, _count_of_numbers(rows))
    if learned is Learned.CLASSES and _is_number((first.label or [""])[0]):
        return _of_bits(rows, classes)
    return _of_classes(learned, rows, classes)


def _count_of_numbers(rows: Sequence[LabelledRow]) -> int:
    """Return how many numbers each text has, or raise a UsageError."""
    if not any(isinstance(each, float) for row in rows for each in _members(row.label)):
        row = rows[0]
        what = f"the label of {row.where} is a list of {_shown(row.label)}"
        why = "no number in the labels has a fraction, so they are not taken for numbers to learn"
        fix = (
            "write the names of the classes that hold, or 1 and 0 for each class; numbers to learn"
            " with a point: [1.0, 2.0]"
        )
        raise UsageError(what, where=row.where, why=why, fix=fix)
    first = rows[0].label
    for row in rows:
        if isinstance(row.label, list) != isinstance(first, list) or len(
            _members(row.label)
        ) != len(_members(first)):
            what = (
                f"the label of {row.where} is {_shown(row.label)}, and that of {rows[0].where}"
                f" {_shown(first)}"
            )
            fix = "write as many numbers in each row"
            raise UsageError(what, where=row.where, fix=fix)
    return len(_members(first))


def _require_kind(row: LabelledRow, learned: Learned, first: LabelledRow) -> None:
    """Refuse a label of another kind than the first one."""
    if _kind(row) is learned or (learned is Learned.NUMBER and _are_numbers(row.label)):
        return
    what = (
        f"the label of {row.where} is {_shown(row.label)}, and that of {first.where}"
        f" {_shown(first.label)}"
    )
    why = "all labels have to be of one kind: texts, numbers, or lists of them"
    raise UsageError(what, where=row.where, why=why, fix="write all labels in one way")


def _kind(row: LabelledRow) -> Learned:
    """Return what one row's label is; a UsageError if it is nothing that can be learned."""
    label = row.label
    if isinstance(row.text, list):
        is_words = all(isinstance(word, str) for word in row.text)
        if is_words and isinstance(label, list) and len(label) == len(row.text):
            return Learned.WORDS
        what = (
            f"the text of {row.where} is a list of {len(row.text)}, and its label {_shown(label)}"
        )
        fix = "write a list of words, and a list of as many labels"
        raise UsageError(what, where=row.where, fix=fix)
    if not isinstance(row.text, str):
        what = f"the text of {row.where} is {type(row.text).__name__}, not text"
        raise UsageError(what, where=row.where, fix="write a text, or a list of words")
    if isinstance(label, list):
        of_names = all(isinstance(each, str) for each in label)
        of_bits = bool(label) and all(_is_number(each) and each in (0, 1) for each in label)
        if of_names or of_bits:
            return Learned.CLASSES
        if _are_numbers(label):
            return Learned.NUMBER
        what = f"the label of {row.where} is a list of {_shown(label)}"
        fix = "write the names of the classes that hold, 1 and 0 for each class, or numbers"
        raise UsageError(what, where=row.where, fix=fix)
    if isinstance(label, str | bool | int):
        return Learned.CLASS
    if isinstance(label, float) and np.isfinite(label):
        return Learned.NUMBER
    what = f"the label of {row.where} is {_shown(label)}"
    fix = "write a text, a number, or a list of them"
    raise UsageError(what, where=row.where, fix=fix)


def _of_bits(rows: Sequence[LabelledRow], classes: Sequence[str] | None) -> Labels:
    """Return labels that are lists of 0 and 1, one for each class."""
    size = len(rows[0].label)
    for row in rows:
        if len(row.label) != size or not all(map(_is_number, row.label)):
            what = (
                f"the label of {row.where} is {_shown(row.label)}, and the first has {size} numbers"
            )
            raise UsageError(what, where=row.where, fix="write 0 or 1 for each class in each row")
    if classes is not None and len(classes) != size:
        what = f"{len(classes)} classes are named, and labels have {size} numbers"
        raise UsageError(what, where=f"{_WHERE}.classes", fix=f"name {size} classes")
    return Labels(Learned.CLASSES, None if classes is None else list(classes), size)


def _of_classes(
    learned: Learned, rows: Sequence[LabelledRow], classes: Sequence[str] | None
) -> Labels:
    """Return labels that name classes, or number them."""
    single = [(each, row.where) for row in rows for each in _members(row.label)]
    numbered = [not isinstance(each, str | bool) for each, _ in single]
    if any(numbered) and not all(numbered):
        other = single[numbered.index(not numbered[0])]
        what = (
            f"labels are texts and numbers: {single[0][0]!r} of {single[0][1]}, and {other[0]!r} of"
            f" {other[1]}"
        )
        raise UsageError(what, where=other[1], fix="write all labels as texts, or all as numbers")
    if all(numbered) and single:
        wrong = [(each, at) for each, at in single if isinstance(each, float) or each < 0]
        if wrong:
            what = f"the label {wrong[0][0]!r} of {wrong[0][1]} is not a class"
            fix = "write whole numbers from 0 on, or texts"
            raise UsageError(what, where=wrong[0][1], fix=fix)
        most = max(int(each) for each, _ in single) + 1
        if classes is not None and len(classes) < most:
            what = f"{len(classes)} classes are named, and a label is {most - 1}"
            raise UsageError(what, where=f"{_WHERE}.classes", fix=f"name {most} classes, from 0 on")
        if classes is None:
            return Labels(learned, None, most)
        return Labels(learned, list(classes), len(classes))  # names of the numbers
    names = sorted({_name(each) for each, _ in single}) if classes is None else list(classes)
    if len(set(names)) < len(names):
        what = f"classes names {max(names, key=names.count)!r} more than once"
        raise UsageError(what, where=f"{_WHERE}.classes", fix="name each class once")
    if len(names) < 2 and learned is Learned.CLASS:
        what = f"all labels are {listed(names)}"
        why = "with one class there is nothing to learn"
        raise UsageError(what, where=f"{_WHERE}.path", why=why, fix="give rows of two classes")
    return Labels(learned, names, len(names))


def _members(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]


def _are_numbers(label: Any) -> bool:
    """Return whether a label is a number, or a list of some."""
    return bool(_members(label)) and all(
        _is_number(each) and np.isfinite(each) for each in _members(label)
    )


def _is_number(label: Any) -> bool:
    return isinstance(label, int | float) and not isinstance(label, bool)


def _name(label: Any) -> str:
    return str(label).lower() if isinstance(label, bool) else str(label)


def _shown(label: Any) -> str:
    return f"{json.dumps(label, ensure_ascii=False, default=str):.60}"


# ---- tokens ----


@dataclass(frozen=True)
class _Encoded:
    tokens: NDArray[np.int64]
    label: Any  # a number, or several
    is_cut: bool


def _encoded(tokenizer: Tokenizer, row: LabelledRow, labels: Labels, max_length: int) -> _Encoded:
    """Return the tokens of a row, with those that its tokenizer puts around a text."""
    encoded = tokenizer.encode_for_classifier(row.text, max_length)
    if not len(encoded.tokens):
        what = f"the text of {row.where} has no tokens"
        raise UsageError(what, where=row.where, fix="leave the row out")
    if labels.learned is Learned.NUMBER:
        return _Encoded(encoded.tokens, row.label, encoded.is_cut)
    if labels.learned is Learned.CLASS:
        return _Encoded(encoded.tokens, labels.number(row.label, row.where), encoded.is_cut)
    if labels.learned is Learned.WORDS:
        numbers = [labels.number(each, row.where) for each in row.label]
        return _Encoded(encoded.tokens, _of_first_tokens(encoded.words, numbers), encoded.is_cut)
    bits = np.zeros(labels.size, np.float32)
    if row.label and _is_number(row.label[0]):
        bits[:] = row.label
    else:
        bits[[labels.number(each, row.where) for each in row.label]] = 1
    return _Encoded(encoded.tokens, bits, encoded.is_cut)


def _of_first_tokens(words: Sequence[int | None], numbers: Sequence[int]) -> NDArray[np.int64]:
    """Return the label of each token: that of its word for the first token, else −100."""
    labels = np.full(len(words), IGNORED, np.int64)
    before: int | None = None
    for position, word in enumerate(words):
        if word is not None and word != before:
            labels[position] = numbers[word]
        before = word
    return labels


def _stacked(part: Sequence[_Encoded], labels: Labels, length: int) -> Tensor:
    """Return the labels of all texts as one tensor."""
    if labels.learned is Learned.NUMBER:
        return torch.tensor([each.label for each in part], dtype=torch.float32)
    if labels.learned is Learned.CLASS:
        return torch.tensor([each.label for each in part])
    if labels.learned is Learned.CLASSES:
        return torch.from_numpy(np.stack([each.label for each in part]))
    padded = np.full((len(part), length), IGNORED, np.int64)
    for row, each in enumerate(part):
        padded[row, : len(each.label)] = each.label
    return torch.from_numpy(padded)


def padding_of(tokenizer: Tokenizer, named: str | None) -> int:
    """Return the number of the token that fills short texts, or raise a UsageError."""
    if tokenizer.file is None:
        return 0
    return number_named(tokenizer, "pad_token", named, ("[PAD]", "<pad>"), "eos_token")
