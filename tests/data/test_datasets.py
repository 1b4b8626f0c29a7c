"""Samples and batches: what the model sees, worked out beside it; the same whoever asks, in whatever parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.bart.modeling_bart import shift_tokens_right

import glasshouse as gh
from glasshouse import InputError
from glasshouse.data import (
    Batches,
    CausalLMDataset,
    ChatDataset,
    ClassificationDataset,
    MaskedLMDataset,
    Seq2SeqDataset,
    TokenClassificationDataset,
)
from glasshouse.data.batches import Dataset
from glasshouse.models.generation_config import read_token_rules
from glasshouse.models.prompt import encode_prompt
from glasshouse.objectives import Seq2SeqLM, TokenClassification, make_dataset

from .conftest import ENGLISH

Texts = Callable[..., gh.data.Corpus]
several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=up_to(30))


@pytest.fixture
def english(texts: Texts) -> gh.data.Corpus:
    return texts(*(ENGLISH[at : at + 300] for at in range(0, 12_000, 300)))


@pytest.fixture(scope="module")
def dates(tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer) -> gh.data.Corpus:
    return gh.data.prepare("dates", tok, tmp_path_factory.mktemp("dates"), split="validation")


@pytest.fixture(scope="module")
def langid(tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer) -> gh.data.Corpus:
    return gh.data.prepare("langid", tok, tmp_path_factory.mktemp("langid"), split="validation")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer) -> gh.data.Corpus:
    return gh.data.prepare("chat", tok, tmp_path_factory.mktemp("chat"), split="validation")


SENTENCES = [line.split() for line in ENGLISH.splitlines() if line.split()][:200]


def tag_of(word: str) -> str:
    return "word" if word.isalpha() else "number" if word.isdigit() else "other"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer) -> gh.data.Corpus:
    folder = tmp_path_factory.mktemp("tagged")
    lines = (json.dumps({"words": words, "tags": [tag_of(word) for word in words]}) for words in SENTENCES)
    (folder / "a.jsonl").write_text("\n".join(lines))
    return gh.data.prepare(folder / "a.jsonl", tok, folder / "corpus", kind="tagged")


# Running text.


def test_rows_by_hand(texts: Texts) -> None:
    """Two texts of bytes; the token that ends one begins the next, and counts to that."""
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=257, special_tokens={"bos": "<|e|>", "eos": "<|e|>"})
    corpus = texts("abc", "de", tokenizer=tok)  # a b c <|e|> d e <|e|>
    samples = CausalLMDataset(corpus, 6)
    batch = samples.batch([0])
    assert tok.decode(batch.ids[0]) == "abc<|e|>de"
    assert tok.decode(batch.targets[0]) == "bc<|e|>de<|e|>"
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert batch.loss_mask.all()
    assert samples.origin(0) == "texts 0 to 1, ids 0 to 5"
    whole = CausalLMDataset(corpus, 6, mask_documents=False).batch([0])
    assert whole.documents is None


def test_rows_with_a_start_of_their_own_by_hand(texts: Texts) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=258, special_tokens={"bos": "<|s|>", "eos": "<|e|>"})
    batch = CausalLMDataset(texts("ab", "c", tokenizer=tok), 6).batch([0])
    assert tok.decode(batch.ids[0]) == "<|s|>ab<|e|><|s|>c"
    assert tok.decode(batch.targets[0]) == "ab<|e|><|s|>c<|e|>"
    assert batch.documents.tolist() == [[1, 1, 1, 1, 2, 2]]
    assert batch.loss_mask.tolist() == [[True, True, True, False, True, True]]  # no text says that another starts


@several
@given(st.integers(1, 400), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_reads_every_id_once(english: gh.data.Corpus, length: int, seed: int, epoch: int) -> None:
    samples = CausalLMDataset(english, length, seed=seed)
    n = len(samples)
    assert n == english.n_tokens // length
    rows = samples.token_blocks(range(epoch * n, (epoch + 1) * n))
    places = np.array(samples.offsets(range(epoch * n, (epoch + 1) * n)))
    ring = np.tile(english.read(0, english.n_tokens), 2)
    for place, row in zip(places, rows, strict=True):
        assert row.tolist() == ring[place : place + length + 1].tolist()
    covered = (places[:, None] + np.arange(length)).reshape(-1) % english.n_tokens
    assert len(np.unique(covered)) == n * length


def test_each_epoch_cuts_at_other_places(english: gh.data.Corpus) -> None:
    samples = CausalLMDataset(english, 50)
    n = len(samples)
    cuts = [{place % 50 for place in samples.offsets(range(e * n, e * n + n))} for e in range(4)]
    assert len({frozenset(cut) for cut in cuts}) == 4


def test_each_epoch_reads_in_another_order(english: gh.data.Corpus, dates: gh.data.Corpus) -> None:
    text, pairs = CausalLMDataset(english, 50), Seq2SeqDataset(dates, 8, max_len=100)

    def epoch(samples: Dataset, number: int) -> range:
        return range(number * len(samples), (number + 1) * len(samples))

    # From one row to the next it is as far in the text wherever an epoch cuts, if the order is the same.
    places = [np.array(text.offsets(epoch(text, number))) for number in range(3)]
    steps = [np.diff(each) % english.n_tokens for each in places]
    # Those left out change as well: only what two epochs both have is compared.
    items = [pairs.items(epoch(pairs, number)) for number in range(3)]
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert (steps[first] == steps[second]).mean() < 0.2
        both = {*items[first]} & {*items[second]}
        assert len(both) > len(pairs) - 8
        assert [i for i in items[first] if i in both] != [i for i in items[second] if i in both]


def test_what_has_no_row_is_one_sentence(texts: Texts, dates: gh.data.Corpus) -> None:
    corpus = texts("a")
    with pytest.raises(
        InputError, match="the corpus has 2 tokens, but a sequence of 128 and its last target need 129"
    ):
        CausalLMDataset(corpus, 128)
    with pytest.raises(InputError, match="seq_len is 0"):
        CausalLMDataset(corpus, 0)
    with pytest.raises(InputError, match="of kind pairs, not text"):
        CausalLMDataset(dates, 8)
    with pytest.raises(InputError, match="of kind text, not pairs"):
        Seq2SeqDataset(corpus, 1, max_len=8)


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_editing_one_document_leaves_the_loss_of_the_other_bit_equal(texts: Texts, position: str) -> None:
    tok = gh.Tokenizer.train(texts=[ENGLISH[:20_000]], vocab_size=400)
    second = "The second document is about something else entirely."
    losses = []
    for number, first in enumerate(("The first document.", "An edited document, and yet of the same length as it.")):
        ids = tok.encode(first)[:7]
        corpus = texts(tok.decode(ids), second, name=str(number), tokenizer=tok)
        assert corpus.lengths[0, 0] == 8
        batch = CausalLMDataset(corpus, corpus.n_tokens - 1).batch([0])
        torch.manual_seed(0)
        model = gh.build(gh.preset("tiny-decoder", vocab_size=400, max_len=64, position=position)).eval()
        loss = F.cross_entropy(batch.forward(model).transpose(1, 2), batch.targets, reduction="none")
        losses.append(loss[0, 7:])  # from the token that ends the first and starts the second
        assert loss[0, :7].shape == (7,)
    assert torch.equal(*losses)
    assert batch.documents[0, 6] != batch.documents[0, 7]


# Masked text.


def test_masks_are_drawn_in_the_stated_shares(texts: Texts, tok: gh.Tokenizer) -> None:
    corpus = texts(ENGLISH[:200_000])
    samples = MaskedLMDataset(corpus, 500)
    batch = samples.batch(range(len(samples)))
    ordinary = ~torch.isin(batch.targets, torch.tensor(sorted(tok.special_ids)))
    assert not batch.loss_mask[~ordinary].any()
    counts = ordinary.sum(1)
    assert ((batch.loss_mask.sum(1) - 0.15 * counts.double()).abs() < 1).all()
    assert torch.equal(batch.ids[~batch.loss_mask], batch.targets[~batch.loss_mask])
    n = int(batch.loss_mask.sum())
    shown, original = batch.ids[batch.loss_mask], batch.targets[batch.loss_mask]
    masked = (shown == tok.special_id("mask")).sum() / n
    kept = (shown == original).sum() / n
    # Shares of n independent draws; five standard deviations. Another token is the same one now and then.
    for share, expected in ((masked, 0.8), (kept, 0.1 + 0.1 / (len(tok) - 7)), (1 - masked - kept, 0.1)):
        assert abs(share - expected) < 5 * (expected * (1 - expected) / n) ** 0.5 + 1e-3
    changed = shown[(shown != original) & (shown != tok.special_id("mask"))]
    assert not torch.isin(changed, torch.tensor(sorted(tok.special_ids))).any()
    assert len(changed.unique()) > 200


@pytest.mark.parametrize(("length", "rate"), [(7, 0.15), (16, 0.4), (64, 0.15), (100, 0.15)])
def test_the_expected_share_of_masked_tokens_is_the_rate_at_every_length(
    texts: Texts, length: int, rate: float
) -> None:
    samples = MaskedLMDataset(
        texts(ENGLISH[:20_000]), length, mlm_probability=rate
    )  # one document: nothing but ordinary tokens
    batch = samples.batch(range(1000))  # of several epochs, each masked anew
    counts = (~torch.isin(batch.targets, torch.from_numpy(samples.special))).sum(1).double()
    asked, expected = batch.loss_mask.sum(1).double(), rate * counts
    assert ((asked == expected.floor()) | (asked == expected.ceil())).all()
    # A row's count is one of two neighbours, so its variance is p (1 - p) with p the fraction of the expectation.
    fraction = expected - expected.floor()
    error = (fraction * (1 - fraction)).sum().sqrt()
    assert abs(asked.sum() - expected.sum()) <= 4 * error


def test_masks_change_from_epoch_to_epoch_and_not_from_call_to_call(english: gh.data.Corpus) -> None:
    samples = MaskedLMDataset(english, 100, seed=5)
    assert torch.equal(samples.batch([3, 4]).ids, samples.batch([3, 4]).ids)
    assert torch.equal(samples.batch([3, 4]).loss_mask[1], samples.batch([4]).loss_mask[0])
    first, later = (samples.batch(range(e * len(samples), (e + 1) * len(samples))) for e in (0, 1))
    assert not torch.equal(first.loss_mask, later.loss_mask)


@pytest.mark.parametrize("rate", [0.01, 0.15, 1.0])
def test_target_positions_hold_every_masked_token_once(english: gh.data.Corpus, rate: float) -> None:
    samples = MaskedLMDataset(english, 33, mlm_probability=rate)
    shapes = set()
    for first in range(0, 60, 20):
        batch = samples.batch(range(first, first + 20))
        positions = batch.target_positions
        assert positions is not None
        shapes.add(tuple(positions.shape))
        for mask, chosen in zip(batch.loss_mask, positions.tolist(), strict=True):
            assert len(set(chosen)) == len(chosen)
            assert set(mask.nonzero().flatten().tolist()) <= set(chosen)
    assert len(shapes) == 1


def test_masking_needs_a_mask(texts: Texts) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=257, special_tokens={"eos": "<|e|>"})
    with pytest.raises(InputError, match="has no mask token"):
        MaskedLMDataset(texts("abc", tokenizer=tok), 2)


def test_a_row_of_control_tokens_alone_has_no_target(texts: Texts) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=258, special_tokens={"eos": "<|e|>", "mask": "<|m|>"})
    batch = MaskedLMDataset(texts("a", "b", tokenizer=tok), 1).batch(range(4))
    assert batch.loss_mask.any(1).tolist() == (batch.targets[:, 0] != 0).tolist()


# Pairs, labels, conversations.


def test_pairs_by_hand(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=258, special_tokens={"eos": "<|e|>", "pad": "<|p|>"})
    (tmp_path / "p.tsv").write_text("source\ttarget\nab\txyz\nc\tw\n")
    corpus = gh.data.prepare(tmp_path / "p.tsv", tok, tmp_path / "corpus", kind="pairs")
    samples = Seq2SeqDataset(corpus, 2, max_len=10)
    items = samples.items([0, 1])
    batch = samples.batch([0, 1])
    rows = {item: row for row, item in enumerate(items)}
    show = [tok.decode(row) for row in (batch.source[rows[0]], batch.ids[rows[0]], batch.targets[rows[0]])]
    assert show == ["ab<|e|>", "<|e|>xyz", "xyz<|e|>"]
    show = [tok.decode(row) for row in (batch.source[rows[1]], batch.ids[rows[1]], batch.targets[rows[1]])]
    assert show == ["c<|e|><|p|>", "<|e|>w<|p|><|p|>", "w<|e|><|p|><|p|>"]
    assert batch.loss_mask[rows[1]].tolist() == [True, True, False, False]
    assert (batch.source_lengths[rows[1]], batch.lengths[rows[1]]) == (2, 2)
    model = gh.build(gh.preset("tiny-seq2seq", vocab_size=258)).eval()
    assert batch.forward(model).shape == (2, 4, 258)
    assert torch.allclose(
        batch.forward(model)[rows[1], :2], samples.batch([items.index(1)]).forward(model)[0], atol=1e-5
    )


def test_padding_stays_under_a_tenth(dates: gh.data.Corpus) -> None:
    samples = Seq2SeqDataset(dates, 64, max_len=200)
    real = total = 0
    for step in range(len(samples) // 64):
        batch = Batches(samples, 64).at(step)
        for ids, lengths in ((batch.ids, batch.lengths), (batch.source, batch.source_lengths)):
            real += int(lengths.sum())
            total += ids.numel()
    assert 1 - real / total < 0.1


def test_long_pairs_are_left_out_and_counted(dates: gh.data.Corpus) -> None:
    longest = int(dates.lengths.max())
    limit = longest - 3
    samples = Seq2SeqDataset(dates, 8, max_len=limit)
    too_long = int((dates.lengths + 1 > limit).any(1).sum())
    assert samples.n_too_long == too_long > 0
    seen = set(samples.items(range(len(samples))))
    assert all((dates.lengths[item] + 1 <= limit).all() for item in seen)
    with pytest.raises(InputError, match="batch_size is 8, but 0 items have at most 2 tokens"):
        Seq2SeqDataset(dates, 8, max_len=2)


def test_labels(langid: gh.data.Corpus, tok: gh.Tokenizer) -> None:
    samples = ClassificationDataset(langid, 16, max_len=20)
    numbers = range(16, 32)
    batch = samples.batch(numbers)
    source = list(gh.data.builtin_dataset("langid").items("validation"))
    for row, item in enumerate(samples.items(numbers)):
        text, label = source[item]
        assert batch.ids[row, : batch.lengths[row]].tolist() == [0, *tok.encode(text)[:18], 0]
        assert langid.labels[batch.targets[row]] == label
    assert samples.n_too_long == 0


def test_tags_by_hand(tmp_path: Path) -> None:
    """Ids are bytes; the id of padding is above all numbers of tags, and is none."""
    tok = gh.Tokenizer.train(
        texts=["x"], vocab_size=259, special_tokens={"bos": "<|b|>", "eos": "<|e|>", "pad": "<|p|>"}
    )
    assert tok.special_id("pad") == 2  # which would be a tag's
    rows = [{"words": ["ab", "c"], "tags": ["y", "x"]}, {"words": ["d"], "tags": ["z"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus", kind="tagged")
    samples = TokenClassificationDataset(corpus, 2, max_len=10)
    batch = samples.batch([0, 1])
    long, short = (samples.items([0, 1]).index(item) for item in (0, 1))
    assert [tok.decode(batch.ids[row]) for row in (long, short)] == ["<|b|>ab c<|e|>", "<|b|>d<|e|><|p|><|p|><|p|>"]
    assert batch.lengths[[long, short]].tolist() == [6, 3]
    assert batch.loss_mask[long].tolist() == [False, True, False, True, False, False]
    assert batch.loss_mask[short].tolist() == [False, True, False, False, False, False]
    assert batch.targets[long][batch.loss_mask[long]].tolist() == [1, 0]
    assert batch.targets[short][batch.loss_mask[short]].tolist() == [2]
    assert (batch.targets[~batch.loss_mask] == 0).all()
    cut = TokenClassificationDataset(corpus, 2, max_len=4)
    batch = cut.batch([0, 1])
    row = cut.items([0, 1]).index(0)
    assert tok.decode(batch.ids[row]) == "<|b|>ab<|e|>"
    assert (batch.loss_mask[row].tolist(), batch.targets[row, 1]) == ([False, True, False, False], 1)
    with pytest.raises(InputError, match="max_len is 2, but a sequence has at least 3"):
        TokenClassificationDataset(corpus, 2, max_len=2)


def test_tags_against_a_plain_loop(tagged: gh.data.Corpus, tok: gh.Tokenizer) -> None:
    samples = TokenClassificationDataset(tagged, 16, max_len=20)
    assert (samples.n_too_long, len(samples)) == (0, len(SENTENCES) // 16 * 16)
    numbers = range(32, 64)
    batch = samples.batch(numbers)
    for row, item in enumerate(samples.items(numbers)):
        ids, asked = [0], [""]
        for at, word in enumerate(SENTENCES[item]):
            own = tok.encode(f" {word}" if at else word)
            ids += own
            asked += [tag_of(word)] + [""] * (len(own) - 1)
        ids, asked = [*ids[:19], 0], [*asked[:19], ""]
        assert batch.ids[row, : batch.lengths[row]].tolist() == ids
        said = [
            tagged.labels[tag] if here else ""
            for tag, here in zip(batch.targets[row].tolist(), batch.loss_mask[row].tolist(), strict=True)
        ]
        assert said == asked + [""] * (batch.ids.shape[1] - len(ids))


def test_tags_go_with_a_head_for_tokens(tagged: gh.data.Corpus, langid: gh.data.Corpus) -> None:
    def make(kind: str, n_labels: int, corpus: gh.data.Corpus) -> Dataset:
        s = gh.preset("tiny-encoder", head={"kind": kind, "n_labels": n_labels})
        return make_dataset(s, corpus, batch_size=8, seq_len=20)

    assert isinstance(make("token_classification", 3, tagged), TokenClassificationDataset)
    with pytest.raises(InputError, match="the model has 2 labels, but the corpus has 3"):
        make("token_classification", 2, tagged)
    with pytest.raises(
        InputError, match="of kind tagged, on which a model of kind encoder with the head sequence_classification"
    ):
        make("sequence_classification", 3, tagged)
    with pytest.raises(
        InputError, match="of kind labelled, on which a model of kind encoder with the head token_classification"
    ):
        make("token_classification", 64, langid)
    mean = sum(min(int(n), 18) for n in tagged.lengths[:, 0]) / len(tagged)
    assert TokenClassification().samples_for_tokens(tagged, 1000, 20) == round(1000 / mean)


def test_only_answers_carry_loss(chat: gh.data.Corpus, tok: gh.Tokenizer) -> None:
    samples = ChatDataset(chat, 8, max_len=400)
    conversations = list(gh.data.builtin_dataset("chat").items("validation"))
    batch = samples.batch(range(8))
    for row, item in enumerate(samples.items(range(8))):
        said = [message["content"] for message in conversations[item] if message["role"] == "assistant"]
        learned = tok.decode(batch.targets[row][batch.loss_mask[row]])
        assert learned == "".join(f"{text}<|end|>" for text in said)
        ids = chat.tokenizer.encode_chat(conversations[item]).ids
        assert batch.ids[row, : batch.lengths[row]].tolist() == ids[:-1]


def test_a_long_answer_is_an_answer_to_its_end(tmp_path: Path, tok: gh.Tokenizer) -> None:
    """Longer than what one number of the smallest type can say."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a b " * 40_000}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus", kind="chat")
    batch = ChatDataset(corpus, 1, max_len=10**6).batch([0])
    assert tok.decode(batch.targets[batch.loss_mask]) == "a b " * 40_000 + "<|end|>"


def test_a_conversation_is_one_token_longer_than_its_input(tmp_path: Path, tok: gh.Tokenizer) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus", kind="chat")
    length = len(corpus.tokenizer.encode_chat(messages).ids) - 1  # the last token is a target alone
    assert ChatDataset(corpus, 1, max_len=length).batch([0]).ids.shape == (1, length)
    with pytest.raises(InputError, match=f"0 items have at most {length - 1} tokens"):
        ChatDataset(corpus, 1, max_len=length - 1)


# Batches.


def same(a: gh.data.Batch, b: gh.data.Batch) -> bool:
    names = ("ids", "targets", "loss_mask", "documents", "lengths", "source", "source_lengths")
    return all(
        (x is None and y is None) or torch.equal(x, y) for x, y in ((getattr(a, n), getattr(b, n)) for n in names)
    )


def every_kind(
    english: gh.data.Corpus,
    dates: gh.data.Corpus,
    langid: gh.data.Corpus,
    tagged: gh.data.Corpus,
    chat: gh.data.Corpus,
) -> dict[str, Dataset]:
    return {
        "running": CausalLMDataset(english, 32, seed=3),
        "masked": MaskedLMDataset(english, 32, seed=3),
        "pairs": Seq2SeqDataset(dates, 8, max_len=100, seed=3),
        "labelled": ClassificationDataset(langid, 8, max_len=100, seed=3),
        "tagged": TokenClassificationDataset(tagged, 8, max_len=30, seed=3),
        "chat": ChatDataset(chat, 8, max_len=300, seed=3),
    }


KINDS = ["running", "masked", "pairs", "labelled", "tagged", "chat"]


@pytest.fixture(params=KINDS)
def samples(
    request: pytest.FixtureRequest,
    english: gh.data.Corpus,
    dates: gh.data.Corpus,
    langid: gh.data.Corpus,
    tagged: gh.data.Corpus,
    chat: gh.data.Corpus,
) -> Dataset:
    return every_kind(english, dates, langid, tagged, chat)[request.param]


STEPS = (0, 1, 17, 400)


@pytest.mark.few(3)
def test_every_number_of_workers_gives_the_same_batches(samples: Dataset) -> None:
    alone = Batches(samples, 8)
    for workers in (1, 2, 4):
        stream = alone.iterate(15, workers=workers)
        for step in range(15, 25):
            assert same(next(stream), alone.at(step))
        stream.close()


@pytest.mark.few(6)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_processes_sees_the_same_global_batches(samples: Dataset, ranks: int) -> None:
    for step in STEPS:
        whole = Batches(samples, 8).at(step)
        shares = [Batches(samples, 8, rank=rank, world_size=ranks).at(step) for rank in range(ranks)]
        assert [len(share) for share in shares] == [8 // ranks] * ranks
        row = 0
        for share in shares:
            for i in range(len(share)):
                # A share may be padded less; what is real is the same.
                for name in ("ids", "targets", "loss_mask", "source"):
                    mine, its = getattr(whole, name), getattr(share, name)
                    if its is not None and its.dim() == 2:
                        assert torch.equal(mine[row, : its.shape[1]], its[i])
                    elif its is not None:
                        assert mine[row] == its[i]
                row += 1


@pytest.mark.few(6)
@pytest.mark.parametrize("ranks", [3, 5, 11])
def test_shares_of_a_batch_that_does_not_divide_are_filled_up_with_samples_that_do_not_count(
    samples: Dataset, ranks: int
) -> None:
    for step in STEPS:
        batches = [Batches(samples, 8, rank=rank, world_size=ranks) for rank in range(ranks)]
        indices = [list(one.sample_indices(step)) for one in batches]
        assert [index for own in indices for index in own] == list(range(8 * step, 8 * step + 8))
        for one, own in zip(batches, indices, strict=True):
            share = one.at(step)
            assert len(share) == -(-8 // ranks)  # the same in all processes
            assert not share.loss_mask[len(own) :].any()
            assert int(share.loss_mask.sum()) == sum(int(samples.batch([index]).loss_mask.sum()) for index in own)


def test_parts_of_a_batch_are_its_rows(samples: Dataset) -> None:
    batch = Batches(samples, 8).at(3)
    for parts in (1, 2, 4, 8, 3):
        split = batch.microbatches(parts)
        assert sum(map(len, split)) == 8
        assert torch.equal(torch.cat([part.ids for part in split]), batch.ids)
        assert torch.equal(torch.cat([part.loss_mask for part in split]), batch.loss_mask)


def test_a_seed_changes_what_is_seen_and_nothing_else_does(english: gh.data.Corpus, tmp_path: Path) -> None:
    first = CausalLMDataset(english, 32, seed=1)
    again = CausalLMDataset(gh.data.Corpus.open(english.folder), 32, seed=1)
    other = CausalLMDataset(english, 32, seed=2)
    assert same(first.batch(range(100, 108)), again.batch(range(100, 108)))
    assert not same(first.batch(range(100, 108)), other.batch(range(100, 108)))


def test_distant_steps_are_computed_directly(samples: Dataset) -> None:
    """Nothing is drawn up to there: step ten billion is asked for like step one."""
    assert same(Batches(samples, 8).at(10**10), Batches(samples, 8).at(10**10))


def test_a_worker_error_is_raised_and_ends_the_iteration(samples: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(numbers: object) -> gh.data.Batch:
        raise InputError("broken.")

    monkeypatch.setattr(samples, "batch", fail)
    with pytest.raises(InputError, match="broken"):
        next(Batches(samples, 8).iterate(workers=2))


def test_batches_of_one(english: gh.data.Corpus) -> None:
    samples = CausalLMDataset(english, 16)
    assert same(Batches(samples, 1).at(step=3), samples.batch([3]))


def test_bad_numbers_of_processes() -> None:
    with pytest.raises(InputError, match="rank is 2, but with 2 processes"):
        Batches(None, 8, rank=2, world_size=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size is 0, but it must be at least 1"):
        Batches(None, 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="workers is 0"):
        next(Batches(None, 8).iterate(workers=0))  # type: ignore[arg-type]


def test_every_kind_trains_a_model(
    english: gh.data.Corpus,
    dates: gh.data.Corpus,
    langid: gh.data.Corpus,
    tagged: gh.data.Corpus,
    chat: gh.data.Corpus,
) -> None:
    """One step on each kind of sample lowers its loss: the batch says all that a trainer needs."""
    kinds = every_kind(english, dates, langid, tagged, chat)
    size = {"vocab_size": 600, "max_len": 512, "n_layers": 1}
    label = {"kind": "sequence_classification", "n_labels": len(langid.labels), "pooling": "first"}
    presets = {
        "running": gh.preset("tiny-decoder", **size),
        "chat": gh.preset("tiny-decoder", **size),
        "masked": gh.preset("tiny-encoder", **size),
        "pairs": gh.preset("tiny-seq2seq", **size),
        "labelled": gh.preset("tiny-encoder", **size, head=label),
        "tagged": gh.preset("tiny-encoder", **size, head={"kind": "token_classification", "n_labels": 3}),
    }
    for name, samples in kinds.items():
        torch.manual_seed(0)
        model = gh.build(presets[name])
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        batch = Batches(samples, 8).at(0)
        losses = []
        for _ in range(3):
            logits = batch.forward(model)
            loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask])
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[2] < losses[0], name


def test_numpy_numbers_are_numbers(english: gh.data.Corpus, langid: gh.data.Corpus) -> None:
    assert same(
        CausalLMDataset(english, np.int64(8), seed=np.int32(5)).batch([3]),
        CausalLMDataset(english, 8, seed=5).batch([3]),
    )
    one, two = (
        ClassificationDataset(langid, np.int64(8), max_len=np.int64(40)),
        ClassificationDataset(langid, 8, max_len=40),
    )
    assert same(one.batch(range(8)), two.batch(range(8)))


def test_numbers_that_make_no_batch(langid: gh.data.Corpus, english: gh.data.Corpus) -> None:
    with pytest.raises(InputError, match="max_len is 1, but a sequence has at least 2"):
        ClassificationDataset(langid, 8, max_len=1)
    with pytest.raises(InputError, match="batch_size is 64, but the dataset was bucketed for 8"):
        Batches(ClassificationDataset(langid, 8, max_len=40), 64)
    batches = Batches(CausalLMDataset(english, 8), 4)
    for step in (-1, 2**62):
        with pytest.raises(InputError, match=f"step is {step}"):
            batches.at(step)
    with pytest.raises(InputError, match="count is 0"):
        batches.at(0).microbatches(0)


def test_masking_draws_only_ids_that_stand_for_tokens(tmp_path: Path) -> None:
    small = gh.Tokenizer.train(texts=["to be"], vocab_size=264)
    document = json.loads(small._text)
    document["model"]["vocab"]["zzzz"] = 2000
    tok = gh.Tokenizer.from_json(json.dumps(document), {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>"})
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus")
    batch = MaskedLMDataset(corpus, 20, mlm_probability=1.0).batch(range(200))
    assert set(batch.ids.unique().tolist()) <= set(tok.ids)
    assert 2000 in batch.ids


def test_a_decoder_begins_as_its_spec_says(dates: gh.data.Corpus) -> None:
    s = gh.preset("tiny-seq2seq", vocab_size=600, start_id=7)
    batch = make_dataset(s, dates, batch_size=4, seq_len=64).batch(range(4))
    assert batch.ids[:, 0].tolist() == [7] * 4
    plain = make_dataset(gh.preset("tiny-seq2seq", vocab_size=600), dates, batch_size=4, seq_len=64).batch(range(4))
    assert plain.ids[:, 0].tolist() == [dates.manifest["end_id"]] * 4
    assert plain.targets.equal(batch.targets)


PUBLISHED = {  # what stands around a text, and the token with which the decoder starts, as published
    "bart": ("<s> $A </s>", "</s>", True),
    "t5": ("$A </s>", "<pad>", False),
    "marian": ("$A </s>", "<pad>", False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pairs_are_framed_as_published_models_read_and_write_them(name: str, tmp_path: Path) -> None:
    """Rows equal what transformers trains on, and a source what our own generation reads."""
    around, starts, forced = PUBLISHED[name]
    special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>"}
    plain = gh.Tokenizer.train(texts=["yes no ja nein"], vocab_size=266, special_tokens=special)
    plain.save(tmp_path / "tok")
    rust = tokenizers.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    ids = [(text, rust.token_to_id(text)) for text in special.values()]
    rust.post_processor = tokenizers.processors.TemplateProcessing(single=around, special_tokens=ids)
    rust.save(str(tmp_path / "tok" / "tokenizer.json"))
    tok = gh.Tokenizer.load(tmp_path / "tok")
    (tmp_path / "a.tsv").write_text("source\ttarget\nyes\tja\nno, yes\tnein\n")
    corpus = gh.data.prepare(tmp_path / "a.tsv", tok, tmp_path / "ids", kind="pairs")

    sizes = {"vocab_size": len(tok), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    start, pad, end = (tok.token_to_id(text) for text in (starts, "<pad>", "</s>"))
    published = BartForConditionalGeneration(
        BartConfig(**sizes, **heads, decoder_start_token_id=start, pad_token_id=pad, eos_token_id=end)
    )
    published.generation_config.forced_bos_token_id = tok.token_to_id("<s>") if forced else None
    published.save_pretrained(tmp_path / "model")
    model, _ = gh.load(tmp_path / "model")
    assert isinstance(model, gh.models.Seq2Seq)

    theirs = PreTrainedTokenizerFast(tokenizer_object=rust)
    samples = make_dataset(model.spec, corpus, batch_size=1, seq_len=32)
    for number, item in enumerate(samples.items([0, 1])):
        texts = [tok.decode(part) for part in corpus.item(item)]
        batch = samples.batch([number])
        expected = theirs(texts[0], text_target=texts[1])
        labels = torch.tensor([expected["labels"]])
        assert batch.source.tolist() == [expected["input_ids"]] == [encode_prompt(texts[0], tok, model.spec)]
        assert batch.source_lengths.tolist() == [len(expected["input_ids"])]
        assert batch.targets.equal(labels)
        assert batch.ids.equal(shift_tokens_right(labels, pad, start))
        assert batch.lengths.tolist() == [labels.shape[1]]
        # Generation puts the same ids before what it writes.
        opening = read_token_rules(model).forced_prefix
        assert batch.ids[0, : 1 + len(opening)].tolist() == [start, *opening]
        assert batch.ids.shape[1] == 1 + len(opening) + len(corpus.item(item)[1])
        assert samples.source(corpus.item(item)[0].tolist()) == batch.source[0].tolist()
    longest = max(len(part) for part in corpus.item(1))
    tight = longest + len(tok.encode("yes")) - len(tok.encode("yes", add_special_tokens=False))
    assert Seq2SeqLM().samples_for_tokens(corpus, 10**6, tight) == 2
    assert Seq2SeqLM().samples_for_tokens(corpus, 10**6, tight - 1) == 1
    make_dataset(model.spec, corpus, batch_size=2, seq_len=tight)
