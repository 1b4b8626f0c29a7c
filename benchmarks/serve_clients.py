"""Clients of benchmarks/serve.py, in a process of their own that imports little: `python serve_clients.py PORT N`."""

from __future__ import annotations

import http.client
import json
import queue
import sys
import threading
import time
from typing import Any

PROBE_PAUSE = 0.1  # seconds between two requests to /health: seldom, as they take the cores of the engine


def post(connection: http.client.HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"{response.status}: {answer}")
    return answer


def client(port: int, clients: int, bodies: list[dict[str, Any]]) -> None:
    """Send all requests from a number of threads; print seconds, tokens and latencies as JSON."""
    left: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for body in bodies:
        left.put(body)
    tokens, latencies, probes = [], [], []
    done = threading.Event()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while True:
            try:
                body = left.get_nowait()
            except queue.Empty:
                return
            begin = time.perf_counter()
            answer = post(connection, body)
            latencies.append(time.perf_counter() - begin)
            tokens.append(answer["usage"]["completion_tokens"])

    def probe() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while not done.wait(PROBE_PAUSE):
            begin = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            probes.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    watching = threading.Thread(target=probe)
    watching.start()
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    done.set()
    watching.join()
    health = sorted(probes or [0.0])[int(0.99 * (len(probes) - 1))] if probes else 0.0
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tokens": sum(tokens),
                "latencies": latencies,
                "health_p99": health,
            }
        )
    )


if __name__ == "__main__":
    client(int(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin))
