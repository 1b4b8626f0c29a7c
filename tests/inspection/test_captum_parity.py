"""Saliency equals Captum's, on the same models in float64, at the same steps; `make inspection` installs Captum.

Both sum the same products in another order: 1e-9 of the largest leaves room for that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inspected_models import IDS, assert_close, small
from table_rows import table_row
from torch import Tensor

import glasshouse as gh

attr = pytest.importorskip("captum.attr", reason="it comes by `make inspection`")

STEPS = 8  # Captum rounds weights to float32, which has an eighth
MIDPOINTS = {"n_steps": STEPS, "method": "riemann_middle", "return_convergence_delta": True}


@table_row("Captum `LayerIntegratedGradients(f, embedding)", "Captum `LayerGradientXActivation` at the embedding")
@pytest.mark.parametrize("choices", [{}, {"position": "learned", "norm": "layer", "feedforward": "gelu"}], ids=str)
def test_every_next_token_of_a_decoder(choices: dict[str, Any]) -> None:
    model = small(**choices)
    integrated = gh.saliency(model, IDS, steps=STEPS, baseline=10)
    product = gh.saliency(model, IDS, method="gradient_x_input")
    baseline = torch.full_like(IDS, 10)
    for position in range(IDS.shape[1] - 1):

        def logits(ids: Tensor, at: int = position) -> Tensor:
            return model(ids)[:, at]

        target = IDS[:, position + 1]
        theirs = attr.LayerIntegratedGradients(logits, model.token_embedding)
        expected, delta = theirs.attribute(IDS, baselines=baseline, target=target, **MIDPOINTS)
        assert_close(integrated.scores[:, position], expected.sum(-1), 1e-9)
        assert integrated.completeness_gap is not None
        assert_close(integrated.completeness_gap[:, position], delta, 1e-9)
        expected = attr.LayerGradientXActivation(logits, model.token_embedding).attribute(IDS, target=target)
        assert_close(product.scores[:, position], expected.sum(-1), 1e-9)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_classifier_with_segments_and_padding(pooling: str) -> None:
    head = {"kind": "sequence_classification", "n_labels": 3, "pooling": pooling}
    model = small("tiny-encoder", head=head, n_segments=2)
    segments, lengths = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2), torch.tensor([6, 4])
    found = gh.saliency(model, IDS, label=2, steps=STEPS, baseline=10, segments=segments, lengths=lengths)

    def logits(ids: Tensor, segments: Tensor, lengths: Tensor) -> Tensor:
        return model(ids, segments=segments, lengths=lengths)

    theirs = attr.LayerIntegratedGradients(logits, model.token_embedding)
    baseline = torch.full_like(IDS, 10)
    expected, delta = theirs.attribute(
        IDS, baselines=baseline, target=2, additional_forward_args=(segments, lengths), **MIDPOINTS
    )
    assert_close(found.scores[:, 0], expected.sum(-1), 1e-9)
    assert found.completeness_gap is not None
    assert_close(found.completeness_gap[:, 0], delta, 1e-9)


def test_an_encoder_decoder_from_zeros() -> None:
    model = small("tiny-seq2seq")
    source, target = IDS, IDS.flip(1)[:, :4]
    found = gh.saliency(model, source, target, of="log_prob", steps=STEPS, baseline=torch.zeros(()))
    with torch.no_grad():
        embedded = model.token_embedding(source), model.token_embedding(target)
    for position in range(3):

        def log_probs(of_source: Tensor, of_target: Tensor, at: int = position) -> Tensor:
            copies = len(of_source) // len(source)
            edits = {"encoder.token_embed": of_source, "decoder.token_embed": of_target}
            with gh.edit(model, edits):
                output = model(source.repeat(copies, 1), target.repeat(copies, 1))
            return output[:, at].log_softmax(-1)

        theirs = attr.IntegratedGradients(log_probs)
        expected, delta = theirs.attribute(embedded, target=target[:, position + 1], **MIDPOINTS)
        assert found.source_scores is not None
        assert found.completeness_gap is not None
        assert_close(found.source_scores[:, position], expected[0].sum(-1), 1e-9)
        assert_close(found.scores[:, position], expected[1].sum(-1), 1e-9)
        assert_close(found.completeness_gap[:, position], delta, 1e-9)


@table_row("Captum `LayerActivation`, `NeuronGradient`")
def test_activations_and_the_gradient_of_a_neuron() -> None:
    model, neuron = small(), 5
    with gh.record(model, "hidden.1", "token_embed", grad=True) as seen:
        model(IDS)
    down = model.stack.blocks[1].feedforward.layer.down

    def logits(ids: Tensor) -> Tensor:
        return model(ids)[:, -1]

    expected = attr.LayerActivation(logits, down).attribute(IDS, attribute_to_layer_input=True)
    assert_close(seen["hidden.1"], expected, 1e-12)
    value = seen["hidden.1"][:, -1, neuron]
    found = seen.gradient("token_embed", of=value.sum())

    def of_embeddings(embedded: Tensor) -> Tensor:
        with gh.edit(model, {"token_embed": embedded}):
            return model(IDS)

    theirs = attr.NeuronGradient(of_embeddings, down)
    embedded = seen["token_embed"].detach().requires_grad_()
    expected = theirs.attribute(embedded, (IDS.shape[1] - 1, neuron), attribute_to_neuron_input=True)
    assert_close(found, expected, 1e-9)
