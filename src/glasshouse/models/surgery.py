"""Model surgery: give a trained model a new tokenizer, a new classification head, or draft heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.value_embedding import ValueTable
from glasshouse.models.builder import Model, build, has_registered_parts, instantiate_unfilled
from glasshouse.models.checks import check_tokenizer, checked_weights
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.generation_config import FILE as GENERATION_CONFIG
from glasshouse.models.heads import LMHead
from glasshouse.models.weights import assign_weights, init_weights
from glasshouse.text import Tokenizer
from glasshouse.text.chat.tokens import chat_token_ids

M = TypeVar("M", Encoder, Decoder, Encoder | Decoder)


@torch.no_grad()
def with_tokenizer(model: Model, old: Tokenizer, new: Tokenizer) -> Model:
    """Return a copy of a model with the vocabulary of a new tokenizer.

    A token that both tokenizers have, by its text or else by its special-token role, keeps its embedding. A new one
    gets the mean embedding of the old tokens that its text is encoded to, or of all old tokens if there are none.

    >>> import glasshouse as gh
    >>> old, new = (gh.Tokenizer.train(texts=["to be"], vocab_size=size) for size in (263, 264))
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    >>> resized = with_tokenizer(model, old, new)
    >>> resized.spec.vocab_size, new.id_to_token(263), [old.id_to_token(number) for number in old.encode("be")]
    (264, 'be', ['b', 'e'])
    >>> before, after = (each.token_embedding.table.weight for each in (model, resized))
    >>> torch.equal(after[263], before[old.encode("be")].mean(0))
    True
    """
    check_tokenizer(model, old, "the old tokenizer")
    old_ids = [_old_ids(number, old, new) for number in range(len(new))]
    per_token = {"token_embedding.table.weight"}
    if isinstance(model.head, LMHead):
        per_token |= {"head.weight", "head.bias"}
    per_token |= {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ValueTable)}
    weights = {
        name: _resize(weight, old_ids, sorted(old.ids)) if name in per_token else weight.clone()
        for name, weight in checked_weights(model).items()
    }
    resized = instantiate_unfilled(_spec(model.spec, old, new))
    _load(resized, weights, model)
    resized.tokenizer_fingerprint = new.fingerprint
    # generation_config.json contains ids, which are wrong for another vocabulary.
    resized.extra_files = {name: values for name, values in model.extra_files.items() if name != GENERATION_CONFIG}
    return resized


def new_tokens(old: Tokenizer, new: Tokenizer) -> list[int]:
    """Return the ids of a new tokenizer whose embeddings a model of the old one was never trained with.

    Those are the ids of tokens that it did not have, and, if its tokenizer had no chat template, those that a chat
    is written with.

    >>> from glasshouse.text.chat.tokens import with_chat_template
    >>> tok = Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> [tok.id_to_token(number) for number in new_tokens(tok, with_chat_template(tok))]
    ['<|system|>', '<|user|>', '<|assistant|>', '<|end|>']
    """
    same = old.fingerprint == new.fingerprint
    found = set() if same else {number for number in sorted(new.ids) if not _same_token(number, new, old)}
    if old.chat_template is None and new.chat_template is not None:
        found |= chat_token_ids(new)
    return sorted(found)


@torch.no_grad()
def with_classifier(model: Model, n_labels: int, *, per_token: bool = False) -> Encoder | Decoder:
    """Return a copy of a model with a new classification head, initialized with torch's random generator.

    If the old head pools, the new one pools in the same way. Otherwise it is the one that transformers has: that of
    an encoder reads the first token, that of a decoder the last one, through a single linear layer. With `per_token`
    an encoder classifies each token instead.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-encoder"))
    >>> with_classifier(model, 3)(torch.tensor([[1, 2], [3, 4]])).shape
    torch.Size([2, 3])
    >>> with_classifier(model, 3, per_token=True)(torch.tensor([[1, 2], [3, 4]])).shape
    torch.Size([2, 2, 3])
    """
    if not isinstance(model, Encoder | Decoder):
        raise InputError(
            f"the model is a {model.spec.kind}, but a classifier needs an encoder or a decoder; start from one."
        )
    head: spec.SequenceClassification | spec.TokenClassification
    match model.spec.kind, model.spec.head:
        case "decoder", _ if per_token:
            raise InputError(
                "the model is a decoder, whose tokens see none of those after them, but a token classifier needs an "
                "encoder; start from one."
            )
        case _ if per_token:
            head = spec.TokenClassification(n_labels)
        case _, spec.SequenceClassification() as old:
            head = replace(old, n_labels=n_labels, labels=())
        case _, spec.Pooled(pooling, dense):
            head = spec.SequenceClassification(n_labels, pooling, dense)
        case _:
            head = _new_classifier(model.spec, n_labels)
    kept = {name: weight for name, weight in checked_weights(model).items() if not name.startswith("head.")}
    return _with_head(model, head, kept)


def _new_classifier(s: spec.DecoderSpec | spec.EncoderSpec, n_labels: int) -> spec.SequenceClassification:
    """Return the classification head that transformers has for such a model, so that it can be exported."""
    if isinstance(s, spec.DecoderSpec):
        return spec.SequenceClassification(n_labels, "last", dense=False, bias=False)
    if not s.first_norm:  # ModernBERT
        return spec.SequenceClassification(n_labels, dense_kind="transform", dense_bias=False)
    if s.position == spec.Learned() and s.n_segments == 0:  # DistilBERT
        return spec.SequenceClassification(n_labels, dense_kind="relu")
    return spec.SequenceClassification(n_labels)


@torch.no_grad()
def with_draft_heads(model: Model, n_draft_heads: int) -> Decoder:
    """Return a copy of a decoder with this many draft heads: those it has, and new ones; 0 removes them.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> drafting = with_draft_heads(model, 3)
    >>> len(drafting.head.drafts), torch.equal(drafting(torch.tensor([[1, 2]])), model(torch.tensor([[1, 2]])))
    (3, True)
    >>> with_draft_heads(drafting, 0).spec == model.spec
    True
    """
    if not isinstance(model, Decoder) or not isinstance(model.spec.head, spec.NextToken):
        raise InputError(
            f"the model is a {model.spec.kind} with the head {model.spec.head.kind}, but draft heads need a decoder "
            "that predicts the next token; start from one."
        )
    head = replace(model.spec.head, n_draft_heads=n_draft_heads)
    changed = _with_head(model, head, checked_weights(model))
    changed.extra_files = dict(model.extra_files)
    return changed


def _with_head(model: M, head: spec.Head, kept: Mapping[str, Tensor]) -> M:
    """Return a copy with another head, and copies of the weights that are `kept`; others are new."""
    table = model.token_embedding.table.weight
    changed = cast(M, instantiate_unfilled(replace(model.spec, head=head)))
    if has_registered_parts(changed.spec):
        changed.head = build(changed.spec, device=table.device, dtype=table.dtype).head
    else:
        changed.head.to(table.dtype).to_empty(device=table.device)
        init_weights(changed.head, changed.spec)
    weights = {f"head.{name}": weight for name, weight in changed.head.state_dict().items()}
    names = changed.state_dict().keys()
    weights |= {name: weight.clone() for name, weight in kept.items() if name in names}
    _load(changed, weights, model)
    changed.tokenizer_fingerprint = model.tokenizer_fingerprint
    return changed


def _load(copy: Model, weights: Mapping[str, Tensor], model: Model) -> None:
    assign_weights(copy, weights, buffers_of=model)
    copy.train(model.training)


def _resize(weight: Tensor, old_ids: list[list[int]], known: list[int]) -> Tensor:
    """Return a table [V, ...] with a row for each list of old ids: the mean of theirs, or of all known for none."""
    rows = weight[torch.tensor([ids[0] if ids else 0 for ids in old_ids])]
    mean = weight[torch.tensor(known)].mean(0)
    for number, ids in enumerate(old_ids):
        if len(ids) != 1:
            rows[number] = weight[torch.tensor(ids)].mean(0) if ids else mean
    return rows


def _old_ids(number: int, old: Tokenizer, new: Tokenizer) -> list[int]:
    """Return the old ids that a new one corresponds to."""
    if number not in new.ids:
        return []
    if (found := _same_token(number, new, old)) or number in new.special_ids:  # a special token's text is arbitrary
        return found
    try:
        return old.encode(new.decode_bytes([number]), add_special_tokens=False)
    except InputError:  # invalid UTF-8, which the old tokenizer cannot encode
        return []


def _same_token(number: int, here: Tokenizer, there: Tokenizer) -> list[int]:
    """Return the other tokenizer's id of the same token, or else its ids of the same special-token roles."""
    token = here.id_to_token(number)
    same = there.token_to_id(token)
    # Byte-level vocabularies write bytes as letters, which are plain letters in other vocabularies.
    if same is not None and there.decode_bytes([same]) == here.decode_bytes([number]):
        return [same]
    return _special_ids(there, *(role for role, text in here.special_tokens.items() if text == token))


def _special_ids(tok: Tokenizer, *roles: str) -> list[int]:
    found = (tok.special_id(role) for role in roles)
    return list(dict.fromkeys(number for number in found if number is not None))


def _spec(s: spec.Spec, old: Tokenizer, new: Tokenizer) -> spec.Spec:
    """Return the spec with the new ids of its special tokens; if a token is missing, those of the new tokenizer."""

    def new_ids(*ids: int | None) -> list[int]:
        found = (_same_token(number, old, new)[:1] for number in ids if number is not None and number in old.ids)
        return list(dict.fromkeys(number for one in found for number in one))

    starts = new_ids(s.start_id) or _special_ids(new, "bos", "cls")
    ends = new_ids(*s.end_ids) or _special_ids(new, "eos", "sep")[:1]
    pads = new_ids(s.pad_id) or _special_ids(new, "pad")
    start, pad = (next(iter(ids), None) for ids in (starts, pads))
    return replace(s, vocab_size=len(new), start_id=start, end_ids=tuple(ends), pad_id=pad)
