"""Conversations with correct answers: small questions about a word, a list of words, a language or a date.

An answer is a sentence, unless a system message asks for the result alone. A later turn may refer to the word or list
of the one before. Words are from the English CLDR and Python's help texts, so they depend on the versions of both;
words, names and dates of one split occur in no other.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from glasshouse.data.builtin import cldr, dates, langid
from glasshouse.data.builtin.splits import SPLITS, item_rng, split_of

Message = dict[str, str]

_NO_SYSTEM = ("",) * 5
_PLAIN_SYSTEM = ("You are a helpful assistant.", "You are a patient teacher.", "Answer in one short sentence.")
_TERSE_SYSTEM = ("Answer with the result alone.", "Give only the answer, with no other words.")


@dataclass(frozen=True)
class Task:
    """A question in several wordings, for a new subject and for the same subject again, and its answer."""

    first: tuple[str, ...]
    again: tuple[str, ...]
    solve: Callable[[str], str]
    sentence: str


_WORD_TASKS = (
    Task(
        ('Spell the word "{shown}".', 'How do you spell "{shown}"?', 'Write "{shown}" letter by letter.'),
        ("Now spell the same word.", "How do you spell the same word?"),
        "-".join,
        "It is spelled {answer}.",
    ),
    Task(
        ('How many letters are in "{shown}"?', 'Count the letters in "{shown}".', 'How long is the word "{shown}"?'),
        ("How many letters are in the same word?", "Now count the letters in the same word."),
        lambda word: str(len(word)),
        "It has {answer} letters.",
    ),
    Task(
        ('Write "{shown}" backwards.', 'What is "{shown}" in reverse?', 'Reverse the word "{shown}".'),
        ("Now write the same word backwards.", "What is the same word in reverse?"),
        lambda word: word[::-1],
        "Backwards it is {answer}.",
    ),
    Task(
        ('How many vowels (a, e, i, o, u) are in "{shown}"?', 'Count the vowels (a, e, i, o, u) in "{shown}".'),
        ("How many vowels (a, e, i, o, u) are in the same word?",),
        lambda word: str(sum(letter in "aeiou" for letter in word.lower())),
        "The number of vowels is {answer}.",
    ),
    Task(
        ('Write "{shown}" in capital letters.', 'Put the word "{shown}" in capitals.'),
        ("Now write the same word in capital letters.", "And the same word in capitals?"),
        str.upper,
        "In capitals it is {answer}.",
    ),
)

_LIST_TASKS = (
    Task(
        ("How many words are in this list: {shown}?", "Count these words: {shown}."),
        ("How many words are in the same list?", "Now count the words in the same list."),
        lambda words: str(len(words.split(", "))),
        "The list has {answer} words.",
    ),
    Task(
        ("Sort these words alphabetically: {shown}.", "Put these words in alphabetical order: {shown}."),
        ("Now sort the same list alphabetically.", "What is the same list in alphabetical order?"),
        lambda words: ", ".join(sorted(words.split(", "), key=str.lower)),
        "In alphabetical order: {answer}.",
    ),
    Task(
        ("Which of these words is the longest: {shown}?", "Find the longest of these words: {shown}."),
        ("Which word in the same list is the longest?", "And the longest word in the same list?"),
        lambda words: max(words.split(", "), key=len),
        "The longest word is {answer}.",
    ),
    Task(
        ("Which of these words comes last in the alphabet: {shown}?",),
        ("Which word in the same list comes last in the alphabet?",),
        lambda words: max(words.split(", "), key=str.lower),
        "The last in the alphabet is {answer}.",
    ),
)

_LANGUAGE_TASKS = (
    Task(
        ("Which language are these names in: {shown}?", "Name the language of this list: {shown}"),
        (),
        lambda code: cldr.locale("en").languages[code],
        "These names are in {answer}.",
    ),
)

_DATE_TASKS = (
    Task(
        (
            "Write this date in ISO form: {shown}",
            "What is the ISO form of this date: {shown}",
            "As an ISO date: {shown}",
        ),
        (),
        str,
        "In ISO form it is {answer}.",
    ),
)


def item(split: str, index: int) -> list[Message]:
    """Return a conversation of one to three turns.

    >>> [message["role"] for message in item("train", 4)]
    ['user', 'assistant', 'user', 'assistant']
    """
    rng = item_rng("chat", split, index)
    system = rng.choice(_NO_SYSTEM + _PLAIN_SYSTEM + _TERSE_SYSTEM)
    messages = [{"role": "system", "content": system}] if system else []
    left: list[Task] = []
    for _ in range(*rng.choices((1, 2, 3), weights=(5, 3, 2))):
        again = bool(left) and rng.random() < 0.5
        if not again:
            tasks, shown, known = draw_subject(rng, split)
            left = list(tasks)
        task = left.pop(rng.randrange(len(left)))
        question = rng.choice(task.again if again else task.first).format(shown=shown)
        answer = task.solve(known)
        reply = answer if system in _TERSE_SYSTEM else task.sentence.format(answer=answer)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages


def draw_subject(rng: random.Random, split: str) -> tuple[tuple[Task, ...], str, str]:
    """Draw the subject of a question: the tasks that it has, how it is shown, and what their answers are made of."""
    tasks, draw = rng.choices(_TOPICS, weights=_WEIGHTS)[0]
    return tasks, *draw(rng, split)


def _draw_word(rng: random.Random, split: str) -> tuple[str, str]:
    word = rng.choice(words()[split])
    return word, word


def _draw_list(rng: random.Random, split: str) -> tuple[str, str]:
    while True:
        drawn = rng.sample(words()[split], rng.randint(3, 7))
        shorter, longest = sorted(map(len, drawn))[-2:]
        if shorter < longest:  # so that there is a longest word
            return ", ".join(drawn), ", ".join(drawn)


_TOPICS = (
    (_WORD_TASKS, _draw_word),
    (_LIST_TASKS, _draw_list),
    (_LANGUAGE_TASKS, langid.draw),
    (_DATE_TASKS, dates.draw),
)
_WEIGHTS = (4, 3, 2, 3)
_IN_PROSE = r"(?<![\w.'`\")-])[a-z]+(?=[\s,;:?!)])"


@functools.cache
def words() -> Mapping[str, tuple[str, ...]]:
    """Return the words of each split.

    >>> "statement" in words()[split_of("word:statement")]
    True
    """
    from pydoc_data.topics import topics  # a megabyte, so imported lazily

    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in dict.fromkeys(cldr.names("en").values()):
        if _is_word(name):
            found[langid.split_by_name()[name.lower()]].append(name)
    taken = {name.lower() for names in found.values() for name in names}
    # Twice in running text, and not next to a dot or a quote: this excludes most variable names.
    prose = Counter(word for text in topics.values() for word in re.findall(_IN_PROSE, text))
    for word in sorted(prose):
        if prose[word] > 1 and _is_word(word) and word not in taken:
            found[split_of(f"word:{word}")].append(word)
    return {split: tuple(every) for split, every in found.items()}


def _is_word(text: str) -> bool:
    return re.fullmatch("[A-Za-z]{3,12}", text) is not None
