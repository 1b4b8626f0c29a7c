"""Structured output: a response format becomes a grammar, which is first compiled in a subprocess with limits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from glasshouse.errors import GlasshouseError, InputError
from glasshouse.generation.constraints import compiler as grammar_compiler
from glasshouse.generation.constraints.compiler import LIMITS, Kind
from glasshouse.generation.constraints.grammar import ANY_OBJECT, Grammar, check_installed, token_bytes
from glasshouse.serve.answers.tool_calls import call_grammar
from glasshouse.serve.schema.errors import ApiError, queue_full
from glasshouse.serve.schema.requests import Values
from glasshouse.serve.served_model import ServedModel
from glasshouse.text import Tokenizer

MAX_WAITING = 32  # grammars of one key that wait to be compiled
MAX_CACHED = 32  # compiled ones that are kept, a megabyte each and rarely more than ten
Asked = tuple[str, Kind, str]  # the parameter that asks for it, and what it is


def asked_grammar(values: Values) -> Asked | None:
    """Return what a request asks for: `response_format`, `text.format` (of /v1/responses), `grammar`, `tool_choice`.

    >>> asked_grammar({"response_format": {"type": "json_object", "json_schema": None}, "grammar": None})
    ('response_format', 'json_schema', '{"type": "object"}')
    """
    found: list[Asked] = []
    if (given := values.get("response_format")) is not None:
        nested = given["json_schema"] or {}
        found += _asked_format("response_format", given["type"], "json_schema.schema", nested.get("schema"))
    if (given := (values.get("text") or {}).get("format")) is not None:
        found += _asked_format("text.format", given["type"], "schema", given["schema"])
    if (grammar := values.get("grammar")) is not None:
        found.append(("grammar", "grammar", grammar))
    if (call := call_grammar(values)) is not None:
        found.append(("tool_choice", "grammar", call))
    if len(found) > 1:
        raise ApiError(f"{found[0][0]} and {found[1][0]} were both given; leave one out.", param=found[1][0])
    return found[0] if found else None


def _asked_format(name: str, kind: str, inner: str, schema: str | None) -> list[Asked]:
    if kind == "json_schema" and schema is None:
        raise ApiError(f"{name}.{inner} is missing; give it.", param=f"{name}.{inner}", code="missing_parameter")
    if kind != "json_schema" and schema is not None:
        raise ApiError(f"{name}.{inner} was given, but the type is {kind!r}; make it json_schema.", param=name)
    return [] if kind == "text" else [(name, "json_schema", ANY_OBJECT if schema is None else schema)]


class GrammarTrial:
    """The subprocess in which grammars for one tokenizer are first compiled; started when first used."""

    def __init__(self, tok: Tokenizer) -> None:
        self._tokens = [one.decode("latin-1") for one in token_bytes(tok)]
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, kind: Kind, text: str) -> str:
        """Return what is wrong with a grammar, or nothing."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            grammar_compiler.send(self._process.stdin, [kind, text])
            answer = grammar_compiler.receive(self._process.stdout)
        except OSError:
            answer = None
        return "it could not be tried; send it again" if answer is None else answer

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C must not end it while the server still drains.
        process = subprocess.Popen(
            [sys.executable, "-P", grammar_compiler.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        grammar_compiler.send(process.stdin, self._tokens)
        return process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


class Grammars:
    """Compiles grammars one at a time, in turns between keys; an equal one of the same key is compiled once.

    Slow grammars delay further ones of their own key, and another key by one grammar at most.
    """

    def __init__(self) -> None:
        self._cache: OrderedDict[Any, Grammar] = OrderedDict()
        self._running: dict[Any, asyncio.Task[Grammar]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._trials: WeakKeyDictionary[Tokenizer, GrammarTrial] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def compile(self, served: ServedModel, key: str, asked: Asked) -> Grammar:
        """Return a grammar for a model; raise ApiError where it cannot be used, or costs too much."""
        param, kind, text = asked
        if served.tok is None:
            raise ApiError(f"{served.name!r} has no tokenizer, so {param} is not supported.", param=param)
        name = (served.name, key, kind, text)  # by key, against timing attacks on the cache
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        if name not in self._running:
            if self._waiting[key] >= MAX_WAITING:
                raise queue_full(self._waiting[key])
            task = asyncio.ensure_future(self._take_turn(key, partial(self._make, served.tok, kind, text)))
            task.add_done_callback(partial(self._finished, name))
            self._running[name] = task
        try:
            return await asyncio.shield(self._running[name])
        except GlasshouseError as error:
            raise ApiError(str(error), param=param) from None

    async def _take_turn(self, key: str, work: Callable[[], Grammar]) -> Grammar:
        self._waiting[key] += 1
        try:
            async with self._turns.setdefault(key, asyncio.Lock()):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting[key] -= 1

    def _finished(self, name: Any, task: asyncio.Task[Grammar]) -> None:  # noqa: ANN401 - a cache key
        del self._running[name]
        if not task.cancelled() and task.exception() is None:
            self._cache[name] = task.result()
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)

    def _make(self, tok: Tokenizer, kind: Kind, text: str) -> Grammar:
        """Compile a grammar in this process, after the subprocess has shown that it takes little time and memory."""
        check_installed()
        if tok not in self._trials:
            self._trials[tok] = GrammarTrial(tok)
        if problem := self._trials[tok].run(kind, text):
            raise InputError(f"the {kind.replace('_', ' ')} cannot be used: {problem}.")
        return Grammar(tok, kind, text, LIMITS)

    def close(self) -> None:
        """End the processes."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials.values():
            trial.close()
