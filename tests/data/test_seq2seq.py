"""Texts to read and texts to write."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import DataConfig
from lockstep.data import Data, build_data, check_data
from lockstep.data.language import Tokenizer
from lockstep.errors import UsageError
from tests.data.chats import write_tokenizer

pytest.importorskip("transformers")

ROWS = [{"text": f"twice {n}", "target": str(2 * n)} for n in (1, 7, 600)]


def config(folder: Path, rows: list[Any], **args: Any) -> DataConfig:
    write_tokenizer(folder)
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"path": str(file), "tokenizer": str(folder), **args}
    return DataConfig(name="seq2seq", args=arguments)


def made(folder: Path, rows: list[Any] = ROWS, **args: Any) -> Data:
    return build_data(config(folder, rows, **args))


def test_a_target_ends_and_is_filled_with_what_does_not_count(tmp_path: Path) -> None:
    data = made(tmp_path)
    decode = Tokenizer(str(tmp_path)).decode
    for index, row in enumerate(ROWS):
        sample = data.train[index]
        text = sample["input_ids"][sample["attention_mask"] == 1].tolist()
        target = sample["labels"][sample["labels"] != -100].tolist()
        assert decode(text) == row["text"]
        assert decode(target, special=True) == row["target"] + "</s>"
    assert data.train[0]["labels"].tolist()[-3:] == [-100] * 3, "filled to the longest, 1200 </s>"
    assert data.train.collated([0, 2])["labels"].shape == (2, 5)


def test_what_is_too_long_is_cut_and_told_and_still_ends(tmp_path: Path) -> None:
    data = made(tmp_path, max_length=7, max_target_length=3)
    sample = data.train[2]
    decode = Tokenizer(str(tmp_path)).decode
    assert decode(sample["input_ids"].tolist()) == "twice 6"
    assert decode(sample["labels"].tolist(), special=True) == "12</s>"
    [line] = data.notices
    assert "1 of 3 texts or targets are longer than 7 and 3 tokens" in line


def test_rows_are_held_out(tmp_path: Path) -> None:
    data = made(tmp_path, validation_fraction=0.4)
    assert (len(data.train), len(data.validation)) == (2, 1)
    other = str(tmp_path / "pairs.jsonl")
    data = made(tmp_path, validation=other)
    assert (len(data.train), len(data.validation)) == (3, 3)


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        ([{"text": "a"}], {}, r"no 'target' in .*pairs\.jsonl:1(.|\n)*target_field: it has text"),
        (ROWS, {"target_field": "answer"}, r"no 'answer' in .*pairs\.jsonl:1"),
        ([{"text": "a", "target": 3}], {}, r"the target of .*pairs\.jsonl:1 is int, not text"),
        ([{"text": ["a"], "target": "b"}], {}, "the text of .* is list, not text"),
        ([{"text": "", "target": "b"}], {}, "the text of .* has no tokens"),
        (ROWS, {"tokenizer": "bytes"}, "the tokenizer bytes names no eos_token"),
        (ROWS, {"pad_token": "[P]"}, r"has no token '\[P\]'"),
    ],
)
def test_bad_rows_are_one_error(
    rows: list[Any], args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        made(tmp_path, rows, **args)


def test_a_text_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("words")
    named = config(tmp_path, ROWS, path=str(tmp_path / "plain.txt"))
    with pytest.raises(UsageError, match=r"plain\.txt holds text, and no rows with text, target"):
        check_data(named)
