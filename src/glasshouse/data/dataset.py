"""Chooses the dataset for a model from its spec and the kind of the corpus."""

from __future__ import annotations

from glasshouse import spec
from glasshouse.data.batches import Dataset
from glasshouse.data.corpus import TOKEN_ARRAYS_PER_ITEM, Corpus, Kind
from glasshouse.data.item_datasets import (
    ChatDataset,
    ClassificationDataset,
    Seq2SeqDataset,
    TokenClassificationDataset,
    source_prefix_suffix,
)
from glasshouse.data.text_datasets import CausalLMDataset, MaskedLMDataset
from glasshouse.errors import InputError


def make_dataset(s: spec.Spec, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0) -> Dataset:
    """Return the dataset of a corpus for a model: sequences of `seq_len` ids, or items of at most that length.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/hamlet.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{folder}/hamlet.txt", tok, f"{folder}/corpus")
    >>> for name in ("tiny-decoder", "tiny-encoder"):
    ...     print(type(make_dataset(gh.preset(name), corpus, batch_size=1, seq_len=8)).__name__)
    CausalLMDataset
    MaskedLMDataset
    """
    match s, s.head, corpus.kind:
        case spec.DecoderSpec(), spec.NextToken(), "text":
            return CausalLMDataset(corpus, seq_len, seed=seed)
        case spec.DecoderSpec(), spec.NextToken(), "chat":
            return ChatDataset(corpus, batch_size, max_len=seq_len, seed=seed)
        case spec.EncoderSpec(), spec.MaskedToken(), "text":
            return MaskedLMDataset(corpus, seq_len, seed=seed)
        case spec.Seq2SeqSpec(), _, "pairs":
            return Seq2SeqDataset(corpus, batch_size, max_len=seq_len, seed=seed, start=s.start_id)
        case _, spec.SequenceClassification(n_labels), "labelled" if n_labels >= len(corpus.labels):
            return ClassificationDataset(corpus, batch_size, max_len=seq_len, seed=seed)
        case _, spec.TokenClassification(n_labels), "tagged" if n_labels >= len(corpus.labels):
            return TokenClassificationDataset(corpus, batch_size, max_len=seq_len, seed=seed)
        case (_, spec.SequenceClassification(n_labels), "labelled") | (
            _,
            spec.TokenClassification(n_labels),
            "tagged",
        ):
            raise InputError(f"the model has {n_labels} labels, but the corpus has {len(corpus.labels)}.")
    raise InputError(
        f"the corpus is of kind {corpus.kind}, on which a model of kind {s.kind} with the head {s.head.kind} cannot "
        "be trained: causal language models take text and chat, masked language models text, encoder-decoders "
        "pairs, sequence classification labelled and token classification tagged."
    )


def required_kind(s: spec.Spec) -> Kind | None:
    """Return the one kind of data that a model can be trained on; None if there are several.

    >>> required_kind(spec.preset("tiny-seq2seq")), required_kind(spec.preset("tiny-decoder"))
    ('pairs', None)
    """
    match s, s.head:
        case spec.Seq2SeqSpec(), _:
            return "pairs"
        case _, spec.SequenceClassification():
            return "labelled"
        case _, spec.TokenClassification():
            return "tagged"
    return None


def samples_for_tokens(corpus: Corpus, tokens: int, seq_len: int) -> int:
    """Return how many samples have about `tokens` tokens in total; at most as many as there are."""
    if corpus.kind == "text":
        return max(1, tokens // seq_len)
    lengths = corpus.lengths[:, : TOKEN_ARRAYS_PER_ITEM[corpus.kind]]
    if corpus.kind in ("labelled", "tagged"):
        lengths = lengths.clip(max=seq_len - 2)  # they are truncated
    # Special tokens of a sequence.
    extra = sum(map(len, source_prefix_suffix(corpus))) if corpus.kind == "pairs" else 1
    fitting = lengths[(lengths <= seq_len - extra).all(1)]
    mean = float(fitting.sum(1).mean()) if len(fitting) else 1.0
    return max(1, min(round(tokens / max(mean, 1.0)), len(fitting)))
