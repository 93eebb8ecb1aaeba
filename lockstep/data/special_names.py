"""Finds the special tokens that the files beside a `tokenizer.json` name, such as `pad_token`.

Tests: tests/data/test_labelled.py, tests/data/test_masked.py
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.data.language import Tokenizer
from lockstep.errors import UsageError

_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def number_named(
    tokenizer: Tokenizer, key: str, given: str | None, usual: Sequence[str], *others: str
) -> int:
    """Return the number of the token that a data set needs, or raise a UsageError.

    Args:
        tokenizer: with the files beside it.
        key: as tokenizer_config.json and the config call the token: `pad_token`.
        given: the token that the config names; unset: the one of the files, or a usual one.
        usual: texts that such a token has in many tokenizers.
        others: keys of tokens that may stand in its place.
    """
    where = f"data.args.{key}"
    if given is not None:
        number = tokenizer.number_of(given)
        if number is None:
            what = f"the tokenizer {tokenizer.name} has no token {given!r}"
            raise UsageError(what, where=where, fix="name one that it has")
        return number
    folder = None if tokenizer.file is None else tokenizer.file.parent
    named = () if folder is None else _named_in(folder, (key, *others))
    for text in (*named, *usual):
        number = tokenizer.number_of(text)
        if number is not None:
            return number
    what = f"the tokenizer {tokenizer.name} names no {key}"
    fix = f'write {key}: "…", a token that it has, or name one in tokenizer_config.json'
    raise UsageError(what, where=where, fix=fix)


def _named_in(folder: Path, keys: Sequence[str]) -> Iterator[str]:
    """Yield the tokens that files beside a tokenizer.json name, by the first key first."""
    for key in keys:
        for name in _FILES:
            try:
                described = json.loads((folder / name).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError, RecursionError):
                continue
            token = described.get(key) if isinstance(described, Mapping) else None
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str):
                yield text
