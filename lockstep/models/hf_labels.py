"""Fits a classifier of Hugging Face to the labels of its data.

Data with labels (`lockstep.data.labelled`) say how many classes there are, their names, what is
learned of them, and with which token texts are padded. A new head gets all of it; the head that a
folder's weights hold has to be for the same classes, in the same order.

Tests: tests/models/test_hf_labels.py
"""

from collections.abc import Mapping
from typing import Any

from lockstep.errors import UsageError, listed

# What has a label → the Auto class of its classifiers, and how one is called.
_CLASSIFIERS = {
    "texts": ("AutoModelForSequenceClassification", "each text"),
    "words": ("AutoModelForTokenClassification", "each word"),
    "images": ("AutoModelForImageClassification", "each picture"),
}
_NUMBERS = "regression"


def fit_labels(
    config: Any, auto: str, labels: Mapping[str, Any], given: Mapping[str, Any], *, own_head: bool
) -> None:
    """Set what a model's config says of classes to those of the data, in place.

    Args:
        config: of the library.
        auto: the name of the model's Auto class.
        labels: `of`, what has a label: texts, words, images; `problem_type`; `size`, the number of
            classes; `names` of them, or None; `padding`, the token that fills texts, or None.
        given: what `model.args` says, which stands.
        own_head: whether the weights of a folder hold the head.

    Raises:
        UsageError: the model is not a classifier of such labels, or its head is for other classes.
    """
    wanted, each = _CLASSIFIERS[labels["of"]]
    if auto != wanted:
        raise UsageError(
            f"the data have a label for {each}, and the model is an {auto}",
            where="model.auto",
            fix=f"write auto: {wanted}",
        )
    if own_head:
        _require_same(config, labels)
    else:
        _set(config, labels, given)
    if labels["padding"] is None:
        return
    if config.pad_token_id is None:
        config.pad_token_id = labels["padding"]
    elif config.pad_token_id != labels["padding"]:
        raise UsageError(
            f"texts are padded with the token {labels['padding']}, and the model's config says"
            f" pad_token_id {config.pad_token_id}",
            where="data.args.pad_token, model.args.pad_token_id",
            why="a classifier looks for a text's last token before the padding",
            fix="write data.args.pad_token: the token of this number in the model's tokenizer",
        )


def _set(config: Any, labels: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Give a new head the classes of the data."""
    size = labels["size"]
    asked = given.get("num_labels", size)
    if asked < size or (labels["problem_type"] == _NUMBERS and asked != size):
        outputs = f"{size} classes"
        if labels["problem_type"] == _NUMBERS:
            outputs = "one number" if size == 1 else f"{size} numbers"
        what = f"num_labels is {asked}, and the data have {outputs}"
        raise UsageError(what, where="model.args.num_labels", fix="leave it out")
    config.num_labels = asked
    names = labels["names"]
    if names is not None and asked == len(names) and "id2label" not in given:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    if labels["problem_type"] is not None and "problem_type" not in given:
        config.problem_type = labels["problem_type"]


def _require_same(config: Any, labels: Mapping[str, Any]) -> None:
    """Refuse data whose classes are not those of a head that has been trained."""
    size = labels["size"]
    own = [str(config.id2label[number]) for number in sorted(config.id2label)]
    fix = "name the classes in the head's order, data.args.classes, or a folder without a head"
    if size > len(own) or (labels["problem_type"] == _NUMBERS and len(own) != size):
        what = f"the data have {size} classes, and the head of the model's folder {len(own)}"
        if labels["problem_type"] == _NUMBERS:
            what = (
                f"the data have numbers to learn, and the folder's head has {len(own)} classes, not"
                f" {size}"
            )
        raise UsageError(what, where="model.name, data.args", fix=fix)
    if config.problem_type not in (None, labels["problem_type"]):
        what = f"the head of the model's folder is for {config.problem_type}"
        why = f"the labels of the data are for {labels['problem_type']}"
        raise UsageError(what, where="model.name, data.args", why=why, fix=fix)
    config.problem_type = labels["problem_type"]
    names = labels["names"]
    is_unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(own))
    if names is not None and not is_unnamed and own[: len(names)] != names:
        what = (
            f"the classes of the data are {listed(names, 8)}, and those of the folder's head"
            f" {listed(own, 8)}"
        )
        why = "a class is known by its number: another order would train one in another's place"
        raise UsageError(
            what,
            where="data.args.classes",
            why=why,
            fix=f"write classes: [{', '.join(own)}]",
        )
