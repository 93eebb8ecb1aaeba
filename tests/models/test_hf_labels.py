"""A classifier's head follows from the labels of the data, or has to fit them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import export_hugging_face
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.trainer import Trainer, build
from tests.data.test_labelled import read, texts, write
from tests.models.test_hf_auto import _TEXT, config_of

transformers = pytest.importorskip("transformers")

TEXTS = "AutoModelForSequenceClassification"
WORDS = "AutoModelForTokenClassification"
SIZES = {**_TEXT, "vocab_size": 256}


def described(**changes: Any) -> Data:
    labels = {
        "of": "texts",
        "problem_type": "single_label_classification",
        "size": 3,
        "names": ["a", "b", "c"],
        "padding": 0,
    }
    return Data(None, facts={"labels": {**labels, **changes}})


def test_a_new_head_has_the_classes_of_the_data() -> None:
    model: Any = build(config_of("hf:bert", auto=TEXTS, args=SIZES), described())
    assert model.classifier.out_features == 3
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.config.problem_type == "single_label_classification"
    more = {**SIZES, "num_labels": 5}
    model = build(config_of("hf:bert", auto=TEXTS, args=more), described())
    assert model.classifier.out_features == 5


@pytest.mark.parametrize(
    ("auto", "args", "changes", "says"),
    [
        (None, {}, {}, f"the model is an AutoModelForCausalLM(.|\n)*write auto: {TEXTS}"),
        (WORDS, {}, {}, f"a label for each text, and the model is an {WORDS}"),
        (TEXTS, {}, {"of": "words"}, f"a label for each word(.|\n)*auto: {WORDS}"),
        (TEXTS, {"num_labels": 2}, {}, "num_labels is 2, and the data have 3 classes"),
        (TEXTS, {}, {"padding": 7}, r"padded with the token 7, and .* pad_token_id 0"),
    ],
)
def test_a_model_that_is_no_classifier_of_them_is_one_error(
    auto: str | None, args: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build(config_of("hf:bert", auto=auto, args={**SIZES, **args}), described(**changes))


def test_the_head_of_a_folder_is_for_its_own_classes(tmp_path: Path) -> None:
    trained: Any = build(config_of("hf:bert", auto=TEXTS, args=SIZES), described())
    trained.save_pretrained(tmp_path)
    name = f"hf:{tmp_path}"
    again: Any = build(config_of(name), described())
    assert torch.equal(again.classifier.weight, trained.classifier.weight)
    with pytest.raises(UsageError, match="the classes of the data are") as caught:
        build(config_of(name), described(names=["b", "a", "c"]))
    assert "write classes: [a, b, c]" in str(caught.value)
    with pytest.raises(UsageError, match="4 classes, and the head of the model's folder 3"):
        build(config_of(name), described(size=4, names=None))
    with pytest.raises(UsageError, match="have numbers to learn, and the folder's head has"):
        build(config_of(name), described(problem_type="regression", size=1, names=None))
    with pytest.raises(UsageError, match="the head of the model's folder is for"):
        build(config_of(name), described(problem_type="multi_label_classification", names=None))


@pytest.mark.parametrize(
    ("family", "labels", "size"),
    [
        ("bert", ["no", "yes", "no", "yes"], 2),
        ("bert", [0.5, 1.0, -1.5, 0.0], 1),
        ("bert", [["a"], ["b"], [], ["a", "b"]], 2),
        ("gpt2", [0, 1, 2, 0], 3),
    ],
)
def test_rows_train_as_in_a_loop_by_hand(
    family: str, labels: list[Any], size: int, tmp_path: Path
) -> None:
    """The loss of each kind is the library's own; a decoder reads its last token before padding."""
    data = read(write(tmp_path, *texts(*labels)))
    sizes = SIZES
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 256}
        sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = config_of(f"hf:{family}", auto=TEXTS, args=sizes)
    model: Any = build(config, data)
    assert model.num_labels == size
    theirs: Any = type(model)(model.config)
    theirs.load_state_dict(model.state_dict())
    trainer = Trainer(model, config=config)
    losses = [float(record.loss) for record in trainer.steps(data.train, epochs=2)]
    batch = data.train.collated(range(len(labels)))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for found in losses:
        loss = theirs.train()(**batch).loss
        assert found == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


TAGGED = [
    {"words": ["ab", "c"], "tags": ["A", "B"]},
    {"words": ["d"], "tags": ["B"]},
    {"words": ["e", "f", "g"], "tags": ["B", "C", "A"]},
    {"words": ["a"], "tags": ["A"]},
]


@pytest.mark.parametrize(
    ("auto", "rows", "problem", "names"),
    [
        (WORDS, TAGGED, None, ["A", "B", "C"]),
        (TEXTS, texts("no", "yes", "no", "yes"), "single_label_classification", ["no", "yes"]),
        (TEXTS, texts(["a"], [], ["b"], ["a"]), "multi_label_classification", ["a", "b"]),
        (TEXTS, texts(0.5, 1.0, -1.5, 0.0), "regression", ["LABEL_0"]),
    ],
)
def test_a_classifiers_folder_is_read_by_plain_transformers_and_trains_on(
    auto: str, rows: list[Any], problem: str | None, names: list[str], tmp_path: Path
) -> None:
    """With the names of its classes, and the same outputs; its head is for the same data again."""
    fields = {"text_field": "words", "label_field": "tags"} if auto == WORDS else {}
    data = read(write(tmp_path, *rows), **fields)
    config = config_of("hf:bert", auto=auto, args=SIZES)
    trainer = Trainer(build(config, data), config=config)
    next(iter(trainer.steps(data.train)))
    saved = trainer.save_checkpoint(tmp_path / "step-00000001")
    export_hugging_face(saved, tmp_path / "out")

    plain = getattr(transformers, auto).from_pretrained(tmp_path / "out").eval()
    assert list(plain.config.id2label.values()) == names
    assert plain.config.problem_type == problem
    batch = data.train.collated(range(len(rows)))
    trained: Any = trainer.placed.root
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, trained.eval()(**batch).logits)
    again: Any = build(config_of(f"hf:{tmp_path / 'out'}"), data)
    assert type(again) is type(trained)
    assert torch.equal(again.classifier.weight, trained.classifier.weight)
