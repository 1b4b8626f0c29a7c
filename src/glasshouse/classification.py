"""Labels of texts from a model with a sequence-classification head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glasshouse import spec
from glasshouse.data.encoding import classifier_ends
from glasshouse.embeddings import check_texts, length_batches
from glasshouse.errors import InputError, check_count
from glasshouse.models import Decoder, Encoder, Model
from glasshouse.text import Tokenizer


@dataclass(frozen=True)
class Classification:
    """The label of a text."""

    label: str  # the most probable one
    probability: float
    probabilities: dict[str, float]  # of every label, the most probable first
    truncated: bool = False  # whether the text was longer than max_len, and its end was not read


@torch.no_grad()
def classify(
    model: Model,
    tok: Tokenizer | None,
    texts: str | Sequence[str],
    *,
    batch_size: int = 32,
    truncate: bool = False,
) -> list[Classification]:
    """Return the most probable label of each text, and the probabilities of all.

    A text stands between a start and an end token, as in training; a decoder that reads the last token gets it as the
    tokenizer encodes it. Texts of similar length share a batch; neither that nor padding changes a result. A text
    longer than max_len is an error, or truncated with `truncate`.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["a red pea"], vocab_size=263)
    >>> head = {"kind": "sequence_classification", "n_labels": 2, "labels": ["good", "bad"]}
    >>> model = gh.build(gh.preset("tiny-encoder", vocab_size=263, head=head)).eval()
    >>> _ = torch.nn.init.zeros_(model.head.classifier.weight)
    >>> model.head.classifier.bias.data = torch.tensor([3.0, 1.0]).log()
    >>> [(one.label, round(one.probability, 4)) for one in gh.classify(model, tok, ["a red pea", "a pea"])]
    [('good', 0.75), ('good', 0.75)]
    """
    head = model.spec.head
    if not isinstance(head, spec.SequenceClassification) or not isinstance(model, Encoder | Decoder):
        raise InputError(f"the model {_instead(model.spec)}")
    tok, texts = check_texts(model, tok, texts)
    check_count("batch_size", batch_size)
    before, after = classifier_ends(model.spec, tok)
    room = model.spec.max_len - len(before) - len(after)
    encoded = tok.encode_batch(texts, add_special_tokens=False)
    for number, ids in enumerate(encoded):
        if len(ids) > room and not truncate:
            raise InputError(
                f"text {number} is {len(ids)} tokens long, but max_len is {model.spec.max_len}, with "
                f"{len(before) + len(after)} tokens around a text; shorten it, or set truncate."
            )
        if not (before or ids or after):
            raise InputError(f"text {number} is {texts[number]!r}, which has no tokens; leave it out.")
    device = model.token_embedding.table.weight.device
    logits = torch.empty(len(texts), head.n_labels)
    rows = [[*before, *ids[:room], *after] for ids in encoded]
    for chosen, padded, lengths in length_batches(rows, batch_size):
        logits[chosen] = model(padded.to(device), lengths=lengths.to(device)).float().cpu()
    if not bool(logits.isfinite().all()):
        number = int((~logits.isfinite()).any(1).nonzero()[0])
        raise InputError(
            f"the logits of text {number} have NaN: the model's weights, or its activations on this text, are not "
            "finite; check the weights for NaN, or load float16 weights as float32."
        )
    names = head.labels or tuple(f"label {number}" for number in range(head.n_labels))
    found = []
    for row, ids in zip(logits.softmax(-1).tolist(), encoded, strict=True):
        ranked = dict(sorted(zip(names, row, strict=True), key=lambda one: -one[1]))
        label, probability = next(iter(ranked.items()))
        found.append(Classification(label, probability, ranked, len(ids) > room))
    return found


def _instead(s: spec.Spec) -> str:
    """Say what a model has in place of a classifier of texts, and what to do."""
    match s.kind, s.head:
        case _, spec.TokenClassification():
            return "gives each word a tag, and no text a label; look at its tags by `glasshouse look MODEL`."
        case "encoder" | "decoder", _:
            kind = "an encoder" if s.kind == "encoder" else "a decoder"
            return (
                f"is {kind} with the head {s.head.kind!r}, which gives texts no label; fine-tune it by "
                "`glasshouse train finetune-classifier model.from=MODEL data.path=FILE`."
            )
        case _:
            return (
                "is an encoder-decoder, which generates texts and gives them no label; use `glasshouse generate`, or "
                "train a classifier by `glasshouse train classify data.path=FILE`."
            )
