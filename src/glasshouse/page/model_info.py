"""Endpoint with the properties of the model."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse import spec
from glasshouse.config import JsonDict, Settings
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq, count_parameters
from glasshouse.models.heads import LMHead
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.manifest import available_views
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.attention import telling_selection

LARGE = 200e6  # parameters


@dataclass(frozen=True)
class ModelInfo(Settings):
    """Parameters of the endpoints of the model."""

    checkpoint: str = ""


def model_info(traces: TraceCache, params: ModelInfo) -> JsonDict:
    """Return the spec of the model, its capabilities and its checkpoints."""
    loader = traces.loader
    loaded = loader.get(params.checkpoint)
    model = loaded.model
    s = model.spec
    sizes = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head", "d_ff", "vocab_size", "max_len")
    return {
        "name": loader.name,
        "kind": s.kind,
        **{name: getattr(s, name) for name in sizes},
        "n_encoder_layers": getattr(s, "n_encoder_layers", 0),
        "position": s.position.kind,
        "norm": s.norm.kind,
        "norm_placement": s.norm_placement,
        "feedforward": s.feedforward.kind,
        "head": s.head.kind,
        "parameters": count_parameters(s),
        "attentions": _attentions(model),
        "predicts_tokens": isinstance(model.head, LMHead),
        "generates": isinstance(model, Decoder | Seq2Seq) and isinstance(s.head, spec.NextToken),
        "has_mask_token": loaded.tok is not None
        and isinstance(model, Encoder)
        and loaded.tok.special_id("mask") is not None,
        "tokenizer": None if loaded.tok is None else repr(loaded.tok),
        "has_merges": loaded.tok is not None and bool(loaded.tok.merge_ranks),
        "checkpoints": loader.checkpoints(),
        "planned_steps": loader.planned_steps(),
        "folders": {name: str(loader.folder(name)) for name in loader.checkpoints() or [""]},
        "in_memory": loader.in_memory,
        "run": loader.run is not None,
        "views": available_views(loader),
        "example": loader.example(),
    }


def opening_selection(traces: TraceCache, params: ModelInfo) -> JsonDict:
    """Return what is selected when the page opens on the example: an induction head, if the model has one there.

    A large model opens without, as it would wait for a forward pass.
    """
    loaded = traces.loader.get(params.checkpoint)
    if not isinstance(loaded.model, Decoder) or count_parameters(loaded.model.spec) > LARGE:
        return {}
    example = ForwardPass(PagePrompt(traces.loader.example()), params.checkpoint or traces.loader.latest())
    return {**telling_selection(traces, example)}


@dataclass(frozen=True)
class Checkpoints(Settings):
    """Parameters of the checkpoint list."""


def checkpoints(traces: TraceCache, params: Checkpoints) -> JsonDict:
    """List the saved checkpoints without loading any."""
    return {"checkpoints": traces.loader.checkpoints()}


def _attentions(model: Model) -> list[JsonDict]:
    """Describe each kind of attention: site, layers, queries and keys."""

    def kind(site: str, title: str, layers: int, queries: str, keys: str, causal: bool) -> JsonDict:
        return {"site": site, "title": title, "layers": layers, "queries": queries, "keys": keys, "causal": causal}

    if isinstance(model, Seq2Seq):
        deep, wide = len(model.decoder.blocks), len(model.encoder.blocks)
        return [
            kind("decoder.cross_pattern", "cross-attention", deep, "target", "source", False),
            kind("decoder.pattern", "decoder self-attention", deep, "target", "target", True),
            kind("encoder.pattern", "encoder self-attention", wide, "source", "source", False),
        ]
    return [kind("pattern", "self-attention", len(model.stack.blocks), "text", "text", model.stack.causal)]
