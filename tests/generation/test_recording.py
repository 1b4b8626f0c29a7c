"""Recordings during generation equal those of one plain forward pass over the whole sequence.

In float64 rounding is about 1e-16 of the largest entry and a few dozen operations deep; 1e-9 leaves margin for it,
and in float32, where it is 6e-8, 1e-5 does.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import first_of, up_to
from generation.reference import reference_generate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_strategy import SHAPES, VOCABULARY, specs
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.generation import PromptLookup, SamplingParams
from glasshouse.generation.engine import recorded_steps
from glasshouse.generation.engine.inference_model import Weights, prepare_for_inference
from glasshouse.inspection import Recording, sites
from glasshouse.layers.attend import decode as decode_attention
from glasshouse.layers.linear import prepacked
from glasshouse.layers.lora import LoRA, attach
from glasshouse.layers.module_swap import has_hooks
from glasshouse.models import Decoder, Seq2Seq

MAX_LEN = 40
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "learned": {"position": {"kind": "learned"}},
    "grouped": {"position": {"kind": "rotary"}, "n_kv_heads": 2, "feedforward": {"kind": "swiglu"}},
    "windows": {"position": {"kind": "rotary"}, "windows": (4, 0), "n_kv_heads": 1},
    "alibi": {"position": {"kind": "alibi"}, "windows": (6,), "qk_norm": True},
    "relative": {"position": {"kind": "relative"}, "norm_placement": "post"},
    "soft-cap": {"attention_softcap": 4.0, "norm_placement": "sandwich", "position": {"kind": "none"}},
    **SHAPES,
    "encoder-decoder": {"start_id": 1},
    "t5": {"start_id": 0, "position": {"kind": "relative"}, "norm": {"kind": "rms"}, "n_kv_heads": 2},
}


def build(kind: str, dtype: torch.dtype = torch.float64) -> Decoder | Seq2Seq:
    torch.manual_seed(sum(map(ord, kind)))
    preset = "tiny-seq2seq" if "start_id" in KINDS[kind] else "tiny-decoder"
    wide = {"kind": "normal", "std": 0.3}  # initial weights for which logits differ clearly
    s = gh.preset(preset, vocab_size=40, max_len=MAX_LEN, end_ids=(7,), init=wide, **KINDS[kind])
    model = gh.build(s, dtype=dtype).eval()
    assert isinstance(model, Decoder | Seq2Seq)
    return model


def ragged(seed: int, count: int, most: int = 21) -> list[list[int]]:
    """Return prompts of various lengths with a common prefix, which an engine would cache."""
    rng = random.Random(seed)
    beginning = [rng.randrange(40) for _ in range(most)]
    return [[*beginning[: rng.randint(0, most - 1)], rng.randrange(40)] for _ in range(count)]


def record_plain(
    model: nn.Module, prompt: Sequence[int], ids: Sequence[int], fed: int, names: Sequence[str]
) -> Recording:
    """Record one forward pass over the first `fed` tokens of prompt and output; a source is given in full."""
    with torch.no_grad(), gh.record(model, *names) as seen:
        if isinstance(model, Seq2Seq):
            model(torch.tensor([prompt]), torch.tensor([[model.spec.start_id, *ids][:fed]]))
        else:
            model(torch.tensor([[*prompt, *ids][:fed]]))
    return seen


def check(model: Decoder | Seq2Seq, prompt: Sequence[int], done: gh.Completion, names: Sequence[str]) -> None:
    """Compare a recording with that of a plain forward pass, which has a batch axis."""
    assert done.recording is not None
    first = 1 if isinstance(model, Seq2Seq) else len(prompt)
    fed = first + len(done.ids) - (0 if done.finish_reason == "stop" else 1)  # all input tokens
    assert_equal_recordings(done.recording, record_plain(model, prompt, done.ids, fed, names))


def assert_equal_recordings(seen: Recording, expected: Recording, tolerance: float = 0.0) -> None:
    assert len(seen) > 0
    assert set(seen) == set(expected)
    for name in seen:
        assert ("batch", *seen.axes(name)) == expected.axes(name)
        assert_near(seen[name], expected[name][0], name, tolerance)


def assert_near(value: Tensor, expected: Tensor, name: str = "", tolerance: float = 0.0) -> None:
    assert value.dtype == expected.dtype
    largest = float(torch.where(expected.isfinite(), expected, 0).abs().max())
    atol = (tolerance or TOLERANCE[expected.dtype]) * max(1.0, largest)
    torch.testing.assert_close(value, expected, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "chunk"), first_of([(3, 5), (1, MAX_LEN)]))
def test_every_site_equals_a_plain_forward_pass(kind: str, slots: int, chunk: int) -> None:
    """Sequences move between slots; most prompts are longer than a chunk of 5 and than all windows."""
    model, prompts = build(kind), ragged(1, 7)
    names = list(sites(model))
    engines = [
        gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=chunk, record=record)
        for record in ((), tuple(names))
    ]
    without, requests = (
        [engine.submit(prompt, max_new_tokens=3 + i, temperature=i % 2, seed=i) for i, prompt in enumerate(prompts)]
        for engine in engines
    )
    for engine in engines:
        engine.run()
    for prompt, request, same in zip(prompts, requests, without, strict=True):
        [done], [plain] = request.completions(), same.completions()
        assert plain.recording is None
        assert (done.ids, done.finish_reason) == (plain.ids, plain.finish_reason)
        assert done.logprobs == pytest.approx(plain.logprobs, abs=1e-9)
        check(model, prompt, done, names)


@pytest.mark.slow
def test_every_site_of_any_spec() -> None:
    @settings(
        max_examples=up_to(40),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs().filter(lambda s: not isinstance(s, spec.EncoderSpec)), st.data())
    def check_spec(s: spec.Spec, data: st.DataObject) -> None:
        torch.manual_seed(0)
        model = gh.build(replace(s, head=spec.NextToken(), start_id=1), dtype=torch.float64).eval()
        assert isinstance(model, Decoder | Seq2Seq)
        prompt = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
        prompts = data.draw(st.lists(prompt, min_size=1, max_size=4))
        slots, chunk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
        names = list(sites(model))
        engine = gh.Engine(model, slots=slots, max_len=16, source_len=9, prefill_chunk=chunk, record=names)
        requests = [engine.submit(prompt, max_new_tokens=4, temperature=1.0) for prompt in prompts]
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            check(model, prompt, request.completions()[0], names)

    check_spec()


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("slots", first_of([4, 1]))
@pytest.mark.parametrize("weights", ["own", "copy", "int8"])
@pytest.mark.parametrize("kind", ["grouped", "encoder-decoder"])
def test_every_weight_format(kind: str, weights: Weights, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which a CPU prepacks; int8 is compared with a model of int8 weights.

    An activation can round differently, by 1 / 8128 of the largest of its row.
    """
    monkeypatch.setattr(prepacked, "MIN_WORK", 0)
    model, prompts = build(kind, torch.float32), ragged(2, 4)
    names = list(sites(model))
    done = gh.generate(model, None, prompts, max_new_tokens=6, slots=slots, weights=weights, record=names)
    same = prepare_for_inference(model, weights, slots) if weights == "int8" else model
    for prompt, one in zip(prompts, done, strict=True):
        assert one.recording is not None
        fed = (1 if isinstance(model, Seq2Seq) else len(prompt)) + len(one.ids) - (one.finish_reason == "length")
        assert_equal_recordings(
            one.recording,
            record_plain(same, prompt, one.ids, fed, names),
            tolerance=1e-3 if weights == "int8" else 1e-5,
        )


def test_lora_layers() -> None:
    model, prompts = build("grouped"), ragged(3, 3)
    attach(model, LoRA(targets=("*",)))
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.2)
    model.eval()
    names = list(sites(model))
    for prompt, one in zip(prompts, gh.generate(model, None, prompts, max_new_tokens=5, record=names), strict=True):
        check(model, prompt, one, names)


def test_each_sample_has_its_own_recording() -> None:
    model, prompts, names = build("windows"), ragged(4, 2), ["resid_post.*", "pattern.0"]
    done = gh.generate(model, None, prompts, max_new_tokens=6, temperature=1.5, n=3, slots=2, record=names)
    for i, one in enumerate(done):
        check(model, prompts[i // 3], one, names)
    assert len({tuple(one.ids) for one in done}) == 6


def test_selections_of_sites() -> None:
    """A selection equals that part of the whole; a key that comes late, or never, has no attention before."""
    model, prompts = build("grouped"), [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]
    selections = [
        "pattern.*[head=1]",
        "pattern.0[head=1:3, key=5]",
        "scores.1[key=5]",
        "pattern.1[key=2:6]",
        "pattern.0[key=30]",
        "scores.0[head=-1, key=:3]",
        "k.1[head=1, width=2:5]",
        "q.0[width=-1]",
        "resid_post.1[width=3]",
        "hidden.0[neuron=-4:]",
        "z.*[head=2]",
    ]
    wholes = ["pattern.*", "scores.*", "k.1", "q.0", "resid_post.1", "hidden.0", "z.*"]
    one, two = gh.generate(model, None, prompts, max_new_tokens=6, stop_token_ids=(), slots=2, record=selections)
    assert one.recording is not None
    for prompt, done in zip(prompts, (one, two), strict=True):
        fed = len(prompt) + len(done.ids) - (done.finish_reason == "length")
        whole = {name: value[0] for name, value in record_plain(model, prompt, done.ids, fed, wholes).items()}
        none = torch.zeros(4, fed, dtype=torch.float64)
        expected = {
            "pattern.0[head=1]": whole["pattern.0"][1],
            "pattern.1[head=1]": whole["pattern.1"][1],
            "pattern.0[head=1:3, key=5]": whole["pattern.0"][1:3, :, 5] if fed > 5 else none[1:3],
            "scores.1[key=5]": whole["scores.1"][:, :, 5] if fed > 5 else none - torch.inf,
            "pattern.1[key=2:6]": whole["pattern.1"][:, :, 2:6],
            "pattern.0[key=30]": none,
            "scores.0[head=-1, key=:3]": whole["scores.0"][-1, :, :3],
            "k.1[head=1, width=2:5]": whole["k.1"][1, :, 2:5],
            "q.0[width=-1]": whole["q.0"][..., -1],
            "resid_post.1[width=3]": whole["resid_post.1"][:, 3],
            "hidden.0[neuron=-4:]": whole["hidden.0"][:, -4:],
            "z.0[head=2]": whole["z.0"][2],
            "z.1[head=2]": whole["z.1"][2],
        }
        assert done.recording is not None
        assert set(done.recording) == set(expected)
        for name, value in expected.items():
            assert_near(done.recording[name], value, name)
    assert one.recording.axes("pattern.0[key=30]") == ("head", "query")
    assert one.recording.axes("z.*") == ("layer", "position", "width")
    assert one.recording["z.*"].shape == (2, *one.recording["z.0"].shape)


def test_keys_of_a_source_exclude_padding() -> None:
    """A source is padded to the longest in the batch; the padding is not recorded."""
    model, prompts = build("t5"), [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
    parts, whole = ["decoder.cross_pattern.0[head=1, key=3]", "decoder.cross_scores.1[key=1:4]"], "decoder.cross_*.*"
    for prompt, done in zip(
        prompts, gh.generate(model, None, prompts, max_new_tokens=5, record=[*parts, whole]), strict=True
    ):
        assert done.recording is not None
        fed = 1 + len(done.ids) - (done.finish_reason == "length")
        expected = record_plain(model, prompt, done.ids, fed, [whole])
        assert done.recording["decoder.cross_pattern.0[head=1,key=3]"].shape == (fed,)
        if len(prompt) > 3:
            assert_near(done.recording[parts[0]], expected["decoder.cross_pattern.0"][0, 1, :, 3])
        else:
            assert not done.recording[parts[0]].any()
        assert_near(done.recording[parts[1]], expected["decoder.cross_scores.1"][0, :, :, 1:4])
        assert done.recording["decoder.cross_k.0"].shape == (2, len(prompt), 16)


def test_single_and_duplicate_site_names() -> None:
    model = build("learned")
    [one] = gh.generate(model, None, [[1, 2, 3]], max_new_tokens=3, record="resid_post.1")
    [two] = gh.generate(model, None, [[1, 2, 3]], max_new_tokens=3, record=["resid_post.*", "resid_post.1"])
    assert one.recording is not None
    assert two.recording is not None
    assert list(two.recording) == ["resid_post.0", "resid_post.1"]
    assert one == two  # recordings are not compared
    assert_near(one.recording["resid_post.1"], two.recording["resid_post.1"])


@pytest.mark.parametrize("limit", ["MOST_STEPS", "MOST_BYTES", "none"])
@pytest.mark.parametrize("kind", ["learned", "grouped"])
def test_steps_that_are_held_and_handed_over_together(kind: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites without keys, so steps are held: until there are several, until others decode, or until a result."""
    if limit != "none":
        monkeypatch.setattr(recorded_steps, limit, {"MOST_STEPS": 4, "MOST_BYTES": 20_000}[limit])
    model, prompts = build(kind), ragged(4, 12)
    names = [name for name, site in sites(model).items() if "position" in site.axes]
    engine = gh.Engine(model, slots=3, max_len=MAX_LEN, prefill_chunk=MAX_LEN)
    spans = ["", "[position=new]", "[position=prompt]"]
    asked = [[f"{name}{spans[i % 3]}" for name in names] if i % 4 in (0, 3) else [] for i in range(len(prompts))]
    requests = [
        engine.submit(prompt, max_new_tokens=3 + 5 * i % 13, record=record)
        for i, (prompt, record) in enumerate(zip(prompts, asked, strict=True))
    ]
    engine.run()
    for i, (prompt, record, request) in enumerate(zip(prompts, asked, requests, strict=True)):
        [done] = request.completions()
        if not record:
            assert done.recording is None
            continue
        assert done.recording is not None
        length, count = len(prompt), len(done.ids) - (done.finish_reason != "stop")
        plain = record_plain(model, prompt, done.ids, length + count, names)
        for name in names:
            start, size = [(0, length + count), (length, count), (0, length)][i % 3]
            whole = plain[name][0].narrow(plain.axes(name).index("position") - 1, start, size)
            assert_near(done.recording[f"{name}{spans[i % 3]}"], whole, name)


def test_an_error_of_the_thread_that_hands_over_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the recording")

    monkeypatch.setattr(recorded_steps, "_hand_over", fail)
    engine = gh.Engine(build("learned"), slots=1, max_len=MAX_LEN)
    short = engine.submit([1, 2], max_new_tokens=3, record="z.0")
    engine.run()
    with pytest.raises(MemoryError, match="no room"):
        short.completions()
    long = engine.submit([1, 2], max_new_tokens=30, record="z.0", logit_bias={7: -100.0})

    def run() -> None:
        while engine.step():
            time.sleep(0.01)

    with pytest.raises(MemoryError, match="no room"):
        run()
    assert long.finish_reason == "error"


def test_tokens_after_a_stop_string_are_not_recorded() -> None:
    """Bytes are tokens; the second one of the stop string was sampled after the first was recorded."""
    tok = gh.Tokenizer.train(texts=["abc"], vocab_size=263)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=263), dtype=torch.float64).eval()
    prompt = tok.encode("hello")
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "logit_bias": dict.fromkeys(b"xyz", 100.0)}
    [free] = gh.generate(model, tok, "hello", **settings)
    stop = free.text[4:7]
    [done] = gh.generate(model, tok, "hello", stop=stop, record=["final", "v.0", "scores.1"], **settings)
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.index(stop)]
    assert len(done.ids) < 8
    check(model, prompt, done, ["final", "v.0", "scores.1"])


def test_cancelled_requests_keep_their_recording() -> None:
    model, prompt, names = build("grouped"), list(range(20, 32)), ["resid_mid.0", "k.1", "pattern.0"]
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN, prefill_chunk=4, record=names)
    decoding, prefilling, waiting = (
        engine.submit(prompt, max_new_tokens=20, logit_bias={7: -100.0}) for _ in range(3)
    )
    for _ in range(4):  # of a prompt of 12, 4 + 4 + 3 tokens are prefilled; the third step decodes as well, and the
        # fourth begins the second prompt, which does not fit in the rest of the third step's chunk
        engine.step()
    for request in (waiting, prefilling, decoding):
        engine.cancel(request)
    assert not engine.step()
    for request, fed in ((decoding, 13), (prefilling, 4)):
        [done] = request.completions()
        assert done.finish_reason == "cancelled"
        assert done.recording is not None
        assert_equal_recordings(done.recording, record_plain(model, prompt, done.ids, fed, names))
        assert request.completions()[0].recording is done.recording
    assert waiting.completions()[0].recording is not None
    assert not waiting.completions()[0].recording
    [nothing] = gh.generate(model, None, [prompt], max_new_tokens=0, record=names)
    assert nothing.recording is not None
    assert not nothing.recording


def test_recording_disables_mixed_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU's key-count masks, prompts would be prefilled within decode steps."""

    def attend(q: Tensor, k: Tensor, v: Tensor, key_counts: Tensor, rows: Tensor, scale: float) -> Tensor:
        mask = torch.arange(k.shape[2]) < key_counts[:, None, :, None]
        return F.scaled_dot_product_attention(q, k[rows], v[rows], mask, scale=scale, enable_gqa=True)

    monkeypatch.setattr(decode_attention, "is_supported", lambda *_: True)
    monkeypatch.setattr(decode_attention, "attend", attend)
    model, prompts = build("grouped"), ragged(5, 6)
    names = list(sites(model))
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN, record=names)
    requests = [engine.submit(prompt, max_new_tokens=3 + i) for i, prompt in enumerate(prompts)]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        check(model, prompt, request.completions()[0], names)


def test_recordings_allow_gradients_and_do_not_keep_the_engine_alive() -> None:
    model = build("grouped", torch.float32)
    engine = gh.Engine(model, slots=3, max_len=MAX_LEN, record=["resid_post.0", "k.0", "q.0[head=0]", "pattern.1"])
    requests = [engine.submit([1, 2, 3], max_new_tokens=4) for _ in range(3)]
    engine.run()
    seen = requests[0].completions()[0].recording
    assert seen is not None
    probe = nn.Linear(64, 1)
    probe(seen["resid_post.0"]).sum().backward()
    assert_near(probe.weight.grad, seen["resid_post.0"].sum(0, keepdim=True))
    for value in seen.values():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    inference_model = weakref.ref(engine._runner.model)
    del engine, requests
    gc.collect()
    assert inference_model() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record": "resid_post.7"}, "the model has no site 'resid_post.7'; its layers are 0 to 1."),
        ({"record": "resid_post.0[batch=0]"}, "selects by batch, but requests are recorded one by one"),
        ({"record": "z.0[position=-1]"}, "selects by position, but requests are recorded one by one"),
        (
            {"record": "pattern.*[query=:3]"},
            "selects by query, but requests are recorded one by one",
        ),
        (
            {"record": "pattern.0[key=-1]"},
            "counts keys from the end, but the final length is not known yet; count from 0.",
        ),
        ({"record": "scores.0[key=2:-1]"}, "counts keys from the end"),
        ({"record": "z.0[head=4]"}, "has head index 4, but that axis has size 4"),
        ({"record": "k.0[head=2]"}, "has head index 2, but that axis has size 2"),
        ({"record": "q.0[width=16]"}, "has width index 16, but that axis has size 16"),
        ({"record": "embed[width=64]"}, "has width index 64, but that axis has size 64"),
        ({"record": "hidden.0[neuron=128]"}, "has neuron index 128, but that axis has size 128"),
        ({"record": "final", "speculator": PromptLookup()}, "record and speculator were both given; drafts cannot"),
        (
            {"record": "final", "compile": True},
            "record and compile were both given; compiled code cannot be recorded",
        ),
    ],
)
def test_invalid_recordings_raise(settings: dict[str, Any], message: str) -> None:
    """Before anything is computed."""
    with pytest.raises(InputError, match=message):
        gh.Engine(build("grouped"), **settings)


def test_beam_search_cannot_be_recorded() -> None:
    with pytest.raises(InputError, match="beams is 2, but beam search cannot be recorded"):
        gh.generate(build("grouped"), None, [[1, 2, 3]], beams=2, record="final")


def test_last_valid_indices_of_each_axis() -> None:
    names = ["z.0[head=3]", "k.0[head=1]", "q.0[width=15]", "embed[width=63]", "hidden.0[neuron=127]"]
    [done] = gh.generate(build("grouped"), None, [[1, 2, 3]], max_new_tokens=2, record=names)
    assert done.recording is not None
    assert set(done.recording) == set(names)


EDITS: dict[str, Callable[[str], dict[str, Any]]] = {
    "head": lambda at: {f"{at}z.1": gh.ablate_head(2)},
    "vector": lambda at: {f"{at}resid_post.0": lambda value: value + torch.linspace(-2, 2, 64, dtype=value.dtype)},
    "keys": lambda at: {f"{at}k.0": lambda value: 2 * value, f"{at}v.1[head=0]": 0.5},
    "several": lambda at: {f"{at}ffn_out.*": 0.0, f"{at}hidden.0": torch.relu, f"{at}embed[width=:9]": 1.0},
    "pattern": lambda at: {f"{at}pattern.0[head=1]": lambda value: value * 0.25, f"{at}scores.1": lambda s: s / 3},
}


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("kind", ["grouped", "windows", "soft-cap", "encoder-decoder"])
def test_edits_apply_in_generation_as_in_plain_forward_passes(kind: str, edits: str) -> None:
    model, prompts = build(kind), ragged(6, 4)
    made = EDITS[edits]("decoder." if isinstance(model, Seq2Seq) else "")
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    before = gh.generate(model, None, prompts, **options)
    with gh.edit(model, made):
        during = gh.generate(model, None, prompts, slots=2, **options)
        expected = [reference_generate(model, prompt, SamplingParams(**options), MAX_LEN) for prompt in prompts]
    after = gh.generate(model, None, prompts, **options)
    assert [one.ids for one in during] == expected
    assert [one.ids for one in during] != [one.ids for one in before]
    assert after == before
    assert not any(has_hooks(module) for module in model.modules())


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("edits", ["head", "vector", "keys", "pattern", "several"])
@pytest.mark.parametrize("kind", ["grouped", "encoder-decoder"])
def test_recordings_include_edits(kind: str, edits: str) -> None:
    model, prompts = build(kind), ragged(7, 4)
    made, names = EDITS[edits]("decoder." if isinstance(model, Seq2Seq) else ""), list(sites(model))
    with gh.edit(model, made):
        for prompt, done in zip(
            prompts, gh.generate(model, None, prompts, max_new_tokens=8, slots=2, record=names), strict=True
        ):
            check(model, prompt, done, names)
