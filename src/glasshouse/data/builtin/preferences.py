"""Preferences by rule: a question, and two correct answers, of which the result alone is preferred to a sentence.

A model that was fine-tuned on the dataset chat answers in sentences, and so learns to be brief. Questions and
subjects are those of that dataset, by split.
"""

from __future__ import annotations

from glasshouse.data.builtin.chat import draw_subject
from glasshouse.data.builtin.splits import item_rng


def item(split: str, index: int) -> tuple[str, str, str]:
    """Return a prompt, the answer that is preferred and the one that is not.

    >>> prompt, chosen, rejected = item("train", 5)
    >>> prompt
    'Which of these words is the longest: Sogdian, substituted, selects?'
    >>> chosen, rejected
    ('substituted', 'The longest word is substituted.')
    """
    rng = item_rng("preferences", split, index)
    tasks, shown, known = draw_subject(rng, split)
    task = rng.choice(tasks)
    answer = task.solve(known)
    return rng.choice(task.first).format(shown=shown), answer, task.sentence.format(answer=answer)
