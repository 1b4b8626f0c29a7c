"""What requests of one batch record and score, each for itself, beside others that ask for nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from examples import first_of
from generation.test_recording import KINDS, MAX_LEN, assert_near, build, ragged, record_plain

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import PromptLookup
from glasshouse.generation.engine import cpu_graphs
from glasshouse.generation.request import Completion, Request
from glasshouse.inspection import sites
from glasshouse.inspection.linear_probe import HeldOut, LinearProbe
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.models import Decoder, Model, Seq2Seq

HELD_OUT = HeldOut(accuracy=1.0, auc=1.0, positive=1, negative=1)


def readable(model: Model) -> list[str]:
    """Return the sites that any engine reads: with windows, those of the keys that a ring buffer keeps are not."""
    found = sites(model)
    if model.spec.windows == (0,):
        return list(found)
    return [name for name, site in found.items() if not site.is_cached and "key" not in site.axes]


def drawn_sites(rng: random.Random, model: Model) -> tuple[str, ...]:
    """Draw some sites: of all positions, of the prompt, or of the new tokens."""
    found = sites(model)
    chosen = rng.sample(readable(model), rng.randint(1, 4))
    spans = [rng.choice(["", "[position=prompt]", "[position=new]"]) for _ in chosen]
    return tuple(
        name + span if "position" in found[name].axes and not name.startswith("encoder.") and ".cross" not in name
        # Of cross-attention's keys and values, and of an encoder, positions are those of the source.
        and not name.startswith(("cross_k", "cross_v", "decoder.cross_k", "decoder.cross_v")) else name
        for name, span in zip(chosen, spans, strict=True)
    )  # fmt: skip


def make_probes(model: Model, names: str = "abc") -> dict[str, LinearProbe]:
    """Return probes with drawn directions, two of one site and one of another."""
    stack = "decoder." if isinstance(model, Seq2Seq) else ""
    last = model.spec.n_layers - 1
    layers = {"a": 0, "b": last, "c": last}
    weights = torch.Generator().manual_seed(5)
    return {
        name: LinearProbe(
            torch.randn(model.spec.d_model, generator=weights),
            0.25 * number,
            f"{stack}resid_post.{layers[name]}",
            model_fingerprint(model),
            HELD_OUT,
        )
        for number, name in enumerate(names)
    }


def drawn_settings(rng: random.Random, model: Model, number: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": 3 + number, "temperature": number % 2, "seed": number}
    if number % 3 != 2:
        settings["record"] = drawn_sites(rng, model)
    if number % 2:
        settings["probes"] = tuple(rng.sample("abc", rng.randint(1, 3)))
    return settings


def check(model: Decoder | Seq2Seq, prompt: list[int], settings: dict[str, Any], done: Completion) -> None:
    """Compare with one plain forward pass over the prompt and the output."""
    first = 1 if isinstance(model, Seq2Seq) else len(prompt)
    fed = first + len(done.ids) - (0 if done.finish_reason == "stop" else 1)
    probes = make_probes(model)
    whole = {name: name.partition("[")[0] for name in settings.get("record", ())}
    names = sorted({*whole.values(), *(probe.site for probe in probes.values())})
    plain = record_plain(model, prompt, done.ids, fed, names)
    if not whole:
        assert done.recording is None
    for name, site in whole.items():
        assert done.recording is not None
        expected = plain[site][0]
        if name != site:
            axis = plain.axes(site).index("position") - 1
            start, end = (first, fed) if "new" in name else (0, first)
            expected = expected.narrow(axis, start, end - start)
        if name != site and expected.shape[axis] == 0:
            assert name not in done.recording  # no new token was read
            continue
        assert_near(done.recording[name], expected, name)
    assert (done.scores or {}).keys() == set(settings.get("probes", ()))
    for name, scores in (done.scores or {}).items():
        own = probes[name]
        expected = (plain[own.site][0, first:].float() @ own.direction + own.bias).double()
        assert len(scores) == fed - first
        assert_near(torch.tensor(scores, dtype=torch.float64), expected.double(), name, 1e-5)


@pytest.fixture(params=["graphs", "eager"])
def _graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record CPU graphs after the first run of a step, or never."""
    monkeypatch.setattr(cpu_graphs, "HOT", 0 if request.param == "graphs" else 10**9)
    monkeypatch.setattr(cpu_graphs, "REPAID", 0)


@pytest.mark.few(4)
@pytest.mark.usefixtures("_graphs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "chunk"), first_of([(3, 5), (8, MAX_LEN)]))
def test_each_request_of_a_batch_gets_what_it_asked_for(kind: str, slots: int, chunk: int) -> None:
    model, prompts, rng = build(kind), ragged(1, 9), random.Random(kind)
    engine = gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=chunk, probes=make_probes(model))
    plain = gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=chunk)
    asked = [drawn_settings(rng, model, number) for number in range(len(prompts))]
    requests = [engine.submit(prompt, **settings) for prompt, settings in zip(prompts, asked, strict=True)]
    others = [
        plain.submit(prompt, **{name: one for name, one in settings.items() if name not in ("record", "probes")})
        for prompt, settings in zip(prompts, asked, strict=True)
    ]
    engine.run()
    plain.run()
    for prompt, settings, request, other in zip(prompts, asked, requests, others, strict=True):
        [done], [same] = request.completions(), other.completions()
        assert (done.ids, done.finish_reason) == (same.ids, same.finish_reason)
        check(model, prompt, settings, done)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["learned", "grouped", "encoder-decoder"])
def test_batch_invariant_engines_read_the_same_bits_alone_and_among_others(kind: str) -> None:
    model, prompts, rng = build(kind, torch.float32), ragged(2, 5), random.Random(0)
    asked = [drawn_settings(rng, model, number) for number in range(len(prompts))]

    def run(numbers: list[int], slots: int) -> list[Request]:
        engine = gh.Engine(
            model, slots=slots, max_len=MAX_LEN, batch_invariant=True, probes=make_probes(model), weights="own"
        )
        requests = [engine.submit(prompts[number], **asked[number]) for number in numbers]
        engine.run()
        return requests

    together = run(list(range(len(prompts))), 3)
    for number, request in enumerate(together):
        [done], [alone] = request.completions(), run([number], 3)[0].completions()
        assert done.ids == alone.ids
        assert done.scores == alone.scores
        assert (done.recording or {}).keys() == (alone.recording or {}).keys()
        for name, value in (done.recording or {}).items():
            assert torch.equal(value, (alone.recording or {})[name]), name


def test_a_cancelled_request_keeps_what_was_read_and_others_are_as_before() -> None:
    model, prompts = build("learned"), ragged(3, 3)
    probes = make_probes(model)
    engine = gh.Engine(model, slots=3, max_len=MAX_LEN, probes=probes)
    asked = {"max_new_tokens": 9, "min_new_tokens": 9, "record": ("resid_post.1[position=new]",), "probes": ("a",)}
    requests = [engine.submit(prompt, **asked) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.cancel(requests[1])
    engine.run()
    [cancelled] = requests[1].completions()
    assert cancelled.finish_reason == "cancelled"
    check(model, prompts[1], asked, cancelled)
    for number in (0, 2):
        check(model, prompts[number], asked, requests[number].completions()[0])


def test_the_prompt_of_a_recorded_request_is_computed_though_its_prefix_is_cached() -> None:
    model, prompt = build("learned"), list(range(8, 30))
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN)
    engine.submit(prompt, max_new_tokens=1)
    engine.run()
    request = engine.submit(prompt, max_new_tokens=2, record="resid_post.0")
    new = engine.submit(prompt, max_new_tokens=2, record="resid_post.0[position=new]")
    engine.run()
    check(model, prompt, {"record": ("resid_post.0",)}, request.completions()[0])
    check(model, prompt, {"record": ("resid_post.0[position=new]",)}, new.completions()[0])
    assert engine.slots.n_reused > 0  # by the request that records new tokens alone


def test_scores_end_where_a_stop_string_ends_the_text() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=MAX_LEN), dtype=torch.float64)
    engine = gh.Engine(model, tok, slots=1, max_len=MAX_LEN, probes=make_probes(model))
    [plain] = _run(engine, [5, 6, 7], max_new_tokens=12, probes="a")
    stop = next(character for character in plain.text if character != "�")
    [done] = _run(engine, [5, 6, 7], max_new_tokens=12, probes="a", stop=stop)
    assert done.finish_reason == "stop"
    assert done.scores is not None
    assert plain.scores is not None
    assert done.scores["a"] == pytest.approx(plain.scores["a"][: len(done.ids)])


def _run(engine: gh.Engine, prompt: list[int], **settings: Any) -> list[Completion]:  # noqa: ANN401
    request = engine.submit(prompt, **settings)
    engine.run()
    return request.completions()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record": "resid_post.7"}, "the model has no site 'resid_post.7'; its layers are 0 to 1."),
        ({"record": "resid_post.0[batch=0]"}, "selects by batch, but requests are recorded one by one"),
        ({"probes": "d"}, "there is no probe 'd'; it has a, b, c."),
        ({"probes": "a", "beams": 2}, "beams is 2, but probes are not kept in a beam search; leave one out."),
        ({"record": "final", "beams": 2}, "beams is 2, but record are not kept in a beam search; leave one out."),
        ({"record": 3}, "record is 3, but it must be names."),
    ],
)
def test_what_cannot_be_read_is_refused(settings: dict[str, Any], message: str) -> None:
    model = build("learned")
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN, probes=make_probes(model))
    with pytest.raises(InputError) as refused:
        engine.submit([1, 2], **settings)
    assert message in str(refused.value)


def test_drafts_and_windows_are_refused() -> None:
    drafting = gh.Engine(build("learned"), slots=1, max_len=MAX_LEN, speculator=PromptLookup())
    with pytest.raises(InputError, match="record and speculator were both given"):
        drafting.submit([1], record="final")
    windows = gh.Engine(build("windows"), slots=1, max_len=MAX_LEN, prefill_chunk=5)
    with pytest.raises(InputError, match=r"k\.0 is of keys that sliding windows drop .* gh\.Engine\(record=\.\.\.\)"):
        windows.submit([1], record="k.0")


def test_probes_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="the probe 'a' was made for another model"):
        gh.Engine(build("grouped"), probes=make_probes(build("learned")))
