"""Renders a conversation with a Jinja chat template into segments of text and special tokens.

Message content is untrusted: it is marked wherever it could be parsed as a special token, and only what the template
itself writes becomes one. Templates are untrusted too and run in a sandbox with a work limit. One limitation: a
template that removes or replaces characters of a message can produce a special token from the rest; that is up to
the template's publisher, not to a user.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, cast

import jinja2

from glasshouse.config import JsonDict, did_you_mean
from glasshouse.errors import InputError
from glasshouse.text.chat.sandbox import DEEPEST, compiled, reads, render

Message = Mapping[str, Any]
MESSAGE_ROLES = ("system", "user", "assistant", "tool", "developer")
DEFAULT_TEMPLATE = """\
{% for message in messages %}
{% set role = "system" if message.role == "developer" else message.role %}
{% if role not in ["system", "user", "assistant"] or message.content is not string %}
{{ raise_exception("it supports only text messages from system (or developer), user and assistant") }}
{% endif %}
{{ "<|" + role + "|>" + message.content + "<|end|>" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""

TYPES = ("text", "function", "image", "image_url", "audio", "video")  # templates compare them, so they are not marked

# A mark is a rare ideograph, not a private-use character, which is escaped when a template prints a list.
_RARE = range(0x30000, 0x3134B)
_IS_RARE = re.compile(f"[{chr(_RARE[0])}-{chr(_RARE[-1])}]")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a rendered conversation that is encoded on its own."""

    text: str
    special: bool  # the text is one special token
    is_assistant: bool  # from an assistant message: fine-tuning trains on it


class EncodedChat(NamedTuple):
    """The ids of a conversation, and which of them belong to assistant turns."""

    ids: list[int]
    assistant_mask: list[bool]


def segments(
    template: str,
    messages: Sequence[Message],
    *,
    special: Collection[str],
    variables: Mapping[str, str] = {},
    add_generation_prompt: bool = False,
    tools: Sequence[JsonDict] = (),
) -> list[Segment]:
    """Render a conversation; `add_generation_prompt` ends it where the assistant's reply begins.

    `special` has the texts of all special tokens, `variables` the other template variables (`bos_token`), `tools`
    the functions that the assistant may call, as JSON schemas.

    An assistant turn starts where the generation prompt for it ends, so a model is trained on exactly what it will
    generate, and includes the special token that closes the turn. Some templates render an earlier turn differently
    once more messages follow. Such a turn is not marked, as no generation prompt leads to it; to train on it, pass
    the conversation up to that turn.

    >>> chat = [{"role": "user", "content": "Say <|end|>!"}, {"role": "assistant", "content": "No."}]
    >>> for segment in segments(DEFAULT_TEMPLATE, chat, special=["<|user|>", "<|assistant|>", "<|end|>"]):
    ...     print(segment)
    Segment(text='<|user|>', special=True, is_assistant=False)
    Segment(text='Say <|end|>!', special=False, is_assistant=False)
    Segment(text='<|end|>', special=True, is_assistant=False)
    Segment(text='<|assistant|>', special=True, is_assistant=False)
    Segment(text='No.', special=False, is_assistant=True)
    Segment(text='<|end|>', special=True, is_assistant=True)
    >>> segments(DEFAULT_TEMPLATE, [{"role": "users", "content": "Hello"}], special=[])
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: message 0 has the role 'users', which is not known; did you mean user?
    """
    known = _special(frozenset(special))
    if tools and not reads(template, "tools"):
        raise InputError("the chat template does not take tools; leave them out, or choose another template.")
    writer = _Writer.of(template, messages, known, variables, tools)
    rendered = writer.write(len(messages), add_generation_prompt)
    result: list[Segment] = []
    at = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if span := _assistant_span(writer, rendered, index, known.find):
            start, end = max(span[0], at), max(span[1], at)  # a turn of white space can lie within the previous one
            result += writer.split(rendered[at:start], known.find, is_assistant=False)
            result += writer.split(rendered[start:end], known.find, is_assistant=True)
            at = end
        elif index == len(messages) - 1 and not add_generation_prompt:
            raise InputError(
                f"message {index} does not continue the template's generation prompt, since the template rewrites "
                "earlier messages or the start of the reply; choose another template."
            )
    return result + writer.split(rendered[at:], known.find, is_assistant=False)


def _assistant_span(writer: _Writer, rendered: str, index: int, find: re.Pattern[str]) -> tuple[int, int] | None:
    try:
        before = writer.write(index, add_generation_prompt=True)
    except InputError:  # many templates refuse a conversation that starts with the assistant
        return None
    if not rendered.startswith(before):
        return None
    start, message = len(before), writer.messages[index]
    content = message["content"].strip() if isinstance(message.get("content"), str) else ""
    if content and message.keys() == {"role", "content"}:
        at = len(rendered) - len(rendered[start:].lstrip())
        close = find.search(rendered, at + len(content))
        if rendered.startswith(content, at) and close and not rendered[at + len(content) : close.start()].strip():
            return start, close.end()
    # Anything else in the turn is bounded by rendering the conversation up to it.
    whole = writer.write(index + 1, add_generation_prompt=False)
    if not rendered.startswith(whole):
        return None
    ends = [match.end() for match in find.finditer(whole, start)]
    return start, ends[-1] if ends else len(whole)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Renders the first messages of one conversation, with their content marked."""

    template: jinja2.Template
    messages: list[JsonDict]
    tools: list[JsonDict]
    variables: Mapping[str, str]
    marks: Mapping[str, str]  # mark -> what it replaces: nothing, or a single-character special token
    now: datetime
    characters: int

    @classmethod
    def of(
        cls,
        template: str,
        messages: Sequence[Message],
        special: _Special,
        variables: Mapping[str, str],
        tools: Sequence[JsonDict],
    ) -> _Writer:
        """Check messages and tools, and mark them with characters that occur nowhere else."""
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise InputError(f"messages is {reprlib.repr(messages)}, but it must be a list of at least one message.")
        texts = [template, *variables.values(), special.joined]
        plain = [_plain_message(index, message, texts) for index, message in enumerate(messages)]
        plain_tools = [_plain(f"tool {index}", tool, texts) for index, tool in enumerate(tools)]
        used = {rare for text in texts if not text.isascii() for rare in _IS_RARE.findall(text)}
        free = (rare for rare in map(chr, _RARE) if rare not in used)
        marks = dict(zip(free, ("", *special.single), strict=False))
        if len(marks) <= len(special.single):
            raise InputError(
                f"the messages contain every character from U+{_RARE[0]:X} to U+{_RARE[-1]:X}; remove one."
            )
        mark = _Mark(next(iter(marks)), special, {ord(one): rare for rare, one in marks.items() if one})
        marked = [{**_mapped(message, mark), "role": message["role"]} for message in plain]
        marked_tools = [_mapped(tool, mark) for tool in plain_tools]
        return cls(compiled(template), marked, marked_tools, variables, marks, datetime.now(), sum(map(len, texts)))

    def write(self, count: int, add_generation_prompt: bool) -> str:
        """Render the first `count` messages, marks included."""
        variables = {
            **self.variables,
            "messages": self.messages[:count],
            "tools": self.tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(self.template, variables, self.marks, self.now, self.characters)
        except Exception as error:
            reason = " ".join(self.unmarked(str(error)).split()).rstrip(".")
            raise InputError(f"the chat template refuses these messages: {reason or type(error).__name__}.") from None

    def unmarked(self, text: str) -> str:
        """Return the text without marks."""
        for mark, original in self.marks.items():
            text = text.replace(mark, original)
        return text

    def split(self, text: str, find: re.Pattern[str], is_assistant: bool) -> list[Segment]:
        """Split rendered text into its special tokens and the text between them."""
        result, at = [], 0
        for match in find.finditer(text):
            result += [Segment(self.unmarked(text[at : match.start()]), False, is_assistant)]
            result += [Segment(match[0], True, is_assistant)]
            at = match.end()
        result += [Segment(self.unmarked(text[at:]), False, is_assistant)]
        return [segment for segment in result if segment.text]


def _plain_message(index: int, message: object, texts: list[str]) -> JsonDict:
    """Return a checked copy of a message in JSON types, and append all its texts to `texts`."""
    if not isinstance(message, Mapping):
        raise InputError(
            f"message {index} is {reprlib.repr(message)}, but it must be a dictionary with a role and content."
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in MESSAGE_ROLES:
        raise InputError(
            f"message {index} has the role {role!r}, which is not known; {did_you_mean(str(role), MESSAGE_ROLES)}"
        )
    absent = content is None and role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str | list) and not absent:
        shown = reprlib.repr(content)
        raise InputError(f"message {index} has {shown} as its content; give a string or a list of parts.")
    return _plain(f"message {index}", message, texts)


def _plain(name: str, value: object, texts: list[str]) -> JsonDict:
    """Return a copy of a value in JSON types, and append all its texts to `texts`."""

    def collect(text: str, key: bool) -> str:
        texts.append(text)
        return text

    try:
        return cast(JsonDict, _mapped(value, collect))
    except RecursionError:
        raise InputError(f"{name} is nested too deep; give one of at most {DEEPEST} levels.") from None
    except TypeError as error:
        raise InputError(f"{name} contains {error}; give strings, numbers, lists and dictionaries.") from None


def _mapped(value: object, change: Callable[[str, bool], str]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return change(str(value), False)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            change(key, True): item if key == "type" and item in TYPES else _mapped(item, change)
            for key, item in value.items()
        }
    raise TypeError(f"a {type(value).__name__}" + " with keys that are not strings" * isinstance(value, Mapping))


class _Special(NamedTuple):
    """The special tokens, compiled for searching."""

    find: re.Pattern[str]
    first: re.Pattern[str]  # the first character of one, in either direction and any case
    heads: frozenset[str]  # proper suffixes of tokens: a text that starts with one can complete a token
    tails: frozenset[str]  # proper prefixes: a text that ends with one can begin a token
    joined: str
    longest: int
    single: tuple[str, ...]


@lru_cache(maxsize=16)
def _special(texts: frozenset[str]) -> _Special:
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    # A template may reverse a message or uppercase it. A single character of a reversed token does not count: a text
    # often ends in ">", and the other part is marked.
    forms = [(text, 1) for text in longest_first]
    forms += [(text[::-1], 2 if len(text) > 2 else 1) for text in longest_first]
    after: dict[str, list[str]] = {}
    for text, _ in forms:
        if len(text) > 1:
            after.setdefault(re.escape(text[0]), []).append(re.escape(text[1:]))
    heads = {text[-size:].casefold() for text, least in forms for size in range(least, len(text))}
    tails = {text[:size].casefold() for text, least in forms for size in range(least, len(text))}
    return _Special(
        re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
        re.compile("|".join(f"{c}(?={'|'.join(rest)})" for c, rest in after.items()) or "(?!)", re.IGNORECASE),
        frozenset(heads),
        frozenset(tails),
        "\0".join(text for text, _ in forms).casefold(),
        max(map(len, heads | tails), default=0),
        tuple(text for text in longest_first if len(text) == 1),
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    """Inserts a mark wherever a text could be parsed as a special token or a part of one."""

    mark: str
    special: _Special
    single: Mapping[int, str]

    def __call__(self, text: str, key: bool) -> str:
        mark, special = self.mark, self.special
        if not text or (key and text.isidentifier() and not special.find.search(text)):
            return text  # templates look such keys up
        core = text.strip() or text
        lead, _, trail = text.partition(core)  # white space that a template may trim stays outside the marks
        inside = len(core) <= special.longest and core.casefold() in special.joined
        text = mark * self._begins(lead) + lead + mark * (inside or self._begins(core)) + core
        text += mark * self._ends(core) + trail + mark * self._ends(trail)
        text = special.first.sub(lambda first: first[0] + mark, text)
        if not text.isascii() and special.first.search(text.upper()):
            text = mark.join(text)  # one letter can become two in upper case
        return text.translate(self.single) if self.single else text

    def _begins(self, text: str) -> bool:
        sizes = range(1, min(len(text), self.special.longest) + 1)
        return any(text[:size].casefold() in self.special.heads for size in sizes)

    def _ends(self, text: str) -> bool:
        sizes = range(1, min(len(text), self.special.longest) + 1)
        return any(text[-size:].casefold() in self.special.tails for size in sizes)
