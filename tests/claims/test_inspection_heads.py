"""Attention heads: statement A11, on a model trained in seconds; `benchmarks/attention_heads.py` has larger ones."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.inspection import ablation_effects


def test_a11_heads_start_different_and_learn_to_attend_to_the_previous_token() -> None:
    """Untrained heads attend broadly and differ; trained to predict the previous letter, some attend to it."""
    shape = {"d_model": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": 1, "d_ff": 32, "vocab_size": 12}
    model = gh.build(gh.preset("tiny-decoder", **shape, position="rotary", init="normal"))
    ids = torch.randint(12, (8, 24))
    with torch.no_grad(), gh.record(model, "pattern.0") as recording:
        model(ids)
    heads = recording["pattern.0"].transpose(0, 1).flatten(1)
    assert torch.pdist(heads).min() > 0.01  # no two heads are alike
    untrained = gh.head_scores(model, ids)
    assert untrained.normalized_entropy.min() > 0.75
    assert untrained.previous.max() < 0.2

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        letters = torch.randint(12, (16, 24))
        loss = F.cross_entropy(model(letters)[:, 1:].flatten(0, 1), letters[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = gh.head_scores(model, ids)
    assert trained.previous.max() > 0.4
    assert trained.normalized_entropy.min() < untrained.normalized_entropy.min()

    # Ablating the head that attends most to the previous token increases the loss.
    previous = F.pad(ids[:, :-1], (1, 0), value=-100)
    ablated = ablation_effects(model, ids, targets=previous)
    assert ablated.baseline < 0.1
    assert ablated.metric_increase[0, trained.previous[0].argmax()] > 0
