"""Generation compared with transformers, for every supported family.

Ours comes from one call with continuous batching; theirs is generated prompt by prompt. Where the two differ,
transformers' logits decide whether that was a tie, which is listed, or a bug.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from examples import first_of
from hub.hf_models import CASES, Float64Softmax, make
from torch import Tensor, nn
from transformers.generation import utils as searching
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.marian import modeling_marian

import glasshouse as gh
from glasshouse.generation import Completion
from glasshouse.generation.beam.hypothesis import Node
from glasshouse.models import Decoder, Seq2Seq

pytestmark = pytest.mark.slow

Ids = tuple[int, ...]

LONGEST = 24  # of the prompts
NEW = 20
BEAMS = 4
END = -1  # any end token: completions leave it out


class SearchSettings(NamedTuple):
    """Settings of a beam search."""

    length_penalty: float
    early_stopping: bool


SEARCH_SETTINGS = [
    SearchSettings(1.0, False),
    SearchSettings(0.3, True),
    SearchSettings(0.3, False),
    SearchSettings(1.0, True),
]

TIE = 1e-5  # alternatives that are closer than this by transformers' numbers
# In float64 both add the same numbers below 100 in another order: thousands of roundings of 1e-14 each. In float32
# tests/hub checks logits to 1e-5 of the largest, here below 15; a log-softmax may double what they are off.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-4}
SUMMED = NEW ** (
    1 - min(search.length_penalty for search in SEARCH_SETTINGS)
)  # how much more a score may be off: about 8 times

ONE_OF_EACH = ["gpt2", "llama-llama3", "mistral-window", "qwen2-windows", "qwen3", "gpt_neox", "olmo2", "gemma2"]
ONE_OF_EACH += ["t5", "marian", "bart"]
GENERATING = [name for name in CASES if "bert" not in name and "bare" not in name]
PAIRS = [
    *(pytest.param((name, torch.float64, 20), id=name) for name in ONE_OF_EACH),
    *(pytest.param((name, torch.float64, 200), id=f"{name}-float64", marks=pytest.mark.long) for name in GENERATING),
    *(pytest.param((name, torch.float32, 200), id=f"{name}-float32", marks=pytest.mark.long) for name in ONE_OF_EACH),
]


class Float64Torch:
    """Replaces torch in a module of transformers that casts to float32, so that it stays in float64."""

    def __getattr__(self, name: str) -> object:
        doubles = {"float": torch.float64, "float32": torch.float64, "FloatTensor": torch.DoubleTensor}
        return doubles[name] if name in doubles else getattr(torch, name)


@pytest.fixture(autouse=True)
def sums_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers sum log-probabilities in float64, as we do for any dtype, and Gemma 2's softmax."""
    monkeypatch.setattr(searching, "torch", Float64Torch())
    monkeypatch.setattr(modeling_gemma2, "torch", Float64Softmax())


class Text(NamedTuple):
    """A completion of either implementation."""

    ids: Ids
    logprobs: list[float]  # of all but END
    score: float | None

    @classmethod
    def of(cls, one: Completion) -> Text:
        end = (END,) if one.finish_reason == "stop" else ()
        return cls((*one.ids, *end), one.logprobs, one.score)


class Difference(NamedTuple):
    """A different decision, and how far apart the alternatives are in transformers."""

    story: str
    gap: float


@dataclass(frozen=True, repr=False)
class Pair:
    """One model in both implementations, and prompts."""

    theirs: Any
    ours: Decoder | Seq2Seq
    dtype: torch.dtype
    prompts: list[list[int]]

    @property
    def ends(self) -> list[int]:
        return self.theirs.generation_config.eos_token_id

    def start(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of transformers' output come before the new ones."""
        return 1 if isinstance(self.ours, Seq2Seq) else len(prompt)

    @cached_property
    def greedy(self) -> list[Text]:
        """Greedy completions of transformers."""
        return [text for prompt in self.prompts for text in self.generate_hf(prompt)]

    def generate_hf(
        self, prompt: Sequence[int], search: SearchSettings | None = None, **settings: object
    ) -> list[Text]:
        """Return transformers' completions of one prompt, greedy or by beam search."""
        if search is not None:
            settings |= {"num_beams": BEAMS, "num_return_sequences": BEAMS}
            settings |= {"length_penalty": search.length_penalty, "early_stopping": search.early_stopping}
        ids = torch.tensor([prompt])
        out = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        rows = None if search is None else out.beam_indices
        logprobs = self.theirs.compute_transition_scores(
            out.sequences, out.scores, rows, normalize_logits=search is None
        ).tolist()
        scores = [None] if search is None else out.sequences_scores.tolist()
        new = out.sequences[:, self.start(prompt) :].tolist()
        return [self._trim(*one) for one in zip(new, logprobs, scores, strict=True)]

    def _trim(self, new: list[int], logprobs: list[float], score: float | None) -> Text:
        """Cut a sequence at its first end token, which padding follows."""
        length = next((index for index, token in enumerate(new) if token in self.ends), len(new))
        end = (END,) if length < len(new) else ()
        return Text((*new[:length], *end), logprobs[:length], score)

    @torch.no_grad()
    def logits_after(self, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
        """Return transformers' logits [V] after some new tokens, computed from scratch."""
        if isinstance(self.ours, Seq2Seq):
            target = torch.tensor([[self.ours.spec.start_id, *new]])
            return self.theirs(input_ids=torch.tensor([prompt]), decoder_input_ids=target).logits[0, -1]
        return self.theirs(input_ids=torch.tensor([[*prompt, *new]])).logits[0, -1]

    def search_ours(self, prompts: list[list[int]], search: SearchSettings) -> list[list[Completion]]:
        """Return our completions of each prompt, best first."""
        found = gh.generate(
            self.ours,
            None,
            prompts,
            max_new_tokens=NEW,
            beams=BEAMS,
            n=BEAMS,
            slots=3 * BEAMS,
            keep_tree=True,
            **search._asdict(),
        )
        return [found[at : at + BEAMS] for at in range(0, len(found), BEAMS)]

    def check_logprobs(self, ours: Text, theirs: Text) -> None:
        assert ours.logprobs == pytest.approx(theirs.logprobs, rel=0, abs=TOLERANCE[self.dtype])

    def check_score(self, ours: Text, theirs: Text) -> None:
        assert ours.score == pytest.approx(theirs.score, rel=0, abs=SUMMED * TOLERANCE[self.dtype])

    def check_tie(self, difference: Difference) -> str:
        """Fail on a difference, unless it is a tie: then return a line to list."""
        story, gap = difference
        assert gap < TIE, f"{story}; in transformers these are {gap:.2e} apart"
        return f"{type(self.theirs).__name__} in {self.dtype}, {gap:.1e} apart: {story}"


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, dtype, count = request.param
    theirs = make(name)
    widen_weights(theirs)
    config = theirs.config
    if config.model_type == "t5":
        config.decoder_start_token_id = 0  # as in all released models
    roles = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "eos_token_id")
    special = {role: token for role in roles if (token := getattr(config, role, None)) in range(config.vocab_size)}
    words = sorted(set(range(config.vocab_size)) - set(special.values()))
    end = special.pop("eos_token_id", None)
    # Ids and nothing else: BART and Marian would force an end token at the length limit, which we do not.
    theirs.generation_config = hf.GenerationConfig(**{"pad_token_id": 0} | special)
    likely = choose_end(theirs, words)
    theirs.generation_config.eos_token_id = [likely] if end is None else [end, likely]
    folder = tmp_path_factory.mktemp(name)
    theirs.save_pretrained(folder)
    ours, _ = gh.load(folder, dtype=dtype)
    assert isinstance(ours, Decoder | Seq2Seq)
    if dtype == torch.float64:
        keep_exact(theirs.double())
    words.remove(likely)
    return Pair(theirs, ours, dtype, draw_prompts(count, words))


@torch.no_grad()
def widen_weights(model: nn.Module) -> None:
    """Widen weights until the output depends on the input: the models of tests/hub repeat one token.

    Values and outputs are not widened: in BART and Marian they would outweigh the last token.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and weight.requires_grad and not re.search(r"\.(v_proj|out_proj)\.", name):
            weight *= 4


def keep_exact(model: nn.Module) -> None:
    """Make a float64 model compute in float64 throughout: transformers casts norms, sinusoids and factors to float32.

    Rotary angles are float32 in both, since weights were trained with that rounding.
    """
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if hasattr(norm, "variance_epsilon"):
                exact = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(module, name, exact)
            if isinstance(norm, modeling_gemma2.Gemma2RMSNorm):
                exact = nn.RMSNorm(norm.weight.shape, norm.eps, dtype=torch.float64)
                exact.weight = nn.Parameter(1.0 + norm.weight.detach())
                setattr(module, name, exact)
        if isinstance(module, modeling_gemma2.Gemma2TextScaledWordEmbedding):
            module.embed_scale = torch.tensor(module.embedding_dim, dtype=torch.float64).sqrt()
        if isinstance(module, modeling_marian.MarianSinusoidalPositionalEmbedding):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(modeling_marian, "torch", Float64Torch())
                module.weight.copy_(module.create_weight())


def choose_end(model: Any, words: Sequence[int]) -> int:  # noqa: ANN401 - transformers has no types
    """Return a token that occurs in about half of a model's completions."""
    prompts = torch.tensor([random.Random(seed).choices(words, k=6) for seed in range(40)])
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NEW)
    new = out[:, 1 if model.config.is_encoder_decoder else 6 :]
    return min(words, key=lambda word: abs((new == word).any(1).sum().item() - 20))


def draw_prompts(count: int, words: Sequence[int]) -> list[list[int]]:
    """Draw prompts of every length, each third with a common prefix."""
    rng = random.Random(count)
    common = rng.choices(words, k=18)
    prompts = [rng.choices(words, k=rng.randint(1, LONGEST)) for _ in range(count)]
    prompts[::3] = [common[: len(ids)] + ids[18:] for ids in prompts[::3]]
    return prompts


def first_token(pair: Pair, prompt: Sequence[int], ours: Ids, theirs: Ids) -> Difference:
    """Find the first token that differs, and how far apart its logits are."""
    index = next(index for index, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
    story = f"after {prompt} and {list(theirs[:index])} we generate {ours[index:]}, transformers {theirs[index:]}"
    if index in (len(ours), len(theirs)) or ours[index] in pair.ends:  # one is truncated, or did not end
        return Difference(story, math.inf)
    logits = pair.logits_after(prompt, theirs[:index])
    one, other = (logits[pair.ends if ids[index] == END else ids[index]].max() for ids in (ours, theirs))
    return Difference(story, abs(float(one - other)))


class CandidateRecorder(hf.LogitsProcessor):
    """Records the candidates of transformers' search: at each step, the total of every continuation of every beam."""

    def __init__(self, start: int) -> None:
        self.start = start  # index of the first new token
        self.steps: list[dict[Ids, float]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        beams = [tuple(row) for row in input_ids[:, self.start :].tolist()]  # at first all the same
        before = self.steps[-1] if self.steps else {(): 0.0}
        self.steps.append(
            {
                (*beam, token): before[beam] + logprob
                for beam, logprobs in zip(beams, scores.tolist(), strict=True)
                for token, logprob in enumerate(logprobs)
            }
        )
        return scores


def candidates(tree: Sequence[Node]) -> list[list[Ids]]:
    """Return the candidates of our search, step by step, most probable first."""
    texts: list[Ids] = []
    steps: list[list[Ids]] = []
    for node in tree:
        texts.append((*(() if node.parent is None else texts[node.parent]), node.token))
        if node.step > len(steps):
            steps.append([])
        steps[-1].append(texts[-1])
    return steps


def first_choice(pair: Pair, prompt: list[int], search: SearchSettings, ours: Completion, theirs: Text) -> Difference:
    """Find where two searches diverge: in the order of candidates, in stopping, or in the order of results."""
    story = f"for {prompt}, searching with {search},"
    recorder = CandidateRecorder(pair.start(prompt))
    pair.generate_hf(prompt, search, logits_processor=[recorder])
    assert ours.tree is not None
    steps = candidates(ours.tree)
    finished: list[float] = []
    running = math.nan
    for step, (totals, ranked) in enumerate(zip(recorder.steps, steps, strict=False), 1):
        right = sorted(totals, key=totals.__getitem__, reverse=True)
        for a, b in zip(ranked, right, strict=False):
            if a != b:
                return Difference(f"{story} we rank {a} before {b}", abs(totals.get(a, -math.inf) - totals[b]))
        length = step**search.length_penalty
        finished += [totals[text] / length for text in right[:BEAMS] if text[-1] in pair.ends]
        running = max(total for text, total in totals.items() if text[-1] not in pair.ends) / length
    if len(steps) != len(recorder.steps):
        worst = sorted(finished, reverse=True)[BEAMS - 1 : BEAMS]  # empty if too few finished
        gap = abs(running - worst[0]) if worst and not search.early_stopping else math.inf
        return Difference(f"{story} we take {len(steps)} steps, transformers {len(recorder.steps)}", gap)
    assert ours.score is not None
    assert theirs.score is not None
    story += f" we place {ours.ids} at {ours.score} where transformers has {theirs.ids} at {theirs.score}"
    return Difference(story, abs(ours.score - theirs.score))


@pytest.mark.few(1)
def test_greedy(pair: Pair, record_property: Callable[[str, object], None]) -> None:
    ours = gh.generate(pair.ours, None, pair.prompts, max_new_tokens=NEW, slots=8)
    check_greedy(pair, ours, record_property)


@pytest.mark.few(1)
def test_greedy_with_chunked_prefill(pair: Pair, record_property: Callable[[str, object], None]) -> None:
    """Sliding-window layers use ring buffers here."""
    engine = gh.Engine(pair.ours, slots=8, max_len=LONGEST + NEW, source_len=LONGEST, prefill_chunk=5)
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in pair.prompts]
    engine.run()
    check_greedy(pair, [one for request in requests for one in request.completions()], record_property)


def check_greedy(pair: Pair, ours: list[Completion], record_property: Callable[[str, object], None]) -> None:
    ties = []
    for prompt, one, theirs in zip(pair.prompts, map(Text.of, ours), pair.greedy, strict=True):
        if one.ids == theirs.ids:
            pair.check_logprobs(one, theirs)
        else:
            ties.append(pair.check_tie(first_token(pair, prompt, one.ids, theirs.ids)))
    assert 0 < sum(END in theirs.ids for theirs in pair.greedy) < len(ours)
    report(pair, len(ours), ties, record_property)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "turn", first_of([*range(len(SEARCH_SETTINGS))], 2), ids=[f"penalty {a}, early {b}" for a, b in SEARCH_SETTINGS]
)
def test_beams(pair: Pair, turn: int, record_property: Callable[[str, object], None]) -> None:
    search, prompts = SEARCH_SETTINGS[turn], pair.prompts[turn :: len(SEARCH_SETTINGS)]
    ties = []
    for prompt, found in zip(prompts, pair.search_ours(prompts, search), strict=True):
        for one, other in zip(found, pair.generate_hf(prompt, search), strict=True):
            text = Text.of(one)
            if text.ids != other.ids:
                ties.append(pair.check_tie(first_choice(pair, prompt, search, one, other)))
                break
            pair.check_logprobs(text, other)
            pair.check_score(text, other)
    report(pair, BEAMS * len(prompts), ties, record_property)


def report(pair: Pair, texts: int, ties: list[str], record_property: Callable[[str, object], None]) -> None:
    """Record the properties for the summary. In float64 there are no ties."""
    record_property("texts", texts)
    record_property("ties", ties)
    assert not ties or pair.dtype != torch.float64, ties
