"""Live pages of the bundled models and of two other shapes, in two browsers, on many drawn prompts: `make live`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chromium
import firefox
import numpy as np
import pytest
import torch
from conftest import Trained
from live_comparison import Request, answer
from playwright.sync_api import Browser
from test_live import LivePage, ask, check_token_ids, odd_strings

import glasshouse as gh
from glasshouse.config import JsonDict
from glasshouse.models import Seq2Seq
from glasshouse.page.forward_pass import PagePrompt

pytestmark = pytest.mark.long

PROMPTS, STRINGS, TEXTS, NEW = 200, 10_000, 50, 64
ENGINES = ("chromium", "firefox")
BATCH = 20  # prompts asked about at once
CLOSE = 1e-4  # of logits, attention weights and probabilities
TEXT = "the cat sat on a mat def area ( width , height ) : return 2033 März May 4 Once upon time there was"
WORDS = TEXT.split()
SHAPES: dict[str, JsonDict] = {
    "bert-base": {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 128, "max_len": 64},
    "t5-small": {
        "start_id": 0,
        "end_ids": (0,),
        "n_layers": 2,
        "n_encoder_layers": 2,
        "d_model": 64,
        "n_heads": 4,
        "d_ff": 128,
        "max_len": 64,
    },
}


def trained(name: str) -> Trained:
    """Return a bundled model, or one of another shape with drawn weights."""
    if name not in SHAPES:
        model, tok = gh.load(name)
        assert tok is not None
        return model, tok
    tok = gh.Tokenizer.train(texts=[" ".join(WORDS)] * 9, vocab_size=270)
    torch.manual_seed(0)
    sizes = {**SHAPES[name], "d_head": 16, "n_kv_heads": 4, "vocab_size": len(tok)}
    model = gh.build(gh.preset(name, **sizes)).eval()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return model, tok


@contextmanager
def opened_live(engine: str, browser: Browser, name: str, path: Path) -> Iterator[LivePage]:
    """Open the live page of a model in Chromium or in Firefox."""
    if engine == "firefox" and firefox.find() is None:
        (pytest.fail if chromium.is_required() else pytest.skip)(firefox.MISSING)
    made = LivePage(browser, trained(name), path, text="the cat")
    if engine == "chromium":
        yield made
    else:
        with firefox.opened(path, made.troubles) as made.page:
            yield made
    assert not made.troubles


NAMES = ["python-3m", "english-4m", "dates-1m", *SHAPES]


@pytest.fixture(scope="module", params=[(engine, name) for engine in ENGINES for name in NAMES], ids="-".join)
def live(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LivePage]:
    engine, name = request.param
    with opened_live(engine, browser, name, tmp_path_factory.mktemp("live") / "page.html") as made:
        yield made


def drawn_prompts(live: LivePage, count: int) -> list[JsonDict]:
    """Return prompts of drawn words, and after some of them drawn tokens."""
    drawn = random.Random(1)
    size = live.model.spec.vocab_size

    def prompt() -> JsonDict:
        text = " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(2, 12)))
        return {"text": text, "appended": [drawn.randrange(size) for _ in range(drawn.randint(1, 8))]}

    return [prompt() for _ in range(count)]


def prefix_of(live: LivePage) -> str:
    return "decoder." if isinstance(live.model, Seq2Seq) else ""


def run(
    live: LivePage, prompt: JsonDict, *sites: str, edits: dict[str, object] | None = None
) -> tuple[torch.Tensor, gh.inspection.Recording]:
    """Return the logits of the last position and recorded sites."""
    inputs = live.traces.loader.get("").inputs(PagePrompt(prompt["text"], "", tuple(prompt["appended"])))
    with torch.no_grad(), gh.edit(live.model, edits or {}), gh.record(live.model, *sites) as seen:
        logits = live.model(*inputs)
    return logits[0, -1], seen


def logits_of(found: JsonDict) -> np.ndarray:
    """Return the logits of an answer of `next` that has all candidates, by id."""
    by_id = {one["id"]: one["logit"] for one in found["candidates"]}
    return np.array([by_id[number] for number in range(len(by_id))])


def test_logits_patterns_and_ablations_are_those_of_pytorch(live: LivePage) -> None:
    s, prefix, drawn = live.model.spec, prefix_of(live), random.Random(2)
    prompts = drawn_prompts(live, PROMPTS)
    worst = {"logits": 0.0, "ablated": 0.0, "pattern": 0.0, "lens": 0.0}
    for start in range(0, PROMPTS, BATCH):
        chosen = [
            (one, drawn.randrange(s.n_layers), drawn.randrange(s.n_heads)) for one in prompts[start : start + BATCH]
        ]
        requests: list[Request] = []
        for prompt, layer, head in chosen:
            plain = {"forward_pass": {"prompt": prompt}}
            edits = [{"kind": "scale", "site": f"{prefix}z.{layer}[head={head}]", "factor": 0}]
            requests += [
                ("next", {**plain, "show": s.vocab_size}),
                ("next", {"forward_pass": {"prompt": prompt, "edits": edits}, "show": s.vocab_size}),
                ("tile", {**plain, "attention": f"{prefix}pattern", "layer": layer, "head": head}),
                ("lens", {**plain, "start": 0, "stop": 2}),
            ]
        answers = ask(live.page, requests)
        for number, (prompt, layer, head) in enumerate(chosen):
            now, ablated, tile, lens = answers[4 * number : 4 * number + 4]
            logits, seen = run(live, prompt, f"{prefix}pattern.{layer}")
            under, _ = run(live, prompt, "*resid_post.0", edits={f"{prefix}z.{layer}": gh.ablate_head(head)})
            weights = seen[f"{prefix}pattern.{layer}"][0, head].numpy()
            cells = np.where(tile["cells"] < 0, 0, tile["cells"])
            body = {"forward_pass": {"prompt": prompt}, "start": 0, "stop": 2}
            served = answer(live.traces, ("lens", body))
            assert isinstance(served, dict)
            off = {
                "logits": np.abs(logits_of(now) - logits.numpy()),
                "ablated": np.abs(logits_of(ablated) - under.numpy()),
                "pattern": np.abs(cells - weights),
                "lens": np.abs(lens["probability"] - served["probability"]),
            }
            worst = {name: max(most, float(off[name].max())) for name, most in worst.items()}
    print(worst)
    assert max(worst.values()) <= CLOSE, worst


def test_greedy_texts_are_those_of_generate(live: LivePage) -> None:
    if live.model.spec.kind == "encoder":
        pytest.skip("an encoder does not generate")
    parted = 0
    for prompt in drawn_prompts(live, TEXTS):
        (found,) = ask(
            live.page, [("generate", {"forward_pass": {"prompt": {"text": prompt["text"]}}, "max_new_tokens": NEW})]
        )
        ids = [one["id"] for one in found["tokens"]]
        (made,) = gh.generate(live.model, live.tok, prompt["text"], max_new_tokens=NEW)
        if ids == made.ids:
            continue
        parted += 1
        at = next(
            place for place, (one, other) in enumerate(zip([*ids, -1], [*made.ids, -1], strict=False)) if one != other
        )
        logits, _ = run(live, {"text": prompt["text"], "appended": made.ids[:at]}, "*resid_post.0")
        best, second = logits.topk(2).values
        assert best - second < CLOSE, (
            f"{prompt['text']!r} parts at {at}, where the best logit leads by {best - second}"
        )
    print(f"{parted} of {TEXTS} texts part at a tie")


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_thousand_odd_strings_have_the_ids_of_python(engine: str, browser: Browser, tmp_path: Path) -> None:
    with opened_live(engine, browser, "python-3m", tmp_path / "page.html") as live:
        limit = live.model.spec.max_len
        strings = [one for one in odd_strings(STRINGS) if len(one.encode(errors="replace")) < limit]
        assert len(strings) > 0.99 * STRINGS
        check_token_ids(live, strings)
