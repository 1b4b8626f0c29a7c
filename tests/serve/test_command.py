"""The command as a process: SIGTERM drains it, kill -9 loses nothing but the requests that run."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import openai
import pytest
from processes import FORKS
from serve.conftest import KEYS
from serve.plain_http import eventually

import glasshouse as gh
from glasshouse.cli import main
from glasshouse.serve.runtime.runner import Runner


@pytest.fixture
def arguments(tmp_path: Path, tok: gh.Tokenizer, decoder: gh.models.Decoder) -> list[str]:
    gh.save(decoder, tok, tmp_path / "decoder")
    (tmp_path / "keys").write_text(f"# ours\n{KEYS[0]}\n")
    model, keys = f"mine={tmp_path / 'decoder'}", str(tmp_path / "keys")
    return ["glasshouse", "serve", model, "--api-key-file", keys, "--slots", "2", "--device", "cpu"]


def run_command(arguments: list[str], output: Path) -> None:
    """Run the command in this process, with its output in a file."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = arguments
    main()


@contextmanager
def serving(
    arguments: list[str], output: Path, target: Callable[[list[str], Path], None] = run_command
) -> Iterator[tuple[ForkServerProcess, openai.OpenAI]]:
    """Start the command; yield its process, and a client, once it prints its address."""
    process = FORKS.Process(target=target, args=(arguments, output))
    process.start()
    try:
        assert eventually(lambda: output.exists() and output.read_text().endswith("/v1\n"), 60)
        address = output.read_text().splitlines()[-1]
        with openai.OpenAI(base_url=address, api_key=KEYS[0], max_retries=0, timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.join()


def completion(client: openai.OpenAI, stream: bool, begun: threading.Semaphore | None = None) -> list[str]:
    """Return the texts of a long answer, or of its chunks."""
    found = client.completions.create(
        model="mine", prompt="to be", max_tokens=250, stream=stream, extra_body={"min_tokens": 250}
    )
    if not isinstance(found, openai.Stream):
        return [found.choices[0].text]
    texts = []
    for chunk in found:
        texts.append(chunk.choices[0].text)
        if begun is not None:
            begun.release()
    return texts


def ready(client: openai.OpenAI) -> bool:
    return client.with_options(max_retries=20).completions.create(model="mine", prompt="a", max_tokens=1) is not None


@pytest.mark.slow
def test_sigterm_drains(arguments: list[str], tmp_path: Path) -> None:
    with serving([*arguments, "--port", "0"], tmp_path / "output") as (process, client):
        assert [one.id for one in client.models.list()] == ["mine"]
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(1) as many:
            stream = many.submit(completion, client, True, begun)
            assert begun.acquire(timeout=60)
            process.terminate()
            assert len(stream.result()) > 2
        process.join(60)
        assert process.exitcode in (0, -signal.SIGTERM)
    output = (tmp_path / "output").read_text()
    assert "info: draining requests=1 seconds=30" in output
    assert "info: request method=POST path=/v1/completions status=200" in output
    assert output.splitlines()[-1].endswith("info: stopped")
    assert KEYS[0] not in output
    assert "to be" not in output


@pytest.mark.long
@pytest.mark.slow
def test_kill_9_in_mid_load(arguments: list[str], tmp_path: Path) -> None:
    begin = time.perf_counter()
    with serving([*arguments, "--port", "0"], tmp_path / "output") as (process, client):
        assert ready(client)
        first = time.perf_counter() - begin
        port = str(client.base_url.port)
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(12) as many:
            streams = [many.submit(completion, client, True, begun) for _ in range(6)]
            whole = [many.submit(completion, client, False) for _ in range(6)]
            for _ in range(20):
                assert begun.acquire(timeout=60)
            process.kill()
            errors = [one.exception(timeout=60) for one in (*streams, *whole)]
        assert {type(error) for error in errors} == {openai.APIConnectionError}
        begin = time.perf_counter()
        with serving([*arguments, "--port", port], tmp_path / "again"):
            assert ready(client)  # the client from before goes on
            print(f"\nfrom start to answer: {first:.1f} s; after kill -9: {time.perf_counter() - begin:.1f} s")
            assert len(completion(client, True)) > 2


def run_without_disk(arguments: list[str], output: Path, faults: Path) -> None:
    """Run the command where no file can be written but its first lines; a file in `faults` makes the engine fail."""
    step, turn = gh.Engine.step, Runner._turn

    def failing_step(self: gh.Engine) -> bool:
        if (faults / "step").exists():
            (faults / "step").unlink()
            raise RuntimeError("the device has no memory")
        return step(self)

    def failing_turn(self: Runner) -> bool:
        if (faults / "thread").exists():
            raise RuntimeError("a bug")
        return turn(self)

    gh.Engine.step, Runner._turn = failing_step, failing_turn  # type: ignore[method-assign]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with output.open("w") as file, Path("/dev/full").open("w") as full:
        os.dup2(file.fileno(), 1)
        os.dup2(full.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # bytes of any file
    sys.argv = arguments
    main()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_and_an_engine_that_ends(arguments: list[str], tmp_path: Path) -> None:
    """Nothing needs a disk to answer, to keep answers and to log; the process ends with the thread of the engines."""
    target = partial(run_without_disk, faults=tmp_path)
    with serving([*arguments, "--port", "0", "--look"], tmp_path / "output", target) as (process, client):
        assert ready(client)
        found = client.completions.create(model="mine", prompt="to be", max_tokens=5)
        assert client.get(f"/answers/{found.id}", cast_to=object)["id"] == found.id  # type: ignore[index]
        (tmp_path / "step").touch()
        client.with_options(max_retries=5).completions.create(model="mine", prompt="to be", max_tokens=5)
        assert not (tmp_path / "step").exists()
        assert client.completions.create(model="mine", prompt="to be", max_tokens=5).id != found.id
        (tmp_path / "thread").touch()
        with pytest.raises(openai.APIError):  # it may have ended already
            client.completions.create(model="mine", prompt="to be", max_tokens=5)
        process.join(30)
        assert process.exitcode not in (0, None)
