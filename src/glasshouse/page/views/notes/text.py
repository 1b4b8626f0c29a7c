"""Figures of text to ids: T1 to T6."""

from __future__ import annotations

import pydoc_data.topics
import re
from collections import Counter
from functools import cache

from glasshouse import notes
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.escaping import show_whitespace
from glasshouse.models import check_tokenizer
from glasshouse.page.views.notes.figure import (
    LIMIT,
    Control,
    Figure,
    Scene,
    bars,
    bundled,
    facts,
    lines,
    sentence,
    table,
    token_labels,
    tokens,
)
from glasshouse.text import Tokenizer
from glasshouse.text.bpe import algorithm as bpe
from glasshouse.text.bpe import pretokenizer

CHARACTERS = 12  # shown of a text
MERGES = Control("merges", 12, 0, 60)


def text_of(scene: Scene) -> str:
    """Return the text of the page, or what its ids decode to."""
    text = scene.trace.forward_pass.prompt.text
    return text or (scene.trace.tok.decode(scene.trace.ids) if scene.trace.tok else notes.EXAMPLES[0].text)


def tokenizer_of(scene: Scene) -> tuple[Tokenizer, list[JsonDict]]:
    """Return the model's tokenizer, or a bundled one where it has none."""
    if scene.trace.tok is not None:
        return scene.trace.tok, []
    tok = bundled("python-3m").tok
    assert tok is not None
    return tok, [sentence("The open model has no tokenizer; this shows that of python-3m.")]


@cache
def manual_words() -> frozenset[str]:
    """Return the words of the manual that comes with Python."""
    return frozenset(word for text in pydoc_data.topics.topics.values() for word in str(text).split())


def bytes_and_ids(scene: Scene) -> list[JsonDict]:
    """T1."""
    tok, why = tokenizer_of(scene)
    text = text_of(scene)
    raw = text.encode(errors="surrogatepass")
    ids = tok.encode(raw, add_special_tokens=False)
    samples = [*dict.fromkeys([*"aé中😀", *text])][:CHARACTERS]
    return [
        *why,
        tokens("the text as tokens", ((one, False) for one in token_labels(ids[:LIMIT], tok))),
        facts(
            ("characters", len(text)),
            ("bytes", len(raw)),
            ("tokens", len(ids)),
            ("decoded, the same bytes", "yes" if tok.decode_bytes(ids) == raw else "no"),
        ),
        table(
            "characters in UTF-8: one to four bytes",
            ["character", "code point", "bytes", "their values"],
            (
                [show_whitespace(raw), f"U+{ord(one):04X}", len(raw), " ".join(map(str, raw))]
                for one in samples
                for raw in [one.encode(errors="replace")]
            ),
        ),
    ]


def another_tokenizer(scene: Scene) -> list[JsonDict]:
    """T2."""
    tok, why = tokenizer_of(scene)
    other = next(
        found
        for name in ("dates-1m", "python-3m")
        if (found := bundled(name).tok) is not None and found.fingerprint != tok.fingerprint
    )
    ids = tok.encode(text_of(scene), add_special_tokens=False)[:LIMIT]
    try:
        check_tokenizer(scene.model, other)
        said = "A newly built model has no tokenizer of its own yet, and takes any that fits."
    except GlasshouseError as error:
        said = f"Refused: {error}"
    return [
        *why,
        tokens("these ids under the model's tokenizer", ((one, False) for one in token_labels(ids, tok))),
        tokens("the same ids under another", ((one, False) for one in token_labels(ids, other))),
        facts(("tokenizer", tok.fingerprint[:12]), ("the other", other.fingerprint[:12])),
        sentence(said),
    ]


def three_tokenizations(scene: Scene) -> list[JsonDict]:
    """T3."""
    tok, why = tokenizer_of(scene)
    text = text_of(scene)
    words, known = text.split(), manual_words()
    unknown = [word for word in words if word not in known]
    ids = tok.encode(text, add_special_tokens=False)

    def first(count: int) -> str:
        return f", the first {LIMIT} of {count}" if count > LIMIT else ""

    return [
        *why,
        table(
            "three ways to cut this text",
            ["tokens", "vocabulary", "length", "unknown words"],
            [
                ["bytes", 256, len(text.encode(errors="replace")), 0],
                ["BPE (this tokenizer)", len(tok), len(ids), 0],
                ["words of Python's manual", len(known), len(words), len(unknown)],
            ],
        ),
        tokens(
            f"bytes{first(len(text.encode(errors='replace')))}",
            ((show_whitespace(bytes([one])), False) for one in text.encode(errors="replace")[:LIMIT]),
        ),
        tokens(f"BPE tokens{first(len(ids))}", ((one, False) for one in token_labels(ids[:LIMIT], tok))),
        tokens(f"words{first(len(words))}; marked: unknown", ((word, word not in known) for word in words[:LIMIT])),
    ]


def words_of(scene: Scene) -> list[bytes]:
    """Return the words of the text, within which pairs are merged."""
    return [one.encode(errors="replace") for one in pretokenizer.split(text_of(scene), "gpt2")]


def learned(scene: Scene, count: int) -> list[bpe.Merge]:
    """Return the merges that BPE learns from the text, at most so many."""
    return list(bpe.learn(Counter(words_of(scene)), 256 + count))


def merges(scene: Scene) -> list[JsonDict]:
    """T4."""
    split = words_of(scene)
    now = [[bytes([byte]) for byte in one] for one in split]
    made = learned(scene, int(scene.value))
    for merge in made:
        now = [bpe.merge_pair(one, merge.pair, merge.pair[0] + merge.pair[1]) for one in now]
    flat = [one for word in now for one in word]
    return [
        tokens(f"after {len(made)} merges", ((show_whitespace(one), len(one) > 1) for one in flat[: 2 * LIMIT])),
        facts(("bytes", sum(map(len, split))), ("tokens", len(flat)), ("vocabulary", 256 + len(made))),
        table(
            "the last merges, most frequent pair first",
            ["merge", "pair", "occurs"],
            (
                [number + 1, " + ".join(show_whitespace(half) for half in merge.pair), merge.count]
                for number, merge in list(enumerate(made))[-8:]
            ),
        ),
    ]


def characters_per_token(scene: Scene) -> list[JsonDict]:
    """T5."""
    tok, why = tokenizer_of(scene)
    text = text_of(scene)
    ids = tok.encode(text, add_special_tokens=False)
    points = re.findall(r"([\d.]+) at ([\d,]+)", notes.statement("T5").measured)
    sizes = [float(size.replace(",", "")) for _, size in points]
    each = [
        (f"this tokenizer ({len(tok):,} tokens)", len(text) / max(1, len(ids))),
        ("bytes", len(text) / max(1, len(text.encode(errors="replace")))),
        ("words", len(text) / max(1, len(text.split()))),
    ]
    return [
        *why,
        bars("characters per token of this text", each),
        lines(
            "characters per token of English, by the size of the vocabulary (measured)",
            "tokens in the vocabulary",
            [("characters per token", sizes, [float(one) for one, _ in points])],
        ),
    ]


def typo(scene: Scene) -> list[JsonDict]:
    """T6."""
    tok, why = tokenizer_of(scene)
    text = text_of(scene)
    at = min(int(scene.value), len(text) - 1)
    wrong = text[:at] + ("q" if text[at] != "q" else "z") + text[at + 1 :]
    cut = {
        "bytes": [[*one.encode(errors="replace")] for one in (text, wrong)],
        "BPE tokens": [tok.encode(one, add_special_tokens=False) for one in (text, wrong)],
        "words": [one.split() for one in (text, wrong)],
    }
    counts = {name: changed(*both) for name, both in cut.items()}
    first, last = counts["BPE tokens"]
    ids = cut["BPE tokens"][1]
    known = manual_words()
    before, after = cut["words"]
    start, end = counts["words"]
    new, old = after[start:end], before[start : len(before) - len(after) + end]

    def meaning(words: list[str]) -> str:
        return "known" if all(word in known for word in words) else "unknown"

    return [
        *why,
        tokens(
            "BPE tokens of the text with the typo; marked: those that the typo changed",
            ((one, first <= i < last) for i, one in enumerate(token_labels(ids[: 2 * LIMIT], tok))),
        ),
        bars("ids that one wrong letter changes", ((name, end - start) for name, (start, end) in counts.items())),
        facts(
            ("letter", at),
            ("the word", " ".join(old)),
            ("among the words of Python's manual", meaning(old)),
            ("with the typo", " ".join(new)),
            ("among them", meaning(new)),
        ),
    ]


def changed(before: list[object], after: list[object]) -> tuple[int, int]:
    """Return where the tokens of the second sequence begin and stop to differ.

    >>> changed([1, 2, 3], [1, 7, 8, 3])
    (1, 3)
    """
    most = min(len(before), len(after))
    first = next((i for i in range(most) if before[i] != after[i]), most)
    same = next((i for i in range(most - first) if before[-1 - i] != after[-1 - i]), most - first)
    return first, len(after) - same


FIGURES = {
    "T1": Figure(bytes_and_ids, ("pass",)),
    "T2": Figure(another_tokenizer, ("pass",)),
    "T3": Figure(three_tokenizations, ("pass",)),
    "T4": Figure(merges, ("pass",), MERGES, limit=lambda scene: len(learned(scene, int(MERGES.high)))),
    "T5": Figure(characters_per_token, ("pass",)),
    "T6": Figure(typo, ("pass",), Control("the wrong letter", 4, 0, 80), limit=lambda scene: len(text_of(scene)) - 1),
}
