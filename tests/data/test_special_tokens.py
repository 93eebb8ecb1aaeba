"""The text of a special token in a document is text, and told; a key makes it the token."""

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import config_from
from lockstep.data import build_data
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import prepare, prepare_command
from lockstep.errors import UsageError
from tests.data.chats import write_tokenizer

pytest.importorskip("tokenizers")

TYPED = "one <|end|> two"
CLEAN = "three < |end|> four"  # nearly the same
NOTE = "texts hold the text of a special token, which is encoded as text"
NOTE_OF_TOKENS = "texts hold the text of a special token, which becomes that token"


def _files(folder: Path) -> tuple[Path, str]:
    """Write a file of two documents, and a tokenizer."""
    file = folder / "pages.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in (TYPED, CLEAN)))
    (folder / "pages.txt").write_text(f"{TYPED}\n{CLEAN}\n")
    return file, str(write_tokenizer(folder / "tokenizer"))


def _data(name: str, **args: Any) -> Any:
    return build_data(config_from({"data.name": name, "data.args": args}).data, seed=1)


def _kinds(folder: Path, special: bool | None) -> dict[str, Any]:
    """Build each kind of data set that tokenizes, by name; None: without the key."""
    file, tokenizer = _files(folder)
    key = {} if special is None else {"special_tokens": special}
    source = {"path": str(file), **key}
    text = {"tokenizer": tokenizer, "validation_fraction": 0.0, "block_size": 8, **key}
    found = {
        "documents": _data("documents", sources=[source], tokenizer=tokenizer, sequence_length=16),
        "text": _data("text", path=str(folder / "pages.txt"), **text),
        "text, documents": _data("text", path=str(folder / "pages.txt"), documents=True, **text),
    }
    prepared = folder / "prepared"
    said: list[str] = []
    prepare(file, prepared, tokenizer, special_tokens=bool(special), say=said.append)
    made = _data("documents", sources=[str(prepared)], sequence_length=16)
    found["prepared"] = type("Prepared", (), {"train": made.train, "notices": said})
    return found


def _controls(data: Any, tokenizer: Tokenizer) -> int:
    """Return how many special tokens the samples have."""
    numbers = list(tokenizer.special_tokens().values())
    inputs = [data.train[index]["input_ids"].numpy() for index in range(len(data.train))]
    return int(np.isin(np.concatenate(inputs), numbers).sum())


@pytest.mark.parametrize("special", [None, False, True])
def test_every_data_set_takes_it_for_text_unless_it_is_asked(
    special: bool | None, tmp_path: Path
) -> None:
    note = NOTE_OF_TOKENS if special else NOTE
    for name, data in _kinds(tmp_path, special).items():
        tokenizer = Tokenizer(str(tmp_path / "tokenizer"))
        assert bool(_controls(data, tokenizer)) == bool(special), name
        assert any(f"1 {note}" in line for line in data.notices), name


def test_a_stream_warns_where_it_meets_the_first(tmp_path: Path) -> None:
    file, tokenizer = _files(tmp_path)
    for special, note in ((False, NOTE), (True, NOTE_OF_TOKENS)):
        source = {"path": str(file), "special_tokens": special}
        data = _data("stream", sources=[source], tokenizer=tokenizer, sequence_length=16, window=1)
        with pytest.warns(UserWarning, match=rf"{note}.*the first: .*pages.jsonl:1"):
            samples = list(islice(data.train, 2))
        numbers = list(Tokenizer(tokenizer).special_tokens().values())
        inputs = np.concatenate([each["input_ids"].numpy() for each in samples])
        assert np.isin(inputs, numbers).any() == special


def test_a_data_set_of_the_package_datasets_does_the_same(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "rows"
    folder.mkdir()
    file, tokenizer = _files(tmp_path)
    file.rename(folder / file.name)
    for special, note in ((False, NOTE), (True, NOTE_OF_TOKENS)):
        args = {"tokenizer": tokenizer, "special_tokens": special, "validation_fraction": 0.0}
        data = _data(f"hf:{folder}", block_size=8, **args)
        assert bool(_controls(data, Tokenizer(tokenizer))) == special
        assert any(f"1 {note}" in line for line in data.notices)


@pytest.mark.parametrize("field", ["text", "n"])
def test_a_row_of_the_package_datasets_that_is_no_text_is_named(field: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [{"text": "words", "n": 1}, {"text": None, "n": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for documents in (False, True):
        with pytest.raises(UsageError, match=rf"'{field}' is \w+, not text, in .*, row \d"):
            _data(f"hf:{tmp_path}", text_field=field, documents=documents)


def test_texts_without_it_are_what_they_were_and_nothing_is_told(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path)))
    for special in (False, True):
        tokens, holds = tokenizer.encode_document(CLEAN, special_tokens=special)
        assert not holds
        assert tokens.tolist() == tokenizer.encode(CLEAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        typed, holds = Tokenizer("bytes").encode_document(TYPED, special_tokens=False)
    assert not holds
    assert bytes(typed.tolist()).decode() == TYPED


def test_a_token_for_unknown_words_is_no_typed_one(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    made = tokenizers.Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    tokens, holds = tokenizer.encode_document("one two", special_tokens=False)
    assert (tokens.tolist(), holds) == ([0, 1], False)


def test_where_the_key_means_nothing_it_is_refused(tmp_path: Path) -> None:
    file, tokenizer = _files(tmp_path)
    source = {"path": str(file), "messages_field": "messages", "special_tokens": True}
    with pytest.raises(UsageError, match="special_tokens beside messages_field"):
        _data("documents", sources=[source], tokenizer=tokenizer)
    with pytest.raises(UsageError, match="special_tokens is 'yes', which is not true or false"):
        _data("documents", sources=[{"path": str(file), "special_tokens": "yes"}])
    with pytest.raises(UsageError, match="weight is True, which is not a number"):
        _data("documents", sources=[{"path": str(file), "weight": True}])
    out = tmp_path / "out"
    given = ["prepare", str(file), "--out", str(out), "--tokenizer", tokenizer]
    assert prepare_command([*given, "--special-tokens"]) == 0
    with pytest.raises(UsageError, match="prepare them with --special-tokens"):
        _data("documents", sources=[{"path": str(out), "special_tokens": True}])


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("tokenizer_config.json", {"eos_token": "<|stop|>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|stop|>", "special": True}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|stop|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"stop": "<|stop|>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"999": {"content": "<|stop|>"}}}),
        ("special_tokens_map.json", {"eos_token": "<|stop|>"}),
        ("added_tokens.json", {"<|stop|>": 999}),
    ],
)
def test_a_token_that_tokenizer_json_lacks_is_no_letters(
    file: str, named: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / file).write_text(json.dumps(named))
    (tmp_path / "pages.jsonl").write_text(json.dumps({"text": "a page<|stop|>"}) + "\n")
    source = {"path": str(tmp_path / "pages.jsonl"), "special_tokens": True}
    args = {"tokenizer": str(folder / "tokenizer.json"), "sequence_length": 8}
    with pytest.raises(UsageError, match=r"has no token '<\|stop\|>'") as caught:
        _data("documents", sources=[source], **args)
    assert f"the document of {tmp_path / 'pages.jsonl'}:1 has it" in str(caught.value)
    assert len(_data("documents", sources=[{**source, "special_tokens": False}], **args).train)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]", '{"extra_special_tokens": 3}'])
def test_what_a_bad_file_beside_a_tokenizer_names_is_nothing(content: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(content)
    tokens, _ = Tokenizer(str(folder)).encode_document("a<|end|>", special_tokens=True)
    assert len(tokens) == 2
