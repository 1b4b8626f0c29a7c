"""Draft heads: the output of an engine is what it is without them, and drafts are what the heads predict."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse import InputError
from glasshouse.generation import DraftHeads, DraftModel, PromptLookup
from glasshouse.generation.speculation import SpeculationStats, Speculator
from glasshouse.models.surgery import with_draft_heads

SPEC: dict[str, Any] = {"max_len": 48, "n_layers": 2, "vocab_size": 40}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 2, 1], [39, 0], [7] * 12]


def drafting(n_draft_heads: int = 3, **fields: Any) -> gh.models.Decoder:  # noqa: ANN401
    """A model whose draft heads are right now and then."""
    torch.manual_seed(5)
    model = gh.build(gh.preset("tiny-decoder", **{**SPEC, **fields})).eval()
    found = with_draft_heads(model, n_draft_heads)
    assert isinstance(found.head, gh.models.heads.LMHead)
    assert found.head.drafts is not None
    for draft in found.head.drafts:
        nn.init.normal_(draft.project.weight, std=0.02)
    return found


def complete(model: gh.models.Decoder, speculator: Speculator | None, slots: int, **params: Any) -> Any:  # noqa: ANN401
    engine = gh.Engine(model, slots=slots, max_len=48, speculator=speculator, weights=params.pop("weights", "copy"))
    requests = [
        engine.submit(prompt, max_new_tokens=length, seed=seed, **params)
        for seed, (prompt, length) in enumerate(zip(PROMPTS, (20, 7, 30, 1, 25, 12), strict=True))
    ]
    engine.run()
    return [request.ids for request in requests], [request.logprobs for request in requests], engine.speculation


@pytest.mark.few(3)
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3, "min_new_tokens": 4}],
)
def test_output_is_unchanged(slots: int, params: dict[str, Any]) -> None:
    """Requests wait, start, end and move to other slots; tokens are those without drafts, also when sampled."""
    model = drafting()
    expected, logprobs, plain = complete(model, None, slots, **params)
    ids, found, stats = complete(model, DraftHeads(model), slots, **params)
    assert ids == expected
    for one, other in zip(found, logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)
    assert plain.tokens_per_pass == 1
    assert stats.n_tokens == sum(map(len, ids))
    assert stats.n_drafts > 0
    assert stats.n_passes < stats.n_tokens  # some drafts are accepted, so that this test is about something


def test_drafts_are_what_the_heads_predict_and_are_read_where_the_last_token_was_sampled() -> None:
    """Of every pass, by uncached forward passes: the drafts proposed, and how many of them are kept."""
    model = drafting(vocab_size=6)
    torch.manual_seed(3)
    for weight in model.parameters():
        if weight.dim() == 2:  # a text of many tokens, of which drafts guess some
            nn.init.normal_(weight, std=0.5)
    assert isinstance(model.head, gh.models.heads.LMHead)
    assert model.head.drafts is not None
    proposed: list[list[int]] = []

    class Recorded(DraftHeads):
        def propose(self, seqs: Any, sampler: Any) -> Any:  # noqa: ANN401
            drafts = super().propose(seqs, sampler)
            assert drafts is not None
            proposed.append(drafts.tokens[0, : int(drafts.counts[0])].tolist())
            return drafts

    prompt = [1, 2, 3]
    engine = gh.Engine(model, slots=1, speculator=Recorded(model))
    request = engine.submit(prompt, max_new_tokens=30)
    engine.run()
    text, written = [*prompt, *request.ids], len(prompt) + 1  # the first pass has no drafts, and one token
    assert proposed[0] == []
    for drafts in proposed[1:]:
        with torch.no_grad():
            layout = gh.layers.attend.layout.make_layout(torch.tensor([text[: written - 1]]))
            x = model.stack(model.token_embedding(torch.tensor([text[: written - 1]])), layout)[0, -1]
            table = model.token_embedding.table.weight
            logits = [model.head.unprojected(draft(x), table).logits() for draft in model.head.drafts]
        assert drafts == [int(one.argmax()) for one in logits][: len(drafts)]
        kept = 0
        while kept < len(drafts) and drafts[kept] == text[written + kept]:
            kept += 1
        written += kept + 1
        if written >= len(text):
            break
    assert written == len(text)
    assert len(set(text)) == 6
    assert engine.speculation.n_passes == len(proposed) < len(request.ids)


def test_all_drafts_are_accepted_where_the_model_repeats_itself() -> None:
    """A model that always writes the same token, whose heads do too: four tokens per pass after the first."""
    model = drafting()
    nn.init.zeros_(model.get_parameter("head.weight"))
    engine = gh.Engine(model, slots=1, speculator=DraftHeads(model))
    request = engine.submit([5], max_new_tokens=21)
    engine.run()
    assert request.ids == [0] * 21  # the first of equal logits
    assert engine.speculation == SpeculationStats(n_passes=6, n_tokens=21, n_drafts=15)
    assert engine.speculation.acceptance_rate == 1
    assert engine.speculation.tokens_per_pass == 3.5


def test_quantized_engines_draft_too() -> None:
    model = drafting(d_model=64)
    expected, _, _ = complete(model, None, 1, weights="int8")
    ids, _, stats = complete(model, DraftHeads(model), 1, weights="int8")
    assert ids == expected
    assert stats.n_drafts > 0


def test_beam_search_beside_drafts() -> None:
    model = drafting()
    engine = gh.Engine(model, slots=4, speculator=DraftHeads(model))
    searched = engine.submit([1, 2, 3], max_new_tokens=10, beams=3)
    drafted = engine.submit([4, 5], max_new_tokens=10)
    engine.run()
    alone = gh.Engine(model, slots=4)
    expected = [alone.submit([1, 2, 3], max_new_tokens=10, beams=3), alone.submit([4, 5], max_new_tokens=10)]
    alone.run()
    assert searched.completions()[0].ids == expected[0].completions()[0].ids
    assert drafted.ids == expected[1].ids


def test_the_model_of_the_caller_gets_no_hook() -> None:
    model = drafting()
    gh.Engine(model, slots=1, speculator=DraftHeads(model))
    assert not model.head._forward_pre_hooks


def test_other_speculators_are_counted_too() -> None:
    model = drafting()
    for speculator in (PromptLookup(n_draft_tokens=4), DraftModel(model)):
        engine = gh.Engine(model, slots=1, speculator=speculator)
        engine.submit([5, 5, 5], max_new_tokens=20, logit_bias={5: 1000.0})
        engine.run()
        assert engine.speculation.acceptance_rate == 1


def test_mistakes_are_one_sentence() -> None:
    plain = gh.build(gh.preset("tiny-decoder", **SPEC))
    for model in (plain, gh.build(gh.preset("tiny-seq2seq")), gh.build(gh.preset("tiny-encoder"))):
        with pytest.raises(
            InputError, match=re.escape("the model has no draft heads; train them with train.objective")
        ):
            DraftHeads(model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the draft heads belong to another model; make them from the model of"):
        gh.Engine(plain, slots=1, speculator=DraftHeads(drafting()))
    with pytest.raises(InputError, match="top_logprobs and speculator were both given"):
        gh.Engine(drafting(), slots=1, speculator=DraftHeads(drafting())).submit([1], top_logprobs=2)
