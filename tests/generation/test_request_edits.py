"""Edits by request: each sequence of a batch as if the model were edited, and its neighbours as if it were not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from examples import first_of
from generation.test_recording import KINDS, MAX_LEN, TOLERANCE, build, ragged
from generation.test_request_internals import _graphs  # noqa: F401 - a fixture

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import PromptLookup
from glasshouse.generation.recording import site_shape
from glasshouse.inspection import add, scale, sites
from glasshouse.inspection.sites import Site
from glasshouse.models import Model


def editable(model: Model) -> list[Site]:
    return [
        one
        for name, one in sites(model).items()
        if not one.is_cached
        and one.hook_point not in ("scores", "pattern", "scale", "result")
        and "position" in one.axes
        and not name.startswith("encoder.")
    ]


def drawn_edits(rng: random.Random, model: Model) -> dict[str, Any]:
    """Draw edits of up to three sites: all of one, a head or a neuron; at all positions, the prompt's or new ones."""
    found: dict[str, Any] = {}
    for site in rng.sample(editable(model), rng.randint(1, 3)):
        shape = dict(zip(site.axes, site_shape(site, model.spec), strict=True))
        part = next((axis for axis in ("head", "neuron") if axis in shape), None)
        index = []
        if part is not None and rng.random() < 0.7:
            index.append(f"{part}={rng.randrange(shape[part])}")
        if span := rng.choice(["", "position=prompt", "position=new"]):
            index.append(span)
        axes = [axis for axis in shape if axis not in ("batch", "position") and not any(axis in one for one in index)]
        size = [shape[axis] for axis in axes[-1:]]
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(rng.randrange(100))).double()
        edits = [0.0, 0.5, scale(rng.uniform(-1, 2)), add(drawn), drawn, [scale(0.5), add(drawn)]]
        edits += [torch.tanh, [scale(2.0), torch.tanh, add(drawn)]]
        found[site.name + f"[{', '.join(index)}]" * bool(index)] = rng.choice(edits)
    return found


@pytest.mark.few(4)
@pytest.mark.usefixtures("_graphs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "chunk"), first_of([(3, 5), (8, MAX_LEN)]))
def test_each_request_of_a_batch_is_edited_as_the_model_would_be(kind: str, slots: int, chunk: int) -> None:
    model, prompts, rng = build(kind), ragged(1, 9), random.Random(kind)
    engine = gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=chunk)
    for _ in range(2):  # the second time slots are left by edited sequences, whose prefixes are cached
        edits = [drawn_edits(rng, model) if number % 3 else {} for number in range(len(prompts))]
        settings = [{"max_new_tokens": 3 + n, "temperature": n % 2, "seed": n} for n in range(len(prompts))]
        requests = [
            engine.submit(prompt, edits=own, **one) for prompt, own, one in zip(prompts, edits, settings, strict=True)
        ]
        engine.run()
        for prompt, own, one, request in zip(prompts, edits, settings, requests, strict=True):
            with gh.edit(model, own):
                [expected] = gh.generate(model, None, [prompt], max_len=MAX_LEN, **one)
            assert request.ids == expected.ids
            assert request.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE[torch.float64])


def test_a_request_that_is_not_edited_has_the_same_bits_beside_one_that_is() -> None:
    model = build("grouped", torch.float32)
    found = []
    some: dict[str, Any] = {"resid_post.0": scale(3.0), "z.1[head=1]": 0.0}
    for edits in ({}, some):
        engine = gh.Engine(model, slots=2, max_len=MAX_LEN, batch_invariant=True, weights="own")
        settings: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9}
        requests = [engine.submit([1, 2, 3], edits=own, **settings) for own in ({}, edits)]
        engine.run()
        found.append(requests)
    assert found[0][0].logprobs == found[1][0].logprobs
    assert found[0][1].logprobs != found[1][1].logprobs


def test_recordings_and_probes_see_the_edited_activation() -> None:
    model = build("learned")
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN)
    request = engine.submit([1, 2, 3], max_new_tokens=4, edits={"z.0[head=1]": 0.25}, record="z.0")
    engine.run()
    recording = request.completions()[0].recording
    assert recording is not None
    assert bool((recording["z.0"][1] == 0.25).all())
    assert not bool((recording["z.0"][0] == 0.25).any())


def test_beams_are_edited_too() -> None:
    model = build("learned")
    edits = {"resid_post.0[position=new]": add(torch.ones(model.spec.d_model).double())}
    engine = gh.Engine(model, slots=5, max_len=MAX_LEN)
    engine.submit([5, 6], max_new_tokens=9)
    request = engine.submit([1, 2, 3], max_new_tokens=8, beams=3, edits=edits)
    engine.run()
    with gh.edit(model, edits):
        [expected] = gh.generate(model, None, [[1, 2, 3]], max_new_tokens=8, beams=3)
    assert request.ids == expected.ids
    assert request.logprobs == pytest.approx(expected.logprobs)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"k.0": 0.0}, "k.0 cannot be edited by request: name a site of the residual stream"),
        ({"pattern.0": 0.0}, "pattern.0 cannot be edited by request"),
        ({"resid_post.0[position=3]": 0.0}, "resid_post.0[position=3] is of some rows or positions, but a request"),
        ({"z.0[head=9]": 0.0}, "z.0[head=9] has head index 9, but that axis has size"),
        ({"z.0": "zero"}, "the edit of z.0 is a str, but it must be a number or tensor"),
        ({"z.0": gh.ablate_head(1)}, "the edit of z.0 is a AblationEdit, but it must be a number or tensor"),
        ({"resid_post.0": torch.ones(3)}, "the edit of resid_post.0 has shape [3], but there it must be [64]."),
        ({"resid_post.0": add(torch.ones(3))}, "the edit of resid_post.0 has shape [3], but there it must be [64]."),
        ({"resid_post.5": 0.0}, "the model has no site 'resid_post.5'; its layers are 0 to 1."),
        (["z.0"], "edits is ['z.0'], but it must be a dict of edits by site."),
    ],
)
def test_edits_that_are_not_possible_are_refused(edits: Any, message: str) -> None:  # noqa: ANN401 - or wrong
    engine = gh.Engine(build("learned"), slots=2, max_len=MAX_LEN)
    with pytest.raises(InputError) as refused:
        engine.submit([1, 2], edits=edits)
    assert message in str(refused.value)


def test_a_function_that_fails_ends_its_request_alone() -> None:
    model = build("learned")
    engine = gh.Engine(model, slots=3, max_len=MAX_LEN)
    calls = []

    def fail_late(value: torch.Tensor) -> torch.Tensor:
        calls.append(value.shape)
        return value if len(calls) < 4 else value / None

    late = engine.submit([1, 2, 3], max_new_tokens=9, min_new_tokens=9, edits={"resid_post.0": fail_late})
    shape = engine.submit([4, 5], max_new_tokens=9, edits={"z.1[head=1]": lambda value: value[..., :3]})
    plain = engine.submit([6, 7], max_new_tokens=9)
    engine.run()
    assert late.finish_reason == shape.finish_reason == "error"
    assert late.error is not None
    assert late.error.startswith("the edit of resid_post.0 raised TypeError: unsupported operand type(s)")
    assert shape.error is not None
    assert "the edit of z.1[head=1] gave shape" in shape.error
    assert plain.ids == gh.generate(model, None, [[6, 7]], max_new_tokens=9)[0].ids
    again = engine.submit([1, 2, 3], max_new_tokens=5)
    engine.run()
    assert again.ids == gh.generate(model, None, [[1, 2, 3]], max_new_tokens=5)[0].ids


def test_drafts_are_not_edited() -> None:
    engine = gh.Engine(build("learned"), slots=1, max_len=MAX_LEN, speculator=PromptLookup())
    with pytest.raises(InputError, match="edits and speculator were both given; drafts take none; leave one out"):
        engine.submit([1], edits={"z.0": 0.0})


def test_keys_and_values_of_edited_tokens_are_reused_by_no_request() -> None:
    model, prompt = build("learned"), list(range(8, 32))
    engine = gh.Engine(model, slots=4, max_len=MAX_LEN)
    found = []
    for edits in ({}, {"resid_post.0": 0.5}, {"resid_post.0": 0.25}, {}):
        request = engine.submit(prompt, max_new_tokens=2, min_new_tokens=2, edits=edits)
        engine.run()
        with gh.edit(model, edits):
            [expected] = gh.generate(model, None, [prompt], max_new_tokens=2, min_new_tokens=2)
        assert request.logprobs == pytest.approx(expected.logprobs)
        found.append(tuple(request.logprobs))
    assert len(set(found)) == 3
    assert engine.slots.n_reused > 0  # by the last request, of the first
