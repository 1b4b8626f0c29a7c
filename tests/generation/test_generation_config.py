"""What was published beside the weights about tokens: kept as transformers keeps it, and read with suspicion."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from generation.test_transformers import Doubled, choose_end, draw_prompts, enliven, keep_exact
from hub.hf_models import make
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import utils as searching

import glasshouse as gh
from glasshouse.generation import Completion
from glasshouse.generation.generation_config import FILE, TokenRules, read_token_rules
from glasshouse.models import Decoder, Seq2Seq

NEW = 12
BEAMS = 4

Found = list[tuple[list[int], float]]  # texts without their end, and their scores


class Case:
    """A model in float64, theirs and ours, and rules without which it writes something else."""

    def __init__(self, name: str, folder: Path) -> None:
        self.theirs: Any = make(name)
        enliven(self.theirs)
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
        self.publish({})
        self.plain = [self.ask_theirs(prompt, 1)[0][0] for prompt in self.prompts]

    def publish(self, rules: dict[str, Any]) -> None:
        """Save with these settings beside the weights, and load."""
        given = {"pad_token_id": 0} | self.special | {"eos_token_id": self.end}
        self.theirs.generation_config = hf.GenerationConfig(**given | rules)
        self.theirs.save_pretrained(self.folder)
        ours, _ = gh.load(self.folder)
        assert isinstance(ours, Decoder | Seq2Seq)
        self.ours = ours
        self.opened = isinstance(ours, Seq2Seq) and "forced_bos_token_id" in rules

    @property
    def favourites(self) -> list[int]:
        """The tokens that come up in most texts, without any rules."""
        return [token for token, _ in Counter(token for text in self.plain for token in set(text)).most_common()]

    def ask_theirs(self, prompt: list[int], beams: int) -> Found:
        """Return what transformers writes; to it the forced token is a new one, and one more in the length of all.

        So no text is scored by its length here. The token itself has log-probability 0 to it, and adds nothing.
        """
        ids = torch.tensor([prompt])
        out = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=0.0,
            max_new_tokens=NEW + self.opened,
            return_dict_in_generate=True,
            output_scores=True,
        )
        start = 1 + self.opened if isinstance(self.ours, Seq2Seq) else len(prompt)
        texts = [row[: row.index(self.end) if self.end in row else NEW] for row in out.sequences[:, start:].tolist()]
        return list(zip(texts, [math.nan] if beams == 1 else out.sequences_scores.tolist(), strict=True))

    def ask_ours(self, beams: int, **settings: object) -> list[list[Completion]]:
        engine = gh.Engine(self.ours, slots=2 * BEAMS, max_len=40, source_len=24)
        asked = [
            engine.submit(prompt, max_new_tokens=NEW, beams=beams, n_best=beams, length_penalty=0.0, **settings)
            for prompt in self.prompts
        ]
        engine.run()
        return [request.completions() for request in asked]


@pytest.fixture(scope="module", params=["marian", "bart", "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def sums_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "torch", Doubled())


@pytest.mark.parametrize("rule", ["bad words", "suppressed", "opening", "all"])
def test_what_is_published_is_kept_as_in_transformers(case: Case, rule: str) -> None:
    first, second, third, *_ = case.favourites
    rules: dict[str, Any] = {}
    if rule in ("bad words", "all"):
        rules["bad_words_ids"] = [[first], [case.end]]  # an end is not forbidden so
    if rule in ("suppressed", "all"):
        rules["suppress_tokens"] = [second]
    if rule in ("opening", "all"):
        rules["forced_bos_token_id"] = third
    case.publish(rules)

    greedy = [found[0].ids for found in case.ask_ours(1)]
    assert greedy == [case.ask_theirs(prompt, 1)[0][0] for prompt in case.prompts]
    if isinstance(case.ours, Decoder) and rule == "opening":  # of no meaning behind a prompt
        assert greedy == case.plain
    else:
        assert greedy != case.plain

    for prompt, found in zip(case.prompts, case.ask_ours(BEAMS), strict=True):
        theirs = case.ask_theirs(prompt, BEAMS)
        assert [one.ids for one in found] == [ids for ids, _ in theirs]
        # Sums of a dozen numbers below 100, added in float64 in the same order from logits off by 1e-12 or so.
        assert [one.score for one in found] == pytest.approx([score for _, score in theirs], rel=0, abs=1e-9)


def test_a_bias_of_the_caller_s_own_goes_first(case: Case) -> None:
    favourite = case.favourites[0]
    case.publish({"bad_words_ids": [[favourite]]})
    assert not any(favourite in one.ids for found in case.ask_ours(BEAMS) for one in found)
    assert [one.ids for (one,) in case.ask_ours(1, logit_bias={favourite: 0.0})] == case.plain


def test_how_to_search_is_not_taken(case: Case) -> None:
    case.publish({"num_beams": 3, "max_length": 5, "min_length": 4, "repetition_penalty": 2.0, "length_penalty": 3.0})
    assert [one.ids for (one,) in case.ask_ours(1)] == case.plain


def test_the_opening_counts_neither_as_asked_for_nor_as_written() -> None:
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
    assert len(long.ids) == 6  # there is room for 8


def decoder(table: object) -> Decoder:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=10, end_ids=(7,)))
    assert isinstance(model, Decoder)
    model.extra_files[FILE] = table
    return model


@pytest.mark.parametrize(
    ("table", "forbidden"),
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
def test_odd_entries_are_left_out(table: object, forbidden: tuple[int, ...]) -> None:
    assert read_token_rules(decoder(table)) == TokenRules(forbidden)


@pytest.mark.parametrize(
    ("value", "opening"), [(3, (3,)), (0, (0,)), (10, ()), (-1, ()), (None, ()), (True, ()), ("3", ()), ([3], ())]
)
def test_an_opening_is_one_id(value: object, opening: tuple[int, ...]) -> None:
    model = gh.build(gh.preset("tiny-seq2seq", vocab_size=10))
    assert isinstance(model, Seq2Seq)
    model.extra_files[FILE] = {"forced_bos_token_id": value}
    assert read_token_rules(model) == TokenRules(forced_prefix=opening)


LEAVES = st.none() | st.booleans() | st.integers(-3, 12) | st.floats() | st.text(max_size=2)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner), max_leaves=8)
MODEL = decoder({})


@given(table=st.dictionaries(st.sampled_from(["bad_words_ids", "suppress_tokens", "forced_bos_token_id"]), JSON))
def test_whatever_the_file_holds_there_are_only_ids(table: dict[str, object]) -> None:
    MODEL.extra_files[FILE] = table
    rules = read_token_rules(MODEL)
    assert all(type(token) is int and 0 <= token < 10 for token in rules.suppressed)
    assert rules.forced_prefix == ()
