"""Two replicas behind nginx, by the configuration of docs/guides/deploy.md, which is read from there."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest
from serve.conftest import KEYS
from serve.plain_http import eventually
from serve.test_command import arguments, serving

__all__ = ["arguments"]  # a fixture

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "deploy.md"
NGINX = shutil.which("nginx")

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt-get install nginx-light)"),
]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def completion(client: openai.OpenAI, stream: bool, begun: threading.Semaphore | None = None) -> str:
    """Return a long text, which is the same each time."""
    more = {"min_tokens": 250}
    found = client.completions.create(
        model="mine", prompt="to be", max_tokens=250, temperature=0, stream=stream, extra_body=more
    )
    if not isinstance(found, openai.Stream):
        return found.choices[0].text
    text = ""
    for chunk in found:
        text += chunk.choices[0].text
        if begun is not None:
            begun.release()
    return text


def get(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Authorization": f"Bearer {KEYS[0]}"})
    return connection.getresponse()


@contextmanager
def proxy(folder: Path, ports: list[int]) -> Iterator[int]:
    """Run nginx with the guide's configuration, on other ports; yield its own."""
    (shown,) = re.findall(r"```nginx\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    port = free_port()
    for old, new in (("8001", ports[0]), ("8002", ports[1]), ("listen 8000", f"listen 127.0.0.1:{port}")):
        assert old in shown
        shown = shown.replace(old, str(new))
    folder.mkdir()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "\n".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    settings = f"pid {folder / 'pid'};\nerror_log {folder / 'errors'};\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{settings}http {{\naccess_log off;\n{places}\n{shown}}}\n")
    assert NGINX is not None
    command = [NGINX, "-e", str(folder / "errors"), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    with subprocess.Popen(command) as process:
        try:
            assert eventually(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 30)
            yield port
        finally:
            process.terminate()


class Replicas:
    """Two replicas and a proxy."""

    def __init__(self, arguments: list[str], folder: Path, stack: ExitStack) -> None:
        self.arguments, self.folder, self.stack = arguments, folder, stack
        self.ports = [free_port(), free_port()]
        self.processes, self.clients = {}, {}
        for number in (0, 1):
            self.start(number, "first")
        self.port = stack.enter_context(proxy(folder / "nginx", self.ports))
        address = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=address, api_key=KEYS[0], max_retries=0, timeout=120)
        stack.callback(self.client.close)

    def start(self, number: int, name: str) -> None:
        given = [*self.arguments, "--port", str(self.ports[number]), "--allow-host", "127.0.0.1"]
        entered = serving(given, self.folder / f"{name}-{number}")
        self.processes[number], self.clients[number] = self.stack.enter_context(entered)

    def answered(self, number: int, name: str = "first") -> int:
        """Return how many completions a replica has answered, by its log."""
        log = (self.folder / f"{name}-{number}").read_text()
        return log.count("method=POST path=/v1/completions status=200")


@pytest.fixture
def replicas(arguments: list[str], tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(arguments, tmp_path, stack)


def test_streams_pass_and_both_replicas_work(replicas: Replicas) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as many:
        first = many.submit(completion, replicas.client, True, begun)
        assert begun.acquire(timeout=60)
        assert not first.done()  # its first piece has come, and the last one not
        others = [many.submit(completion, replicas.client, bool(number % 2)) for number in range(7)]
        texts = {one.result() for one in (first, *others)}
    assert len(texts) == 1  # greedily, the same of both
    assert all(eventually(lambda number=number: replicas.answered(number) > 0, 10) for number in (0, 1))
    assert get(replicas.port, "/metrics").status == 404
    assert re.fullmatch("[0-9a-f]{32}", get(replicas.port, "/v1/models").headers["X-Request-Id"])  # the proxy's own


def test_a_replica_that_drains_loses_nothing(replicas: Replicas) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as many:
        running = [many.submit(completion, replicas.client, True, begun) for _ in range(4)]
        for _ in range(8):
            assert begun.acquire(timeout=60)
        replicas.processes[0].terminate()
        later = [many.submit(completion, replicas.client, bool(number % 2)) for number in range(8)]
        texts = {one.result() for one in (*running, *later)}
    assert len(texts) == 1
    replicas.processes[0].join(60)
    replicas.start(0, "again")
    time.sleep(5)  # fail_timeout
    with ThreadPoolExecutor(8) as many:
        texts |= {one.result() for one in [many.submit(completion, replicas.client, False) for _ in range(8)]}
    assert len(texts) == 1
    assert eventually(lambda: replicas.answered(0, "again") > 0, 10)


def test_a_replica_that_is_killed_breaks_its_streams_alone(replicas: Replicas) -> None:
    expected = completion(replicas.client, False)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(12) as many:
        streams = [many.submit(completion, replicas.client, True, begun) for _ in range(6)]
        whole = [many.submit(completion, replicas.client, False) for _ in range(8)]
        for _ in range(8):
            assert begun.acquire(timeout=60)
        replicas.processes[1].kill()
        assert [one.result() for one in whole] == [expected] * 8
        found = [one.exception() or one.result() for one in streams]
    broken = [one for one in found if isinstance(one, Exception)]
    assert {*found} - {*broken} <= {expected}
    assert {type(one) for one in broken} == {openai.APIConnectionError}
    assert len(broken) < 6  # those of one of the two
