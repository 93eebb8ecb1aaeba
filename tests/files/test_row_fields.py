"""Fields within structures, and messages that a table keeps as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import DataConfig
from lockstep.data import build_data
from lockstep.data.answer_pairs import pair_of
from lockstep.data.document_files import Field, records_of
from lockstep.data.encoding import Encoder
from lockstep.data.filters import Filters
from lockstep.data.language import Tokenizer
from lockstep.data.prompts import conversation_of
from lockstep.errors import UsageError
from lockstep.files.data_files import (
    conversation_keys,
    files_of,
    preference_keys,
    source_like,
    source_of,
)
from lockstep.files.row_fields import field_of_row, has_field, names_of_fields

NESTED = {"id": "3", "meta": {"lang": "en"}, "data": {"text": "some words", "n": 1}, "a.b": "own"}
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_name_with_dots_is_a_field_of_a_structure() -> None:
    assert field_of_row(NESTED, "data.text") == "some words"
    assert field_of_row(NESTED, "a.b") == "own"
    assert not has_field(NESTED, "data.words")
    assert not has_field(NESTED, "id.text")
    assert names_of_fields(NESTED) == ["id", "meta.lang", "data.text", "data.n", "a.b"]


def test_documents_and_labels_are_read_from_structures(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", NESTED, NESTED)
    first, _ = records_of(file, Field("data.text"))
    assert first is not None
    assert first.content == "some words"
    assert source_of(file) == {"path": str(file), "text_field": "data.text"}
    source = {"path": "other", "text_field": "data.text"}
    assert source_like(file, [source]) == {"path": str(file), "text_field": "data.text"}
    unnamed, _ = records_of(file)
    assert unnamed is not None
    assert "it has id, meta.lang, data.text" in str(unnamed.fault)
    args = {"path": str(file), "text_field": "data.text"}
    with pytest.raises(UsageError, match="all labels are en"):
        build_data(DataConfig(name="labelled", args={**args, "label_field": "meta.lang"}))
    with pytest.raises(UsageError, match=r"there is no 'meta\.no'(.|\n)*it has id, meta\.lang"):
        build_data(DataConfig(name="labelled", args={**args, "label_field": "meta.no"}))
    row = {"question": {"text": "?"}, "answers": {"best": "!"}}
    found = conversation_of(row, ["question.text"], "answers.best", "here")
    assert [message["content"] for message in found] == ["?", "!"]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        (
            ["instruction", "context", "response", "category"],
            ["instruction", "context"],
            "response",
        ),
        (["instruction", "input", "output"], ["instruction", "input"], "output"),
        (
            ["id", "system_prompt", "question", "response"],
            ["system_prompt", "question"],
            "response",
        ),
        (["query", "type", "response"], "query", "response"),
        (["problem", "solution", "level"], "problem", "solution"),
        (["question", "answer"], "question", "answer"),
    ],
)
def test_prompts_and_answers_are_found_by_the_names_of_public_sets(
    row: list[str], prompt: Any, answer: str
) -> None:
    found = conversation_keys(dict.fromkeys(row, "words"))
    assert found == {"prompt_field": prompt, "answer_field": answer}


def test_what_stands_before_the_prompt_of_a_pair_is_in_it() -> None:
    row = dict.fromkeys(["system", "question", "chosen", "rejected"], "words")
    assert preference_keys(row)["prompt_field"] == ["system", "question"]
    asked = {"system": "words", "prompt": CHAT[:1], "chosen": "a", "rejected": "b"}
    assert preference_keys(asked)["prompt_field"] == "prompt"


def test_messages_that_a_table_keeps_as_json_are_messages(tmp_path: Path) -> None:
    row = {"messages": json.dumps(CHAT), "n": 1}
    assert conversation_keys(row) == {"messages_field": "messages"}
    file = write(tmp_path / "a.jsonl", row, {"messages": "[1, 2]"})
    good, bad = records_of(file, Field("messages", holds_messages=True))
    assert good is not None
    assert good.content == CHAT
    assert bad is not None
    assert "'messages' is str, not a list of messages" in str(bad.fault)
    other = [CHAT[0], {**CHAT[1], "content": "x"}]
    pair = {"chosen": json.dumps(CHAT), "rejected": json.dumps(other)}
    assert preference_keys({**pair, "prompt": "?"}) == {
        "chosen_field": "chosen",
        "rejected_field": "rejected",
    }
    assert pair_of(pair, (), "chosen", "rejected", "here").chosen[1] == CHAT[1]
    asked = {"prompt": json.dumps(CHAT[:1]), "answer": "[1, 2]"}
    found = conversation_of(asked, ["prompt"], "answer", "here")
    assert [message["content"] for message in found] == ["?", "[1, 2]"]


def test_tools_are_a_list_or_json_of_one(tmp_path: Path) -> None:
    """A template would go through the letters of a text."""
    pytest.importorskip("transformers")
    from lockstep.data.conversations import ChatTemplate
    from tests.data.chats import PLAIN, write_tokenizer

    told = "{% if tools %}{% for t in tools %}{{ t.name }};{% endfor %}{% endif %}" + PLAIN
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path, told)))
    encoder = Encoder(tokenizer, Filters(), ChatTemplate(tokenizer))

    def text(tools: Any) -> str:
        file = write(tmp_path / "a.jsonl", {"messages": CHAT, "tools": tools})
        (record,) = records_of(file, Field("messages", holds_messages=True))
        assert record is not None
        ((tokens, _),) = encoder.encode(record).pieces
        return tokenizer.decode(tokens.tolist(), special=True)

    tools = [{"name": "add"}, {"name": "sub"}]
    assert text(tools) == text(json.dumps(tools))
    assert text(tools).startswith("add;sub;")
    for none in (None, [], "", "[]"):
        assert text(none).startswith("<|user|>")
    for wrong in ("add", {"name": "add"}, 3):
        with pytest.raises(UsageError, match=r"the tools of .* are \w+, not a list"):
            text(wrong)


def test_a_path_with_signs_for_any_names_files(tmp_path: Path) -> None:
    for name in ("b/c.py", "a.py", "b/d.pyc", "b/.e.py", "empty.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x = 1\n")
    found = files_of(tmp_path / "**/*.py")
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "b/c.py"]
    with pytest.raises(UsageError, match="there is no file or folder"):
        files_of(tmp_path / "**/*.md")
    args = {"sources": [f"{tmp_path}/**/*.py"], "sequence_length": 16}
    data = build_data(DataConfig(name="documents", args=args))
    assert int(data.train[0]["document_ids"].max()) >= 1
