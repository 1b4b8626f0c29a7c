"""All that the page can ask, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from glasshouse.config import JsonDict
from glasshouse.page import about, alignment, attention, experiment, following, progress, steps, stream, text
from glasshouse.page.trace import Traces


class Answer(NamedTuple):
    """What a question must look like, and what answers it."""

    ask: type
    give: Callable[[Traces, Any], JsonDict]
    waits: bool = True  # for its turn with the model


ANSWERS = {
    "model": Answer(about.About, about.about, waits=False),
    "moments": Answer(about.Moments, about.moments, waits=False),
    "tokens": Answer(text.Read, text.read, waits=False),
    "word": Answer(text.Word, text.word, waits=False),
    "learn": Answer(text.Learn, text.learn, waits=False),
    "next": Answer(following.Next, following.next_tokens),
    "write": Answer(following.Write, following.write),
    "maps": Answer(attention.Maps, attention.maps),
    "tile": Answer(attention.Tile, attention.tile),
    "scores": Answer(attention.Scores, attention.scores),
    "pair": Answer(attention.Pair, attention.pair),
    "metrics": Answer(progress.Metrics, progress.metrics, waits=False),
    "facts": Answer(progress.Facts, progress.facts, waits=False),
    "probes": Answer(progress.Inside, progress.probes, waits=False),
    "samples": Answer(progress.Inside, progress.samples, waits=False),
    "difference": Answer(progress.Difference, progress.difference),
    "alignment": Answer(alignment.Alignment, alignment.alignment),
    "beams": Answer(alignment.Beams, alignment.beams),
    "lens": Answer(stream.Lens, stream.lens),
    "norms": Answer(stream.Norms, stream.norms),
    "alike": Answer(stream.Alike, stream.alike),
    "parts": Answer(stream.Parts, stream.parts),
    "loss": Answer(experiment.Loss, experiment.loss),
    "without": Answer(experiment.Without, experiment.without),
    "changed": Answer(experiment.Changed, experiment.changed),
    "patched": Answer(experiment.Patched, experiment.patched),
    "steps": Answer(steps.Steps, steps.steps),
}
