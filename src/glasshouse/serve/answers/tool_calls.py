"""Tool calling: the functions that a client offers, and the calls parsed from the model's output.

One format is supported, that of Hermes and Qwen: JSON between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import Any

from glasshouse.config import JsonDict
from glasshouse.generation.constraints.compiler import JSON_OPTIONS
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import MAX_GRAMMAR, Values, joined_text
from glasshouse.serve.served_model import ServedModel
from glasshouse.web import strict_loads

BEGIN, END = "<tool_call>", "</tool_call>"


def offered_tools(served: ServedModel, values: Values) -> list[JsonDict]:
    """Return the tools of a request in the form that templates take; raise for a model that cannot call them."""
    if not values["tools"] or values["tool_choice"] == "none":
        return []
    template = (served.tok and served.tok.chat_template) or ""
    if BEGIN not in template:
        message = f"{served.name!r} has no chat template that asks for calls between {BEGIN} and {END}; leave it out."
        raise ApiError(f"tools is not supported: {message}", param="tools")
    for other in ("response_format", "grammar"):
        if values.get(other) is not None:
            raise ApiError(f"tools and {other} were both given; leave one out.", param=other)
    tools = []
    for tool in values["tools"]:
        given = tool["function"]
        parameters = json.loads(given["parameters"] or '{"type": "object", "properties": {}}')
        function = {"name": given["name"], "description": given["description"] or "", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def conversation(messages: list[dict[str, Any]]) -> list[JsonDict]:
    """Return messages as chat templates take them: one text each, and the arguments of calls as objects.

    >>> call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    >>> asked = {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None}
    >>> conversation([asked])[0]["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """
    found = []
    for index, message in enumerate(messages):
        where, calls = f"messages[{index}]", message["tool_calls"]
        if message["content"] is None and not calls:
            raise ApiError(
                f"{where}.content is missing; give it.", param=f"{where}.content", code="missing_parameter"
            )
        one: JsonDict = {"role": message["role"], "content": joined_text(message["content"] or "")}
        if calls and message["role"] != "assistant":
            raise ApiError(f"{where} has tool_calls, which only the assistant makes; leave them out.", param=where)
        if calls:
            one["tool_calls"] = [_with_arguments(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        if message["tool_call_id"] is not None:
            one["tool_call_id"] = message["tool_call_id"]
        found.append(one)
    return found


def _with_arguments(call: JsonDict, where: str) -> JsonDict:
    function = call["function"]
    arguments = _parse_json(function["arguments"] or "{}")
    if not isinstance(arguments, dict):
        name = f"{where}.function.arguments"
        raise ApiError(f"{name} is not the JSON of an object; give one.", param=name, code="invalid_value")
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def call_grammar(values: Values) -> str | None:
    """Return the grammar of the call that a request asks for by its `tool_choice`; None where it leaves the choice.

    A call is that of one tool, with arguments by its schema.
    """
    choice = values.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    named = None if choice == "required" else choice["function"]["name"]
    functions = [tool["function"] for tool in values["tools"]]
    asked = [one for one in functions if named in (None, one["name"])]
    if not asked:
        missing = "there are no tools" if named is None else f"no tool is named {named[:64]!r}"
        raise ApiError(f"tool_choice asks for a call, but {missing}; give it.", param="tool_choice")
    begin, end = json.dumps(f"{BEGIN}\n"), json.dumps(f"\n{END}")
    rules = [f"start: {begin} ({' | '.join(f'call_{number}' for number in range(len(asked)))}) {end}"]
    for number, function in enumerate(asked):
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ', ensure_ascii=False)
        schema = {"type": "object", **json.loads(function["parameters"] or "{}"), "x-guidance": JSON_OPTIONS}
        rules += [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: %json {json.dumps(schema)}"]
    grammar = "\n".join(rules)
    if len(grammar) > MAX_GRAMMAR:
        message = f"the tools have {len(grammar)} characters, but a call can be asked for with {MAX_GRAMMAR} at most"
        raise ApiError(f"{message}; offer fewer.", param="tools")
    return grammar


class ToolCallParser:
    r"""Streaming parser that splits an answer into text and tool calls.

    Anything but a call of an offered tool stays text. White space around a call is dropped.

    >>> parser = ToolCallParser({"add"})
    >>> parser.feed("Let me see.\n<tool_")
    ('Let me see.', [])
    >>> text, [call] = parser.feed('call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    >>> text, call["function"]
    ('', {'name': 'add', 'arguments': '{"a": 1}'})
    >>> parser.feed("<tool_call>none</tool_call>", last=True)
    ('<tool_call>none</tool_call>', [])
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""  # buffered: text that may become a call, and white space before it
        self._after_call = False  # only white space came since a call
        self.n_calls = 0

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[JsonDict]]:
        """Return the text and the calls that this piece completes; after the `last`, nothing stays buffered."""
        self._held += text
        written, calls = "", []
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
                self._after_call = not self._held
            begin = self._held.find(BEGIN)
            end = self._held.find(END, begin)
            if begin < 0 or end < 0:
                break
            call = self._parse(self._held[begin + len(BEGIN) : end])
            end += len(END)
            if call is None:
                written += self._held[:end]
            else:
                written += self._held[:begin].rstrip()
                calls.append(call)
            self._held, self._after_call = self._held[end:], call is not None
        certain = len(self._held) if last else self._certain(begin)
        written, self._held = written + self._held[:certain], self._held[certain:]
        return written, calls

    def _certain(self, begin: int) -> int:
        """Return how much of the buffer cannot become a call; `begin` is where a call may have begun, or -1."""
        held = self._held
        if begin < 0:
            sizes = range(min(len(BEGIN) - 1, len(held)), 0, -1)
            begin = len(held) - next((size for size in sizes if held.endswith(BEGIN[:size])), 0)
        return len(held[:begin].rstrip())

    def _parse(self, text: str) -> JsonDict | None:
        found = _parse_json(text)
        if not isinstance(found, dict) or not isinstance(arguments := found.get("arguments", {}), dict):
            return None
        if not isinstance(name := found.get("name"), str) or name not in self._names:
            return None
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "index": self.n_calls}
        self.n_calls += 1
        return {**call, "function": {"name": name, "arguments": json.dumps(arguments)}}


def _parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value, or None
    try:
        return strict_loads(text)
    except (ValueError, RecursionError):
        return None
