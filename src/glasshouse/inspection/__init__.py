"""Interpretability: record and edit activations, and the tools built on that."""

from glasshouse.inspection.attention_map import AttentionMap
from glasshouse.inspection.attribution import Attribution, attribute
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.inspection.editing import AblationEdit, ablate_head, add, edit, mean_ablate, scale
from glasshouse.inspection.geometry import attention_rollout, position_similarity, residual_norms
from glasshouse.inspection.head_scoring import HeadScores, head_scores, repeated_tokens
from glasshouse.inspection.inputs.text_input import run
from glasshouse.inspection.linear_probe import LinearProbe, probe
from glasshouse.inspection.logit_lens import Lens, lens
from glasshouse.inspection.parameters.by_head import LayerWeights, Weights, weights
from glasshouse.inspection.parameters.composition import Composition
from glasshouse.inspection.parameters.low_rank import LowRank
from glasshouse.inspection.parameters.nearest_tokens import NearestTokens, nearest
from glasshouse.inspection.patching.ablation import Ablation, ablation_effects
from glasshouse.inspection.patching.activation_patching import ActivationPatching, activation_patching, patch
from glasshouse.inspection.patching.attribution_patching import attribution_patching
from glasshouse.inspection.patching.circuit import Circuit, circuit
from glasshouse.inspection.patching.edge_effects import (
    EdgeEffects,
    edge_attribution,
    edge_attribution_by_position,
    edge_patching,
)
from glasshouse.inspection.patching.path_patching import PathEffect, path_patching
from glasshouse.inspection.recording import Recording, capture_attention, record
from glasshouse.inspection.saliency import Saliency, saliency
from glasshouse.inspection.sites import sites
from glasshouse.inspection.steering import SteeringVector, steering_vector

__all__ = [
    "Ablation",
    "AblationEdit",
    "ActivationPatching",
    "AttentionMap",
    "Attribution",
    "Circuit",
    "Comparison",
    "Composition",
    "EdgeEffects",
    "HeadScores",
    "LayerWeights",
    "Lens",
    "LinearProbe",
    "LowRank",
    "NearestTokens",
    "PathEffect",
    "Recording",
    "Saliency",
    "SteeringVector",
    "Weights",
    "ablate_head",
    "ablation_effects",
    "activation_patching",
    "add",
    "attention_rollout",
    "attribute",
    "attribution_patching",
    "capture_attention",
    "circuit",
    "compare",
    "edge_attribution",
    "edge_attribution_by_position",
    "edge_patching",
    "edit",
    "head_scores",
    "lens",
    "mean_ablate",
    "nearest",
    "patch",
    "path_patching",
    "position_similarity",
    "probe",
    "record",
    "repeated_tokens",
    "residual_norms",
    "run",
    "saliency",
    "scale",
    "sites",
    "steering_vector",
    "weights",
]
