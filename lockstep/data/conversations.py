"""Turns conversations into tokens, and finds those that a model is trained to write.

What is trained is found by rendering. For the answer at place i of a conversation, the tokenizer's
chat template renders the messages before it and asks for an answer; then it renders them with the
answer. What the second has beyond the first is what a model has to write, its stop token included:

    asked     <user>2 + 2?<end><assistant>
    answered  <user>2 + 2?<end><assistant>4<end>, a new line
    trained                               4<end>

The template's own mask (`{% generation %}`) is not used: most templates that are in use have none,
or mark everything.

- Where the rendering of a later answer begins with that of an earlier one, both are trained in one
  document. A template may reword earlier answers, for instance leave out what was thought; then
  each answer stands in a document of its own, in which it is seen as it is when it is asked for.
- An answer after which the template writes no special token gets the tokenizer's `eos_token`: else
  a model would never learn to stop.
- Where the prompt that asks ends in words with which the answer does not begin (`<think>`), the
  answer's begin is found by rendering other answers in its place.
- A special token is one where the template writes it. Where a message holds its text, it is text:
  who writes `<end>` into a question ends nothing. So a mark is put into it before the template sees
  it, and taken out before the rendering is encoded.
- Messages of ShareGPT's form, `{"from": "human", "value": "…"}`, are read as those of OpenAI's.
- What a message says may be a list of parts, `{"type": "text", "text": "…"}`. Templates take texts,
  or such lists, or both; how one renders them says which (`_Contents`).
- A message of the assistant with `"weight": 0` is read and not trained, as in the chat format of
  OpenAI; with 1, or without a weight, it is trained. The template does not see the weight.

Tests: tests/data/test_conversations.py
"""

import json
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.language import Tokenizer
from lockstep.errors import UsageError, did_you_mean, first_line, listed
from lockstep.machine.quiet_imports import without_warnings_of_imports

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
_PROBES = ("A", "b")  # answers with other first letters: one of them differs from any answer
_OWN_DOCUMENT = "answers stand in documents of their own: the template rewords them later"
_OTHER_BEGIN = "answers do not begin as the template's prompt for an answer ends"
_AS_TEXT = "messages hold the text of a special token, which is encoded as text"
_NOT_TRAINED = "answers have the weight 0, or stand in a prompt: they are read, and not trained"
_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")  # OpenAI's names of a part that is text
_BETWEEN_PARTS = "\n"  # where a template takes texts alone, as vLLM joins them
_MARK = "\ue0a5"  # of Unicode's private area, after the first character of a special token's text

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Trained:
    """A document, and which of its tokens are trained."""

    tokens: NDArray[Any]
    trained: NDArray[np.bool_]


@dataclass
class _Rendered:
    """The text of a document, and the parts of it that are trained."""

    text: str  # as rendered
    spans: list[tuple[int, int]]  # of characters
    stop: str = ""  # what the last answer lacks


class _Contents:
    """Tells what a template takes as the content of a message: a text, or a list of parts.

    Args:
        render: the text of a conversation, or None if the template fails.
    """

    _WORDS = ("first words", "second words")

    def __init__(self, render: Callable[[Messages], str | None]) -> None:
        parts = [{"type": "text", "text": each} for each in self._WORDS]

        def says(content: Any, words: Sequence[str]) -> bool:
            """Return whether a rendering has the words; as Python writes a list does not count."""
            rendered = render([{"role": "user", "content": content}]) or ""
            is_list = "'type':" in rendered or '"type":' in rendered
            return not is_list and all(each in rendered for each in words)

        self._takes_parts = says(parts, self._WORDS)
        # A template for parts goes through the letters of a text, or fails; some take one part.
        first = self._WORDS[:1]
        self._takes_text = says(first[0], first) or not says(parts[:1], first)

    def fitted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message whose content is what the template takes."""
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            content = _BETWEEN_PARTS.join(part["text"] for part in content)
        if isinstance(content, str) and not self._takes_text:
            content = [{"type": "text", "text": content}]
        return message if content is message.get("content") else {**message, "content": content}


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of a folder that also describes the template, as `save_pretrained` writes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._library = _with_template(library_tokenizer(tokenizer), tokenizer)
        self._specials = tokenizer.special_tokens()
        self._lacking = _lacking(tokenizer, self._library)
        longest_first = sorted({*self._specials, *self._lacking}, key=len, reverse=True)
        self._lacked = re.compile("|".join(map(re.escape, self._lacking)) or "(?!)")
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        marked = (re.escape(text[:1] + _MARK + text[1:]) for text in longest_first)
        self._marked = re.compile("|".join(marked) or "(?!)")
        self._contents = _Contents(self._tried)
        self.notes: Counter[str] = Counter()  # what is worth knowing, and how often it was met

    @property
    def text(self) -> str:
        """The template, and what else decides how conversations are rendered."""
        return json.dumps([self._library.chat_template, self._library.eos_token])

    def documents(
        self, messages: Any, where: str, tools: Sequence[Any] | None = None
    ) -> Iterator[Trained]:
        """Yield the documents of a conversation; none if no answer in it is trained.

        Raises:
            UsageError: the messages are not a conversation, or the template fails; with `where`.
        """
        weighed = _checked(messages, where)
        trained = [_is_trained(each, number, where) for number, each in enumerate(weighed, start=1)]
        checked = [self._without_specials(_without_weight(message)) for message in weighed]
        draft: _Rendered | None = None
        for index, message in enumerate(checked):
            if message["role"] != ANSWERS:
                continue
            if not trained[index]:
                self.notes[_NOT_TRAINED] += 1
                continue
            answered = self._render(checked[: index + 1], where, tools)
            begin = self._begin(checked, index, answered, where, tools)
            end, stop = self._end(answered, begin, where)
            if draft is not None and (draft.stop or not answered.startswith(draft.text)):
                self.notes[_OWN_DOCUMENT] += 1
                yield self._encoded(draft, where)
                draft = None
            spans = [] if draft is None else draft.spans
            draft = _Rendered(answered, [*spans, (begin, end)], stop)
        if draft is not None:
            yield self._encoded(draft, where)

    def _without_specials(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with marks in what would be read as special tokens."""
        marked = {
            key: value if key == "role" else self._with_marks(value)
            for key, value in message.items()
        }
        if marked != message:
            self.notes[_AS_TEXT] += 1
        return marked

    def _with_marks(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][:1] + _MARK + match[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self._with_marks(each) for key, each in value.items()}
        return [self._with_marks(each) for each in value] if isinstance(value, list) else value

    def _begin(self, messages: Messages, index: int, answered: str, where: str, tools: Any) -> int:
        """Return where the answer begins within the rendering that ends with it."""
        asked = self._render(messages[:index], where, tools, asks=True) if index else None
        if asked is not None and answered.startswith(asked):
            return len(asked)

        # The answer begins where renderings of other answers begin to differ.
        others = [
            self._render([*messages[:index], {**messages[index], "content": probe}], where, tools)
            for probe in _PROBES
        ]
        begin = min(_common(answered, other) for other in others)
        if asked is None:
            return begin
        if _common(asked, answered) < begin:
            what = f"what is trained of {where} can't be told: message {index + 1} is an answer"
            why = "the chat template rewords what stands before it once the answer is there"
            fix = "use a chat template whose prompt for an answer is the begin of the conversation"
            raise UsageError(what, where="data.args.tokenizer", why=why, fix=fix)
        self.notes[_OTHER_BEGIN] += 1
        return begin

    def _end(self, answered: str, begin: int, where: str) -> tuple[int, str]:
        """Return where the answer ends, its stop token included, and the stop that it lacks."""
        written = answered[begin:].rstrip()
        end = begin + len(written)
        stop = self._library.eos_token
        stops = (*self._specials, stop) if stop else self._specials
        if written.endswith(tuple(stops)):
            return end, ""
        if not stop:
            what = f"nothing ends the answers of {where}"
            why = "the chat template writes no special token, and the tokenizer has no eos_token"
            fix = "name an eos_token in tokenizer_config.json"
            raise UsageError(what, where="data.args.tokenizer", why=why, fix=fix)
        return end, str(stop)

    def _render(self, messages: Messages, where: str, tools: Any, *, asks: bool = False) -> str:
        """Return the text of a conversation; `asks`: and the prompt for an answer."""
        fitted = [self._contents.fitted(message) for message in messages]
        try:
            text = self._library.apply_chat_template(
                fitted, tools=tools, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # a template raises what it likes, and jinja many kinds
            what = f"the chat template fails for {where}, up to message {len(messages)}"
            fix = "write conversations as the template wants them, or use another template"
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(what, where="data.args.tokenizer", why=why, fix=fix) from None
        return str(text)

    def _tried(self, messages: Messages) -> str | None:
        """Return the text of a conversation that somebody made up; None if the template fails."""
        try:
            return str(self._library.apply_chat_template(list(messages), tokenize=False))
        except Exception:  # a template raises what it likes
            return None

    def _encoded(self, draft: _Rendered, where: str) -> Trained:
        """Return the tokens of a draft, up to the end of its last answer."""
        spans = list(draft.spans)
        begin, end = spans[-1]
        text = draft.text[:end] + draft.stop
        spans[-1] = (begin, len(text))
        lacked = self._lacked.search(text)
        if lacked is not None:
            self._tokenizer.require_its_own(text, f"the conversation of {where}", [lacked[0]])

        # Without the marks, and where what they marked is then.
        marks = [match.start() + 1 for match in self._marked.finditer(text)]
        texts = [
            (match.start() - number, match.end() - number - 1)
            for number, match in enumerate(self._marked.finditer(text))
        ]
        spans = [(a - bisect_left(marks, a), b - bisect_left(marks, b)) for a, b in spans]
        text = "".join(text[a:b] for a, b in _between(marks, len(text)))

        tokens, ranges = self._tokenizer.encode_with_ranges(text)
        if texts:
            tokens, ranges = self._as_text(text, tokens, ranges, texts)
        trained = np.zeros(len(tokens), np.bool_)
        for begin, end in spans:
            trained |= (ranges[:, 0] < end) & (ranges[:, 1] > begin)
        return Trained(tokens, trained)

    def _as_text(
        self,
        text: str,
        tokens: NDArray[Any],
        ranges: NDArray[np.int64],
        texts: Sequence[tuple[int, int]],
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the tokens, with those of their text for special tokens that lie in `texts`."""
        special = np.isin(tokens, list(self._specials.values()))
        begins = np.array([begin for begin, _ in texts])
        ends = np.array([end for _, end in texts])
        within = (ranges[:, :1] < ends) & (ranges[:, 1:] > begins)
        parts: list[NDArray[Any]] = []
        part_ranges: list[NDArray[np.int64]] = []
        for index, replaced in enumerate(special & within.any(1)):
            begin, end = ranges[index]
            part = self._tokenizer.encode_as_text(text[begin:end]) if replaced else tokens[[index]]
            parts.append(part)
            part_ranges.append(np.repeat(ranges[[index]], len(part), 0))
        return np.concatenate(parts), np.concatenate(part_ranges)


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer as transformers loads it, or raise a UsageError."""
    where = "data.args.tokenizer"
    if tokenizer.file is None or not os.path.isdir(tokenizer.name):
        what = f"the tokenizer {tokenizer.name} has no chat template"
        fix = "name the folder of a Hugging Face model with one: tokenizer: FOLDER"
        raise UsageError(what, where=where, fix=fix)
    try:
        with without_warnings_of_imports():
            import transformers
    except ImportError:
        what = "chat templates need the package transformers"
        fix = 'pip install "lockstep-train[transformers]"'
        raise UsageError(what, where=where, fix=fix) from None
    kind: Any = transformers.AutoTokenizer
    folder = Path(tokenizer.name)
    try:
        of_library = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds
        what = f"transformers can't load the tokenizer of {folder}"
        raise UsageError(what, where=where, why=first_line(error)) from None
    return of_library


def _with_template(of_library: Any, tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of transformers, or raise a UsageError if it has no chat template."""
    if not of_library.chat_template:
        what = f"the tokenizer of {tokenizer.name} has no chat template"
        fix = "put a chat_template.jinja beside its tokenizer.json, or use a chat model's folder"
        raise UsageError(what, where="data.args.tokenizer", fix=fix)
    return of_library


def _lacking(tokenizer: Tokenizer, library: Any) -> list[str]:
    """Return the special tokens that transformers adds to those of tokenizer.json, longest first.

    It does where only tokenizer_config.json names them.
    """
    named = sorted(set(library.all_special_tokens), key=len, reverse=True)
    numbers = library.convert_tokens_to_ids(named)
    return [
        text
        for text, number in zip(named, numbers, strict=True)
        if tokenizer.encode(text) != [number]
    ]


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages without empty fields, or raise a UsageError that names the wrong one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        kind = "empty" if messages in ([], ()) else f"{type(messages).__name__}, not a list"
        what = f"the conversation of {where} is {kind}"
        raise UsageError(what, where=where, fix='write [{"role": "user", "content": "…"}, …]')
    return [_message(message, number, where) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    """Return a message without empty fields, or raise a UsageError."""
    fix = 'write {"role": "user", "content": "…"}'
    if not isinstance(message, Mapping):
        what = f"message {number} of {where} is {type(message).__name__}, not an object"
        raise UsageError(what, where=where, fix=fix)
    # A table has each field in each row.
    filled = {str(key): value for key, value in message.items() if value is not None}
    if {"from", "value"} <= filled.keys() and "role" not in filled:
        filled = _of_sharegpt(filled)
    for key in ("role", "content"):
        if key not in filled and not (key == "content" and "tool_calls" in filled):
            what = f"there is no {key!r} among the fields of message {number} of {where}"
            why = f"it has {listed(list(filled)) or 'nothing'}"
            raise UsageError(what, where=where, why=why, fix=fix)
    role = filled["role"]
    if role not in ROLES:
        what = f"message {number} of {where} has the role {role!r}{did_you_mean(str(role), ROLES)}"
        raise UsageError(what, where=where, fix=f"write one of {', '.join(ROLES)}")
    content = filled.get("content", "")
    if isinstance(content, list):
        return {**filled, "content": [_part(part, number, where) for part in content]}
    if not isinstance(content, str):
        what = f"the content of message {number} of {where} is {type(content).__name__}, not text"
        raise UsageError(what, where=where, fix=fix)
    return filled


def _part(part: Any, number: int, where: str) -> dict[str, str]:
    """Return a part of the content of a message, or raise a UsageError if it is not text.

    `number` counts the messages of a conversation from 1.
    """
    is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
    if is_text and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    what = f"the content of message {number} of {where} has a part of the type {kind!r}"
    why = "models of texts are trained on texts alone"
    fix = 'write {"type": "text", "text": "…"}, or leave the row out'
    raise UsageError(what, where=where, why=why, fix=fix)


def _of_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of ShareGPT's form, `{"from": "human", "value": "…"}`, in that of OpenAI."""
    named = {"from": "role", "value": "content"}
    renamed = {named.get(key, key): value for key, value in message.items()}
    renamed["role"] = _OF_SHAREGPT.get(str(renamed["role"]), renamed["role"])
    return renamed


def _is_trained(message: Mapping[str, Any], number: int, where: str) -> bool:
    """Return whether a message is trained if it is an answer, or raise a UsageError.

    `number` counts the messages of a conversation from 1.
    """
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        what = f"message {number} of {where} has the weight {weight!r}"
        why = "an answer is trained or it is not: each token counts once in a language model's loss"
        fix = (
            "write 1 or 0, or leave the weight out; a share of all that is trained is the weight of"
            " a source"
        )
        raise UsageError(what, where=where, why=why, fix=fix)
    role = message["role"]
    if "weight" in message and weight and role != ANSWERS:
        what = f"message {number} of {where} has a weight, and its role is {role!r}"
        why = f"what the {ANSWERS} says is trained, and nothing else"
        raise UsageError(what, where=where, why=why, fix="leave the weight out, or write 0")
    return bool(weight)


def _without_weight(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


def _between(marks: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a text that marks of one character divide."""
    begin = 0
    for mark in marks:
        yield begin, mark
        begin = mark + 1
    yield begin, length


def _common(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their begin."""
    shorter = min(len(first), len(second))
    for index in range(shorter):
        if first[index] != second[index]:
            return index
    return shorter
