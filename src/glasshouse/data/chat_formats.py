"""Conversations as published datasets have them: messages, ShareGPT's turns, prompts, and Alpaca's columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError

# The columns of each format, the first that a file has being read.
FORMATS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
ROLES = {  # of ShareGPT's turns
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}


def find_format(columns: Collection[str]) -> tuple[str, ...] | None:
    """Return the columns that hold conversations, by their names; None if there are none.

    >>> find_format(["id", "conversations"]), find_format(["output", "instruction", "text"])
    (('conversations',), ('instruction', 'output'))
    """
    return next((names for names in FORMATS if set(names) <= set(columns)), None)


def normalize(values: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    r"""Return messages, or a prompt and its completion, of the columns of one record.

    >>> normalize(([{"from": "human", "value": "A rose?"}, {"from": "gpt", "value": "Yes."}],), "line 1")
    ([{'role': 'user', 'content': 'A rose?'}, {'role': 'assistant', 'content': 'Yes.'}],)
    >>> normalize(("Name a flower.", "It is red.", "The rose."), "line 1")
    ('Name a flower.\n\nIt is red.', 'The rose.')
    """
    match values:
        case ([{"from": _}, *_] as turns,):
            return ([_message(turn, number, where) for number, turn in enumerate(turns, 1)],)
        case (instruction, given, output):
            if not isinstance(instruction, str) or not isinstance(given, str | None):
                raise InputError(
                    f"{where} has the instruction {instruction!r} and the input {given!r}, but they must be strings, "
                    "and the input may be empty; fix it."
                )
            return (f"{instruction}\n\n{given}" if given and given.strip() else instruction, output)
    return values


def _message(turn: object, number: int, where: str) -> dict[str, Any]:
    match turn:
        case {"from": str(speaker), "value": content}:
            if speaker not in ROLES:
                raise InputError(
                    f"{where} has a turn from {speaker!r}, which is not known; {did_you_mean(speaker, ROLES)}"
                )
            return {"role": ROLES[speaker], "content": content}
    found = ", ".join(map(str, turn)) if isinstance(turn, Mapping) else type(turn).__name__
    raise InputError(f"{where} has a turn {number} of {found}, but a turn has from and value; fix it.")
