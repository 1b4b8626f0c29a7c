"""A recurrent model beside attention, and the encoder of the notes: statements M8 and M9."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import glasshouse as gh


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
