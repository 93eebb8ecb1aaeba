"""Sources as a config lists them: shares, tokenizers, and mistakes told before ranks start."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import DataConfig
from lockstep.data import build_data
from lockstep.data.packed import PackedDocuments, documents
from lockstep.data.prepare import prepare
from lockstep.data.sources import described, draws_of
from lockstep.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"{n} " * (n % 9 + 2)} for n in range(40)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": fine}\n')
    Path("blank.jsonl").write_text('{"text": ""}\n\n')
    Path("none.jsonl").write_text("")
    Path("folder").mkdir()
    prepare("a.jsonl", "tokens")
    return tmp_path


def built(sources: Any, **args: Any) -> Any:
    return build_data(
        DataConfig(name="documents", args={"sources": sources, "sequence_length": 16, **args})
    )


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "there are no sources"),
        (None, "there are no sources"),
        (7, "is no list of sources"),
        ([7], "a source is 7, which is neither a path nor a dict"),
        ([{"weight": 1}], r"a source has no path.*sources\[0\]"),
        ([{"path": "a.jsonl", "wieght": 1}], "a source takes no 'wieght'; did you mean 'weight'"),
        ([{"path": 3}], "a source's path is 3, which is not a text"),
        ([{"path": "a.jsonl", "weight": "x"}], "a source's weight is 'x', which is not a number"),
        ([{"path": "a.jsonl", "weight": True}], "a source's weight is True, which is not a number"),
        ([{"path": "a.jsonl", "weight": -1}], "a source has the weight -1"),
        ([{"path": "a.jsonl", "weight": float("nan")}], "a source has the weight nan"),
        (
            [{"path": "a.jsonl", "weight": 0}, {"path": "tokens", "weight": 0.0}],
            "the weights of the sources add up to 0",
        ),
        (["a.jsonl", {"path": "tokens", "weight": 1}], r"sources\[1\] has a weight, and .*\[0\]"),
        (
            [{"path": "a.jsonl", "weight": 1}, {"path": "tokens", "epochs": 2}],
            r"sources\[0\] has a weight, and .*sources\[1\] has epochs",
        ),
        ([{"path": "a.jsonl", "epochs": 0}], "no source comes even once"),
        (["absent.jsonl"], "no file or folder 'absent.jsonl'"),
        (["folder"], "folder has no text"),
        (["none.jsonl"], "none.jsonl is empty"),
        (["blank.jsonl"], "blank.jsonl has no document to train on"),
        (["bad.jsonl"], r"line 2 of bad\.jsonl is not JSON"),
        ([{"path": "a.jsonl", "text_field": "body"}], r"no 'body' in a\.jsonl:1"),
        ([{"path": "a.jsonl", "min_tokens": 10_000}], "40 shorter than 10000 tokens"),
        (
            [{"path": "tokens", "min_tokens": 3}],
            "min_tokens beside tokens, whose documents are tokens already",
        ),
        (["s3://bucket/a.jsonl"], "is a URL, not a path"),
    ],
)
def test_bad_sources_are_one_clear_message(sources: Any, message: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)" + message):
        built(sources)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"packing": "firstfit"}, "there is no packing 'firstfit'; did you mean 'first_fit'"),
        ({"sequence_length": 0}, "sequence_length should be a whole number of at least 1"),
        ({"sequence_length": 1}, "nothing is before a token"),
        ({"validation_fraction": 1.5}, "validation_fraction"),
        ({"validation": []}, r"no sources.*data\.args\.validation"),
        ({"roles": 1}, "takes no argument 'roles'"),
        ({"tokenizer": "absent.json"}, "no tokenizer 'absent.json'"),
    ],
)
def test_bad_arguments_are_one_clear_message(
    args: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(UsageError, match=r"(?s)" + message):
        built(["a.jsonl"], **args)


def test_sources_have_one_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("words.json")
    prepare("a.jsonl", "words", "words.json")
    with pytest.raises(UsageError, match="words has another tokenizer than tokens"):
        built(["tokens", "words"])
    with pytest.raises(UsageError, match=r"was prepared with another tokenizer than words\.json"):
        built(["tokens"], tokenizer="words.json")
    data = built(["words", "a.jsonl"], tokenizer="words.json")
    assert data.facts["vocab_size"] == 2


def test_files_and_prepared_folders_are_the_same_data(folder: Path) -> None:
    prepared = built(["tokens"], validation_fraction=0.2)
    direct = built("a.jsonl", validation_fraction=0.2)
    for part in ("train", "validation"):
        first = getattr(prepared, part)
        second = getattr(direct, part)
        assert len(first) == len(second) > 1
        for index in range(len(first)):
            for key, value in first[index].items():
                assert np.array_equal(value, second[index][key])


def test_draws_follow_weights_and_epochs() -> None:
    def draws(sources: list[Any], sizes: list[int]) -> Any:
        return draws_of(described(sources, "data.args.sources"), sizes)

    assert draws(["a", "b"], [3, 5]) == ([3, 5], 8)
    weighted = [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}, {"path": "c", "weight": 0}]
    assert draws(weighted, [3, 5, 9]) == ([7500, 2500, 0], 8)
    assert draws([{"path": "a", "epochs": 2.5}, "b"], [4, 5]) == ([10, 5], 15)


def test_sources_of_which_each_is_taken_in_part_are_mixed(tmp_path: Path) -> None:
    """Half an epoch of each source was refused, as if none came even once."""
    file = tmp_path / "notes.jsonl"
    file.write_text("".join(f'{{"text": "note {number} here"}}\n' for number in range(16)))
    source = {"path": str(file), "epochs": 0.5}
    data = documents(sources=[source], sequence_length=11).train
    assert isinstance(data, PackedDocuments)
    order = data.epoch_order(0, shuffle=True)
    assert order is not None
    assert order.num_samples == 8
    with pytest.raises(UsageError, match="no source comes even once"):
        documents(sources=[{**source, "epochs": 0}], sequence_length=11)
