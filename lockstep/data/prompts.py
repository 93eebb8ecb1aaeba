"""Makes conversations of rows that hold a prompt in some fields, and its answer in another.

| the fields hold | as in | a conversation is |
|---|---|---|
| texts | Alpaca, question and answer | a message of the user, and one of the assistant |
| lists of messages | TRL's prompt and completion | both, of which the answer's are trained |

Tests: tests/data/test_prompts.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import UsageError, listed
from lockstep.files.row_fields import (
    field_of_row,
    has_field,
    names_of_fields,
    with_messages_read,
)

BETWEEN = "\n\n"  # stands between the texts of several fields of a prompt


def conversation_of(
    row: Mapping[str, Any], prompts: Sequence[str], answer: str, where: str
) -> list[Any]:
    """Return the messages of a row's prompt and answer, or raise a UsageError.

    Args:
        row: a line or a row of a table.
        prompts: the fields whose texts make the prompt; those that are empty are passed over.
        answer: the field of the answer.
        where: the row, for messages.
    """
    for key, names in (("prompt_field", prompts), ("answer_field", [answer])):
        absent = [name for name in names if not has_field(row, name)]
        if absent:
            what = f"there is no {absent[0]!r} in {where}"
            known = listed(names_of_fields(row)) or "none"
            fix = f"name the fields of prompt and answer: it has {known}"
            raise UsageError(what, where=key, fix=fix)
    values = [with_messages_read(field_of_row(row, name)) for name in prompts]
    given = [value for value in values if value not in (None, "")]
    if not given:
        what = f"the prompt of {where} is empty"
        fix = f"fill {listed(list(prompts))}, or leave the row out"
        raise UsageError(what, where=where, fix=fix)
    answered = answer_messages(field_of_row(row, answer), answer, where)
    return [*prompt_messages(given, prompts, where), *answered]


def prompt_messages(given: Sequence[Any], names: Sequence[str], where: str) -> list[Any]:
    """Return the messages of a prompt; answers in it are not trained."""
    if all(isinstance(each, str) for each in given):
        return [{"role": "user", "content": BETWEEN.join(given)}]
    if len(given) == 1 and isinstance(given[0], list):
        return untrained(given[0])
    kinds = listed([type(each).__name__ for each in given])
    what = f"{listed(list(names))} of {where} hold {kinds}, which make no prompt"
    fix = "name fields of texts, or one field that holds a list of messages"
    raise UsageError(what, where=where, fix=fix)


def untrained(messages: Sequence[Any]) -> list[Any]:
    """Return messages of which none is trained; what is not one is refused with all others."""
    return [
        {**message, "weight": 0} if isinstance(message, Mapping) else message
        for message in messages
    ]


def answer_messages(given: Any, name: str, where: str) -> list[Any]:
    """Return the messages of an answer."""
    given = with_messages_read(given)
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    if isinstance(given, list):
        return given
    what = f"{name!r} is {type(given).__name__}, not an answer, in {where}"
    fix = "name a field that holds a text or a list of messages, or leave the row out"
    raise UsageError(what, where=where, fix=fix)
