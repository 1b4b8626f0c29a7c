"""Rules on the scores of probes: requests that stop, are withheld or steered while they run beside others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from generation.test_recording import MAX_LEN, build
from generation.test_request_internals import make_probes

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import Rule
from glasshouse.generation.request import Completion
from glasshouse.inspection.steering import SteeringVector, model_fingerprint
from glasshouse.models import Decoder

NEW = 12


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = build("grouped")
    assert isinstance(made, Decoder)
    return made


@pytest.fixture(scope="module")
def vector(model: Decoder) -> SteeringVector:
    drawn = torch.randn(model.spec.d_model, generator=torch.Generator().manual_seed(8))
    return SteeringVector(drawn, "resid_post.0", model_fingerprint(model))


@pytest.fixture
def engine(model: Decoder, vector: SteeringVector) -> gh.Engine:
    return gh.Engine(model, slots=4, max_len=MAX_LEN, probes=make_probes(model), steering={"v": vector})


def complete(engine: gh.Engine, prompt: list[int], **settings: Any) -> Completion:  # noqa: ANN401 - any setting
    request = engine.submit(prompt, max_new_tokens=NEW, **settings)
    engine.run()
    return request.completions()[0]


def middle(scores: list[float]) -> float:
    """Return a threshold between the scores, where no rounding decides."""
    ordered = sorted(scores)
    half = len(ordered) // 2
    return sum(ordered[half - 1 : half + 1]) / 2


def first_above(scores: list[float], above: float, consecutive: int) -> int | None:
    """Return the first token that ends a row of so many scores above a threshold."""
    ends = range(consecutive - 1, len(scores))
    return next((end for end in ends if min(scores[end - consecutive + 1 : end + 1]) > above), None)


@pytest.mark.parametrize("consecutive", [1, 2, 3])
def test_an_answer_ends_after_the_token_that_is_above(engine: gh.Engine, consecutive: int) -> None:
    rng, ended = random.Random(consecutive), 0
    for seed in range(20):
        prompt = [rng.randrange(1, 40) for _ in range(rng.randint(1, 6))]
        same: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        plain = complete(engine, prompt, probes="b", **same)
        assert plain.scores is not None
        scores = plain.scores["b"]
        if len(scores) < 2:  # an end token came at once
            continue
        above = middle(scores)
        stopped = complete(engine, prompt, rules=Rule("b", above, "stop", consecutive), **same)
        refused = complete(engine, prompt, rules=Rule("b", above, "refuse", consecutive), probes="a", **same)
        end = first_above(scores, above, consecutive)
        if end is None:
            assert (stopped.ids, stopped.firings) == (refused.ids, refused.firings) == (plain.ids, ())
            continue
        ended += 1
        assert (stopped.ids, stopped.finish_reason, stopped.scores) == (plain.ids[: end + 1], "stop", None)
        assert (refused.ids, refused.text, refused.finish_reason) == ([], "", "content_filter")
        assert refused.scores == {"a": []}
        for one in (stopped, refused):
            (firing,) = one.firings
            assert (firing.token, firing.score) == (end, pytest.approx(scores[end], abs=1e-5))
    assert ended > 5


def reference(model: Decoder, vector: SteeringVector, prompt: list[int], rule: Rule) -> tuple[list[int], list[int]]:
    """Return the new tokens and the positions that are steered, by whole forward passes."""
    probe = make_probes(model)[rule.probe]
    ids, steered, in_a_row = list(prompt), set[int](), 0
    for _ in range(NEW):
        offsets = torch.stack([vector.vector * (p in steered) * rule.steer["v"] for p in range(len(ids))])
        with gh.edit(model, {vector.site: gh.inspection.add(offsets)}), gh.record(model, probe.site) as seen:
            logits = model(torch.tensor([ids]))
        if len(ids) > len(prompt):
            in_a_row = in_a_row + 1 if probe.scores(seen[probe.site][0, -1]) > rule.above else 0
        if in_a_row >= rule.consecutive:
            steered.add(len(ids))  # the token that is sampled now
        if (token := int(logits[0, -1].argmax())) in model.spec.end_ids:
            break
        ids.append(token)
    return ids[len(prompt) :], sorted(steered)


def test_tokens_are_steered_while_the_scores_stay_above(
    engine: gh.Engine, model: Decoder, vector: SteeringVector
) -> None:
    rng, changed = random.Random(3), 0
    for _ in range(8):
        prompt = [rng.randrange(1, 40) for _ in range(rng.randint(12, 18))]
        plain = complete(engine, prompt, probes="b")
        assert plain.scores is not None
        rule = Rule("b", middle(plain.scores["b"]), "steer", rng.choice([1, 1, 2]), {"v": rng.choice([-8.0, 8.0])})
        expected, steered = reference(model, vector, prompt, rule)
        rivals = [engine.submit([5, number], max_new_tokens=NEW) for number in range(2)]
        found = complete(engine, prompt, rules=[rule])
        assert found.ids == expected
        assert {firing.token for firing in found.firings} <= {place - len(prompt) - 1 for place in steered}
        changed += found.ids != plain.ids
        # Nothing that was steered is in the cache of others.
        longer = prompt + found.ids[:-2]
        fresh = gh.Engine(model, slots=1, max_len=MAX_LEN)
        assert complete(engine, longer).logprobs == pytest.approx(complete(fresh, longer).logprobs)
        assert [complete(engine, rival.prompt).ids for rival in rivals] == [rival.ids for rival in rivals]
    assert changed > 2


def test_a_rule_that_fires_in_the_last_step_steers_no_neighbour(engine: gh.Engine) -> None:
    """The slot of a sequence that needs no further step is another one's by then."""
    alone = complete(engine, [5, 6], min_new_tokens=NEW)
    last = Rule("a", -1e9, "steer", consecutive=3, steer={"v": 50.0})
    short = engine.submit([1, 2], max_new_tokens=4, min_new_tokens=4, rules=last)
    beside = complete(engine, [5, 6], min_new_tokens=NEW)
    assert [one.token for one in short.firings] == [2]
    assert beside.logprobs == pytest.approx(alone.logprobs)


def test_a_rule_and_the_scales_of_the_request_add_up(engine: gh.Engine) -> None:
    always = Rule("a", -1e9, "steer", steer={"v": 2.0})
    request = engine.submit([1, 2], max_new_tokens=4, steer={"v": 1.0}, rules=always)
    assert request.steering == {"v": 1.0}
    engine.run()
    assert request.steering == {"v": 3.0}
    assert [(one.rule, one.token) for one in request.firings] == [(always, 0)]


@pytest.mark.parametrize("site", ["resid_post.1", "k.0", "z.0"])
def test_a_recording_of_a_withheld_answer_has_its_prompt_alone(engine: gh.Engine, site: str) -> None:
    refuse = Rule("a", -1e9, "refuse", consecutive=3)
    done = complete(engine, [1, 2, 3], rules=refuse, record=[site, f"{site}[position=new]"], min_new_tokens=NEW)
    assert done.finish_reason == "content_filter"
    assert done.recording is not None
    assert list(done.recording) == [site]
    assert done.recording[site].shape[done.recording.axes(site).index("position")] == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rules": Rule("d", 0.0, "stop")}, "there is no probe 'd'; it has a, b, c."),
        ({"rules": Rule("a", 0.0, "steer", steer={"w": 1.0})}, "there is no steering vector 'w'; it has v."),
        ({"rules": "a > 0: stop"}, "rules is 'a > 0: stop', but it must be of gh.generation.Rule."),
        ({"rules": Rule("a", 0.0, "stop"), "beams": 2}, "beams is 2, but rules are not kept in a beam search"),
        (
            {"rules": Rule("a", 0.0, "steer", steer={"v": 1.0}), "steer_at": "prompt"},
            "steer_at is 'prompt', but a rule steers new tokens; leave one of them out.",
        ),
    ],
)
def test_rules_that_cannot_apply_are_refused(engine: gh.Engine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        engine.submit([1, 2], **settings)
    assert message in str(refused.value)


SENSELESS = (
    "",
    "a: stop",
    "a > b: stop",
    "a > 1",
    "a > 1: steer v",
    "a > 1: stop v=1",
    "a > 1 x 0: stop",
    "a>nan:stop",
)


@pytest.mark.parametrize("text", SENSELESS)
def test_rules_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Rule.parse(text)
