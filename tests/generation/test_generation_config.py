"""Token rules of generation_config.json, compared with transformers; malformed entries are ignored."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from examples import first_of
from generation.test_transformers import Float64Torch, choose_end, draw_prompts, keep_exact, widen_weights
from hub.hf_models import make
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import utils as searching

import glasshouse as gh
from glasshouse.generation import Completion
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.generation_config import FILE, TokenRules, read_token_rules

NEW = 12
BEAMS = 4

Found = list[tuple[list[int], float]]  # texts without their end, and their scores


class Case:
    """A model in float64, in transformers and here, with token rules that change its output."""

    def __init__(self, name: str, folder: Path) -> None:
        self.theirs: Any = make(name)
        widen_weights(self.theirs)
        config = self.theirs.config
        self.special = {
            role: getattr(config, role)
            for role in ("bos_token_id", "pad_token_id", "decoder_start_token_id")
            if getattr(config, role, None) in range(config.vocab_size)
        }
        self.words = sorted(set(range(config.vocab_size)) - {*self.special.values(), config.eos_token_id})
        self.theirs.generation_config = hf.GenerationConfig(**{"pad_token_id": 0} | self.special)
        self.end = choose_end(self.theirs, self.words)
        self.words.remove(self.end)
        self.folder = folder
        keep_exact(self.theirs.double())
        self.prompts = [prompt for prompt in draw_prompts(16, self.words) if len(prompt) > 1]
        self.save_with({})
        self.plain = [self.generate_hf(prompt, 1)[0][0] for prompt in self.prompts]

    def save_with(self, rules: dict[str, Any]) -> None:
        """Save with these settings in generation_config.json, and load."""
        given = {"pad_token_id": 0} | self.special | {"eos_token_id": self.end}
        self.theirs.generation_config = hf.GenerationConfig(**given | rules)
        self.theirs.save_pretrained(self.folder)
        ours, _ = gh.load(self.folder)
        assert isinstance(ours, Decoder | Seq2Seq)
        self.ours = ours
        self.has_forced_prefix = isinstance(ours, Seq2Seq) and "forced_bos_token_id" in rules

    @property
    def common_tokens(self) -> list[int]:
        """The most common tokens in completions without rules."""
        return [token for token, _ in Counter(token for text in self.plain for token in set(text)).most_common()]

    def generate_hf(self, prompt: list[int], beams: int) -> Found:
        """Generate with transformers, which counts the forced token as a new one and in the length.

        So length_penalty is 0 here. The forced token has log-probability 0 in transformers.
        """
        ids = torch.tensor([prompt])
        out = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=0.0,
            max_new_tokens=NEW + self.has_forced_prefix,
            return_dict_in_generate=True,
            output_scores=True,
        )
        start = 1 + self.has_forced_prefix if isinstance(self.ours, Seq2Seq) else len(prompt)
        texts = [row[: row.index(self.end) if self.end in row else NEW] for row in out.sequences[:, start:].tolist()]
        return list(zip(texts, [math.nan] if beams == 1 else out.sequences_scores.tolist(), strict=True))

    def generate_ours(self, beams: int, **settings: object) -> list[list[Completion]]:
        engine = gh.Engine(self.ours, slots=2 * BEAMS, max_len=40, source_len=24)
        requests = [
            engine.submit(prompt, max_new_tokens=NEW, beams=beams, n_best=beams, length_penalty=0.0, **settings)
            for prompt in self.prompts
        ]
        engine.run()
        return [request.completions() for request in requests]


@pytest.fixture(scope="module", params=["marian", "bart", "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def sums_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "torch", Float64Torch())


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    first_of(["all", "forced prefix", "bad words", "suppressed"]),
)
def test_token_rules_equal_transformers(case: Case, rule: str) -> None:
    first, second, third, *_ = case.common_tokens
    rules: dict[str, Any] = {}
    if rule in ("bad words", "all"):
        rules["bad_words_ids"] = [[first], [case.end]]  # an end token is not suppressed this way
    if rule in ("suppressed", "all"):
        rules["suppress_tokens"] = [second]
    if rule in ("forced prefix", "all"):
        rules["forced_bos_token_id"] = third
    case.save_with(rules)

    greedy = [found[0].ids for found in case.generate_ours(1)]
    assert greedy == [case.generate_hf(prompt, 1)[0][0] for prompt in case.prompts]
    if isinstance(case.ours, Decoder) and rule == "forced prefix":  # no effect in a decoder
        assert greedy == case.plain
    else:
        assert greedy != case.plain

    for prompt, found in zip(case.prompts, case.generate_ours(BEAMS), strict=True):
        theirs = case.generate_hf(prompt, BEAMS)
        assert [one.ids for one in found] == [ids for ids, _ in theirs]
        # Sums of a dozen numbers below 100, added in float64 in the same order from logits off by 1e-12 or so.
        assert [one.score for one in found] == pytest.approx([score for _, score in theirs], rel=0, abs=1e-9)


@pytest.mark.few(1)
def test_logit_bias_overrides_token_rules(case: Case) -> None:
    common = case.common_tokens[0]
    case.save_with({"bad_words_ids": [[common]]})
    assert not any(common in one.ids for found in case.generate_ours(BEAMS) for one in found)
    assert [one.ids for (one,) in case.generate_ours(1, logit_bias={common: 0.0})] == case.plain


@pytest.mark.few(1)
def test_search_settings_are_ignored(case: Case) -> None:
    case.save_with(
        {"num_beams": 3, "max_length": 5, "min_length": 4, "repetition_penalty": 2.0, "length_penalty": 3.0}
    )
    assert [one.ids for (one,) in case.generate_ours(1)] == case.plain


def test_forced_prefix_does_not_count_as_new_tokens() -> None:
    torch.manual_seed(2)
    model = gh.build(gh.preset("tiny-seq2seq", start_id=1, end_ids=(), max_len=16))
    assert isinstance(model, Seq2Seq)
    model.extra_files[FILE] = {"forced_bos_token_id": 5}
    engine = gh.Engine(model, slots=2, max_len=8)
    short, long = (engine.submit([7, 8, 9], max_new_tokens=new) for new in (3, 20))
    engine.run()
    assert short.prompt == [1, 5]
    assert len(short.ids) == 3
    assert long.ids[:3] == short.ids
    assert len(long.ids) == 6  # max_len is 8


def decoder(table: object) -> Decoder:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=10, end_ids=(7,)))
    assert isinstance(model, Decoder)
    model.extra_files[FILE] = table
    return model


@pytest.mark.parametrize(
    ("table", "suppressed"),
    [
        ({}, ()),
        (None, ()),
        ([1, 2], ()),
        ({"bad_words_ids": [[9], [3], [3]]}, (3, 9)),
        ({"bad_words_ids": [[1, 2], [], [4]]}, (4,)),
        ({"bad_words_ids": [[10], [-1], [True], ["3"], [2.0], [None], [[5]], 6, None, "8", {}]}, ()),
        ({"bad_words_ids": [3]}, ()),
        ({"bad_words_ids": None, "suppress_tokens": None}, ()),
        ({"bad_words_ids": "no", "suppress_tokens": 3}, ()),
        ({"bad_words_ids": [[7], [6]]}, (6,)),  # 7 ends a text
        ({"suppress_tokens": [7, 6, 10, "2", None, 2]}, (2, 6, 7)),
        ({"bad_words_ids": [[5]], "suppress_tokens": [4]}, (4, 5)),
        ({"forced_bos_token_id": 3}, ()),
    ],
)
def test_malformed_entries_are_ignored(table: object, suppressed: tuple[int, ...]) -> None:
    assert read_token_rules(decoder(table)) == TokenRules(suppressed)


@pytest.mark.parametrize(
    ("value", "forced_prefix"),
    [(3, (3,)), (0, (0,)), (10, ()), (-1, ()), (None, ()), (True, ()), ("3", ()), ([3], ())],
)
def test_forced_prefix_is_one_id(value: object, forced_prefix: tuple[int, ...]) -> None:
    model = gh.build(gh.preset("tiny-seq2seq", vocab_size=10))
    assert isinstance(model, Seq2Seq)
    model.extra_files[FILE] = {"forced_bos_token_id": value}
    assert read_token_rules(model) == TokenRules(forced_prefix=forced_prefix)


LEAVES = st.none() | st.booleans() | st.integers(-3, 12) | st.floats() | st.text(max_size=2)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner), max_leaves=8)
MODEL = decoder({})


@given(table=st.dictionaries(st.sampled_from(["bad_words_ids", "suppress_tokens", "forced_bos_token_id"]), JSON))
def test_any_json_gives_valid_ids(table: dict[str, object]) -> None:
    MODEL.extra_files[FILE] = table
    rules = read_token_rules(MODEL)
    assert all(type(token) is int and 0 <= token < 10 for token in rules.suppressed)
    assert rules.forced_prefix == ()
