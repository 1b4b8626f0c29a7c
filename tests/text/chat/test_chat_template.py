"""Conversations to segments: nothing said becomes a control token, answers are found, no template can do harm."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from glasshouse.errors import InputError
from glasshouse.text.chat import sandbox
from glasshouse.text.chat import template as chat_template
from glasshouse.text.chat.template import DEFAULT_TEMPLATE, MESSAGE_ROLES, Segment, segments

OURS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if message == user_messages[-1] and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message["content"]|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
THINKING = """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and not(message.content.startswith('<t>')) %}
        {%- set ns.found = true %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
SQUARE = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
IM = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
PUBLISHED = {  # the template, its special tokens, and what it writes around an answer before and behind
    "ours": (DEFAULT_TEMPLATE, OURS),
    "chatml": (CHATML, IM),
    "llama2": (LLAMA2, ["<s>", "</s>"]),
    "llama3": (LLAMA3, HEADERS),
    "mistral": (MISTRAL, SQUARE),
    "zephyr": (ZEPHYR, ["<s>", "</s>"]),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
    "phi3": (PHI3, [*OURS, "<|endoftext|>"]),
    "thinking": (THINKING, IM),
    "generation": (GENERATION, IM),
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

HELLO, HI = {"role": "user", "content": " Hello, a < b > c? "}, {"role": "assistant", "content": "Hi!\n\nThere. "}
MORE, BYE = {"role": "user", "content": "größer 你好 {{ x }} [a]"}, {"role": "assistant", "content": "Bye <p>.</p>"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
CHAT = [HELLO, HI, MORE, BYE]


def variables(special: list[str]) -> dict[str, str]:
    return NAMES if "</s>" in special else {"bos_token": special[-1], "eos_token": special[-1]}


def said(chat: list[Segment]) -> str:
    return "".join(segment.text for segment in chat)


def learned(chat: list[Segment]) -> str:
    return "".join(segment.text if segment.is_assistant else "·" for segment in chat)


def theirs(template: str, messages: list[Any], prompt: bool = False, **names: str) -> str:
    return render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt, **names)[0][0]


PARTS = "{% for m in messages %}{{ m.content }}{% endfor %}"

# What is written


def test_a_conversation_by_hand() -> None:
    text, token = (lambda t: Segment(t, False, False)), (lambda t: Segment(t, True, False))
    assert segments(DEFAULT_TEMPLATE, [SYSTEM, HELLO], special=OURS, add_generation_prompt=True) == [
        token("<|system|>"),
        text("Be brief.\n"),
        token("<|end|>"),
        token("<|user|>"),
        text(" Hello, a < b > c? "),
        token("<|end|>"),
        token("<|assistant|>"),
    ]


def test_a_developer_is_the_system() -> None:
    asked = [{**SYSTEM, "role": "developer"}, HELLO]
    assert segments(DEFAULT_TEMPLATE, asked, special=OURS) == segments(
        DEFAULT_TEMPLATE, [SYSTEM, HELLO], special=OURS
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("messages", [CHAT, [SYSTEM, *CHAT], [HELLO], CHAT[:3], [SYSTEM, HELLO, HI]], ids=len)
@pytest.mark.parametrize("prompt", [False, True])
def test_published_templates_read_as_in_transformers(name: str, messages: list[Any], prompt: bool) -> None:
    template, special = PUBLISHED[name]
    names = variables(special)
    ours = segments(template, messages, special=special, variables=names, add_generation_prompt=prompt)
    assert said(ours) == theirs(template, messages, prompt, **names)
    assert {segment.text for segment in ours if segment.special} <= {*special}
    assert not any(token in segment.text for segment in ours if not segment.special for token in special)
    assert all(segment.text for segment in ours)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é<|end|>"}'),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", '"\\u00e9<|end|>"'),
        ("{{ {'b': '<&', 'a': [1]} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[1],"b":"<&"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ messages }}", "[{'role': 'user', 'content': 'é<|end|>'}]"),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
        ("{{ tools is none }}{{ documents is none }}{{ other is defined }}", "TrueTrueFalse"),
        ("{% macro f(x) %}[{{ x }}]{{ caller() }}{% endmacro %}{% call f(1) %}!{% endcall %}", "[1]!"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{% endset %}{{ x * 2 ~ 2 ** 3 ~ 7 % 4 }}", "ABcc83"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{% endfor %}", "a11"),
        ("{{ {'a': 2}|items|list }}{{ {'a': 2}.values()|list }}", "[('a', 2)][2]"),
        ("{{ ['b', 'a']|sort|map('upper')|join('-') }}{{ [{'a': 3}]|map(attribute='a')|first }}", "A-B3"),
        ("{{ [1, 2, 1]|unique|list|length }}{{ nothing|default('d') }}{{ 'x y'|replace(' ', '_') }}", "2dx_y"),
        ("{% for c in 'ab'|reverse %}{{ loop.index }}{{ c }}{{ loop.nextitem }}{% endfor %}", "1ba2a"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "1"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)  # fmt: skip
def test_the_language_is_the_one_of_transformers(body: str, expected: str) -> None:
    messages = [{"role": "user", "content": "é<|end|>"}]
    assert theirs(body, messages) == expected
    assert said(segments(body, messages, special=OURS)) == expected


# What is learned


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", "·Hi!\n\nThere. <|end|>·Bye <p>.</p><|end|>"),
        ("chatml", "·Hi!\n\nThere. <|im_end|>·Bye <p>.</p><|im_end|>·"),
        ("llama2", "· Hi!\n\nThere. </s>· Bye <p>.</p> </s>"),
        ("llama3", "·Hi!\n\nThere.<|eot_id|>·Bye <p>.</p><|eot_id|>"),
        ("mistral", "· Hi!\n\nThere.</s>· Bye <p>.</p></s>"),
        ("gemma", "·Hi!\n\nThere.<end_of_turn>·Bye <p>.</p><end_of_turn>·"),
        ("phi3", "·Hi!\n\nThere. <|end|>·Bye <p>.</p><|end|>·"),
        ("thinking", "·Hi!\n\nThere. <|im_end|>·<think>\n\n</think>\n\nBye <p>.</p><|im_end|>·"),
    ],
)
def test_answers_are_learned_up_to_the_token_that_ends_them(name: str, expected: str) -> None:
    template, special = PUBLISHED[name]
    chat = segments(template, CHAT, special=special, variables=variables(special))
    marked = learned(chat)
    while "··" in marked:
        marked = marked.replace("··", "·")
    assert marked == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_assistant_segments_follow_the_generation_prompt(name: str) -> None:
    template, special = PUBLISHED[name]
    names = variables(special)
    whole = segments(template, CHAT, special=special, variables=names)
    starts = [at + 1 for at, (one, two) in enumerate(pairwise(whole)) if two.is_assistant and not one.is_assistant]
    for start, end in zip(starts, (1, 3), strict=True):
        assert whole[:start] == segments(
            template, CHAT[:end], special=special, variables=names, add_generation_prompt=True
        )


def test_answers_are_those_of_transformers() -> None:
    messages = [SYSTEM, *CHAT]
    rendered, spans = render_jinja_template([messages], chat_template=GENERATION, return_assistant_tokens_mask=True)
    chat = segments(GENERATION, messages, special=IM)
    flags = "".join("1" if segment.is_assistant else "0" for segment in chat for _ in segment.text)
    expected = ["0"] * len(rendered[0])
    for start, end in spans[0]:
        expected[start:end] = "1" * (end - start)
    assert flags == "".join(expected)


def test_an_answer_may_call_tools() -> None:
    call = {"type": "function", "id": "abc", "function": {"name": "f", "arguments": {"x": "</s>"}}}
    messages = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "[INST]"}, HI]
    chat = segments(MISTRAL, messages, special=SQUARE, variables=NAMES)
    assert said(chat) == theirs(MISTRAL, messages, **NAMES)
    answer = [segment for segment in chat if segment.is_assistant]
    assert answer == [
        Segment("[TOOL_CALLS]", True, True),
        Segment(' [{"name": "f", "arguments": {"x": "</s>"}, "id": "abc"}]', False, True),
        Segment("</s>", True, True),
        Segment(" Hi!\n\nThere.", False, True),
        Segment("</s>", True, True),
    ]


def test_thinking_is_learned_where_it_is_written() -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it? Yes."}
    chat = segments(THINKING, [HELLO, thought], special=IM)
    assert learned(chat).strip("·") == "<think>\nIs it? Yes.\n</think>\n\nYes.<|im_end|>"
    dropped = segments(THINKING, [HELLO, thought, MORE, BYE], special=IM)
    assert learned(dropped).strip("·") == "<think>\n\n</think>\n\nBye <p>.</p><|im_end|>"
    inline = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    assert learned(segments(THINKING, [HELLO, inline], special=IM)).strip("·") == inline["content"] + "<|im_end|>"


def test_an_answer_in_a_rewritten_conversation_is_not_learned() -> None:
    chat = segments(MISTRAL, [SYSTEM, *CHAT], special=SQUARE, variables=NAMES)
    assert learned(chat).strip("·") == " Bye <p>.</p></s>"
    asked = "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    assert asked in THINKING
    forced = THINKING.replace(asked, asked.replace("\\n", "\\n<think>")).replace(
        "(loop.last or reasoning)", "reasoning"
    )
    for messages in (CHAT[:2], CHAT):
        with pytest.raises(InputError, match=rf"message {len(messages) - 1} .* rewrites earlier messages"):
            segments(forced, messages, special=IM)
    assert not any(
        segment.is_assistant for segment in segments(forced, CHAT[:3], special=IM, add_generation_prompt=True)
    )


def test_an_answer_never_reaches_into_the_next_message() -> None:
    bare = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert [segment.text for segment in segments(bare, CHAT, special=OURS) if segment.is_assistant] == [
        "Hi!\n\nThere. \n",
        "Bye <p>.</p>\n",
    ]
    ended = bare + "{% if not add_generation_prompt %}</s>{% endif %}"
    assert [segment.text for segment in segments(ended, CHAT, special=["</s>"]) if segment.is_assistant] == [
        "Bye <p>.</p>\n",
        "</s>",
    ]


def test_a_conversation_may_begin_with_the_assistant() -> None:
    chat = segments(DEFAULT_TEMPLATE, [HI, HELLO, BYE], special=OURS)
    assert learned(chat).split("·") == ["", "Hi!\n\nThere. <|end|>", "", "", "", "Bye <p>.</p><|end|>"]
    greeting = "{% if messages[0].role %}{% endif %}" + DEFAULT_TEMPLATE
    chat = segments(greeting, [HI, HELLO, BYE], special=OURS)
    assert learned(chat).strip("·") == "Bye <p>.</p><|end|>"


def test_answers_in_a_row_are_written_once() -> None:
    body = PARTS + "{% if not add_generation_prompt %}<|end|>{% endif %}"
    blank = {"role": "assistant", "content": " "}
    chat = segments(body, [HELLO, HI, blank, blank], special=OURS)
    assert said(chat) == " Hello, a < b > c? Hi!\n\nThere.   <|end|>"
    assert learned(chat) == "·Hi!\n\nThere.   <|end|>"


def test_an_empty_answer_is_its_end() -> None:
    chat = segments(DEFAULT_TEMPLATE, [HELLO, {"role": "assistant", "content": ""}], special=OURS)
    assert chat[-1] == Segment("<|end|>", True, True)
    assert sum(segment.is_assistant for segment in chat) == 1


# What cannot be forged


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_message_makes_a_control_token(name: str) -> None:
    template, special = PUBLISHED[name]
    names = variables(special)

    def tokens(texts: list[str]) -> list[str]:
        chat = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
        made = segments(template, chat, special=special, variables=names)
        assert said(made) == theirs(template, chat, **names)
        return [segment.text for segment in made if segment.special]

    for token in special:
        for cut in range(1, len(token)):
            halves = [token[:cut], token[cut:], token[1:-1], token]
            assert tokens(halves) == tokens(["a", "b", "c", "d"]), halves


def test_a_message_cannot_finish_what_the_template_begins() -> None:
    for body in ("<|us{{ messages[0].content }}", "<|us{{ messages[0].content | trim }}"):
        for text in ("er|>", "  er|>x", "\ner|>"):
            assert not any(s.special for s in segments(body, [{"role": "user", "content": text}], special=OURS))
    middle = [{"role": "user", "content": "use", "name": "end", "parts": [{"type": "end", "end": "|end"}]}]
    for body in ("<|{{ messages[0].content }}r|>", "<|{{ messages[0].name }}|>", "<{{ messages[0].parts[0].end }}|>",
                 "<|{{ messages[0].parts[0].type }}|>"):  # fmt: skip
        assert not any(s.special for s in segments(body, middle, special=OURS)), body
    for body in ("{{ '<|' + messages[0].role + '|>' }}", "{{ eos }}", "<|{{ 'end' }}|>"):
        made = segments(body, middle, special=OURS, variables={"eos": "<|end|>"})
        assert [segment.special for segment in made] == [True], body


def test_ordinary_messages_reach_the_template_as_they_are() -> None:
    seen = "{% if messages[0].content == text and messages[0].content|length == text|length %}yes{% endif %}"
    for text in ("Hello", "a < b", "1 > 0", "<p>x</p>", "x|y", "the end", "user", " end ", "5 <", "", "  ", "\n"):
        expected = "yes" if text not in ("user", " end ", "5 <") else ""
        made = segments(seen, [{"role": "user", "content": text}], special=OURS, variables={"text": text})
        assert said(made) == expected, text
    kind = "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "<|endoftext|>"}]
    made = segments(kind, [{"role": "user", "content": parts}], special=IM)
    assert made == [Segment("a<|endoftext|>", False, False)]


def test_white_space_can_still_be_trimmed() -> None:
    body = "[{{ messages[0].content | trim }}]"
    for text in ("  <|us ", "\n er|> ", " user\n", " <|end|> ", " ", " < "):
        made = segments(body, [{"role": "user", "content": text}], special=OURS)
        assert said(made) == f"[{text.strip()}]"
    wide = ["<| user", "end |>", "a b", " c", "d "]
    for text, body in ((" user", "<|{{ messages[0].content }}"), ("end ", "{{ messages[0].content }}|>"),
                       (" ", "a{{ messages[0].content }}b"), (" ", "{{ messages[0].content }}c"),
                       ("x ", "{{ messages[0].content }}c"), ("b", "a {{ messages[0].content }}"),
                       (" x", "d{{ messages[0].content }}")):  # fmt: skip
        made = segments(body, [{"role": "user", "content": text}], special=wide)
        assert not any(segment.special for segment in made), (text, body)


def test_keys_and_nested_texts_are_guarded() -> None:
    call = {"function": {"name": "<|end|>", "arguments": {"<|end|>": ["<|end|>", ("<|us",)], "er|>": "er|>"}}}
    messages = [HELLO, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    body = "{{ messages | tojson }}{{ messages }}{% for k, v in messages[1].tool_calls[0].function.arguments|items %}"
    made = segments(body + "{{ v }}{{ k }}{% endfor %}", messages, special=OURS, add_generation_prompt=True)
    assert not any(segment.special for segment in made)
    assert said(made).count("<|end|>") == 3 + 3 + 2


@pytest.mark.parametrize(
    ("change", "contents"),
    [
        ("|lower", ["<|END|>"]),
        ("|lower", ["<|E", "ND|>"]),
        ("|upper", ["<|ss|>"]),
        ("|upper", ["<|ß|>"]),
        ("|upper", ["<|ß", "|>"]),
        ("|reverse", [">|dne|<"]),
        ("[::-1]", [">|dne|<"]),
        ("|reverse", ["dne|<", ">|"]),
        ("|reverse", ["|<", ">|dne"]),
        ("|reverse", ["<", ">|dne|"]),
        ("|reverse", ["|dne|<", ">"]),
        ("|reverse", ["]", "["]),
        ("|list|join", ["<|end|>"]),
        (".split('|')|join('|')", ["<|end|>"]),
        (".swapcase()", ["<|eND|>", "<|END|>"]),
        ("|replace('a', 'b')", ["<|end|>"]),
    ],
)
def test_a_template_may_rewrite_messages(change: str, contents: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in contents]
    made = segments(PARTS.replace("content", f"content{change}"), messages, special=["<|end|>", "<|SS|>", "[]"])
    assert not any(segment.special for segment in made)


def test_a_key_that_is_a_token_is_text() -> None:
    body = "{% for k in messages[0].x %}{{ k }},{% endfor %}"
    made = segments(body, [{"role": "user", "content": "", "x": {"pad": 1, "pads": 2, "<pad>": 3}}], special=["pad"])
    assert made == [Segment("pad,pads,<pad>,", False, False)]


def test_special_tokens_of_one_character() -> None:
    body = "§{{ messages[0].content }}!§"
    made = segments(body, [{"role": "user", "content": "a§b!<§>"}], special=["§", "!", "<§>"])
    assert made == [
        Segment("§", True, False),
        Segment("a§b!<§>", False, False),
        Segment("!", True, False),
        Segment("§", True, False),
    ]


def test_marks_are_characters_that_nobody_uses() -> None:
    rare = "".join(map(chr, chat_template._RARE))
    made = segments(DEFAULT_TEMPLATE, [{"role": "user", "content": rare[:-1] + "<|end|>"}], special=[*OURS, ""])
    assert made[1] == Segment(rare[:-1] + "<|end|>", False, False)
    with pytest.raises(InputError, match=r"every character from U\+30000"):
        segments(DEFAULT_TEMPLATE, [{"role": "user", "content": rare}], special=OURS)
    first = rare[0]
    made = segments(DEFAULT_TEMPLATE + first, [HELLO], special=[first], variables={"x": rare[1]})
    assert made[-1] == Segment(first, True, False)


PIECES = st.sampled_from(
    ["<|a|>", "<|b|>", "<|", "|>", "<", ">", "|", "a", "b", "A", "ab", "[", "]", "ß", "SS", " ", "\n", "x"]
)
CONTENTS = st.lists(st.lists(PIECES, max_size=5).map("".join), min_size=1, max_size=4)
TOKENS = st.sampled_from(
    ["<|a|>", "<|b|>", "<|a", "|>", "a|>", "<|a|><|b|>", "><", "[a]", "aba", "<|SS|>", "a b", " a", "b ", "<<", "¶"]
)
CHANGES: list[tuple[str, Callable[[str], str]]] = [
    ("", str),
    ("|upper", str.upper),
    ("|lower", str.lower),
    ("|trim", str.strip),
    ("|reverse", lambda text: text[::-1]),
    ("[::-1]|list|join", lambda text: text[::-1]),
    ("|list|join('')", str),
    ("|replace('x', 'y')", lambda text: text.replace("x", "y")),
    (".swapcase()", str.swapcase),
]


@settings(max_examples=up_to(300), deadline=None)
@given(
    st.sets(TOKENS, min_size=1),
    CONTENTS,
    st.lists(st.sampled_from(["", "~", "~<|a|>~", "~<|b|>", "[a]~"]), min_size=2, max_size=2),
    st.sampled_from(CHANGES),
)
def test_no_character_of_a_message_is_in_a_control_token(
    special: set[str], contents: list[str], around: list[str], change: tuple[str, Callable[[str], str]]
) -> None:
    written, function = change
    if function is str.strip:  # a token that begins with white space keeps it from being trimmed
        special = {token for token in special if " " not in token}
    before, after = around
    body = f"{before}{{% for m in messages %}}{{{{ m.content{written} }}}}{after}{{% endfor %}}"
    made = segments(body, [{"role": "user", "content": text} for text in contents], special=special)
    assert said(made) == before + "".join(function(text) + after for text in contents)
    literal = [True] * len(before)
    for text in contents:
        literal += [False] * len(function(text)) + [True] * len(after)
    at = 0
    for segment in made:
        if segment.special:
            assert segment.text in special
            assert all(literal[at : at + len(segment.text)])
        at += len(segment.text)
    # What the template writes by itself, set off by a character in no token, is found whatever stands beside it.
    if before == "~<|a|>~" and "<|a|>" in special:
        assert made[:2] == [Segment("~", False, False), Segment("<|a|>", True, False)]


@settings(max_examples=up_to(100), deadline=None)
@given(
    st.lists(st.lists(PIECES, max_size=5).map("".join), min_size=1, max_size=5), st.sampled_from(["chatml", "gemma"])
)
def test_answers_contain_the_assistant_tokens(contents: list[str], name: str) -> None:
    template, special = PUBLISHED[name]
    names, special = variables(special), [*special, "<|a|>", "ab", "><"]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    made = segments(template, messages, special=special, variables=names)
    assert said(made) == theirs(template, messages, **names)
    end = "<|im_end|>" if name == "chatml" else "<end_of_turn>"
    expected = [text if name == "chatml" else text.strip() for text in contents[1::2]]
    assert "".join(s.text for s in made if s.is_assistant) == "".join(text + end for text in expected)


# What is refused


CONTENT = "as its content; give a string or a list of parts."
JSON = "give strings, numbers, lists and dictionaries."
OTHER = "the chat template refuses these messages: it supports only text messages from "
OTHER += "system (or developer), user and assistant."


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", "messages is 'hello', but it must be a list of at least one message."),
        ([], "messages is [], but it must be a list of at least one message."),
        (None, "messages is None, but it must be a list of at least one message."),
        (["hello"], "message 0 is 'hello', but it must be a dictionary with a role and content."),
        ([{"content": "x"}], f"message 0 has the role None, which is not known; it has {', '.join(MESSAGE_ROLES)}."),
        (
            [HELLO, {"role": "asistant", "content": "x"}],
            "message 1 has the role 'asistant', which is not known; did you mean assistant?",
        ),
        ([{"role": "user"}], f"message 0 has None {CONTENT}"),
        ([{"role": "assistant", "content": None}], f"message 0 has None {CONTENT}"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], f"message 0 has None {CONTENT}"),
        ([{"role": "user", "content": 5}], f"message 0 has 5 {CONTENT}"),
        ([{"role": "user", "content": [b"x"]}], f"message 0 contains a bytes; {JSON}"),
        (
            [{"role": "user", "content": [{1: 2}]}],
            f"message 0 contains a dict with keys that are not strings; {JSON}",
        ),
        ([{"role": "tool", "content": "x"}], OTHER),
        ([{"role": "user", "content": ["x"]}], OTHER),
    ],
)
def test_bad_messages_are_one_sentence(messages: Any, sentence: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError) as error:
        segments(DEFAULT_TEMPLATE, messages, special=OURS)
    assert str(error.value) == sentence


def test_messages_in_messages_have_an_end() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for depth, problem in ((0, "it nests more than 100 lists"), (100_000, "nested too deep")):
        for _ in range(depth):
            deep = [deep]
        with pytest.raises(InputError, match=problem):
            segments("{{ messages }}", [{"role": "user", "content": deep}], special=OURS)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('Only ' + messages[0].content) }}", "refuses these messages: Only <|end|>."),
        ("a\n{% if %}", "line 2 of the chat template cannot be parsed: Expected an expression, got 'end of"),
        ("{{ messages[0].x.y }}", "refuses these messages: 'dict object' has no attribute 'x'."),
        ("{{ 1 + 'a' }}", "refuses these messages: unsupported operand type(s) for +: 'int' and 'str'."),
        ("{{ 1 / 0 }}", "refuses these messages: division by zero."),
        ("{{ nothing() }}", "refuses these messages: 'nothing' is undefined."),
        ("x" * 100_001, "the chat template has 100001 characters, but at most 100000 are allowed."),
    ],
)  # fmt: skip
def test_what_a_template_refuses_is_one_sentence(template: str, problem: str) -> None:
    with pytest.raises(InputError) as error:
        segments(template, [{"role": "user", "content": "<|end|>"}], special=OURS)
    assert problem in str(error.value)
    assert str(error.value).count("\n") == 0


GROW = "{% set ns = namespace(x=START) %}{% for i in range(90) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
BIG = "{% set big = range(90000)|list %}"
SECONDS_EACH = {25, 60, 62, 63}  # of the templates below
HOSTILE = [
    "{{ strftime_now('%200Y' * 100000)|length }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].x }}",
    "{{ (['']|map(attribute='__class__')|first).x }}",
    "{{ ''|attr('__class__') }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{% set x = [1] * 10**9 %}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 9 ** 99999999 }}",
    "{{ 0x" + "f" * 1000 + " // 3 }}",
    "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3,
    "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
    BIG + "{% for i in big %}{% if big == range(90000)|list %}{% endif %}{% endfor %}",
    BIG + "{% for i in big %}{% if -1 in big %}{% endif %}{% endfor %}",
    BIG + "{% for i in big %}{% set x = big[1:] %}{% endfor %}",
    BIG + "{{ big|select('in', big)|list }}",
    BIG + "{{ big|join('a' * 90000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>1000000000}'['format'](1) }}",
    "{{ ['%1000000000d']|map('format', 1)|list }}",
    "{{ 'a\nb'|indent(10**9) }}",
    "{{ ['a\nb']|map('indent', 10**9)|list }}",
    "{{ [1, [2]]|tojson(indent=10**9) }}",
    "{{ ('a' * 9000)|replace('a', 'b' * 90000) }}",
    "{{ ('a' * 9000).replace('', 'b' * 90000) }}",
    "{{ ('a' * 90000).join(('b' * 9000)|list) }}",
    "{% filter replace('a', 'b' * 90000) %}" + "a" * 9000 + "{% endfilter %}",
    "{{ [1]|batch(10**9)|list }}",
    "{{ lipsum(10**9) }}",
    "{{ cycler(1) }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    GROW.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    GROW.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    GROW.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]"),
    GROW.replace("START", "1").replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    GROW.replace("START", "3").replace("STEP", "ns.x * ns.x"),
    GROW.replace("START", "['a' * 900]").replace("STEP", "([none] * 900)|map('default', ns.x, true)|list"),
    GROW.replace("START", "['a' * 900]").replace("STEP", "[ns.x] * 900"),
    GROW.replace("START", "'a'").replace("STEP", "dict(a=ns.x, b=ns.x, c=[ns.x]|items)"),
    "{% set ns = namespace(x=(1,)) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{% set x %}{% for i in range(90000) %}" + "a" * 90000 + "{% endfor %}{% endset %}",
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 25 + "x" + "{% endcall %}" * 25,
    "{{ " + "(" * 40000 + "1" + ")" * 40000 + " }}",
    "{{ " + "1+" * 40000 + "1 }}",
    "{{ x" + ".a" * 40000 + " }}",
    "{% for a in x %}" * 30 + "{% endfor %}" * 30,
]  # fmt: skip


@pytest.mark.parametrize(
    "template",
    [pytest.param(one, marks=[pytest.mark.long] * (at in SECONDS_EACH)) for at, one in enumerate(HOSTILE)],
    ids=range(len(HOSTILE)),
)
def test_hostile_templates_are_refused_in_time(template: str) -> None:
    start, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as error:
        segments(template, [HELLO], special=OURS)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 200_000  # KiB
    assert len(str(error.value)) < 300


def test_a_namespace_can_hold_itself() -> None:
    body = GROW.replace("START", "1").replace("STEP", "namespace(a=ns.x, b=ns.x, c=ns)")
    assert said(segments(body, [HELLO], special=OURS)) == "<Namespace>"


def test_long_conversations_fit() -> None:
    long = [{"role": role, "content": "word and word, " * 5000} for role in ("user", "assistant")] * 6
    assert len(said(segments(THINKING, long, special=IM))) > 900_000
    many = [{"role": role, "content": "Hello"} for role in ("user", "assistant")] * 60
    assert sum(segment.is_assistant for segment in segments(CHATML, many, special=IM)) == 120
    counted = PARTS.replace("{{", "{{ messages|length }}{{ (messages|last).role }}{{")
    assert said(segments(counted, [HELLO] * 1000, special=IM)).startswith("1000user Hello")


def test_a_template_is_compiled_once() -> None:
    before = sandbox.compiled.cache_info().misses
    for _ in range(3):
        segments(DEFAULT_TEMPLATE + "once", [HELLO], special=OURS)
    assert sandbox.compiled.cache_info().misses == before + 1
