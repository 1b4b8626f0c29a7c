"""Malicious files beside the model: generation settings, pooling and the results of verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub.audit import audited
from hub.damage import GENERATION, LONG, POOLING, UGLY, VERIFIED, WEIGHTS, Case, RefuseCase, fifo, link, on, write

import glasshouse as gh
from glasshouse.hub.model_files import fingerprints

GENERATING = {
    "generation-not-JSON": (write(GENERATION, "{"), "not valid JSON"),
    "generation-list": (write(GENERATION, []), "not contain a JSON object"),
    "generation-end-string": (write(GENERATION, {"eos_token_id": "1"}), "eos_token_id"),
    "generation-end-of-strings": (write(GENERATION, {"eos_token_id": [1, "2"]}), "eos_token_id"),
    "generation-fifo": (fifo(GENERATION), "not a file"),
    "generation-link-out": (link(GENERATION, "OUTSIDE/generation_config.json"), "outside its folder"),
}
POOLINGS = {
    "pooling-not-JSON": (write(POOLING, "{"), "not valid JSON"),
    "pooling-list": (write(POOLING, []), "not contain a JSON object"),
    "pooling-none": (write(POOLING, {}), "mean_tokens"),
    "pooling-two": (write(POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}), "cls_token"),
    "pooling-unknown": (write(POOLING, {"pooling_mode_max_tokens": True}), "max_tokens"),
    "pooling-number": (write(POOLING, {"pooling_mode_mean_tokens": 1}), "mean_tokens"),
    "pooling-thousands": (write(POOLING, {f"pooling_mode_{i}": True for i in range(5000)}), "mean_tokens"),
    "pooling-fifo": (fifo(POOLING), "not a file"),
    "pooling-link-out": (link(POOLING, "OUTSIDE/pooling.json"), "outside its folder"),
}
LOOSE = {
    "pooling-folder-link-out": Case("bert-bare", link("1_Pooling", "OUTSIDE"), POOLING, "outside its folder"),
    "verified-link-out": Case("gpt2", link(VERIFIED, "OUTSIDE/words.json"), VERIFIED, "outside its folder"),
    "verified-fifo": Case("gpt2", fifo(VERIFIED), VERIFIED, "not a file"),
}
CASES = {
    **on("gpt2", GENERATION, GENERATING),
    **on("bert-bare", POOLING, POOLINGS),
    **LOOSE,
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(refuse_case: RefuseCase, name: str) -> None:
    refuse_case(CASES[name])


SEEN = {"date": "2026-11-15", "differences": {"cached": 2e-7}}
VERIFICATIONS = {
    "not-JSON": "{",
    "list": "[]",
    "deep": "[" * 100_000,
    "table-of-nothing": '{"date": "2026-11-15"}',
    "no-differences": json.dumps({**SEEN, "differences": {}}),
    "differences-of-words": json.dumps({**SEEN, "differences": {"cached": "none"}}),
    "differences-nan": json.dumps({**SEEN, "differences": {"cached": float("nan")}}),
    "no-date": json.dumps({"differences": SEEN["differences"]}),
    "date-table": json.dumps({**SEEN, "date": {}}),
    "date-long": json.dumps({**SEEN, "date": LONG}),
    "date-ugly": json.dumps({**SEEN, "date": UGLY}),
    "check-ugly": json.dumps({**SEEN, "differences": {UGLY: 0.0}}),
    "files-of-words": json.dumps({**SEEN, "files": "large"}),
    "of-other-weights": json.dumps({**SEEN, "files": {WEIGHTS: "0" * 64}}),
}


def of_these_weights(model: Path, text: str) -> str:
    """Complete a table with the hashes of the files, so that only its other defects show."""
    if not text.startswith('{"'):
        return text
    return json.dumps({"files": fingerprints(model)} | json.loads(text))


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_damaged_results_of_verify_are_reported_without_an_error(
    model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(VERIFIED, of_these_weights(model, VERIFICATIONS[name]))(model)
    with audited(model) as forbidden:
        gh.load(model)
    assert forbidden == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert len(line.replace(str(model), "")) < 400
    assert "glasshouse verify" in line
    assert "2026" not in line


def test_valid_results_of_verify_are_shown(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(VERIFIED, of_these_weights(model, json.dumps(SEEN)))(model)
    gh.load(model)
    assert "verified 2026-11-15, largest differences: cached 2.0e-07" in capsys.readouterr().err
