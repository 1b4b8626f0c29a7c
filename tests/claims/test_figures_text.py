"""Figures of text to ids, T1 to T6, beside plain loops over characters, bytes and words."""

from __future__ import annotations

import pydoc_data.topics

import regex

import glasshouse as gh
from claims.figures import LIMIT, Drawn, labels, near, on, opened
from glasshouse import notes
from glasshouse.escaping import show_whitespace


def tokenizer(drawn: Drawn) -> gh.Tokenizer:
    """Return the tokenizer that is shown, and check that a borrowed one is named."""
    if drawn.model.tok is not None:
        assert not [text for text in drawn.texts if "has no tokenizer;" in text]
        return drawn.model.tok
    assert drawn.texts[0] == "The open model has no tokenizer; this shows that of python-3m."
    tok = opened("python-3m").tok
    assert tok is not None
    return tok


def utf8(character: str) -> list[int]:
    """Encode a character by the bits of its code point."""
    code = ord(character)
    if code < 0x80:
        return [code]
    if code < 0x800:
        return [0xC0 | code >> 6, 0x80 | code & 63]
    if code < 0x10000:
        return [0xE0 | code >> 12, 0x80 | code >> 6 & 63, 0x80 | code & 63]
    return [0xF0 | code >> 18, 0x80 | code >> 12 & 63, 0x80 | code >> 6 & 63, 0x80 | code & 63]


def unmarked(names: list[str]) -> list[tuple[str, bool]]:
    return [(name, False) for name in names]


def known_words() -> set[str]:
    return {word for text in pydoc_data.topics.topics.values() for word in text.split()}


@on("T1", "python-3m", "gpt2", "framed")
def test_figure_t1(drawn: Drawn) -> None:
    tok, text = tokenizer(drawn), drawn.model.prompt.text
    ids = tok.encode(text, add_special_tokens=False)
    ((title, shown),) = drawn.tokens
    assert (title, shown) == ("the text as tokens", unmarked(labels(ids, tok)[:LIMIT]))
    assert drawn.facts == {
        "characters": len(text),
        "bytes": sum(len(utf8(one)) for one in text),
        "tokens": len(ids),
        "decoded, the same bytes": "yes",
    }
    (table,) = drawn.tables
    assert table.head == ["character", "code point", "bytes", "their values"]
    characters: list[str] = []
    for one in "aé中😀" + text:
        if one not in characters and len(characters) < 12:
            characters.append(one)
    assert len(table.rows) == 12
    for one, row in zip(characters, table.rows, strict=True):
        assert row[0] == {" ": "␣", "\n": "⏎"}.get(one, one)
        assert row[1].startswith("U+")
        assert len(row[1]) >= 6
        assert int(row[1][2:], 16) == ord(one)
        assert row[2] == len(utf8(one))
        assert [int(value) for value in row[3].split(" ")] == utf8(one)


@on("T2", "python-3m", "gpt2", "dates-1m", "framed")
def test_figure_t2(drawn: Drawn) -> None:
    tok = tokenizer(drawn)
    other = opened("python-3m" if drawn.name == "dates-1m" else "dates-1m").tok
    assert other is not None
    ids = tok.encode(drawn.model.prompt.text, add_special_tokens=False)[:LIMIT]
    assert drawn.tokens == [
        ("these ids under the model's tokenizer", unmarked(labels(ids, tok))),
        (
            "the same ids under another",
            unmarked([labels([one], other)[0] if one < len(other) else str(one) for one in ids]),
        ),
    ]
    assert drawn.facts == {"tokenizer": tok.fingerprint[:12], "the other": other.fingerprint[:12]}
    assert tok.fingerprint != other.fingerprint
    said = drawn.texts[-1]
    if drawn.name == "gpt2":  # whose vocabulary of 97 holds no tokenizer
        assert said == "Refused: the tokenizer has 1024 tokens, but vocab_size is 97, so it is another model's."
    elif drawn.name == "framed":
        assert said == "A newly built model has no tokenizer of its own yet, and takes any that fits."
    else:
        assert said.startswith("Refused: ")
        assert other.fingerprint[:4] in said or "4096 tokens, but vocab_size is 1024" in said


@on("T3", "python-3m", "gpt2", "framed")
def test_figure_t3(drawn: Drawn) -> None:
    tok, text = tokenizer(drawn), drawn.model.prompt.text
    raw = [byte for one in text for byte in utf8(one)]
    ids = tok.encode(text, add_special_tokens=False)
    words, known = text.split(), known_words()
    unknown = [word not in known for word in words]
    assert any(unknown) or drawn.name != "python-3m"
    assert not all(unknown)
    (table,) = drawn.tables
    assert table.head == ["tokens", "vocabulary", "length", "unknown words"]
    assert table.rows == [
        ["bytes", 256, len(raw), 0],
        ["BPE (this tokenizer)", len(tok), len(ids), 0],
        ["words of Python's manual", len(known), len(words), sum(unknown)],
    ]
    cut = {len(one): f", the first {LIMIT} of {len(one)}" if len(one) > LIMIT else "" for one in (raw, ids, words)}
    assert drawn.tokens == [
        (f"bytes{cut[len(raw)]}", unmarked([show_whitespace(bytes([one])) for one in raw[:LIMIT]])),
        (f"BPE tokens{cut[len(ids)]}", unmarked(labels(ids[:LIMIT], tok))),
        (f"words{cut[len(words)]}; marked: unknown", list(zip(words, unknown, strict=True))[:LIMIT]),
    ]


def byte_pairs(text: str, count: int) -> tuple[list[list[bytes]], list[tuple[bytes, bytes, int]]]:
    """Learn merges on the words of a text, counting all pairs anew each time."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
    words = [[bytes([byte]) for byte in one.encode()] for one in regex.findall(pattern, text)]
    # GPT-2's order of the bytes: those that print first.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = {bytes([byte]): i for i, byte in enumerate([*printed, *(b for b in range(256) if b not in printed)])}
    made = []
    for _ in range(count):
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for i in range(len(word) - 1):
                counts[word[i], word[i + 1]] = counts.get((word[i], word[i + 1]), 0) + 1
        if not counts:
            break
        left, right = min(counts, key=lambda pair: (-counts[pair], order[pair[0]], order[pair[1]]))
        made.append((left, right, counts[left, right]))
        order[left + right] = len(order)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] == left and word[i + 1] == right:
                    word[i : i + 2] = [left + right]
                i += 1
    return words, made


@on("T4", "python-3m", "gpt2")
def test_figure_t4(drawn: Drawn) -> None:
    text = drawn.model.prompt.text
    words, made = byte_pairs(text, int(drawn.value))
    flat = [one for word in words for one in word]
    ((title, shown),) = drawn.tokens
    assert title == f"after {len(made)} merges"
    assert shown == [(show_whitespace(one), len(one) > 1) for one in flat[:80]]
    assert drawn.facts == {"bytes": len(text.encode()), "tokens": len(flat), "vocabulary": 256 + len(made)}
    (table,) = drawn.tables
    assert table.head == ["merge", "pair", "occurs"]
    numbered = [
        [i + 1, f"{show_whitespace(left)} + {show_whitespace(right)}", count]
        for i, (left, right, count) in enumerate(made)
    ]
    assert table.rows == (numbered[-8:] if len(numbered) > 8 else numbered)


@on("T5", "python-3m", "gpt2", "framed")
def test_figure_t5(drawn: Drawn) -> None:
    tok, text = tokenizer(drawn), drawn.model.prompt.text
    (bars,) = drawn.bars
    assert bars.names == [f"this tokenizer ({len(tok):,} tokens)", "bytes", "words"]
    lengths = len(tok.encode(text, add_special_tokens=False)), sum(len(utf8(one)) for one in text), len(text.split())
    assert bars.values == [near(len(text) / length, 1e-9) for length in lengths]
    (curve,) = drawn.lines
    assert curve.along == "tokens in the vocabulary"
    words = notes.statement("T5").measured.replace(",", "").split()  # "1.95 at 512", and so on
    points = [(float(words[i + 1]), float(words[i - 1])) for i, word in enumerate(words) if word == "at"]
    assert len(points) == 6
    assert curve.series == {"characters per token": points}


@on("T6", "python-3m", "gpt2", "dates-1m", "framed")
def test_figure_t6(drawn: Drawn) -> None:
    tok, text = tokenizer(drawn), drawn.model.prompt.text
    at = min(int(drawn.value), len(text) - 1)
    letters = [*text]
    letters[at] = "z" if letters[at] == "q" else "q"
    wrong = "".join(letters)

    def middle(before: list[object], after: list[object]) -> tuple[int, int]:
        most = min(len(before), len(after))
        head = max(n for n in range(most + 1) if before[:n] == after[:n])
        tail = max(n for n in range(most - head + 1) if before[len(before) - n :] == after[len(after) - n :])
        return head, len(after) - tail

    ids = [tok.encode(one, add_special_tokens=False) for one in (text, wrong)]
    first, last = middle(*ids)
    raw = middle(*([byte for one in each for byte in utf8(one)] for each in (text, wrong)))
    words = middle(text.split(), wrong.split())
    (bars,) = drawn.bars
    assert bars.rows == [("bytes", raw[1] - raw[0]), ("BPE tokens", last - first), ("words", words[1] - words[0])]
    ((_, shown),) = drawn.tokens
    assert shown == [(one, first <= i < last) for i, one in enumerate(labels(ids[1], tok))][:80]
    new = wrong.split()[slice(*words)]
    old = text.split()[words[0] : len(text.split()) - (len(wrong.split()) - words[1])]
    assert new != old
    assert drawn.facts == {
        "letter": at,
        "the word": " ".join(old),
        "among the words of Python's manual": "known" if set(old) <= known_words() else "unknown",
        "with the typo": " ".join(new),
        "among them": "known" if set(new) <= known_words() else "unknown",
    }
