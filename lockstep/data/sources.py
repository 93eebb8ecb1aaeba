"""Reads what a config says of sources of documents, and opens them.

A source is a folder that `lockstep data prepare` made, which is read on demand, or files, which
each process tokenizes and keeps in memory.

Tests: tests/data/test_sources.py
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.conversations import ChatTemplate
from lockstep.data.document_files import Field, records_of
from lockstep.data.encoding import Encoder, in_one_process
from lockstep.data.filters import Filters, told
from lockstep.data.gathering import Gathered, Gatherer
from lockstep.data.language import Tokenizer, Tokens
from lockstep.data.mixing import draws_by_weight
from lockstep.data.packing import Ends
from lockstep.data.token_folder import (
    TOKENS,
    TokenFile,
    ends_of,
    holds_pairs,
    read_header,
    tokenizer_of,
    trained_of,
)
from lockstep.errors import UsageError, did_you_mean
from lockstep.files.data_files import HEADER, files_of, line_of_data, told_of_json
from lockstep.files.paths import local_path
from lockstep.machine.environment import rank_facts
from lockstep.machine.progress import progress_of

_FILTERS = {"min_tokens": int, "max_tokens": int, "keep": str}
_SHARES = {"weight": (int, float), "epochs": (int, float)}
_FIELDS = {
    "text_field": str,
    "messages_field": str,
    "prompt_field": (str, list),
    "answer_field": str,
}
_OF_PAIRS = {"prompt_field": (str, list), "chosen_field": str, "rejected_field": str}
_SPECIAL = "special_tokens"
_KEYS_OF_PAIRS: dict[str, Any] = {
    "path": str,
    **_OF_PAIRS,
    _SPECIAL: bool,
    **_SHARES,
    **_FILTERS,
}
_KEYS: dict[str, Any] = {"path": str, **_FIELDS, _SPECIAL: bool, **_SHARES, **_FILTERS}
KEYS_OF_STREAMS = {"split": str, "config": str}  # further ones, of data sets of the hub
_KINDS: dict[Any, str] = {
    str: "a text",
    bool: "true or false",
    (str, list): "a name, or a list of names",
}
_EXAMPLE = "write sources: [{path: pages.jsonl, weight: 0.7}, {path: notes, weight: 0.3}]"


@dataclass(frozen=True)
class DescribedSource:
    """A source as a config describes it."""

    where: str  # the key, for messages: data.args.sources[0]
    path: str
    settings: Mapping[str, Any]  # its other keys
    holds_pairs: bool = False  # of answers
    longest: int | None = None  # tokens of a document that can be used; unset: any number

    @property
    def filled(self) -> Mapping[str, Any]:
        """Its keys, with what the rows of pairs have where it does not say so."""
        if not self.holds_pairs:
            return self.settings
        return {"chosen_field": "chosen", "rejected_field": "rejected", **self.settings}


@dataclass(frozen=True)
class Source:
    """The tokens of a source, and where its documents end among them."""

    where: str
    path: str
    tokens: Tokens
    ends: Ends
    tokenizer: Tokenizer
    trained: Tokens | None = None  # of conversations: which tokens are targets
    notices: Sequence[str] = ()  # what was left out, and what else is worth knowing


def described(
    given: Any, where: str, more: Mapping[str, Any] | None = None
) -> list[DescribedSource]:
    """Return the sources that a config lists, each a path or a dict; raise a UsageError if bad.

    `more`: further keys that a source may have, and their types.
    """
    entries = _entries(given, where)
    keys = {**_KEYS, **(more or {})}
    return [_one(entry, f"{where}[{number}]", keys) for number, entry in enumerate(entries)]


def described_pairs(given: Any, where: str, max_tokens: int) -> list[DescribedSource]:
    """Return the sources of pairs of answers that a config lists; raise a UsageError if bad.

    `max_tokens`: of a pair, at most.
    """
    entries = _entries(given, where)
    sources = [
        _one(entry, f"{where}[{number}]", _KEYS_OF_PAIRS) for number, entry in enumerate(entries)
    ]
    return [replace(source, holds_pairs=True, longest=max_tokens) for source in sources]


def check_sources(data_set: str, args: Mapping[str, Any]) -> None:
    """Raise the UsageError about sources that a data set's arguments list; no file is read."""
    describers: dict[str, Callable[..., list[DescribedSource]]] = {
        "documents": described,
        "stream": partial(described, more=KEYS_OF_STREAMS),
        "preferences": partial(described_pairs, max_tokens=1),
    }
    if data_set not in describers:
        return
    for key in ("sources", "validation"):
        if args.get(key) is not None:
            require_shares(describers[data_set](args[key], f"data.args.{key}"))


def _entries(given: Any, where: str) -> Sequence[Any]:
    """Return the sources that a config lists, as it has them; raise a UsageError without any."""
    entries = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(entries, Sequence) or not entries:
        what = "there are no sources" if not entries else f"{where} is no list of sources"
        raise UsageError(what, where=where, fix=_EXAMPLE)
    return entries


def _one(entry: Any, where: str, keys: Mapping[str, Any]) -> DescribedSource:
    """Return one entry of a list of sources, whose keys and values are checked."""
    if isinstance(entry, str):
        return DescribedSource(where, entry, {})
    if not isinstance(entry, Mapping):
        what = f"a source is {entry!r:.60}, which is neither a path nor a dict"
        raise UsageError(what, where=where, fix=_EXAMPLE)
    for key, value in entry.items():
        if key not in keys:
            what = f"a source takes no {key!r}{did_you_mean(str(key), keys)}"
            raise UsageError(what, where=f"{where}.{key}", fix=f"it takes {', '.join(keys)}")
        if not isinstance(value, keys[key]) or isinstance(value, bool) != (keys[key] is bool):
            kind = _KINDS.get(keys[key], "a number")
            what = f"a source's {key} is {value!r}, which is not {kind}"
            raise UsageError(what, where=f"{where}.{key}", fix=_EXAMPLE)
    if "path" not in entry:
        raise UsageError("a source has no path", where=where, fix=_EXAMPLE)
    _require_one_field(entry, where, keys)
    if _SPECIAL in entry and "chosen_field" not in keys and field_of(entry).holds_messages:
        what = f"special_tokens beside {field_of(entry).key}"
        why = "in conversations the chat template writes special tokens, and messages hold text"
        fix = "leave special_tokens out"
        raise UsageError(what, where=f"{where}.{_SPECIAL}", why=why, fix=fix)
    for key in _SHARES:
        if not 0 <= entry.get(key, 0) < float("inf"):
            what = f"a source has the {key} {entry[key]}"
            raise UsageError(what, where=f"{where}.{key}", fix="write 0 or more")
    settings = {key: value for key, value in entry.items() if key != "path"}
    return DescribedSource(where, entry["path"], settings)


def draws_of(sources: Sequence[DescribedSource], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the draws of each source in a block of the mixture, and the sequences of an epoch.

    Args:
        sizes: the sequences of each source.

    Raises:
        UsageError: the weights add up to nothing, or stand beside `epochs`.
    """
    where = sources[0].where.rpartition("[")[0]
    if require_shares(sources):
        weights = [source.settings["weight"] for source in sources]
        used = [size for size, weight in zip(sizes, weights, strict=True) if weight]
        return draws_by_weight(weights), sum(used)
    times = [source.settings.get("epochs", 1) for source in sources]
    draws = [round(size * number) for size, number in zip(sizes, times, strict=True)]
    if not sum(draws):
        raise _never(where)
    return draws, sum(draws)


def require_shares(sources: Sequence[DescribedSource]) -> bool:
    """Return whether sources are mixed by weight, or raise a UsageError about their shares."""
    where = sources[0].where.rpartition("[")[0]
    with_weight = [source for source in sources if "weight" in source.settings]
    with_epochs = [source for source in sources if "epochs" in source.settings]
    if with_weight and (with_epochs or len(with_weight) < len(sources)):
        other = (with_epochs or [source for source in sources if "weight" not in source.settings])[
            0
        ]
        what = f"{with_weight[0].where} has a weight, and {other.where} has " + (
            "epochs" if with_epochs else "none"
        )
        why = "a weight is a share of all sequences; epochs say how often a source comes"
        raise UsageError(what, where=where, why=why, fix="write weights for all sources, or none")
    weights = [source.settings["weight"] for source in with_weight]
    if weights and not sum(weights) > 0:
        what = f"the weights of the sources add up to {sum(weights)}"
        raise UsageError(what, where=where, fix="write a weight above 0, of at least one")
    if not weights and not any(source.settings.get("epochs", 1) for source in sources):
        raise _never(where)
    return bool(weights)


def _never(where: str) -> UsageError:
    fix = "raise epochs of at least one source"
    return UsageError("no source comes even once", where=where, fix=fix)


def _require_one_field(entry: Mapping[str, Any], where: str, keys: Mapping[str, Any]) -> None:
    """Refuse a source that names several fields for what is trained, or half of a pair."""
    prompts = entry.get("prompt_field", "-")
    if not prompts or not all(isinstance(each, str) for each in prompts):
        what = f"a source's prompt_field is {prompts!r}, which names no fields"
        raise UsageError(what, where=f"{where}.prompt_field", fix="write [instruction, input]")
    if "answer_field" not in keys:  # pairs have another one
        return
    named = [key for key in ("text_field", "messages_field", "answer_field") if key in entry]
    if len(named) > 1:
        what = f"a source has both a {named[0]} and a {named[1]}"
        raise UsageError(what, where=where, fix="keep the one that holds what is trained")
    pair = ("prompt_field", "answer_field")
    for key, other in (pair, pair[::-1]):
        if key in entry and other not in entry:
            what = f"a source has a {key}, and no {other}"
            fix = f"name the field of the {other.removesuffix('_field')}, too: {other}: NAME"
            raise UsageError(what, where=where, fix=fix)


def opened(source: DescribedSource, tokenizer: str | None) -> Source:
    """Open a source, and tokenize it if it is not prepared; raise a UsageError if it is bad."""
    path = local_path(source.path, f"{source.where}.path")
    if (path / HEADER).exists():
        return _prepared(source, path, tokenizer)
    chosen = Tokenizer(tokenizer or "bytes")
    filters = filters_of(source.settings, source.longest)
    field = field_of(source.filled)
    template = template_of(chosen, field)
    gathered = Gathered()
    notes: Counter[str] = Counter()
    gatherer = Gatherer(gathered, filters, notes=notes)
    encoder = Encoder(chosen, filters, template, special_tokens=special_tokens_in(source.settings))
    files = files_of(path, where=f"{source.where}.path")
    size = sum(file.stat().st_size for file in files)
    # every rank tokenizes
    with progress_of(f"tokens of {path}", size, shows=rank_facts().is_main) as advance:
        for file in files:
            for document in in_one_process(records_of(file, field), encoder):
                gatherer.take(document)
            advance(file.stat().st_size)
    tokens = gathered.tokens(chosen.dtype)
    left_out = told(filters.left_out)
    if not len(tokens):
        raise _nothing(source, left_out)
    return Source(
        source.where,
        source.path,
        tokens,
        gathered.ends(),
        chosen,
        gathered.trained(),
        [f"{source.path}: {line}" for line in (left_out, *noted(notes)) if line]
        + told_of_json(files),
    )


def filters_of(settings: Mapping[str, Any], longest: int | None = None) -> Filters:
    """Return which documents are kept; of more than `longest` tokens, none is."""
    given = {key: settings[key] for key in _FILTERS if key in settings}
    if longest is not None:
        given["max_tokens"] = min(given.get("max_tokens", longest), longest)
    return Filters(**given)


def template_of(tokenizer: Tokenizer, field: Field) -> ChatTemplate | None:
    """Return the chat template of rows of conversations; None where they may do without."""
    if not field.holds_messages:
        return None
    if field.rejected is None:
        return ChatTemplate(tokenizer)
    with suppress(UsageError):  # pairs of whole texts need none
        return ChatTemplate(tokenizer)
    return None


def special_tokens_in(settings: Mapping[str, Any]) -> bool:
    """Return whether the text of special tokens in documents becomes those tokens."""
    return bool(settings.get(_SPECIAL, False))


def field_of(settings: Mapping[str, Any]) -> Field:
    """Return which field of a row holds the document."""
    if "messages_field" in settings:
        return Field(settings["messages_field"], holds_messages=True)
    prompts = settings.get("prompt_field", ())
    names = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    if "chosen_field" in settings:
        chosen = settings["chosen_field"]
        return Field(chosen, True, names, settings["rejected_field"])
    if "answer_field" in settings:
        return Field(settings["answer_field"], holds_messages=True, prompts=names)
    return Field(settings.get("text_field", "text"))


def noted(notes: Mapping[str, int]) -> list[str]:
    """Return lines on what was noted while documents were encoded."""
    return [f"{count:,} {note}" for note, count in sorted(notes.items())]


def _prepared(source: DescribedSource, folder: Path, tokenizer: str | None) -> Source:
    """Open a folder of tokens."""
    header = read_header(folder)
    where = f"{source.where}.path"
    if source.holds_pairs and not holds_pairs(header):
        what = f"{source.path} holds documents, and no pairs of answers"
        fix = "prepare it with --chosen-field and --rejected-field, or name the files of rows"
        raise UsageError(what, where=where, fix=fix)
    if holds_pairs(header) and not source.holds_pairs:
        what = f"{source.path} holds pairs of answers, and no other documents"
        fix = f"write {line_of_data('preferences', sources=[source.path])}"
        raise UsageError(what, where=where, fix=fix)
    for key in dict.fromkeys((*_FILTERS, *_FIELDS, *_OF_PAIRS, _SPECIAL)):
        if key in source.settings:
            what = f"{key} beside {source.path}, whose documents are tokens already"
            option = key.replace("_", "-")
            fix = f"leave it out, or prepare them with --{option}"
            raise UsageError(what, where=f"{source.where}.{key}", fix=fix)
    chosen = tokenizer_of(folder, header)
    if tokenizer is not None and Tokenizer(tokenizer).contents != chosen.contents:
        what = f"{source.path} was prepared with another tokenizer than {tokenizer}"
        fix = "leave tokenizer out: prepared folders bring their own"
        raise UsageError(what, where="data.args.tokenizer", fix=fix)
    tokens = TokenFile(folder / TOKENS, header["dtype"], 0, header["num_tokens"])
    return Source(
        source.where,
        source.path,
        tokens,
        ends_of(folder, header),
        chosen,
        trained_of(folder, header),
    )


def require_one_tokenizer(sources: Sequence[Source]) -> None:
    """Refuse sources whose tokens mean different texts."""
    for source in sources:
        if source.tokenizer.contents != sources[0].tokenizer.contents:
            what = f"{source.path} has another tokenizer than {sources[0].path}"
            fix = "prepare both with the same --tokenizer, or write tokenizer: for files"
            raise UsageError(what, where=source.where, fix=fix)


def require_sequences(sources: Sequence[Source], sizes: Sequence[int]) -> None:
    """Refuse sources from which no sequence can be made."""
    for source, size in zip(sources, sizes, strict=True):
        if not size:
            raise _nothing(source, "a document needs a token to read and one to predict")


def _nothing(source: Source | DescribedSource, why: str) -> UsageError:
    what = f"{source.path} has no document to train on"
    return UsageError(what, where=source.where, why=why or None, fix="leave it out, or fill it")
