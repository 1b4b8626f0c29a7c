"""The model that a run begins with: a new one, or one that was trained before and is now to learn something else."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from glasshouse import config, hub, spec
from glasshouse import device as machine
from glasshouse.config import JsonDict
from glasshouse.data.corpus import Corpus, Kind
from glasshouse.data.dataset import required_kind
from glasshouse.data.encoding import end_id, start_id
from glasshouse.errors import ConfigError, InputError
from glasshouse.layers import lora
from glasshouse.models import Model, build, check_tokenizer
from glasshouse.models.heads import Classifier
from glasshouse.models.stack import Stack
from glasshouse.models.surgery import with_classifier, with_tokenizer
from glasshouse.text import Tokenizer
from glasshouse.training.datasets import given_tokenizer
from glasshouse.training.run import Data, Train, recipes

HEADS: dict[Kind, str] = {
    "labelled": "sequence_classification",
    "tagged": "token_classification",
}  # by the kind of data that has labels


def load_base(table: JsonDict, data: Data) -> tuple[Model, Tokenizer] | None:
    """Load the model that a run starts from, if its table names one.

    One that was saved without a tokenizer takes the one that the data name, and never a new one, whose ids its
    embeddings were not trained on.
    """
    if "from" not in table:
        return None
    place = table["from"]
    if not isinstance(place, str):
        raise ConfigError(f"model.from is {place!r}, but it must be the folder or the hub id of a model.")
    match Path(place).parts:
        case ["runs", name, "model"] if name in recipes() and not Path(place).exists():  # as recipes name theirs
            command = "glasshouse train" if name == "stdlib" else f"glasshouse train {name}"
            raise InputError(
                f"there is no model in {place!r} to start from; run `{command}` first, which makes it, or "
                "name another by model.from."
            )
    model, tok = hub.load(place, dtype=torch.float32)
    if tok is None:
        tok = given_tokenizer(data)
        if tok is None:
            raise InputError(
                f"there is no tokenizer in {place!r}, and its embeddings know no ids of a new one; give the one that "
                "the model was trained with by data.tokenizer=FOLDER."
            )
        check_tokenizer(model, tok)
    return model, tok


def wanted_kind(table: JsonDict, base: Model | None) -> Kind | None:
    """Return the one kind of data that the model of a run learns from; None where its data may be of several.

    >>> wanted_kind({"preset": "vaswani-base"}, None)
    'pairs'
    >>> wanted_kind({"preset": "tiny-encoder", "head": "token_classification"}, None)
    'tagged'
    """
    if base is not None:
        return required_kind(base.spec)
    known = spec.preset(table["preset"]) if "preset" in table else None
    head = table.get("head", known and known.head.kind)
    if (table.get("kind") or (known and known.kind)) == "seq2seq":
        return "pairs"
    kinds: dict[str, Kind] = {head: kind for kind, head in HEADS.items()}
    return kinds.get(str(head.get("kind") if isinstance(head, dict) else head))


def find_device(name: str) -> torch.device:
    """Return where a run computes, if this machine has that.

    >>> find_device("cpu")
    device(type='cpu')
    """
    return machine.resolve(name, "train.device")


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the type of number that a run multiplies in.

    >>> resolve_precision("bfloat16", torch.device("cpu"))
    torch.bfloat16
    """
    return machine.compute_dtype(device) if name == "auto" else getattr(torch, name)


def make_spec(table: JsonDict, tok: Tokenizer, corpus: Corpus, length: int) -> spec.Spec:
    """Return the spec of a new model; the vocabulary, special ids and labels are those of the data.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/a.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{place}/a.txt", tok, f"{place}/ids")
    >>> s = make_spec({"preset": "tiny-decoder", "n_layers": 1}, tok, corpus, length=8)
    >>> s.vocab_size, s.n_layers, s.max_len
    (263, 1, 8)
    """
    end, pad = end_id(tok), tok.special_id("pad")
    start = end if (first := start_id(tok)) is None else first
    known: JsonDict = {"vocab_size": len(tok), "start_id": start, "end_ids": [] if end is None else [end]}
    known |= {"pad_id": pad, "max_len": length}
    if corpus.kind in HEADS:
        head = table.get("head", HEADS[corpus.kind])
        head = {"kind": head} if isinstance(head, str) else dict(head)
        table = {**table, "head": {**head, "n_labels": len(corpus.labels), "labels": list(corpus.labels)}}
    given = {name: value for name, value in table.items() if name != "preset"}
    if "preset" in table:
        return spec.preset(table["preset"], **{**known, **given})
    return spec.parse({**known, **given})


def resize_for_data(base: Model, known: Tokenizer, tok: Tokenizer, corpus: Corpus) -> Model:
    """Fit a trained model to other data: its vocabulary grows or changes, and labels get a head."""
    if known.fingerprint != tok.fingerprint:
        base = with_tokenizer(base, known, tok)
    known_labels = base.spec.head.kind, getattr(base.spec.head, "labels", ())
    if corpus.kind in HEADS and known_labels != (HEADS[corpus.kind], corpus.labels):
        base = with_classifier(base, len(corpus.labels), per_token=corpus.kind == "tagged")
        assert isinstance(base.spec.head, spec.SequenceClassification | spec.TokenClassification)
        base.spec = replace(base.spec, head=replace(base.spec.head, labels=corpus.labels))
    return base.train()


def make_model(s: spec.Spec, tok: Tokenizer, device: torch.device) -> Model:
    """Build a new model that knows its tokenizer."""
    model = build(s, device=device)
    model.tokenizer_fingerprint = tok.fingerprint
    return model


def prepare_for_training(model: Model, choice: Train) -> None:
    """Freeze what is not to learn, put adapters in, and let blocks compute again where that is asked for."""
    if choice.lora is not None:
        lora.attach(model, choice.lora)
        if isinstance(model.head, Classifier):  # which knows nothing yet
            model.head.requires_grad_(True)
    freeze(model, choice.freeze)
    if choice.activation_checkpointing:
        for stack in model.modules():
            if isinstance(stack, Stack):
                for block in stack.blocks:
                    checkpoint_activations(block)


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Let the parameters of modules with these names be.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> freeze(model, ["token_embedding", "stack.blocks.0"])
    >>> [name for name, weight in model.named_parameters() if weight.requires_grad][0]
    'stack.blocks.1.attention.norm.weight'
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        chosen = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        if not chosen:
            raise InputError(
                f"train.freeze names {pattern!r}, which no module is; {config.did_you_mean(pattern, modules)}"
            )
        for module in chosen:
            module.requires_grad_(False)


def checkpoint_activations(block: nn.Module) -> None:
    """Let a module keep its input alone for the way back."""
    forward: Any = block.forward
    block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
