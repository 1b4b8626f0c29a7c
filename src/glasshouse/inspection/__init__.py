"""Interpretability: record and edit activations, and the tools built on that."""

from glasshouse.inspection.attention_map import AttentionMap
from glasshouse.inspection.attribution import Attribution, attribute
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.inspection.editing import AblationEdit, ablate_head, add, edit, mean_ablate, scale
from glasshouse.inspection.geometry import attention_rollout, position_similarity, residual_norms
from glasshouse.inspection.head_scoring import HeadScores, head_scores, repeated_tokens
from glasshouse.inspection.inputs.text_input import run
from glasshouse.inspection.logit_lens import Lens, lens
from glasshouse.inspection.patching.ablation import Ablation, ablation_effects
from glasshouse.inspection.patching.activation_patching import ActivationPatching, activation_patching, patch
from glasshouse.inspection.patching.path_patching import PathEffect, path_patching
from glasshouse.inspection.recording import Recording, capture_attention, record
from glasshouse.inspection.sites import sites
from glasshouse.inspection.steering import SteeringVector, steering_vector

__all__ = [
    "Ablation",
    "AblationEdit",
    "ActivationPatching",
    "AttentionMap",
    "Attribution",
    "Comparison",
    "HeadScores",
    "Lens",
    "PathEffect",
    "Recording",
    "SteeringVector",
    "ablate_head",
    "ablation_effects",
    "activation_patching",
    "add",
    "attention_rollout",
    "attribute",
    "capture_attention",
    "compare",
    "edit",
    "head_scores",
    "lens",
    "mean_ablate",
    "patch",
    "path_patching",
    "position_similarity",
    "record",
    "repeated_tokens",
    "residual_norms",
    "run",
    "scale",
    "sites",
    "steering_vector",
]
