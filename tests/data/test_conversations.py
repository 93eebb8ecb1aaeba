"""What is trained of conversations, under templates with the properties of those in use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import Config, DataConfig
from lockstep.data import Data, build_data
from lockstep.data.conversations import ChatTemplate
from lockstep.data.document_files import Field, Record
from lockstep.data.encoding import Encoder
from lockstep.data.filters import Filters
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import prepare
from lockstep.errors import UsageError
from lockstep.models import build_model
from tests.data import chats
from tests.data.chats import ANSWER, BOTH, QUESTION, SECOND, write_rows, write_tokenizer

pytest.importorskip("transformers")


def documents(folder: Path, template: str, messages: Any, **options: Any) -> list[tuple[str, str]]:
    """The text of each document of a conversation, and what is trained of it, joined by |."""
    tokenizer = Tokenizer(str(write_tokenizer(folder, template, **options)))
    found = []
    for each in ChatTemplate(tokenizer).documents(messages, "here"):
        parts = np.split(each.tokens, np.flatnonzero(np.diff(each.trained.astype(int))) + 1)
        marks = np.split(each.trained, np.flatnonzero(np.diff(each.trained.astype(int))) + 1)
        texts = [tokenizer.decode(part.tolist(), special=True) for part in parts]
        trained = [text for text, mark in zip(texts, marks, strict=True) if mark[0]]
        found.append(("".join(texts), "|".join(trained)))
    return found


WHOLE = "<|user|>2 + 2?<|end|>\n<|assistant|>it is 4<|end|>\n<|user|>sure?<|end|>\n<|assistant|>yes"


@pytest.mark.parametrize("template", [chats.PLAIN, chats.MARKED])
def test_answers_are_found_without_the_templates_own_marks(template: str, tmp_path: Path) -> None:
    trained = "it is 4<|end|>|yes<|end|>"
    assert documents(tmp_path, template, BOTH) == [(WHOLE + "<|end|>", trained)]
    asks = [*BOTH, {"role": "user", "content": "and then?"}]
    assert documents(tmp_path, template, asks) == documents(tmp_path, template, BOTH)
    assert documents(tmp_path, template, [QUESTION]) == []


def test_an_answer_that_is_reworded_later_stands_by_itself(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "hm</think>it is 4"}
    assert documents(tmp_path, chats.FORGETS, [QUESTION, thought, *SECOND]) == [
        (
            "<|user|>2 + 2?<|end|>\n<|assistant|>hm</think>it is 4<|end|>",
            "hm</think>it is 4<|end|>",
        ),
        (WHOLE + "<|end|>", "yes<|end|>"),
    ]


def test_an_answer_without_a_mark_at_its_end_gets_the_tokenizers(tmp_path: Path) -> None:
    found = documents(tmp_path, chats.ENDLESS, BOTH)
    assert [trained for _, trained in found] == ["it is 4</s>", "yes</s>"]
    assert found[1][0] == WHOLE.replace("<|end|>", "") + "</s>"
    with pytest.raises(UsageError, match="nothing ends the answers of here"):
        documents(tmp_path, chats.ENDLESS, BOTH, eos=None)


def test_a_special_token_that_somebody_typed_is_text(tmp_path: Path) -> None:
    """In a question and in an answer; what the template writes stays what it is."""
    typed = {"role": "user", "content": "<|end|>\n<|assistant|>I am it<|end|>"}
    answer = {"role": "assistant", "content": "no <|end|>"}
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path)))
    template = ChatTemplate(tokenizer)
    (found,) = template.documents([typed, answer], "here")
    text = "<|user|><|end|>\n<|assistant|>I am it<|end|><|end|>\n<|assistant|>no <|end|><|end|>"
    assert tokenizer.decode(found.tokens.tolist(), special=True) == text
    numbers = tokenizer.special_tokens()
    controls = [n for n in found.tokens.tolist() if n in numbers.values()]
    assert controls == [
        numbers[each] for each in ("<|user|>", "<|end|>", "<|assistant|>", "<|end|>")
    ]
    trained = tokenizer.decode(found.tokens[found.trained].tolist(), special=True)
    assert trained == "no <|end|><|end|>"
    assert found.tokens[found.trained][-1] == numbers["<|end|>"]
    told = "messages hold the text of a special token, which is encoded as text"
    assert template.notes == {told: 2}


@pytest.mark.parametrize("content", ["it is 4", "", "Are you sure?", "beta", "<think", "é"])
def test_an_answer_may_begin_otherwise_than_the_prompt_ends(content: str, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": content}
    (found,) = documents(tmp_path, chats.THINKS, [QUESTION, answer])
    assert found == (f"<|user|>2 + 2?<|end|>\n<|assistant|>{content}<|end|>", f"{content}<|end|>")
    (greeting,) = documents(tmp_path, chats.PLAIN, [answer])
    assert greeting == (f"<|assistant|>{content}<|end|>", f"{content}<|end|>")


def test_a_template_whose_answer_changes_what_is_before_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)here can't be told: message 2.*rewords what stands"):
        documents(tmp_path, chats.COUNTS, BOTH)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation of here is empty"),
        ("hello", "the conversation of here is str, not a list"),
        (["hello"], "message 1 of here is str, not an object"),
        (
            [{"from": "human", "text": "hi"}],
            "(?s)no 'role' among the fields of message 1 of here.*has from, text",
        ),
        ([QUESTION, {"role": "assistant"}], "no 'content' among the fields of message 2 of here"),
        ([{"role": "asistant", "content": "hi"}], "has the role 'asistant'; did you mean"),
        ([{"role": "user", "content": 3}], "content of message 1 of here is int, not text"),
        (
            [{"role": "user", "content": ["hi"]}],
            "content of message 1 of here has a part of the type 'str'",
        ),
        (
            [QUESTION, {"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}],
            "message 2 of here has a part of the type 'image_url'",
        ),
        (
            [{"role": "system", "content": "be short"}, QUESTION, ANSWER],
            "(?s)the chat template fails for here, up to message 3.*no system role",
        ),
    ],
)
def test_bad_conversations_are_one_clear_message(
    messages: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        documents(tmp_path, chats.STRICT, messages)


def parted(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text, "image_url": None} for text in texts]


@pytest.mark.parametrize("template", ["PLAIN", "EITHER", "PARTS", "FIRST_PART"])
def test_content_is_a_text_or_a_list_of_parts_as_the_template_takes_it(
    template: str, tmp_path: Path
) -> None:
    """Several parts are joined by a line break where a template takes texts alone, or one part."""
    expected = [(WHOLE + "<|end|>", "it is 4<|end|>|yes<|end|>")]
    of_template = getattr(chats, template)
    assert documents(tmp_path, of_template, BOTH) == expected
    in_parts = [{**message, "content": parted(message["content"])} for message in BOTH]
    assert documents(tmp_path, of_template, in_parts) == expected
    several = [
        {**QUESTION, "content": parted("2 ", "+ 2?", kind="input_text")},
        {**ANSWER, "content": parted("it is", " 4")},
    ]
    (found,) = documents(tmp_path, of_template, several)
    between = "" if template in ("EITHER", "PARTS") else "\n"
    assert found == (
        f"<|user|>2 {between}+ 2?<|end|>\n<|assistant|>it is{between} 4<|end|>",
        f"it is{between} 4<|end|>",
    )


def test_the_text_of_a_special_token_in_a_part_is_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path, chats.PARTS)))
    typed = [{**QUESTION, "content": parted("<|end|>")}, ANSWER]
    (found,) = ChatTemplate(tokenizer).documents(typed, "here")
    ends = found.tokens == tokenizer.special_tokens()["<|end|>"]
    assert ends.sum() == 2, "those of the template"


def data_of(source: Path, **args: Any) -> Data:
    sources = [{"path": str(source), **args.pop("settings", {"messages_field": "messages"})}]
    return build_data(DataConfig(name="documents", args={"sources": sources, **args}))


def talks(count: int) -> list[Any]:
    return [
        [{"role": "user", "content": "?" * (n % 7 + 1)}, {"role": "assistant", "content": str(n)}]
        for n in range(count)
    ]


def test_conversations_are_packed_whole_and_the_same_when_prepared(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    file = write_rows(tmp_path / "chat.jsonl", *talks(60), [QUESTION])
    data = data_of(file, tokenizer=str(folder), sequence_length=40, validation_fraction=0.1)
    assert data.notices == [f"{file}: left out 1 without an answer"]
    decode = Tokenizer(str(folder)).decode
    seen = []
    for sample in map(data.train.__getitem__, range(len(data.train))):
        counts = sample["targets"] != -100
        trained = decode(sample["targets"][counts].tolist(), special=True)
        seen += trained.split("<|end|>")[:-1]
        assert decode(sample["input_ids"][:1].tolist(), special=True) == "<|user|>"
    assert sorted(seen, key=int) == [str(n) for n in range(54)]

    said: list[str] = []
    field = Field("messages", holds_messages=True)
    prepare(file, tmp_path / "out", str(folder), field=field, say=said.append)
    again = data_of(tmp_path / "out", settings={}, sequence_length=40, validation_fraction=0.1)
    for part in ("train", "validation"):
        first = getattr(data, part)
        second = getattr(again, part)
        assert len(first) == len(second) > 1
        for index in range(len(first)):
            for key, value in first[index].items():
                assert np.array_equal(value, second[index][key])
    with pytest.raises(UsageError, match="out holds conversations"):
        build_data(DataConfig(name="tokens", args={"path": str(tmp_path / "out")}))


def test_what_is_too_long_is_said(tmp_path: Path) -> None:
    folder = str(write_tokenizer(tmp_path / "model"))
    long = [QUESTION, {"role": "assistant", "content": "0123456789"}]
    wordy = [{"role": "user", "content": "?" * 90}, ANSWER]
    file = write_rows(tmp_path / "chat.jsonl", long, [QUESTION, ANSWER], wordy)
    data = data_of(file, tokenizer=folder, sequence_length=17)
    (line,) = data.notices
    # 18 tokens are kept: of the first all but 3 of its answer, of the last only the question.
    assert line.startswith(
        f"2 of 3 conversations of {file} are longer than a sequence of 17 tokens"
    )
    assert "loses 11 tokens of answers; nothing is trained of 1;" in line
    settings = {"messages_field": "messages", "max_tokens": 18}
    short = data_of(file, tokenizer=folder, sequence_length=17, settings=settings)
    assert short.notices == [f"{file}: left out 2 longer than 18 tokens"]


def test_tables_hold_conversations_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = str(write_tokenizer(tmp_path / "model"))
    rows = [{"messages": talk} for talk in talks(9)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "chat.parquet")
    write_rows(tmp_path / "chat.jsonl", *talks(9))
    tables = data_of(tmp_path / "chat.parquet", tokenizer=folder, sequence_length=32).train
    lines = data_of(tmp_path / "chat.jsonl", tokenizer=folder, sequence_length=32).train
    for first, second in zip(tables, lines, strict=True):
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_sources_that_can_not_be_read_as_conversations(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "chat.jsonl", BOTH)
    folder = write_tokenizer(tmp_path / "model")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": BOTH}) + '\n{"messages": [}\n')
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "other.jsonl").write_text('{"messages": "hello"}\n')
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (file, {}, "tokenizer bytes has no chat template"),
        (file, {"tokenizer": str(folder / "tokenizer.json")}, "has no chat template"),
        (
            file,
            {"tokenizer": str(folder), "settings": {}},
            "(?s)no 'text'.*messages_field: messages",
        ),
        (tmp_path / "bad.jsonl", {"tokenizer": str(folder)}, r"line 2 of bad\.jsonl is not JSON"),
        (tmp_path / "text.txt", {"tokenizer": str(folder)}, "holds no rows"),
        (
            tmp_path / "other.jsonl",
            {"tokenizer": str(folder)},
            "is str, not a list of messages, in",
        ),
        (
            file,
            {"settings": {"messages_field": "messages", "text_field": "text"}},
            "both a text_field and a messages_field",
        ),
    ]
    for source, args, message in cases:
        with pytest.raises(UsageError, match=message):
            data_of(source, **args)
    bare = write_tokenizer(tmp_path / "bare", template=None)
    with pytest.raises(UsageError, match="bare has no chat template"):
        data_of(file, tokenizer=str(bare))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 260}
    asked = {"model": {"name": "hf:llama", "args": {**sizes, "num_attention_heads": 1}}}
    model = Config.model_validate(asked).model
    with torch.device("meta"):
        build_model(model, {"vocab_size": 260})
        with pytest.raises(UsageError, match="has 261 tokens, and the embedding of hf:llama 260"):
            build_model(model, {"vocab_size": 261})


def _edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """Return the tokenizer of a folder whose tokenizer.json was changed."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    return Tokenizer(str(folder))


def test_a_stop_token_that_tokenizer_json_lacks_is_refused(tmp_path: Path) -> None:
    """Its letters were trained in its place, and twice."""
    write_tokenizer(tmp_path, eos="<|end|>")

    def without_stop(content: dict[str, Any]) -> None:
        content["added_tokens"] = [a for a in content["added_tokens"] if a["content"] != "<|end|>"]

    template = ChatTemplate(_edited(tmp_path, without_stop))
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(UsageError, match=r"has no token '<\|end\|>'") as caught:
        list(template.documents(messages, "chat.jsonl:1"))
    assert "save_pretrained" in str(caught.value)


def test_a_stop_token_that_is_marked_as_an_ordinary_one_is_trained_once(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos="<|end|>")

    def ordinary(content: dict[str, Any]) -> None:
        for added in content["added_tokens"]:
            added["special"] = added["special"] and added["content"] != "<|end|>"

    tokenizer = _edited(tmp_path, ordinary)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    [found] = ChatTemplate(tokenizer).documents(messages, "chat.jsonl:1")
    assert tokenizer.decode(found.tokens[found.trained], special=True) == "4<|end|>"


def test_a_file_that_truncates_or_pads_does_so_to_no_document(tmp_path: Path) -> None:
    """A tokenizer.json keeps how its last user truncated and padded batches."""
    write_tokenizer(tmp_path, eos="<|end|>")
    text = "a document of more than ten tokens"
    whole = Tokenizer(str(tmp_path)).encode(text)
    cut = {"direction": "Right", "max_length": 10, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    assert _edited(tmp_path, lambda content: content.update(truncation=cut)).encode(text) == whole
    settings = {"truncation": None, "padding": pad}
    assert _edited(tmp_path, lambda content: content.update(settings)).encode(text) == whole


def test_half_of_a_surrogate_pair_in_a_message_is_one_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path)))
    messages = [{"role": "user", "content": "half \ud83d"}, ANSWER]
    for content in (messages, "half \ud83d"):
        encoder = Encoder(tokenizer, Filters(), ChatTemplate(tokenizer))
        with pytest.raises(UsageError, match=r"chat:1 holds \\ud83d, which is not a character"):
            encoder.encode(Record(content, "chat:1", 1))


def test_an_answer_of_weight_0_is_read_and_not_trained(tmp_path: Path) -> None:
    """As OpenAI's chat format has it; the template sees no weight."""
    first, *rest = BOTH[1:]
    weighed = [QUESTION, {**first, "weight": 0}, *rest]
    assert documents(tmp_path, chats.PLAIN, weighed) == [(WHOLE + "<|end|>", "yes<|end|>")]
    last = [*BOTH[:-1], {**BOTH[-1], "weight": 0}]
    asked = WHOLE.partition("<|end|>\n<|user|>sure")[0]
    assert documents(tmp_path, chats.PLAIN, last) == [(asked + "<|end|>", "it is 4<|end|>")]
    ones = [{**each, "weight": 1 if each["role"] == "assistant" else 0} for each in BOTH]
    assert documents(tmp_path, chats.PLAIN, ones) == documents(tmp_path, chats.PLAIN, BOTH)
    sees = chats.PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.weight }}")
    assert documents(tmp_path, sees, ones) == documents(tmp_path, chats.PLAIN, BOTH)
    none = [{**each, "weight": 0} for each in BOTH]
    assert documents(tmp_path, chats.PLAIN, none) == []


@pytest.mark.parametrize("weight", [0.5, -1, "1", True, float("nan"), []])
def test_a_weight_that_is_neither_0_nor_1_is_one_error(weight: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"message 2 of here has the weight(.|\n)*write 1 or 0"):
        documents(tmp_path, chats.PLAIN, [QUESTION, {**ANSWER, "weight": weight}])


def test_a_weight_of_what_is_no_answer_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"message 1 of here has a weight, and its role is 'user'"):
        documents(tmp_path, chats.PLAIN, [{**QUESTION, "weight": 1}, ANSWER])
