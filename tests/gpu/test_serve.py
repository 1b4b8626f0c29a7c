"""Answers over HTTP from a GPU: those of the library, alone and among 200 others."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TEXT = "to be, or not to be, that is the question:\nwhether 'tis nobler in the mind to suffer é ü 漢字 " * 4
SLOTS, MAX_LEN = 32, 128


@pytest.fixture(scope="module")
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=[TEXT], vocab_size=300)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(tok: gh.Tokenizer, request: pytest.FixtureRequest) -> gh.models.Decoder:
    torch.manual_seed(0)
    # Wide initial weights: in float32, two logits are then rarely closer than rounding.
    spec = gh.preset(
        "llama-small", n_layers=4, vocab_size=300, max_len=MAX_LEN, init={"kind": "normal", "std": 0.1}, end_ids=()
    )
    return gh.build(spec, device="cuda", dtype=request.param).eval()


@pytest.fixture(scope="module")
def server(tok: gh.Tokenizer, model: gh.models.Decoder) -> Iterator[Server]:
    served = ServedModel("model", model, tok, slots=SLOTS, max_len=MAX_LEN, batch_invariant=True)
    made = Server([served], limits=Limits(max_waiting=512))
    made.start()
    yield made
    made.close()


def complete(server: Server, body: dict[str, Any]) -> tuple[str, list[float]]:
    """Return an answer's text and the log-probabilities of its tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    sent = {"model": "model", "logprobs": 0, **body}
    connection.request("POST", "/v1/completions", json.dumps(sent), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 200, found
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "length"
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_answers_are_those_of_the_library_alone_and_among_200(
    server: Server, model: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    rng = random.Random(0)
    bodies: list[dict[str, Any]] = []
    for number in range(200):
        prompt = [rng.randrange(20, 300) for _ in range(rng.choice((1, 3, 20, 60)))]
        bodies.append({"prompt": prompt, "max_tokens": rng.randint(5, 40)})
        bodies[-1] |= {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
    with ThreadPoolExecutor(200) as pool:
        together = list(pool.map(lambda body: complete(server, body), bodies))
    alone = [complete(server, body) for body in bodies[:40]]
    assert alone == together[:40]  # to the last bit of each log-probability

    engine = gh.Engine(model, tok, slots=SLOTS, max_len=MAX_LEN, batch_invariant=True)
    for body, (text, logprobs) in zip(bodies[:40], alone, strict=True):
        settings = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
        settings |= {name: body[name] for name in ("top_p", "seed") if name in body}
        request = engine.submit(body["prompt"], **settings)
        engine.run()
        assert (request.text, request.logprobs) == (text, logprobs)
        if next(model.parameters()).dtype == torch.float32:  # the same without the mode, and with other kernels
            (completion,) = gh.generate(model, tok, [body["prompt"]], **settings)
            assert completion.text == text
