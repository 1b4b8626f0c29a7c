"""The initial model of a run: a new one, or a pretrained one to fine-tune."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from glasshouse import config, hub, spec
from glasshouse.config import JsonDict
from glasshouse.data.corpus import Corpus
from glasshouse.data.encoding import end_id, start_id
from glasshouse.layers import lora
from glasshouse.models import Model, build
from glasshouse.models.builder import has_registered_parts
from glasshouse.models.checks import check_length
from glasshouse.models.heads import Classifier
from glasshouse.models.stack import Stack
from glasshouse.models.surgery import new_tokens, with_tokenizer
from glasshouse.objectives import Objective
from glasshouse.objectives.registry import head_objective
from glasshouse.text import Tokenizer
from glasshouse.training.distributed.fsdp import FullDraws, parallelize
from glasshouse.training.run import Pretrained, Run, Train
from glasshouse.training.setup.custom import AnyDatasets, Base, CustomDatasets
from glasshouse.training.setup.datasets import given_tokenizer
from glasshouse.training.setup.resolve import (
    Resolved,
    check_new_model,
    model_kinds,
    parse_spec,
    spec_before_data,
)


def make_meta_model(run: Run) -> Model:
    """Return the model that a run trains, on the meta device, as far as it is known without the data.

    The vocabulary is that of the given tokenizer, or of the size of the one to be trained.

    >>> make_meta_model(Run.load("stdlib")).token_embedding.table.weight.shape
    torch.Size([4096, 192])
    """
    if isinstance(run.model, Pretrained):
        model: Model = hub.load(run.model.source, device="meta", dtype=torch.float32)[0].train()
    else:
        check_new_model(run)
        tok = given_tokenizer(run.data) or (run.train.objective.tokenizer() if run.train.objective else None)
        vocab_size = run.data.vocab_size if tok is None else len(tok)
        model = build(spec_before_data(run, vocab_size, head=True), device="meta")
    check_length(model.spec, run.data.seq_len, "data.seq_len")
    prepare_for_training(model, run.train)
    return model


def make_initial_model(resolved: Resolved, datasets: AnyDatasets) -> Model:
    """Build a new model, or fit a pretrained one to data and objective, and prepare it for training.

    Sharded over processes, a process has its shards of a new model and one whole tensor at a time; a pretrained one
    is loaded to the CPU.
    """
    train, processes, device = resolved.run.train, resolved.processes, resolved.device
    if not processes.is_parallel:
        # What is quantized never is on a GPU as a whole.
        staging = device if train.lora is None or train.lora.weights == "own" else torch.device("cpu")
        model = _make_or_fit(resolved, datasets, staging)
        prepare_for_training(model, train, _new_tokens(resolved.base, datasets))
        return model.to(device)
    model = _make_or_fit(resolved, datasets, torch.device("meta" if resolved.base is None else "cpu"))
    with torch.random.fork_rng(devices=()):  # adapters are drawn again below, on the device
        prepare_for_training(model, train, _new_tokens(resolved.base, datasets))
    parallelize(model, train.parallel, processes, device, resolved.precision)
    with FullDraws():  # type: ignore[no-untyped-call]
        for layer in lora.lora_layers(model).values():
            layer.init_weights()
    return model


def _make_or_fit(resolved: Resolved, datasets: AnyDatasets, device: torch.device) -> Model:
    run, base, objective = resolved.run, resolved.base, resolved.objective
    if isinstance(datasets, CustomDatasets):
        model = _make_for_ids(run, datasets.tok, device) if base is None else base[0].train().to(device)
    elif base is None:
        s = make_spec(run.model.to_dict(), datasets.tok, datasets.train, run.data.seq_len, objective)
        model = make_model(s, datasets.tok, device)
    else:
        assert base[1] is not None  # which only datasets of ids can do without
        model = resize_for_data(base[0], base[1], datasets.tok, datasets.train, objective).to(device)
    check_length(model.spec, run.data.seq_len, "data.seq_len")
    return model


def _make_for_ids(run: Run, tok: Tokenizer | None, device: torch.device) -> Model:
    """Build a new model for a dataset of ids; its spec is that of the settings, with the size of a tokenizer."""
    known = {"max_len": run.data.seq_len} | ({} if tok is None else {"vocab_size": len(tok)})
    return make_model(parse_spec(run.model.to_dict(), known), tok, device)


def _new_tokens(base: Base | None, datasets: AnyDatasets) -> tuple[int, ...]:
    """Return the tokens of the data that a pretrained model has not been trained with."""
    if base is None or base[1] is None or datasets.tok is None:
        return ()
    return tuple(new_tokens(base[1], datasets.tok))


def make_spec(
    table: JsonDict, tok: Tokenizer, corpus: Corpus, length: int, chosen: Objective[Any] | None = None
) -> spec.Spec:
    """Return the spec of a new model; vocabulary, special token ids and labels come from the data.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/a.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{folder}/a.txt", tok, f"{folder}/ids")
    >>> s = make_spec({"preset": "tiny-decoder", "n_layers": 1}, tok, corpus, length=8)
    >>> s.vocab_size, s.n_layers, s.max_len
    (263, 1, 8)
    """
    end, pad = end_id(tok), tok.special_id("pad")
    start = end if (first := start_id(tok)) is None else first
    known: JsonDict = {"vocab_size": len(tok), "start_id": start, "end_ids": [] if end is None else [end]}
    known |= {"pad_id": pad, "max_len": length}
    objective = head_objective(corpus.kind, *model_kinds(table), chosen)
    if settings := objective.head_settings(corpus):
        table = {**table, "head": {**_head(table, objective), **settings}}
    return parse_spec(table, known)


def _head(table: JsonDict, objective: Objective[Any]) -> JsonDict:
    """Return the head that is set: by itself, or else by a preset with a head of the objective's kind."""
    head: Any = table.get("head", objective.head_kind)
    if "head" not in table and "preset" in table:
        preset = config.dump(spec.preset(table["preset"]).head)
        head = preset if preset["kind"] == objective.head_kind else head
    return {"kind": head} if isinstance(head, str) else dict(head)


def resize_for_data(
    base: Model, known: Tokenizer, tok: Tokenizer, corpus: Corpus, chosen: Objective[Any] | None = None
) -> Model:
    """Fit a pretrained model to other data: embeddings for its tokenizer, and a head for its objective."""
    if known.fingerprint != tok.fingerprint:
        base = with_tokenizer(base, known, tok)
    objective = head_objective(corpus.kind, base.spec.kind, base.spec.head.kind, chosen)
    return objective.fit_head(base, corpus).train()


def make_model(s: spec.Spec, tok: Tokenizer | None, device: torch.device) -> Model:
    """Build a new model with the fingerprint of its tokenizer; registered parts have values on any device."""
    model = build(s, device="cpu" if device.type == "meta" and has_registered_parts(s) else device)
    model.tokenizer_fingerprint = None if tok is None else tok.fingerprint
    return model


def prepare_for_training(model: Model, choice: Train, new: tuple[int, ...] = ()) -> None:
    """Attach LoRA, freeze modules and set activation checkpointing, as the settings say.

    With LoRA, the rows of `new` tokens are trained, unless the settings name others: frozen, they would stay as
    random as they are.
    """
    if choice.lora is not None:
        lora.attach(model, replace(choice.lora, token_ids=choice.lora.token_ids or new))
        if isinstance(model.head, Classifier):  # which is new
            model.head.requires_grad_(True)
    freeze(model, choice.freeze)
    if choice.activation_checkpointing:
        for stack in model.modules():
            if isinstance(stack, Stack):
                for block in stack.blocks:
                    checkpoint_activations(block)


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze the parameters of modules whose names match.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> freeze(model, ["token_embedding", "stack.blocks.0"])
    >>> [name for name, weight in model.named_parameters() if weight.requires_grad][0]
    'stack.blocks.1.attention.norm.weight'
    """
    for pattern in patterns:
        for module in lora.matching_modules(model, pattern, "train.freeze").values():
            module.requires_grad_(False)


def checkpoint_activations(block: nn.Module) -> None:
    """Store only the input of a module, and recompute its activations in the backward pass."""
    forward: Any = block.forward
    block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
