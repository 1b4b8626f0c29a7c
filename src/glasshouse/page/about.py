"""What the model is that the page shows, in the words of its spec."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse import spec
from glasshouse.config import JsonDict, Settings
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.heads import LMHead
from glasshouse.page.trace import Traces


@dataclass(frozen=True)
class About(Settings):
    """Which model is this?"""

    moment: str = ""


def about(traces: Traces, ask: About) -> JsonDict:
    """Say what the model is, in the words of its spec, and which moments of it there are."""
    subject = traces.subject
    sitter = subject.at(ask.moment)
    model = sitter.model
    s = model.spec
    sizes = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head", "d_ff", "vocab_size", "max_len")
    return {
        "name": subject.name,
        "kind": s.kind,
        **{name: getattr(s, name) for name in sizes},
        "n_encoder_layers": getattr(s, "n_encoder_layers", 0),
        "position": s.position.kind,
        "norm": s.norm.kind,
        "norm_placement": s.norm_placement,
        "feedforward": s.feedforward.kind,
        "head": s.head.kind,
        "parameters": spec.count_parameters(s),
        "attentions": _attentions(model),
        "speaks": isinstance(model.head, LMHead),
        "writes": isinstance(model, Decoder | Seq2Seq) and isinstance(s.head, spec.NextToken),
        "hides": sitter.tok is not None and isinstance(model, Encoder) and sitter.tok.special_id("mask") is not None,
        "tokenizer": None if sitter.tok is None else repr(sitter.tok),
        "merges": sitter.tok is not None and bool(sitter.tok.merge_ranks),
        "moments": subject.moments(),
        "places": {name: str(subject.folder(name)) for name in subject.moments() or [""]},
        "given": subject.given,
        "run": subject.run is not None,
        "example": subject.example(),
    }


@dataclass(frozen=True)
class Moments(Settings):
    """Which moments of the run are there by now?"""


def moments(traces: Traces, ask: Moments) -> JsonDict:
    """Name the moments that have weights, without loading any."""
    return {"moments": traces.subject.moments()}


def _attentions(model: Model) -> list[JsonDict]:
    """Name each kind of attention there is: its site, its layers, and what its queries and keys are."""

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
