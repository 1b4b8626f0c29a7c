"""Structured output: every answer follows its schema, by the official client too; hostile schemas cost little."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import psutil
import pydantic
import pytest
from serve.conftest import KEYS
from serve.plain_http import Answer, ask
from serve.random_schemas import HOSTILE, random_schema

import glasshouse as gh
from glasshouse.generation.constraints.compiler import MEMORY
from glasshouse.serve import Limits, ServedModel, Server
from glasshouse.serve.runtime.grammars import GrammarTrial

ASK: dict[str, Any] = {"model": "decoder", "prompt": "to be", "max_tokens": 160}


@pytest.fixture(scope="module")
def server(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> Iterator[Server]:
    made = Server([ServedModel("decoder", decoder, tok, slots=8)], keys=KEYS, limits=Limits(max_waiting=64))
    made.start()
    yield made
    made.close()


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def check_random_schemas(server: Server, tok: gh.Tokenizer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    ends = {str(number): 3 for text in '"]},' for number in tok.encode(text)}  # a random model rarely ends a string

    def one(number: int) -> Answer:
        format_ = schema_format(schemas[number])
        return ask(server, "/v1/completions", {**ASK, "response_format": format_, "logit_bias": ends, "seed": number})

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(one, range(count)))
    reasons = []
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.status == 200, (schema, answer.body)
        (choice,) = answer.json()["choices"]
        reasons.append(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(choice["text"]))
        else:
            assert choice["finish_reason"] == "length"
            assert answer.json()["usage"]["completion_tokens"] == ASK["max_tokens"]
    assert reasons.count("stop") > count / 2  # or else little was tested


@pytest.mark.long
def test_answers_follow_random_schemas(server: Server, tok: gh.Tokenizer) -> None:
    check_random_schemas(server, tok, 50, seed=0)


@pytest.mark.long
def test_answers_follow_500_random_schemas(server: Server, tok: gh.Tokenizer) -> None:
    check_random_schemas(server, tok, 500, seed=1)


class Line(pydantic.BaseModel):
    speaker: Literal["Hamlet", "Ophelia"]
    act: int = pydantic.Field(ge=1, le=5)
    cut: bool | None


class Scene(pydantic.BaseModel):
    lines: list[Line] = pydantic.Field(min_length=1, max_length=2)


CHAT: Any = {"model": "decoder", "messages": [{"role": "user", "content": "to be?"}]}


def test_the_official_client_parses_models(client: openai.OpenAI) -> None:
    for seed in (0,):
        answer = client.chat.completions.parse(**CHAT, response_format=Scene, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Scene)
        response = client.responses.parse(
            model="decoder", input="to be?", text_format=Scene, extra_body={"seed": seed}
        )
        assert response.status == "completed"
        assert isinstance(response.output_parsed, Scene)
    with client.chat.completions.stream(**CHAT, response_format=Scene, seed=7) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Scene)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**CHAT, response_format=Scene, max_tokens=4)
    cut = client.responses.create(
        model="decoder", input="?", max_output_tokens=1, text={"format": {"type": "json_object"}}
    )
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_grammar_and_any_object(client: openai.OpenAI) -> None:
    for grammar in ('start: "to be" | "question"', 'root ::= "to be" | "question"'):
        answer = client.completions.create(
            model="decoder", prompt="a", n=12, temperature=2, seed=0, extra_body={"grammar": grammar}
        )
        assert {choice.text for choice in answer.choices} == {"to be", "question"}
    answer = client.chat.completions.create(**CHAT, response_format={"type": "json_object"}, max_tokens=60, seed=3)
    assert answer.choices[0].message.content.startswith("{")


def test_a_constraint_changes_nothing_else(client: openai.OpenAI) -> None:
    settings: Any = {"model": "decoder", "prompt": "to be", "max_tokens": 20, "seed": 5, "logprobs": 2}
    before = client.completions.create(**settings).choices
    client.completions.create(**settings, extra_body={"grammar": 'start: "a"'})
    assert client.completions.create(**settings).choices == before
    text = client.completions.create(**settings, extra_body={"response_format": {"type": "text"}})
    assert text.choices == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is missing"),
        ({"response_format": {"type": "xml"}}, "one of text, json_object, json_schema"),
        ({"response_format": schema_format({"not": {}})}, "the json schema cannot be used: Unimplemented keys"),
        ({"response_format": schema_format([])}, "must be a JSON object"),
        ({"response_format": schema_format({"enum": ["x" * 2**16]})}, "at most 65536 characters"),
        ({"response_format": {**schema_format({}), "type": "text"}}, "make it json_schema"),
        ({"response_format": {"type": "json_object"}, "grammar": 'start: "a"'}, "response_format and grammar"),
        ({"grammar": "start: nothing"}, "the grammar cannot be used: .*unknown name"),
        ({"grammar": ""}, "grammar is ''"),
        ({"grammar": 'start: "a"', "model": "other"}, "there is no model 'other'"),
    ],
)
def test_what_cannot_be_asked(server: Server, settings: dict[str, Any], said: str) -> None:
    answer = ask(server, "/v1/completions", {**ASK, **settings})
    assert answer.status in (400, 404), answer.body
    with pytest.raises(ValueError, match=said):
        raise ValueError(answer.json()["error"]["message"])


def test_without_the_extra(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = ask(server, "/v1/completions", {**ASK, "grammar": 'start: "without"'})
    assert answer.status == 400
    assert "pip install 'glasshouse[structured]'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "grammar"


@pytest.mark.long
def test_hostile_schemas_cost_little(server: Server) -> None:
    """Each is answered or refused, in bounded memory, while a stream of another key gets what it gets alone."""
    plain = {**ASK, "temperature": 0, "max_tokens": 200}
    alone = ask(server, "/v1/completions", plain).json()["choices"]
    ask(server, "/v1/completions", {**ASK, "grammar": 'start: "a"'})  # starts the process
    before = psutil.Process().memory_info().rss
    others: list[Any] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            others.append(ask(server, "/v1/completions", plain, key=KEYS[1]).json()["choices"])

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(keep_asking)
        try:
            for name, schema in HOSTILE.items():
                body = {**ASK, "max_tokens": 30, "response_format": schema_format(schema)}
                answer = ask(server, "/v1/completions", body)
                assert answer.status in (200, 400), (name, answer.body)
        finally:
            stop.set()
        asking.result(timeout=60)
    assert psutil.Process().memory_info().rss - before < MEMORY
    assert others
    assert all(one == alone for one in others)


def test_a_long_list_of_alternatives(server: Server) -> None:
    for form, count in (("start: {}", 1500), ("root ::= {}", 500)):
        words = [f"{number:04}" for number in range(count)]
        grammar = form.format(" | ".join(f'"{word}"' for word in words))
        answer = ask(server, "/v1/completions", {**ASK, "grammar": grammar, "temperature": 2})
        assert answer.status == 200, answer.body
        assert answer.json()["choices"][0]["text"] in words
    grammar = "start: " + " | ".join(f'"{number:04}"' for number in range(4000))
    answer = ask(server, "/v1/completions", {**ASK, "grammar": grammar})
    assert answer.status == 400
    assert "Current row has 4001 items; max is 2000" in answer.json()["error"]["message"]


@pytest.mark.long
def test_a_grammar_that_is_costly_after_its_first_token(tok: gh.Tokenizer) -> None:
    inner = " | ".join(f'"a" x "{chr(98 + number % 20)}{number}"' for number in range(3000))
    trial = GrammarTrial(tok)
    try:
        assert "more than" in trial.run("grammar", f'start: "to be " x\nx: {inner} | "a"')
    finally:
        trial.close()


def test_refusals_are_the_clients_fault(server: Server) -> None:
    for name in ("only itself", "another machine", "a file", "nested 200 deep", "intersected expressions"):
        body = {**ASK, "max_tokens": 30, "response_format": schema_format(HOSTILE[name])}
        assert ask(server, "/v1/completions", body).status == 400, name


def test_a_killed_trial_is_started_again(tok: gh.Tokenizer) -> None:
    trial = GrammarTrial(tok)
    try:
        assert trial.run("regex", "a") == ""
        assert "more than" in trial.run("json_schema", json.dumps(HOSTILE["intersected expressions"]))
        assert trial.run("regex", "a") == ""  # only the process of that grammar was killed
        assert trial._process is not None
        trial._process.kill()
        trial._process.wait()
        assert trial.run("regex", "a") == ""
    finally:
        trial.close()
