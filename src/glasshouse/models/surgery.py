"""Parts of a trained model replaced while the rest is kept: its vocabulary, or its head by one for labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.models.builder import Model, build
from glasshouse.models.encoder import Encoder
from glasshouse.models.heads import LMHead
from glasshouse.models.integrity import checked_parameters
from glasshouse.models.tokenizer_check import check_tokenizer
from glasshouse.models.weight_init import init_weights
from glasshouse.text import Tokenizer

GENERATION = "generation_config.json"  # it names ids, which mean nothing in another vocabulary


@torch.no_grad()
def with_tokenizer(model: Model, old: Tokenizer, new: Tokenizer) -> Model:
    """Return a copy of a model that reads and writes the tokens of a new tokenizer in place of the old one's.

    A token that both have, by its text or else by its role, keeps its vector. A new one gets the mean of those that
    the old tokenizer would have cut it into, or, where that says nothing, of all the old tokens.

    >>> import glasshouse as gh
    >>> old, new = (gh.Tokenizer.train(texts=["to be"], vocab_size=size) for size in (263, 264))
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    >>> grown = with_tokenizer(model, old, new)
    >>> grown.spec.vocab_size, new.token(263), [old.token(part) for part in old.encode("be")]
    (264, 'be', ['b', 'e'])
    >>> torch.equal(grown.token_embedding.table.weight[263], model.token_embedding.table.weight[old.encode("be")].mean(0))
    True
    """
    check_tokenizer(model, old, "the old tokenizer")
    parts = [_parts(number, old, new) for number in range(len(new))]
    per_token = {"token_embedding.table.weight"}
    if isinstance(model.head, LMHead):
        per_token |= {"head.weight", "head.bias"}
    weights = {
        name: _rows(weight, parts, sorted(old.ids)) if name in per_token else weight.clone()
        for name, weight in checked_parameters(model).items()
    }
    grafted = build(_spec(model.spec, old, new), device="meta")
    _fill(grafted, weights, model)
    grafted.tokenizer_fingerprint = new.fingerprint
    grafted.extra_files = {name: values for name, values in model.extra_files.items() if name != GENERATION}
    return grafted


@torch.no_grad()
def with_classifier(model: Model, n_labels: int, *, per_token: bool = False) -> Encoder:
    """Return a copy of an encoder with a new head for labels, drawn from torch's random generator.

    Where the old head makes one vector of a sequence, the new one does it in the same way; with `tokens` it labels
    each token instead.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-encoder"))
    >>> with_classifier(model, 3)(torch.tensor([[1, 2], [3, 4]])).shape
    torch.Size([2, 3])
    >>> with_classifier(model, 3, tokens=True)(torch.tensor([[1, 2], [3, 4]])).shape
    torch.Size([2, 2, 3])
    """
    if not isinstance(model, Encoder):
        raise InputError(f"the model is a {model.spec.kind}, but labels need an encoder; begin with one of those.")
    head: spec.SequenceClassification | spec.TokenClassification
    match model.spec.head:
        case _ if per_token:
            head = spec.TokenClassification(n_labels)
        case spec.Pooled(pooling, dense) | spec.SequenceClassification(_, pooling, dense):
            head = spec.SequenceClassification(n_labels, pooling, dense)
        case _:
            head = spec.SequenceClassification(n_labels)
    table = model.token_embedding.table.weight
    grafted = build(replace(model.spec, head=head), device="meta", dtype=table.dtype)
    grafted.head.to_empty(device=table.device)
    init_weights(grafted.head, grafted.spec)
    fresh = {f"head.{name}": weight for name, weight in grafted.head.state_dict().items()}
    kept = {
        name: weight.clone() for name, weight in checked_parameters(model).items() if not name.startswith("head.")
    }
    _fill(grafted, kept | fresh, model)
    grafted.tokenizer_fingerprint = model.tokenizer_fingerprint
    return grafted


def _fill(grafted: Model, weights: Mapping[str, Tensor], model: Model) -> None:
    grafted.load_state_dict(weights, assign=True)
    grafted.train(model.training)


def _rows(weight: Tensor, parts: list[list[int]], known: list[int]) -> Tensor:
    """Return a row of a table [V, ...] for each list of old ids: their mean, or that of all known ones for none."""
    rows = weight[torch.tensor([ids[0] if ids else 0 for ids in parts])]
    every = weight[torch.tensor(known)].mean(0)
    for number, ids in enumerate(parts):
        if len(ids) != 1:
            rows[number] = weight[torch.tensor(ids)].mean(0) if ids else every
    return rows


def _parts(number: int, old: Tokenizer, new: Tokenizer) -> list[int]:
    """Return the old ids that together stand for a new one."""
    if number not in new.ids:
        return []
    if (found := _namesakes(number, new, old)) or number in new.special_ids:  # how that is spelled means nothing
        return found
    try:
        return old.encode(new.decode_bytes([number]), add_special_tokens=False)
    except InputError:  # bytes that are no text by themselves, and the old tokenizer takes only text
        return []


def _namesakes(number: int, here: Tokenizer, there: Tokenizer) -> list[int]:
    """Return the other tokenizer's id of the same token, or else its ids of the same roles."""
    token = here.id_to_token(number)
    same = there.token_to_id(token)
    # Byte-level vocabularies write bytes as letters, which are just letters in others.
    if same is not None and there.decode_bytes([same]) == here.decode_bytes([number]):
        return [same]
    return _of_roles(there, *(role for role, text in here.special_tokens.items() if text == token))


def _of_roles(tok: Tokenizer, *roles: str) -> list[int]:
    found = (tok.special_id(role) for role in roles)
    return list(dict.fromkeys(number for number in found if number is not None))


def _spec(s: spec.Spec, old: Tokenizer, new: Tokenizer) -> spec.Spec:
    """Return the spec with special ids that follow their tokens; those without one are the new tokenizer's."""

    def follow(*ids: int | None) -> list[int]:
        found = (_namesakes(number, old, new)[:1] for number in ids if number is not None and number in old.ids)
        return list(dict.fromkeys(number for one in found for number in one))

    starts = follow(s.start_id) or _of_roles(new, "bos", "cls")
    ends = follow(*s.end_ids) or _of_roles(new, "eos", "sep")[:1]
    pads = follow(s.pad_id) or _of_roles(new, "pad")
    start, pad = (next(iter(ids), None) for ids in (starts, pads))
    return replace(s, vocab_size=len(new), start_id=start, end_ids=tuple(ends), pad_id=pad)
