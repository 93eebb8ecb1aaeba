"""Makes pairs of conversations of rows that hold two answers, of which one was preferred.

| the fields hold | as in | a conversation is |
|---|---|---|
| a prompt and two texts | TRL | a message of the user, and one of the assistant |
| a prompt and two lists of messages | TRL | the prompt's messages and the answer's |
| two lists of messages, with the prompt | TRL, UltraFeedback | as it stands |
| `input: {"messages": …}` and two lists | OpenAI | the input's messages and the answer's |
| two texts, with the prompt | Anthropic's HH-RLHF | no conversation: the text as it stands |

What both begin with is the prompt, and what follows is trained.

Tests: tests/data/test_answer_pairs.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.prompts import answer_messages, prompt_messages, untrained
from lockstep.errors import UsageError, listed
from lockstep.files.data_files import PROMPTS_OF_PAIRS
from lockstep.files.row_fields import (
    field_of_row,
    has_field,
    names_of_fields,
    with_messages_read,
)

PROMPT = "prompt"  # the field of a prompt where no other is named
_OF_ANSWERS = ("assistant", "gpt")  # the roles in OpenAI's form and in ShareGPT's


@dataclass(frozen=True)
class AnswerPair:
    """Two conversations that begin alike, and end with a better and a worse answer.

    Or two texts, in which somebody has put prompt and answer together.
    """

    chosen: list[Any] | str
    rejected: list[Any] | str
    tools: Sequence[Any] | None = None  # tools that the template lists


def pair_of(
    row: Mapping[str, Any], prompts: Sequence[str], chosen: str, rejected: str, where: str
) -> AnswerPair:
    """Return the two conversations, or the two texts, of a row, or raise a UsageError.

    Args:
        row: a line or a row of a table.
        prompts: the fields of the prompt; empty: `prompt`, where the row has one.
        chosen: the field of the better answer.
        rejected: the field of the other one.
        where: the row, for messages.
    """
    for key, names in (
        ("prompt_field", prompts),
        ("chosen_field", [chosen]),
        ("rejected_field", [rejected]),
    ):
        absent = [name for name in names if not has_field(row, name)]
        if absent:
            what = f"there is no {absent[0]!r} in {where}"
            fix = f"name the fields of the pair: it has {listed(names_of_fields(row)) or 'none'}"
            raise UsageError(what, where=key, fix=fix)
    if (texts := _whole_texts(row, prompts, chosen, rejected)) is not None:
        return AnswerPair(*texts)
    better = _messages(field_of_row(row, chosen), chosen, where)
    worse = _messages(field_of_row(row, rejected), rejected, where)
    given, tools = _prompt_and_tools(row, prompts)
    if _is_whole(better) != _is_whole(worse):
        what = f"one answer of {where} is a conversation with its prompt, and the other is not"
        raise UsageError(what, where=where, fix="write both in one way, or leave the row out")
    if not _is_whole(better):
        if not given:
            what = f"the answers of {where} have no prompt"
            fix = f"name its field: prompt_field: NAME; the row has {listed(list(row))}"
            raise UsageError(what, where="prompt_field", fix=fix)
        asked = prompt_messages(given, prompts or (PROMPT,), where)
        better = [*asked, *better]
        worse = [*asked, *worse]

    shared = 0
    while shared < min(len(better), len(worse)) and better[shared] == worse[shared]:
        shared += 1
    prompt = untrained(better[:shared])
    return AnswerPair([*prompt, *better[shared:]], [*prompt, *worse[shared:]], tools)


def _whole_texts(
    row: Mapping[str, Any], prompts: Sequence[str], chosen: str, rejected: str
) -> tuple[str, str] | None:
    """Return two texts that hold their prompt; None where a row has another field for it."""
    if prompts or any(has_field(row, name) for name in PROMPTS_OF_PAIRS):
        return None
    better = with_messages_read(field_of_row(row, chosen))
    worse = with_messages_read(field_of_row(row, rejected))
    if not (isinstance(better, str) and isinstance(worse, str)):
        return None
    return (better, worse) if better and better[:1] == worse[:1] else None


def _messages(given: Any, name: str, where: str) -> list[Any]:
    """Return the messages of an answer, or of a conversation that ends with one."""
    return [given] if isinstance(given, Mapping) else answer_messages(given, name, where)


def _prompt_and_tools(
    row: Mapping[str, Any], prompts: Sequence[str]
) -> tuple[list[Any], Sequence[Any] | None]:
    """Return what the fields of a prompt hold, as far as they are filled, and the row's tools."""
    tools = row.get("tools")
    values = [with_messages_read(field_of_row(row, name)) for name in prompts or (PROMPT,)]
    given = [value for value in values if value not in (None, "")]
    if len(given) == 1 and isinstance(given[0], Mapping) and "messages" in given[0]:
        tools = tools or given[0].get("tools")
        given = [given[0]["messages"]]
    return given, tools or None


def _is_whole(messages: Sequence[Any]) -> bool:
    """Return whether messages begin with a prompt: with somebody else than the assistant."""
    first = messages[0] if messages else None
    if not isinstance(first, Mapping):
        return False
    return first.get("role", first.get("from")) not in _OF_ANSWERS
