"""Steps of one attention head and of the output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.config import JsonDict
from glasshouse.inspection import AttentionMap
from glasshouse.inspection.attention_map import softcap_of
from glasshouse.layers.attend import Explicit
from glasshouse.layers.attention import split_heads
from glasshouse.layers.layout import make_layout
from glasshouse.layers.mask import Mask
from glasshouse.layers.position import RotaryPosition, alibi_slopes
from glasshouse.page import serialization
from glasshouse.page.walkthrough.card import card, linear_card, norm_card
from glasshouse.page.walkthrough.token_path import TokenPath, memory_of

SHOWN = 12  # keys whose vectors are sent; scores and weights are sent for all


def attention_steps(path: TokenPath, part: str, x: Tensor, seen: dict[str, Tensor]) -> Iterator[JsonDict]:
    """Yield the steps of one head, then of the output projection."""
    layer, mark = path.block.get_submodule(part).layer, mark_of(part)
    attention = path.trace.attention_map(f"{path.prefix}{mark}pattern.{path.layer}")
    weights = attention.weights(head=path.head, query=path.position)[0]
    # In cross-attention, keys and values are shown for the source token with the largest weight.
    of = int(weights.argmax()) if part == "cross" else path.position
    yield from _vectors(path, part, x, memory_of(path.trace)[of] if part == "cross" else x, of, attention)
    first = max(0, min(of - (SHOWN // 2 if part == "cross" else SHOWN - 3), len(weights) - SHOWN))
    yield from _scores(path, part, attention, first)
    v = attention.kernel.v[0, path.head * attention.kernel.v.shape[1] // path.spec.n_heads]
    z = seen[f"{mark}z"]
    shown: JsonDict = {"first": first, "weights": weights, "rows": v[first : first + SHOWN]}
    yield card(part, "gather", path.site(f"{mark}z", "head", "position"), **shown, y=z[path.head])
    yield card(part, "join", path.site(f"{mark}z"), heads=z, y=z.flatten())
    yield linear_card(part, "out", layer.out, z.flatten(), layer.out(z.flatten()))


def _vectors(
    path: TokenPath, part: str, x: Tensor, source: Tensor, of: int, attention: AttentionMap
) -> Iterator[JsonDict]:
    """Yield the query of the token, and the key and value of token `of`, as the kernel receives them."""
    layer, mark, s = path.block.get_submodule(part).layer, mark_of(part), path.spec
    kernel, shared = attention.kernel, path.head * s.n_kv_heads // s.n_heads
    position = path.stack.position
    turns = part != "cross" and isinstance(position, RotaryPosition)
    last = {"q": kernel.q[0, path.head, path.position], "k": kernel.k[0, shared, of], "v": kernel.v[0, shared, of]}
    sites = {"q": path.site(f"{mark}q", "head", "position")} | {
        name: f"{path.prefix}{mark}{name}.{path.layer}[head={shared}, position={of}]" for name in ("k", "v")
    }
    q, k = last["q"], last["k"]
    told: JsonDict = {"of": of, "kv": shared}
    plain = not (s.qk_norm or turns)  # then the projections are the kernel inputs
    if not plain:
        q = split_heads(layer.query(x[None, None]), s.d_head)[0, path.head, 0]
        k = split_heads(layer.key(source[None, None]), s.d_head)[0, shared, 0]
    q_site, k_site = (sites["q"], sites["k"]) if plain else ("", "")
    yield linear_card(part, "query", layer.query, x, q, path.head * s.d_head, **told) | {"site": q_site}
    yield linear_card(part, "key", layer.key, source, k, shared * s.d_head, **told) | {"site": k_site}
    yield linear_card(part, "value", layer.value, source, last["v"], shared * s.d_head, **told) | {"site": sites["v"]}
    if s.qk_norm:
        normed = (layer.q_norm(q), layer.k_norm(k)) if turns else (last["q"], last["k"])
        yield norm_card(part, layer.q_norm, q, normed[0], "" if turns else sites["q"]) | {"of": of, "what": "q"}
        yield norm_card(part, layer.k_norm, k, normed[1], "" if turns else sites["k"]) | {"of": of, "what": "k"}
        q, k = normed
    if isinstance(position, RotaryPosition) and turns:
        yield card(part, "rotate", sites["q"], x=q, y=last["q"], x_key=k, y_key=last["k"], **_turn(path, position))


def _turn(path: TokenPath, position: RotaryPosition) -> JsonDict:
    """Return the rotation angle of each pair at the position, and the pair layout."""
    choice = path.spec.position
    assert isinstance(choice, spec.Rotary)
    pairs = torch.arange(0, position.d_head, 2, device=path.ids.device, dtype=torch.float32)
    angles = path.position_ids.float() * position.rescale(1.0 / position.theta ** (pairs / position.d_head))
    told = {
        "layout": choice.layout,
        "theta": choice.theta,
        "scaling": choice.scaling.kind,
        "place": int(path.position_ids),
    }
    return {"angles": angles[0], "by": position.attention_factor, **told}


def _scores(path: TokenPath, part: str, attention: AttentionMap, first: int) -> Iterator[JsonDict]:
    """Yield the steps from q · k to the attention weights."""
    kernel, mark = attention.kernel, mark_of(part)
    n_keys = kernel.k.shape[2]
    shared = path.head * kernel.k.shape[1] // path.spec.n_heads
    q, k = kernel.q[:, path.head : path.head + 1, path.position : path.position + 1], kernel.k[:, shared : shared + 1]
    now = Explicit(kernel.attend.scale, 0.0).scores(q, k, Mask())[0, 0, 0]
    rows = k[0, 0, first : first + SHOWN]
    made = [card(part, "scores", q=q[0, 0, 0], rows=rows, first=first, by=kernel.attend.scale, y=now)]
    if (cap := softcap_of(kernel.attend)) is not None:
        made.append(card(part, "softcap", x=now, cap=cap, first=first))
        now = cap * torch.tanh(now / cap)
        made[-1]["y"] = serialization.encode_tensor(now)
    bias = None if part == "cross" else path.stack.position.bias(path.position_ids, make_layout(path.ids).positions)
    if bias is not None:
        told: JsonDict = {"how": path.spec.position.kind, "added": bias[0, path.head, 0].to(now.dtype)}
        if told["how"] == "alibi":
            told["slope"] = float(alibi_slopes(path.spec.n_heads, bias.device)[path.head])
        made.append(card(part, "bias", x=now, first=first, **told))
        now = now + told["added"]
        made[-1]["y"] = serialization.encode_tensor(now)
    scores = attention.scores(head=path.head, query=path.position)[0]
    seen = scores > -torch.inf
    window = path.spec.window(path.layer) if part == "attention" else 0
    if (path.stack.causal and part == "attention") or window or not bool(seen.all()):
        told = {"seen": seen.to(torch.uint8), "n_seen": int(seen.sum()), "n_keys": n_keys, "window": window}
        made.append(card(part, "mask", x=now, first=first, **told))
    made[-1] |= {"y": serialization.encode_tensor(scores), "site": path.site(f"{mark}scores", "head", "query")}
    yield from made
    weights = attention.weights(head=path.head, query=path.position)[0]
    site = path.site(f"{mark}pattern", "head", "query")
    yield card(part, "softmax", site, x=scores, y=weights, first=first, largest=int(weights.argmax()))


def mark_of(part: str) -> str:
    """Return the prefix of the site names of a sublayer."""
    return "cross_" if part == "cross" else ""
