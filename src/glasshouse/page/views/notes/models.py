"""Figures of whole models: M1 to M9."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import notes, spec
from glasshouse.config import JsonDict
from glasshouse.inspection import record
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.layers.softcap import softcap
from glasshouse.models import count_parameters
from glasshouse.models.heads import LMHead
from glasshouse.page.views.next_token import describe_outputs, logits_at
from glasshouse.page.views.notes.figure import (
    LIMIT,
    Control,
    Figure,
    Scene,
    bars,
    decoder_scene,
    elsewhere,
    encoder_of,
    facts,
    generator,
    largest_difference,
    lines,
    matrix,
    sentence,
    table,
    token_labels,
    tokens,
)

TOP = 8  # tokens
LETTERS = "abcdefghijklmnopqrstuvwxyz"
RECALLED = 127  # letters, as in the experiment of M7
PREFIXES = 7  # of a text, each on its own: more would take longer than three forward passes


def encoder(scene: Scene) -> list[JsonDict]:
    """M1."""
    model, stack, prefix, ids, tok, why = encoder_of(scene)
    layer, head = min(scene.layer, len(stack.blocks) - 1), min(scene.head, model.spec.n_heads - 1)
    name = f"{prefix}pattern.{layer}"
    with eval_mode(model), record(model, name, stop=True) as seen:
        model(*([ids] if not prefix else [ids, ids[:, :1]]))
    weights = seen[name][0, head, :LIMIT, :LIMIT]
    names = token_labels(ids[0].tolist()[:LIMIT], tok)
    stored = [weight.data_ptr() for block in stack.blocks for weight in block.parameters()]
    each = len(stored) // len(stack.blocks)
    return [
        *why,
        matrix("attention of one head: no position is hidden", weights, rows=names, columns=names),
        facts(
            ("smallest weight", float(weights.min())),
            ("blocks", len(stack.blocks)),
            ("tensors in each", each),
            ("tensors in all, none shared", len(set(stored))),
        ),
    ]


def next_token(scene: Scene) -> list[JsonDict]:
    """M2."""
    scene, why = decoder_scene(scene)
    ids = scene.trace.inputs[0][:, : scene.place + 1]
    with eval_mode(scene.model):
        alone = scene.model(ids)[0, -1].float()
    whole = logits_at(scene.trace, scene.place).float()
    best = whole.softmax(-1).topk(min(TOP, len(whole)))
    names = [str(one["text"]) for one in describe_outputs(scene.trace, best.indices.tolist())]
    return [
        *why,
        bars(
            f"after “{scene.labels[scene.place]}”: P(next | those before)",
            zip(names, best.values.tolist(), strict=True),
            most=1,
        ),
        facts(
            ("tokens that count", scene.place + 1),
            ("largest difference if the rest is cut off", largest_difference(alone, whole)),
        ),
    ]


def head_product(scene: Scene) -> list[JsonDict]:
    """M4."""
    why: list[JsonDict] = []
    if not isinstance(scene.model.head, LMHead):
        scene, said = elsewhere(scene, "python-3m", "The open model predicts no tokens")
        why = [said]
    head = scene.model.head
    assert isinstance(head, LMHead)
    logits = logits_at(scene.trace, scene.position).float()
    final = scene.trace.activation(f"{scene.trace.prefix}final")[scene.position][None]
    x, weight, bias, cap = head.unprojected(final, scene.model.token_embedding.table.weight)
    product = softcap((x.float() @ weight.float().T)[0] + (0 if bias is None else bias.float()), cap)
    best = logits.topk(min(TOP, len(logits))).indices.tolist()
    shares = logits.softmax(-1)
    tied = weight is scene.model.token_embedding.table.weight
    names = [str(one["text"]) for one in describe_outputs(scene.trace, best)]
    return [
        *why,
        table(
            "the most likely tokens",
            ["token", "logit: last vector . its row", "P = exp(logit) / sum of exp"],
            ([name, float(product[one]), float(shares[one])] for name, one in zip(names, best, strict=True)),
        ),
        facts(
            ("matrix", "E, transposed (tied)" if tied else "its own (untied)"),
            ("V", len(logits)),
            *([] if cap is None else [("soft-cap c: logit = c tanh(product / c)", cap)]),
            ("sum of exp(logit) over all V tokens", float(logits.double().exp().sum())),
            ("sum of all probabilities", float(shares.sum())),
            ("largest difference from the model's logits", largest_difference(product, logits)),
        ),
    ]


def counted(title: str, s: spec.Spec, rows: list[tuple[str, str, int]]) -> list[JsonDict]:
    """Return a table of parameters with their arithmetic, beside what the spec counts."""
    total = sum(count for _, _, count in rows)
    return [
        table(title, ["part", "arithmetic", "parameters"], [*rows, ["in all", "", total]]),
        facts(("by arithmetic", total), ("counted by gh.count_parameters", count_parameters(s))),
    ]


def original(scene: Scene) -> list[JsonDict]:
    """M3."""
    n = int(scene.value)
    s = spec.preset("vaswani-base", n_layers=n, n_encoder_layers=n)
    d, f, v = s.d_model, s.d_ff, s.vocab_size
    attention, ffn, norm = 4 * d * d, 2 * d * f + f + d, 2 * d
    return [
        *counted(
            f"vaswani-base: {n} + {n} layers, 8 heads",
            s,
            [
                ("embedding, shared", f"{v:,} x {d}", v * d),
                ("encoder", f"{n} x (4 x {d}² + feed-forward + 2 norms)", n * (attention + ffn + 2 * norm)),
                ("decoder", f"{n} x (8 x {d}² + feed-forward + 3 norms)", n * (2 * attention + ffn + 3 * norm)),
            ],
        ),
        facts(
            ("norm", s.norm_placement),
            ("positions", s.position.kind),
            ("feed-forward", s.feedforward.kind),
            ("d_ff", f),
        ),
    ]


def encoder_of_the_notes(scene: Scene) -> list[JsonDict]:
    """M9."""
    s = spec.preset("vaswani-encoder", n_layers=int(scene.value))
    d, f, v, n = s.d_model, s.d_ff, s.vocab_size, s.n_layers
    return counted(
        f"vaswani-encoder: {n} layers, {s.n_heads} heads",
        s,
        [
            ("embedding", f"{v:,} x {d}", v * d),
            ("attention", f"{n} x 4 x {d}²", n * 4 * d * d),
            ("feed-forward", f"{n} x (2 x {d} x {f:,} + {f:,} + {d})", n * (2 * d * f + f + d)),
            ("norms", f"{n} x 2 x 2 x {d}", n * 4 * d),
        ],
    )


def long_contexts(scene: Scene) -> list[JsonDict]:
    """M5."""
    s = scene.model.spec
    lengths = [1024, 2048, 4096, int(scene.value)]
    limit = s.position_limit
    return [
        table(
            "one text of so many tokens, in this model's sizes",
            ["tokens", "attention weights of one head", "of all, if stored in 32 bits", "cache, 16 bits"],
            (
                [length, length * length, f"{length**2 * s.n_heads * s.n_layers * 4 / 2**20:,.0f} MiB",
                 f"{4 * length * s.n_layers * s.n_kv_heads * s.d_head / 2**20:,.1f} MiB"]
                for length in dict.fromkeys(lengths)
            ),
        ),
        facts(
            ("trained for", s.max_len),
            ("takes at most", "any length" if limit is None else limit),
            ("positions", s.position.kind),
        ),
        sentence(
            "The fused kernel never stores the attention weights: memory grows with the length, not with its square."
        ),
    ]  # fmt: skip


def parallel_training(scene: Scene) -> list[JsonDict]:
    """M6."""
    scene, why = decoder_scene(scene)
    ids = scene.trace.inputs[0][:, : min(scene.length, PREFIXES + 1)]
    count = ids.shape[1] - 1
    if count < 1:
        return [sentence("The text is too short; write a longer one.")]
    lengths = torch.arange(1, count + 1, device=ids.device)
    with eval_mode(scene.model):
        once = scene.model(ids)[0, :-1].float()
        # Each prefix on its own, padded with zeros, as rows of one batch.
        rows = scene.model(ids[:, :-1].expand(count, -1).tril(), lengths=lengths).float()
    each = rows[torch.arange(count), lengths - 1]
    one, many = (F.cross_entropy(logits, ids[0, 1:], reduction="none").tolist() for logits in (once, each))
    places = [*range(1, count + 1)]
    return [
        *why,
        lines(
            "loss at each token, in nats", "token", [("one pass", places, one), (f"{count} prefixes", places, many)]
        ),
        facts(
            (f"tokens, of which the figure takes at most {PREFIXES}", count),
            ("mean loss, one pass", sum(one) / count),
            ("largest difference", max(abs(a - b) for a, b in zip(one, many, strict=True))),
        ),
    ]


def recall(scene: Scene) -> list[JsonDict]:
    """M7."""
    distance = int(scene.value)
    drawn = torch.randint(len(LETTERS), (RECALLED,), generator=generator())
    is_upper = torch.arange(RECALLED) == RECALLED - distance
    text = [LETTERS[one].upper() if up else LETTERS[one] for one, up in zip(drawn, is_upper, strict=True)]
    x = torch.cat([F.one_hot(drawn, len(LETTERS)), is_upper[:, None]], dim=-1).float()
    wk, wv = x.new_zeros(x.shape[1], 1), torch.eye(x.shape[1], len(LETTERS))
    wk[-1] = 1  # the key is whether a letter is upper-case, the value which one it is
    weights = (10 * (x @ wk)[:, 0]).softmax(-1)  # the query is 10, of width 1
    output = weights @ (x @ wv)
    measured = dict(notes.measurements()["M7"].curves["accuracy of attention"])
    return [
        sentence(
            "One head with weights set by hand: the query of “?” asks for an upper-case letter, a key says "
            "whether a token is one, and its value which letter it is."
        ),
        tokens("a text and its question", [*zip(text, is_upper.tolist(), strict=True), ("?", False)]),
        lines(
            "attention of “?” to each letter",
            "distance",
            [("weight", [*range(1, RECALLED + 1)], weights.flip(0).tolist())],
        ),
        facts(
            ("distance", distance),
            ("weight of the upper-case letter", float(weights[-distance])),
            ("letter that arrives in one step", LETTERS[int(output.argmax())].upper()),
            ("share of it in what arrives", float(output.max())),
            ("steps of a recurrent model from there", distance),
            ("a trained layer was right at this distance in", f"{measured[distance]:.0%}"),
        ),
    ]


def recurrence(scene: Scene) -> list[JsonDict]:
    """M8."""
    length, width = int(scene.value), 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lstm = nn.LSTM(width, width, batch_first=True)
    x = torch.randn(1, length, width, generator=generator())
    wq, wk, wv = torch.randn(3, width, width, generator=generator(1)) / math.sqrt(width)

    def attended(x: Tensor) -> Tensor:
        return ((x @ wq) @ (x @ wk).transpose(1, 2) / math.sqrt(width)).softmax(-1) @ (x @ wv)

    curves = []
    for name, run in (("LSTM", lambda x: lstm(x)[0]), ("attention", attended)):
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(run(given)[0, -1].square().sum(), given)
        norms = gradient[0].norm(dim=-1).flip(0)[1:].tolist()  # by distance, without the token itself
        curves.append((name, [*range(1, length)], [max(one, 1e-30) for one in norms]))
    return [
        sentence("As initialised, of width 32: how much the last output depends on a token so far back."),
        lines("norm of the gradient by distance", "distance", curves, log=True),
        facts(
            ("numbers in the LSTM's state, twice its width at any length", 2 * width),
            ("keys and values that attention has", 2 * width * length),
        ),
    ]


FIGURES = {
    "M1": Figure(encoder, ("pass", "layer", "head")),
    "M2": Figure(next_token, ("pass", "position")),
    "M3": Figure(original, (), Control("layers of each stack", 6, 1, 12, 1)),
    "M4": Figure(head_product, ("pass", "position")),
    "M5": Figure(long_contexts, ("pass",), Control("tokens", 8192, 1024, 32768, 1024)),
    "M6": Figure(parallel_training, ("pass",)),
    "M7": Figure(recall, (), Control("distance of the letter", 100, 1, RECALLED)),
    "M8": Figure(recurrence, (), Control("length", 64, 8, 128, 8)),
    "M9": Figure(encoder_of_the_notes, (), Control("layers", 6, 1, 12)),
}
