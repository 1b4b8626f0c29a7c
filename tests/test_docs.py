"""What the documents promise about themselves."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import sys
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


@pytest.mark.parametrize("name", ["benchmarks.md", "performance.md"])
def test_every_section_of_figures_says_which_command_and_which_day(name: str) -> None:
    _, *sections = re.split(r"^## ", (DOCS / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections
    for section in sections:
        title = section.partition("\n")[0]
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), f"{name}, {title!r}: no date"
        assert re.search(r"`[^`]*(make|python|glasshouse|benchmarks/)[^`]*`|script outside", section), (
            f"{title!r}: no command"
        )


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
    ("prefix caching", "docs/decisions.md"),
    ("chunked prefill", "docs/performance.md"),
    ("quantiz", "docs/performance.md"),
    ("Muon", "docs/decisions.md"),
    ("grouped-query", "docs/claims.md"),
    ("attention sink", "docs/claims.md"),
]


def test_a_search_for_a_term_finds_the_page_where_it_belongs() -> None:
    for term, page in TERMS:
        text = " ".join((DOCS.parent / page).read_text(encoding="utf-8").split())
        assert term.lower() in text.lower(), f"{page}: {term}"


# The generated reference


def _generator() -> ModuleType:
    found = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["generate_reference"] = module
    found.loader.exec_module(module)
    return module


GENERATOR = _generator()


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

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


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
    word = {8: "eight", 9: "nine", 10: "ten"}[len(VIEWS)]
    assert f"| {word} views" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{word.capitalize()} views share" in (DOCS / "guides" / "looking-inside.md").read_text(encoding="utf-8")


def test_links_and_anchors_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert len(pages) > 30
    assert not [broken for page in pages for broken in _broken_links(page, page.read_text(encoding="utf-8"))]
