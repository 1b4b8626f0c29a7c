"""The official client against the server: every endpoint, sync and async, streamed and not, and its exceptions."""

from __future__ import annotations

import asyncio
import base64
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from serve.conftest import KEYS, WORDS
from serve.random_requests import RandomRequest, random_requests

import glasshouse as gh
from glasshouse.serve import Server

Client = openai.OpenAI


def streamed_text(client: Client, **settings: Any) -> tuple[str, str | None, list[Any]]:  # noqa: ANN401
    """Return the text, the finish reason and all chunks of a streamed completion."""
    chunks = list(client.completions.create(stream=True, **settings))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason, chunks


def test_models(client: Client) -> None:
    assert [one.id for one in client.models.list()] == ["decoder", "pair", "encoder"]
    assert client.models.retrieve("pair").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_completion_is_what_the_library_generates(
    client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    (expected,) = gh.generate(decoder, tok, "to be", max_new_tokens=20)
    answer = client.completions.create(model="decoder", prompt="to be", max_tokens=20, temperature=0, logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    best = [max(top, key=top.get) for top in choice.logprobs.top_logprobs]
    assert best == choice.logprobs.tokens  # greedy
    assert answer.usage.prompt_tokens == len(tok.encode("to be"))
    assert answer.usage.completion_tokens == len(expected.ids)


def test_several_prompts_and_samples_are_in_order(
    client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    prompts = ["to be", "question"]
    expected = gh.generate(decoder, tok, prompts, max_new_tokens=8, temperature=0.9, seed=7, n=3)
    answer = client.completions.create(model="decoder", prompt=prompts, max_tokens=8, temperature=0.9, seed=7, n=3)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_echo_has_the_log_probabilities_of_the_prompt(
    client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    ids = tok.encode("to be, or not")
    with torch.no_grad():
        logprobs = decoder(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    for max_tokens in (0, 1):  # lm-eval asks for one token, others for none
        answer = client.completions.create(
            model="decoder", prompt=ids, echo=True, max_tokens=max_tokens, temperature=0, logprobs=2
        )
        found = answer.choices[0].logprobs
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert found.top_logprobs[1] == pytest.approx(
            {
                tok.decode_bytes([int(token)]).decode(errors="replace"): float(value)
                for value, token in zip(*logprobs[0].topk(2), strict=True)
                if "�" not in tok.decode([int(token)])
            }
            | {name: value for name, value in found.top_logprobs[1].items() if name.startswith("bytes:")},
            abs=1e-4,
        )
        assert answer.choices[0].text.startswith("to be, or not")
        assert len(found.tokens) == len(ids) + max_tokens == len(found.text_offset)


def test_end_tokens_have_log_probabilities(client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    """lm-eval takes the last one for that of the one token that it asks for, whichever that is."""
    ids, end = tok.encode("to be, or not"), tok.token_to_id("<|end|>")
    with torch.no_grad():
        logprobs = decoder(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [*(float(logprobs[at, token]) for at, token in enumerate(ids[1:])), float(logprobs[-1, end])]
    settings: Any = {"model": "decoder", "prompt": ids, "echo": True, "max_tokens": 1, "temperature": 0}
    settings |= {"logit_bias": {str(end): 100}, "logprobs": 1}
    (whole,) = client.completions.create(**settings).choices
    text, reason, chunks = streamed_text(client, **settings)
    assert whole.text == text == "to be, or not"
    assert whole.finish_reason == reason == "stop"
    streamed = [value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs]
    for found in (whole.logprobs.token_logprobs, streamed):
        assert found[0] is None
        assert found[1:] == pytest.approx(expected, abs=1e-4)
    assert whole.logprobs.tokens[-1] == "<|end|>"
    assert len(whole.logprobs.top_logprobs) == len(whole.logprobs.text_offset) == len(ids) + 1


def test_chat_is_the_template_and_the_library(client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    messages: list[Any] = [{"role": "system", "content": "be"}, {"role": "user", "content": "to be?"}]
    ids = tok.encode_chat(messages, add_generation_prompt=True).ids
    (expected,) = gh.generate(decoder, tok, [ids], max_new_tokens=12, temperature=1.0, seed=3)
    settings: Any = {"model": "decoder", "messages": messages, "max_tokens": 12, "seed": 3}
    answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content) == tok.decode_bytes(expected.ids)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == answer.usage
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    joined: Any = [{"role": "user", "content": "a\nb"}]
    one, two = (
        client.chat.completions.create(model="decoder", messages=given, max_tokens=5, seed=1)
        for given in (parts, joined)
    )
    assert one.choices[0].message.content == two.choices[0].message.content


def test_responses_without_state(client: Client) -> None:
    settings: Any = {"model": "decoder", "max_output_tokens": 9, "extra_body": {"seed": 5}}
    chat = client.chat.completions.create(
        model="decoder",
        messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "to be?"}],
        max_tokens=9,
        seed=5,
    )
    answer = client.responses.create(input="to be?", instructions="be", **settings)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    as_list: Any = [{"role": "user", "content": [{"type": "input_text", "text": "to be?"}]}]
    assert client.responses.create(input=as_list, instructions="be", **settings).output_text == answer.output_text
    events = list(client.responses.create(input="to be?", instructions="be", stream=True, **settings))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == answer.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].type == f"response.{answer.status}"
    assert events[-1].response.usage == answer.usage
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="to be?", previous_response_id="resp_1", **settings)


def test_embeddings_in_both_encodings(client: Client, encoder: gh.models.Encoder, tok: gh.Tokenizer) -> None:
    texts = ["to be", "that is the question, or not", "mind"]
    expected = gh.embed(encoder, tok, texts, normalize=True)  # which clients of this API rely on
    as_base64 = client.embeddings.create(model="encoder", input=texts)  # what the client asks for by default
    as_float = client.embeddings.create(model="encoder", input=texts, encoding_format="float")
    for answer in (as_base64, as_float):
        found = torch.tensor([one.embedding for one in answer.data])
        torch.testing.assert_close(found, expected)
        assert [one.index for one in answer.data] == [0, 1, 2]
    raw = client.embeddings.with_raw_response.create(
        model="encoder", input=texts, encoding_format="base64"
    ).http_response.json()
    floats = torch.frombuffer(bytearray(base64.b64decode(raw["data"][1]["embedding"])), dtype=torch.float32)
    torch.testing.assert_close(floats, expected[1])
    ids = client.embeddings.create(model="encoder", input=[tok.encode(text) for text in texts])
    torch.testing.assert_close(torch.tensor([one.embedding for one in ids.data]), expected)
    with pytest.raises(openai.BadRequestError, match="generate"):
        client.completions.create(model="encoder", prompt="a")


def test_encoder_decoder_translates(client: Client, pair: gh.models.Seq2Seq, tok: gh.Tokenizer) -> None:
    (expected,) = gh.generate(pair, tok, "to be", max_new_tokens=10)
    answer = client.completions.create(model="pair", prompt="to be", max_tokens=10, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="pair", messages=[{"role": "user", "content": "a"}])


def test_stop_strings_and_bias(client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    (plain,) = gh.generate(decoder, tok, "to be", max_new_tokens=30, temperature=0.8, seed=1)
    stop = plain.text[8:10]
    (expected,) = gh.generate(decoder, tok, "to be", max_new_tokens=30, temperature=0.8, seed=1, stop=stop)
    settings: Any = {"model": "decoder", "prompt": "to be", "max_tokens": 30, "temperature": 0.8, "seed": 1}
    answer = client.completions.create(**settings, stop=stop, logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")
    text, reason, chunks = streamed_text(client, **settings, stop=[stop], logprobs=1)
    assert (text, reason) == (expected.text, "stop")
    tokens = [token for chunk in chunks for choice in chunk.choices for token in choice.logprobs.tokens]
    assert tokens == answer.choices[0].logprobs.tokens  # none of a token that the stop string drops
    banned = expected.ids[0]
    other = client.completions.create(
        **settings, logit_bias={str(banned): -100}, extra_body={"return_token_ids": True}
    )
    assert banned not in other.choices[0].token_ids


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "no model"),
        ({"n": 10**6}, openai.BadRequestError, "from 1 to 128"),
        ({"max_tokens": 2**63}, openai.BadRequestError, "max_tokens"),
        ({"prompt": [1] * 300}, openai.BadRequestError, "has 300 tokens, but the context length of 'decoder' is 256"),
        ({"max_tokens": 254}, openai.BadRequestError, "up to 254"),
        ({"temperature": -1}, openai.BadRequestError, "temperature is -1"),
        ({"extra_body": {"top_k": 1.5}}, openai.BadRequestError, "top_k is 1.5"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "did you mean temperature"),
        ({"extra_body": {"suffix": "x"}}, openai.BadRequestError, "suffix is not supported"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"prompt": ""}, openai.BadRequestError, "empty"),
        ({"prompt": [[1], ["a"]]}, openai.BadRequestError, "prompt"),
        ({"best_of": 3}, openai.BadRequestError, "best_of"),
    ],
)
def test_errors_are_the_client_s_exceptions(
    client: Client, settings: dict[str, Any], error: type[openai.APIStatusError], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        client.completions.create(**{"model": "decoder", "prompt": "to be", **settings})
    assert caught.value.body["type"] == "invalid_request_error"
    assert client.completions.create(model="decoder", prompt="a", max_tokens=1).choices  # the next one is answered


def test_keys(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0).models.list()
    assert openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEYS[1], max_retries=0).models.list().data


def check_streamed_equals_whole(client: Client, count: int, seed: int) -> None:
    for one in random_requests(seed, count):
        whole = client.completions.create(**one.settings())
        chunks = list(
            client.completions.create(**one.settings(), stream=True, stream_options={"include_usage": True})
        )
        assert one.answer(whole) == one.joined(chunks), one
        assert chunks[-1].usage == whole.usage, one


def test_streamed_equals_whole(client: Client) -> None:
    check_streamed_equals_whole(client, 20, seed=0)


@pytest.mark.long
def test_streamed_equals_whole_a_thousand_times(client: Client) -> None:
    check_streamed_equals_whole(client, 1000, seed=1)


def reference(one: RandomRequest, model: gh.models.Decoder, tok: gh.Tokenizer) -> list[tuple[str, list[int], str]]:
    found = gh.generate(model, tok, **one.library_settings())
    return [(completion.text, completion.ids, completion.finish_reason) for completion in found]


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.long)])
def test_answers_equal_the_library_alone_and_among_others(
    count: int, server: Server, client: Client, decoder: gh.models.Decoder, tok: gh.Tokenizer
) -> None:
    requests = list(random_requests(2, count))
    alone = [one.answer(client.completions.create(**one.settings())) for one in requests[:6]]

    async def together() -> list[list[tuple[str, list[int], str]]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.address}/v1", api_key=KEYS[0], max_retries=20, timeout=120
        ) as many:

            async def ask(one: RandomRequest) -> list[tuple[str, list[int], str]]:
                if one.number % 2:
                    return one.answer(await many.completions.create(**one.settings()))
                stream = await many.completions.create(**one.settings(), stream=True)
                return one.joined([chunk async for chunk in stream])

            return await asyncio.gather(*map(ask, [*requests, *requests]))

    expected = [reference(one, decoder, tok) for one in requests]
    assert alone == expected[:6]
    with ThreadPoolExecutor(1) as thread:  # a browser that other tests drive leaves its event loop in this one
        assert thread.submit(asyncio.run, together()).result() == [*expected, *expected]


def test_tokenize(server: Server, tok: gh.Tokenizer, client: Client) -> None:
    text = " ".join(random.Random(0).choices(WORDS, k=20))
    root = client.with_options(base_url=server.address)
    found = root.post("/tokenize", cast_to=object, body={"model": "decoder", "prompt": text})
    assert found == {"tokens": tok.encode(text), "count": len(tok.encode(text)), "max_model_len": 256}
    back = root.post("/detokenize", cast_to=object, body={"model": "decoder", "tokens": tok.encode(text)})
    assert back == {"prompt": text}
    chat: Any = [{"role": "user", "content": "a"}]
    ids = root.post("/tokenize", cast_to=object, body={"model": "decoder", "messages": chat})
    assert ids["tokens"] == tok.encode_chat(chat, add_generation_prompt=True).ids  # type: ignore[index]
