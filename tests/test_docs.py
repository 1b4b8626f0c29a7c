"""What the documents promise about themselves."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import source

import glasshouse as gh
from glasshouse.config import Settings
from glasshouse.page.manifest import VIEWS
from glasshouse.training.run import Data, Train

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES = ROOT / "src" / "glasshouse" / "training" / "recipes"
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def _load(file: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    found.loader.exec_module(module)
    return module


# Measured figures

FIGURES = _load(DOCS / "generate_figures.py")
MEASURE = r"%| times\b| tokens/s| s\b| seconds\b| minutes\b| ms\b| [MG]i?B\b| BLEU| chrF| bits per byte| nats"


def test_the_pages_quote_the_figures_of_the_file() -> None:
    stale = "run docs/generate_figures.py, or make docs"
    assert (DOCS / "figures.md").read_text(encoding="utf-8") == FIGURES.figures_page(), stale
    for page in FIGURES.QUOTING:
        text = page.read_text(encoding="utf-8")
        assert len(FIGURES.QUOTED.findall(text)) > 10
        assert text == FIGURES.filled(text), f"{page.name}: {stale}"


def test_a_figure_is_written_with_its_digits() -> None:
    page = "[?](figures.md#some.speed), [](docs/figures.md#some.share), [text](figures.md)"
    one = {"value": 518197, "digits": 0, "unit": "tokens/s"}, {"value": 58.8, "digits": 2, "unit": "%"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FIGURES, "figures", lambda: {"some.speed": one[0], "some.share": one[1]})
        filled = FIGURES.filled(page)
    assert filled == "[518,197](figures.md#some.speed), [58.80%](docs/figures.md#some.share), [text](figures.md)"


@pytest.mark.parametrize("page", FIGURES.QUOTING, ids=lambda page: page.stem)
def test_no_page_states_a_measured_number_of_its_own(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    text = re.sub(r"\[[^]]*\]\([^)]*\)", "[]", text)
    text = re.sub(r"80 MB|4 MB|498 MB|28\.6 MB|1\.95 MB", "", text)  # what was measured on
    assert not re.findall(rf"\d(?:[\d.,]*\d)?(?:{MEASURE})", text)


def test_every_figure_has_its_machine_command_and_date() -> None:
    for name, figure in FIGURES.figures().items():
        assert {"what", "value", "digits", "unit", "machine", "command", "date"} <= figure.keys(), name
        assert isinstance(figure["date"], datetime.date), name
        assert figure["machine"], name
        section = name.partition(".")[0]
        if figure["command"].startswith("benchmarks/"):
            assert figure["command"].split()[0] == f"benchmarks/{section}.py", name
            script = (ROOT / "benchmarks" / f"{section}.py").read_text(encoding="utf-8")
            assert "save(" in script, f"{section}.py does not write its figures"


def test_a_benchmark_saves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = _load(ROOT / "benchmarks" / "figures.py")
    file = tmp_path / "figures.toml"
    file.write_text('[one.speed]\nwhat = "a speed"\ngoal = 5\nvalue = 1\nlow = 0\n[two.kept]\nvalue = 3\n')
    monkeypatch.setattr(sys, "argv", ["elsewhere/one.py", "--rounds", "3", "--save", str(file)])
    benchmark.record("one.speed", [3.04, 1.0, 2.26], 1, "s")
    benchmark.record("one.share", 0.5879, 1, "%")
    benchmark.record("one.many", [5, 1, 9, 3, 7, 11, 13], 0)  # quartiles 4 and 10
    benchmark.save(file)
    found = tomllib.loads(file.read_text())
    speed = found["one"]["speed"]
    assert speed.pop("date") == datetime.datetime.now(tz=datetime.UTC).date()
    assert "torch" in speed.pop("machine")
    measured = {"value": 2.3, "low": 1.0, "high": 3.0, "digits": 1, "unit": "s"}
    assert speed == {"what": "a speed", "goal": 5, "command": "benchmarks/one.py --rounds 3"} | measured
    assert found["one"]["share"]["value"] == 58.8
    assert [found["one"]["many"][key] for key in ("low", "value", "high")] == [4, 7, 10]
    assert found["two"] == {"kept": {"value": 3}}


@pytest.mark.parametrize("page", sorted((DOCS / "lab").glob("*.md")), ids=lambda page: page.stem)
def test_every_section_of_the_lab_notes_says_which_command_and_which_day(page: Path) -> None:
    _, *sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections or page.stem == "index"
    for section in sections:
        title = section.partition("\n")[0]
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), f"{title!r}: no date"
        assert re.search(r"`[^`]*(make|python|glasshouse|benchmarks/)[^`]*`|scripts? outside", section), (
            f"{title!r}: no command"
        )


def test_every_decision_has_its_date_context_and_consequence() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    assert len(pages) > 10
    for page in pages:
        _, *decisions = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert decisions
        for decision in decisions:
            title, _, rest = decision.partition("\n")
            assert re.match(r"\n\*20\d\d-\d\d-\d\d", rest), f"{page.name}, {title!r}: no date"
            parts = re.findall(r"^\*\*(\w+)\.\*\*", rest, re.MULTILINE)
            assert parts == ["Context", "Decision", "Consequence"], f"{page.name}, {title!r}: {parts}"


# Terms

TERMS = [
    ("gradient accumulation", "docs/guides/own-corpus.md"),
    ("exponential moving average", "docs/guides/own-corpus.md"),
    ("activation checkpointing", "docs/reference/settings.md"),
    ("mixed precision", "docs/guides/own-corpus.md"),
    ("MFU", "docs/getting-started.md"),
    ("label smoothing", "docs/reference/settings.md"),
    ("LoRA", "docs/guides/own-corpus.md"),
    ("sequence packing", "docs/guides/tokenizers-and-data.md"),
    ("KV cache", "docs/guides/generation.md"),
    ("continuous batching", "docs/guides/generation.md"),
    ("speculative decoding", "docs/guides/generation.md"),
    ("beam search", "docs/guides/generation.md"),
    ("logit lens", "docs/inspection.md"),
    ("activation patching", "docs/inspection.md"),
    ("ablation", "docs/inspection.md"),
    ("logit attribution", "docs/inspection.md"),
    ("induction", "docs/inspection.md"),
    ("residual stream", "docs/look.md"),
    ("prefix caching", "docs/decisions/generation.md"),
    ("chunked prefill", "docs/performance.md"),
    ("quantiz", "docs/performance.md"),
    ("Muon", "docs/decisions/layers.md"),
    ("grouped-query", "docs/claims.md"),
    ("attention sink", "docs/claims.md"),
]


def test_a_search_for_a_term_finds_the_page_where_it_belongs() -> None:
    for term, page in TERMS:
        text = " ".join((DOCS.parent / page).read_text(encoding="utf-8").split())
        assert term.lower() in text.lower(), f"{page}: {term}"


# The generated reference


GENERATOR = _load(DOCS / "generate_reference.py")


@pytest.mark.parametrize("name", list(GENERATOR.PAGES))
def test_the_reference_is_what_the_program_says_today(name: str) -> None:
    written = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[name](), "run docs/generate_reference.py, or make docs"


def _every_settings_class(parent: type = Settings) -> Iterator[type]:
    for one in parent.__subclasses__():
        yield one
        yield from _every_settings_class(one)


def test_every_setting_is_in_the_reference_with_a_meaning() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    packages = ("glasshouse.spec.", "glasshouse.training.", "glasshouse.data.", "glasshouse.layers.")
    classes = [one for one in _every_settings_class() if one.__module__.startswith(packages)]
    assert {Data, Train, gh.spec.DecoderSpec, gh.spec.YarnScaling} <= {*classes}
    checked = 0
    for owner in filter(dataclasses.is_dataclass, classes):
        if owner.__name__.startswith("_") or owner is gh.SamplingParams:
            continue
        for setting in GENERATOR.fields(owner):
            checked += 1
            where = f"{owner.__name__}.{setting.name}"
            assert len(setting.meaning) > 5, f"{where} has no comment that says what it means"
            rows = (row for row in page.splitlines() if row.startswith(f"| `{setting.name}` |"))
            meaning = GENERATOR.row_of([setting.meaning])
            assert any(row.endswith(meaning) for row in rows), f"{where} is not in the reference"
    assert checked > 100


def test_the_reference_has_every_preset_recipe_and_command() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in gh.presets())
    assert all(f"### {path.stem}\n" in page for path in RECIPES.glob("*.toml"))
    commands = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    for module in (ROOT / "src/glasshouse/cli").glob("*.py"):
        for option in {*re.findall(r'"(--[a-z][a-z0-9-]+)"', module.read_text(encoding="utf-8"))} - {"--help"}:
            assert f"`{option}`" in commands, f"{module.name}: {option}"


# Errors


def test_every_message_in_troubleshooting_is_one_of_the_program() -> None:
    literals = set()
    for path in (ROOT / "src/glasshouse").rglob("*.py"):
        for node in ast.walk(source.parse(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.add(node.value)
    rows = re.findall(r"^\| `(.*?)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        for part in filter(str.strip, row.split("…")):
            assert any(part.strip() in literal for literal in literals), f"{row!r}: no error says {part!r}"


# Links


def _anchors(page: Path) -> set[str]:
    """Return the ids of a page as the site has them: given ones, those of headings and of documented names."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = {*re.findall(r"\{ ?#([\w.-]+) ?\}", text), *re.findall(r'\bid="([^"]+)"', text)}
    found |= {*re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    for heading in re.findall(r"^#+ (.+?)(?: \{[^}]*\})?$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def _broken_links(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            yield f"{page.relative_to(ROOT)}: {target}"


def test_the_number_of_views_is_that_of_the_page() -> None:
    word = {8: "eight", 9: "nine", 10: "ten", 11: "eleven"}[len(VIEWS)]
    assert f"| {word} views" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{word.capitalize()} views share" in (DOCS / "guides" / "looking-inside.md").read_text(encoding="utf-8")


def test_links_and_anchors_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert len(pages) > 30
    assert not [broken for page in pages for broken in _broken_links(page, page.read_text(encoding="utf-8"))]
