"""Samples: what a model writes while it learns, always after the same few prompts."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.data import CausalLMDataset, ChatDataset, Dataset, MaskedLMDataset, Seq2SeqDataset
from glasshouse.generation import generate
from glasshouse.layers.module_swap import clone_sharing_parameters
from glasshouse.models import Decoder, Model, Seq2Seq
from glasshouse.text import Tokenizer

BEGINNING, NEW = 12, 48  # tokens of running text that are given, and that are written
ANSWER = 96  # tokens of an answer at most
HIDDEN_IN = 64  # tokens of a text in which some are hidden
TEMPERATURE = 0.8  # of running text; the likeliest answer is what is learned


class Prompts(Protocol):
    """A few things to ask of a model."""

    def take(self, model: Model) -> list[JsonDict]:
        """Return what was asked and what the model says to it, as JSON has it; the model is left as it was."""
        ...


def make_prompts(held: Dataset, tok: Tokenizer, length: int, count: int) -> Prompts | None:
    """Return the first of what is held out as prompts; None where a model does not write, but chooses labels.

    Running text is begun and goes on, in rows of up to `length` tokens; sources and what users say are answered;
    what is hidden in a text is filled in.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/a.txt").write_text("to be or not to be, that is the question")
    >>> held = CausalLMDataset(gh.data.prepare(f"{place}/a.txt", tok, f"{place}/ids"), length=16)
    >>> prompts = make_prompts(held, tok, length=16, count=2)
    >>> [sample["prompt"] for sample in prompts.take(gh.build(gh.preset("tiny-decoder", vocab_size=263)))]
    ['to be or']
    """
    if count == 0:
        return None
    match held:
        case CausalLMDataset():
            return TextPrompts(held, tok, length, count)
        case Seq2SeqDataset() | ChatDataset():
            return SourcePrompts(held, tok, count)
        case MaskedLMDataset():
            return MaskedPrompts(held, tok, count)
    return None


class TextPrompts:
    """The beginnings of texts, which the model goes on with."""

    def __init__(self, held: CausalLMDataset, tok: Tokenizer, length: int, count: int) -> None:
        self.tok, self.end = tok, held.end
        begin = [held.end] if held.start in (None, held.end) else []  # other texts bring their start along
        texts = [held.corpus.item(number)[0].tolist() for number in range(min(count, len(held.corpus)))]
        beginnings = [text[: min(BEGINNING, length // 2, len(text) // 2)] for text in texts]
        self.prompts = [begin + one for one in beginnings if one]

    def take(self, model: Model) -> list[JsonDict]:
        """Return the beginnings, and how each goes on."""
        written = _write(model, self.tok, self.prompts, NEW, TEMPERATURE, {self.end})
        return [
            {"prompt": self.tok.decode(prompt, skip_special_tokens=True), "text": text}
            for prompt, text in zip(self.prompts, written, strict=True)
        ]


class SourcePrompts:
    """Sources, or what is said first in conversations, with the answers that are wanted."""

    def __init__(self, held: Seq2SeqDataset | ChatDataset, tok: Tokenizer, count: int) -> None:
        self.tok = tok
        self.asked: list[tuple[list[int], list[int]]] = []
        for item in held.item_indices[:count].tolist():
            first, second = (part.tolist() for part in held.corpus.item(item))
            if isinstance(held, Seq2SeqDataset):
                self.asked.append((held.source(first), second))
            elif len(second) > 1 and second[0]:  # so many ids are context, and so many the answer to it
                self.asked.append((first[: second[0]], first[second[0] : second[0] + second[1]]))
        self.roles = isinstance(held, ChatDataset)  # are said by special tokens
        self.ends = {wanted[-1] for _, wanted in self.asked if wanted} & tok.special_ids | {held.end}
        # An answer twice as long as the longest is wrong, however it goes on.
        self.most = min(ANSWER, 2 * max((len(wanted) for _, wanted in self.asked), default=0) + 1)

    def take(self, model: Model) -> list[JsonDict]:
        """Return the questions, what the model answers, and what is wanted."""
        written = _write(model, self.tok, [read for read, _ in self.asked], self.most, 0.0, self.ends)
        return [
            {
                "prompt": self.tok.decode(read, skip_special_tokens=not self.roles),
                "text": text,
                "reference": self.tok.decode(wanted, skip_special_tokens=True),
            }
            for (read, wanted), text in zip(self.asked, written, strict=True)
        ]


class MaskedPrompts:
    """Texts in which some tokens are hidden."""

    def __init__(self, held: MaskedLMDataset, tok: Tokenizer, count: int) -> None:
        self.tok = tok
        batch = held.batch(range(min(count, len(held))))
        self.texts, self.hidden = batch.targets[:, :HIDDEN_IN], batch.loss_mask[:, :HIDDEN_IN]
        self.documents = None if batch.documents is None else batch.documents[:, :HIDDEN_IN]
        self.shown = self.texts.masked_fill(self.hidden, held.mask)

    @torch.no_grad()
    def take(self, model: Model) -> list[JsonDict]:
        """Return the texts with what is hidden shown as the mask, as the model fills it in, and as it was."""
        device = model.token_embedding.table.weight.device
        documents = None if self.documents is None else self.documents.to(device)
        said = clone_sharing_parameters(model).eval()(self.shown.to(device), documents=documents).argmax(-1).cpu()
        filled = self.texts.where(~self.hidden, said)
        rows = zip(self.shown, filled, self.texts, strict=True)
        return [dict(zip(("prompt", "text", "reference"), map(self._spell, row), strict=True)) for row in rows]

    def _spell(self, ids: Tensor) -> str:
        return self.tok.decode(number for number in ids.tolist() if number in self.tok.ids)


def _write(
    model: Model, tok: Tokenizer, prompts: list[list[int]], most: int, temperature: float, ends: set[int]
) -> list[str]:
    """Return what the model writes after each prompt, drawn from a seed of its own."""
    found = generate(
        cast("Decoder | Seq2Seq", model),
        tok,
        prompts,
        most,
        temperature,
        stop_token_ids=tuple(sorted(ends)),
        max_len=model.spec.max_len,  # no longer than it is trained for
        weights="own",
        record="*embed[width=0]",  # to be recorded, passes are run one by one: so few do not pay for a graph on a GPU
    )
    return [one.text for one in found]
