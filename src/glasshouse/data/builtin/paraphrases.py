"""Pairs of sentences with one meaning and few words in common, for encoders that embed texts.

A meaning says who did what with which thing to whom, and when: `Bill sold the sofa to Peggy at noon.` and `At midday,
Margaret bought the couch from William.` The two sentences of a pair have different words for every part and the time
at different ends, so that a bag of words has only prepositions to go by. Every meaning has a twin in its split in
which the two people change places, so that the order of the words counts as well.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping

from glasshouse.data.builtin.splits import SPLITS, item_rng, split_of

PEOPLE = (
    ("William", "Bill"),
    ("Robert", "Bob"),
    ("Elizabeth", "Lizzie"),
    ("Margaret", "Peggy"),
    ("Richard", "Rick"),
    ("Katherine", "Kitty"),
    ("Edward", "Ted"),
    ("Mary", "Polly"),
)
THINGS = (
    ("sofa", "couch"),
    ("car", "automobile"),
    ("bicycle", "bike"),
    ("picture", "painting"),
    ("coat", "jacket"),
    ("photograph", "snapshot"),
    ("gem", "jewel"),
    ("ship", "vessel"),
    ("rug", "carpet"),
    ("novel", "book"),
)
TIMES = (
    ("before the storm", "ahead of the tempest"),
    ("after the wedding", "following the marriage"),
    ("at noon", "at midday"),
    ("at daybreak", "at dawn"),
    ("in autumn", "in the fall"),
    ("during the holidays", "while on vacation"),
    ("two weeks ago", "a fortnight ago"),
    ("last year", "twelve months earlier"),
)
# One who acts, the other, and a thing; the forms of a line mean the same.
ACTIONS = (
    ("{one} sold {thing} to {other}", "{other} bought {thing} from {one}"),
    ("{one} lent {thing} to {other}", "{other} borrowed {thing} from {one}"),
    ("{one} mailed {thing} to {other}", "{other} received {thing} by post from {one}"),
    ("{one} presented {other} with {thing}", "{other} got {thing} as a gift from {one}"),
    ("{one} stole {thing} from {other}", "{other} was robbed of {thing} by {one}"),
    ("{one} showed {thing} to {other}", "{other} was allowed to look at {thing} by {one}"),
    ("{one} promised {thing} to {other}", "{other} was assured of {thing} by {one}"),
    ("{one} hid {thing} from {other}", "{other} could not find {thing} because of {one}"),
)

Meaning = tuple[int, ...]  # indices of who acts, the other, the action, the thing and the time


def item(split: str, index: int) -> tuple[str, str]:
    """Return two sentences with the same meaning, which is in one split only.

    >>> item("train", 1)
    ('Peggy could not find the jewel because of Mary in the fall.', 'In autumn, Polly hid the gem from Margaret.')
    """
    meanings = _meanings()[split]
    return write(meanings[index % len(meanings)], item_rng("paraphrases", split, index))


def write(meaning: Meaning, rng: random.Random) -> tuple[str, str]:
    """Say a meaning in two ways: each part in another form, and the time once at the start and once at the end."""
    one, other, action, thing, time = meaning
    forms = [rng.sample(choices, 2) for choices in (PEOPLE[one], PEOPLE[other], ACTIONS[action], THINGS[thing])]
    times = rng.sample(TIMES[time], 2)
    first, second = (
        form.format(one=actor, other=partner, thing=f"the {named}")
        for actor, partner, form, named in zip(*forms, strict=True)
    )
    texts = [f"{times[0][0].upper()}{times[0][1:]}, {first}.", f"{second} {times[1]}."]
    rng.shuffle(texts)
    return texts[0], texts[1]


@functools.cache
def _meanings() -> Mapping[str, tuple[Meaning, ...]]:
    """Return the meanings of each split, in a fixed random order; twins are in the same split."""
    found: dict[str, list[Meaning]] = {split: [] for split in SPLITS}
    choices = (range(len(part)) for part in (PEOPLE, PEOPLE, ACTIONS, THINGS, TIMES))
    for one, other, *rest in itertools.product(*choices):
        if one != other:
            key = "/".join(map(str, (*sorted((one, other)), *rest)))
            found[split_of(f"paraphrases/{key}")].append((one, other, *rest))
    for split, meanings in found.items():
        random.Random(f"paraphrases/{split}").shuffle(meanings)
    return {split: tuple(meanings) for split, meanings in found.items()}
