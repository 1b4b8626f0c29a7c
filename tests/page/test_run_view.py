"""A run in a browser: its curves while they grow, its samples and heads, and the way to any checkpoint of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import torch
from conftest import POEM, Trained, Visit, _train, settle
from playwright.sync_api import Browser, Page, expect

import glasshouse as gh
from glasshouse import config
from glasshouse.page import Look
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.training import list_checkpoints
from glasshouse.training.checkpoint.folder import lock_folder
from glasshouse.training.logging.journal import Journal

TEXT = "the cat sat on the mat"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def state(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).fragment).items()}


def value(page: Page, testid: str) -> float:
    return float(page.get_by_test_id(testid).get_attribute("data-value") or "nan")


@pytest.fixture
def copied(run_folder: Path, tmp_path: Path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


# Curves


@pytest.mark.smoke
def test_values_are_the_journal(run_folder: Path, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    picture(page, "run")
    last = lines(run_folder / "metrics.jsonl")[-1]
    assert value(page, "at-step") == last["step"] == 60
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "validation_loss", "validation_bits_per_byte"):
        assert value(page, f"at-{name}") == last[name], name
        assert value(page, f"now-{name}") == last[name], name
    expect(page.get_by_test_id("run-state")).to_have_text("finished")
    expect(page.get_by_test_id("run-far")).to_contain_text("step 60 of 60")
    expect(page.get_by_test_id("run-settings")).to_contain_text("tiny-decoder")


def test_arrow_keys_move_along_the_steps(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    journal = {line["step"]: line for line in lines(run_folder / "metrics.jsonl")}
    chart = page.get_by_test_id("chart-loss").get_by_role("slider")
    chart.focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert value(page, "at-step") == 5
    assert value(page, "at-loss") == journal[5]["loss"]
    assert chart.get_attribute("aria-valuenow") == "5"
    assert "step 5: training" in (chart.get_attribute("aria-valuetext") or "")
    expect(page).to_have_url(re.compile("run_step=5"))
    settle(page)
    expect(page.get_by_test_id("chart-loss").get_by_role("slider")).to_be_focused()
    page.keyboard.press("End")
    assert value(page, "at-step") == 60


def test_pointer_shows_and_click_pins_a_step(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    journal = {line["step"]: line for line in lines(run_folder / "metrics.jsonl")}
    area = page.get_by_test_id("chart-loss").locator("svg")
    box = area.bounding_box()
    assert box is not None
    wide = box["width"] - 52 - 12
    at = {"x": 52 + wide * 20 / 60, "y": 80.0}
    area.hover(position=at)
    assert value(page, "at-step") == 20
    assert value(page, "at-validation_loss") == journal[20]["validation_loss"]
    assert value(page, "now-grad_norm") == journal[20]["grad_norm"]  # all charts are marked
    page.mouse.move(2, 2)
    assert value(page, "at-step") == 60
    area.click(position=at)
    settle(page)
    page.mouse.move(2, 2)
    assert value(page, "at-step") == 20
    assert state(page)["run_step"] == "20"


def test_open_the_nearest_checkpoint(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT, run_step=23)
    button = page.get_by_test_id("look-at")
    expect(button).to_have_text("open checkpoint step 20 (nearest saved)")
    button.click()
    settle(page)
    assert state(page)["checkpoint"] == "step 20"
    expect(page.get_by_test_id("look-at")).to_have_text("all views show checkpoint step 20")
    page.locator("#tab-tokens").click()
    settle(page)
    model, tok = gh.load(next(one.folder for one in list_checkpoints(run_folder) if one.name == "step 20"))
    assert tok is not None
    expected = model(torch.tensor([tok.encode(TEXT)]))[0, -1].softmax(-1).max()
    first = page.locator("[data-testid=next] .figure").first
    assert float(first.get_attribute("data-value") or "") == pytest.approx(expected.item(), rel=1e-4)


def test_scale_and_smoothing(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    drawn = page.get_by_test_id("chart-loss").locator("path.chart-line:not(.pale)").first
    before = drawn.get_attribute("d")
    page.get_by_role("radio", name="logarithmic").click()
    settle(page)
    logarithmic = drawn.get_attribute("d")
    assert logarithmic != before
    assert state(page)["run_scale"] == "log"
    page.get_by_label("smoothing").press("Home")
    settle(page)
    assert page.get_by_test_id("chart-loss").locator("path.pale").count() == 0  # each step is the line itself
    assert drawn.get_attribute("d") != logarithmic
    assert value(page, "at-loss") == lines(run_folder / "metrics.jsonl")[-1]["loss"]  # values are never smoothed


def test_the_values_as_a_table(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    page.get_by_text("the values as a table").click()
    rows = page.locator("[data-testid=run-values] tbody tr")
    expect(rows).to_have_count(40)
    journal = lines(run_folder / "metrics.jsonl")
    assert float(rows.first.locator("td").first.get_attribute("data-value") or "") == journal[0]["loss"]
    assert float(rows.last.locator("td").first.get_attribute("data-value") or "") == journal[-1]["loss"]


# While it trains


def test_curves_grow_and_are_truncated(copied: Path, visit: Visit) -> None:
    """As a run does: it trains, is killed, resumes from an earlier step, and ends."""
    shutil.move(copied / "model", copied / "later")
    journal = Journal(copied / "metrics.jsonl")
    journal.truncate(31)
    with lock_folder(copied):
        page = visit(copied, view="run", text=TEXT)
        run_status, far = page.get_by_test_id("run-state"), page.get_by_test_id("run-far")
        expect(run_status).to_have_text("running")
        expect(far).to_contain_text("step 30 of 60")
        page.get_by_text("the values as a table").click()
        steps = page.locator("[data-testid=run-values] tbody th")
        journal.write(31, loss=1.25, lr=0.001, grad_norm=1.0, n_targets=700, tokens_per_second=384.0)
        expect(far).to_contain_text("step 31 of 60")
        expect(far).to_contain_text("about 29 s left")  # 29 steps of 384 tokens
        assert value(page, "at-loss") == 1.25
        assert value(page, "now-loss") == 1.25
        expect(steps).to_have_text([str(step) for step in range(1, 32)])  # old ones stay, new ones join
    expect(run_status).to_have_text("stopped")
    journal.truncate(21)
    with lock_folder(copied):
        journal.write(21, loss=2.5, lr=0.001, grad_norm=1.0)
        expect(far).to_contain_text("step 21 of 60")
        assert value(page, "at-loss") == 2.5
        expect(steps).to_have_text([str(step) for step in range(1, 22)])
    shutil.move(copied / "later", copied / "model")
    expect(run_status).to_have_text("finished")


def test_new_samples_and_head_scores_appear(copied: Path, visit: Visit) -> None:
    shutil.move(copied / "model", copied / "later")
    page = visit(copied, view="run", text=TEXT)
    assert page.get_by_test_id("samples-1").get_attribute("data-step") == "60"
    written = lines(copied / "samples.jsonl")[-1]["samples"]
    hostile = "<img src=x onerror=alert(1)> \u202e\x1b[31m"
    Journal(copied / "samples.jsonl").write(70, samples=[{**written[0], "text": hostile}])
    probes = lines(copied / "probes.jsonl")[-1]
    del probes["step"]
    Journal(copied / "probes.jsonl").write(70, **{**probes, "induction": [[0.5] * 4] * 2})
    expect(page.get_by_test_id("samples-1")).to_have_attribute("data-step", "70")
    expect(page.get_by_test_id("samples-1")).to_contain_text("<img src=x onerror=alert(1)> \\u202e\\x1b[31m")
    expect(page.get_by_test_id("cell-1-2")).to_have_attribute("data-value", "0.5")


def test_a_run_without_checkpoints(copied: Path, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "probes.jsonl"):
        (copied / name).unlink()
    for name in ("model", "checkpoints"):
        shutil.rmtree(copied / name)
    with lock_folder(copied):
        page = visit(copied, view="run", text=TEXT)
        picture(page, "run-begun")
        expect(page.get_by_test_id("run-far")).to_contain_text("step 0 of 60")
        expect(page.get_by_text("No samples yet")).to_be_visible()
        expect(page.get_by_text("No head scores yet")).to_be_visible()


def test_a_long_run(copied: Path, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    with (copied / "metrics.jsonl").open("w") as file:
        for step in range(1, 30_001):
            spike = 9.0 if step == 12_345 else 0.0
            entry = {"step": step, "loss": 6 / (1 + step / 900) + (step * 7919 % 101) / 300 + spike}
            entry |= {"lr": 1e-3 * (1 - step / 30_000), "grad_norm": 1 + (step * 104_729 % 997) / 900}
            if step % 1500 == 0:
                entry["validation_loss"] = 6 / (1 + step / 900) + 0.2
            file.write(json.dumps(entry) + "\n")
    page = visit(copied, view="run", text=TEXT)
    picture(page, "run-long")
    journal = {line["step"]: line["loss"] for line in lines(copied / "metrics.jsonl")}
    page.get_by_test_id("chart-loss").get_by_role("slider").focus()
    page.keyboard.press("Home")
    told = page.get_by_test_id("run-status").inner_text()
    assert told.startswith("steps 1 to 31")  # 30,000 // 32 is below 1,000, and 30,000 // 16 is not
    assert value(page, "at-loss") == pytest.approx(sum(journal[step] for step in range(1, 32)) / 31, rel=1e-12)
    band = page.get_by_test_id("chart-loss").locator("path.chart-band")
    assert band.count() >= 1  # which has the spike that a mean would hide


# Inside


def test_samples_over_time(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    written = lines(run_folder / "samples.jsonl")
    for side, line in ((0, written[0]), (1, written[-1])):
        shown = page.get_by_test_id(f"samples-{side}")
        assert shown.get_attribute("data-step") == str(line["step"])
        expect(shown).to_contain_text(line["samples"][0]["prompt"].strip())
    page.get_by_test_id("sample-step-0").locator("input").press("ArrowRight")
    settle(page)
    assert state(page)["run_left"] == str(written[1]["step"])
    expect(page.get_by_test_id("samples-0")).to_have_attribute("data-step", str(written[1]["step"]))
    page.get_by_test_id("look-at-sample-0").click()
    settle(page)
    assert state(page)["checkpoint"] == f"step {written[1]['step']}"
    expect(page.get_by_test_id("samples-0")).to_have_attribute("data-step", str(written[1]["step"]))  # stays


def test_heads_over_time(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    written = lines(run_folder / "probes.jsonl")
    for title, name in (("entropy", "entropy"), ("previous token", "previous_token"), ("induction", "induction")):
        page.get_by_role("radio", name=title).click()
        settle(page)
        for layer in range(2):
            for head in range(4):
                values = page.get_by_test_id(f"cell-{layer}-{head}").get_attribute("data-values") or ""
                assert json.loads(values) == [line[name][layer][head] for line in written]
    page.get_by_test_id("cell-1-3").click()
    settle(page)
    assert (state(page)["layer"], state(page)["head"]) == ("1", "3")
    expect(page.get_by_test_id("cell-1-3")).to_have_attribute("aria-pressed", "true")


def test_layers_over_time(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    last = lines(run_folder / "probes.jsonl")[-1]
    assert [value(page, f"lens-{layer}") for layer in range(3)] == last["logit_lens"]


def test_comparison_of_two_checkpoints(run_folder: Path, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    page = visit(run_folder, view="run", text=TEXT)
    page.get_by_test_id("compare-one").select_option("step 0")
    page.get_by_test_id("compare-other").select_option("final")
    page.get_by_test_id("compare").click()
    settle(page)
    picture(page, "run-compared")
    assert (state(page)["checkpoint"], state(page)["compare_with"]) == ("step 0", "final")
    folders = {one.name: one.folder for one in list_checkpoints(run_folder)}
    (one, tok), (other, _) = gh.load(folders["step 0"]), gh.load(folders["final"])
    seen = gh.compare(one, other, TEXT, tok=tok)
    assert value(page, "loss-one") == pytest.approx(seen.loss_a.nanmean().item(), rel=1e-6)
    assert value(page, "loss-other") == pytest.approx(seen.loss_b.nanmean().item(), rel=1e-6)
    cells = page.locator("[data-testid=apart] tbody tr").all()
    for row, layer in zip(cells, (1, 0), strict=True):
        found = [float(cell.get_attribute("data-value") or "") for cell in row.locator("td").all()]
        assert found[:4] == pytest.approx(seen.pattern_distance[layer].tolist(), rel=1e-6)
        assert found[4] == pytest.approx(seen.residual_distance[layer + 1].mean().item(), rel=1e-5)
    words = page.locator("[data-testid=divergence] .token")
    found = [float(word.get_attribute("data-value") or "") for word in words.all()]
    assert found == pytest.approx(seen.kl_divergence[0].tolist(), rel=1e-6)
    assert page.get_by_test_id("chart-loss").count() == 1  # the run is one
    page.locator("#tab-tokens").click()
    settle(page)
    assert page.locator(".pane").count() == 2  # and all other views show both
    page.locator("#tab-run").click()
    settle(page)
    page.get_by_test_id("compare-stop").click()
    settle(page)
    assert "compare_with" not in state(page)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["encoder", "pair"])
def test_other_kinds(kind: str, tmp_path: Path, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    if kind == "pair":
        rows = [f"{number}\t{' '.join(str(number))}" for number in range(10, 210)]
        (tmp_path / "data.tsv").write_text("source\ttarget\n" + "\n".join(rows) + "\n")
        data: dict[str, object] = {"path": str(tmp_path / "data.tsv"), "kind": "pairs"}
    else:
        (tmp_path / "data.txt").write_text(POEM * 10)
        data = {"path": str(tmp_path / "data.txt")}
    folder = _train(
        tmp_path,
        {
            "model": {"preset": "tiny-seq2seq" if kind == "pair" else "tiny-encoder"},
            "data": {**data, "seq_len": 24, "vocab_size": 280},
            "train": {"steps": 12, "batch_tokens": 384, "lr": 5e-3},
        },
    )
    page = visit(folder, view="run", text="31" if kind == "pair" else TEXT)
    picture(page, f"run-{kind}")
    last = lines(folder / "samples.jsonl")[-1]["samples"]
    for number, name in enumerate(["prompt", "text", "reference"]):
        shown = page.get_by_test_id("samples-1").locator("dd").nth(number)
        assert " ".join(shown.inner_text().split()) == " ".join((last[0][name] or "(nothing)").split())
    cell = page.get_by_test_id("cell-0-1").get_attribute("data-value")
    assert float(cell or "") == lines(folder / "probes.jsonl")[-1]["entropy"][0][1]


def test_only_for_runs(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="run", text=TEXT)
    assert page.locator("#tab-run").count() == 0


def test_a_saved_page_shows_the_run(run_folder: Path, browser: Browser, tmp_path: Path) -> None:
    given = {"text": TEXT, "view": "run", "checkpoint": "step 0", "compare_with": "final"}
    Look(TraceCache(ModelLoader(run_folder)), given).save(tmp_path / "page.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    settle(page)
    assert not page.locator(".pane > .trouble").first.is_visible()
    assert value(page, "at-loss") == lines(run_folder / "metrics.jsonl")[-1]["loss"]
    assert page.get_by_test_id("apart").count() == 1
    page.get_by_role("radio", name="logarithmic").click()
    settle(page)
    assert not page.locator(".pane > .trouble").first.is_visible()
    assert not troubles
    context.close()


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, True)])
def test_it_fits(
    run_folder: Path, visit: Visit, picture: Callable[[Page, str], Path], width: int, dark: bool
) -> None:
    page = visit(run_folder, view="run", text=TEXT, width=width, dark=dark, run_step=40)
    picture(page, f"run-{width}{'-dark' if dark else ''}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


# The plan


def test_the_plan_is_that_of_the_command_beside_what_was_measured(
    run_folder: Path, visit: Visit, picture: Callable[[Page, str], Path]
) -> None:
    planner = gh.training.plan
    page = visit(run_folder, view="run", text=TEXT)
    picture(page, "run-plan")
    for gpu in ("h200", "rtx4090"):
        page.get_by_test_id("plan-gpu").select_option(gpu)
        plan = planner.plan_training(gh.Run.load(run_folder), planner.find_gpu(gpu))
        expect(page.get_by_test_id("plan-sentence")).to_contain_text(f"on 1 x {gpu}: ")
        parts = page.locator("[data-testid=plan-parts] [data-part]")
        shown = {one.get_attribute("data-part"): one.get_attribute("data-value") for one in parts.all()}
        assert shown == {name: str(size) for name, size in plan.memory.parts.items() if size}
        assert value(page, "planned-speed") == pytest.approx(plan.tokens_per_second)
        assert value(page, "planned-memory") == pytest.approx(plan.memory.peak / 2**30)
    last = lines(run_folder / "metrics.jsonl")[-1]
    assert value(page, "measured-speed") == last["tokens_per_second"]
    assert "run_gpu=rtx4090" in page.url


def test_a_run_whose_model_is_gone_has_no_plan_but_the_rest(copied: Path, visit: Visit) -> None:
    table = config.read(copied / "run.toml") | {"model": {"from": "gone"}}
    (copied / "run.toml").write_text(config.to_toml(table))
    page = visit(copied, view="run", text=TEXT)
    expect(page.locator(".placeholder", has_text="gone")).to_be_visible()
    expect(page.get_by_test_id("run-far")).to_contain_text("step 60")
