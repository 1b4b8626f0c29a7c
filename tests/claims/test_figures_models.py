"""Figures of whole models and their training, M1 to M9, L1 and L2, beside second models and passes of their own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from claims.figures import (
    LIMIT,
    Below,
    Drawn,
    Opened,
    bundled,
    dot,
    elsewhere,
    labels,
    near,
    on,
    predicting,
    same,
    size,
    softmax,
)
from glasshouse import notes


def decoder(drawn: Drawn) -> Opened:
    """Return the decoder that is shown: the open model, or python-3m."""
    if drawn.model.model.spec.kind == "decoder":
        assert drawn.texts == []
        return drawn.model
    assert drawn.texts == [
        "The open model is no decoder; this shows python-3m, which comes with the package, on its own text."
    ]
    return elsewhere(drawn.model, "python-3m")


@on("M1", "dates-1m", "bert", "python-3m")
def test_figure_m1(drawn: Drawn) -> None:
    one = drawn.model
    shown = one if one.model.spec.kind != "decoder" else bundled("dates-1m")
    pair = hasattr(shown.model, "encoder")
    assert drawn.texts == (
        []
        if shown is one
        else ["The open model has no encoder; this shows that of dates-1m, which comes with the package."]
    )
    ids = shown.inputs[0]
    blocks = shown.model.encoder.blocks if pair else shown.model.stack.blocks
    layer, head = min(one.layer, len(blocks) - 1), min(one.head, shown.model.spec.n_heads - 1)
    name = f"{'encoder.' if pair else ''}{{}}.{layer}"
    with torch.no_grad(), gh.record(shown.model, name.format("q"), name.format("k")) as seen:
        shown.model(ids, *([ids[:, :2]] if pair else []))
    q, k = (seen[name.format(one)][0, head].tolist() for one in "qk")
    weights = [softmax([dot(a, b) / math.sqrt(shown.model.spec.d_head) for b in k]) for a in q]
    (matrix,) = drawn.matrices
    same(matrix.values, [row[:LIMIT] for row in weights[:LIMIT]])
    assert matrix.rows == matrix.columns == labels(ids[0].tolist()[:LIMIT], shown.tok)
    names = list(blocks.state_dict())
    assert drawn.facts == {
        "smallest weight": near(min(map(min, weights)), 1e-3),
        "blocks": len({part.split(".")[0] for part in names}),
        "tensors in each": sum(part.startswith("0.") for part in names),
        "tensors in all, none shared": len(names),
    }


@on("M2", "gpt2", "python-3m", "bert")
def test_figure_m2(drawn: Drawn) -> None:
    one = decoder(drawn)
    at = one.position
    logits = one.logits()[at].tolist()
    shares = softmax(logits)
    best = sorted(range(len(shares)), key=lambda i: -shares[i])[:8]
    (bars,) = drawn.bars
    assert bars.title == f"after “{one.labels[at]}”: P(next | those before)"
    assert bars.names == labels(best, one.tok)
    same(bars.values, [shares[i] for i in best])
    assert bars.most == 1
    assert drawn.facts == {
        "tokens that count": len(one.ids[: at + 1]),
        "largest difference if the rest is cut off": Below(1e-4 * max(map(abs, logits))),
    }


def encoder_layer(d: int, heads: int, f: int, *, cross: bool = False) -> dict[str, int]:
    """Count the parameters of torch's own layer by part; its attention has biases, which are left out."""
    kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    parts = {"attention": 0, "feedforward": 0, "norms": 0}
    for name, weight in kind(d, heads, f, device="meta").named_parameters():
        if "attn" in name:
            parts["attention"] += 0 if "bias" in name else weight.numel()
        else:
            parts["norms" if "norm" in name else "feedforward"] += weight.numel()
    return parts


@on("M3", "gpt2")
def test_figure_m3(drawn: Drawn) -> None:
    """The base model of the paper: d_model = 512, d_ff = 2048, h = 8, one vocabulary of 37,000, and N layers."""
    n = int(drawn.value)
    encoder = sum(encoder_layer(512, 8, 2048).values())
    decoder = sum(encoder_layer(512, 8, 2048, cross=True).values())
    (table,) = drawn.tables
    assert table.title == f"vaswani-base: {n} + {n} layers, 8 heads"
    assert table.head == ["part", "arithmetic", "parameters"]
    total = 37_000 * 512 + n * encoder + n * decoder
    assert table.rows == [
        ["embedding, shared", "37,000 x 512", 37_000 * 512],
        ["encoder", f"{n} x (4 x 512² + feed-forward + 2 norms)", n * encoder],
        ["decoder", f"{n} x (8 x 512² + feed-forward + 3 norms)", n * decoder],
        ["in all", "", total],
    ]
    assert drawn.facts == {
        "by arithmetic": total,
        "counted by gh.count_parameters": total,
        "norm": "post",
        "positions": "sinusoidal",
        "feed-forward": "relu",
        "d_ff": 2048,
    }


@on("M9", "gpt2")
def test_figure_m9(drawn: Drawn) -> None:
    n = int(drawn.value)
    layer = encoder_layer(512, 8, 2048)
    (table,) = drawn.tables
    assert table.title == f"vaswani-encoder: {n} layers, 8 heads"
    total = 37_000 * 512 + n * sum(layer.values())
    assert table.rows == [
        ["embedding", "37,000 x 512", 37_000 * 512],
        ["attention", f"{n} x 4 x 512²", n * layer["attention"]],
        ["feed-forward", f"{n} x (2 x 512 x 2,048 + 2,048 + 512)", n * layer["feedforward"]],
        ["norms", f"{n} x 2 x 2 x 512", n * layer["norms"]],
        ["in all", "", total],
    ]
    for _, arithmetic, count in table.rows[:-1]:  # what is written is what is counted
        said = arithmetic.replace(",", "").replace("512²", "512 * 512").replace("x", "*")
        assert eval(said) == count
    assert drawn.facts == {"by arithmetic": total, "counted by gh.count_parameters": total}


@on("M4", "gpt2", "python-3m", "dates-1m", "bert", "gemma", "headless")
def test_figure_m4(drawn: Drawn) -> None:
    one = predicting(drawn.model, drawn.texts)
    logits = one.logits()[one.position].tolist()
    shares = softmax(logits)
    best = sorted(range(len(logits)), key=lambda i: -logits[i])[:8]
    (table,) = drawn.tables
    assert table.head == ["token", "logit: last vector . its row", "P = exp(logit) / sum of exp"]
    assert [row[0] for row in table.rows] == labels(best, one.tok)
    same([row[1] for row in table.rows], [logits[i] for i in best])
    same([row[2] for row in table.rows], [shares[i] for i in best])
    tied = one.model.spec.head.tied
    assert tied == (drawn.name != "gemma")
    assert drawn.facts == {
        "matrix": "E, transposed (tied)" if tied else "its own (untied)",
        "V": one.model.spec.vocab_size,
        "sum of exp(logit) over all V tokens": near(math.fsum(map(math.exp, logits)), 1e-3),
        "sum of all probabilities": near(1, 1e-5),
        "largest difference from the model's logits": Below(1e-5 * max(map(abs, logits))),
    }


def stored(bytes_each: int, *shape: int) -> float:
    """Return the MiB of a tensor that is never made."""
    dtype = {2: torch.float16, 4: torch.float32}[bytes_each]
    return torch.empty(shape, dtype=dtype, device="meta").nbytes / 1024 / 1024


@on("M5", "gpt2", "python-3m", "dates-1m")
def test_figure_m5(drawn: Drawn) -> None:
    s = drawn.model.model.spec
    (table,) = drawn.tables
    assert table.head == ["tokens", "attention weights of one head", "of all, if stored in 32 bits", "cache, 16 bits"]
    lengths = [1024, 2048, 4096]
    lengths += [int(drawn.value)] if drawn.value not in lengths else []
    assert table.rows == [
        [
            n,
            n**2,
            f"{stored(4, s.n_layers, s.n_heads, n, n):,.0f} MiB",
            f"{stored(2, s.n_layers, 2, s.n_kv_heads, n, s.d_head):,.1f} MiB",
        ]
        for n in lengths
    ]
    learned = s.position.kind == "learned"
    assert drawn.facts == {
        "trained for": s.max_len,
        "takes at most": s.max_len if learned else "any length",
        "positions": s.position.kind,
    }
    assert drawn.texts == [
        "The fused kernel never stores the attention weights: memory grows with the length, not with its square."
    ]


@on("M6", "gpt2", "python-3m", "bert")
def test_figure_m6(drawn: Drawn) -> None:
    one = decoder(drawn)
    losses = []
    for end in range(1, 8):
        with torch.no_grad():
            logits = one.model(one.inputs[0][:, :end])[0, -1].tolist()
        losses.append(-math.log(softmax(logits)[one.ids[end]]))
    (curves,) = drawn.lines
    assert curves.title == "loss at each token, in nats"
    expected = [(end, near(loss)) for end, loss in enumerate(losses, 1)]
    assert curves.series == {"one pass": expected, "7 prefixes": expected}
    assert drawn.facts == {
        "tokens, of which the figure takes at most 7": 7,
        "mean loss, one pass": near(sum(losses) / 7),
        "largest difference": Below(1e-4),
    }


@on("M7", "gpt2")
def test_figure_m7(drawn: Drawn) -> None:
    """By hand: of 127 letters, all but one have score 0, and that one 10."""
    distance = int(drawn.value)
    ((_, named),) = drawn.tokens
    letters = [text for text, _ in named]
    assert len(letters) == 128
    assert letters.pop() == "?"
    (at,) = [i for i, one in enumerate(letters) if one.isupper()]
    assert [marked for _, marked in named] == [i == at for i in range(128)]
    assert 127 - at == distance  # from the place of the question, 127
    least = 1 / (math.exp(10) + 126)
    (lines,) = drawn.lines
    ((name, curve),) = lines.series.items()
    assert (name, lines.along, lines.log) == ("weight", "distance", False)
    same([point for point, _ in curve], [*range(1, 128)])
    same([y for _, y in curve], [math.exp(10) * least if x == distance else least for x, _ in curve])
    arrived: dict[str, float] = {}
    for i, one in enumerate(letters):
        arrived[one.upper()] = arrived.get(one.upper(), 0) + (math.exp(10) * least if i == at else least)
    assert drawn.facts == {
        "distance": distance,
        "weight of the upper-case letter": near(math.exp(10) * least),
        "letter that arrives in one step": letters[at],
        "share of it in what arrives": near(arrived[letters[at]]),
        "steps of a recurrent model from there": distance,
        "a trained layer was right at this distance in": "100%",
    }
    assert len(drawn.texts) == 1


@on("M8", "gpt2")
def test_figure_m8(drawn: Drawn) -> None:
    length, width = int(drawn.value), 32
    torch.manual_seed(0)
    lstm = nn.LSTM(width, width, batch_first=True)
    cell = nn.LSTMCell(width, width)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in lstm.state_dict().items()})
    start = torch.randn(1, length, width, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(3, width, width, generator=torch.Generator().manual_seed(1)) / width**0.5

    def recurrent(x: Tensor) -> Tensor:
        state = torch.zeros(1, width), torch.zeros(1, width)
        for token in x.unbind(1):
            state = cell(token, state)
        return state[0]

    def attending(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, weight.T) for weight in weights)
        return F.scaled_dot_product_attention(q[:, -1:], k, v)

    (curves,) = drawn.lines
    assert (curves.along, curves.log) == ("distance", True)
    assert [*curves.series] == ["LSTM", "attention"]
    for run, points in zip((recurrent, attending), curves.series.values(), strict=True):
        x = start.clone().requires_grad_()
        (run(x) ** 2).sum().backward()
        assert [d for d, _ in points] == [*range(1, length)]
        for distance, shown in points:  # of the token so many before the last
            assert shown == near(max(size(x.grad[0, length - 1 - distance].tolist()), 1e-30), 2e-3)
    assert drawn.facts == {
        "numbers in the LSTM's state, twice its width at any length": 64,
        "keys and values that attention has": 2 * sum(width for _ in range(length)),
    }
    assert drawn.texts == ["As initialised, of width 32: how much the last output depends on a token so far back."]


@on("L1", "python-3m", "dates-1m", "gpt2")
def test_figure_l1(drawn: Drawn) -> None:
    names = drawn.model.labels
    (_, given), (_, targets) = drawn.tokens
    masked = [i for i, (_, marked) in enumerate(given) if marked]
    assert [text for text, _ in given] == ["[mask]" if i in masked else one for i, one in enumerate(names)]
    assert targets == [(names[i], False) for i in masked]
    assert drawn.facts == {
        "tokens": len(names),
        "targets, masked": max(1, math.floor(len(names) * drawn.value / 100)),
        "targets of a decoder, the next token each time": len(names[1:]),
    }
    assert len(masked) == drawn.facts["targets, masked"]
    measured = json.loads((Path(notes.__file__).parent / "measured.json").read_text())["L1"]["figures"]
    for bars, count in zip(drawn.bars, (100, 1000), strict=True):
        assert bars.title == f"then {count:,} labels: accuracy in naming one of 20 languages"
        wanted = [f"accuracy with {count} labels, {start}" for start in ("pretrained", "from scratch")]
        assert bars.values == [measured[name] for name in wanted]
        spreads = [round(measured[f"{name}, standard deviation"], 3) for name in wanted]
        assert bars.names == [f"pretrained, ± {spreads[0]:.3f}", f"from scratch, ± {spreads[1]:.3f}"]
        assert bars.most == 1
    assert len(drawn.texts) == 1


@on("L2", "gpt2")
def test_figure_l2(drawn: Drawn) -> None:
    step = 10.0**drawn.value
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "d_ff": 32, "vocab_size": 16}
    torch.manual_seed(0)
    s = gh.preset("tiny-decoder", **sizes, init={"kind": "normal", "std": 0.3})
    model: Any = gh.build(s, dtype=torch.float64).eval()
    ids = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(0))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(changed: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(model, changed, (ids[:, :-1],))
        return -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()

    gradients = torch.func.grad(loss)(weights)
    (table,) = drawn.tables
    assert table.title == f"step {step:.0e}"
    assert table.head == ["weight", "gradient", "finite difference", "relative error"]
    assert [row[0] for row in table.rows] == [*weights][:6]
    errors = []
    for name, exact, near_by, error in table.rows:
        at = max(range(gradients[name].numel()), key=lambda i: abs(float(gradients[name].flatten()[i])))
        largest = float(gradients[name].flatten()[at])
        assert exact == near(largest, 1e-9)
        with torch.no_grad():
            sides = []
            for sign in (step, -step):
                moved = weights[name].clone()
                moved.view(-1)[at] += sign
                sides.append(float(loss({**weights, name: moved})))
        # A loss of about 3 is exact to 1e-15, which the division by the step magnifies.
        assert abs(near_by - (sides[0] - sides[1]) / (2 * step)) < 1e-14 / step
        assert error == near(abs(near_by - exact) / abs(exact), 1e-6)
        errors.append(error)
    assert drawn.facts == {"largest relative error": max(errors)}
    assert drawn.value != -5 or max(errors) < 1e-6
    assert drawn.texts[0].startswith("A small decoder in float64: the largest entry of each gradient")
