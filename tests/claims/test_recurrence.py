"""Recurrent models beside attention and with it, and the encoder of the notes: statements M8 to M10."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from claims.experiments import assert_as_stated


def test_m8_the_past_reaches_an_lstm_through_its_state_alone() -> None:
    """Two pasts and one state give one future; a transformer given only the last vector of the past does not."""
    lstm = nn.LSTM(8, 16, batch_first=True, dtype=torch.float64)
    past, other, future = (torch.randn(1, 12, 8, dtype=torch.float64) for _ in range(3))
    whole = lstm(torch.cat([past, future], 1))[0][:, 12:]
    _, state = lstm(past)
    torch.testing.assert_close(lstm(future, state)[0], whole, rtol=0, atol=1e-12)
    assert not torch.allclose(lstm(torch.cat([other, future], 1))[0][:, 12:], whole)
    assert sum(part.numel() for part in state) == 2 * 16  # whatever the length of the past


def gradients_by_distance(output: Tensor, x: Tensor) -> Tensor:
    """Return the norm of the gradient of the last output with respect to each input [S]."""
    (gradient,) = torch.autograd.grad(output[0, -1].square().sum(), x)
    return gradient[0].norm(dim=-1)


def test_m8_the_gradient_to_a_token_fades_with_distance_in_an_lstm_and_not_in_attention() -> None:
    torch.manual_seed(0)
    length, width = 64, 32
    lstm = nn.LSTM(width, width, batch_first=True, dtype=torch.float64)
    sizes = {"d_model": width, "n_heads": 4, "n_kv_heads": 4, "n_layers": 1, "d_ff": 64}
    decoder = gh.build(
        gh.preset("tiny-decoder", **sizes, position="none", init="xavier", head="none"), dtype=torch.float64
    )
    faded = {}
    for name in ("lstm", "attention"):
        x = torch.randn(1, length, width, dtype=torch.float64, requires_grad=True)
        if name == "lstm":
            gradient = gradients_by_distance(lstm(x)[0], x)
        else:
            entered: list[Tensor] = []
            hook = decoder.token_embedding.register_forward_hook(
                lambda *_, given=x, seen=entered: seen.append(given) or given
            )
            gradient = gradients_by_distance(decoder(torch.zeros(1, length, dtype=torch.long)), x)
            hook.remove()
            assert entered
        faded[name] = (gradient[:8].mean() / gradient[-9:-1].mean()).item()  # without the last token itself
    print(f"\nM8 gradient to the first 8 of {length} tokens over that to the last 8: {faded}")
    assert faded["lstm"] < 1e-6
    assert 0.2 < faded["attention"] < 5


def test_m9_encoder_of_the_notes_by_arithmetic() -> None:
    spec = gh.preset("vaswani-encoder")
    assert (spec.kind, spec.n_layers, spec.d_model, spec.n_heads, spec.d_ff) == ("encoder", 6, 512, 8, 2048)
    attention = 4 * 512 * 512  # Wq, Wk, Wv, Wo
    feedforward = 512 * 2048 + 2048 + 2048 * 512 + 512
    block = attention + feedforward + 2 * (2 * 512)  # and two norms
    model = gh.build(spec, device="meta")
    counted = sum(parameter.numel() for parameter in model.parameters())
    print(f"\nM9 parameters: {counted:,}, {6 * block:,} of them in the blocks")
    assert counted == gh.count_parameters(spec) == 37_000 * 512 + 6 * block
    assert model(torch.zeros(1, 3, dtype=torch.long, device="meta")).shape == (1, 3, 512)


@pytest.mark.long
def test_m8_recurrent_models_that_learned_short_texts_fade_and_attention_does_not() -> None:
    from trained_claims.recall import recurrent_recall

    assert_as_stated("M8", recurrent_recall(seeds=1, more=0, sizes=1).figures)


def test_m10_additive_attention_by_hand() -> None:
    """Scores v . tanh(W s + U h + b) of three states, their softmax, and the mean that it weights."""
    from trained_claims.copying import AdditiveAttention

    attention = AdditiveAttention(2).double()
    w, u, b, v = [[1.0, 2.0], [0.0, -1.0]], [[0.5, 0.0], [1.0, 1.0]], [0.1, -0.2], [2.0, -3.0]
    with torch.no_grad():
        for weight, value in (
            (attention.of_state.weight, w),
            (attention.of_source.weight, u),
            (attention.of_source.bias, b),
            (attention.score.weight, [v]),
        ):
            weight.copy_(torch.tensor(value, dtype=torch.float64))
    state, states = [0.3, -0.4], [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]]
    exponentials = []
    for h in states:
        score = 0.0
        for i in range(2):
            inside = w[i][0] * state[0] + w[i][1] * state[1] + u[i][0] * h[0] + u[i][1] * h[1] + b[i]
            score += v[i] * math.tanh(inside)
        exponentials.append(math.exp(score))
    shares = [one / sum(exponentials) for one in exponentials]
    expected = [sum(share * h[i] for share, h in zip(shares, states, strict=True)) for i in range(2)]
    given = torch.tensor([states], dtype=torch.float64)
    found = attention(torch.tensor([state], dtype=torch.float64), given, attention.of_source(given))
    torch.testing.assert_close(found[0].tolist(), expected, rtol=0, atol=1e-12)


def test_m10_without_attention_the_source_is_its_last_state() -> None:
    """Other states of the encoder before the last change nothing without attention, and everything with it."""
    from trained_claims.copying import RecurrentSeq2Seq

    source, target = torch.randint(26, (2, 9)), torch.randint(26, (2, 5))
    for attention in (False, True):
        model = RecurrentSeq2Seq(0, attention).double()
        expected = model(source, target)
        hook = model.encoder.register_forward_hook(lambda _, __, out: (torch.randn_like(out[0]), out[1]))
        assert torch.equal(model(source, target), expected) is not attention
        hook.remove()
        other = model((source + 1) % 26, target)
        assert not torch.allclose(other, expected)  # the last state is another's


@pytest.mark.long
def test_m10_attention_copies_what_one_state_loses() -> None:
    from trained_claims.copying import by_length

    figures = by_length(seeds=1, steps=500, longest=12).figures
    assert figures["GRUs: letters right in the shortest texts"] > 0.9
    assert figures["gain by attention in the longest texts, the least of the seeds"] > 0.2
    assert figures["attention alone in the longest texts, the least of the seeds"] > 0.9
