"""A conversation to segments of text and special tokens, by a Jinja chat template.

What a message says may come from anyone, so it is marked wherever it could read as a special token, and only what
the template writes itself becomes one. A template may come from anyone too, so it runs in a sandbox that counts its
work. One limit stands: a template that takes characters out of a message, or puts others in their place, can make
a special token of what is left; that is its publisher's doing and not a user's.
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
from glasshouse.text.sandbox import DEEPEST, compiled, render

Message = Mapping[str, Any]
MESSAGE_ROLES = ("system", "user", "assistant", "tool", "developer")
DEFAULT_TEMPLATE = """\
{% for message in messages %}
{% if message.role not in ["system", "user", "assistant"] or message.content is not string %}
{{ raise_exception("it writes messages of text by system, user and assistant, and no other") }}
{% endif %}
{{ "<|" + message.role + "|>" + message.content + "<|end|>" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""

TYPES = ("text", "function", "image", "image_url", "audio", "video")  # compared by templates, so left as they are

# A mark is a rare ideograph and no private character: those are spelled out where a template prints a list.
_RARE = range(0x30000, 0x3134B)
_IS_RARE = re.compile(f"[{chr(_RARE[0])}-{chr(_RARE[-1])}]")


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a conversation that is encoded by itself."""

    text: str
    special: bool  # the text is one special token, to become its id
    is_assistant: bool  # written by the assistant: this is what fine-tuning learns


def segments(
    template: str,
    messages: Sequence[Message],
    *,
    special: Collection[str],
    variables: Mapping[str, str] = {},
    prompt: bool = False,
) -> list[Segment]:
    """Write a conversation by a template; with `prompt` the list ends where the assistant is to write.

    `special` has the texts of all special tokens, `variables` what else the template may name (`bos_token`).

    An answer begins where the prompt for it ends, so a model learns just what it will be asked for, and goes on to
    the special token that closes it. Some templates write an earlier answer differently, or another beginning to
    it, once more messages follow. Such an answer is not marked: no prompt leads to it. To learn from it, give the
    conversation up to there.

    >>> chat = [{"role": "user", "content": "Say <|end|>!"}, {"role": "assistant", "content": "No."}]
    >>> for segment in segments(DEFAULT, chat, special=["<|user|>", "<|assistant|>", "<|end|>"]):
    ...     print(segment)
    Segment(text='<|user|>', special=True, answer=False)
    Segment(text='Say <|end|>!', special=False, answer=False)
    Segment(text='<|end|>', special=True, answer=False)
    Segment(text='<|assistant|>', special=True, answer=False)
    Segment(text='No.', special=False, answer=True)
    Segment(text='<|end|>', special=True, answer=True)
    >>> segments(DEFAULT, [{"role": "users", "content": "Hello"}], special=[])
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: message 0 has the role 'users', which is not known; did you mean user?
    """
    known = _special(frozenset(special))
    writer = _Writer.of(template, messages, known, variables)
    written = writer.write(len(messages), prompt)
    result: list[Segment] = []
    at = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if span := _answer(writer, written, index, known.find):
            start, end = max(span[0], at), max(span[1], at)  # an answer of white space can lie in the one before
            result += writer.split(written[at:start], known.find, answer=False)
            result += writer.split(written[start:end], known.find, answer=True)
            at = end
        elif index == len(messages) - 1 and not prompt:
            raise InputError(
                f"message {index} does not follow from the template's prompt for it, since the template rewrites "
                "earlier messages or the beginning of an answer; choose another template."
            )
    return result + writer.split(written[at:], known.find, answer=False)


def _answer(writer: _Writer, written: str, index: int, find: re.Pattern[str]) -> tuple[int, int] | None:
    try:
        before = writer.write(index, prompt=True)
    except InputError:  # many templates refuse a conversation that the assistant begins
        return None
    if not written.startswith(before):
        return None
    start, message = len(before), writer.messages[index]
    content = message["content"].strip() if isinstance(message.get("content"), str) else ""
    if content and message.keys() == {"role", "content"}:
        begun = len(written) - len(written[start:].lstrip())
        close = find.search(written, begun + len(content))
        if written.startswith(content, begun) and close and not written[begun + len(content) : close.start()].strip():
            return start, close.end()
    # What else an answer holds, and what a template makes of it, is bounded by the conversation up to there.
    whole = writer.write(index + 1, prompt=False)
    if not written.startswith(whole):
        return None
    ends = [match.end() for match in find.finditer(whole, start)]
    return start, ends[-1] if ends else len(whole)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the beginnings of one conversation, its messages marked."""

    template: jinja2.Template
    messages: list[JsonDict]
    variables: Mapping[str, str]
    marks: Mapping[str, str]  # what each stands for: nothing, or a special token of one character
    now: datetime
    characters: int

    @classmethod
    def of(
        cls, template: str, messages: Sequence[Message], special: _Special, variables: Mapping[str, str]
    ) -> _Writer:
        """Check the messages, and mark them with characters that nothing else holds."""
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise InputError(f"messages is {reprlib.repr(messages)}, but it must be a list of at least one message.")
        texts = [template, *variables.values(), special.joined]
        plain = [_plain(index, message, texts) for index, message in enumerate(messages)]
        used = {rare for text in texts if not text.isascii() for rare in _IS_RARE.findall(text)}
        free = (rare for rare in map(chr, _RARE) if rare not in used)
        marks = dict(zip(free, ("", *special.single), strict=False))
        if len(marks) <= len(special.single):
            raise InputError(f"the messages hold every character from U+{_RARE[0]:X} to U+{_RARE[-1]:X}; remove one.")
        mark = _Mark(next(iter(marks)), special, {ord(one): rare for rare, one in marks.items() if one})
        marked = [{**_mapped(message, mark), "role": message["role"]} for message in plain]
        return cls(compiled(template), marked, variables, marks, datetime.now(), sum(map(len, texts)))

    def write(self, count: int, prompt: bool) -> str:
        """Return the text, marks and all, of the first messages."""
        given = {"messages": self.messages[:count], "tools": None, "documents": None, "add_generation_prompt": prompt}
        try:
            return render(self.template, {**self.variables, **given}, self.marks, self.now, self.characters)
        except Exception as error:
            reason = " ".join(self.unmarked(str(error)).split()).rstrip(".")
            raise InputError(f"the chat template refuses these messages: {reason or type(error).__name__}.") from None

    def unmarked(self, text: str) -> str:
        """Return the text as it was given."""
        for mark, meant in self.marks.items():
            text = text.replace(mark, meant)
        return text

    def split(self, text: str, find: re.Pattern[str], answer: bool) -> list[Segment]:
        """Return the special tokens in a stretch of what was written, and what stands between them."""
        result, at = [], 0
        for match in find.finditer(text):
            result += [Segment(self.unmarked(text[at : match.start()]), False, answer)]
            result += [Segment(match[0], True, answer)]
            at = match.end()
        result += [Segment(self.unmarked(text[at:]), False, answer)]
        return [segment for segment in result if segment.text]


def _plain(index: int, message: object, texts: list[str]) -> JsonDict:
    """Return a checked copy of a message in JSON's types, and add all its texts to a list."""
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

    def collect(text: str, key: bool) -> str:
        texts.append(text)
        return text

    try:
        return cast(JsonDict, _mapped(message, collect))
    except RecursionError:
        raise InputError(f"message {index} is nested too deep; give one of at most {DEEPEST} levels.") from None
    except TypeError as error:
        raise InputError(f"message {index} holds {error}; give strings, numbers, lists and dictionaries.") from None


def _mapped(value: object, change: Callable[[str, bool], str]) -> Any:  # noqa: ANN401 - whatever JSON holds
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
    raise TypeError(f"a {type(value).__name__}" + " with keys that are no strings" * isinstance(value, Mapping))


class _Special(NamedTuple):
    """The special tokens, as they are searched for."""

    find: re.Pattern[str]
    first: re.Pattern[str]  # the first character of one, read either way and in any case
    heads: frozenset[str]  # with what a text must begin to end one that something else began
    tails: frozenset[str]
    joined: str
    longest: int
    single: tuple[str, ...]


@lru_cache(maxsize=16)
def _special(texts: frozenset[str]) -> _Special:
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    # A template may turn a message round or write it in capitals. The smaller part of a token read backwards does
    # not count: a text often ends in ">", and the other part is marked.
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
    """Puts a mark wherever a text could be read as a special token, or as a part of one; other texts stay."""

    mark: str
    special: _Special
    single: Mapping[int, str]

    def __call__(self, text: str, key: bool) -> str:
        mark, special = self.mark, self.special
        if not text or (key and text.isidentifier() and not special.find.search(text)):
            return text  # a template looks such a key up
        core = text.strip() or text
        lead, _, trail = text.partition(core)  # what a template may trim stays outside the marks
        inside = len(core) <= special.longest and core.casefold() in special.joined
        text = mark * self._begins(lead) + lead + mark * (inside or self._begins(core)) + core
        text += mark * self._ends(core) + trail + mark * self._ends(trail)
        text = special.first.sub(lambda first: first[0] + mark, text)
        if not text.isascii() and special.first.search(text.upper()):
            text = mark.join(text)  # one letter can be two capitals
        return text.translate(self.single) if self.single else text

    def _begins(self, text: str) -> bool:
        sizes = range(1, min(len(text), self.special.longest) + 1)
        return any(text[:size].casefold() in self.special.heads for size in sizes)

    def _ends(self, text: str) -> bool:
        sizes = range(1, min(len(text), self.special.longest) + 1)
        return any(text[-size:].casefold() in self.special.tails for size in sizes)
