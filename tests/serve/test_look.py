"""Answers that open: what is shown is what the sampler used and what `gh.record` gives, to the key that asked."""

from __future__ import annotations

import base64
import gc
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from serve.conftest import KEYS
from serve.plain_http import ask, begin, eventually
from torch import Tensor

import glasshouse as gh
from glasshouse.generation.constraints.grammar import Grammar
from glasshouse.generation.sampling.candidates import Draws
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.serve import Limits, ServedModel, Server
from glasshouse.serve.answers.kept import CANDIDATES, KeptAnswer, KeptAnswers, KeptChoice
from glasshouse.serve.endpoints.answers import check_tokenizers
from glasshouse.serve.runtime import grammars
from glasshouse.serve.schema import openapi
from glasshouse.serve.schema.errors import ApiError

PROMPT = "to be, or not"
SAMPLED = {
    "model": "decoder",
    "prompt": PROMPT,
    "max_tokens": 9,
    "temperature": 0.8,
    "top_p": 0.7,
    "top_k": 40,
    "min_p": 0.01,
    "frequency_penalty": 0.6,
    "seed": 3,
}
OPEN = ("/health", "/", "/static/main.js", "/static/style.css")


@pytest.fixture(scope="module")
def looking(tok: gh.Tokenizer, decoder: gh.models.Decoder, pair: gh.models.Seq2Seq) -> Iterator[Server]:
    models = [ServedModel("decoder", decoder, tok, slots=4), ServedModel("pair", pair, tok, slots=2)]
    made = Server(models, keys=KEYS, limits=Limits(max_waiting=64), look=True)
    made.start()
    assert eventually(lambda: made.api.runner.ready)
    yield made
    made.close()


def tensor(table: dict[str, Any]) -> Tensor:
    numbers = np.frombuffer(base64.b64decode(table["f32"]), np.float32)
    return torch.from_numpy(numbers.reshape(table["shape"]).copy())


def completed(server: Server, **changes: object) -> dict[str, Any]:
    answer = ask(server, "/v1/completions", {**SAMPLED, **changes})
    assert answer.status == 200, answer.json()
    return answer.json()


def test_candidates_are_those_the_sampler_used(looking: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[Tensor, Tensor]] = []
    sample = Sampler.sample_with_candidates

    def watched(self: Sampler, logits: Tensor) -> tuple[Tensor, Tensor]:
        used.append((logits.clone(), self.distribution(logits)))
        return sample(self, logits)

    monkeypatch.setattr(Sampler, "sample_with_candidates", watched)
    answer = completed(looking, return_token_ids=True)
    opened = ask(looking, f"/v1/answers/{answer['id']}").json()
    output = [*opened["output"], *([opened["end"]] if opened["end"] else [])]
    assert [one["id"] for one in opened["output"]] == answer["choices"][0]["token_ids"]
    assert len(output) == len(used)
    for drawn, (logits, distribution) in zip(output, used, strict=True):
        own = [drawn["id"], drawn["probability"], drawn["logprob"]]
        for token, probability, logprob in (own, *drawn["candidates"]):
            assert probability == float(distribution[0, token])
            assert logprob == float(logits[0].log_softmax(-1)[token])
        listed = [probability for _, probability, _ in drawn["candidates"]]
        assert listed == distribution[0].topk(CANDIDATES).values.tolist()


def test_prompt_and_output_are_as_they_were(looking: Server, tok: gh.Tokenizer) -> None:
    answer = completed(looking)
    opened = ask(looking, f"/v1/answers/{answer['id']}").json()
    assert opened["prompt"] == tok.encode(PROMPT)
    assert "".join(opened["pieces"]) == answer["choices"][0]["text"]
    assert opened["model"] == "decoder"
    assert opened["settings"]["temperature"] == 0.8
    assert opened["finish_reason"] == answer["choices"][0]["finish_reason"]
    whole = ask(looking, f"/v1/answers/{answer['id']}?start=0").json()
    assert "".join(whole["pieces"]) == PROMPT + answer["choices"][0]["text"]
    described = {int(one): token["text"] for one, token in opened["tokens"].items()}
    assert "".join(described[one] for one in opened["prompt"]) == PROMPT.replace(" ", "␣")


def test_views_show_what_record_gives(looking: Server, decoder: gh.models.Decoder) -> None:
    """Bit for bit: the attention of every layer and head, and the logit lens, at the moment a token was drawn."""
    opened = ask(looking, f"/v1/answers/{completed(looking)['id']}").json()
    ids = opened["state"]["appended"]
    at = len(opened["prompt"]) + 3 - 1  # where the fourth token was drawn
    prompt = {"prompt": opened["state"]}
    with torch.no_grad(), gh.record(decoder, "pattern.*", "resid_post.*") as seen:
        logits = decoder(torch.tensor([ids]))
    layers, heads = decoder.spec.n_layers, decoder.spec.n_heads
    for layer in range(layers):
        for head in range(heads):
            body = {"forward_pass": prompt, "layer": layer, "head": head}
            tile = ask(looking, "/api/tile?model=decoder", body).json()
            shown = tensor(tile["cells"])
            expected = seen[f"pattern.{layer}"][0, head]
            assert torch.equal(shown.clamp(min=0), expected)
            assert bool((shown.triu(1)[torch.ones_like(shown).triu(1) > 0] == -1).all())  # masked
    body = {"forward_pass": prompt, "layers": [layers], "start": 0, "stop": len(ids)}
    lens = ask(looking, "/api/lens?model=decoder", body).json()
    probabilities = logits[0].softmax(-1)
    assert [one for (one,) in lens["tokens"][0]] == probabilities.argmax(-1).tolist()
    assert torch.equal(tensor(lens["probability"])[0, :, 0], probabilities.amax(-1))
    assert lens["targets"][at] == opened["output"][3]["id"]
    top = ask(looking, "/api/next?model=decoder", {"forward_pass": prompt, "position": at}).json()["candidates"]
    assert [one["logit"] for one in top] == [float(logits[0, at, one["id"]]) for one in top]


def test_a_translation_opens(looking: Server, pair: gh.models.Seq2Seq, tok: gh.Tokenizer) -> None:
    answer = completed(looking, model="pair", prompt="to be", max_tokens=5)
    opened = ask(looking, f"/v1/answers/{answer['id']}").json()
    assert opened["source"] == [*tok.encode("to be"), 1]  # and the end token, as in training
    ids = [one["id"] for one in opened["output"]]
    assert opened["state"] == {"text": "to be", "target": "", "appended": ids}
    shown = ask(looking, "/api/tokenize?model=pair", {"forward_pass": {"prompt": opened["state"]}}).json()
    assert [one["id"] for one in shown["source"]] == opened["source"]
    assert [one["id"] for one in shown["target"]] == [*opened["prompt"], *ids]


def test_each_choice_opens(looking: Server) -> None:
    answer = completed(looking, n=3, return_token_ids=True)
    for index, choice in enumerate(answer["choices"]):
        opened = ask(looking, f"/v1/answers/{answer['id']}?choice={index}").json()
        assert [one["id"] for one in opened["output"]] == choice["token_ids"]
        assert opened["n_choices"] == 3
    for wrong in ("choice=3", "choice=-1", "choice=x", "start=99999", "choice=1e9", "choice=%D9%A3"):
        assert ask(looking, f"/v1/answers/{answer['id']}?{wrong}").status == 400


@pytest.mark.parametrize("path", ["/v1/answers/{}", "/v1/answers/{}?choice=0"])
def test_an_answer_opens_with_its_own_key_only(looking: Server, path: str) -> None:
    answer = completed(looking)
    assert ask(looking, path.format(answer["id"])).status == 200
    other = ask(looking, path.format(answer["id"]), key=KEYS[1], X_Request_Id="same")
    unknown = ask(looking, path.format("cmpl-" + 24 * "0"), key=KEYS[1], X_Request_Id="same")
    assert other.status == unknown.status == 404
    assert other.json()["error"]["code"] == "answer_not_found"
    assert other.body.replace(answer["id"].encode(), b"") == unknown.body.replace(b"cmpl-" + 24 * b"0", b"")
    assert ask(looking, path.format(answer["id"]), key=None).status == 401
    ids = {completed(looking, max_tokens=1)["id"] for _ in range(3)}
    assert all(len(bytes.fromhex(one.removeprefix("cmpl-"))) == 12 for one in ids)  # 96 random bits
    assert len(ids) == 3


def test_a_stream_that_was_left_opens(looking: Server) -> None:
    stream = begin(looking, "/v1/completions", {**SAMPLED, "max_tokens": 200, "stream": True})
    data = b""
    while data.count(b"data: ") < 3:
        data += stream.recv(4096)
    stream.close()
    answer = data.decode().split('"id":"')[1].split('"')[0]
    assert eventually(lambda: ask(looking, f"/v1/answers/{answer}").status == 200)
    opened = ask(looking, f"/v1/answers/{answer}").json()
    assert len(opened["output"]) >= 2


def test_who_gets_in(looking: Server) -> None:
    for path in OPEN:
        assert ask(looking, path, key=None).status == 200
    for path in ("/api/model", "/v1/models", "/v1/answers/x", "/props", "/static", "/staticx", "//", "/api/save"):
        assert ask(looking, path, key=None, method="POST" if "api" in path else "GET").status == 401, path
    own = f"http://127.0.0.1:{looking.port}"
    assert ask(looking, "/api/model", {}, Origin=own).status == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://localhost:{looking.port}"):
        assert ask(looking, "/api/model", {}, Origin=origin).status == 403
        assert ask(looking, "/", Origin=origin, key=None).status == 403
    assert ask(looking, "/", Host="evil.example", key=None).status == 403
    assert ask(looking, "/api/model", b"{}", Content_Type="text/plain").status == 415
    headers = ask(looking, "/", key=None).headers
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cross-origin-opener-policy"] == "same-origin"


def test_the_page_of_each_model(looking: Server) -> None:
    assert ask(looking, "/api/model", {}).json()["name"] == "decoder"
    found = ask(looking, "/api/model?model=pair", {}).json()
    assert found["name"] == "pair"
    assert "interventions" not in found["views"]
    assert ask(looking, "/api/model?model=none", {}).status == 404
    for endpoint in ("save", "ablate_each", "checkpoints", "nothing"):
        assert ask(looking, f"/api/{endpoint}", {}).status == 404
    long = {"prompt": {"appended": [5] * 257}}
    assert ask(looking, "/api/tokenize", {"forward_pass": long}).status == 400  # more than the server's max_len


def test_the_bounds_are_stated(looking: Server) -> None:
    limits = Limits()
    assert ask(looking, "/props").json()["look"] == {
        "max_answers": limits.max_answers,
        "max_bytes": limits.max_answer_bytes,
        "candidates": CANDIDATES,
    }
    names = ["decoder", "pair"]
    assert ask(looking, "/openapi.json").json() == openapi.document(names, look=True)


def test_without_look_nothing_of_it_exists(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptAnswers, "__init__", None)
    monkeypatch.setattr("glasshouse.generation.sampling.sampler._top_ids", None)
    answer = completed(server)
    assert ask(server, f"/v1/answers/{answer['id']}").status == 404
    assert "error" in ask(server, "/").json()
    assert ask(server, "/static/main.js").status == 404
    assert ask(server, "/api/model", {}).status == 404
    assert "look" not in ask(server, "/props").json()
    assert server.api.answers is None


# Where two answers part


def test_answers_are_compared_where_they_can_be(looking: Server, decoder: gh.models.Decoder) -> None:
    one, two = (completed(looking, seed=seed, return_token_ids=True) for seed in (1, 2))
    found = ask(looking, "/v1/answers/comparison", {"a": one["id"], "b": two["id"]}).json()
    first, second = (answer["choices"][0]["token_ids"] for answer in (one, two))
    assert found["parts_at"] == next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert found["same_prompt"]
    same = ask(looking, "/v1/answers/comparison", {"a": one["id"], "b": one["id"]}).json()
    assert same["parts_at"] is None
    assert not tensor(same["kl_divergence"]).any()  # of a model and itself
    with torch.no_grad():
        losses = -decoder(torch.tensor([found["ids"]]))[0].log_softmax(-1)
    expected = losses[:-1].gather(1, torch.tensor(found["ids"][1:])[:, None])[:, 0]
    assert torch.equal(tensor(found["loss_a"])[:-1], expected)
    other = completed(looking, model="pair", prompt="to be")
    mixed = ask(looking, "/v1/answers/comparison", {"a": one["id"], "b": other["id"]}).json()
    assert "compare two of one shape" in mixed["reason"]
    assert "kl_divergence" not in mixed


def test_answers_of_others_are_not_compared(looking: Server) -> None:
    mine = completed(looking)
    body = {"a": mine["id"], "b": mine["id"]}
    assert ask(looking, "/v1/answers/comparison", body).status == 200
    assert ask(looking, "/v1/answers/comparison", body, key=KEYS[1]).status == 404
    assert ask(looking, "/v1/answers/comparison", {"a": mine["id"]}).status == 400
    assert ask(looking, "/v1/answers/comparison", body | {"c": "x"}).status == 400


def test_tokens_of_different_tokenizers_are_not_compared(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> None:
    other = ServedModel("other", decoder, gh.Tokenizer.train(texts=["else " * 9], vocab_size=265), slots=1)
    with pytest.raises(ApiError, match="different tokenizers"):
        check_tokenizers(ServedModel("one", decoder, tok, slots=1), other)


# What is kept is bounded


def kept(name: str, n_tokens: int) -> KeptAnswer:
    draws = Draws(2)
    for _ in range(n_tokens):
        draws.add(np.zeros((3, 3)))
    empty = array("i")
    return KeptAnswer(name, "m", 0, (KeptChoice(empty, empty, empty, draws, SamplingParams(), "stop"),))


def test_the_oldest_answers_go_first() -> None:
    store = KeptAnswers(max_answers=3, max_bytes=10**9)
    for number in range(5):
        store.keep("k", kept(str(number), 1))
    assert [store.find("k", str(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_bytes_are_bounded() -> None:
    one = kept("x", 10).n_bytes
    store = KeptAnswers(max_answers=100, max_bytes=3 * one + 10)
    for number in range(7):
        store.keep("k", kept(str(number), 10))
        assert store.n_bytes == sum(one for _ in range(len(store))) <= store.max_bytes
    assert len(store) == 3
    store.keep("k", kept("large", 1000))  # more than all of it: what is there stays
    assert store.find("k", "large") is None
    assert len(store) == 3


def test_a_server_keeps_as_many_as_it_says(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> None:
    made = Server([ServedModel("decoder", decoder, tok, slots=2)], keys=KEYS, limits=Limits(max_answers=2), look=True)
    made.start()
    try:
        answers = [completed(made, max_tokens=1)["id"] for _ in range(3)]
        assert [ask(made, f"/v1/answers/{one}").status for one in answers] == [404, 200, 200]
    finally:
        made.close()


def test_grammars_are_not_kept_with_answers(looking: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is kept costs what is counted: of its grammar, a megabyte when compiled, nothing stays."""
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    before = {id(one) for one in gc.get_objects() if isinstance(one, Grammar)}  # of other servers
    for number in range(6):
        answer = completed(looking, grammar=f'start: "to be {number}"', max_tokens=20)
        assert ask(looking, f"/v1/answers/{answer['id']}").json()["output"]
    gc.collect()
    assert sum(isinstance(one, Grammar) and id(one) not in before for one in gc.get_objects()) <= 2
