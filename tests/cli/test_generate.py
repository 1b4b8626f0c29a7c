"""`glasshouse generate` against what the library gives, through real pipes, at a terminal, and in this process."""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh
from cli.runner import GLASSHOUSE, Call, Done, Forked
from glasshouse.cli.generation import command, streaming
from glasshouse.cli.generation import stdin_prompts as by_line
from glasshouse.models.prompt import end_of_turn_ids
from glasshouse.models.surgery import with_draft_heads
from glasshouse.text.chat.tokens import with_chat_template

TEXT = "to be or not to be, that is the question:\nwhether 'tis nobler in the mind to suffer the slings and arrows\n"
PROMPT = "to be or not to be"
FEW = ("--max-new-tokens", "12")
PATIENCE = 300  # seconds after which a process that says nothing has failed


@dataclass(frozen=True)
class House:
    """Tiny models in folders, and the same in memory."""

    folder: Path
    tok: gh.Tokenizer
    models: dict[str, Any]

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def generate(self, name: str, prompts: Any, **settings: Any) -> list[gh.Completion]:  # noqa: ANN401
        return gh.generate(self.models[name], self.tok, prompts, **{"max_new_tokens": 12, **settings})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("models")
    tok = with_chat_template(gh.Tokenizer.train(texts=[TEXT] * 3, vocab_size=300))
    specs = {
        "decoder": gh.preset("tiny-decoder", vocab_size=300, max_len=4000, start_id=0, end_ids=[0]),
        "short": gh.preset("tiny-decoder", vocab_size=300, max_len=64),  # no start_id, and no end
        "learned": gh.preset("tiny-decoder", vocab_size=300, max_len=16, position="learned"),
        "small": gh.preset("tiny-decoder", vocab_size=300, n_layers=1, max_len=4000),
        "seq2seq": gh.preset("tiny-seq2seq", vocab_size=300, start_id=0, end_ids=[0]),
        "encoder": gh.preset("tiny-encoder", vocab_size=300),
    }
    torch.manual_seed(0)
    often = [0, tok.token_to_id("<|end|>"), *tok.encode("\n\r", add_special_tokens=False)]
    models = {}
    for name, spec in specs.items():
        model = gh.build(spec)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # as built, a model says one thing again and again
                torch.nn.init.normal_(parameter, std=0.2)
        if isinstance(model, gh.models.Decoder):  # ends and line breaks are what tests are about
            model.head.weight.data[often] *= 2
        gh.save(model, tok, folder / name)
        models[name] = model.eval()
    gh.save(models["decoder"], None, folder / "wordless")
    gh.save(with_draft_heads(models["decoder"], 2), tok, folder / "drafting")
    gh.save(copy.deepcopy(models["decoder"]).double(), tok, folder / "double")
    tok.save(folder / "plain")
    plain = gh.Tokenizer.load(folder / "plain")
    plain.chat_template = None
    gh.save(models["decoder"], plain, folder / "plain")
    (folder / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    return House(folder, tok, models)


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the real command, with one thread as in this process, so that sums are the same to the last bit."""
    begun = []

    def start(*words: str, term: str = "xterm-256color", **settings: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "TERM": term}
        begun.append(subprocess.Popen([GLASSHOUSE, "generate", *words], env=env, **{**streams, **settings}))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()


def as_object(prompt: str, one: gh.Completion) -> dict[str, Any]:
    table = {
        "prompt": prompt,
        "text": one.text,
        "ids": one.ids,
        "logprobs": pytest.approx(one.logprobs, abs=1e-4),  # float32 sums of another batch: a few units of 1e-7 x 20
        "finish_reason": one.finish_reason,
    }
    return table if one.score is None else {**table, "score": pytest.approx(one.score, abs=1e-4)}


def as_line(one: gh.Completion) -> str:
    return one.text.replace("\n", r"\n").replace("\r", r"\r") + "\n"


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# One prompt


@pytest.mark.parametrize("name", ["decoder", "seq2seq"])
def test_only_the_completion_is_written(name: str, house: House, call: Call) -> None:
    (one,) = house.generate(name, PROMPT)
    assert one.text
    assert call("generate", house[name], PROMPT, *FEW) == Done(0, one.text + "\n", "")


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 5},
        {"min_new_tokens": 12, "temperature": 3.0},
        {"temperature": 1.5, "seed": 7},
        {"temperature": 5.0, "top_k": 3},
        {"temperature": 5.0, "top_p": 0.3},
        {"temperature": 5.0, "min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 4.0},
        {"beams": 4, "length_penalty": -2.0},
        {"beams": 4, "n": 3},
        {"temperature": 1.5, "n": 3},
    ],
)
def test_options_are_passed_to_the_library(settings: dict[str, Any], house: House, call: Call) -> None:
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    expected = house.generate("decoder", PROMPT, **settings)
    plain = call("generate", house["decoder"], PROMPT, *FEW, *words)
    heads = [f"--- {number} of {len(expected)}" for number in range(1, len(expected) + 1)]
    if len(expected) == 1 or expected[0].score is None:
        heads[0] = ""
    else:
        heads = [f"{head}, score {one.score:.4f}" for head, one in zip(heads, expected, strict=True)]
    lines = [line for head, one in zip(heads, expected, strict=True) for line in (head, one.text)]
    assert plain == Done(0, "\n".join(lines).removeprefix("\n") + "\n", "")
    found = objects(call("generate", house["decoder"], PROMPT, *FEW, *words, "--json").out)
    assert found == [as_object(PROMPT, one) for one in expected]
    for name in settings.keys() - {"temperature"} if "n" not in settings else ():  # each of them matters here
        assert house.generate("decoder", PROMPT, **{k: v for k, v in settings.items() if k != name}) != expected


def test_defaults_are_those_of_the_library() -> None:
    typed, python = (
        {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
        for function in (command.generate, gh.generate)
    )
    for option in fields(gh.SamplingParams):
        for given in (typed, python):
            if option.name in given and option.name != "stop":
                assert given[option.name] == option.default, option.name


def test_stop_takes_escapes_and_may_be_given_again(house: House, call: Call) -> None:
    words = ("generate", house["decoder"], PROMPT, "--temperature", "1", *FEW)
    drawn = house.generate("decoder", PROMPT, temperature=1.0, n=60)  # of as many seeds
    seed, text = next((seed, one.text) for seed, one in enumerate(drawn) if "\n" in one.text)
    before = text.partition("\n")[0]
    assert call(*words, "--seed", str(seed), "--stop", r"\n", "--stop", "never").out == before + "\n"
    assert call(*words, "--seed", str(seed), "--stop", "never", "--stop", r"\\n").out == text + "\n"
    assert command._unescaped(r"\\n \t\r \boxed é\n") == "\\n \t\r \\boxed é\n"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "drafter"),
    [
        (["--prompt-lookup"], gh.generation.PromptLookup),
        (["--draft-model", "small"], gh.generation.DraftModel),
        (["--draft-heads"], gh.generation.DraftHeads),
    ],
)
def test_drafts_change_nothing_but_the_speed(
    words: list[str],
    drafter: Any,  # noqa: ANN401
    house: House,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposed = []
    real = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda self, *given: proposed.append(1) or real(self, *given))
    words = [house[word] if word in house.models else word for word in words]
    expected = house.generate("decoder", PROMPT)[0].text
    model = house["drafting" if drafter is gh.generation.DraftHeads else "decoder"]  # the same weights
    assert call("generate", model, PROMPT, *FEW, *words).out == expected + "\n"
    assert proposed


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), [("decoder", "int8"), ("seq2seq", "int8"), ("decoder", "int4")])
def test_quantized_is_the_same_as_in_the_library(
    name: str, weights: str, house: House, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"temperature": 1.5, "max_new_tokens": 60, "min_new_tokens": 60}
    expected = house.generate(name, PROMPT, weights=weights, **settings)
    assert expected[0].ids != house.generate(name, PROMPT, **settings)[0].ids  # it does matter
    words = [word for option, value in settings.items() for word in (f"--{option.replace('_', '-')}", str(value))]
    monkeypatch.setattr(gh.device, "fastest", lambda: torch.device("cuda"))  # where auto would lead otherwise
    done = call("generate", house[name], PROMPT, *words, f"--{weights}", "--json")
    assert objects(done.out) == [as_object(PROMPT, one) for one in expected]


@pytest.mark.parametrize("option", ["--int8", "--int4"])
def test_quantized_weights_leave_no_matrix_of_the_model_in_memory(
    option: str, house: House, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []
    load, step = command._load, gh.Engine.step

    def watched_load(*given: Any) -> Any:  # noqa: ANN401
        model, tok = load(*given)
        matrices.extend(weakref.ref(weight) for weight in model.parameters() if weight.ndim > 1)
        return model, tok

    def watched_step(engine: gh.Engine) -> bool:
        left.append(sum(matrix() is not None for matrix in matrices))
        return step(engine)

    monkeypatch.setattr(command, "_load", watched_load)
    monkeypatch.setattr(gh.Engine, "step", watched_step)
    assert call("generate", house["decoder"], PROMPT, *FEW, option).code == 0
    assert matrices
    assert set(left) == {0}


def test_max_len_bounds_prompt_and_completion(house: House, call: Call) -> None:
    prompt = house.tok.encode(PROMPT)
    done = call("generate", house["decoder"], PROMPT, "--max-len", str(len(prompt) + 3), "--json")
    assert objects(done.out)[0]["ids"] == house.generate("decoder", PROMPT, max_new_tokens=3)[0].ids
    assert objects(done.out)[0]["finish_reason"] == "length"
    assert "shorten it" in call("generate", house["decoder"], PROMPT, "--max-len", "2").err


@pytest.mark.slow
def test_a_completion_beyond_max_len_is_reported(house: House, call: Call, lines: Callable[..., Done]) -> None:
    before = len(house.tok.encode("to be"))
    cut = f"{16 - before} of 400 new tokens were generated: with the prompt of {before} they fill the model's 16 "
    done = call("generate", house["learned"], "to be", "--max-new-tokens", "400", "--json")
    assert len(objects(done.out)[0]["ids"]) == 16 - before
    assert done.err == f"warning: {cut}positions (max_len).\n"
    many = lines("generate", house["learned"], "-", "--max-new-tokens", "400", stdin=b"to be\nto be\nto be or not\n")
    assert many.err == f"warning: 3 of 3 completions, the first: {cut}positions (max_len).\n"
    chat = ("generate", house["learned"], "--chat", "--max-new-tokens", "400")
    assert "of 400 new tokens were generated" in call(*chat, stdin=b"to\n").err
    assert call("generate", house["learned"], "to be", "--max-new-tokens", "2").err == ""
    longer = call("generate", house["short"], "to be", "--max-new-tokens", "100", "--json")  # no learned positions
    assert len(objects(longer.out)[0]["ids"]) == 100
    assert longer.err == (
        f"warning: the text has {before + 100} tokens, but the model was trained on sequences of at most 64 "
        "(max_len), so quality may drop beyond that.\n"
    )
    short = lines("generate", house["short"], "-", "--max-len", "20", stdin=b"to be\n")
    assert short.err == (
        f"warning: {20 - before} of 64 new tokens were generated: with the prompt of {before} they fill max_len, "
        "which is 20.\n"
    )


@pytest.mark.slow
def test_a_request_that_fails_is_named(house: House, call: Call, lines: Callable[..., Done], tmp_path: Path) -> None:
    """Of a model that one token makes NaN."""
    broken = copy.deepcopy(house.models["decoder"])
    (token,) = house.tok.encode("7", add_special_tokens=False)
    broken.token_embedding.table.weight.data[token] = torch.nan
    assert broken.head.weight is not broken.token_embedding.table.weight
    gh.save(broken, house.tok, tmp_path / "broken")
    nan = "the model's log-probabilities are NaN: its weights, or its activations on this prompt, are not finite"
    for more in ((), ("--json",), ("--beams", "2")):
        done = call("generate", tmp_path / "broken", "to 7", *FEW, *more)
        assert done.code == 1
        assert done.err.startswith(f"error: {nan}")
    done = lines("generate", tmp_path / "broken", "-", *FEW, "--slots", "2", stdin=b"to be\nto 7\nbe\n")
    first, last = house.generate("decoder", ["to be", "be"])
    assert (done.code, done.out) == (1, f"{as_line(first)}\n{as_line(last)}")
    assert done.err.startswith(f"error: line 2: {nan}")
    as_json = lines("generate", tmp_path / "broken", "-", *FEW, "--json", stdin=b"to 7\nbe\n")
    assert [one.get("error", "")[: len(nan)] for one in objects(as_json.out)] == [nan, ""]


@pytest.mark.parametrize("words", [(PROMPT,), (PROMPT, "--n", "3", "--temperature", "1"), (PROMPT, "--beams", "2")])
def test_a_prompt_is_encoded_once(
    words: tuple[str, ...], house: House, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = [], gh.Tokenizer.encode

    def counted(self: gh.Tokenizer, text: str | bytes, **choices: Any) -> list[int]:  # noqa: ANN401
        encoded.append(text)
        return encode(self, text, **choices)

    monkeypatch.setattr(gh.Tokenizer, "encode", counted)
    assert call("generate", house["decoder"], *words, "--max-new-tokens", "2").code == 0
    assert encoded.count(PROMPT.encode()) == 1


def test_a_prompt_may_be_any_bytes(house: House, call: Call) -> None:
    done = call("generate", house["decoder"], os.fsdecode(b"caf\xe9"), *FEW, "--json")
    (one,) = house.generate("decoder", b"caf\xe9")
    assert objects(done.out) == [as_object(r"caf\xe9", one)]
    assert call("generate", house["decoder"], "", *FEW).out == house.generate("decoder", "")[0].text + "\n"


# Prompts by lines


def ragged() -> list[bytes]:
    words = TEXT.encode().split()
    given = [b" ".join(words[number % 7 : number % 7 + number % 11]) for number in range(28)]
    return [*given, b"stray \xff\xfe bytes", "né 你好".encode()]


@pytest.mark.long
@pytest.mark.slow
def test_lines_are_answered_in_order_as_one_by_one(house: House, lines: Callable[..., Done]) -> None:
    given = ragged()
    assert b"" in given
    settings = {"temperature": 1.2, "seed": 3, "stop": ("t", "s")}
    words = ("--temperature", "1.2", "--seed", "3", "--stop", "t", "--stop", "s", "--slots", "4", *FEW)
    alone = [house.generate("decoder", prompt, **settings)[0] for prompt in given]
    assert len({len(one.ids) for one in alone}) > 3  # they end at different times
    assert any("\n" in one.text for one in alone)
    assert any("\r" in one.text for one in alone)  # which many programs take for a line break
    plain = lines("generate", house["decoder"], "-", *words, stdin=b"\n".join(given))
    assert plain == Done(0, "".join(map(as_line, alone)), "")
    windows = lines("generate", house["decoder"], "-", *words, "--json", stdin=b"\r\n".join(given) + b"\r\n")
    texts = [prompt.decode(errors="backslashreplace") for prompt in given]
    assert objects(windows.out) == [as_object(text, one) for text, one in zip(texts, alone, strict=True)]
    assert lines("generate", house["decoder"], "-", stdin=b"") == Done(0, "", "")


@pytest.mark.parametrize("settings", [{"temperature": 1.2}, {"beams": 3}])
def test_each_line_has_as_many_completions_as_asked_for(
    settings: dict[str, Any], house: House, lines: Callable[..., Done]
) -> None:
    ((name, value),) = settings.items()
    words = ("-", *FEW, f"--{name}", str(value), "--n", "2")
    expected = house.generate("decoder", ["to", "be"], n=2, **settings)
    done = lines("generate", house["decoder"], *words, stdin=b"to\nbe\n")
    assert done.out == "".join(map(as_line, expected))
    exact = objects(lines("generate", house["decoder"], *words, "--json", stdin=b"to\nbe\n").out)
    assert exact == [as_object(text, one) for text, one in zip(("to", "to", "be", "be"), expected, strict=True)]


def test_lines_are_translated(house: House, lines: Callable[..., Done]) -> None:
    done = lines("generate", house["seq2seq"], "-", *FEW, stdin=b"to be or\nnot\n")
    assert done.out == "".join(map(as_line, house.generate("seq2seq", ["to be or", "not"])))


def test_a_line_is_printed_as_soon_as_it_is_done(
    house: House, lines: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe(io.StringIO):
        handed: list[str]

        def flush(self) -> None:
            self.handed.append(self.getvalue())

    pipe = Pipe()
    pipe.handed = []
    monkeypatch.setattr(sys, "stdout", pipe)
    lines("generate", house["decoder"], "-", *FEW, "--slots", "1", stdin=b"to\nbe")
    first, second = map(as_line, house.generate("decoder", ["to", "be"]))
    assert pipe.handed[:2] == [first, first + second]


def test_a_refused_line_does_not_stop_the_others(house: House, lines: Callable[..., Done]) -> None:
    long = b"to be " * 100
    given = b"to be\n\n" + long + b"\nor not"
    first, last = house.generate("short", ["to be", "or not"])
    done = lines("generate", house["short"], "-", *FEW, stdin=given)  # made for 64 tokens, and 12 may come after them
    assert (done.code, done.out) == (1, f"{as_line(first)}\n\n{as_line(last)}")
    empty, longer = done.err.splitlines()
    assert empty == ("error: line 2: the prompt is empty, and the model has no start_id; give at least one token.")
    assert longer.startswith(f"error: line 3: the prompt has {len(house.tok.encode(long))} tokens, but max_len is 76")
    done = lines("generate", house["short"], "-", *FEW, "--json", stdin=given)
    assert done.code == 1
    assert [one.get("text") for one in objects(done.out)] == [first.text, None, None, last.text]
    assert objects(done.out)[1] == {"prompt": "", "error": empty.removeprefix("error: line 2: ")}
    twice = lines("generate", house["short"], "-", *FEW, "--beams", "2", "--n", "2", stdin=b"\nor not")
    assert twice.out == "\n\n" + "".join(map(as_line, house.generate("short", "or not", beams=2, n=2)))


def test_only_a_window_of_endless_lines_is_read(house: House) -> None:
    class Endless:
        read = 0

        def take(self, *, wait: bool) -> bytes:
            self.read += 1
            return PROMPT[: self.read % 9].encode() + b"\n"

    given = Endless()
    engine = gh.Engine(house.models["decoder"], house.tok, slots=2, max_len=64)
    options = gh.SamplingParams(temperature=1.0, max_new_tokens=5)
    for number, line in enumerate(islice(by_line._in_order(engine, given, options, 1), 30), 1):
        assert line.prompt == PROMPT[: number % 9].encode()
        assert line.requests[0].done
        assert given.read - number < 2 * by_line.WINDOW


@pytest.mark.long
@pytest.mark.slow
def test_lines_through_real_pipes(house: House, request: pytest.FixtureRequest) -> None:
    """A line is answered before the next is written, and a bar on stderr takes nothing away from stdout."""
    given = ragged()
    alone = [house.generate("decoder", prompt)[0] for prompt in given]
    ours, its = os.openpty()
    process = Forked("generate", house["decoder"], "-", *FEW, stderr=its)
    request.addfinalizer(process.close)
    os.close(its)
    process.stdin.write(given[0] + b"\n")
    process.stdin.flush()
    assert select.select([process.stdout], [], [], PATIENCE)[0], "the first line was not answered"
    found = [process.stdout.readline()]
    process.stdin.write(b"\n".join([*given[1:], b""]))
    process.stdin.flush()
    found += [process.stdout.readline() for _ in given[1:]]
    assert b"".join(found).decode() == "".join(map(as_line, alone))
    process.stdout.close()  # nobody listens any more; that is no error to speak of
    process.stdin.write(b"to be\n")
    process.stdin.flush()
    assert process.wait() == 1
    drawn = read_all(ours)
    assert "generating" in drawn
    assert "rror" not in drawn


def read_all(descriptor: int) -> str:
    drawn = b""
    try:
        while block := os.read(descriptor, 2**16):
            drawn += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(descriptor)
    return drawn.decode()


# The ends that others make


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_leaves_what_was_written_and_no_traceback(house: House, request: pytest.FixtureRequest) -> None:
    process = Forked("generate", house["decoder"], PROMPT, "--max-new-tokens", "3900", "--min-new-tokens", "3900")
    request.addfinalizer(process.close)
    assert select.select([process.stdout], [], [], PATIENCE)[0], "nothing was written"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.wait(), err) == (130, b"")
    written = out.decode()
    text = house.generate("decoder", PROMPT, max_new_tokens=100, min_new_tokens=100)[0].text
    assert written.endswith("\n")
    assert text.startswith(written[:-1]) or written.startswith(text)


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with streaming.interrupts() as caught:
            signal.raise_signal(signal.SIGINT)
        assert (caught, signal.getsignal(signal.SIGINT)) == ([], signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)
    with streaming.interrupts() as caught:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert caught == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before


def test_samples_after_an_interrupted_one_are_not_written(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = gh.Engine(house.models["decoder"], house.tok, slots=2, max_len=64)
    requests = [engine.submit(PROMPT, max_new_tokens=40, temperature=1.0, seed=seed) for seed in (0, 1)]
    steps = count(1)
    real = engine.step

    def step() -> bool:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return real()

    monkeypatch.setattr(engine, "step", step)
    assert command._stream(engine, requests)
    whole = house.generate("decoder", PROMPT, temperature=1.0, max_new_tokens=3)[0]
    assert capsys.readouterr().out == whole.text + "\n"
    assert (requests[0].ids, requests[0].finish_reason) == (whole.ids, "cancelled")


# A conversation


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answers(
    house: House,
    name: str,
    said: list[str],
    opening: list[dict[str, str]],
    **settings: Any,  # noqa: ANN401
) -> list[str]:
    """Answer messages one by one, each from all that was said, by a new call of the library."""
    messages, found = list(opening), []
    end = house.tok.token_to_id("<|end|>")
    for text in said:
        messages.append(user(text))
        ids = house.tok.encode_chat(messages, add_generation_prompt=True).ids
        found.append(house.generate(name, [ids], stop_token_ids=(end,), **settings)[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_a_chat_keeps_its_history_and_reuses_the_kv_cache(
    house: House, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["to be or not to be, that is the question", "whether 'tis nobler"]
    opening = [{"role": "system", "content": "Suffer the slings and arrows."}]
    expected = answers(house, "decoder", said, opening, temperature=0.5)
    assert expected[1] != answers(house, "decoder", said[1:], opening, temperature=0.5)[0]  # it does matter
    words = ("--chat", "--system", opening[0]["content"], "--temperature", "0.5", *FEW)
    read = []
    real = gh.models.Decoder.forward
    monkeypatch.setattr(
        gh.models.Decoder, "forward", lambda self, ids, **told: read.append(ids.shape[1]) or real(self, ids, **told)
    )
    done = call("generate", house["decoder"], *words, stdin="\n\n".join(said).encode())
    assert done == Done(0, "".join(f"{text}\n" for text in expected), "")
    whole = house.tok.encode_chat(
        [*opening, user(said[0]), user(expected[0]), user(said[1])], add_generation_prompt=True
    ).ids
    assert sum(read) < len(whole) + 2 * 12  # each turn alone would read the first message again
    monkeypatch.undo()
    first = call("generate", house["decoder"], said[0], *words, "--json", stdin=f"{said[1]}\r\n".encode())
    assert [(one["prompt"], one["text"]) for one in objects(first.out)] == list(zip(said, expected, strict=True))
    assert call("generate", house["decoder"], "-", *words, stdin="\n".join(said).encode()).out == done.out


def test_an_answer_ends_where_the_template_closes_it(house: House, call: Call) -> None:
    end = house.tok.token_to_id("<|end|>")
    assert end_of_turn_ids(house.tok, []) == (end,)
    other = gh.Tokenizer.load(house["decoder"])
    other.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>\n{% endfor %}"
    other.chat_template += "{% if add_generation_prompt %}<|user|>{% endif %}"
    assert end_of_turn_ids(other, []) == (end,)  # and not the line break after it
    other.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert end_of_turn_ids(other, []) == ()
    ids = house.tok.encode_chat([user("to be")], add_generation_prompt=True).ids
    drawn = house.generate("short", [ids], temperature=1.0, n=60)  # of as many seeds
    seed, whole = next((seed, one.ids) for seed, one in enumerate(drawn) if end in one.ids[1:])
    words = ("--temperature", "1", "--seed", str(seed), *FEW, "--json")
    (one,) = objects(call("generate", house["short"], "to be", "--chat", *words).out)
    assert (one["ids"], one["finish_reason"]) == (whole[: whole.index(end)], "stop")


def test_a_chat_longer_than_max_len_drops_its_first_messages(house: House, call: Call) -> None:
    said = ["to be or not to be", "that is the question", "whether 'tis nobler", "not " * 100, "or not", "the mind"]
    room = 64 - 12
    history: list[dict[str, str]] = []
    out, err = [], []
    for text in said:
        kept = [*history, user(text)]
        while (size := len(house.tok.encode_chat(kept, add_generation_prompt=True).ids)) > room and len(kept) > 1:
            kept = kept[2:]
        if size > 64:
            err.append(f"error: the prompt has {size} tokens, but max_len is 64; shorten it.")
            continue
        if gone := len(history) + 1 - len(kept):
            err.append(
                "warning: the conversation is longer than max_len (64 tokens), so its oldest "
                f"{gone} messages were dropped; "
                "raise --max-len."
            )
        out += answers(house, "short", [text], kept[:-1])
        history = [*kept, {"role": "assistant", "content": out[-1]}]
    assert [line.split(":")[0] for line in err][:2] == ["warning", "error"]
    assert len(history) > 2  # what was too long cost nothing of what came before it
    done = call("generate", house["short"], "--chat", "--max-len", "64", *FEW, stdin="\n".join(said).encode())
    assert done == Done(1, "".join(f"{text}\n" for text in out), "".join(f"{line}\n" for line in err))


def test_a_template_that_takes_no_system_message_says_so_at_once(house: House, call: Call, tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
        house.tok.chat_template or ""
    )
    other = gh.Tokenizer.from_json((house.folder / "decoder" / "tokenizer.json").read_text())
    other.chat_template = template
    gh.save(house.models["decoder"], other, tmp_path / "strict")
    done = call("generate", tmp_path / "strict", "--chat", "--system", "x", stdin=b"to be\n")
    assert done == Done(1, "", "error: the chat template refuses these messages: no system.\n")


class Terminal:
    """The real command at a terminal, spoken with."""

    def __init__(self, start: Start, *words: str) -> None:
        self.ours, its = os.openpty()
        self.process = start(
            *words,
            term="dumb",  # what is typed comes back as it is
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(its), os.O_RDWR)),  # so that Ctrl-C comes from it
        )
        os.close(its)
        self.drawn = ""

    def until(self, pattern: str, key: str = "") -> str:
        """Press a key, again after a silence, until something new is there; return all that came before it."""
        self.type(key)
        waited = 0
        while not (found := re.search(pattern, self.drawn, re.DOTALL)):
            if select.select([self.ours], [], [], 5)[0]:
                self.drawn += os.read(self.ours, 2**16).decode(errors="replace").replace("\r\n", "\n")
            else:
                waited += 5
                assert waited < PATIENCE, self.drawn
                self.type(key)
        before, self.drawn = self.drawn[: found.end()], self.drawn[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())


@pytest.mark.long
@pytest.mark.slow
def test_a_conversation_at_a_terminal(house: House, start: Start) -> None:
    there = Terminal(start, house["decoder"], "--chat", "--max-new-tokens", "2000", "--min-new-tokens", "2000")
    there.until("> ")
    there.type("to be\n")
    there.until("to be\n..")
    there.type("\x03")
    there.until(r"\n\d+ tokens?, [\d.,]+ tokens/s, cancelled\n> ")
    there.type("\n")  # nothing to say
    there.until("> ")
    there.type("half of")
    there.until("half of")
    # Python misses a signal that comes just before it waits for the next key.
    there.until("Ctrl-D ends the chat\n> ", key="\x03")
    there.type("or not\n")
    there.until("or not\n..")
    there.type("\x03")
    there.until("cancelled\n> ")
    there.type("\x04")
    assert there.process.wait(PATIENCE) == 0
    assert "Traceback" not in read_all(there.ours)


# Terminals, help and mistakes


class Drawn(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_character(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2J\r\x07\tb\n\u3000né\u200d"
    assert streaming.fit(text) == text
    monkeypatch.setattr(sys, "stdout", Drawn())
    assert streaming.fit(text) == "a\\x1b[2J\\x0d\\x07\tb\n\u3000né\u200d"


def test_throughput_is_printed_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: 12.0)
    for settings, expected in (({}, "\x1b[2m{}\x1b[0m\n"), ({"NO_COLOR": "1"}, "{}\n"), ({"TERM": "dumb"}, "{}\n")):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm-256color")
            for name, value in settings.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stderr", drawn := Drawn())
            streaming.print_throughput(3, 10.0, "length", "stop")
            assert drawn.getvalue() == expected.format("3 tokens, 1.5 tokens/s, length, stop")
    streaming.print_throughput(3, 10.0, "nobody sees it")


def test_help_needs_no_torch_and_shows_defaults_units_and_an_example() -> None:
    code = (
        "import sys, glasshouse.cli\n"
        "try: glasshouse.cli.app(['generate', '--help'])\n"
        "except SystemExit: print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    )
    env = {"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert out.splitlines()[-1] == "False False"
    assert "Example: glasshouse generate " in out
    for shown in (
        "[default: 64]",
        "[default: 0.0]",
        "auto|cpu|cuda|mps",
        r"\n, \t",
    ):
        assert shown in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["decoder"], "there is no prompt; give one, or - to read them from stdin, or --chat."),
        (["decoder", "hi", "--temperature", "-1"], "temperature is -1.0, but it must be 0 or above."),
        (["decoder", "hi", "--n", "2"], "n is 2, but without --temperature or --beams all completions are the same"),
        (
            ["decoder", "hi", "--n", "3", "--beams", "2"],
            "n is 3, but a search with 2 beams returns at most that many",
        ),
        (["decoder", "hi", "--beams", "3", "--slots", "2"], "beams is 3, but the engine has 2 slots"),
        (["decoder", "hi", "--stop", ""], "stop is ('',)"),
        (
            ["decoder", "hi", "--draft-model", "small", "--prompt-lookup"],
            "--draft-model and --prompt-lookup were both given",
        ),
        (["decoder", "hi", "--draft-model", "seq2seq"], "the draft model is a Seq2Seq"),
        (["decoder", "hi", "--draft-heads"], "the model has no draft heads; train them with train.objective"),
        (["double", "hi", "--int8"], "a weight is torch.float64 on cpu, but int8 needs float32 on the CPU"),
        (["decoder", "hi", "--int8", "--int4"], "--int8 and --int4 were both given; give one of them."),
        (["decoder", "hi", "--system", "x"], "--system was given without --chat; add --chat."),
        (
            ["decoder", "hi", "--chat", "--n", "2", "--temperature", "1"],
            "n is 2, but a chat has one reply per message",
        ),
        (["plain", "hi", "--chat"], "it was not trained on conversations; leave out --chat, or fine-tune it by"),
        (["seq2seq", "hi", "--chat"], "is an encoder-decoder, so it cannot chat; leave out --chat."),
        (["encoder", "hi"], "the model is of type Encoder"),
        (["wordless", "hi"], "this model has no tokenizer; enter token ids separated by spaces, such as 5 7 11."),
        (["wordless", "5", "--stop", "x"], "stop is ('x',), but there is no tokenizer"),
        (["wordless", "5", "--chat"], "has no tokenizer, so it cannot chat; leave out --chat."),
        (["learned", "to be " * 20], "tokens, but max_len is 16"),
        (["short", ""], "the prompt is empty, and the model has no start_id"),
        (["absent/model", "hi"], "there is no folder"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, house: House, call: Call) -> None:
    there = {"plain", "wordless", "double", *house.models}
    done = call("generate", *(house[word] if word in there or "/" in word else word for word in words))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_a_device_that_is_not_there_is_named(house: House, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gh.device, "fastest", lambda: torch.device("cpu"))
    done = call("generate", house["decoder"], "hi", "--device", "cuda")
    assert done == Done(1, "", "error: --device is 'cuda', but this machine has cpu; choose from these, or 'auto'.\n")
    assert call("generate", house["decoder"], "hi", "--device", "tpu").code == 2
    assert call("generate", house["decoder"], "hi", "--top-k", "0.5").code == 2


def test_a_lone_argument_is_a_prompt_for_the_bundled_model(call: Call, lines: Call, tmp_path: Path) -> None:
    done = call("generate", "for i in", "--max-new-tokens", "1")
    assert (done.code, done.out.strip()) == (0, "range")
    assert "python-3m" in done.err
    both = call("generate", "python-3m", "for i in", "--max-new-tokens", "1")
    assert both.out == done.out
    assert lines("generate", "-", "--max-new-tokens", "1", stdin=b"for i in\n").out.strip() == "range"
    for words in ([], ["python-3m"], [tmp_path]):  # a model without a prompt
        assert "there is no prompt" in call("generate", *words).err
    assert "without a model" in call("generate", "--chat").err


def test_a_model_without_a_tokenizer_takes_and_gives_ids(
    house: House, call: Call, lines: Callable[..., Done]
) -> None:
    prompts = [[5, 7, 11], [3]]
    expected = gh.generate(house.models["decoder"], None, prompts, max_new_tokens=12)
    texts = [" ".join(map(str, one.ids)) for one in expected]
    assert all(texts)
    assert call("generate", house["wordless"], "5 7 11", *FEW).out == texts[0] + "\n"
    assert lines("generate", house["wordless"], "-", *FEW, stdin=b"5 7 11\n3\n").out.splitlines() == texts
    found = json.loads(call("generate", house["wordless"], "5 7 11", *FEW, "--json").out)
    assert (found["prompt"], found["ids"], found["text"]) == ("5 7 11", expected[0].ids, "")
    (best,) = gh.generate(house.models["decoder"], None, [[3]], max_new_tokens=12, beams=2)
    assert call("generate", house["wordless"], "3", *FEW, "--beams", "2").out.split() == list(map(str, best.ids))
