"""The request fields of each endpoint, and their conversion to sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from glasshouse.generation.rules import Rule, RuleAction
from glasshouse.generation.sampling_params import BOUNDS, DEFAULTS, MOST_TOP, SamplingParams, SteerAt
from glasshouse.inspection.editing import Add, Scale
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.fields import (
    Biases,
    ByName,
    Choice,
    Either,
    Flag,
    JsonText,
    Many,
    Real,
    Table,
    Text,
    Whole,
)

Values = Mapping[str, Any]

MAX_N = 128  # completions of one prompt
MAX_PROMPTS = 256  # in one request
MAX_TOKENS = 2**20
MAX_IDS = 2**20  # of one prompt
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_TOOLS = 128  # of a request, and calls of one message
MAX_STOPS, LONGEST_STOP = 16, 1000
MAX_SITES, MAX_PROBES, MAX_RULES, MAX_EDITS = 64, 64, 16, 64
MAX_WIDTH = 2**17  # of an activation
MAX_GRAMMAR = 2**16  # characters of a grammar or a JSON schema
SMALLEST_TOP_P = 1e-9  # for 0, which OpenAI takes: the most probable token alone

IDS = Many(Whole(0, 2**31 - 1), MAX_IDS, 1)
TEXT = Text()

IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
NO_TOOLS = "tools are taken by /v1/chat/completions alone; leave it out."
OLD_TOOLS = "it is the older form of tools; give those."

# OpenAI's limits, where they are narrower than those of the parameters themselves.
LIMITS = {
    "temperature": (0, 2),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "seed": (-(2**62), 2**62),
    "min_new_tokens": (0, MAX_TOKENS),
    "top_k": (0, 2**31 - 1),
}


def sampled(name: str, default: float | None = None) -> Whole | Real:
    """Return the field of a sampling parameter: within its bounds, and where it can be off, 0 is that."""
    bounds = BOUNDS[name]
    low, high = LIMITS.get(name, (0 if DEFAULTS[name] is None else bounds.low, bounds.high))
    return Whole(int(low), int(high), default=default) if bounds.whole else Real(low, high, default=default)


SCALES = ByName(Real(-1000.0, 1000.0), 16, "numbers", default={})
SAMPLING = {
    "temperature": sampled("temperature", 1.0),
    "top_p": sampled("top_p", 1.0),
    "top_k": sampled("top_k", 0),
    "min_p": sampled("min_p", 0.0),
    "seed": sampled("seed"),
    "frequency_penalty": sampled("frequency_penalty", 0.0),
    "presence_penalty": sampled("presence_penalty", 0.0),
    "repetition_penalty": sampled("repetition_penalty", 1.0),
    "logit_bias": Biases(default={}),
    "stop": Either(
        (Text(LONGEST_STOP, 1), Many(Text(LONGEST_STOP, 1), MAX_STOPS)),
        f"a string, or a list of at most {MAX_STOPS}, none empty",
        default=[],
    ),
    "stop_token_ids": Many(Whole(0, 2**31 - 1), 64, default=[]),
    "min_tokens": sampled("min_new_tokens", 0),
    "grammar": Text(MAX_GRAMMAR, 1),
    "steer": SCALES,
    "steer_at": Choice(get_args(SteerAt), default="all"),
}
# Of a server that shows them.
NAME = Text(256, 1)
RULE = Table(
    {
        "probe": Text(256, 1, required=True),
        "above": Real(-1e9, 1e9, required=True),
        "then": Choice(get_args(RuleAction), required=True),
        "consecutive": Whole(1, MAX_TOKENS, default=1),
        "steer": SCALES,
    }
)
EDITED = Real(-1e9, 1e9)
VECTOR = Many(EDITED, MAX_WIDTH, 1)
EDIT = Either(
    (EDITED, Table({"scale": EDITED, "add": VECTOR, "to": VECTOR})),
    "a number that replaces the activation, or an object with scale, add or to",
)
INTERNALS = {
    "edits": ByName(EDIT, MAX_EDITS, "edits", default={}),
    "record": Many(NAME, MAX_SITES, default=[]),
    "probes": Many(NAME, MAX_PROBES, default=[]),
    "rules": Many(RULE, MAX_RULES, default=[]),
    "lens": Whole(0, MOST_TOP, default=0),
    "attended": ByName(Whole(1, MOST_TOP), MAX_SITES, "numbers", default={}),
}
NO_INTERNALS = "it is answered by /v1/chat/completions and /v1/completions; send it there."
SCHEMA = {
    "name": Text(256),
    "description": TEXT,
    "schema": JsonText(MAX_GRAMMAR),
    "strict": Flag(),
}
FORMAT = Choice(("text", "json_object", "json_schema"), required=True)
RESPONSE_FORMAT = {"response_format": Table({"type": FORMAT, "json_schema": Table(SCHEMA)})}
STREAMING = {
    "stream": Flag(),
    "stream_options": Table(
        {"include_usage": Flag()}, ignored=("include_obfuscation",), default={"include_usage": False}
    ),
}
MODEL = {"model": Text(required=True)}

COMPLETIONS = Table(
    {
        **MODEL,
        "prompt": Either(
            (TEXT, IDS, Many(TEXT, MAX_PROMPTS, 1), Many(IDS, MAX_PROMPTS, 1)),
            "a string, a list of token ids, or a list of up to "
            f"{MAX_PROMPTS} of either, each with at least one token",
            required=True,
        ),
        "max_tokens": Whole(0, MAX_TOKENS),
        "n": Whole(1, MAX_N, default=1),
        "best_of": Whole(1, MAX_N),
        "logprobs": Whole(0, MAX_TOP_LOGPROBS),
        "echo": Flag(),
        "return_token_ids": Flag(),
        **RESPONSE_FORMAT,
        **STREAMING,
        **SAMPLING,
        **INTERNALS,
    },
    ignored=IGNORED,
    refused={"suffix": "these models continue a prompt only; leave it out."},
)
PART = Table(
    {"type": Choice(("text", "input_text", "output_text"), required=True), "text": Text(required=True)},
    ignored=("annotations", "logprobs"),
)
CONTENT = Either((TEXT, Many(PART, 1024, 1)), "a string, or a list of text parts")
MESSAGE = Table(
    {
        "role": Choice(("system", "developer", "user", "assistant"), required=True),
        "content": Either(CONTENT.kinds, CONTENT.noun, required=True),
    },
    ignored=("name", "refusal", "annotations", "audio", "id", "status", "type"),
    refused={"tool_calls": NO_TOOLS, "function_call": NO_TOOLS, "tool_call_id": NO_TOOLS},
)
FUNCTION_NAME = Text(64, 1, required=True)
CALL = Table(
    {
        "id": Text(256),
        "type": Choice(("function",), default="function"),
        "function": Table({"name": FUNCTION_NAME, "arguments": Text(MAX_GRAMMAR, required=True)}, required=True),
    },
    ignored=("index",),
)
CHAT_MESSAGE = Table(
    {
        "role": Choice(("system", "developer", "user", "assistant", "tool"), required=True),
        "content": CONTENT,
        "tool_calls": Many(CALL, MAX_TOOLS),
        "tool_call_id": Text(256),
    },
    ignored=MESSAGE.ignored,
    refused={"function_call": OLD_TOOLS},
)
TOOL = Table(
    {
        "type": Choice(("function",), required=True),
        "function": Table(
            {"name": FUNCTION_NAME, "description": TEXT, "parameters": JsonText(MAX_GRAMMAR)},
            ignored=("strict",),
            required=True,
        ),
    }
)
NAMED_FUNCTION = Table({"name": FUNCTION_NAME}, required=True)
CHAT = Table(
    {
        **MODEL,
        "messages": Many(CHAT_MESSAGE, MAX_MESSAGES, 1, required=True),
        "tools": Many(TOOL, MAX_TOOLS, default=[]),
        "tool_choice": Either(
            (
                Choice(("auto", "none", "required")),
                Table({"type": Choice(("function",), required=True), "function": NAMED_FUNCTION}),
            ),
            "auto, none, required, or a function by its name",
            default="auto",
        ),
        "max_tokens": Whole(1, MAX_TOKENS),
        "max_completion_tokens": Whole(1, MAX_TOKENS),
        "n": Whole(1, MAX_N, default=1),
        "logprobs": Flag(),
        "top_logprobs": Whole(0, MAX_TOP_LOGPROBS, default=0),
        **RESPONSE_FORMAT,
        "return_token_ids": Flag(),
        **STREAMING,
        **SAMPLING,
        **INTERNALS,
    },
    ignored=(*IGNORED, "parallel_tool_calls", "reasoning_effort", "verbosity"),
    refused={
        "audio": "answers are text; leave it out.",
        "function_call": OLD_TOOLS,
        "functions": OLD_TOOLS,
        "modalities": "answers are text; leave it out.",
        "prediction": "nothing is predicted; leave it out.",
        "web_search_options": "nothing is searched; leave it out.",
    },
)
RESPONSES = Table(
    {
        **MODEL,
        "input": Either((TEXT, Many(MESSAGE, MAX_MESSAGES, 1)), "a string, or a list of messages", required=True),
        "instructions": TEXT,
        "max_output_tokens": Whole(1, MAX_TOKENS),
        "text": Table({"format": Table({"type": FORMAT, **SCHEMA})}, ignored=("verbosity",)),
        "stream": Flag(),
        **SAMPLING,
    },
    ignored=(
        *IGNORED,
        "include",
        "max_tool_calls",
        "parallel_tool_calls",
        "reasoning",
        "stream_options",
        "tool_choice",
        "top_logprobs",
        "truncation",
    ),
    refused={
        "background": "an answer is given at once or not at all; leave it out.",
        "conversation": "nothing is stored here; send the whole conversation as input.",
        "previous_response_id": "nothing is stored here; send the whole conversation as input.",
        "prompt": "nothing is stored here; send the text as input.",
        "tools": NO_TOOLS,
        **dict.fromkeys(INTERNALS, NO_INTERNALS),
    },
)
EMBEDDINGS = Table(
    {
        **MODEL,
        "input": Either(
            (Text(shortest=1), IDS, Many(Text(shortest=1), 2048, 1), Many(IDS, 2048, 1)),
            "a string, a list of token ids, or a list of up to 2048 of either, none empty",
            required=True,
        ),
        "encoding_format": Choice(("float", "base64"), default="float"),
        "dimensions": Whole(1, 2**20),
    },
    ignored=IGNORED,
)
TOKENIZE = Table(
    {
        **MODEL,
        "prompt": TEXT,
        "messages": Many(MESSAGE, MAX_MESSAGES, 1),
        "add_special_tokens": Flag(default=True),
        "add_generation_prompt": Flag(default=True),
    }
)
ANSWER_COMPARISON = Table({"a": Text(longest=100, required=True), "b": Text(longest=100, required=True)})
DETOKENIZE = Table({**MODEL, "tokens": Many(Whole(0, 2**31 - 1), MAX_IDS, required=True)})


def sampling_params(
    values: Values, max_new_tokens: int, top_logprobs: int = 0, candidates: int = 0, rules: Sequence[Rule] = ()
) -> SamplingParams:
    """Return the sampling parameters of a request; without a seed, with a random one.

    `candidates` are what the server keeps of each token, for answers that can be opened; `rules` are the server's.
    """
    seed = values["seed"]
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=values["min_tokens"],
        temperature=values["temperature"],
        top_k=values["top_k"] or None,
        top_p=values["top_p"] or SMALLEST_TOP_P,
        min_p=values["min_p"] or None,
        repetition_penalty=values["repetition_penalty"],
        frequency_penalty=values["frequency_penalty"],
        presence_penalty=values["presence_penalty"],
        logit_bias=values["logit_bias"],
        stop=values["stop"],
        stop_token_ids=values["stop_token_ids"],
        seed=secrets.randbits(62) if seed is None else seed,
        top_logprobs=top_logprobs,
        candidates=candidates,
        constraint=values.get("constraint"),
        steer=values["steer"],
        steer_at=values["steer_at"],
        edits={site: activation_edit(site, one) for site, one in values.get("edits", {}).items()},
        lens=values.get("lens", 0),
        attended=values.get("attended", {}),
        record=values.get("record", ()),
        probes=values.get("probes", ()),
        rules=(*rules, *(Rule(**one) for one in values.get("rules", ()))),
    )


def activation_edit(site: str, given: float | dict[str, Any]) -> float | Tensor | Scale | Add:
    """Return an edit of activations, from its JSON.

    >>> activation_edit("z.0", {"scale": 2.0, "add": None, "to": None})
    Scale(factor=2.0)
    """
    if not isinstance(given, dict):
        return given
    found = {kind: value for kind, value in given.items() if value is not None}
    match found:
        case {"scale": factor, **rest} if not rest:
            return Scale(factor)
        case {"add": vector, **rest} if not rest:
            return Add(torch.tensor(vector))
        case {"to": vector, **rest} if not rest:
            return torch.tensor(vector)
    raise ApiError(f"edits.{site[:40]} has {len(found)} of scale, add and to; give one of them.", param="edits")


def message_texts(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    r"""Return messages with a role and one text each, as chat templates take them; parts are joined by newlines.

    >>> message_texts([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    [{'role': 'user', 'content': 'a\nb'}]
    """
    return [{"role": one["role"], "content": joined_text(one["content"])} for one in messages]


def joined_text(content: str | list[dict[str, str]]) -> str:
    """Return the text of a message, whose parts are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
