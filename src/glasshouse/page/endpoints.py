"""API endpoints by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from glasshouse.config import JsonDict
from glasshouse.page import (
    attention,
    interventions,
    model_info,
    next_token,
    residual_stream,
    seq2seq,
    tokenization,
    training_run,
    walkthrough,
)
from glasshouse.page.trace import TraceCache


class Endpoint(NamedTuple):
    """An endpoint: its parameters and its handler."""

    params: type
    handler: Callable[[TraceCache, Any], JsonDict]
    needs_model: bool = True  # takes the model lock


ENDPOINTS = {
    "model": Endpoint(model_info.ModelInfo, model_info.model_info, needs_model=False),
    "checkpoints": Endpoint(model_info.Checkpoints, model_info.checkpoints, needs_model=False),
    "tokenize": Endpoint(tokenization.Tokenize, tokenization.tokenize, needs_model=False),
    "word_merges": Endpoint(tokenization.WordMerges, tokenization.word_merges, needs_model=False),
    "train_bpe": Endpoint(tokenization.TrainBpe, tokenization.train_bpe, needs_model=False),
    "next": Endpoint(next_token.Next, next_token.next_tokens),
    "generate": Endpoint(next_token.Generate, next_token.generate_text),
    "maps": Endpoint(attention.Maps, attention.maps),
    "tile": Endpoint(attention.Tile, attention.tile),
    "scores": Endpoint(attention.Scores, attention.scores),
    "query_key": Endpoint(attention.QueryKey, attention.query_key),
    "metrics": Endpoint(training_run.Metrics, training_run.metrics, needs_model=False),
    "run_settings": Endpoint(training_run.RunSettings, training_run.run_settings, needs_model=False),
    "probes": Endpoint(training_run.CheckpointLog, training_run.probes, needs_model=False),
    "samples": Endpoint(training_run.CheckpointLog, training_run.samples, needs_model=False),
    "compare_checkpoints": Endpoint(training_run.CompareCheckpoints, training_run.compare_checkpoints),
    "cross_attention": Endpoint(seq2seq.CrossAttention, seq2seq.cross_attention),
    "beams": Endpoint(seq2seq.Beams, seq2seq.beams),
    "lens": Endpoint(residual_stream.Lens, residual_stream.lens),
    "norms": Endpoint(residual_stream.Norms, residual_stream.norms),
    "cosine_similarity": Endpoint(residual_stream.CosineSimilarity, residual_stream.cosine_similarity),
    "logit_attribution": Endpoint(residual_stream.LogitAttribution, residual_stream.logit_attribution),
    "loss": Endpoint(interventions.Loss, interventions.loss),
    "ablate_each": Endpoint(interventions.AblateEach, interventions.ablate_each),
    "compare_predictions": Endpoint(interventions.ComparePredictions, interventions.compare_predictions),
    "patch_each": Endpoint(interventions.PatchEach, interventions.patch_each),
    "walkthrough": Endpoint(walkthrough.Walkthrough, walkthrough.walkthrough),
}
