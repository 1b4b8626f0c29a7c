"""Beam search compared with hand-computed examples, exhaustive search and transformers, and its cache copies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import utils as reference
from transformers.generation.configuration_utils import GenerationMode

from glasshouse.errors import InputError
from glasshouse.generation.beam.hypothesis import Hypothesis, Node
from glasshouse.generation.beam.search import BeamSearch, advance
from glasshouse.generation.sampling_params import SamplingParams

Model = Callable[[list[list[int]]], Tensor]  # the new tokens of each row to its logits [rows, V]


def markov(table: Tensor) -> Model:
    """Return a model that depends on the last token only; row 0 of the table follows the prompt."""
    return lambda rows: table[[row[-1] if row else 0 for row in rows]]


def random_table(vocab_size: int, seed: int, end_ids: Sequence[int] = (), bias: float = 0.0) -> Tensor:
    table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table[:, list(end_ids)] += bias
    return table


def run(search: BeamSearch, model: Model) -> BeamSearch:
    rows: list[list[int]] = [[]] * search.options.beams
    while not search.done:
        parents, tokens = advance([search], model(rows))
        rows = [[*rows[parent], token] for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
    return search


END, A, B = 0, 1, 2
# After A the end has 0.4, after B 0.9: the most probable text begins with the less probable token.
BY_HAND = torch.tensor([[0.1, 0.5, 0.4], [0.4, 0.3, 0.3], [0.9, 0.05, 0.05]], dtype=torch.float64).log()


@pytest.mark.parametrize("early_stopping", [False, True])
def test_by_hand(early_stopping: bool) -> None:
    """Step 1 keeps A (0.5) and B (0.4); step 2 ends B (0.36) and A (0.2), and nothing at 0.15 can beat them."""
    options = SamplingParams(beams=2, length_penalty=0.0, early_stopping=early_stopping)
    search = run(BeamSearch(options, [END], 3, n_best=2, keep_tree=True), markov(BY_HAND))
    first, second = search.results()
    assert (first.ids, second.ids) == ([B], [A])
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    # 1e-12: a few roundings of numbers near 1 in float64
    assert first.score == pytest.approx(math.log(0.36), abs=1e-12)
    assert second.score == pytest.approx(math.log(0.2), abs=1e-12)
    assert first.logprobs == pytest.approx([math.log(0.4)], abs=1e-12)
    assert [(node.parent, node.token, node.step, node.outcome) for node in search.tree[:5]] == [
        (None, A, 1, "kept"),
        (None, B, 1, "kept"),
        (None, END, 1, "pruned"),  # the third of two beams
        (1, END, 2, "ended"),
        (0, END, 2, "ended"),
    ]


# Step 1 ends the empty text (0.5) and keeps A (0.4) and B (0.1). Step 2 has AB at 0.22 before the end of A at 0.18:
# two are finished while log(0.22) / 2 beats the worse of them, log(0.18) / 2, but not the better. Step 3 ends AB.
OVERTAKEN = torch.tensor([[0.5, 0.4, 0.1], [0.45, 0.0, 0.55], [0.99, 0.006, 0.004]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SamplingParams(beams=2, early_stopping=True), {(): math.log(0.5), (A,): math.log(0.18) / 2}),
        (SamplingParams(beams=2), {(A, B): math.log(0.22 * 0.99) / 3, (): math.log(0.5)}),
        # cut at the step that fills the list: the running beam still counts
        (
            SamplingParams(beams=2, early_stopping=True, max_new_tokens=2),
            {(): math.log(0.5), (A, B): math.log(0.22) / 2},
        ),
    ],
)
def test_running_beam_overtakes_finished_one_by_hand(
    options: SamplingParams, expected: dict[tuple[int, ...], float]
) -> None:
    results = run(BeamSearch(options, [END], 3, n_best=2), markov(OVERTAKEN)).results()
    scores = {tuple(found.ids): found.score for found in results}
    assert scores == pytest.approx(expected, abs=1e-12)
    assert list(scores) == sorted(scores, key=lambda ids: -scores[ids])


def test_stop_token_ids_end_like_end_ids() -> None:
    options = SamplingParams(beams=2, stop_token_ids=(END,))
    expected = run(BeamSearch(SamplingParams(beams=2), [END], 3), markov(BY_HAND)).results()
    assert expected[0].finish_reason == "stop"
    assert run(BeamSearch(options, [], 3), markov(BY_HAND)).results() == expected


def all_texts(table: Tensor, end: int, length: int) -> list[tuple[list[int], float, bool]]:
    """List all texts with their log-probability and whether they end, including those cut at the length."""
    logprobs = table.log_softmax(-1)
    alive = [token for token in range(len(table)) if token != end]
    found = []
    for size in range(length + 1):
        for ids in itertools.product(alive, repeat=size):
            path = [0, *ids]
            total = sum(float(logprobs[a, b]) for a, b in itertools.pairwise(path))
            if size < length:
                found.append((list(ids), total + float(logprobs[path[-1], end]), True))
            else:
                found.append((list(ids), total, False))
    return found


@pytest.mark.few(5)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_enough_beams_equal_exhaustive_search(penalty: float, seed: int) -> None:
    length, end = 4, 2
    table = random_table(5, seed)
    options = SamplingParams(beams=4**length, max_new_tokens=length, length_penalty=penalty)
    results = run(BeamSearch(options, [end], 5, n_best=20), markov(table)).results()
    scored = sorted(
        ((total / (len(ids) + stops) ** penalty, ids, stops) for ids, total, stops in all_texts(table, end, length)),
        key=lambda text: text[0],
        reverse=True,
    )
    assert [(found.ids, found.finish_reason == "stop") for found in results] == [text[1:] for text in scored[:20]]
    assert [found.score for found in results] == pytest.approx([text[0] for text in scored[:20]], abs=1e-12)


VOCAB = 17


def make_hf_model(family: str, seed: int, end_ids: Sequence[int], end_bias: float) -> transformers.PreTrainedModel:
    """Build a tiny random Hugging Face model whose end tokens are likely."""
    torch.manual_seed(seed)
    if family == "gpt2":
        config: Any = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=8, n_layer=1, n_head=2)
        model: Any = transformers.GPT2LMHeadModel(config)
    elif family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.6)
    bias = torch.zeros(VOCAB)
    bias[list(end_ids)] = end_bias
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model.eval().double()


class FrequencyPenaltyProcessor(transformers.LogitsProcessor):
    """The frequency penalty, which transformers does not have."""

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.stack([row.bincount(minlength=VOCAB) for row in input_ids[:, self.prompt_length :]])
        return scores - self.penalty * counts


class Float64Torch:
    """Replaces torch where transformers casts to float32, so that its search runs in float64."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture
def searches_with_one_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers use beam search with one beam too, where it would be greedy."""
    config = transformers.GenerationConfig
    monkeypatch.setattr(config, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH)


def compare(
    family: str, seed: int, options: SamplingParams, end_ids: list[int], n_best: int, tolerance: float
) -> None:
    rng = random.Random(seed)
    model = make_hf_model(family, seed, end_ids, end_bias=rng.uniform(0, 3))
    source = torch.tensor([[rng.randrange(VOCAB) for _ in range(4)]])
    prompt = [0] if family == "t5" else source[0].tolist()

    def last_logits(rows: list[list[int]]) -> Tensor:
        ids = torch.tensor([prompt + row for row in rows])
        if family == "t5":
            return model(input_ids=source.expand(len(rows), -1), decoder_input_ids=ids).logits[:, -1]
        return model(input_ids=ids).logits[:, -1]

    with torch.no_grad():
        theirs = model.generate(
            source,
            attention_mask=torch.ones_like(source),
            do_sample=False,
            num_beams=options.beams,
            num_return_sequences=n_best,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens or None,
            repetition_penalty=float(options.repetition_penalty),
            sequence_bias=[[[token], bias] for token, bias in options.logit_bias.items()] or None,
            logits_processor=[FrequencyPenaltyProcessor(options.frequency_penalty, len(prompt))],
            eos_token_id=end_ids,
            pad_token_id=end_ids[0],
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        search = BeamSearch(options, end_ids, VOCAB, n_best, prompt=prompt)
        ours = run(search, last_logits).results()

        assert [found.score for found in ours] == pytest.approx(theirs.sequences_scores.tolist(), abs=tolerance)
        for found, sequence in zip(ours, theirs.sequences[:, len(prompt) :].tolist(), strict=True):
            ends = [place for place, token in enumerate(sequence) if token in end_ids]
            assert found.ids == sequence[: ends[0] if ends else None]
            assert found.finish_reason == ("stop" if ends else "length")
            assert len(found.logprobs) == len(found.ids)
            for place, (token, logprob) in enumerate(zip(found.ids, found.logprobs, strict=True)):
                raw = last_logits([found.ids[:place]]).log_softmax(-1)
                assert logprob == pytest.approx(float(raw[0, token]), abs=tolerance)


SETTINGS = list(itertools.product([-1.0, 0.0, 0.5, 1.0, 2.0], [False, True]))


def random_options(seed: int) -> tuple[SamplingParams, list[int], int]:
    """Return random options, end ids and n_best."""
    rng = random.Random(seed)
    penalty, early_stopping = SETTINGS[seed % len(SETTINGS)]
    beams = rng.randint(1, 5)
    tokens = range(VOCAB)
    most = rng.choice([1, 5, 9])
    options = SamplingParams(
        beams=beams,
        length_penalty=penalty,
        early_stopping=early_stopping,
        max_new_tokens=most,
        min_new_tokens=min(most, rng.choice([0, 0, 2])),
        repetition_penalty=rng.choice([1.0, 1.0, 0.7, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.75]),
        logit_bias=rng.choice([{}, {rng.choice(tokens): 1.5, rng.choice(tokens): -2.0}]),
    )
    return options, rng.sample(tokens, rng.randint(1, 3)), rng.randint(1, beams)


@pytest.mark.few(15)
@pytest.mark.usefixtures("searches_with_one_beam")
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("seed", range(len(SETTINGS) * 3))
def test_equals_transformers(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "torch", Float64Torch())
    options, end_ids, n_best = random_options(seed)
    compare(family, seed, options, end_ids, n_best, tolerance=1e-9)


@pytest.mark.parametrize("early_stopping", [False, True])
def test_equals_unpatched_transformers(early_stopping: bool) -> None:
    """Without the float64 patch: sums of 9 float32 numbers below 64 are off by at most 9 * 64 * 2**-24 < 1e-4."""
    compare(
        "gpt2", 3, SamplingParams(beams=3, max_new_tokens=9, early_stopping=early_stopping), [5], 3, tolerance=1e-4
    )


def path(tree: list[Node], leaf: int) -> list[Node]:
    nodes = []
    at: int | None = leaf
    while at is not None:
        nodes.append(tree[at])
        at = tree[at].parent
    return nodes[::-1]


@pytest.mark.parametrize("seed", range(8))
def test_results_are_paths_of_the_tree(seed: int) -> None:
    end_ids = [1, 4]
    beams, vocab_size = 3, 11
    options = SamplingParams(beams=beams, max_new_tokens=7, repetition_penalty=1.3, length_penalty=0.7)
    search = BeamSearch(options, end_ids, vocab_size, n_best=beams, keep_tree=True)
    run(search, markov(random_table(vocab_size, seed, end_ids, bias=1.0)))
    tree = search.tree
    for place, node in enumerate(tree):
        assert node.parent is None or node.parent < place
        parent = None if node.parent is None else tree[node.parent]
        assert parent is None or parent.outcome == "kept"
        assert node.step == (1 if parent is None else parent.step + 1)
        assert node.score == node.total / node.step**0.7
        # the penalty lowers a log-probability, and never raises it
        assert node.total <= (0.0 if parent is None else parent.total) + node.logprob + 1e-12

    for step in range(1, tree[-1].step + 1):
        level = [node for node in tree if node.step == step]
        assert len(level) >= 2 * beams
        assert sum(node.outcome == "kept" for node in level) == beams
        assert [node.total for node in level] == sorted((node.total for node in level), reverse=True)
        for rank, node in enumerate(level):
            assert (node.outcome == "ended") == (node.token in end_ids and rank < beams)
            assert node.outcome != "kept" or node.token not in end_ids

    for found in search.results():
        assert found.node is not None
        nodes = path(tree, found.node)
        stops = found.finish_reason == "stop"
        assert nodes[-1].outcome == ("ended" if stops else "kept")
        assert nodes[-1].score == found.score
        assert [node.token for node in nodes[: len(nodes) - stops]] == found.ids
        assert [node.logprob for node in nodes[: len(nodes) - stops]] == found.logprobs


def test_no_tree_by_default() -> None:
    search = run(BeamSearch(SamplingParams(beams=2), [END], 3), markov(BY_HAND))
    assert search.tree == []
    assert search.results()[0].node is None


@settings(max_examples=up_to(60), deadline=None)
@given(seed=st.integers(0, 10**6), beams=st.integers(1, 6), vocab_size=st.integers(1, 12), bias=st.floats(-2, 1))
def test_cache_copies_keep_the_cache_consistent(seed: int, beams: int, vocab_size: int, bias: float) -> None:
    end_ids = [0]
    search = BeamSearch(SamplingParams(beams=beams, max_new_tokens=9), end_ids, vocab_size)
    model = markov(random_table(vocab_size, seed, end_ids, bias))
    cache: list[list[int]] = [[] for _ in range(beams)]
    while not search.done:
        parents, tokens = advance([search], model(cache))
        expected = [list(cache[parent]) for parent in parents.tolist()]
        before = [list(row) for row in cache]
        sources = {copy.source for copy in search.cache_copies}
        assert sources.isdisjoint(copy.target for copy in search.cache_copies)
        for target, source, start in random.Random(seed).sample(search.cache_copies, len(search.cache_copies)):
            assert before[target][:start] == before[source][:start]
            if vocab_size > beams:  # no row is ever idle after the first step
                assert before[target][start] != before[source][start]
            cache[target][start:] = cache[source][start:]
        assert cache == expected
        assert len(search.cache_copies) <= beams - len(set(parents.tolist()))
        for row, token in zip(cache, tokens.tolist(), strict=True):
            row.append(token)


def test_child_takes_the_free_row_with_the_longest_common_prefix() -> None:
    search = BeamSearch(SamplingParams(beams=3, max_new_tokens=9), [], 4)

    def step(*logits: list[float]) -> tuple[list[int], list[int]]:
        parents, tokens = advance([search], torch.tensor(logits, dtype=torch.float64))
        return parents.tolist(), tokens.tolist()

    ignored = [0.0] * 4
    assert step([-math.inf, 2.0, 1.0, 0.0], ignored, ignored) == ([0, 0, 0], [1, 2, 3])
    assert search.cache_copies == []  # all rows have the prompt
    # Row 0 (ends with 1) gets two children, row 1 (2) one: row 2 (3) is overwritten from its first token on.
    assert step([0.0, 0.1, -9.0, -9.0], [9.0, 0.0, 0.0, 0.0], ignored) == ([0, 1, 0], [1, 0, 0])
    assert search.cache_copies == [(2, 0, 0)]
    # Row 0 gets three children; rows 1 and 2 are free, and row 2 shares a token with it.
    assert step([0.3, 0.2, 0.1, -99.0], ignored, ignored) == ([0, 0, 0], [0, 2, 1])
    assert search.cache_copies == [(1, 0, 0), (2, 0, 1)]


@pytest.mark.parametrize("beams", [1, 2, 4])
def test_batched_searches_equal_single_ones(beams: int) -> None:
    vocab_size = 9
    plain: dict[str, Any] = {"beams": beams, "max_new_tokens": 8}
    requests: list[tuple[SamplingParams, list[int]]] = [
        (SamplingParams(**plain), [0]),
        (SamplingParams(**plain, early_stopping=True, stop_token_ids=(3, 4)), [0, 1, 2]),
        (SamplingParams(**plain, repetition_penalty=1.7), [5]),
        (SamplingParams(**plain, frequency_penalty=0.5, min_new_tokens=3), [0]),
        (SamplingParams(**plain, logit_bias={3: 2.0, 4: -math.inf}, length_penalty=0.0), [7]),
        (SamplingParams(beams=beams, max_new_tokens=1), []),
    ]
    tables = [random_table(vocab_size, seed, ends, bias=1.0) for seed, (_, ends) in enumerate(requests)]

    def make_searches() -> list[BeamSearch]:
        return [
            BeamSearch(options, ends, vocab_size, beams, keep_tree=True, prompt=[8]) for options, ends in requests
        ]

    alone = [run(search, markov(table)) for search, table in zip(make_searches(), tables, strict=True)]
    together = make_searches()
    last = torch.zeros(len(requests), beams, dtype=torch.int64)
    lengths = set()
    while not all(search.done for search in together):
        logits = torch.stack([table[row] for table, row in zip(tables, last, strict=True)]).flatten(0, 1)
        done = [search.done for search in together]
        parents, tokens = advance(together, logits)
        last = tokens.view(-1, beams)
        for search, was_done, rows in zip(together, done, parents.view(-1, beams).tolist(), strict=True):
            if was_done:
                assert rows == list(range(beams))
                assert search.cache_copies == []
        lengths.add(sum(search.done for search in together))
    assert len(lengths) > 2  # they ended at different times
    assert [search.results() for search in together] == [search.results() for search in alone]
    assert [search.tree for search in together] == [search.tree for search in alone]


def test_one_new_token() -> None:
    """The end (0.4) and B (0.6) are both results, and the end token is left out of its ids."""
    logits = torch.tensor([[0.4, 0.0, 0.6]] * 2).log()
    search = BeamSearch(SamplingParams(beams=2, max_new_tokens=1), [END], 3, n_best=2)
    advance([search], logits)
    assert search.done
    assert [(found.ids, found.finish_reason) for found in search.results()] == [([B], "length"), ([], "stop")]


def test_no_new_token() -> None:
    search = BeamSearch(SamplingParams(beams=2, max_new_tokens=0), [END], 3, n_best=2)
    assert search.done
    assert search.results() == [Hypothesis([], [], 0.0, "length")]


def test_more_beams_than_continuations() -> None:
    """Of three tokens one ends: two beams can run after a step and four after two, the fifth never."""
    search = BeamSearch(SamplingParams(beams=5, max_new_tokens=2), [END], 3, n_best=5, keep_tree=True)
    run(search, markov(BY_HAND))
    assert [sum(node.step == step and node.outcome == "kept" for node in search.tree) for step in (1, 2)] == [2, 4]
    scores = sorted((total / (len(ids) + stops) for ids, total, stops in all_texts(BY_HAND, END, 2)), reverse=True)
    assert [found.score for found in search.results()] == pytest.approx(scores[:5], abs=1e-12)


def test_only_end_tokens() -> None:
    search = BeamSearch(SamplingParams(beams=4, max_new_tokens=9), [0, 1], 2, n_best=4)
    parents, tokens = advance([search], torch.tensor([[0.75, 0.25]] * 4).log())
    assert search.done
    assert parents.tolist() == [0, 1, 2, 3]
    assert set(tokens.tolist()) <= {0, 1}
    assert [found.ids for found in search.results()] == [[], []]
    assert [math.exp(found.score) for found in search.results()] == pytest.approx([0.75, 0.25])


def test_more_end_tokens_than_beams() -> None:
    """The five most probable tokens end, so the two beams are the sixth and the seventh."""
    search = BeamSearch(SamplingParams(beams=2, max_new_tokens=9), range(5), 8)
    _, tokens = advance([search], torch.arange(8.0, 0.0, -1.0).expand(2, 8))
    assert tokens.tolist() == [5, 6]


def test_min_new_tokens_forbids_end_tokens() -> None:
    """Only AA can be made of A and an end that is forbidden before two tokens, whatever the beams."""
    search = BeamSearch(SamplingParams(beams=3, min_new_tokens=2, max_new_tokens=2), [END], 2, n_best=3)
    results = run(search, lambda rows: torch.zeros(len(rows), 2)).results()
    assert [(found.ids, found.finish_reason) for found in results] == [([A, A], "length")]


def test_all_tokens_forbidden_returns_no_hypothesis() -> None:
    search = BeamSearch(SamplingParams(beams=2, logit_bias={0: -math.inf, 1: -math.inf}), [], 2)
    assert run(search, lambda rows: torch.zeros(len(rows), 2)).results() == []


def test_results_before_the_end_include_running_beams() -> None:
    search = BeamSearch(SamplingParams(beams=2, length_penalty=0.0), [END], 3, n_best=2)
    advance([search], BY_HAND[[0, 0]])
    assert not search.done
    assert [(found.ids, found.finish_reason) for found in search.results()] == [([A], "length"), ([B], "length")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_logits_are_upcast(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    search = BeamSearch(SamplingParams(beams=2, max_new_tokens=1), [], 50)
    advance([search], logits)
    exact = logits.double().log_softmax(-1)[0].max()
    assert search.results()[0].score == pytest.approx(float(exact), abs=1e-5)  # float32 has 7 digits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_best": 3}, "n_best is 3"),
        ({"n_best": 0}, "n_best is 0"),
        ({"end_ids": [3]}, "an end id is 3"),
        ({"end_ids": [-1]}, "an end id is -1"),
        ({"prompt": [7]}, "a prompt id is 7"),
        ({"options": SamplingParams(beams=2, logit_bias={5: 1.0})}, "a biased id is 5"),
        ({"options": SamplingParams(beams=2, length_penalty=1000.0)}, "length_penalty is 1000.0"),
        ({"options": SamplingParams(beams=2, length_penalty=-1000.0)}, "length_penalty is -1000.0"),
    ],
)
def test_invalid_arguments(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"options": SamplingParams(beams=2), "end_ids": [END], "vocab_size": 3} | change
    with pytest.raises(InputError, match=message):
        BeamSearch(**given)


def test_invalid_shapes() -> None:
    two, three = (BeamSearch(SamplingParams(beams=beams), [END], 3) for beams in (2, 3))
    with pytest.raises(InputError, match=r"\[2, 3\] beams"):
        advance([two, three], torch.zeros(5, 3))
    with pytest.raises(InputError, match=r"logits are \[3, 3\]"):
        advance([two], torch.zeros(3, 3))
