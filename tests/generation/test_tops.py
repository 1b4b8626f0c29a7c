"""The lens and the most attended positions of each new token, by request, beside other requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from examples import first_of
from generation.test_recording import KINDS, MAX_LEN, build, ragged
from generation.test_request_internals import _graphs  # noqa: F401 - a fixture

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import PromptLookup
from glasshouse.generation.request import Completion
from glasshouse.generation.tops import Top
from glasshouse.models import Decoder, Seq2Seq


def drawn_settings(rng: random.Random, model: Decoder | Seq2Seq, number: int) -> dict[str, Any]:
    prefix = "decoder." if isinstance(model, Seq2Seq) else ""
    settings: dict[str, Any] = {"max_new_tokens": 3 + number, "temperature": number % 2, "seed": number}
    if number % 3:
        settings["lens"] = rng.choice([1, 4, 12])
    if number % 2 and model.spec.windows == (0,):
        settings["attended"] = {f"{prefix}pattern.0[head=1]": rng.randint(1, 20), f"{prefix}pattern.1": 2}
    return settings


def check(model: Decoder | Seq2Seq, prompt: list[int], settings: dict[str, Any], done: Completion) -> None:
    """Compare with gh.lens and gh.record on the whole text: what a token came from is at the position before it."""
    inputs = [torch.tensor([[*prompt, *done.ids]])]
    first = len(prompt) - 1
    if isinstance(model, Seq2Seq):
        inputs, first = [torch.tensor([prompt]), torch.tensor([[model.spec.start_id, *done.ids]])], 0
    here = slice(first, first + len(done.ids))
    if "lens" not in settings or not done.ids:
        assert done.lens is None
    else:
        assert done.lens is not None
        lens = gh.lens(model, *inputs, top_k=settings["lens"])
        compare(done.lens, lens.probabilities[:, 0, here].transpose(0, 1))
        assert torch.equal(done.lens.indices, lens.tokens[:, 0, here].transpose(0, 1))
    for name, count in settings.get("attended", {}).items():
        if not done.ids:
            continue
        with gh.record(model, name) as seen, torch.no_grad():
            model(*inputs)
        pattern = seen[name][0][..., here, :].float()
        pattern = pattern if pattern.dim() == 2 else pattern.transpose(0, 1)
        compare(done.attention[name], pattern.topk(min(count, pattern.shape[-1])).values)
        chosen = done.attention[name].indices.clamp(max=pattern.shape[-1] - 1)
        torch.testing.assert_close(pattern.gather(-1, chosen), done.attention[name].values, rtol=0, atol=1e-6)


def compare(top: Top, expected: torch.Tensor) -> None:
    count = expected.shape[-1]
    torch.testing.assert_close(top.values[..., :count], expected.float(), rtol=0, atol=1e-6)
    assert not top.values[..., count:].any()


@pytest.mark.few(4)
@pytest.mark.usefixtures("_graphs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "chunk"), first_of([(3, 5), (8, MAX_LEN)]))
def test_they_are_those_of_the_whole_text(kind: str, slots: int, chunk: int) -> None:
    model, prompts, rng = build(kind), ragged(1, 9), random.Random(kind)
    engine = gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=chunk)
    asked = [drawn_settings(rng, model, number) for number in range(len(prompts))]
    requests = [engine.submit(prompt, **settings) for prompt, settings in zip(prompts, asked, strict=True)]
    engine.run()
    for prompt, settings, request in zip(prompts, asked, requests, strict=True):
        check(model, prompt, settings, request.completions()[0])


def test_they_end_where_a_stop_string_ends_the_text() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=MAX_LEN, init="normal"))
    engine = gh.Engine(model, tok, slots=1, max_len=MAX_LEN)
    asked: dict[str, Any] = {"max_new_tokens": 12, "lens": 2, "attended": {"pattern.0": 2}}
    plain = engine.submit([5, 6, 7], **asked)
    engine.run()
    stop = next(character for character in plain.text[2:] if character != "�")
    stopped = engine.submit([5, 6, 7], stop=stop, **asked)
    engine.run()
    [done] = stopped.completions()
    assert 0 < len(done.ids) < len(plain.ids)
    assert done.lens is not None
    assert len(done.lens.values) == len(done.attention["pattern.0"].values) == len(done.ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lens": 21}, "lens is 21, but it must be a whole number up to 20."),
        ({"attended": {"pattern.0": 0}}, "attended is {'pattern.0': 0}, but it must be a dict of numbers of 1 to 20"),
        ({"attended": {"z.0": 3}}, "z.0 has no attended positions; name a pattern, such as pattern.0[head=1]."),
        ({"lens": 3, "beams": 2}, "beams is 2, but lens are not kept in a beam search; leave one out."),
    ],
)
def test_what_is_not_possible_is_refused(settings: dict[str, Any], message: str) -> None:
    engine = gh.Engine(build("learned"), slots=2, max_len=MAX_LEN)
    with pytest.raises(InputError) as refused:
        engine.submit([1, 2], **settings)
    assert message in str(refused.value)


def test_drafts_have_none() -> None:
    engine = gh.Engine(build("learned"), slots=1, max_len=MAX_LEN, speculator=PromptLookup())
    with pytest.raises(InputError, match="lens and speculator were both given; drafts take none; leave one out"):
        engine.submit([1], lens=1)
