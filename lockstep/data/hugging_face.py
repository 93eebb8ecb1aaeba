"""`hf:NAME`: a data set of the Hugging Face hub, or a local folder of its files (parquet, JSON, text …).

Every process tokenizes the text itself and holds the tokens in memory: for large data sets write the text out once and
use `lockstep data prepare`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import Data
from lockstep.data.language import TextOptions, document_data, text_data
from lockstep.data.tokenizers import Tokenizer
from lockstep.errors import UsageError


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
) -> Data:
    """Return the data set.

    Args:
        name: of the data set or folder.
        config: one of its configurations, e.g. `wikitext-2-raw-v1`.
        split: the training split.
        validation_split: used if the data set has it; else `validation_fraction` of `split` is held out.
        text_field: the column with the text. Rows are joined, each ending its line; with `documents`, a row is a
            document, padded to `block_size`.
        columns: instead of text: samples are rows of these columns, as tensors where they are numbers.
        block_size, stride, validation_fraction: see `TextOptions`.
        tokenizer: `bytes` or the path of a `tokenizer.json`.
        documents: see `text_field`.

    Raises:
        UsageError: the package is missing, the data set can't be loaded, or it has no such split or column.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    train, validation = _splits(_load(name, config), name, split, validation_split)
    source = f"hf:{name}" + (f" ({config})" if config else "")
    wanted = [text_field] if columns is None else list(columns)
    for column in wanted:
        if column not in train.column_names:
            raise UsageError(
                f"hf:{name} has no column {column!r}",
                where="data.args.text_field" if columns is None else "data.args.columns",
                fix=f"it has {', '.join(train.column_names)}; `columns` takes rows of any of them as samples",
            )
    if columns is not None:
        return _rows(train, validation, wanted, options, source)
    chosen = Tokenizer(tokenizer)
    texts = _encoded(train[text_field], chosen, documents)
    held_out = None if validation is None else _encoded(validation[text_field], chosen, documents)
    if documents:
        first, last = options.split(texts) if held_out is None else (texts, held_out)
        return document_data(first, last, options, source, chosen)
    tokens = _joined(texts, chosen)
    first, last = options.split(tokens) if held_out is None else (tokens, _joined(held_out, chosen))
    return text_data(first, last, options, source, chosen, chosen.vocab_size)


def _load(name: str, config: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"hf:{name} needs the package datasets",
            where="data.name",
            fix="pip install 'lockstep-train[datasets]'",
        ) from None
    try:
        return datasets.load_dataset(name, config)
    except Exception as error:  # the package and its dependencies raise many kinds
        raise UsageError(
            f"hf:{name} can't be loaded",
            where="data.name",
            why=f"{type(error).__name__}: {error}".splitlines()[0],
            fix="check the name, data.args.config and the network; a local folder works without one: hf:./folder",
        ) from error


def _splits(loaded: Any, name: str, split: str, validation_split: str | None) -> tuple[Any, Any]:
    if split not in loaded:
        raise UsageError(
            f"hf:{name} has no split {split!r}", where="data.args.split", fix=f"it has {', '.join(loaded)}"
        )
    return loaded[split], loaded.get(validation_split)


def _rows(train: Any, validation: Any, columns: list[str], options: TextOptions, source: str) -> Data:
    train = train.with_format("torch", columns=columns)
    if validation is not None:
        return Data(train, validation.with_format("torch", columns=columns), {"source": source})
    border = options.border(len(train))
    held_out = train.select(range(border, len(train))) if border < len(train) else None
    return Data(train.select(range(border)), held_out, {"source": source})


def _encoded(rows: Iterable[str], tokenizer: Tokenizer, documents: bool) -> list[NDArray[Any]]:
    ended = rows if documents else (row + "\n" if row and not row.endswith("\n") else row for row in rows)
    return [tokenizer.encode_array(row) for row in ended]


def _joined(texts: list[NDArray[Any]], tokenizer: Tokenizer) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=tokenizer.dtype), *texts])
