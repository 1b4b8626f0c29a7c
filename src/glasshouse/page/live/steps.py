"""What Step through says of a model besides its activations: settings of its layers."""

from __future__ import annotations

import torch
from torch import nn

from glasshouse.config import JsonDict
from glasshouse.inspection.inputs.forward_pass import final_stack
from glasshouse.layers.norm import LayerNorm, RMSNorm
from glasshouse.layers.position import (
    AlibiPosition,
    LearnedPosition,
    Position,
    RelativePosition,
    RotaryPosition,
    SinusoidalPosition,
    alibi_slopes,
    rotate_halves,
)
from glasshouse.models import Model
from glasshouse.models.heads import Classifier, LMHead, Pooler

KNOWN_POSITIONS = (Position, SinusoidalPosition, LearnedPosition, AlibiPosition, RelativePosition)


def describe_steps(model: Model) -> JsonDict | None:
    """Return the settings that the steps show; None for a model with parts of another package, whose steps it has.

    >>> import glasshouse as gh
    >>> found = describe_steps(gh.build(gh.preset("tiny-decoder")))
    >>> found["norm"], found["placement"], found["rotate"][0]["layout"]
    ('rms', 'pre', 'halves')
    """
    s = model.spec
    stack = final_stack(model)[1]
    position = stack.position
    norm = next((one for one in stack.modules() if isinstance(one, LayerNorm | RMSNorm)), None)
    rotates = isinstance(position, RotaryPosition)
    lacking = (
        (not rotates and type(position) not in KNOWN_POSITIONS)
        or norm is None
        or s.value_embeddings
        or not s.first_norm
        or (s.embed_norm and isinstance(position, SinusoidalPosition))
        or s.attention.kind != "softmax"
    )
    if lacking:
        return None
    assert norm is not None
    head = model.head
    pool = head.pool if isinstance(head, Classifier) else head
    return {
        "norm": "rms" if isinstance(norm, RMSNorm) else "layer",
        "eps": norm.eps,
        "placement": s.norm_placement,
        "embed_scale": model.token_embedding.scale,
        "embed_norm": not isinstance(stack.embed_norm, nn.Identity),
        "final_norm": not isinstance(stack.norm, nn.Identity),
        "qk_norm_over": s.qk_norm_over,
        "position": _position(position),
        "rotate": [_rotation(stack.position_of(layer)) for layer in range(len(stack.blocks))] if rotates else None,
        "slopes": alibi_slopes(s.n_heads, torch.device("cpu")).tolist()
        if isinstance(position, AlibiPosition)
        else None,
        "windows": list(s.windows),
        "feedforward": s.feedforward.kind,
        "head_scale": head.scale if isinstance(head, LMHead) else 1.0,
        "logit_softcap": head.softcap if isinstance(head, LMHead) else None,
        "pooled": isinstance(pool, Pooler),
    }


def _position(position: Position) -> JsonDict:
    match position:
        case SinusoidalPosition():
            return {"how": "sinusoidal", "layout": "pairs" if position.interleaved else "halves"}
        case LearnedPosition():
            return {"how": "learned", "offset": position.offset}
        case RelativePosition():
            return {"how": "relative"}
    return {"how": ""}


def _rotation(position: Position) -> JsonDict:
    assert isinstance(position, RotaryPosition)
    return {
        "layout": "halves" if position.rotate_pairs is rotate_halves else "pairs",
        "width": position.d_head,
        "theta": position.theta,
        "scaling": position.scaling,
        "by": position.attention_factor,
        "frequencies": position.frequencies(torch.device("cpu")).tolist(),
    }
