"""Pairs of answers in sequences."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import DataConfig, config_from
from lockstep.data import Data, build_data
from lockstep.data.document_files import Field
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import prepare, prepare_command
from lockstep.errors import UsageError
from lockstep.files.data_files import check_named_files, pairs_like
from lockstep.trainer import check_named
from tests.data.chats import write_tokenizer

pytest.importorskip("transformers")

ROWS = [
    {"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "no " * (n % 4 + 1)} for n in range(9)
]


def written(folder: Path, rows: list[Any], name: str = "pairs.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def made(folder: Path, rows: list[Any] = ROWS, source: Any = None, **args: Any) -> Data:
    write_tokenizer(folder)
    sources = [str(written(folder, rows)) if source is None else source]
    arguments = {"sources": sources, "tokenizer": str(folder), "sequence_length": 96, **args}
    return build_data(DataConfig(name="preferences", args=arguments))


def documents(data: Any, folder: Path) -> list[list[tuple[str, str]]]:
    """Text and trained text of each document, by sequence."""
    decode = Tokenizer(str(folder)).decode
    found = []
    for sample in (data[number] for number in range(len(data))):
        numbers = sample["document_ids"].numpy()
        texts = []
        for number in range(2 * int(sample["pairs"].sum())):
            ids = sample["input_ids"][numbers == number].tolist()
            targets = sample["targets"][numbers == number].numpy()
            last = int(np.flatnonzero(targets != -100)[-1])
            text = decode([*ids[: last + 1], int(targets[last])], special=True)
            texts.append((text, decode(targets[targets != -100].tolist(), special=True)))
        assert (sample["targets"].numpy()[numbers >= len(texts)] == -100).all()
        found.append(texts)
    return found


def test_both_answers_of_a_pair_are_documents_of_one_sequence(tmp_path: Path) -> None:
    data = made(tmp_path)
    pairs = []
    for texts in documents(data.train, tmp_path):
        assert len(texts) >= 2
        pairs += list(zip(texts[::2], texts[1::2], strict=True))
    expected = [
        tuple(
            (
                f"<|user|>{row['prompt']}<|end|>\n<|assistant|>{row[key]}<|end|>",
                f"{row[key]}<|end|>",
            )
            for key in ("chosen", "rejected")
        )
        for row in ROWS
    ]
    assert sorted(pairs) == sorted(expected)
    assert sum(data.train[n]["pairs"].sum() for n in range(len(data.train))) == 9
    assert 1 < len(data.train) < 9, "several share a sequence, and none is parted"
    batch = data.train.collated(range(len(data.train)))
    assert torch.equal(batch["pairs"][1], data.train[1]["pairs"])


def test_what_holds_no_preference_is_left_out_and_told(tmp_path: Path) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    long = {"prompt": "a", "chosen": "b" * 60, "rejected": "c" * 60}
    data = made(tmp_path, [*ROWS, same, long])
    assert data.notices == [
        f"{tmp_path / 'pairs.jsonl'}: left out 1 longer than 97 tokens, 1 with two answers that"
        " are the same"
    ]
    with pytest.raises(UsageError, match=r"pairs\.jsonl has no document to train on"):
        made(tmp_path, [same])


def test_pairs_are_held_out_and_mixed(tmp_path: Path) -> None:
    data = made(tmp_path, validation_fraction=0.4)
    assert sum(len(texts) // 2 for texts in documents(data.train, tmp_path)) == 6
    assert sum(len(texts) // 2 for texts in documents(data.validation, tmp_path)) == 3
    other = written(tmp_path, ROWS[:2], "other.jsonl")
    renamed = [{"input": {"messages": [{"role": "user", "content": "a"}]}, "good": "b", "bad": "c"}]
    keys = {"prompt_field": "input", "chosen_field": "good", "rejected_field": "bad"}
    source = {"path": str(written(tmp_path, renamed, "renamed.jsonl")), **keys, "epochs": 2}
    data = made(tmp_path, source=source, validation=[str(other)])
    assert documents(data.train, tmp_path)[0][0][1] == "b<|end|>"
    assert sum(len(texts) // 2 for texts in documents(data.validation, tmp_path)) == 2


def test_what_is_not_for_pairs_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a source takes no 'messages_field'"):
        made(tmp_path, source={"path": "pairs.jsonl", "messages_field": "chosen"})
    with pytest.raises(UsageError, match="prompt_field is 3, which is not a name"):
        made(tmp_path, source={"path": "pairs.jsonl", "prompt_field": 3})
    prepare(written(tmp_path, [{"text": "words"}], "text.jsonl"), tmp_path / "made", "bytes")
    with pytest.raises(UsageError, match="made holds documents, and no pairs of answers"):
        made(tmp_path, source=str(tmp_path / "made"))
    (tmp_path / "plain.txt").write_text("words")
    with pytest.raises(UsageError, match=r"plain\.txt holds text, and no rows with prompt, chosen"):
        check_named_files("preferences", {"sources": [str(tmp_path / "plain.txt")]})


def test_data_and_loss_belong_together(tmp_path: Path) -> None:
    pairs = {"data.name": "preferences", "data.args": {"sources": ["a"], "tokenizer": "b"}}
    written(tmp_path, ROWS, "a")
    model = {"model.name": "transformer"}
    data = {**pairs, "data.args": {"sources": [str(tmp_path / "a")], "tokenizer": "b"}}
    with pytest.raises(UsageError, match=r"(?s)there is no loss over pairs.*loss_fn: {name: dpo"):
        config_from({**model, **data})
    cut = {"distributed.context_size": 2, "loss_fn": "dpo"}
    with pytest.raises(UsageError, match="compares answers in full, and sequences are cut"):
        config_from({**model, **data, **cut})
    in_stages = {"model.lora": {}, "distributed.strategy": "pipeline", "loss_fn": "dpo"}
    with pytest.raises(UsageError, match="the model without its adapters, and a stage has a part"):
        config_from({**data, "model.name": "hf:llama", **in_stages})
    given = {"name": "dpo", "args": {"reference": "hf:llama"}}
    config_from({**data, "model.name": "hf:llama", **in_stages, "loss_fn": given})
    of_library = {"model.name": "hf:llama", **data, **cut}
    with pytest.raises(UsageError, match="sequences of preferences hold several documents, and"):
        config_from(of_library)
    other = {"data.name": "python-docs", "loss_fn": "dpo"}
    with pytest.raises(UsageError, match="the loss dpo is one over pairs of answers, and pyth"):
        config_from({**model, **other})
    check_named(config_from({**model, **data, "loss_fn": "dpo"}), "x.yaml")


def test_prepared_pairs_are_those_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = made(tmp_path)
    file = str(tmp_path / "pairs.jsonl")
    fields = ["--chosen-field", "chosen", "--rejected-field", "rejected"]
    command = ["prepare", file, "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path)]
    assert prepare_command([*command, *fields]) == 0
    use = "use it with   data: {name: preferences, args: {sources: ["
    assert use in capsys.readouterr().out
    args = {"sources": [str(tmp_path / "out")], "sequence_length": 96}
    prepared = build_data(DataConfig(name="preferences", args=args))
    assert documents(prepared.train, tmp_path) == documents(data.train, tmp_path)
    assert pairs_like(tmp_path / "out", [file]) == str(tmp_path / "out")

    for wrong, message in (
        (fields[:2], "--chosen-field and --rejected-field belong together"),
        (
            [*fields, "--messages-field", "chosen"],
            "a document is one or the other: --chosen-field beside",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            prepare_command([*command, *wrong])


def test_prepared_pairs_longer_than_a_sequence_are_left_out_whole(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    long = {"prompt": "a", "chosen": "b" * 60, "rejected": "c" * 60}
    file = written(tmp_path, [*ROWS[:2], long, *ROWS[2:]])
    pairs = Field("chosen", True, (), "rejected")
    prepare(file, tmp_path / "out", str(tmp_path), field=pairs)
    args = {"sources": [str(tmp_path / "out")], "sequence_length": 96}
    data = build_data(DataConfig(name="preferences", args=args))
    assert data.notices == [
        f"{tmp_path / 'out'}: left out 1 longer than 97 tokens; raise data.args.sequence_length"
    ]
    assert sum(len(texts) // 2 for texts in documents(data.train, tmp_path)) == len(ROWS)
    args["sequence_length"] = 8
    with pytest.raises(UsageError, match=r"no pair of .*out has at most 9 tokens"):
        build_data(DataConfig(name="preferences", args=args))


def test_prepared_pairs_are_no_other_documents(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    pairs = Field("chosen", True, (), "rejected")
    prepare(written(tmp_path, ROWS), tmp_path / "out", str(tmp_path), field=pairs)
    listed = {"sources": [str(tmp_path / "out")]}
    with pytest.raises(UsageError, match="out holds pairs of answers, and no other documents"):
        build_data(DataConfig(name="documents", args=listed))
    with pytest.raises(UsageError, match="holds pairs of answers, and the data set tokens trains"):
        build_data(DataConfig(name="tokens", args={"path": str(tmp_path / "out")}))
    source = {"path": str(tmp_path / "out"), "prompt_field": "prompt"}
    with pytest.raises(UsageError, match=r"prompt_field beside .*out, whose documents are tokens"):
        build_data(DataConfig(name="preferences", args={"sources": [source]}))
