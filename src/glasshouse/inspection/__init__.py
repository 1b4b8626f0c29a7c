"""Looking inside: recording and editing what passes through a model, and tools that explain it."""

from glasshouse.inspection.attribution import Attribution, attribute
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.inspection.editing import Silence, ablate_head, add, edit, mean, scale
from glasshouse.inspection.geometry import norms, rollout, similarity
from glasshouse.inspection.maps import Map, keep_maps
from glasshouse.inspection.patching import PathEffect, Sweep, patch, path, sweep
from glasshouse.inspection.readout import Lens, lens
from glasshouse.inspection.recording import Seen, record
from glasshouse.inspection.scoring import HeadScores, head_scores, repeated
from glasshouse.inspection.silencing import Ablation, ablation
from glasshouse.inspection.sites import sites

__all__ = [
    "Ablation",
    "Attribution",
    "Comparison",
    "HeadScores",
    "Lens",
    "Map",
    "PathEffect",
    "Seen",
    "Silence",
    "Sweep",
    "ablate_head",
    "ablation",
    "add",
    "attribute",
    "compare",
    "edit",
    "head_scores",
    "keep_maps",
    "lens",
    "mean",
    "norms",
    "patch",
    "path",
    "record",
    "repeated",
    "rollout",
    "scale",
    "similarity",
    "sites",
    "sweep",
]
