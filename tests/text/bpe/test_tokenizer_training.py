"""Trained tokenizers: equal to tiktoken and transformers, exact on any bytes, deaf to spelled controls."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import pydoc_data.topics
import random
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import transformers
from examples import first_of, up_to
from hypothesis import given, settings
from hypothesis import strategies as st

import glasshouse as gh
from glasshouse import InputError
from glasshouse.text.bpe import pretokenizer
from glasshouse.text.bpe.byte_level import BYTE_TO_UNICODE
from glasshouse.text.bpe.training import DEFAULT_SPECIAL_TOKENS

CODE = "".join(
    path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
)
ENGLISH = "\n".join(map(str, pydoc_data.topics.topics.values()))
EVERY_CHARACTER = "".join(chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000)


@cache
def trained(pattern: str) -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=[CODE[:2_000_000], ENGLISH], vocab_size=4000, pattern=pattern)


@cache
def by_tiktoken(pattern: str) -> tiktoken.Encoding:
    tok = trained(pattern)
    tokens = {tok.decode_bytes([number]): number for number in range(len(tok)) if number not in tok.special_ids}
    special = {token: tok.token_to_id(token) for token in DEFAULT_SPECIAL_TOKENS.values()}
    return tiktoken.Encoding(
        pattern, pat_str=pretokenizer.PATTERNS[pattern], mergeable_ranks=tokens, special_tokens=special
    )


def mixed(size: int) -> str:
    """Code, prose, every script, and noise, in stretches of a few hundred characters."""
    draw = random.Random(0)
    sources = [
        CODE,
        ENGLISH,
        EVERY_CHARACTER,
        "".join(draw.choices(EVERY_CHARACTER, k=100_000)),
        " \n\t\r'\u2019" * 500,
    ]
    pieces: list[str] = []
    length = 0
    while length < size:
        source = draw.choice(sources)
        start = draw.randrange(len(source))
        pieces.append(source[start : start + draw.randrange(600)])
        length += len(pieces[-1].encode())
    return "".join(pieces)


def check_tiktoken(pattern: str, size: int) -> None:
    text = mixed(size)
    documents = [text[at : at + 200_000] for at in range(0, len(text), 200_000)]
    expected = [number for row in by_tiktoken(pattern).encode_ordinary_batch(documents) for number in row]
    ids, ends = trained(pattern).corpus_encoder().encode([document.encode() for document in documents])
    assert len(ends) == len(documents)
    assert ids.tolist() == expected
    slow = trained(pattern).encode_batch(documents[:3])
    assert [number for row in slow for number in row] == ids[: ends[2]].tolist()


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
def test_ids_are_those_of_tiktoken(pattern: str) -> None:
    check_tiktoken(pattern, 1_000_000)


@pytest.mark.long
@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
def test_ids_are_those_of_tiktoken_on_ten_megabytes(pattern: str) -> None:
    check_tiktoken(pattern, 10_000_000)


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
def test_transformers_reads_what_is_saved(pattern: str, tmp_path: Path) -> None:
    tok = trained(pattern)
    tok.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = mixed(200_000)
    assert theirs(text)["input_ids"] == tok.encode(text)
    assert theirs.decode(tok.encode(text), clean_up_tokenization_spaces=False) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id) == (0, 1, 2)
    again = gh.Tokenizer.load(tmp_path)
    assert again.fingerprint == tok.fingerprint
    assert again.encode(text) == tok.encode(text)
    assert again.special_tokens == tok.special_tokens
    assert again.chat_template == tok.chat_template


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("pattern", first_of(list(pretokenizer.PATTERNS)))
def test_every_code_point_comes_back(pattern: str) -> None:
    tok = trained(pattern)
    assert tok.decode(tok.encode(EVERY_CHARACTER)) == EVERY_CHARACTER


def random_bytes(number: int) -> list[bytes]:
    """Byte strings of all lengths up to 64: noise, noise around UTF-8, UTF-8 cut short, and runs."""
    draw = random.Random(1)

    def one() -> bytes:
        noise = draw.randbytes(draw.randrange(33))
        text = "".join(draw.choices(EVERY_CHARACTER, k=draw.randrange(9))).encode()
        return draw.choice([noise, noise + text, text[: draw.randrange(len(text) + 1)] + noise, noise[:1] * 64])

    return [one() for _ in range(number)]


def check_bytes(number: int) -> None:
    tok = trained("gpt2")
    for text in random_bytes(number):
        ids = tok.encode(text)
        assert tok.decode_bytes(ids) == text
        assert tok.special_ids.isdisjoint(ids)


def test_random_bytes_come_back() -> None:
    check_bytes(3_000)


@pytest.mark.long
def test_a_hundred_thousand_random_byte_strings_come_back() -> None:
    check_bytes(100_000)


@pytest.mark.long
@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
def test_every_code_point_alone_comes_back(pattern: str) -> None:
    tok = trained(pattern)
    for at in range(0, len(EVERY_CHARACTER), 50_000):
        characters = EVERY_CHARACTER[at : at + 50_000]
        rows = tok.encode_batch(list(characters))
        assert [tok.decode(row) for row in rows] == list(characters)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_are_tokens_of_their_own(data: bytes) -> None:
    """Worked out character by character: stretches of text, and single bytes between them."""
    tok = trained("gpt2")
    expected: list[int] = []
    stretch, rest = b"", data
    while rest:
        size = next((size for size in (1, 2, 3, 4) if is_text(rest[:size])), 0)
        if size:
            stretch, rest = stretch + rest[:size], rest[size:]
        else:
            expected += [*tok.encode(stretch.decode()), tok.token_to_id(BYTE_TO_UNICODE[rest[0]])]
            stretch, rest = b"", rest[1:]
    assert tok.encode(data) == expected + tok.encode(stretch.decode())


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
def test_a_spelled_special_token_is_text(pattern: str) -> None:
    tok = trained(pattern)
    for token in DEFAULT_SPECIAL_TOKENS.values():
        for text in (token, f"a{token}b", token * 2, token[:-1], f" {token}\n", token.encode() + b"\xff"):
            ids = tok.encode(text)
            assert tok.special_ids.isdisjoint(ids), text
            assert tok.decode_bytes(ids) == (text if isinstance(text, bytes) else text.encode())
        assert tok.encode(f"a{token}b", parse_special_tokens=True) == [
            *tok.encode("a"),
            tok.token_to_id(token),
            *tok.encode("b"),
        ]
    long = " word ".join(DEFAULT_SPECIAL_TOKENS.values()) * 20_000
    assert tok.special_ids.isdisjoint(tok.encode(long))  # by the engine for corpora


def test_a_special_token_that_text_could_make_is_refused() -> None:
    with pytest.raises(InputError, match="special token 'PAD' is a word"):
        gh.Tokenizer.train(texts=["PAD PAD PAD"], vocab_size=300, special_tokens={"pad": "PAD"})


def test_special_tokens_come_first_then_bytes_then_merges() -> None:
    tok = gh.Tokenizer.train(texts=["aaab aaab"], vocab_size=262, special_tokens={"eos": "<end>", "x": "<x>"})
    assert [tok.id_to_token(number) for number in range(2)] == ["<end>", "<x>"]
    assert tok.id_to_token(2) == "!"
    assert [tok.id_to_token(number) for number in range(258, 262)] == [
        "aa",
        "ab",
        "aaab",
        "Ġaaab",
    ]  # of (aa, a) and (a, b), the smaller ids
    assert tok.special_tokens == {"eos": "<end>"}
    assert tok.chat_template is None


def test_vocab_size_counts_everything_and_is_checked() -> None:
    assert len(gh.Tokenizer.train(texts=["to be"], vocab_size=263)) == 263
    with pytest.raises(InputError, match="vocab_size is 262, but 256 bytes and 7 special tokens need 263"):
        gh.Tokenizer.train(texts=["to be"], vocab_size=262)
    with pytest.warns(UserWarning, match="has no more pairs to merge, so the vocabulary has 266 tokens, not 5000"):
        assert len(gh.Tokenizer.train(texts=["to be"], vocab_size=5000)) == 266


def test_files_of_every_kind_train_the_same_tokenizer(tmp_path: Path) -> None:
    texts = ["to be or not to be\n", "that is the question\n"]
    (tmp_path / "plain").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "plain" / f"{number}.txt").write_text(text)
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    expected = gh.Tokenizer.train(texts=texts, vocab_size=280).fingerprint
    assert gh.Tokenizer.train(tmp_path / "plain", vocab_size=280).fingerprint == expected
    assert gh.Tokenizer.train(f"{tmp_path}/plain/*.txt", vocab_size=280).fingerprint == expected
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        assert gh.Tokenizer.train([tmp_path / name], vocab_size=280, column="body").fingerprint == expected


def test_training_reads_a_stream_and_reports_progress(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 1000)
    seen: list[tuple[str, int, int]] = []
    gh.Tokenizer.train(tmp_path, vocab_size=270, progress=lambda *step: seen.append(step))
    assert seen[-1] == ("merging", 270, 270)
    assert ("reading", 19_000, 19_000) in seen
    texts = iter(["one text", "another"])
    gh.Tokenizer.train(texts=texts, vocab_size=264)
    assert next(texts, None) is None


def test_what_cannot_be_trained_from() -> None:
    with pytest.raises(InputError, match="either files or texts"):
        gh.Tokenizer.train()
    with pytest.raises(InputError, match="there is no text to train on"):
        gh.Tokenizer.train(texts=[])
    with pytest.raises(InputError, match="lone surrogate"):
        gh.Tokenizer.train(texts=["\ud800"])
    with pytest.raises(InputError, match="not UTF-8 at byte 0"):
        gh.Tokenizer.train(texts=[b"\xff"])


def test_a_limit_on_words_is_reported() -> None:
    texts = [" ".join(f"{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz")]
    with pytest.warns(UserWarning, match="the rarest words, .* of all, were dropped"):
        gh.Tokenizer.train(texts=texts, vocab_size=270, max_words=300)


def test_a_text_is_cut_and_keeps_what_stands_around_it() -> None:
    around = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[S]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[E]", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for number, name in enumerate(("[S]", "[E]"))
        },
    }
    vocab = {name: number for number, name in enumerate(("[S]", "[E]", "a", "b", "c"))}
    tok = gh.Tokenizer.from_json(
        json.dumps(
            {
                "version": "1.0",
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": around,
                "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
            }
        )
    )
    assert tok.encode_batch(["a b c a", "b"], max_len=4) == [[0, 2, 3, 1], [0, 3, 1]]
    assert tok.encode_batch(["a b c a"], max_len=6) == [[0, 2, 3, 4, 2, 1]]
    assert tok.encode_batch(["a b c a"], add_special_tokens=False, max_len=2) == [[2, 3]]


def test_long_texts_take_the_fast_way_and_get_the_same_ids() -> None:
    tok = trained("gpt2")
    text = (CODE * 2)[:1_200_000]
    whole = tok.encode(text)
    assert whole == tok.encode_batch([text])[0]
    assert isinstance(whole[0], int)
    assert not isinstance(whole[0], np.integer)


@settings(max_examples=up_to(50))
@given(st.lists(st.text(max_size=30), max_size=5))
def test_bulk_is_encode_for_each(texts: list[str]) -> None:
    tok = trained("gpt2")
    ids, ends = tok.corpus_encoder().encode([text.encode() for text in texts])
    starts = [0, *ends.tolist()[:-1]] if texts else []
    assert [ids[a:b].tolist() for a, b in zip(starts, ends, strict=True)] == [tok.encode(text) for text in texts]


def test_bulk_encoding_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tok = trained("gpt2")
    right = tok.corpus_encoder()
    assert right.reason == ""
    other, _ = gh.Tokenizer.train(texts=[ENGLISH], vocab_size=3000)._fast
    wrong = gh.text.corpus_encoder.CorpusEncoder(other, lambda texts: tok.encode_batch(texts), "")
    with pytest.warns(UserWarning, match="gigatoken gives different ids for this text"):
        assert wrong.encode([b"to be or not to be"])[0].tolist() == tok.encode("to be or not to be")
    assert "different ids" in wrong.reason
    monkeypatch.setattr(gh.text.corpus_encoder, "gigatoken", None)
    fast, reason = gh.text.corpus_encoder.load_gigatoken(json.dumps({}))
    assert fast is None
    assert "not installed" in reason


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tok: pickle.loads(pickle.dumps(tok))])
def test_a_copy_ignores_special_tokens_as_the_original_does(copied: Callable[[gh.Tokenizer], gh.Tokenizer]) -> None:
    tok = gh.Tokenizer.train(texts=[ENGLISH[:20_000]], vocab_size=400)
    tok.corpus_encoder()
    tok.chat_template = "{{ messages }}"
    again = copied(tok)
    assert again.fingerprint == tok.fingerprint
    assert again.chat_template == tok.chat_template
    assert again.special_ids.isdisjoint(again.encode("a <|endoftext|> b"))


def test_stray_bytes_in_a_batch_and_where_they_cannot_be_taken() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    assert tok.encode_batch([b"a\xffb", "c"]) == [tok.encode(b"a\xffb"), tok.encode("c")]
    assert tok.encode_batch([b"a\xffb", "c"], max_len=2) == [tok.encode(b"a\xffb")[:2], tok.encode("c")]
    spaced = tok._text.replace('"add_prefix_space": false', '"add_prefix_space": true')
    with pytest.raises(InputError, match="not UTF-8 at byte 1"):
        gh.Tokenizer.from_json(spaced).encode(b"a\xffb")  # each stretch would begin with a space


def test_words_and_merges_are_reported() -> None:
    tok = trained("gpt4")
    assert tok.pretokenize("It's 12345\n") == [b"It", b"'s", b" ", b"123", b"45", b"\n"]
    assert len(tok.merge_ranks) == 4000 - 263
    (left, right), rank = next(iter(tok.merge_ranks.items()))
    assert rank == 0
    assert tok.decode_bytes([263]) == left + right


def test_an_id_that_would_take_all_memory_is_refused() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    for number in (4_000_000_000, -1, "7", None):
        document = json.loads(tok._text)
        document["model"]["vocab"]["zzzz"] = number
        with pytest.raises(gh.StoreError, match="gives a token the id"):
            gh.Tokenizer.from_json(json.dumps(document))


def test_merges_left_out_by_chance_belong_to_training() -> None:
    tok = gh.Tokenizer.train(texts=[ENGLISH[:20_000]], vocab_size=400)
    document = json.loads(tok._text)
    document["model"]["dropout"] = 0.5
    random_merges = gh.Tokenizer.from_json(json.dumps(document))
    assert {tuple(random_merges.encode(ENGLISH[:2000])) for _ in range(5)} == {tuple(tok.encode(ENGLISH[:2000]))}


def test_a_single_text_is_no_list_of_texts() -> None:
    with pytest.raises(InputError, match="texts is a single text"):
        gh.Tokenizer.train(texts="to be or not to be")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_wait_for_threads_it_has_not() -> None:
    program = textwrap.dedent("""
        import multiprocessing
        import glasshouse as gh
        texts = [b"to be or not to be " * 20] * 20_000
        tok = gh.Tokenizer.train(texts=texts, vocab_size=280)
        bulk = tok.corpus_encoder()
        expected = bulk.encode(texts)[0].sum()
        def work(answers):
            answers.put(int(bulk.encode(texts)[0].sum()))
            answers.put(gh.Tokenizer.train(texts=texts[:2000], vocab_size=280).fingerprint)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=work, args=(answers,))
        child.start()
        assert answers.get(timeout=60) == expected
        assert answers.get(timeout=60) == tok.fingerprint
        child.join(60)
    """)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)
