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
    with pytest.raises(UsageError, match="special_tokens beside a messages_field"):
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
