"""Compiles grammars with llguidance; run as a script, it compiles untrusted ones in subprocesses with limits.

It imports neither torch nor the package, which keeps such a subprocess small.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, cast

Kind = Literal["json_schema", "regex", "grammar"]
Encode = Callable[[bytes], list[int]]

# Whitespace between the parts of a JSON text: one space, or a line break with an indent. Without an upper bound a
# small model may write nothing else.
JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\n[\x20\t]{0,32}", "lenient": False, "coerce_one_of": False}
# Items of the parser at one place: of a choice, as many as it has alternatives. The library's own limit is 2,000.
TRUSTED_LIMITS = {"max_items_in_row": 20_000, "step_max_items": 100_000}
# Bounds for untrusted grammars, most of them 4 to 25 times as tight as the library's own: symbols, effort of
# regular expressions when it is made and in each step, lexer states (about a kilobyte each), and items of the parser.
LIMITS = {
    "max_grammar_size": 20_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
    "max_items_in_row": 2_000,
    "step_max_items": 10_000,
}
CPU_SECONDS, WALL_SECONDS = 2, 10  # to compile it once
TRIED_TOKENS = 24  # of a random text that it allows: what costs much may come after the first token
MEMORY = 96 * 2**20  # bytes that compiling may add to the process
TOO_MUCH = f"it takes more than {CPU_SECONDS} s or {MEMORY // 2**20} MiB to compile; simplify it"


class TokenTable:
    """The tokenizer interface of llguidance; an end token, which no model has, is appended to the vocabulary."""

    bos_token_id = None
    made: Any = None  # the library's tokenizer

    def __init__(self, tokens: Sequence[bytes], encode: Encode | None) -> None:
        self.tokens = [*tokens, b"\xff[end]"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [self.eos_token_id]
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        """Encode text that a grammar forces, by the model's own tokenizer where possible."""
        if self._encode is not None:
            return self._encode(text)
        return [] if self.made is None else self.made.greedy_tokenize(text.decode())


def make_tokenizer(tokens: Sequence[bytes], encode: Encode | None = None) -> Any:  # noqa: ANN401 - the library's
    """Return the library's tokenizer for the bytes of each token; a second for 150,000 of them."""
    import llguidance

    table = TokenTable(tokens, encode)
    table.made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(table))
    return table.made


def make_matcher(tokenizer: Any, kind: Kind, text: str, limits: Mapping[str, int]) -> Any:  # noqa: ANN401
    """Return the library's matcher of a grammar; raise ValueError with the reason where it cannot be used."""
    import llguidance

    if kind == "json_schema":
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, None, JSON_OPTIONS)
    else:
        grammar = llguidance.grammar_from(kind, text)
    bounds = llguidance.LLParserLimits(verbose_errors=False, **cast(Any, limits))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=bounds)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def one_line(message: str) -> str:
    """Return the library's message as part of a sentence."""
    words = " ".join(message.replace("<non-verbose/>", "").split()).rstrip(".")
    return words if len(words) <= 200 else f"{words[:200]}..."


def send(file: IO[bytes], message: object) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    file.write(struct.pack(">I", len(data)) + data)
    file.flush()


def receive(file: IO[bytes]) -> Any:  # noqa: ANN401 - any JSON value
    """Read a message; None at the end."""
    head = file.read(4)
    return json.loads(file.read(struct.unpack(">I", head)[0])) if len(head) == 4 else None


def try_grammar(tokenizer: Any, kind: Kind, text: str) -> str:  # noqa: ANN401 - the library's
    """Compile a grammar, its first mask and those along a text; return what is wrong with it, or nothing."""
    try:
        matcher = make_matcher(tokenizer, kind, text, LIMITS)
    except ValueError as error:
        return one_line(str(error))
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return f"it allows no first token, or takes too much work to tell ({one_line(matcher.get_error())})"
    draw = random.Random(0)
    for _ in range(TRIED_TOKENS):  # for the time it takes: another text may stay within the limits that this one hits
        start = draw.randrange(len(mask))
        rest = (mask[start:] + mask[:start]).lstrip(b"\0")
        if not rest:
            break
        at = (start + len(mask) - len(rest)) % len(mask)
        token = draw.choice([8 * at + bit for bit in range(8) if rest[0] >> bit & 1])
        if not matcher.consume_token(token) or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
    return ""


def main() -> None:
    """Read tokens, then grammars; answer each with what is wrong with it, from a process that is limited."""
    tokens = [one.encode("latin-1") for one in receive(sys.stdin.buffer)]
    tokenizer = make_tokenizer(tokens)
    while (message := receive(sys.stdin.buffer)) is not None:
        child = os.fork()
        if child == 0:
            _limit()
            send(sys.stdout.buffer, try_grammar(tokenizer, *message))
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            send(sys.stdout.buffer, TOO_MUCH)


def _limit() -> None:
    """Limit the time and memory of this process, which is killed when it exceeds them."""
    import resource  # not on Windows, which has no such process either

    os.nice(10)
    signal.alarm(WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])  # that it may write to
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
