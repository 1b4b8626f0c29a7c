"""Which samples a model learns from: its head says what is asked of it, the corpus what there is to ask."""

from __future__ import annotations

from glasshouse import spec
from glasshouse.data.batches import Samples
from glasshouse.data.corpus import TEXTS, Corpus, Kind
from glasshouse.data.items import Conversations, Labelled, Pairs, Tagged, frame
from glasshouse.data.rows import MaskedText, RunningText
from glasshouse.errors import InputError


def make_samples(s: spec.Spec, corpus: Corpus, *, batch_size: int, length: int, seed: int = 0) -> Samples:
    """Return the samples of a corpus for a model: rows of `length` ids, or items with no more than so many.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/hamlet.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{place}/hamlet.txt", tok, f"{place}/corpus")
    >>> for name in ("tiny-decoder", "tiny-encoder"):
    ...     print(type(make_samples(gh.preset(name), corpus, batch_size=1, length=8)).__name__)
    RunningText
    MaskedText
    """
    match s, s.head, corpus.kind:
        case spec.DecoderSpec(), spec.NextToken(), "text":
            return RunningText(corpus, length, seed=seed)
        case spec.DecoderSpec(), spec.NextToken(), "chat":
            return Conversations(corpus, batch_size, max_len=length, seed=seed)
        case spec.EncoderSpec(), spec.MaskedToken(), "text":
            return MaskedText(corpus, length, seed=seed)
        case spec.Seq2SeqSpec(), _, "pairs":
            return Pairs(corpus, batch_size, max_len=length, seed=seed, start=s.start_id)
        case _, spec.SequenceLabel(n_labels), "labelled" if n_labels >= len(corpus.labels):
            return Labelled(corpus, batch_size, max_len=length, seed=seed)
        case _, spec.TokenLabel(n_labels), "tagged" if n_labels >= len(corpus.labels):
            return Tagged(corpus, batch_size, max_len=length, seed=seed)
        case (_, spec.SequenceLabel(n_labels), "labelled") | (_, spec.TokenLabel(n_labels), "tagged"):
            raise InputError(f"the model knows {n_labels} labels, but the corpus has {len(corpus.labels)}.")
    raise InputError(
        f"the corpus is of kind {corpus.kind}, which a model of kind {s.kind} with the head {s.head.kind} does not "
        "learn from: next tokens go with text and chat, masked tokens with text, an encoder-decoder with "
        "pairs, labels of sequences with labelled and labels of tokens with tagged."
    )


def kind_for(s: spec.Spec) -> Kind | None:
    """Return the one kind of data that a model learns from; None where its data may be of several.

    >>> kind_for(spec.preset("tiny-seq2seq")), kind_for(spec.preset("tiny-decoder"))
    ('pairs', None)
    """
    match s, s.head:
        case spec.Seq2SeqSpec(), _:
            return "pairs"
        case _, spec.SequenceLabel():
            return "labelled"
        case _, spec.TokenLabel():
            return "tagged"
    return None


def rows_of(corpus: Corpus, tokens: int, length: int) -> int:
    """Return how many samples make about so many tokens, all in all; at most as many as there are."""
    if corpus.kind == "text":
        return max(1, tokens // length)
    lengths = corpus.lengths[:, : TEXTS[corpus.kind]]
    if corpus.kind in ("labelled", "tagged"):
        lengths = lengths.clip(max=length - 2)  # they are cut
    around = sum(map(len, frame(corpus))) if corpus.kind == "pairs" else 1  # tokens that start or end a row
    fitting = lengths[(lengths <= length - around).all(1)]
    mean = float(fitting.sum(1).mean()) if len(fitting) else 1.0
    return max(1, min(round(tokens / max(mean, 1.0)), len(fitting)))
