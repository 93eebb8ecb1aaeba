"""Makes the data that a `data:` section names.

The name is of a data set that ships (text has `text.py`), `hf:NAME`, or `package.module:Name`.

`hf:NAME` is a data set of the Hugging Face hub, or a local folder of its files (parquet, JSON, text
…). Every process tokenizes the text and holds the tokens in memory: for large data sets use
`lockstep data prepare`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep.config import DataConfig
from lockstep.config.argument_types import require_types
from lockstep.data.batches import CollatingDataset, Data
from lockstep.data.document_files import Field, content_of
from lockstep.data.language import (
    DocumentEncoder,
    TextOptions,
    Tokenizer,
    check_fraction,
    language_data,
)
from lockstep.data.mistakes import users_line
from lockstep.data.sources import check_sources
from lockstep.errors import LockstepError, UsageError
from lockstep.files.data_files import as_documents, check_named_files, source_of
from lockstep.registry import DATA_SETS, keywords_of, require_arguments


def build_data(data: DataConfig, *, seed: int = 0) -> Data:
    """Return the data that `data.name` and `data.args` describe, or raise a UsageError.

    A user's class with an argument `seed` that `data.args` leaves unset gets `seed`.
    """
    name = data.name
    args = dict(data.args)
    if name is None:
        raise UsageError(
            "the config names no data", where="data.name", fix=f"set it: {DATA_SETS.names()}"
        )
    if name.startswith("hf:"):
        builder: Callable[..., Any] = partial(hugging_face, name.removeprefix("hf:"))
    else:
        builder = DATA_SETS.load_callable(name)
        if ":" in name:
            return _users(builder, args, name, seed)
    require_arguments(builder, args, name, "data.args")
    annotated = builder.func if isinstance(builder, partial) else builder
    require_types(annotated, args, "data.args", numbers=False)
    if "seed" in (keywords_of(builder) or ()):
        args.setdefault("seed", seed)
    built: Data = builder(**args)
    return built


def check_data(data: DataConfig) -> None:
    """Raise the UsageError of `build_data` for an unknown name, argument, or kind of file.

    No data are made.
    """
    if data.name is None or data.name.startswith("hf:"):
        return
    builder = DATA_SETS.load_callable(data.name)
    require_arguments(builder, data.args, data.name, "data.args")
    if ":" not in data.name:
        require_types(builder, data.args, "data.args", numbers=False)
    check_named_files(data.name, data.args)
    check_sources(data.name, data.args)


def _users(builder: Callable[..., Any], args: dict[str, Any], name: str, seed: int) -> Data:
    """Return data made by a user's class or function.

    It gives a dataset, a pair (training, validation), or a `Data`.
    """
    if "seed" in (keywords_of(builder) or ()):
        args.setdefault("seed", seed)
    require_arguments(builder, args, name, "data.args")
    try:
        users_data = builder(**args)
    except LockstepError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"the data {name} can't be made", where=users_line(error), why=why
        ) from error
    if isinstance(users_data, Data):
        return users_data
    is_pair = isinstance(users_data, tuple) and len(users_data) == 2
    train, validation = users_data if is_pair else (users_data, None)
    for part, role in ((train, "training"), (validation, "validation")):
        readable = hasattr(part, "__iter__") or (
            hasattr(part, "__getitem__") and hasattr(part, "__len__")
        )
        if not readable and not (part is None and role == "validation"):
            what = f"{name} gave {type(part).__name__} for its {role} data, which is not a dataset"
            fix = (
                "return something with __len__ and __getitem__, an iterable, or a pair (training,"
                " validation)"
            )
            raise UsageError(what, where="data.name", fix=fix)
    return Data(train, validation, facts=dict(getattr(train, "facts", {})))


def hugging_face(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    validation_split: str | None = "validation",
    text_field: str = "text",
    columns: Sequence[str] | None = None,
    block_size: int = 256,
    stride: int | None = None,
    validation_fraction: float = 0.1,
    tokenizer: str = "bytes",
    documents: bool = False,
    special_tokens: bool = False,
) -> Data:
    """Return the data set of this name, or the folder's, or raise a UsageError.

    `config` is one of its configurations, e.g. `wikitext-2-raw-v1`. `validation_split` is used if
    the data set has it; else `validation_fraction` of `split` is held out. Rows of `text_field` are
    joined, each ending its line; with `documents`, a row is a document, padded to `block_size`.
    With `columns` samples are rows of these instead, as tensors where they are numbers. `tokenizer`
    is `bytes` or the path of a `tokenizer.json`. With `special_tokens`, the text of a special token
    becomes that token.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    splits = _load(name, config)
    if split not in splits:
        raise UsageError(
            f"hf:{name} has no split {split!r}",
            where="data.args.split",
            fix=f"it has {', '.join(splits)}",
        )
    train = splits[split]
    validation = splits.get(validation_split)
    source = f"hf:{name}" + (f" ({config})" if config else "")
    if columns is not None:
        _require_columns(name, train, columns, "data.args.columns")
        return _rows(train, validation, list(columns), options, source)
    _require_columns(name, train, [text_field], "data.args.text_field")
    chosen = Tokenizer(tokenizer)
    encoder = DocumentEncoder(chosen, special_tokens)
    texts_of = partial(_texts, text_field=text_field, source=source)
    encoded = partial(_encoded_documents if documents else _encoded_text, encoder)
    tokens = encoded(texts_of(train))
    if validation is None:
        train_tokens, held_out = options.split(tokens)
    else:
        train_tokens = tokens
        held_out = encoded(texts_of(validation))
    data = language_data(train_tokens, held_out, options, source, chosen, documents=documents)
    return replace(data, notices=[*data.notices, *encoder.notices(source)])


def _require_columns(name: str, train: Any, columns: Sequence[str], where: str) -> None:
    """Raise a UsageError for a column that a data set lacks."""
    for column in columns:
        if column not in train.column_names:
            raise UsageError(
                f"hf:{name} has no column {column!r}",
                where=where,
                fix=(
                    f"it has {', '.join(train.column_names)}; `columns` takes rows of any of them"
                    " as samples"
                ),
            )


def _rows(
    train: Any, validation: Any, columns: list[str], options: TextOptions, source: str
) -> Data:
    """Return data whose samples are rows of some columns, as tensors where they are numbers."""
    facts = {"source": source}
    train = train.with_format("torch", columns=columns)
    if validation is not None:
        return Data(train, validation.with_format("torch", columns=columns), facts)
    border = options.border(len(train))
    held_out = train.select(range(border, len(train))) if border < len(train) else None
    return Data(train.select(range(border)), held_out, facts)


def _texts(split: Any, *, text_field: str, source: str) -> Iterator[str]:
    """Yield the texts of a split's rows; a UsageError for a row that holds none."""
    field = Field(text_field)
    for number, row in enumerate(split[text_field]):
        yield content_of({text_field: row}, field, f"{source}, row {number}")


def _encoded_documents(encoder: DocumentEncoder, texts: Iterable[str]) -> list[Any]:
    """Return the tokens of each text, int [tokens]."""
    return [encoder.encode(text) for text in texts]


def _encoded_text(encoder: DocumentEncoder, texts: Iterable[str]) -> NDArray[Any]:
    """Return the tokens of all texts in a row, int [tokens]; each text ends its line."""
    rows = [np.empty(0, dtype=encoder.tokenizer.dtype)]
    for text in texts:
        line = text + "\n" if text and not text.endswith("\n") else text
        rows.append(encoder.encode(line))
    return np.concatenate(rows)


def _load(name: str, config: str | None) -> Any:
    """Load a data set with the package `datasets`.

    Raises UsageError: it is missing, or can't load it.
    """
    try:
        import datasets
    except ImportError:
        what = f"hf:{name} needs the package datasets"
        raise UsageError(what, where="data.name", fix="pip install datasets") from None
    if Path(name).is_file():
        what = f"hf:{name} is a file: a folder of files is loaded, or a data set of the hub"
        fix = f"write {as_documents(source_of(Path(name)))}"
        raise UsageError(what, where="data.name", fix=f"{fix}; or hf:FOLDER")
    try:
        return datasets.load_dataset(name, config)
    except Exception as error:  # the package and its dependencies raise many kinds
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = (
            "check the name, data.args.config and the network; a local folder works without one:"
            " hf:./folder"
        )
        raise UsageError(
            f"hf:{name} can't be loaded", where="data.name", why=why, fix=fix
        ) from error


SIZES = (8, 16, 32)


class Images(CollatingDataset):
    """Samples `{"image": float32 [1, S, S] in [0, 1], "label": int64 []}`."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        samples = torch.tensor(indices)
        return {"image": self.images[samples], "label": self.labels[samples]}


def digits(*, image_size: int = 32, validation_fraction: float = 0.1) -> Data:
    """Return 1797 handwritten digits of scikit-learn, 8 × 8 pixels, enlarged; no download.

    The last `validation_fraction`, mostly of other writers, is the validation data. Source: E.
    Alpaydin, C. Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning
    Repository, 1998.
    """
    check_fraction(validation_fraction)
    if image_size not in SIZES:
        what = f"digits has no image_size {image_size!r}"
        raise UsageError(
            what, where="data.args.image_size", fix=f"choose {', '.join(map(str, SIZES))}"
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        what = "the data set digits needs scikit-learn"
        raise UsageError(what, where="data.name: digits", fix="pip install scikit-learn") from None
    loaded = load_digits()
    small = torch.from_numpy(loaded.images).float().div(16)[:, None]  # pixels are 0 … 16
    images = (
        small
        if image_size == 8
        else F.interpolate(small, size=(image_size, image_size), mode="bilinear")
    )
    labels = torch.from_numpy(loaded.target).long()
    border = len(labels) - int(len(labels) * validation_fraction)
    validation = Images(images[border:], labels[border:]) if border < len(labels) else None
    facts = {"image_size": image_size, "channels": 1, "source": "scikit-learn's handwritten digits"}
    return Data(Images(images[:border], labels[:border]), validation, facts)
