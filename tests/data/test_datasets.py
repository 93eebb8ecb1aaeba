"""The data sets that ship: what a sample is, what the facts say, and what bad input
gets to hear.
"""

import inspect
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lockstep.config import DataConfig
from lockstep.data import Data, build_data, check_data, sources
from lockstep.data.datasets import hugging_face
from lockstep.data.language import Documents, Tokenizer, TokenWindows
from lockstep.data.prepare import prepare, prepare_command
from lockstep.data.reader import Reader, ReadRequest
from lockstep.errors import UsageError
from lockstep.registry import DATA_SETS


def build(name: str, **args: Any) -> Data:
    return build_data(DataConfig(name=name, args=args), seed=1)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {n}: gray goose {n * n}\n" for n in range(200)))
    return file


@pytest.fixture
def tokenizer(tmp_path: Path, book: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train([str(book)], tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


# ---- windows and documents ----


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 15))
def test_trap_15_targets_are_shifted_exactly_once(length, block_size, stride):
    """Targets equal to the inputs teach copying; targets shifted twice leave out every other
    prediction.
    """
    if length < block_size + 1:
        return
    tokens = np.arange(1000, 1000 + length, dtype=np.uint16)
    data = TokenWindows(tokens, block_size, stride)
    for index in range(len(data)):
        sample = data[index]
        assert sample["input_ids"].tolist() == tokens[index * stride :][:block_size].tolist()
        assert torch.equal(sample["targets"], sample["input_ids"] + 1)
        assert sample["input_ids"].dtype == sample["targets"].dtype == torch.int64
    used = (len(data) - 1) * stride + block_size + 1
    assert 0 <= length - used < stride


@pytest.mark.parametrize("stride", [1, 3, None])
def test_windows_read_in_one_go_are_the_same(stride: int | None) -> None:
    data = TokenWindows(np.arange(200, dtype=np.uint16), 8, stride)
    same_in_one_go(data, [3, 0, 17, 3])
    with pytest.raises(IndexError, match=f"sample 500 of {len(data)}"):
        data.collated([1, 500])


class Reversed(TokenWindows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value.flip(0) for key, value in super().__getitem__(index).items()}


def test_a_subclass_that_reads_samples_in_its_own_way_is_asked_for_them() -> None:
    tokens = np.arange(17, dtype=np.uint16)
    request = ReadRequest(step=0, epoch=0, micro_batch=0, indices=[0, 1])
    plain, own = (Reader(kind(tokens, 8), None, 1, 0)[request] for kind in (TokenWindows, Reversed))
    assert torch.equal(own["targets"], plain["targets"].flip(1))


def same_in_one_go(data: Any, indices: list[int]) -> None:
    one_go = data.collated(indices)
    one_by_one = default_collate([data[index] for index in indices])
    assert one_go.keys() == one_by_one.keys()
    for key, expected in one_by_one.items():
        assert torch.equal(one_go[key], expected)
        assert one_go[key].dtype == expected.dtype
        assert one_go[key].is_contiguous()


def test_by_default_every_token_but_the_first_is_a_target_once():
    data = TokenWindows(np.arange(41, dtype=np.uint8), 8)
    assert [
        t for sample in data.__getitems__(range(5)) for t in sample["targets"].tolist()
    ] == list(range(1, 41))
    assert len(data) == 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 7))
def test_trap_15_padded_documents_are_shifted_once_and_padding_does_not_count(lengths, block_size):
    """Padding that counts as a target, or a target that reaches into the next document."""
    documents = [
        np.arange(100 * n + 1, 100 * n + 1 + length, dtype=np.uint16)
        for n, length in enumerate(lengths)
    ]
    if max(lengths) < 2:
        with pytest.raises(UsageError, match="none of at least 2 tokens"):
            Documents(documents, block_size)
        return
    data = Documents(documents, block_size)
    targets = []
    for index in range(len(data)):
        sample = data[index]
        valid = sample["targets"] != -100
        assert valid.any()
        assert torch.equal(sample["targets"][valid], sample["input_ids"][valid] + 1)
        assert sample["input_ids"].shape == sample["targets"].shape == (block_size,)
        targets += sample["targets"][valid].tolist()
    assert targets == [token for document in documents for token in document[1:].tolist()]


# ---- python-docs ----


def test_python_docs_are_bytes_with_the_last_tenth_held_out():
    data = build("python-docs", block_size=64)
    assert (data.facts["vocab_size"], data.facts["block_size"]) == (256, 64)
    assert "Python 3." in data.facts["source"]
    assert data.encode is not None
    assert data.decode is not None
    assert data.decode(data.encode("Grüße")) == "Grüße"
    assert data.decode(data.train[0]["input_ids"].tolist()).startswith('The "assert" statement')
    train = len(data.train.tokens)
    validation = len(data.validation.tokens)
    assert validation == (train + validation) // 10


def test_documents_hold_unlike_numbers_of_targets():
    data = build("python-docs", block_size=512, documents=True)
    counts = {int((data.train[i]["targets"] != -100).sum()) for i in range(len(data.train))}
    assert len(counts) > 10
    assert max(counts) == 512


# ---- text ----


def test_text_of_a_folder_is_its_files_by_name(tmp_path):
    for name, content in {
        "b.txt": "second ",
        "sub/c.txt": "third",
        "a.txt": "first ",
        ".hidden": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    data = build("text", path=str(tmp_path), block_size=4, validation_fraction=0)
    assert bytes(data.train.tokens).decode() == "first second third"
    assert data.validation is None


def test_text_with_a_tokenizer(book, tokenizer):
    data = build("text", path=str(book), tokenizer=str(tokenizer), block_size=16)
    assert data.facts["vocab_size"] == 300
    assert data.decode is not None
    assert data.encode is not None
    assert data.decode(data.train[0]["input_ids"].tolist()).startswith("line 0: gray goose 0")
    assert data.encode(book.read_text())[:16] == data.train[0]["input_ids"].tolist()
    together = np.concatenate([data.train.tokens, data.validation.tokens])
    assert data.decode(together.tolist()) == book.read_text()


def test_text_as_documents(tmp_path, book):
    lines = build("text", path=str(book), block_size=64, documents=True, validation_fraction=0.25)
    assert (len(lines.train), len(lines.validation)) == (150, 50)
    (tmp_path / "other.txt").write_text("xy")
    files = build(
        "text", path=str(tmp_path), block_size=64, documents=True, validation_fraction=0.5
    )
    assert len(files.validation) == 1
    assert int((files.validation[0]["targets"] != -100).sum()) == 1


def test_a_text_larger_than_a_chunk_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.data.text.CHUNK", 10)
    content = "äöü\n" * 7 + "x" * 25 + "\nend without a newline"
    (tmp_path / "t.txt").write_text(content)
    data = build("text", path=str(tmp_path), block_size=4, validation_fraction=0)
    assert bytes(data.train.tokens).decode() == content


# ---- tokens, and preparing them ----


@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_prepared_tokens_are_the_texts_samples(tmp_path, book, tokenizer, kind):
    chosen = "bytes" if kind == "bytes" else str(tokenizer)
    told: list[int] = []
    num_tokens, vocab_size = prepare(book, tmp_path / "out", chosen, advance=told.append)
    assert sum(told) == book.stat().st_size
    direct = build("text", path=str(book), tokenizer=chosen, block_size=16)
    data = build("tokens", path=str(tmp_path / "out"), block_size=16)
    assert num_tokens == len(direct.train.tokens) + len(direct.validation.tokens)
    for part, expected in ((data.train, direct.train), (data.validation, direct.validation)):
        assert len(part) == len(expected)
        for index in (0, len(part) - 1):
            assert torch.equal(part[index]["targets"], expected[index]["targets"])
    assert data.facts["vocab_size"] == vocab_size == direct.facts["vocab_size"]
    assert data.decode is not None
    assert data.encode is not None
    assert data.decode(data.encode("gray goose")) == "gray goose"
    assert [p.name for p in tmp_path.iterdir() if "tmp-" in p.name] == []


def test_prepared_python_docs_are_the_data_set(tmp_path):
    prepare("python-docs", tmp_path / "out")
    data = build("tokens", path=str(tmp_path / "out"), block_size=32)
    direct = build("python-docs", block_size=32)
    assert len(data.train) == len(direct.train)
    assert torch.equal(data.train[77]["input_ids"], direct.train[77]["input_ids"])


def test_a_token_file_is_not_copied_to_workers(tmp_path, book):
    prepare(book, tmp_path / "out")
    data = build("tokens", path=str(tmp_path / "out"), block_size=16)
    first = data.train[3]
    sent = pickle.dumps(data.train)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[3]["input_ids"], first["input_ids"])


def test_a_vocabulary_beyond_16_bits_takes_32(tmp_path, book, monkeypatch):
    class Wide(Tokenizer):
        def __init__(self, name: str = "bytes") -> None:
            super().__init__(name)
            self.vocab_size = 100_000

        def encode_array(self, text: str) -> Any:
            return np.array([70_000] * 40)

    for module in ("prepare", "token_folder"):
        monkeypatch.setattr(f"lockstep.data.{module}.Tokenizer", Wide)
    prepare(book, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["dtype"] == "uint32"
    data = build("tokens", path=str(tmp_path / "out"), block_size=4, validation_fraction=0)
    assert data.train[0]["input_ids"].tolist() == [70_000] * 4
    assert data.facts["vocab_size"] == 100_000


def test_preparing_leaves_nothing_behind_when_it_fails(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\n" + b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8"):
        prepare(tmp_path / "bad.txt", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["bad.txt"]
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        prepare("python-docs", tmp_path / "out")


def test_the_command_prepares_and_says_how_to_use_it(tmp_path, book, capsys):
    assert prepare_command(["prepare", str(book), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"{book.stat().st_size:,} tokens of 256 kinds" in said
    assert "name: tokens" in said
    with pytest.raises(UsageError, match="--out"):
        prepare_command(["prepare", str(book)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "tokens.bin").write_bytes(b"123"), "tokens.bin has 3 bytes"),
        (lambda d: (d / "tokens.bin").unlink(), "tokens.bin has 0 bytes"),
        (lambda d: (d / "tokens.json").unlink(), "has no tokens.json"),
        (lambda d: (d / "tokens.json").write_text("{"), "can't be used"),
        (lambda d: (d / "tokens.json").write_text("[]"), "not of the format"),
        (
            lambda d: (d / "tokens.json").write_text('{"format": "lockstep-tokens-1"}'),
            "no usable dtype",
        ),
    ],
)
def test_damaged_tokens_are_found_at_start(tmp_path, book, damage, message):
    prepare(book, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(UsageError, match=message):
        build("tokens", path=str(tmp_path / "out"))


# ---- digits ----


@pytest.mark.parametrize("size", [16, 32, 8])
def test_digits_are_images_between_0_and_1(size):
    pytest.importorskip("sklearn")
    data = build("digits", image_size=size)
    assert (data.facts["image_size"], data.facts["channels"]) == (size, 1)
    assert len(data.train) + len(data.validation) == 1797
    same_in_one_go(data.train, [5, 0, 100])
    sample = data.train[5]
    assert (sample["image"].shape, sample["image"].dtype) == ((1, size, size), torch.float32)
    assert (sample["label"].shape, sample["label"].dtype, int(sample["label"])) == (
        (),
        torch.int64,
        5,
    )
    assert data.train.images.min() == 0
    assert data.train.images.max() == 1


# ---- Hugging Face ----


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in {"train": 60, "validation": 20}.items():
        texts = [f"{split} row {n}" if n % 3 else "" for n in range(rows)]
        made = datasets.Dataset.from_dict({"text": texts, "number": list(range(rows))})
        made.to_parquet(str(folder / f"{split}.parquet"))
    return folder


def test_a_local_folder_of_parquet(parquet):
    data = build(f"hf:{parquet}", block_size=16)
    assert bytes(data.train.tokens).decode().startswith("train row 1\ntrain row 2\ntrain row 4\n")
    assert bytes(data.validation.tokens).decode().startswith("validation row 1\n")
    held_out = build(f"hf:{parquet}", block_size=16, validation_split=None, validation_fraction=0.5)
    assert abs(len(held_out.train.tokens) - len(held_out.validation.tokens)) <= 1
    documents = build(f"hf:{parquet}", block_size=32, documents=True)
    assert (len(documents.train), len(documents.validation)) == (40, 13)


def test_rows_of_columns(parquet):
    data = build(f"hf:{parquet}", columns=["number"])
    assert [row["number"].item() for row in data.train.__getitems__([3, 5])] == [3, 5]
    assert len(data.validation) == 20


def test_what_the_hub_does_not_have(parquet):
    for args, message in (
        ({"text_field": "body"}, "has no column 'body'"),
        ({"split": "dev"}, "has no split 'dev'"),
        ({"columns": ["text", "nothing"]}, "has no column 'nothing'"),
    ):
        with pytest.raises(UsageError, match=message):
            build(f"hf:{parquet}", **args)
    with pytest.raises(UsageError, match="can't be loaded"):
        build(f"hf:{parquet}/nowhere")


# ---- the user's own ----


class Own(torch.utils.data.Dataset[int]):
    facts = {"vocab_size": 7}

    def __init__(self, size: int, seed: int = -1) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def own_pair(size: int) -> tuple[Own, Own]:
    return Own(size), Own(1)


def own_failure() -> Own:
    raise FileNotFoundError("corpus.txt")


def own_nonsense() -> int:
    return 3


def test_classes_and_functions_of_ones_own():
    here = __name__
    data = build(f"{here}:Own", size=5)
    assert (len(data.train), data.train.seed, data.validation, data.facts) == (
        5,
        1,
        None,
        {"vocab_size": 7},
    )
    pair = build(f"{here}:own_pair", size=4)
    assert (len(pair.train), len(pair.validation)) == (4, 1)


# ---- bad input ----


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (None, {}, "names no data"),
        ("python_docs", {}, "did you mean 'python-docs'"),
        ("wikitext", {}, "there is no data set 'wikitext'"),
        ("python-docs", {"blocksize": 8}, "did you mean 'block_size'"),
        ("python-docs", {"block_size": 0}, "block_size should be a whole number of at least 1"),
        (
            "python-docs",
            {"block_size": "64"},
            "block_size should be a whole number of at least 1, but is '64'",
        ),
        ("python-docs", {"stride": -1}, "stride should be"),
        ("python-docs", {"validation_fraction": 1.5}, "validation_fraction should be"),
        ("python-docs", {"documents": True, "stride": 4}, "not cut by a stride"),
        ("python-docs", {"tokenizer": "gpt2"}, "there is no tokenizer 'gpt2'"),
        ("python-docs", {"block_size": 600_000}, r"tokens, but one sample needs 600001"),
        ("text", {}, "text needs the argument 'path'"),
        ("text", {"path": "/no/such/place"}, "there is no file or folder"),
        ("tokens", {"path": "/no/such/place"}, "has no tokens.json"),
        ("digits", {"image_size": 17}, "no image_size 17"),
        ("no_such_module:Thing", {}, "there is no module 'no_such_module'"),
        (f"{__name__}:Owm", {}, "has no Owm"),
        (f"{__name__}:Own", {"sice": 5}, "did you mean 'size'"),
        (f"{__name__}:Own", {}, "needs the argument 'size'"),
        (f"{__name__}:own_failure", {}, "can't be made"),
        (f"{__name__}:own_nonsense", {}, "gave int for its training data"),
    ],
)
def test_bad_input_is_one_clear_message(name, args, message):
    with pytest.raises(UsageError, match=message) as caught:
        build(name, **args)
    assert len(str(caught.value).splitlines()) <= 4


def test_text_that_is_empty_too_short_or_no_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match=r"empty\.txt is empty"):
        build("text", path=str(tmp_path / "empty.txt"))
    with pytest.raises(UsageError, match="has no text"):
        build("text", path=str(tmp_path))
    (tmp_path / "short.txt").write_text("x" * 100)
    with pytest.raises(
        UsageError, match=r"the training part of .* has 90 tokens, but one sample needs 257"
    ):
        build("text", path=str(tmp_path / "short.txt"))
    with pytest.raises(
        UsageError, match=r"the validation part of .* has 10 tokens, but one sample needs 33"
    ):
        build("text", path=str(tmp_path / "short.txt"), block_size=32)
    (tmp_path / "binary.txt").write_bytes(b"\x80abc")
    with pytest.raises(UsageError, match=r"binary\.txt is not UTF-8 text"):
        build("text", path=str(tmp_path), block_size=4)


def test_a_tokenizer_that_is_none(tmp_path, book):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a Hugging Face tokenizer"):
        build("text", path=str(book), tokenizer=str(tmp_path / "bad.json"))


PAGE = Path(__file__).parents[2] / "docs/how_to/data.md"


def rows_of(heading: str) -> list[list[str]]:
    """The cells of each row of the tables in a section of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_names_each_data_set_with_its_arguments() -> None:
    rows = rows_of("The data sets that ship")
    listed = {
        row[0].strip("`"): row[2] for row in rows if len(row) == 4 and row[0] != "`data.name`"
    }
    builders = {name: DATA_SETS.load_callable(name) for name in DATA_SETS.shipped}
    builders["hf:NAME"] = hugging_face
    assert listed.keys() == builders.keys()
    for name, builder in builders.items():
        said = {
            key: yaml.safe_load(default) if default else inspect.Parameter.empty
            for key, default in re.findall(r"`(\w+)(?:: ([^`]+))?`", listed[name])
        }
        taken = [p for p in inspect.signature(builder).parameters.values() if p.name != "name"]
        assert said == {p.name: p.default for p in taken}, name


def test_the_page_names_each_key_of_a_source() -> None:
    rows = [row for row in rows_of("The data sets that ship") if len(row) == 2]
    said = [key for row in rows for key in re.findall(r"`(\w+)`", row[0])]
    assert sorted(said) == sorted({**sources._KEYS, **sources._KEYS_OF_PAIRS})


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("text", {"path": 3}, "path should be a text, but is 3"),
        ("text", {"path": "a", "documents": "yes"}, "documents should be true or false, but is"),
        (
            "labelled",
            {"path": "a", "text_field": ["a"]},
            r"text_field should be a text, but is \['a'",
        ),
        (
            "labelled",
            {"path": "a", "classes": "no"},
            "classes should be a list of texts, but is 'no'",
        ),
        (
            "labelled",
            {"path": "a", "classes": [1]},
            r"classes should be a list of texts, but is \[1",
        ),
        ("hf:a", {"columns": "a"}, "columns should be a list of texts, but is 'a'"),
    ],
)
def test_an_argument_of_another_type_is_one_error(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(name, **args)
    if not name.startswith("hf:"):
        with pytest.raises(UsageError, match=message):
            check_data(DataConfig(name=name, args=args))
