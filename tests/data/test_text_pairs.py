"""Pairs of whole texts, in which prompt and answer stand together."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import DataConfig
from lockstep.data import Data, build_data
from lockstep.data.language import DocumentEncoder, Tokenizer
from lockstep.data.text_pairs import TextPairs
from lockstep.errors import UsageError
from tests.data.chats import PLAIN, write_tokenizer
from tests.data.test_preferences import documents

pytest.importorskip("transformers")

BEGIN = "\n\nHuman: 2 + 2?\n\nAssistant:"
ROWS = [{"chosen": f"{BEGIN} {n} it is", "rejected": f"{BEGIN} I don't know {n}"} for n in range(6)]


def made(folder: Path, rows: list[Any], template: str | None = None, **source: Any) -> Data:
    """The data of rows, with a tokenizer without a chat template."""
    write_tokenizer(folder, template)
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"sources": [{"path": str(file), **source}], "tokenizer": str(folder)}
    return build_data(DataConfig(name="preferences", args={**args, "sequence_length": 160}))


def test_what_both_texts_begin_with_is_the_prompt(tmp_path: Path) -> None:
    """But for a space before the answers, as TRL has it; these get the stop token."""
    data = made(tmp_path, ROWS)
    found = sorted(pair for texts in documents(data.train, tmp_path) for pair in texts)
    expected = sorted(
        (f"{row[key]}</s>", f"{row[key]}</s>".removeprefix(BEGIN))
        for row in ROWS
        for key in ("chosen", "rejected")
    )
    assert found == expected
    [line] = data.notices
    assert "6 pairs are whole texts" in line
    assert "what both begin with is the prompt" in line


def test_a_text_that_ends_with_the_stop_token_gets_no_other(tmp_path: Path) -> None:
    row = {"chosen": f"{BEGIN} 4</s>", "rejected": f"{BEGIN} 5"}
    texts = documents(made(tmp_path, [row], special_tokens=True).train, tmp_path)
    assert [trained for _, trained in texts[0]] == [" 4</s>", " 5</s>"]
    texts = documents(made(tmp_path, [row]).train, tmp_path)
    assert [trained for _, trained in texts[0]] == [" 4</s></s>", " 5</s>"], (
        "the text of one is text"
    )


def test_an_answer_that_goes_on_where_the_other_ends(tmp_path: Path) -> None:
    row = {"chosen": f"{BEGIN} 4", "rejected": f"{BEGIN} 4, or 5"}
    texts = documents(made(tmp_path, [row]).train, tmp_path)
    assert [trained for _, trained in texts[0]] == ["</s>", ", or 5</s>"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2 + 2?", "chosen": "It is 4", "rejected": "It is 5"}, "have no prompt"),
        ({"prompt": "", "chosen": "It is 4", "rejected": "It is 5"}, "have no prompt"),
        ({"chosen": "4", "rejected": "5"}, "have no prompt"),
    ],
)
def test_texts_without_a_prompt_are_refused(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        made(tmp_path, [row], PLAIN)


def test_texts_whose_first_tokens_differ_are_refused(tmp_path: Path) -> None:
    """Letters in common are not enough: the first token of a text is no target."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"ab": 0, "ac": 1, "</s>": 2}))
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    pairs = TextPairs(DocumentEncoder(Tokenizer(str(tmp_path))))
    with pytest.raises(UsageError, match="have no token in common at their begin"):
        pairs.encode("ab", "ac", "here")


def test_what_is_lacking_is_one_error(tmp_path: Path) -> None:
    """A stop token, for texts; and a chat template, for answers with a prompt of their own."""
    with pytest.raises(UsageError, match="has no chat template"):
        made(tmp_path, [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}])
    with pytest.raises(UsageError, match="special tokens are asked for in texts"):
        made(
            tmp_path, [{"prompt": "a", "chosen": "4", "rejected": "5"}], PLAIN, special_tokens=True
        )
    write_tokenizer(tmp_path / "endless", None, eos=None)
    args = {"sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": 160}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(ROWS[0]))
    for tokenizer in (str(tmp_path / "endless"), "bytes"):
        config = DataConfig(name="preferences", args={**args, "tokenizer": tokenizer})
        with pytest.raises(UsageError, match="nothing ends the answers of pairs"):
            build_data(config)
