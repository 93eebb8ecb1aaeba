"""Rows that hold a prompt and its answer in fields of their own, and ShareGPT's messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import DataConfig
from lockstep.data import build_data
from lockstep.data.document_files import Field, record_of
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import prepare, prepare_command
from lockstep.data.prompts import conversation_of
from lockstep.errors import UsageError
from tests.data.chats import write_tokenizer

pytest.importorskip("transformers")

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
BEFORE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CHAT = "<|user|>2 + 2?<|end|>\n<|assistant|>4<|end|>"


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def trained_on(folder: Path, row: dict[str, Any], **keys: Any) -> tuple[str, str]:
    """Return the text of a sequence that holds a row's document, and what of it is trained."""
    write_tokenizer(folder)
    source = {"path": str(write_rows(folder / "rows.jsonl", [row])), **keys}
    args = {"sources": [source], "tokenizer": str(folder), "sequence_length": 128}
    data = build_data(DataConfig(name="documents", args=args), seed=0)
    sample = data.train[0]
    ids = sample["input_ids"]
    targets = sample["targets"]
    decode = Tokenizer(str(folder)).decode
    last = int(np.flatnonzero(targets.numpy() != -100)[-1])
    text = decode([*ids[: last + 1].tolist(), int(targets[last])], special=True)
    return text, decode(targets[targets != -100].tolist(), special=True)


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        (
            {"prompt": "2 + 2?", "completion": "4"},
            {"prompt_field": "prompt", "answer_field": "completion"},
            CHAT,
        ),
        (
            {"instruction": "2 +", "input": "2?", "output": "4"},
            {"prompt_field": ["instruction", "input"], "answer_field": "output"},
            CHAT.replace("2 + ", "2 +\n\n"),
        ),
        (
            {"instruction": "2 + 2?", "input": "", "output": "4"},
            {"prompt_field": ["instruction", "input"], "answer_field": "output"},
            CHAT,
        ),
        (
            {"prompt": [*BEFORE, ASKED], "completion": [ANSWERED]},
            {"prompt_field": "prompt", "answer_field": "completion"},
            "<|user|>hi<|end|>\n<|assistant|>hello<|end|>\n" + CHAT,
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            {"messages_field": "conversations"},
            CHAT,
        ),
    ],
)
def test_only_the_answer_is_trained(
    row: dict[str, Any], keys: dict[str, Any], text: str, tmp_path: Path
) -> None:
    assert trained_on(tmp_path, row, **keys) == (text, "4<|end|>")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "", "completion": "4"}, "the prompt of here is empty"),
        ({"prompt": None, "completion": "4"}, "the prompt of here is empty"),
        ({"prompt": 3, "completion": "4"}, "prompt of here hold int, which make no prompt"),
        ({"prompt": "a", "completion": None}, "'completion' is NoneType, not an answer, in here"),
        ({"prompt": "a", "answer": "4"}, "there is no 'completion' in here"),
        ({"question": "a", "completion": "4"}, "there is no 'prompt' in here"),
    ],
)
def test_a_row_without_a_prompt_or_an_answer_is_one_error(row: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        conversation_of(row, ["prompt"], "completion", "here")
    fault = record_of(row, Field("completion", True, ("prompt",)), "here").fault
    assert fault is not None
    assert said in fault.what


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"prompt_field": "prompt"}, "a source has a prompt_field, and no answer_field"),
        ({"answer_field": "completion"}, "a source has a answer_field, and no prompt_field"),
        ({"prompt_field": [], "answer_field": "a"}, "names no fields"),
        ({"prompt_field": [1], "answer_field": "a"}, "names no fields"),
        ({"prompt_field": 3, "answer_field": "a"}, "not a name, or a list of names"),
        (
            {"prompt_field": "p", "answer_field": "a", "messages_field": "m"},
            "a source has both a messages_field and a answer_field",
        ),
        ({"prompt_field": "p", "answer_field": "a", "special_tokens": True}, "special_tokens"),
    ],
)
def test_keys_that_do_not_belong_together_are_refused(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        trained_on(tmp_path, {"prompt": "a", "completion": "b"}, **keys)


def test_prepared_ones_are_those_of_a_run(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    rows = [{"prompt": f"{n} + {n}?", "completion": str(2 * n)} for n in range(9)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    field = Field("completion", True, ("prompt",))
    prepare(file, tmp_path / "by-hand", str(tmp_path), field=field)
    command = ["prepare", str(file), "--out", str(tmp_path / "made"), "--tokenizer", str(tmp_path)]
    with pytest.raises(UsageError, match="belong together"):
        prepare_command([*command, "--prompt-field", "prompt"])
    pair = ["--prompt-field", "prompt", "--answer-field", "completion"]
    with pytest.raises(UsageError, match="--answer-field beside --messages-field"):
        prepare_command([*command, *pair, "--messages-field", "messages"])
    prepare_command([*command, *pair])

    def samples(source: Any) -> list[tuple[list[int], list[int]]]:
        args = {"sources": [source], "sequence_length": 64}
        if isinstance(source, dict):
            args["tokenizer"] = str(tmp_path)
        data = build_data(DataConfig(name="documents", args=args), seed=0)
        read = (data.train[number] for number in range(len(data.train)))
        return [(each["input_ids"].tolist(), each["targets"].tolist()) for each in read]

    keys = {"prompt_field": "prompt", "answer_field": "completion"}
    expected = samples({"path": str(file), **keys})
    assert samples(str(tmp_path / "made")) == samples(str(tmp_path / "by-hand")) == expected


def test_a_role_that_sharegpt_does_not_have_is_one_error(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "function_call", "value": "x"}]}
    with pytest.raises(UsageError, match="has the role 'function_call'"):
        trained_on(tmp_path, row, messages_field="conversations")
