"""Reading requests: in turns between keys, in bounded time, and not at all where nobody waits or nothing can fit."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.conftest import KEYS, TEXT
from serve.plain_http import Answer, ask, begin, eventually

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server
from glasshouse.serve.runtime.preparation import MAX_OF_KEY, THREADS, Preparation
from glasshouse.text.token_text import NFC_SHRINKS, max_token_bytes

WAITING = 30


@pytest.fixture
def reader(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> Iterator[Server]:
    made = Server([ServedModel("decoder", decoder, tok, slots=4)], keys=KEYS, limits=Limits(max_waiting=WAITING))
    made.start()
    assert eventually(lambda: made.api.runner.ready)
    yield made
    made.close()


class SlowPrompts:
    """Makes prompts that begin with "slow" take until they are freed; `order` has those that were read."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.order = threading.Event(), list[str]()
        served = server.api.models["decoder"]
        encode = served.encode

        def slow(prompt: str) -> list[int]:
            self.order.append(prompt)
            if prompt.startswith("slow"):
                assert self.free.wait(60)
            return encode(prompt)

        monkeypatch.setattr(served, "encode", slow)


def complete(server: Server, prompt: str, key: str = KEYS[0]) -> Answer:
    return ask(server, "/v1/completions", {"model": "decoder", "prompt": prompt, "max_tokens": 1}, key=key)


def test_a_key_with_slow_prompts_does_not_hold_up_another(reader: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPrompts(reader, monkeypatch)
    with ThreadPoolExecutor(24) as many:
        first = [many.submit(complete, reader, f"slow {number}") for number in range(20)]
        assert eventually(lambda: len(slow.order) == MAX_OF_KEY)
        for _ in range(3):
            assert complete(reader, "a", KEYS[1]).status == 200  # though none of the others is done
        assert len(slow.order) == MAX_OF_KEY + 3
        slow.free.set()
        assert {one.result().status for one in first} == {200}


def test_keys_take_turns_to_be_read(reader: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPrompts(reader, monkeypatch)
    with ThreadPoolExecutor(24) as many:
        begun = [many.submit(complete, reader, "slow", key) for key in KEYS for _ in range(THREADS // 2)]
        assert eventually(lambda: len(slow.order) == THREADS)
        waiting = reader.api._preparation._queue
        late = [many.submit(complete, reader, f"a {number}") for number in range(8)]
        assert eventually(lambda: len(waiting) == 8)
        late.append(many.submit(complete, reader, "other", KEYS[1]))
        assert eventually(lambda: len(waiting) == 9)
        slow.free.set()
        assert {one.result().status for one in (*begun, *late)} == {200}
    assert slow.order.index("other") <= THREADS + 1 + THREADS  # the second turn, give or take what runs at once


def test_who_waits_too_long_is_told_to_come_again(reader: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is about the request only where the request itself took long."""
    monkeypatch.setattr(reader.api, "limits", Limits(max_waiting=WAITING, prepare_timeout=0.3))
    slow = SlowPrompts(reader, monkeypatch)
    with ThreadPoolExecutor(8) as many:
        first = [many.submit(complete, reader, "slow") for _ in range(MAX_OF_KEY)]
        assert eventually(lambda: len(slow.order) == MAX_OF_KEY)
        waited = complete(reader, "a")
        assert (waited.status, waited.json()["error"]["code"]) == (503, "service_unavailable")
        assert f"try again in {waited.headers['retry-after']} s" in waited.json()["error"]["message"]
        assert "shorten" not in waited.json()["error"]["message"]
        for one in first:
            assert one.result().status == 400
            assert "0.3 s; shorten the prompt" in one.result().json()["error"]["message"]
        assert ask(reader, "/health", key=None).status == 200
        slow.free.set()
        assert eventually(lambda: complete(reader, "a").status == 200)


def test_too_many_that_wait_get_429(reader: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPrompts(reader, monkeypatch)
    waiting = reader.api._preparation._queue
    with ThreadPoolExecutor(WAITING + THREADS) as many:
        first = [many.submit(complete, reader, "slow") for _ in range(WAITING + MAX_OF_KEY)]
        assert eventually(lambda: len(waiting) == WAITING)
        assert complete(reader, "a").status == 429
        assert complete(reader, "a", KEYS[1]).status == 200
        slow.free.set()
        assert {one.result().status for one in first} <= {200, 429}  # the queue of the engine has a limit as well


def test_what_has_not_begun_ends_with_its_client(reader: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPrompts(reader, monkeypatch)
    waiting = reader.api._preparation._queue
    body = {"model": "decoder", "prompt": "slow", "max_tokens": 1}
    begun = [begin(reader, "/v1/completions", body) for _ in range(MAX_OF_KEY)]
    assert eventually(lambda: len(slow.order) == MAX_OF_KEY)
    left = [begin(reader, "/v1/completions", {**body, "prompt": "left"}) for _ in range(5)]
    assert eventually(lambda: len(waiting) == 5)
    for one in left:
        one.close()
    assert eventually(lambda: len(waiting) == 0, 10)  # before the time is up in which a request waits
    slow.free.set()
    assert complete(reader, "a").status == 200
    assert "left" not in slow.order
    for one in begun:
        one.close()


def test_who_leaves_at_the_moment_of_its_turn() -> None:
    """A task that is cancelled sees it only when it runs next; until then its work is still in the queue."""

    async def leave() -> int:
        preparation = Preparation(10)
        free = threading.Event()
        running = [asyncio.ensure_future(preparation.run(str(n), free.wait, 60)) for n in range(THREADS)]
        waiting = asyncio.ensure_future(preparation.run("a", lambda: 1, 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        preparation._running.clear()  # as if a thread were free
        try:
            preparation._start()
        finally:
            free.set()
        await asyncio.wait(running)
        found = await preparation.run("a", lambda: 2, 60)
        preparation.close()
        return found

    with ThreadPoolExecutor(1) as thread:  # a browser that other tests drive leaves its event loop in this one
        assert thread.submit(asyncio.run, leave()).result() == 2


def test_what_cannot_fit_is_not_tokenized(reader: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, lengths = gh.Tokenizer.encode, list[int]()

    def noted(self: gh.Tokenizer, text: str, *more: bool, **rest: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, *more, **rest)

    monkeypatch.setattr(gh.Tokenizer, "encode", noted)
    monkeypatch.setattr(gh.Tokenizer, "encode_batch", lambda self, texts: pytest.fail("it was tokenized"))
    bodies: list[tuple[str, str, object]] = [
        ("/v1/completions", "prompt", " " * 4_000_000),
        ("/v1/completions", "prompt", ["a", "b" * 4_000_000]),
        ("/v1/embeddings", "input", "é" * 300_000),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "x" * 2_000_000}] * 2),
        ("/v1/responses", "input", "x" * 4_000_000),
    ]
    for path, field, given_text in bodies:
        answer = ask(reader, path, {"model": "decoder", field: given_text})
        assert answer.status == 400
        least = int(answer.json()["error"]["message"].split("at least ")[1].split()[0])
        assert 256 < least <= len(json.dumps(given_text, ensure_ascii=False).encode())
    assert all(length < 1000 for length in lengths)


@pytest.fixture(scope="module")
def composing(tok: gh.Tokenizer) -> gh.Tokenizer:
    """The tokenizer with a normalizer that composes characters."""
    return gh.Tokenizer.from_json(json.dumps(json.loads(tok._text) | {"normalizer": {"type": "NFC"}}))


@settings(max_examples=up_to(400), deadline=None)
@given(st.text(max_size=60))
def test_a_text_has_no_fewer_tokens_than_its_bytes_say(tok: gh.Tokenizer, composing: gh.Tokenizer, text: str) -> None:
    for one in (tok, composing):
        longest = max_token_bytes(one)
        assert longest is not None
        for form in (text, unicodedata.normalize("NFD", text), "\u212a" * len(text), TEXT):
            assert len(one.encode(form)) * longest >= len(form.encode())


def test_composed_characters_are_not_more_times_shorter() -> None:
    """Of every character, the longest text that becomes it: its decomposition, of the longest equal characters."""
    longest_of: dict[str, int] = {}
    decomposed = [one for one in map(chr, range(0x110000)) if unicodedata.decomposition(one)]
    for one in decomposed:
        if len(found := unicodedata.normalize("NFC", one)) == 1:
            longest_of[found] = max(longest_of.get(found, len(found.encode())), len(one.encode()))
    for one in {*longest_of, *decomposed}:
        parts = unicodedata.normalize("NFD", one)
        size = sum(longest_of.get(part, len(part.encode())) for part in parts)
        assert max(size, longest_of.get(one, 0)) <= NFC_SHRINKS * len(one.encode()), hex(ord(one))


def test_tokenizers_in_which_text_vanishes_have_no_bound(tok: gh.Tokenizer) -> None:
    tokenizer_json = json.loads(tok._text)
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    strips = {"id": len(tok), "content": "<x>", "single_word": False, "lstrip": True, "rstrip": False}
    strips |= {"normalized": False, "special": False}
    for change in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, tokenizer_json["pre_tokenizer"]]}},
        {"added_tokens": [*tokenizer_json["added_tokens"], strips]},
    ):
        assert max_token_bytes(gh.Tokenizer.from_json(json.dumps(tokenizer_json | change))) is None
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    assert max_token_bytes(gh.Tokenizer.from_json(json.dumps({"version": "1.0", "model": words}))) is None


@pytest.mark.long
def test_many_clients_with_megabytes_do_not_starve_another_key() -> None:
    """72 clients with 4.1 MB of spaces, much work for a tokenizer, and the one-letter prompt of another key."""
    model, tok = gh.load("python-3m")
    server = Server([ServedModel("python", model, tok, slots=4)], keys=KEYS, limits=Limits(max_waiting=256))
    server.start()
    ended, statuses, times = threading.Event(), list[tuple[str, int]](), list[float]()
    data = json.dumps({"model": "python", "prompt": " " * 4_100_000}).encode()

    def attack(path: str) -> None:
        while not ended.is_set():
            statuses.append((path, ask(server, path, data).status))

    try:
        assert eventually(lambda: server.api.runner.ready)
        for path in ("/v1/completions", "/tokenize"):  # refused by its length; tokenized, as nothing needs to fit
            ended.clear()
            with ThreadPoolExecutor(72) as many:
                attacks = [many.submit(attack, path) for _ in range(72)]
                end = time.monotonic() + 30
                while time.monotonic() < end:
                    begin_at = time.monotonic()
                    body = {"model": "python", "prompt": "a", "max_tokens": 1}
                    assert ask(server, "/v1/completions", body, key=KEYS[1]).status == 200
                    times.append(time.monotonic() - begin_at)
                ended.set()
                for one in attacks:
                    one.result()
            times.sort()
            counts = {
                status: statuses.count((path, status)) for status in {two for one, two in statuses if one == path}
            }
            print(
                f"\n72 clients with 4.1 MB to {path} for 30 s: {counts}; the other key: {len(times)} answers, "
                f"median {times[len(times) // 2]:.2f} s, slowest {times[-1]:.2f} s"
            )
            times.clear()
    finally:
        ended.set()
        server.close()
