"""Writes docs/claims.md, docs/notes.md and docs/glossary.md from src/glasshouse/notes/; `make docs` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from glasshouse import notes

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate_notes.py from src/glasshouse/notes/; `make docs` writes it again. -->\n"
CLAIMS = """# Claims about transformers and the tests that check them

Each numbered statement about transformers below is checked numerically; the view Notes of [the page](look.md#notes) draws each of them on a model of yours, and [the notes](notes.md) list them as the lectures go. Most checks are tests in `tests/claims/` whose names start with the statement's number and which compare with a slow, obvious reference written in the test; `make test` runs them, and `python -m pytest tests/claims -s` prints the measured values; they run in float64 with a tolerance of 1e-12 of the largest entry unless stated otherwise. V1 alone is not checked there but in a browser, in `tests/page/`. What needs training is checked by `make claims` (`benchmarks/claims.py`, one to two hours on two cores; it resumes where it stopped): it runs the tests and the experiments of `benchmarks/trained_claims/`, compares their figures with the thresholds of `src/glasshouse/notes/`, and fails if a statement does not hold as it is written here. No experiment passes without training, or without the mechanism that it is about (`tests/claims/test_null_experiments.py`). What attention heads learn (A11) is reported head by head by `python benchmarks/attention_heads.py`. ± is the standard deviation over seeds.
"""  # noqa: E501
NOTES = """# The notes, live

The statements of the lectures about transformers that this program was founded on, from text to text, each with the check that holds it and the line of code that does it. `glasshouse look` draws them on the model that is open, in the view Notes; a card has an address of its own, such as `#notes/A3`, and

```
glasshouse notes --save lecture.html
```

writes all of them as one offline page, and `--card A1,A3,M4` these three in this order; sliders work in it, and printed it is a hand-out. [Claims](claims.md) has the tables with everything that was measured. "Read" names sections of Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (2017), and of Jurafsky & Martin, [Speech and Language Processing](https://web.stanford.edu/~jurafsky/slp3/) (third edition, draft of January 2026), whose chapters are named by their titles, as their numbers change.
"""  # noqa: E501

GLOSSARY = """# Glossary

The terms of the field, as this program and its documentation use them.
"""


def claims_page() -> str:
    """Return docs/claims.md: a table of statements for each part."""
    blocks = [CLAIMS]
    for part in notes.parts():
        blocks.append(f"## {part.heading}\n")
        if part.about:
            blocks.append(f"{part.about}\n")
        rows = [
            f"| {one.number} | {one.says} | {one.shown_by} | {_measured(one)} |".replace("|  |", "| |")
            for one in part.statements
        ]
        blocks.append("\n".join(["| | Statement | Shown by | Measured |", "|---|---|---|---|", *rows]) + "\n")
        if part.details:
            blocks.append(f"{part.details}\n")
    return NOTE + "\n".join(blocks)


def _measured(one: notes.Statement) -> str:
    """Return what was measured: in words, and by `make claims` beside its thresholds."""
    found = notes.measurements().get(one.number)
    if found is None:
        return one.measured
    figures = "; ".join(map(str, notes.verdicts(one, found.figures))).replace("|", "\\|")
    return "; ".join(filter(None, (one.measured, f"`make claims`, {found.on}: {figures}")))


def notes_page() -> str:
    """Return docs/notes.md: a section for each statement, and the questions of each part."""
    blocks = [NOTES]
    for part in notes.parts():
        blocks.append(f"## {part.title}\n")
        for one in part.statements:
            blocks.extend(_card(part, one))
        if part.questions:
            blocks.append(f"### Questions: {part.title.lower()}\n")
        blocks.extend(
            f"<details><summary>{one.ask}</summary><p>{one.answer} ({one.card})</p></details>\n"
            for one in part.questions
        )
    return NOTE + "\n".join(blocks)


def _card(part: notes.Part, one: notes.Statement) -> Iterator[str]:
    yield f"### {one.number}: {one.title}\n"
    yield f"*{one.why}*\n"
    yield f"{one.says}.\n"
    if one.slip:
        yield f"**A common slip:** {one.slip}\n"
    if said := _measured(one):
        yield f"Measured ({part.measured_on}): {said}.\n"
    yield f"Shown by {one.shown_by}.\n"
    if one.read:
        yield f"Read: {'; '.join(one.read)}.\n"
    yield f"Code: `{one.code.replace(':', '.')}`" + (f": `{one.line}`\n" if one.line else "\n")


def glossary_page() -> str:
    """Return docs/glossary.md: a section for each term."""
    blocks = [GLOSSARY]
    for one in notes.glossary():
        blocks.append(f"## {one.term} {{#{one.anchor}}}\n")
        blocks.append(f"{one.text}" + (f" *Also: {', '.join(one.also)}.*\n" if one.also else "\n"))
    return NOTE + "\n".join(blocks)


PAGES: dict[str, Callable[[], str]] = {
    "claims.md": claims_page,
    "notes.md": notes_page,
    "glossary.md": glossary_page,
}


def main() -> None:
    """Write the pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
