"""What is learned of labels in rows, and how samples of them look."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data import Data, build_data, check_data
from lockstep.errors import UsageError
from tests.data.chats import write_tokenizer


def write(folder: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "rows.jsonl")


def read(path: str, **args: Any) -> Data:
    return build_data(DataConfig(name="labelled", args={"path": path, **args}))


def texts(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": "ab" * (number + 1), "label": each} for number, each in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "learned", "size", "names", "found"),
    [
        (["no", "yes", "no"], "single_label_classification", 2, ["no", "yes"], [0, 1, 0]),
        ([True, False, True], "single_label_classification", 2, ["false", "true"], [1, 0, 1]),
        ([0, 2, 0], "single_label_classification", 3, None, [0, 2, 0]),
        ([0.5, 2, -1.0], "regression", 1, None, [0.5, 2.0, -1.0]),
        (
            [["b"], [], ["a", "b"]],
            "multi_label_classification",
            2,
            ["a", "b"],
            [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]],
        ),
        (
            [[1, 0], [0, 0], [1.0, 1]],
            "multi_label_classification",
            2,
            None,
            [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]],
        ),
        (
            [[1, 0], [0.5, -2], [1, 3]],
            "regression",
            2,
            None,
            [[1.0, 0.0], [0.5, -2.0], [1.0, 3.0]],
        ),
    ],
)
def test_what_is_learned_follows_from_the_labels(
    labels: list[Any], learned: str, size: int, names: Any, found: list[Any], tmp_path: Path
) -> None:
    data = read(write(tmp_path, *texts(*labels)))
    described = data.facts["labels"]
    assert (described["problem_type"], described["size"], described["names"]) == (
        learned,
        size,
        names,
    )
    assert [sample["labels"].tolist() for sample in data.train] == found
    batch = data.train.collated([0, 2])
    assert batch["input_ids"].tolist() == [[97, 98, 0, 0, 0, 0], [97, 98] * 3]
    assert batch["attention_mask"].sum(1).tolist() == [2, 6]
    is_number = learned == "single_label_classification"
    assert batch["labels"].dtype == (torch.int64 if is_number else torch.float32)


def test_words_have_a_label_each(tmp_path: Path) -> None:
    rows = [
        {"words": ["ab", "c"], "tags": ["A", "B"]},
        {"words": ["d"], "tags": ["B"]},
    ]
    data = read(write(tmp_path, *rows), text_field="words", label_field="tags")
    assert data.facts["labels"]["of"] == "words"
    assert data.train[0]["labels"].tolist() == [0, -100, -100, 1]
    assert data.train[1]["labels"].tolist() == [1, -100, -100, -100]


def test_a_tokenizer_of_a_folder_pads_and_keeps_its_ends_where_it_cuts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path / "model", template=None)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = made.token_to_id("<|end|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", end)]
    )
    made.save(str(folder / "tokenizer.json"))
    path = write(tmp_path, *texts("no", "yes"), {"text": "<|end|>", "label": "no"})
    data = read(path, tokenizer=str(folder), max_length=4)
    letters = [sample["input_ids"].tolist() for sample in data.train]
    padding = made.token_to_id("</s>")  # its eos_token: nothing names another
    assert letters[0][2:] == [end, padding]
    assert letters[1][3] == end  # of five tokens
    assert letters[2].count(end) == 1  # what a text says is text
    assert any("2 of 3 texts are longer than 4 tokens" in line for line in data.notices)
    other = read(path, tokenizer=str(folder), pad_token="<|user|>")
    assert other.train[0]["input_ids"][-1] == made.token_to_id("<|user|>")


def test_classes_are_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, *texts("no", "yes", "no"))
    data = read(path, classes=["yes", "maybe", "no"], validation_fraction=0.4)
    assert [sample["labels"].item() for sample in data.train] == [2, 0]
    assert data.validation[0]["labels"].item() == 2
    named = read(write(tmp_path, *texts(0, 1)), classes=["no", "yes"])
    assert named.facts["labels"]["names"] == ["no", "yes"]
    assert named.train[1]["labels"].item() == 1


@pytest.mark.parametrize(
    ("rows", "args", "says"),
    [
        ([{"text": "a"}], {}, r"no 'label' in .*rows.jsonl:1(.|\n)*label_field: it has text"),
        ([{"label": 1}], {}, r"no 'text' in .*:1"),
        ([{"text": "a", "label": None}], {}, r"no 'label' in"),
        ([{"text": 3, "label": 1}], {}, "the text of .*:1 is int, not text"),
        (texts("a", 1), {}, r"labels are texts and numbers: 'a' of .*:1, and 1 of .*:2"),
        (texts("a", ["b"]), {}, r"the label of .*:2 is \[\"b\"\], and that of .*:1 \"a\""),
        (texts("a", 0.5), {}, r"the label of .*:2 is 0.5, and that"),
        (texts(0, -1), {}, r"the label -1 of .*:2 is not a class"),
        (texts([1, 0], [1]), {}, r"the label of .*:2 is \[1\], and the first has 2 numbers"),
        (texts([1, 2]), {}, r"is a list of \[1, 2\](.|\n)*1 and 0 for each class"),
        (texts([0.5, 1], [1]), {}, r"the label of .*:2 is \[1\], and that of .*:1 \[0.5, 1\]"),
        (texts(0.5, [1, 2]), {}, r"the label of .*:2 is \[1, 2\], and that of .*:1 0.5"),
        (texts([0.5, "a"]), {}, r"is a list of \[0.5, \"a\"\]"),
        (texts([0.5, 1], ["a"]), {}, r"the label of .*:2 is \[\"a\"\], and that of .*:1"),
        (texts({"a": 1}), {}, r"the label of .*:1 is {\"a\": 1}"),
        (texts("a", "a"), {}, r"all labels are a(.|\n)*nothing to learn"),
        (texts("a", "b"), {"classes": ["a", "c"]}, r"'b' of .*:2 is none of the classes"),
        (texts("a", "b"), {"classes": ["a", "a", "b"]}, "names 'a' more than once"),
        (texts(0, 2), {"classes": ["a", "b"]}, "2 classes are named, and a label is 2"),
        (texts(0.5, 1.5), {"classes": ["a"]}, "labels are numbers with fractions"),
        (texts([1, 0]), {"classes": ["a"]}, "1 classes are named, and labels have 2 numbers"),
        ([{"text": ["a", "b"], "label": ["x"]}], {}, r"is a list of 2, and its label"),
        ([{"text": "", "label": 1}, *texts(0)], {}, "has no tokens"),
        (["{"], {}, r"rows.jsonl:1"),
        (texts(0, 1), {"max_length": 0}, "max_length"),
        (texts(0, 1), {"path": "none.jsonl"}, "none.jsonl"),
    ],
)
def test_what_can_not_be_learned_is_one_error_that_names_the_line(
    rows: list[Any], args: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write(tmp_path, *rows)
    with pytest.raises(UsageError, match=says):
        read(**{"path": path, **args})


def test_files_and_tokenizers_that_do_not_do(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    config = DataConfig(name="labelled", args={"path": str(tmp_path / "notes.txt")})
    with pytest.raises(UsageError, match="and no rows with text, label"):
        check_data(config)
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path / "model", template=None, eos=None)
    path = write(tmp_path, *texts("no", "yes"))
    with pytest.raises(UsageError, match="names no pad_token"):
        read(path, tokenizer=str(folder))
    with pytest.raises(UsageError, match="has no token '<pad>'"):
        read(path, tokenizer=str(folder), pad_token="<pad>")


def test_an_evaluation_numbers_classes_as_the_training_did(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    trained = write(tmp_path, *texts("a", "b", "c"))
    other = read(write(tmp_path / "other", *texts("c", "b")), labels_of=[trained])
    assert [sample["labels"].item() for sample in other.train] == [2, 1]
    with pytest.raises(UsageError, match="is none of the classes"):
        read(write(tmp_path / "other", *texts("d")), labels_of=trained)


def test_numbers_for_classes_with_a_fraction_among_them(tmp_path: Path) -> None:
    """Whole numbers are classes, unless one of the labels has a fraction."""
    assert read(write(tmp_path, *texts(0, 1, 2))).facts["num_labels"] == 3
    assert read(write(tmp_path, *texts(0, 1, 2.5))).facts["num_labels"] == 1
