"""Internals over HTTP: activations, scores of probes and rules on them, each request its own."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load
from serve.conftest import KEYS
from serve.plain_http import ask

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import Rule
from glasshouse.inspection import SteeringVector
from glasshouse.inspection.linear_probe import HeldOut, LinearProbe
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.serve import Limits, ServedModel, Server, assign_rules
from glasshouse.serve.answers.logprobs import token_text
from glasshouse.serve.runtime.exchange import Job, Piece

SETTINGS: dict[str, Any] = {"model": "decoder", "prompt": "to be", "max_tokens": 24, "temperature": 0}
SITES = ("resid_post.1[position=new]", "pattern.0[head=1]")


@pytest.fixture(scope="module")
def probes(decoder: gh.models.Decoder) -> dict[str, LinearProbe]:
    drawn = torch.randn(2, decoder.spec.d_model, generator=torch.Generator().manual_seed(4))
    held_out, mark = HeldOut(1.0, 1.0, 1, 1), model_fingerprint(decoder)
    names = {"minds": "resid_post.0", "nobles": "resid_post.1"}
    return {
        name: LinearProbe(direction, 0.5, site, mark, held_out)
        for direction, (name, site) in zip(drawn, names.items(), strict=True)
    }


@pytest.fixture(scope="module")
def vector(decoder: gh.models.Decoder, tok: gh.Tokenizer) -> SteeringVector:
    return gh.steering_vector(decoder, tok, ["to be", "the mind"], ["question", "or not"], site="resid_post.0")


@pytest.fixture(scope="module")
def server(
    decoder: gh.models.Decoder, tok: gh.Tokenizer, probes: dict[str, LinearProbe], vector: SteeringVector
) -> Iterator[Server]:
    made = Server(
        [ServedModel("decoder", decoder, tok, slots=8, probes=probes, steering={"v": vector})],
        keys=KEYS,
        internals=True,
        limits=Limits(max_recorded=200_000, max_recorded_by_key=500_000),
    )
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(
    decoder: gh.models.Decoder, tok: gh.Tokenizer, probes: dict[str, LinearProbe]
) -> gh.generation.Completion:
    engine = gh.Engine(decoder, tok, slots=1, max_len=256, probes=probes)
    request = engine.submit("to be", max_new_tokens=24, record=SITES, probes=("minds", "nobles"))
    engine.run()
    return request.completions()[0]


def same_scores(found: dict[str, list[float]], of: gh.generation.Completion) -> bool:
    assert of.scores is not None
    return found == {name: pytest.approx(scores, abs=1e-4) for name, scores in of.scores.items()}


def test_whole_and_streamed_answers_have_what_the_engine_reads(
    client: openai.OpenAI, expected: gh.generation.Completion
) -> None:
    body: Any = {"record": list(SITES), "probes": ["minds", "nobles"]}
    whole = client.completions.create(**SETTINGS, extra_body=body).choices[0].model_dump()
    assert expected.recording is not None
    assert same_scores(whole["scores"], expected)
    activations = load(base64.b64decode(whole["recording"]))
    assert activations.keys() == set(SITES)
    for name in SITES:
        torch.testing.assert_close(activations[name], expected.recording[name])

    chunks = [
        chunk.choices[0].model_dump()
        for chunk in client.completions.create(**SETTINGS, stream=True, extra_body={**body, "return_token_ids": True})
    ]
    scores: dict[str, list[float]] = {"minds": [], "nobles": []}
    n_ids = 0
    for chunk in chunks:
        n_ids += len(chunk["token_ids"])
        for name, new in chunk["scores"].items():
            scores[name] += new
            assert len(scores[name]) <= n_ids  # no score before its token
        assert ("recording" in chunk) == (chunk is chunks[-1])
    assert same_scores(scores, expected)
    assert len(chunks) > 4
    streamed = load(base64.b64decode(chunks[-1]["recording"]))
    assert all(torch.equal(streamed[name], activations[name]) for name in SITES)


def test_lens_and_attention_come_with_the_tokens(
    client: openai.OpenAI, decoder: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    body: Any = {"lens": 3, "attended": {"pattern.0[head=1]": 2, "pattern.1": 1}, "return_token_ids": True}
    chunks = list(client.completions.create(**SETTINGS, stream=True, extra_body=body))
    ids: list[int] = []
    lens: list[Any] = []
    attention: dict[str, list[Any]] = {"pattern.0[head=1]": [], "pattern.1": []}
    for chunk in chunks:
        choice = chunk.choices[0].model_dump()
        ids += choice["token_ids"]
        lens += choice.get("lens", [])
        for name, rows in choice.get("attention", {}).items():
            attention[name] += rows
        assert len(lens) == len(ids) == len(attention["pattern.1"])
    prompt = tok.encode("to be")
    inputs = torch.tensor([[*prompt, *ids]])
    expected = gh.lens(decoder, inputs, top_k=3)
    with gh.record(decoder, "pattern.0[head=1]") as seen:
        decoder(inputs)
    for number, layers in enumerate(lens):
        at = len(prompt) - 1 + number
        for layer, row in enumerate(layers):
            assert [value for _, value in row] == pytest.approx(
                expected.probabilities[layer, 0, at].tolist(), abs=1e-5
            )
        weights = seen["pattern.0[head=1]"][0, at].topk(2)
        assert [value for _, value in attention["pattern.0[head=1]"][number]] == pytest.approx(
            weights.values.tolist(), abs=1e-5
        )
        assert all(0 <= place <= at for head in attention["pattern.1"][number] for place, _ in head)
    assert lens[-1][-1][0][0] == token_text(tok, ids[-1])


def test_chats_have_internals_and_requests_that_ask_for_nothing_have_none(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "to be?"}]
    chat = client.chat.completions.create(
        model="decoder", messages=messages, max_tokens=9, temperature=0, extra_body={"probes": ["minds"]}
    )
    said = chat.choices[0].model_dump()
    assert said["scores"].keys() == {"minds"}
    assert len(said["scores"]["minds"]) in (8, 9)
    assert not {"recording", "firings"} & said.keys()
    plain = client.completions.create(**SETTINGS).choices[0].model_dump()
    assert not {"scores", "recording", "firings"} & plain.keys()


def test_many_clients_at_once_get_their_own(client: openai.OpenAI, expected: gh.generation.Completion) -> None:
    def answer(number: int) -> dict[str, Any]:
        asked: list[dict[str, Any]] = [{}, {"probes": ["minds", "nobles"]}, {"record": list(SITES)}]
        body = asked[number % 3]
        return client.completions.create(**SETTINGS, extra_body=body).choices[0].model_dump()

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(answer, range(18)))
    assert expected.recording is not None
    for number, one in enumerate(answers):
        assert one["text"] == expected.text
        if number % 3 == 1:
            assert same_scores(one["scores"], expected)
        if number % 3 == 2:
            found = load(base64.b64decode(one["recording"]))
            torch.testing.assert_close(found[SITES[0]], expected.recording[SITES[0]])


def test_rules_stop_refuse_and_steer(
    server: Server, client: openai.OpenAI, expected: gh.generation.Completion, tok: gh.Tokenizer
) -> None:
    assert expected.scores is not None
    scores = expected.scores["minds"]
    ordered = sorted(scores)
    above = (ordered[-2] + ordered[-1]) / 2  # for the highest alone
    at = scores.index(ordered[-1])

    def ruled(then: str, stream: bool = False, **more: Any) -> Any:  # noqa: ANN401 - the client's types
        rule = {"probe": "minds", "above": above, "then": then, **more}
        return client.completions.create(**SETTINGS, stream=stream, extra_body={"rules": [rule]})

    stopped = ruled("stop").choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", tok.decode(expected.ids[: at + 1]))
    (firing,) = stopped.firings
    told = {"probe": "minds", "above": above, "consecutive": 1, "then": "stop", "token": at}
    assert firing == {**told, "score": pytest.approx(scores[at], abs=1e-4)}
    refused = ruled("refuse").choices[0]
    assert (refused.finish_reason, refused.text) == ("content_filter", "")
    last = list(ruled("refuse", stream=True))[-1].choices[0]
    assert last.finish_reason == "content_filter"
    steered = ruled("steer", steer={"v": 90.0}).choices[0]
    assert steered.text != expected.text
    assert steered.text.startswith(tok.decode(expected.ids[: at + 1])[:-1])
    metrics = ask(server, "/metrics").body.decode()
    assert 'glasshouse_probe_rules_fired_total{model="decoder",probe="minds",then="stop"} 1' in metrics
    assert 'glasshouse_probe_rules_fired_total{model="decoder",probe="minds",then="refuse"} 2' in metrics
    assert 'glasshouse_requests_finished_total{model="decoder",finish_reason="content_filter"} 2' in metrics


def test_edits_are_those_of_the_model(
    client: openai.OpenAI, decoder: gh.models.Decoder, tok: gh.Tokenizer, vector: SteeringVector
) -> None:
    add = (90 * vector.vector).tolist()
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"ffn_out.0": 90}, {"ffn_out.0": 90.0}),
        ({"resid_mid.*": {"scale": -2}}, {"resid_mid.*": gh.inspection.scale(-2.0)}),
        (
            {"resid_post.0[position=new]": {"add": add}},
            {"resid_post.0[position=new]": gh.inspection.add(torch.tensor(add))},
        ),
        ({"attn_out.0": {"to": add}}, {"attn_out.0": torch.tensor(add)}),
    ]
    expected = []
    for _, edits in asked:
        with gh.edit(decoder, edits):
            expected.append(gh.generate(decoder, tok, "to be", max_new_tokens=24)[0].text)
    with ThreadPoolExecutor(5) as threads:
        answers = threads.map(
            lambda one: client.completions.create(**SETTINGS, extra_body={"edits": one[0]}).choices[0].text, asked * 2
        )
        assert list(answers) == expected * 2
    assert len(set(expected)) > 3


def test_what_is_refused(server: Server) -> None:
    assert ask(server, "/props").json()["internals"] is True
    for wrong, status, said in [
        ({"probes": ["mind"]}, 400, "there is no probe 'mind'; did you mean minds"),
        ({"record": ["resid_post.9"]}, 400, "the model has no site 'resid_post.9'"),
        ({"record": ["resid_post.*"] * 65}, 400, "record is a list of 65, but it must be a list of 0 to 64 items"),
        ({"record": ["pattern.*", "scores.*"], "max_tokens": 240}, 400, "bytes, but at most 200,000 are answered"),
        ({"rules": [{"probe": "minds", "above": 1}]}, 400, "rules[0].then is missing"),
        ({"edits": {"z.0": {"scale": 1, "to": [0]}}}, 400, "edits.z.0 has 2 of scale, add and to; give one of them"),
        ({"edits": {"z.0": {}}}, 400, "edits.z.0 has 0 of scale, add and to; give one of them"),
        ({"edits": {"z.0": {"add": [1, 2]}}}, 400, "the edit of z.0 has shape [2], but there it must be"),
        ({"edits": {"z.0": "zero"}}, 400, "edits.z.0 is 'zero', but it must be a number that replaces"),
        ({"edits": {"pattern.0": 0}}, 400, "pattern.0 cannot be edited by request"),
        ({"lens": 21}, 400, "lens is 21, but it must be a whole number from 0 to 20"),
        ({"attended": {"z.0": 2}}, 400, "z.0 has no attended positions; name a pattern"),
        ({"rules": [{"probe": "minds", "above": 1, "then": "steer"}]}, 400, "rules that steer, and no others"),
    ]:
        answer = ask(server, "/v1/completions", {**SETTINGS, **wrong})
        assert answer.status == status
        assert said in answer.json()["error"]["message"]
    answer = ask(server, "/v1/responses", {"model": "decoder", "input": "to be", "probes": ["minds"]})
    assert "probes is not supported: it is answered by /v1/chat/completions" in answer.json()["error"]["message"]


def test_recordings_of_a_key_are_bounded_while_they_are_not_answered(
    decoder: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    served = ServedModel("decoder", decoder, tok, slots=1)
    server = Server([served], keys=KEYS, internals=True, limits=Limits(max_recorded_by_key=150_000))
    api = server.api  # not started: nothing is answered
    engine = served.generator()
    params = gh.generation.SamplingParams(max_new_tokens=200, record=("resid_post.1",))
    size = (2 + 200) * decoder.spec.d_model * 4
    kept = [engine.make_request([1, 2], params) for _ in range(2)]
    api.recording_quota.add("a", kept)
    more = engine.make_request([1, 2], params)
    with pytest.raises(gh.serve.schema.errors.ApiError, match=f"record up to {2 * size:,} bytes already"):
        api.recording_quota.add("a", [more])
    api.recording_quota.add("b", [more])
    kept.clear()
    api.recording_quota.add("a", [engine.make_request([1, 2], params)])
    server.close()


def test_a_server_shows_internals_only_if_it_was_told_to(
    decoder: gh.models.Decoder, tok: gh.Tokenizer, probes: dict[str, LinearProbe]
) -> None:
    """Its own rules apply all the same."""
    rules = [Rule("minds", -1e9, "stop", consecutive=3)]
    server = Server([ServedModel("decoder", decoder, tok, slots=2, probes=probes, rules=rules)], keys=KEYS, look=True)
    server.start()
    try:
        for asked in (
            {"probes": ["minds"]},
            {"record": ["final"]},
            {"edits": {"z.0": 0}},
            {"rules": [{"probe": "minds", "above": 1, "then": "stop"}]},
        ):
            answer = ask(server, "/v1/completions", {**SETTINGS, **asked})
            assert answer.status == 403
            assert f"{next(iter(asked))} was given, but internals is off on this server" in answer.body.decode()
        answer = ask(server, "/v1/completions", {**SETTINGS, "return_token_ids": True})
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == 3
        assert "firings" not in choice
    finally:
        server.close()


def test_rules_go_to_the_models_that_have_the_probe() -> None:
    rule = Rule("minds", 1.0, "stop")
    assert assign_rules([rule], [{"minds"}, {"nobles"}]) == [[rule], []]
    with pytest.raises(InputError, match="names the probe 'minds', which is not there; there is none"):
        assign_rules([rule], [{}])


def test_an_answer_that_cannot_be_made_fails_alone(
    server: Server, expected: gh.generation.Completion, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Job.take

    def fail(job: Job) -> Piece | None:
        if job.request.done and job.request.recording is not None:
            raise RuntimeError("no such tensor")
        return take(job)

    monkeypatch.setattr(Job, "take", fail)
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEYS[0], max_retries=0, timeout=20
    ) as client:
        with pytest.raises(openai.APIError, match="the answer could not be made; see the log"):
            client.completions.create(**SETTINGS, extra_body={"record": [SITES[0]]})
        assert client.completions.create(**SETTINGS).choices[0].text == expected.text
