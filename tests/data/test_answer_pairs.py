"""Rows with two answers, in the layouts of public data sets."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.answer_pairs import pair_of
from lockstep.data.document_files import Field, record_of
from lockstep.errors import UsageError
from lockstep.files.data_files import preference_keys

ASKED = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
BEFORE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SCORES = {"score_chosen": 8.0, "score_rejected": 2.0}

ROWS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
    "whole": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
    "UltraFeedback": {
        "prompt": "2 + 2?",
        "chosen": [ASKED, RIGHT],
        "rejected": [ASKED, WRONG],
        **SCORES,
    },
    "OpenAI": {
        "input": {"messages": [ASKED], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [RIGHT],
        "non_preferred_output": [WRONG],
    },
    "one message": {"prompt": "2 + 2?", "chosen": RIGHT, "rejected": WRONG},
    "ShareGPT": {
        "prompt": [{"from": "human", "value": "2 + 2?"}],
        "chosen": [{"from": "gpt", "value": "4"}],
        "rejected": [{"from": "gpt", "value": "5"}],
    },
}


def said(message: Any) -> tuple[str, str]:
    roles = {"human": "user", "gpt": "assistant"}
    role = message.get("role") or roles[message["from"]]
    return role, message.get("content") or message["value"]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_two_conversations(name: str) -> None:
    """By the names of its fields, as `init --finetune` finds them; tables have them all."""
    row = {**ROWS[name], "tools": None}
    keys = preference_keys(row)
    named = keys.get("prompt_field")
    pair = pair_of(
        row, (named,) if named else (), keys["chosen_field"], keys["rejected_field"], "here"
    )
    assert [said(each) for each in pair.chosen] == [("user", "2 + 2?"), ("assistant", "4")]
    assert [said(each) for each in pair.rejected] == [("user", "2 + 2?"), ("assistant", "5")]
    assert pair.chosen[0]["weight"] == 0
    assert "weight" not in pair.chosen[1]
    assert pair.tools is None


def test_answers_before_the_last_question_are_not_compared() -> None:
    row = {"chosen": [*BEFORE, ASKED, RIGHT], "rejected": [*BEFORE, ASKED, WRONG]}
    pair = pair_of(row, (), "chosen", "rejected", "here")
    assert [message.get("weight") for message in pair.chosen] == [0, 0, 0, None]


def test_tools_are_told_to_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {**ROWS["OpenAI"], "input": {"messages": [ASKED], "tools": tools}}
    pair = pair_of(row, ("input",), "preferred_output", "non_preferred_output", "here")
    assert pair.tools == tools


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "there is no 'rejected' in here"),
        ({"chosen": "b", "rejected": "c"}, "the answers of here have no prompt"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "the answers of here have no prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "'chosen' is int, not an answer, in here"),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "hold int, which make no prompt"),
        (
            {"prompt": "2 + 2?", "chosen": [ASKED, RIGHT], "rejected": [WRONG]},
            "one answer of here is a conversation with its prompt, and the other is not",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_one_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair_of(row, (), "chosen", "rejected", "here")
    fault = record_of(row, Field("chosen", True, (), "rejected"), "here").fault
    assert fault is not None
    assert message in fault.what


@pytest.mark.parametrize("row", [{"text": "a"}, {"chosen": 1, "rejected": 0}, {"chosen": "a"}])
def test_other_rows_are_not_taken_for_pairs(row: dict[str, Any], tmp_path: Path) -> None:
    assert preference_keys(json.loads(json.dumps(row))) == {}
