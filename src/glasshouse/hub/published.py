"""The config.json of published models, at least one for each family, as their authors wrote it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from glasshouse.config import JsonDict
from glasshouse.hub.serialization import FAMILIES
from glasshouse.spec import Spec

PATH = Path(__file__).parent / "published_configs.json"


@cache
def published_configs() -> dict[str, JsonDict]:
    """Return the configurations by the names of their models.

    >>> published_configs()["gpt2"]["n_head"]
    12
    """
    found: dict[str, JsonDict] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def published_specs() -> dict[str, Spec]:
    """Return the spec of each configuration.

    >>> published_specs()["Mistral-7B-v0.1"].n_kv_heads
    8
    """
    # Tensor names, which no configuration has, decide about untied heads alone; there are as many as layers.
    names = [str(number) for number in range(64)]
    return {
        name: FAMILIES[str(config["model_type"])].spec_from_config(config, names, source=name)
        for name, config in published_configs().items()
    }
