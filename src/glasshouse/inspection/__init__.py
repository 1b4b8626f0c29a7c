"""Looking inside: recording and editing what passes through a model, and tools that explain it."""

from glasshouse.inspection.attribution import Attribution, attribute
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.inspection.editing import AblationEdit, ablate_head, add, edit, mean_ablate, scale
from glasshouse.inspection.geometry import residual_norms, attention_rollout, position_similarity
from glasshouse.inspection.maps import AttentionMap, capture_attention
from glasshouse.inspection.patching import PathEffect, ActivationPatching, patch, path_patching, activation_patching
from glasshouse.inspection.readout import Lens, lens
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.scoring import HeadScores, head_scores, repeated_tokens
from glasshouse.inspection.silencing import Ablation, ablation_effects
from glasshouse.inspection.sites import sites

__all__ = [
    "Ablation",
    "Attribution",
    "Comparison",
    "HeadScores",
    "Lens",
    "AttentionMap",
    "PathEffect",
    "Recording",
    "AblationEdit",
    "ActivationPatching",
    "ablate_head",
    "ablation_effects",
    "add",
    "attribute",
    "compare",
    "edit",
    "head_scores",
    "capture_attention",
    "lens",
    "mean_ablate",
    "residual_norms",
    "patch",
    "path_patching",
    "record",
    "repeated_tokens",
    "attention_rollout",
    "scale",
    "position_similarity",
    "sites",
    "activation_patching",
]
