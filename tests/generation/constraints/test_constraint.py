"""Constrained decoding: masks before sampling, in one batch with requests that have none, and grammars."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import Grammar, PromptLookup
from glasshouse.generation.constraints.grammar import token_bytes

N_IDS = 40
END = 0


class Pattern:
    """A constraint by hand: the t-th token is one of `steps[t]`; then the text is complete."""

    def __init__(self, *steps: set[int], fails_at: int | None = None) -> None:
        self.steps, self.fails_at = steps, fails_at

    def start(self, vocab_size: int, end_ids: Collection[int]) -> PatternState:
        return PatternState(self, vocab_size)


class PatternState:
    def __init__(self, pattern: Pattern, vocab_size: int) -> None:
        self.pattern, self.vocab_size, self.at = pattern, vocab_size, 0

    @property
    def complete(self) -> bool:
        return self.at == len(self.pattern.steps)

    def allowed(self) -> Tensor:
        if self.at == self.pattern.fails_at:
            raise InputError("too much work.")
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[sorted(self.pattern.steps[self.at])] = True
        return mask

    def accept(self, token: int) -> bool:
        was_allowed = token in self.pattern.steps[self.at]
        self.at += 1
        return was_allowed


EVERYTHING = Pattern(*[set(range(N_IDS))] * 30)


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    return gh.build(gh.preset("tiny-decoder", vocab_size=N_IDS, max_len=64, end_ids=(END,))).eval()


@pytest.fixture(scope="module")
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=["to be or not to be, that is the question"], vocab_size=280)


@pytest.fixture(scope="module")
def text_model(tok: gh.Tokenizer) -> gh.models.Decoder:
    torch.manual_seed(1)
    end = tok.token_to_id("<|end|>")
    return gh.build(gh.preset("tiny-decoder", vocab_size=len(tok) + 8, max_len=256, end_ids=(end,))).eval()


def reference(model: gh.models.Decoder, prompt: list[int], pattern: Pattern) -> tuple[list[int], list[float]]:
    """Greedy decoding without a cache: the best of the allowed tokens, and its log-probability among all."""
    ids: list[int] = []
    logprobs = []
    for step in pattern.steps:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids]))[0, -1]
        best = max(sorted(step), key=lambda token: float(logits[token]))
        if best == END:
            break
        ids.append(best)
        logprobs.append(float(logits.log_softmax(-1)[best]))
    return ids, logprobs


def test_greedy_takes_the_best_of_what_is_allowed(model: gh.models.Decoder) -> None:
    patterns = [Pattern({3}, {4, 5, 6}, {7, END}, {8}), Pattern({9, 10}, {11, 12}, {13}), Pattern(*[{END, 30}] * 9)]
    prompts = [[1, 2, 3], [5], [6, 7]]
    engine = gh.Engine(model, slots=3, max_len=64)
    requests = [engine.submit(one, constraint=two) for one, two in zip(prompts, patterns, strict=True)]
    engine.run()
    for request, prompt, pattern in zip(requests, prompts, patterns, strict=True):
        ids, logprobs = reference(model, prompt, pattern)
        assert request.ids == ids
        assert request.logprobs == pytest.approx(logprobs, abs=1e-5)  # of the model, not of the mask
        assert request.finish_reason == "stop"


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.2, "seed": 4}, {"temperature": 1.0, "top_p": 0.7}])
def test_neighbours_are_not_touched(model: gh.models.Decoder, settings: dict[str, float]) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    engine = gh.Engine(model, slots=4, max_len=64, batch_invariant=True)
    alone = [engine.submit(prompt, max_new_tokens=20, **settings) for prompt in prompts]
    engine.run()
    constrained = [engine.submit([7], max_new_tokens=n, constraint=Pattern(*[{20, 21, 22}] * n)) for n in (3, 9)]
    requests = [engine.submit(prompt, max_new_tokens=20, **settings) for prompt in prompts]
    unbound = engine.submit(prompts[0], max_new_tokens=20, constraint=EVERYTHING, **settings)
    engine.run()
    assert [(one.ids, one.logprobs) for one in requests] == [(one.ids, one.logprobs) for one in alone]
    assert (unbound.ids, unbound.logprobs) == (requests[0].ids, requests[0].logprobs)
    assert all(set(one.ids) <= {20, 21, 22} for one in constrained)


@pytest.mark.long
def test_samples_follow_the_allowed_distribution(model: gh.models.Decoder) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2]]))[0, -1]
    allowed = [5, 6, 7]
    expected = logits[allowed].softmax(-1)
    drawn = gh.generate(
        model, None, [[1, 2]], 1, temperature=1.0, n=600, slots=64, constraint=Pattern(set(allowed)), seed=3
    )
    counts = torch.tensor([sum(one.ids == [token] for one in drawn) for token in allowed])
    assert counts.sum() == 600
    deviation = (600 * expected * (1 - expected)).sqrt()  # of a binomial count; five of them are never reached
    assert ((counts - 600 * expected).abs() < 5 * deviation).all()


def test_how_a_constrained_request_ends(model: gh.models.Decoder) -> None:
    engine = gh.Engine(model, slots=4, max_len=64)
    done = engine.submit([1], constraint=Pattern({3}, {4}))
    cut = engine.submit([1], constraint=Pattern({3}, {4}, {5}), max_new_tokens=2)
    stuck = engine.submit([1], constraint=Pattern({3}, set(), {4}))
    too_much = engine.submit([1], constraint=Pattern({3}, {4}, {5}, fails_at=2))
    early = engine.submit([1], constraint=Pattern({3}, {END}), min_new_tokens=3)
    plain = engine.submit([1], max_new_tokens=6)
    engine.run()
    assert (done.ids, done.finish_reason) == ([3, 4], "stop")
    assert (cut.ids, cut.finish_reason) == ([3, 4], "length")
    assert (stuck.ids, stuck.finish_reason) == ([3], "error")
    assert "a constraint" in str(stuck.error)
    assert (too_much.ids, too_much.error) == ([3, 4], "too much work.")
    assert (early.ids, early.finish_reason) == ([3], "error")
    assert plain.ids == gh.generate(model, None, [[1]], max_new_tokens=6)[0].ids


def test_a_slot_forgets_its_constraint(model: gh.models.Decoder) -> None:
    engine = gh.Engine(model, slots=2, max_len=64)
    engine.submit([1], constraint=Pattern({3}, {4}))
    engine.run()
    later = engine.submit([1], max_new_tokens=6)  # in the slot of the first
    kept = engine.submit([5], max_new_tokens=30, constraint=Pattern(*[{6}] * 30))  # so that masks are applied
    engine.run()
    assert later.ids == gh.generate(model, None, [[1]], max_new_tokens=6)[0].ids
    assert kept.ids == [6] * 30


def test_what_takes_no_constraint(model: gh.models.Decoder) -> None:
    with pytest.raises(InputError, match="beams is 2"):
        gh.generate(model, None, [[1]], beams=2, constraint=Pattern({3}))
    with pytest.raises(InputError, match="constraint and speculator"):
        gh.generate(model, None, [[1]], constraint=Pattern({3}), speculator=PromptLookup())


def test_json_by_a_model_that_knows_none(text_model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 5}, "b": {"type": ["boolean", "null"]}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    found = gh.generate(text_model, tok, "?", 120, temperature=1.0, n=20, constraint=Grammar.json_schema(tok, schema))
    for one in found:
        assert one.finish_reason == "stop"
        value = json.loads(one.text)
        assert set(value) == {"n", "b"}
        assert value["n"] in range(-5, 6)
        assert value["b"] in (True, False, None)
    assert len({one.text for one in found}) > 5
    (any_object,) = gh.generate(text_model, tok, "?", 1, constraint=Grammar.json_schema(tok))
    assert (any_object.text, any_object.finish_reason) == ("{", "length")


@pytest.mark.parametrize("text", ['start: "to be" | "not"', 'root ::= "to be" | "not"'])
def test_context_free_grammars(text: str, text_model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    grammar = Grammar.context_free(tok, text)
    found = gh.generate(text_model, tok, "?", temperature=3.0, n=20, constraint=grammar)
    assert {one.text for one in found} == {"to be", "not"}


def test_an_end_token_only_where_the_text_may_end(text_model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    (end,) = text_model.spec.end_ids
    state = Grammar.regex(tok, "ab*").start(text_model.spec.vocab_size, [end])
    assert not state.allowed()[end]
    assert not state.accept(end)
    assert state.accept(tok.encode("a")[0])
    assert state.allowed().nonzero().flatten().tolist() == sorted({end, tok.encode("b")[0]})
    assert state.accept(end)
    assert not state.complete  # as another b may follow


def test_special_tokens_are_no_text(text_model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    state = Grammar.regex(tok, "(?s:.*)").start(text_model.spec.vocab_size, [])
    allowed = set(state.allowed().nonzero().flatten().tolist())
    assert not allowed & tok.special_ids
    assert max(allowed) < len(tok) < text_model.spec.vocab_size
    assert tok.encode("a")[0] in allowed


def test_tokens_of_other_kinds_of_tokenizers() -> None:
    vocab = ["<unk>", "▁", "a", "▁true", "<0x0A>", "{"]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    file = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(vocab)},
            "merges": [],
            "unk_token": "<unk>",
            "byte_fallback": True,
        },
    }
    tok = gh.Tokenizer.from_json(json.dumps(file), {"unk_token": "<unk>"})
    assert token_bytes(tok) == [b"", b" ", b"a", b" true", b"\n", b"{"]
    model = gh.build(gh.preset("tiny-decoder", vocab_size=8)).eval()
    grammar = Grammar.regex(tok, r"\{ true\n")
    assert gh.generate(model, tok, [[2]], constraint=grammar)[0].text == "{ true\n"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda tok: Grammar.json_schema(tok, {"not": {}}), "the json schema cannot be used: Unimplemented"),
        (lambda tok: Grammar.json_schema(tok, "{"), "the json schema cannot be used: EOF"),
        (lambda tok: Grammar.regex(tok, "("), "the regex cannot be used: .*unclosed group"),
        (lambda tok: Grammar.context_free(tok, "start: thing"), "the grammar cannot be used: .*unknown name"),
    ],
)
def test_errors_say_what_is_wrong(make: object, said: str, tok: gh.Tokenizer) -> None:
    with pytest.raises(InputError, match=said):
        make(tok)  # type: ignore[operator]


def test_without_the_extra(tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'glasshouse\[structured\]'"):
        Grammar.regex(tok, "a")


def test_thousands_of_alternatives(text_model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    """The library's own limit is 2,000 at one place; beyond ours, the error says that it is the grammar's size."""
    words = [f"b{number:05}" for number in range(3000)]
    every = Grammar.context_free(tok, "start: " + " | ".join(f'"{word}"' for word in words))
    assert gh.generate(text_model, tok, "?", temperature=3.0, constraint=every)[0].text in words
    tight = Grammar(tok, "grammar", "start: " + " | ".join(f'"{word}"' for word in words), {"max_items_in_row": 100})
    with pytest.raises(gh.InputError, match=r"too much work .*has 3001 items; max is 100.*; simplify it"):
        gh.generate(text_model, tok, "?", constraint=tight)
