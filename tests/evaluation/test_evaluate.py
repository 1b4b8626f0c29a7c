"""Evaluation: metrics against plain loops over tokens, models with memorized answers, and invalid input."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import glasshouse as gh
from glasshouse import InputError, StoreError
from glasshouse.data import MaskedLMDataset
from glasshouse.evaluation import baseline_bits, baselines, text_of
from glasshouse.objectives.chat import last_answer

CLOSE = 1e-5  # some hundred sums of float32, each to 6e-8
SIZE = {"vocab_size": 263, "d_model": 32, "n_layers": 1, "n_heads": 2, "max_len": 64}
PAIRS = {"yes": "ja", "no": "nein", "and": "und", "or": "oder", "not": "nicht", "to be": "sein"}


@pytest.fixture(scope="module")
def tok() -> gh.Tokenizer:
    """Every token is one byte."""
    return gh.Tokenizer.train(texts=["x"], vocab_size=263)


def make(preset: str, **settings: Any) -> Any:  # noqa: ANN401
    """Build a model that says different things in different places."""
    torch.manual_seed(0)
    model = gh.build(gh.preset(preset, **SIZE | settings))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@torch.no_grad()
def cost(model: Any, *read: list[int], answer: int) -> tuple[float, bool]:  # noqa: ANN401
    """Return the loss of a target at the last position, and whether it is the most likely token."""
    logits = model(*(torch.tensor([row]) for row in read)).reshape(-1, model.spec.vocab_size)[-1]
    return F.cross_entropy(logits[None], torch.tensor([answer])).item(), int(logits.argmax()) == answer


def check(report: gh.evaluation.Report, costs: Sequence[tuple[float, bool]]) -> None:
    loss = sum(one for one, _ in costs) / len(costs)
    assert report.n_targets == len(costs)
    assert report.metrics["loss"] == pytest.approx(loss, rel=CLOSE)
    assert report.metrics["accuracy"] == sum(right for _, right in costs) / len(costs)
    if "perplexity" in report.metrics:
        assert report.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=10 * CLOSE)  # loss * CLOSE, below 10


# Running text.


def test_text_loss_equals_a_loop_over_tokens(tok: gh.Tokenizer, tmp_path: Path) -> None:
    texts = ["to be or not to be", "that is the question", "é"]  # 18 + 20 + 2 bytes and 3 ends: 43 tokens
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    model = make("tiny-decoder")
    report = gh.evaluate(model, tok, tmp_path, seq_len=8, batch_size=3)
    end = tok.special_id("eos")
    ids = [token for text in texts for token in [*tok.encode(text), end]]
    costs, n_bytes = [], 0
    for start in range(0, 40, 8):
        for position in range(start, start + 8):
            # An end begins the text after it, which sees nothing of what was before.
            first = max([start, *(k for k in range(start, position + 1) if ids[k] == end)])
            costs.append(cost(model, ids[first : position + 1], answer=ids[position + 1]))
            n_bytes += ids[position + 1] != end
    check(report, costs)
    total = sum(one for one, _ in costs)
    assert report.metrics["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=CLOSE)
    assert (report.kind, report.n_too_long) == ("text", 0)
    assert (report.examples[0].input, report.examples[0].reference) == ("to b", "e or")
    predictions = gh.generate(model, tok, [[end, *tok.encode("to b")]], max_new_tokens=32, stop_token_ids=(end,))
    assert report.examples[0].prediction == predictions[0].text


def test_bits_per_byte_by_hand(tmp_path: Path) -> None:
    """Twenty tokens, nineteen of two bytes and an end, each as likely as any other of 264."""
    tok = gh.Tokenizer.train(texts=["ab ab ab"], vocab_size=264)
    (tmp_path / "a.txt").write_text("ab" * 20)
    model = gh.build(gh.preset("tiny-decoder", **SIZE | {"vocab_size": 264}))
    torch.nn.init.zeros_(model.head.weight)
    report = gh.evaluate(model, tok, tmp_path / "a.txt", seq_len=20)
    assert report.n_targets == 20
    assert report.metrics["perplexity"] == pytest.approx(264, rel=10 * CLOSE)
    assert report.metrics["bits_per_byte"] == pytest.approx(20 * math.log2(264) / 38, rel=CLOSE)


def test_no_bits_per_byte_without_byte_level_tokens(tmp_path: Path) -> None:
    """What a word spells depends on whether another stands before it."""
    words = {"type": "WordLevel", "vocab": {"[SEP]": 0, "to": 1, "be": 2}, "unk_token": "[SEP]"}
    file = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    tok = gh.Tokenizer.from_json(json.dumps(file), {"sep_token": "[SEP]", "mask_token": "be"})
    (tmp_path / "a.txt").write_text("to be be to be")
    with gh.evaluation.opened(tmp_path / "a.txt", tok) as corpus:
        report = gh.evaluate(make("tiny-decoder"), tok, corpus, seq_len=4)
        assert text_of(corpus) == b"to to"  # without what is special
    assert set(report.metrics) == {"loss", "perplexity", "accuracy"}


def test_masked_loss_equals_a_loop_over_tokens(tok: gh.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question")
    model = make("tiny-encoder", dropout=0.5)
    corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "ids")
    report = gh.evaluate(model.train(), tok, corpus, seq_len=10, batch_size=2)
    assert gh.evaluate(model.eval(), tok, corpus, seq_len=10, batch_size=2) == report
    samples, costs = MaskedLMDataset(corpus, 10), []
    for number in range(4):
        batch = samples.batch([number])
        with torch.no_grad():
            logits = model(batch.ids)[0]
        for position in range(10):
            if batch.loss_mask[0, position]:
                answer = int(batch.targets[0, position])
                loss = F.cross_entropy(logits[position][None], torch.tensor([answer])).item()
                costs.append((loss, int(logits[position].argmax()) == answer))
    check(report, costs)
    assert set(report.metrics) == {"loss", "perplexity", "accuracy"}
    shown = samples.batch([0])
    assert report.examples[0].reference == " | ".join(tok.decode([i]) for i in shown.targets[0][shown.loss_mask[0]])


# Labels.


def slow_f1(predictions: list[str], expected: list[str]) -> float:
    scores = []
    for label in {*predictions, *expected}:
        both = sum(s == e == label for s, e in zip(predictions, expected, strict=True))
        precision = both / predictions.count(label) if label in predictions else 0
        recall = both / expected.count(label) if label in expected else 0
        scores.append(2 * precision * recall / (precision + recall) if both else 0)
    return sum(scores) / len(scores)


@pytest.mark.parametrize("names", [(), ("green", "sour", "red", "blue")])
def test_labels_are_matched_by_name(names: tuple[str, ...], tok: gh.Tokenizer, tmp_path: Path) -> None:
    """A model with names may number its labels otherwise, and know more; one without counts as the corpus does."""
    items = [(f"pea {number}", ("red", "green", "blue")[number % 3]) for number in range(30)]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in items))
    model = make("tiny-encoder", head={"kind": "sequence_classification", "n_labels": 4, "labels": names})
    report = gh.evaluate(model, tok, tmp_path / "a.tsv", kind="labelled", batch_size=4)
    known = names or ("blue", "green", "red", "label 3")
    end = tok.special_id("eos")
    predictions, losses = [], []
    for text, label in items:
        with torch.no_grad():
            logits = model(torch.tensor([[end, *tok.encode(text), end]]))[0]
        predictions.append(known[int(logits.argmax())])
        losses.append(F.cross_entropy(logits, torch.tensor(known.index(label))).item())
    expected = [label for _, label in items]
    assert len({*predictions}) > 1  # or the order of labels would not show
    check(report, [(loss, s == e) for loss, s, e in zip(losses, predictions, expected, strict=True)])
    assert report.metrics["f1"] == pytest.approx(slow_f1(predictions, expected))
    assert set(report.metrics) == {"loss", "accuracy", "f1"}
    answers = dict(zip((text for text, _ in items), zip(expected, predictions, strict=True), strict=True))
    assert [(one.reference, one.prediction) for one in report.examples] == [
        answers[one.input] for one in report.examples
    ]


def test_a_label_that_the_model_lacks_is_refused(tok: gh.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\tlabel\npea\tgreen\nplum\tblue\n")
    model = make("tiny-encoder", head={"kind": "sequence_classification", "n_labels": 2, "labels": ["green", "red"]})
    with pytest.raises(InputError, match="has the label 'blue', which the model lacks; it has green, red"):
        gh.evaluate(model, tok, tmp_path / "a.tsv", kind="labelled")


@pytest.mark.parametrize("names", [(), ("green", "sour", "red", "blue")])
def test_tags_are_evaluated_per_word(names: tuple[str, ...], tok: gh.Tokenizer, tmp_path: Path) -> None:
    """Items have one to six words, and the longest are truncated: truncated words have no targets."""
    many = [[str(number * at * 7 % 100) for at in range(1, number % 6 + 2)] for number in range(13)]
    colours = ("red", "green", "blue")
    rows = [(words, [colours[(n + at) % 3] for at in range(len(words))]) for n, words in enumerate(many)]
    lines = (json.dumps({"words": words, "tags": tags}) for words, tags in rows)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    model = make("tiny-encoder", head={"kind": "token_classification", "n_labels": 4, "labels": names})
    report = gh.evaluate(model, tok, tmp_path / "a.jsonl", kind="tagged", batch_size=4, seq_len=14)
    known = names or ("blue", "green", "red", "label 3")
    end = tok.special_id("eos")
    predictions, expected, costs, shown = [], [], [], {}
    for words, tags in rows:
        text = " ".join(words)[:12]
        with torch.no_grad():
            logits = model(torch.tensor([[end, *tok.encode(text), end]]))[0]
        position, answers = 0, []
        for at, (word, tag) in enumerate(zip(words, tags, strict=True)):
            if position < len(text):
                own = text[position : position + len(word) + (at > 0)].strip()  # with the space before it
                answers.append((own, tag, known[int(logits[position + 1].argmax())]))
                loss = F.cross_entropy(logits[position + 1], torch.tensor(known.index(tag))).item()
                costs.append((loss, answers[-1][2] == tag))
            position += len(word) + (at > 0)
        expected += [tag for _, tag, _ in answers]
        predictions += [tag for *_, tag in answers]
        shown[text] = tuple(" ".join(f"{one[0]}/{one[n]}" for one in answers) for n in (1, 2))
    assert len(expected) < sum(map(len, many))  # some are cut off
    assert len({*predictions}) > 1
    check(report, costs)
    assert report.metrics["f1"] == pytest.approx(slow_f1(predictions, expected))
    assert set(report.metrics) == {"loss", "accuracy", "f1"}
    assert len(report.examples) == 3
    assert [(one.reference, one.prediction) for one in report.examples] == [
        shown[one.input] for one in report.examples
    ]


def test_a_tag_that_the_model_lacks_is_refused(tok: gh.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"words": ["pea", "plum"], "tags": ["green", "blue"]}')
    model = make("tiny-encoder", head={"kind": "token_classification", "n_labels": 2, "labels": ["green", "red"]})
    with pytest.raises(InputError, match="has the label 'blue', which the model lacks; it has green, red"):
        gh.evaluate(model, tok, tmp_path / "a.jsonl", kind="tagged")


# Answers.


def learn(model: Any, samples: gh.data.Dataset) -> None:  # noqa: ANN401
    """Let a model learn a few samples by heart."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = samples.batch(range(len(samples)))
    loss = torch.tensor(torch.inf)
    while loss > 0.05:
        logits = batch.forward(model)
        loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def write_pairs(path: Path, pairs: dict[str, str]) -> Path:
    path.write_text("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in pairs.items()))
    return path


@pytest.fixture(scope="module")
def translator(tok: gh.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    folder = tmp_path_factory.mktemp("pairs")
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-seq2seq", **SIZE, start_id=tok.special_id("eos")))
    corpus = gh.data.prepare(write_pairs(folder / "a.tsv", PAIRS), tok, folder / "ids", kind="pairs")
    learn(model, gh.data.Seq2SeqDataset(corpus, len(PAIRS), max_len=64))
    return model.eval()


def test_memorized_pairs(translator: Any, tok: gh.Tokenizer, tmp_path: Path) -> None:  # noqa: ANN401
    path = write_pairs(tmp_path / "a.tsv", PAIRS)
    report = gh.evaluate(translator, tok, path, kind="pairs", batch_size=4)
    end = tok.special_id("eos")
    costs = []
    for source, target in PAIRS.items():
        ids = [end, *tok.encode(target), end]
        costs += [
            cost(translator, [*tok.encode(source), end], ids[: at + 1], answer=ids[at + 1])
            for at in range(len(ids) - 1)
        ]
    check(report, costs)
    assert report.metrics["accuracy"] == report.metrics["exact_match"] == 1
    assert report.metrics["bleu"] == gh.evaluation.bleu([*PAIRS.values()], [*PAIRS.values()]).value
    assert report.metrics["chrf"] == pytest.approx(100)
    firsts = list(PAIRS.items())[:3]
    assert [(one.input, one.reference, one.prediction) for one in report.examples] == [(a, b, b) for a, b in firsts]


def test_one_of_six_wrong_is_one_of_six(translator: Any, tok: gh.Tokenizer, tmp_path: Path) -> None:  # noqa: ANN401
    path = write_pairs(tmp_path / "a.tsv", PAIRS | {"no": "niemals"})
    metrics = gh.evaluate(translator, tok, path, kind="pairs").metrics
    assert metrics["exact_match"] == pytest.approx(5 / 6)
    references = [*(PAIRS | {"no": "niemals"}).values()]
    assert metrics["chrf"] == gh.evaluation.chrf([*PAIRS.values()], references).value
    only = gh.evaluate(translator, tok, path, kind="pairs", generate=2)
    assert (only.n_generated, len(only.examples)) == (2, 2)
    assert only.metrics["exact_match"] == sum(one.prediction == one.reference for one in only.examples) / 2
    # With a limit, every figure is over the same items: those that were read are those that are answered.
    for count in range(1, 6):
        some = gh.evaluate(translator, tok, path, kind="pairs", limit=count)
        assert (some.metrics["exact_match"] == 1) == (some.metrics["accuracy"] == 1), count
    none = gh.evaluate(translator, tok, path, kind="pairs", generate=0)
    assert "exact_match" not in none.metrics
    assert "bleu" not in none.metrics
    assert none.examples == []


@pytest.mark.long
def test_all_items_are_evaluated_by_default(translator: Any, tok: gh.Tokenizer, tmp_path: Path) -> None:  # noqa: ANN401
    """The last item of 201 is the only one that is wrong."""
    many = [*PAIRS.items()] * 33 + [("yes", "ja"), ("no", "nein"), ("and", "oder")]
    path = tmp_path / "a.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in many))
    predictions, references = [PAIRS[source] for source, _ in many], [target for _, target in many]
    whole = gh.evaluate(translator, tok, path, kind="pairs")
    assert (whole.n_items, whole.n_evaluated, whole.n_generated) == (201, 201, 201)
    assert whole.metrics["exact_match"] == 200 / 201
    for name, score in (
        ("bleu", gh.evaluation.bleu(predictions, references)),
        ("chrf", gh.evaluation.chrf(predictions, references)),
    ):
        assert (whole.metrics[name], whole.signatures[name]) == (score.value, score.signature)
    part = gh.evaluate(translator, tok, path, kind="pairs", limit=12)
    assert (part.n_items, part.n_evaluated, part.n_generated) == (201, 12, 12)
    assert whole.n_targets == sum(len(target) + 1 for target in references)
    few = gh.evaluate(translator, tok, path, kind="pairs", generate=3)
    assert (few.n_items, few.n_evaluated, few.n_generated, few.n_targets) == (201, 201, 3, whole.n_targets)


def test_answers_by_beam_search(translator: Any, tok: gh.Tokenizer, tmp_path: Path) -> None:  # noqa: ANN401
    report = gh.evaluate(translator, tok, write_pairs(tmp_path / "a.tsv", PAIRS), kind="pairs", beams=3, n_best=2)
    end = tok.special_id("eos")
    for example in report.examples:
        source = [*tok.encode(example.input), end]
        most = 2 * len("nicht") + 1
        found = gh.generate(translator, tok, [source], most, beams=3, n=2, stop_token_ids=(end,))
        assert example.prediction == found[0].text
        assert [text for _, text in example.n_best] == [one.text for one in found]
        assert [score for score, _ in example.n_best] == pytest.approx([one.score for one in found], abs=1e-4)
    one = gh.evaluate(translator, tok, write_pairs(tmp_path / "a.tsv", PAIRS), kind="pairs", beams=3)
    assert (one.metrics, [example.n_best for example in one.examples]) == (report.metrics, [()] * 3)


def test_items_that_are_too_long_are_counted(translator: Any, tok: gh.Tokenizer, tmp_path: Path) -> None:  # noqa: ANN401
    path = write_pairs(tmp_path / "a.tsv", PAIRS)
    report = gh.evaluate(translator, tok, path, kind="pairs", seq_len=5)  # "nicht" and "to be" make 6 with an end
    assert report.n_too_long == 2
    assert report.n_targets == sum(len(target) + 1 for target in PAIRS.values() if len(target) < 5) - len("sein") - 1


def test_without_sacrebleu_there_is_no_bleu(
    translator: Any,  # noqa: ANN401
    tok: gh.Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else real(name))
    report = gh.evaluate(translator, tok, write_pairs(tmp_path / "a.tsv", PAIRS), kind="pairs")
    assert set(report.metrics) == {"loss", "perplexity", "accuracy", "exact_match"}


def test_the_last_answer_of_a_conversation(tok: gh.Tokenizer, tmp_path: Path) -> None:
    chats = []
    for number, word in enumerate(("pea", "plum", "fig", "rye")):
        turns = [f"{number}?", f"{word}.", "again", word.upper()]
        roles = ("user", "assistant") * 2
        chats.append([{"role": role, "content": content} for role, content in zip(roles, turns, strict=True)])

    def write(name: str) -> Path:
        lines = (json.dumps({"messages": messages}) for messages in chats)
        (tmp_path / name).write_text("\n".join(lines))
        return tmp_path / name

    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", **SIZE))
    corpus = gh.data.prepare(write("a.jsonl"), tok, tmp_path / "ids", kind="chat")
    learn(model, gh.data.ChatDataset(corpus, len(chats), max_len=64))
    report = gh.evaluate(model.eval(), tok, corpus, batch_size=3)
    costs = []
    for messages in chats:
        ids, answer = corpus.tokenizer.encode_chat(messages)
        costs += [cost(model, ids[:at], answer=ids[at]) for at in range(1, len(ids)) if answer[at]]
    check(report, costs)
    assert report.metrics["exact_match"] == 1
    first = report.examples[0]
    assert first.input == "<|user|>0?<|end|><|assistant|>pea.<|end|><|user|>again<|end|><|assistant|>"
    assert (first.reference, first.prediction) == ("PEA", "PEA")
    chats[1][3]["content"] = "PLUMS"
    wrong = gh.evaluate(model, tok, write("b.jsonl"), kind="chat")
    assert wrong.metrics["exact_match"] == 3 / 4
    assert set(wrong.metrics) == {"loss", "perplexity", "accuracy", "exact_match"}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [([2, 2], (2, 4)), ([1, 1, 1, 1], (3, 4)), ([1, 2, 1], (1, 3)), ([0, 1, 2, 1], (3, 4)), ([1, 2, 0, 1], (1, 4))],
)
def test_position_of_the_last_answer(runs: list[int], expected: tuple[int, int]) -> None:
    """Runs are context, answer, and so on; what follows the last answer is dropped, and a truncated answer counts."""
    ids = torch.arange(10, 14).numpy()
    start, stop = expected
    assert last_answer(ids, torch.tensor(runs).numpy()) == (ids[:start].tolist(), ids[start:stop].tolist())


# What is measured.


def test_all_forms_of_data_give_the_same_report(
    tok: gh.Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be" * 10)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    corpus = gh.data.prepare(path, tok, tmp_path / "ids")
    model = make("tiny-decoder", dropout=0.5).train()
    named = [path, str(path), [path], str(tmp_path / "*.txt"), tmp_path / "ids", str(tmp_path / "ids"), corpus]
    stages = []
    reports = [gh.evaluate(model, tok, one, progress=lambda *call: stages.append(call)) for one in named]
    assert all(report == reports[0] for report in reports)
    assert model.training
    assert list((tmp_path / "scratch").iterdir()) == []
    assert {stage for stage, _, _ in stages} == {"tokenizing", "evaluating", "generating"}
    assert all(done <= total for _, done, total in stages)


def test_limit_on_a_builtin_dataset(tok: gh.Tokenizer) -> None:
    model = make("tiny-seq2seq", start_id=0)
    some = [gh.evaluate(model, tok, "dates", split=split, limit=5, generate=0) for split in ("validation", "test")]
    assert some[0].metrics != some[1].metrics
    # Five dates as they are written in ISO, and the end of each.
    assert [one.n_targets for one in some] == [5 * (len("2000-01-01") + 1)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "pairs"}, "kind is 'pairs', but the corpus is of kind text"),
        ({"seq_len": 100}, "seq_len is 100, but the model has positions for 64"),
        ({"seq_len": 60}, "the corpus has 19 tokens"),
        ({"batch_size": 0, "seq_len": 8}, "batch_size is 0"),
        ({"limit": 0, "seq_len": 8}, "limit is 0"),
        ({"generate": -1, "seq_len": 8}, "generate is -1"),
        ({"beams": 0, "seq_len": 8}, "beams is 0"),
        (
            {"beams": 2, "n_best": 3, "seq_len": 8},
            "n_best is 3, but a beam search of width 2 finds no more than 2; raise beams",
        ),
    ],
)
def test_invalid_arguments_are_named(
    settings: dict[str, Any], message: str, tok: gh.Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "ids")
    with pytest.raises(InputError, match=message):
        gh.evaluate(make("tiny-decoder", position="learned"), tok, corpus, **settings)


def test_data_and_models_that_do_not_fit(tok: gh.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    other = gh.Tokenizer.train(texts=["to be or not to be"] * 2, vocab_size=264)
    decoder, corpus = make("tiny-decoder"), gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "ids")
    with pytest.raises(InputError, match="264 tokens, but vocab_size is 263"):
        gh.evaluate(decoder, other, corpus)
    bigger = make("tiny-decoder", vocab_size=264)
    with pytest.raises(InputError, match="tokenized by another tokenizer"):
        gh.evaluate(bigger, other, corpus)
    with pytest.raises(StoreError, match="encoded with another tokenizer"):
        gh.evaluate(bigger, other, tmp_path / "ids")
    with pytest.raises(InputError, match="tok is None"):
        gh.evaluate(decoder, None, corpus)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be trained"):
        gh.evaluate(make("tiny-seq2seq"), tok, corpus)
    stages = []
    with pytest.raises(InputError, match="no start_id"):
        gh.evaluate(make("tiny-seq2seq"), tok, "dates", limit=2, progress=lambda stage, *_: stages.append(stage))
    assert "evaluating" not in stages  # fails before the evaluation


# Baselines.


def test_the_text_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "IDS", 7)
    tok = gh.Tokenizer.train(texts=["to be or not to be"] * 3, vocab_size=268)
    texts = ["to be or not to be", "é<|endoftext|>", "that is the question"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = gh.data.prepare(tmp_path, tok, tmp_path / "ids")
    whole = "".join(texts).encode()
    assert text_of(corpus) == whole
    before, after = map(text_of, corpus.split(0.3))
    assert before + after == whole
    assert 0 < len(after) < len(before)
    bits = baseline_bits(corpus, train=corpus.split(0.3)[0])
    counts = gh.evaluation.ByteModel(5)
    counts.train([before])
    assert bits == {
        "gzip": gh.evaluation.compressed_bits(whole, by="gzip"),
        "xz": gh.evaluation.compressed_bits(whole, by="xz"),
        "byte 5-gram": counts.bits(whole),
    }


def test_only_running_text_has_bytes(tok: gh.Tokenizer, tmp_path: Path) -> None:
    corpus = gh.data.prepare(write_pairs(tmp_path / "a.tsv", PAIRS), tok, tmp_path / "ids", kind="pairs")
    with pytest.raises(InputError, match="of kind pairs"):
        text_of(corpus)
