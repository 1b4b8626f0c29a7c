"""Preferences by rule: a question, and two correct answers, of which the one in the asked form is preferred.

A prompt asks for the result alone, or for a sentence with it; the answer in the other form is rejected. So a model
that always answers in the same form is right about half of the pairs. Questions and subjects are those of the dataset
chat, by split.
"""

from __future__ import annotations

from glasshouse.data.builtin.chat import draw_subject
from glasshouse.data.builtin.splits import item_rng

_BRIEF = ("Be brief.", "Give the result alone.", "No sentence, please.")
_FULL = ("Answer in a sentence.", "Say it in a sentence.", "A whole sentence, please.")


def item(split: str, index: int) -> tuple[str, str, str]:
    """Return a prompt, the answer that is preferred and the one that is not.

    >>> prompt, chosen, rejected = item("train", 5)
    >>> prompt
    'No sentence, please. Which of these words is the longest: Sogdian, substituted, selects?'
    >>> chosen, rejected
    ('substituted', 'The longest word is substituted.')
    """
    rng = item_rng("preferences", split, index)
    tasks, shown, known = draw_subject(rng, split)
    task = rng.choice(tasks)
    question, answer = rng.choice(task.first).format(shown=shown), task.solve(known)
    sentence, brief = task.sentence.format(answer=answer), rng.random() < 0.5
    prompt = f"{rng.choice(_BRIEF if brief else _FULL)} {question}"
    return (prompt, answer, sentence) if brief else (prompt, sentence, answer)
