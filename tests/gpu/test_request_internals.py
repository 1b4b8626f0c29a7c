"""What requests record, score, edit and are told, in CUDA graphs beside others that ask for nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse.generation import Rule
from glasshouse.generation.engine import model_runner
from glasshouse.generation.engine.step import PassHooks
from glasshouse.inspection import add, scale
from glasshouse.inspection.linear_probe import HeldOut, LinearProbe
from glasshouse.inspection.steering import SteeringVector, model_fingerprint
from glasshouse.models import Decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU = torch.device("cuda")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8], [2, 7, 1, 8]]
NEW: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(0)
    kinds: dict[str, dict[str, Any]] = {
        "gpt2": {},
        "llama": {"position": {"kind": "rotary"}, "n_kv_heads": 2, "feedforward": {"kind": "swiglu"}},
    }
    spec = gh.preset("tiny-decoder", vocab_size=64, max_len=64, init="normal", **kinds[request.param])
    made = gh.build(spec, device=GPU).eval()
    assert isinstance(made, Decoder)
    return made


def make_engine(model: Decoder) -> gh.Engine:
    mark, width = model_fingerprint(model), model.spec.d_model
    drawn = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
    probe = LinearProbe(drawn[0], 0.25, "resid_post.1", mark, HeldOut(1.0, 1.0, 1, 1))
    vector = SteeringVector(drawn[1], "resid_post.0", mark)
    return gh.Engine(model, slots=4, max_len=64, probes={"p": probe}, steering={"v": vector})


def test_they_are_those_of_the_whole_text(model: Decoder) -> None:
    engine = make_engine(model)
    sites = ("resid_post.0[position=new]", "z.1", "hidden.0[position=new]", "pattern.0[head=1]")
    asked: list[dict[str, Any]] = [
        {"record": sites, "probes": ["p"]},
        {},
        {"lens": 3, "attended": {"pattern.1[head=0]": 2}},
        {"record": "resid_post.*[position=new]", "lens": 7},
    ]
    for _ in range(2):  # the second time the graphs are there
        requests = [engine.submit(prompt, **NEW, **own) for prompt, own in zip(PROMPTS, asked, strict=True)]
        engine.run()
        for prompt, own, request in zip(PROMPTS, asked, requests, strict=True):
            [done] = request.completions()
            assert done.ids == gh.generate(model, None, [prompt], **NEW)[0].ids
            ids = torch.tensor([[*prompt, *done.ids]], device=GPU)
            first = len(prompt)
            names = [own["record"]] if isinstance(own.get("record"), str) else own.get("record", ())
            whole = [name.partition("[position")[0] for name in names]
            with gh.record(model, "resid_post.1", *whole) as seen, torch.no_grad():
                model(ids[:, :-1])
            for name, site in zip(names, whole, strict=True):
                expected = seen[site][:, 0] if "*" in site else seen[site][0]
                axis = seen.axes(site).index("query" if "pattern" in site else "position") - 1
                if name != site:
                    expected = expected.narrow(axis, first, 11)
                assert done.recording is not None
                torch.testing.assert_close(done.recording[name].to(GPU), expected, rtol=1e-3, atol=1e-4)
            if "probes" in own:
                scores = engine.probes["p"].scores(seen["resid_post.1"][0, first:])
                assert done.scores is not None
                torch.testing.assert_close(torch.tensor(done.scores["p"]), scores.cpu(), rtol=1e-3, atol=1e-4)
            if "lens" in own:
                lens = gh.lens(model, ids, top_k=own["lens"])
                expected = lens.probabilities[:, 0, first - 1 : -1].transpose(0, 1).cpu()
                assert done.lens is not None
                torch.testing.assert_close(done.lens.values.cpu(), expected, rtol=1e-3, atol=1e-5)


def test_steps_with_a_chunk_of_another_prompt_are_read_and_edited(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[PassHooks] = []
    run_decode = model_runner.ModelRunner._run_decode

    def spy(self: Any, name: Any, width: int, hooks: PassHooks = model_runner.NO_HOOKS) -> Any:  # noqa: ANN401
        mixed.extend([hooks] * (name == "mixed"))
        return run_decode(self, name, width, hooks)

    monkeypatch.setattr(model_runner.ModelRunner, "_run_decode", spy)
    engine = make_engine(model)
    edit = {"z.0[head=1]": scale(0.5)}
    draw = random.Random(0)
    prompts = [draw.choices(range(64), k=draw.randint(6, 30)) for _ in range(24)]
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 6 + number % 7, "min_new_tokens": 6 + number % 7}
        | ({"record": ("resid_post.1[position=new]", "z.1[position=new]"), "probes": ["p"]} if number % 3 else {})
        | ({"edits": edit} if number % 4 == 1 else {})
        for number in range(24)
    ]
    requests = [engine.submit(prompt, **own) for prompt, own in zip(prompts, asked, strict=True)]
    engine.run()
    assert any(hooks.readings for hooks in mixed)
    assert any(hooks.edits for hooks in mixed)
    for prompt, own, request in zip(prompts, asked, requests, strict=True):
        [done] = request.completions()
        if "record" not in own:
            assert done.recording is None
            continue
        ids = torch.tensor([[*prompt, *done.ids]], device=GPU)
        with gh.edit(model, own.get("edits", {})), gh.record(model, "resid_post.1", "z.1") as seen, torch.no_grad():
            model(ids[:, :-1])
        assert done.recording is not None
        for name, axis in (("resid_post.1", 0), ("z.1", 1)):
            expected = seen[name][0].narrow(axis, len(prompt), len(done.ids) - 1)
            found = done.recording[f"{name}[position=new]"].to(GPU)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert done.scores is not None
        scores = engine.probes["p"].scores(seen["resid_post.1"][0, len(prompt) :])
        torch.testing.assert_close(torch.tensor(done.scores["p"], device=GPU), scores, rtol=1e-3, atol=1e-3)


def test_edits_and_steering_beside_plain_requests(model: Decoder) -> None:
    engine = make_engine(model)
    vector = engine.steering["v"].vector.to(GPU)
    asked: list[dict[str, Any]] = [
        {"z.1[head=1]": 0.0, "resid_post.0[position=new]": add(2 * vector)},
        {},
        {"ffn_out.*": scale(-2.0), "hidden.0[neuron=3]": 1.5},
        {"attn_out.0[position=prompt]": vector},
    ]
    for _ in range(2):
        requests = [engine.submit(prompt, **NEW, edits=own) for prompt, own in zip(PROMPTS, asked, strict=True)]
        engine.run()
        for prompt, own, request in zip(PROMPTS, asked, requests, strict=True):
            with gh.edit(model, own):
                [expected] = gh.generate(model, None, [prompt], **NEW)
            assert request.ids == expected.ids
            assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_a_rule_acts_at_its_token_though_the_gpu_runs_ahead(model: Decoder) -> None:
    engine = make_engine(model)
    plain = engine.submit(PROMPTS[0], **NEW, probes=["p"])
    engine.run()
    scores = plain.scores["p"]
    above = (sorted(scores)[-2] + sorted(scores)[-1]) / 2
    at = scores.index(max(scores))
    stopped = engine.submit(PROMPTS[0], **NEW, rules=Rule("p", above, "stop"))
    other = engine.submit(PROMPTS[1], **NEW)
    engine.run()
    assert stopped.ids == plain.ids[: at + 1]
    assert other.ids == gh.generate(model, None, [PROMPTS[1]], **NEW)[0].ids
    alone = engine.submit(PROMPTS[0], **NEW, rules=Rule("p", above, "steer", steer={"v": 4.0}))
    engine.run()
    beside = [engine.submit(PROMPTS[0], **NEW, rules=Rule("p", above, "steer", steer={"v": 4.0}))]
    beside += [engine.submit(prompt, **NEW) for prompt in PROMPTS[1:]]
    engine.run()
    assert beside[0].ids == alone.ids
    assert alone.ids[: at + 2] == plain.ids[: at + 2]
