"""Trained models that come with the package, each the folder of its training run; they load by name, offline.

>>> import glasshouse as gh
>>> model, tok = gh.load("python-3m")
>>> gh.generate(model, tok, "for i in", max_new_tokens=1)[0].text
' range'
"""

from __future__ import annotations

from pathlib import Path

DEFAULT = "python-3m"  # the model of `glasshouse look` and `glasshouse generate` if none is given
ENGLISH = "english-4m"  # that of `glasshouse notes`, whose examples are English
# A prompt that shows what a model does: head 1 of layer 3 of python-3m, an induction head, finds `height`.
PROMPTS = {
    "dates-1m": "Mittwoch, 23. März 2033",
    "english-4m": 'The fox said to the bear, "Good morning, bear." And the bear said to the',
    "python-3m": (
        "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width *"
    ),
}


def names() -> list[str]:
    """Return the names of the models.

    >>> names()
    ['dates-1m', 'english-4m', 'python-3m']
    """
    return list(PROMPTS)


def find(path_or_name: str | Path) -> Path | None:
    """Return the run folder of a model; None for another name, or if there is a folder of that name.

    >>> find("python-3m").name, find("gpt2")
    ('python-3m', None)
    """
    if str(path_or_name) not in PROMPTS or Path(path_or_name).exists():
        return None
    return Path(__file__).parent / path_or_name
