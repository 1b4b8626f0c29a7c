"""What a hostile JSON schema costs `glasshouse serve`: time, memory, and the rate of 50 streams beside it.

    python benchmarks/hostile_schemas.py [--streams 50] [--seconds 20]

The bundled model python-3m streams to one key, while another sends the schemas of tests/serve/random_schemas.py, one
after the other. Printed are the time until each is refused or answered, the memory that the server gained in all, and
the tokens per second of the streams without and with them, in turns. On two cores the client shares them, too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import glasshouse as gh
from glasshouse.serve import ServedModel, Server

sys.path[0] = str(Path(__file__).parent.parent / "tests")  # not this folder, which has a serve.py
from serve.random_schemas import HOSTILE  # noqa: E402 (after the path)

KEYS = ("the key of the fifty streams".replace(" ", "-"), "the key of the hostile one".replace(" ", "-"))


def post(server: Server, key: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps({"model": "m", "prompt": "import", **body}), headers)
    return connection.getresponse()


class Streams:
    """Clients that stream one answer after the other, and count its tokens."""

    def __init__(self, server: Server, count: int) -> None:
        self.tokens = [0] * count
        self.stopped = False
        for number in range(count):
            threading.Thread(target=self._run, args=(server, number), daemon=True).start()

    def _run(self, server: Server, number: int) -> None:
        while not self.stopped:
            for line in post(server, KEYS[0], {"max_tokens": 200, "stream": True, "min_tokens": 200}):
                self.tokens[number] += line.startswith(b'data: {"id')

    def rate(self, work: Any) -> tuple[float, int]:  # noqa: ANN401 - a function
        """Return the tokens per second during some work, and those of the slowest stream."""
        before, start = list(self.tokens), time.perf_counter()
        work()
        new = [now - then for now, then in zip(self.tokens, before, strict=True)]
        return sum(new) / (time.perf_counter() - start), min(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    model, tok = gh.load("python-3m")
    server = Server([ServedModel("m", model, tok, slots=args.streams + 4, max_len=512)], keys=KEYS)
    server.start()
    post(server, KEYS[1], {"max_tokens": 1, "grammar": 'start: "a"'}).read()  # starts the process
    streams = Streams(server, args.streams)
    time.sleep(5)
    memory = psutil.Process().memory_info().rss
    quiet, least = streams.rate(lambda: time.sleep(args.seconds))
    print(f"alone: {quiet:.0f} tokens/s, the slowest stream {least} tokens")
    lines = []

    def attack() -> None:
        for name, schema in HOSTILE.items():
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            start = time.perf_counter()
            response = post(server, KEYS[1], {"max_tokens": 30, "response_format": form})
            answer = json.loads(response.read())
            said = answer["error"]["message"] if "error" in answer else answer["choices"][0]["finish_reason"]
            lines.append(f"{time.perf_counter() - start:6.2f} s  {response.status}  {name}: {said[:90]}")

    busy, least = streams.rate(attack)
    print("\n".join(lines))
    print(f"beside them: {busy:.0f} tokens/s ({busy / quiet:.0%}), the slowest stream {least} tokens")
    print(f"memory: {(psutil.Process().memory_info().rss - memory) / 2**20:+.0f} MiB")
    streams.stopped = True
    server.close()


if __name__ == "__main__":
    main()
