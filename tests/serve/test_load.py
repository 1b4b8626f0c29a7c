"""200 clients at once over loopback: no error, no growing memory, no stream far behind the others, and some leave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
from serve.conftest import KEYS
from serve.plain_http import ask, eventually, is_idle, post_head

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server

STREAMS = 200
ANSWER = 40  # tokens
SECONDS = float(os.environ.get("LOAD_SECONDS", "600"))  # of the long run: `make serving-load SECONDS=...`
GROWTH = 0.02


@dataclass
class Load:
    """Clients that stream one answer after another, and what came of it."""

    server: Server
    seconds: float
    tokens: list[int] = field(default_factory=lambda: [0] * STREAMS)  # of each stream, once all have begun
    statuses: set[bytes] = field(default_factory=set)
    answers: int = 0  # that were complete
    memory: list[int] = field(default_factory=list)  # bytes of this process, at equal distances in time

    async def run(self) -> None:
        """Keep all streams busy for a time."""
        self._begun, self._all_begun, self._ended = 0, asyncio.Event(), False
        streams = [asyncio.ensure_future(self._stream(number)) for number in range(STREAMS)]
        await asyncio.wait_for(self._all_begun.wait(), 120)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            self.memory.append(psutil.Process().memory_info().rss)
            await asyncio.sleep(self.seconds / 100)
        self._ended = True
        await asyncio.gather(*streams)

    async def _stream(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        waiting = True
        while not self._ended:
            body = {"model": "decoder", "prompt": f"to be {number}", "max_tokens": ANSWER, "min_tokens": ANSWER}
            data = json.dumps({**body, "seed": self.answers, "stream": True}).encode()
            writer.write(post_head(self.server, "/v1/completions", len(data), KEYS[number % len(KEYS)]) + data)
            self.statuses.add((await reader.readline()).split()[1])
            async for line in reader:
                if line.startswith(b"data: {"):
                    self.tokens[number] += self._all_begun.is_set() and not self._ended
                    if waiting:
                        waiting, self._begun = False, self._begun + 1
                        if self._begun == STREAMS:
                            self._all_begun.set()
                elif line.startswith(b"data: [DONE]"):
                    self.answers += 1
                elif line == b"0\r\n":  # the last chunk
                    await reader.readline()
                    break
        writer.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("slots", "seconds"),
    [
        (STREAMS, 2),
        (64, SECONDS),  # most streams wait for a slot
    ],
)
def test_many_streams(slots: int, seconds: float, tok: gh.Tokenizer, decoder: gh.models.Decoder) -> None:
    models = [ServedModel("decoder", decoder, tok, slots=slots)]
    server = Server(models, keys=KEYS, limits=Limits(max_waiting=STREAMS))
    server.start()
    try:
        assert eventually(lambda: server.api.runner.ready)
        load = Load(server, seconds)
        with ThreadPoolExecutor(1) as thread:  # a browser that other tests drive leaves its event loop in this one
            thread.submit(asyncio.run, load.run()).result()
        reasons = dict(server.api.metrics["decoder"].finish_reasons)
    finally:
        server.close()
    slowest, median = min(load.tokens), statistics.median(load.tokens)
    first, rest = load.memory[len(load.memory) // 4], load.memory[len(load.memory) // 4 :]
    print(
        f"\n{slots} slots, {seconds:g} s: {load.answers:,} answers, {sum(load.tokens) / seconds:,.0f} tokens/s; "
        f"tokens of a stream: slowest {slowest:,}, median {median:,.0f} ({slowest / median:.0%}); "
        f"memory after a quarter of the time {first / 2**20:,.1f} MiB, at most {max(rest) / 2**20:,.1f} since "
        f"({max(rest) / first - 1:+.2%})"
    )
    assert load.statuses == {b"200"}
    assert {reason for reason, count in reasons.items() if count} == {"length"}
    assert load.answers == reasons["length"]  # each stream had its end
    assert slowest >= median / 2
    assert max(rest) <= first * (1 + GROWTH)


@dataclass
class LeavingClients:
    """Clients that ask, streamed or not, and leave half of the time, in mid-request, in mid-answer or before it."""

    server: Server
    seconds: float
    whole: int = 0  # answers that were read to their end
    left: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Keep all clients busy for a time."""
        self._end = time.monotonic() + self.seconds
        await asyncio.gather(*(self._client(random.Random(number)) for number in range(STREAMS)))

    async def _client(self, draw: random.Random) -> None:
        while time.monotonic() < self._end:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            try:
                await asyncio.wait_for(
                    self._ask(draw, reader, writer), draw.choice((None, draw.expovariate(1 / 0.5)))
                )
                self.whole += 1
            except TimeoutError:
                self.left += 1
            finally:
                writer.transport.abort() if draw.random() < 0.5 else writer.close()

    async def _ask(self, draw: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prompt = "to be, or not " * draw.randint(1, 10)
        body = {
            "model": "decoder",
            "prompt": prompt,
            "max_tokens": draw.randint(1, 60),
            "stream": draw.random() < 0.5,
        }
        data = json.dumps(body).encode()
        head = post_head(self.server, "/v1/completions", len(data), draw.choice(KEYS))
        writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        if draw.random() < 0.2:
            await asyncio.sleep(draw.random())  # between the headers and the body
        writer.write(data)
        self.statuses[(await reader.readline()).split()[1].decode()] += 1
        while await reader.readline():
            pass


@pytest.mark.long
def test_clients_that_leave(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> None:
    """200 clients for a minute: whoever stays is answered, and nothing of those who left stays."""
    models = [ServedModel("decoder", decoder, tok, slots=32)]
    server = Server(models, keys=KEYS, limits=Limits(max_waiting=STREAMS))
    server.start()
    try:
        assert eventually(lambda: server.api.runner.ready)
        body = {"model": "decoder", "prompt": "to be", "max_tokens": 40, "temperature": 0}
        before = ask(server, "/v1/completions", body).json()["choices"]
        memory = psutil.Process().memory_info().rss
        clients = LeavingClients(server, min(60.0, SECONDS))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, clients.run()).result()
        grown = psutil.Process().memory_info().rss - memory
        print(
            f"\n200 clients for {clients.seconds:g} s: {clients.whole:,} answers read, {clients.left:,} left; "
            f"statuses {dict(clients.statuses)}; memory {grown / 2**20:+.1f} MiB"
        )
        engine = server.api.models["decoder"].engine
        assert engine is not None
        assert eventually(lambda: server.gate.n_requests == 0 and is_idle(server))
        assert eventually(lambda: not engine.slots.running and len(engine.slots.free) == 32)
        assert eventually(lambda: not server._uvicorn.server_state.connections)
        assert set(clients.statuses) == {"200"}
        assert min(clients.whole, clients.left) > STREAMS
        assert ask(server, "/v1/completions", body).json()["choices"] == before
        assert ask(server, "/health", key=None).status == 200
    finally:
        server.close()
