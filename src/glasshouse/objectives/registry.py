"""All objectives, and the choice of one by the kinds of model and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasshouse.data import Corpus, Dataset
from glasshouse.data.corpus import Kind
from glasshouse.errors import InputError
from glasshouse.objectives.causal_lm import CausalLM
from glasshouse.objectives.chat import Chat
from glasshouse.objectives.classification import SequenceClassification, TokenClassification
from glasshouse.objectives.contrastive import Contrastive
from glasshouse.objectives.dpo import DPO
from glasshouse.objectives.masked_lm import MaskedLM
from glasshouse.objectives.objective import Objective
from glasshouse.objectives.seq2seq_lm import Seq2SeqLM
from glasshouse.spec import Spec

OBJECTIVES: tuple[Objective[Any], ...] = (
    CausalLM(),
    Chat(),
    DPO(),
    MaskedLM(),
    Seq2SeqLM(),
    SequenceClassification(),
    TokenClassification(),
    Contrastive(),
)


def find_objective(s: Spec, corpus: Corpus, chosen: Objective[Any] | None = None) -> Objective[Any]:
    """Return the objective of a model on a corpus: the `chosen` one, or the one for the kinds of model and data.

    >>> import tempfile, glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["May"], vocab_size=263)
    >>> corpus = gh.data.prepare("dates", tok, tempfile.mkdtemp(), split="test")
    >>> type(find_objective(gh.preset("tiny-seq2seq"), corpus)).__name__
    'Seq2SeqLM'
    """
    if chosen is not None and chosen.data_kind is not None:
        _check_chosen(chosen, s, corpus)
        return chosen
    for objective in objectives_on(corpus.kind):
        if objective.fits(s.kind, s.head.kind):
            objective.check_model(s, corpus)
            return chosen or objective
    raise InputError(
        f"the corpus is of kind {corpus.kind}, on which a model of kind {s.kind} with the head {s.head.kind} cannot "
        f"be trained: {_what_each_takes()}."
    )


def _check_chosen(chosen: Objective[Any], s: Spec, corpus: Corpus) -> None:
    name = getattr(chosen, "kind", type(chosen).__name__)
    if corpus.kind != chosen.data_kind:
        raise InputError(
            f"the objective is {name}, which takes data of kind {chosen.data_kind}, but the corpus is of kind "
            f"{corpus.kind}; give other data, or another objective."
        )
    if not chosen.fits(s.kind, s.head.kind):
        raise InputError(
            f"the objective is {name}, which trains {chosen.models}, but the model is of kind {s.kind} with the head "
            f"{s.head.kind}; choose another model, or another objective."
        )
    chosen.check_model(s, corpus)


def _what_each_takes() -> str:
    """Describe which models take which data."""
    kinds: dict[str, list[str]] = {}
    for objective in OBJECTIVES:
        kinds.setdefault(objective.models, []).append(str(objective.data_kind))
    (first, data), *others = ((models, _listed(data)) for models, data in kinds.items())
    return _listed([f"{first} take {data}", *(f"{models} {data}" for models, data in others)])


def _listed(words: Sequence[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def objectives_on(kind: Kind) -> list[Objective[Any]]:
    """Return the objectives for one kind of data.

    >>> [type(objective).__name__ for objective in objectives_on("text")]
    ['CausalLM', 'MaskedLM']
    """
    return [objective for objective in OBJECTIVES if objective.data_kind == kind]


def model_objective(s: Spec) -> Objective[Any]:
    """Return the default objective of a model on a custom dataset, whose kind of data is unknown.

    >>> import glasshouse as gh
    >>> type(model_objective(gh.preset("tiny-encoder"))).__name__
    'MaskedLM'
    """
    found = next((objective for objective in OBJECTIVES if objective.fits(s.kind, s.head.kind)), None)
    if found is None:
        raise InputError(f"a model of kind {s.kind} with the head {s.head.kind} has no loss; give objective, too.")
    return found


def head_objective(
    kind: Kind, model_kind: object, head_kind: object, chosen: Objective[Any] | None = None
) -> Objective[Any]:
    """Return the objective that decides a model's head: one that fits the model, or else the first on such data.

    A `chosen` one decides instead if it is for this kind of data.

    >>> type(head_objective("labelled", "encoder", "masked_token")).__name__
    'SequenceClassification'
    """
    if chosen is not None and chosen.data_kind == kind:
        return chosen
    found = objectives_on(kind)
    return next((objective for objective in found if objective.fits(model_kind, head_kind)), found[0])


def required_kind(model_kind: object, head_kind: object, chosen: Objective[Any] | None = None) -> Kind | None:
    """Return the one kind of data that a model can be trained on, by a `chosen` objective; None if there are several.

    Text is never required: files are text anyway unless their columns say otherwise, and the model of a text may get
    a head for other data.

    >>> required_kind("seq2seq", "next_token"), required_kind("decoder", "next_token")
    ('pairs', None)
    """
    if chosen is not None and chosen.data_kind is not None:
        return chosen.data_kind
    kinds = {objective.data_kind for objective in OBJECTIVES if objective.fits(model_kind, head_kind)}
    return None if len(kinds) != 1 or kinds == {"text"} else kinds.pop()


def make_dataset(s: Spec, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0) -> Dataset:
    """Return the dataset of a corpus for a model: sequences of `seq_len` ids, or items of at most that length.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/hamlet.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{folder}/hamlet.txt", tok, f"{folder}/corpus")
    >>> for name in ("tiny-decoder", "tiny-encoder"):
    ...     print(type(make_dataset(gh.preset(name), corpus, batch_size=1, seq_len=8)).__name__)
    CausalLMDataset
    MaskedLMDataset
    """
    objective = find_objective(s, corpus)
    return objective.dataset_for(s, corpus, batch_size=batch_size, seq_len=seq_len, seed=seed)
