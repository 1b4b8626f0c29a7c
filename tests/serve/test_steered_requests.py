"""Steering over HTTP: by name and scale, each request its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.conftest import KEYS
from serve.plain_http import ask

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.inspection import SteeringVector, add
from glasshouse.serve import ServedModel, Server, assign


@pytest.fixture(scope="module")
def vector(decoder: gh.models.Decoder, tok: gh.Tokenizer) -> SteeringVector:
    return gh.steering_vector(decoder, tok, ["to be", "the mind"], ["question", "or not"], site="resid_post.0")


@pytest.fixture(scope="module")
def server(decoder: gh.models.Decoder, tok: gh.Tokenizer, vector: SteeringVector) -> Iterator[Server]:
    steered = ServedModel("decoder", decoder, tok, slots=8, steering={"minds": vector})
    made = Server([steered, ServedModel("plain", decoder, tok, slots=2)], keys=KEYS)
    made.start()
    yield made
    made.close()


SETTINGS: dict[str, Any] = {"model": "decoder", "prompt": "to be", "max_tokens": 24, "temperature": 0}


def test_each_request_has_its_own_scale(
    client: openai.OpenAI, decoder: gh.models.Decoder, tok: gh.Tokenizer, vector: SteeringVector
) -> None:
    scales = [0.0, 30.0, -30.0, 60.0] * 3
    expected = {}
    for scale in set(scales):
        with gh.edit(decoder, {vector.site: add(scale * vector.vector)}):
            expected[scale] = gh.generate(decoder, tok, "to be", max_new_tokens=24)[0].text
    with ThreadPoolExecutor(len(scales)) as threads:
        answers = threads.map(
            lambda scale: client.completions.create(**SETTINGS, extra_body={"steer": {"minds": scale}}), scales
        )
        texts = [answer.choices[0].text for answer in answers]
    assert texts == [expected[scale] for scale in scales]
    assert len(set(texts)) > 2
    assert client.completions.create(**SETTINGS).choices[0].text == expected[0.0]


def test_chats_and_responses_are_steered(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "to be?"}]
    steer: Any = {"extra_body": {"steer": {"minds": 60.0}, "seed": 1}}
    chat = client.chat.completions.create(model="decoder", messages=messages, max_tokens=20, **steer)
    response = client.responses.create(model="decoder", input="to be?", max_output_tokens=20, **steer)
    plain = client.chat.completions.create(model="decoder", messages=messages, max_tokens=20, seed=1)
    assert chat.choices[0].message.content == response.output_text != plain.choices[0].message.content


def test_what_is_known_and_what_is_refused(server: Server) -> None:
    props = ask(server, "/props").json()["models"]
    assert [one["steering"] for one in props] == [{"minds": "resid_post.0"}, {}]
    for wrong, said in [
        ({"steer": {"mind": 1.0}}, "there is no steering vector 'mind'; did you mean minds"),
        ({"steer": {"minds": 1.0}, "model": "plain"}, "none is registered"),
        ({"steer": {"minds": 1e9}}, "steer.minds is 1000000000.0, but it must be a number from -1000 to 1000"),
        ({"steer": {"minds": "much"}}, "steer.minds is 'much'"),
        ({"steer": ["minds"]}, "at most 16 numbers by name"),
        ({"steer": {"minds": 1.0}, "steer_at": "answer"}, "steer_at is 'answer', but it must be one of all, prompt"),
        ({"steer": {str(n): 0.0 for n in range(17)}}, "at most 16 numbers by name"),
        ({"steer": {"minds": 1.0}, "echo": True, "logprobs": 1}, "not steered"),
    ]:
        answer = ask(server, "/v1/completions", {**SETTINGS, **wrong})
        assert answer.status == 400
        assert said in answer.json()["error"]["message"]


def test_vectors_go_to_the_models_they_were_made_for(
    decoder: gh.models.Decoder, encoder: gh.models.Encoder, vector: SteeringVector, tmp_path: Path
) -> None:
    assert assign("steering vector", {"minds": vector}, [encoder, decoder]) == [{}, {"minds": vector}]
    assert assign("steering vector", {}, [encoder]) == [{}]
    with pytest.raises(InputError, match="'minds' was made for another model"):
        assign("steering vector", {"minds": vector}, [encoder])
