"""Samples: text generated during training, always from the same few prompts."""

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

PROMPT_TOKENS, NEW_TOKENS = 12, 48  # for running text
MAX_ANSWER_TOKENS = 96
MASKED_TOKENS = 64  # length of a text with masked tokens
TEMPERATURE = 0.8  # for running text; answers are decoded greedily


class Prompts(Protocol):
    """A few prompts for a model."""

    def take(self, model: Model) -> list[JsonDict]:
        """Return prompts and generated texts, as JSON values; the model is unchanged."""
        ...


def make_prompts(val_samples: Dataset, tok: Tokenizer, length: int, count: int) -> Prompts | None:
    """Return prompts from the start of the validation set; None for classification.

    The start of a running text is continued, in sequences of up to `length` tokens; sources and chat messages are
    answered; masked tokens are predicted.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/a.txt").write_text("to be or not to be, that is the question")
    >>> val_samples = CausalLMDataset(gh.data.prepare(f"{folder}/a.txt", tok, f"{folder}/ids"), seq_len=16)
    >>> prompts = make_prompts(val_samples, tok, length=16, count=2)
    >>> [sample["prompt"] for sample in prompts.take(gh.build(gh.preset("tiny-decoder", vocab_size=263)))]
    ['to be or']
    """
    if count == 0:
        return None
    match val_samples:
        case CausalLMDataset():
            return TextPrompts(val_samples, tok, length, count)
        case Seq2SeqDataset() | ChatDataset():
            return SourcePrompts(val_samples, tok, count)
        case MaskedLMDataset():
            return MaskedPrompts(val_samples, tok, count)
    return None


class TextPrompts:
    """The first tokens of texts, which the model continues."""

    def __init__(self, samples: CausalLMDataset, tok: Tokenizer, length: int, count: int) -> None:
        self.tok, self.end = tok, samples.end
        begin = [samples.end] if samples.start in (None, samples.end) else []  # else texts include their start token
        texts = [samples.corpus.item(number)[0].tolist() for number in range(min(count, len(samples.corpus)))]
        beginnings = [text[: min(PROMPT_TOKENS, length // 2, len(text) // 2)] for text in texts]
        self.prompts = [begin + one for one in beginnings if one]

    def take(self, model: Model) -> list[JsonDict]:
        """Return the prompts and their continuations."""
        generated = _generate(model, self.tok, self.prompts, NEW_TOKENS, TEMPERATURE, {self.end})
        return [
            {"prompt": self.tok.decode(prompt, skip_special_tokens=True), "text": text}
            for prompt, text in zip(self.prompts, generated, strict=True)
        ]


class SourcePrompts:
    """Sources, or the first messages of conversations, with reference answers."""

    def __init__(self, samples: Seq2SeqDataset | ChatDataset, tok: Tokenizer, count: int) -> None:
        self.tok = tok
        self.pairs: list[tuple[list[int], list[int]]] = []
        for item in samples.item_indices[:count].tolist():
            first, second = (part.tolist() for part in samples.corpus.item(item))
            if isinstance(samples, Seq2SeqDataset):
                self.pairs.append((samples.source(first), second))
            elif len(second) > 1 and second[0]:  # lengths of the context and of the answer to it
                self.pairs.append((first[: second[0]], first[second[0] : second[0] + second[1]]))
        self.show_special = isinstance(samples, ChatDataset)  # they mark the roles
        self.ends = {reference[-1] for _, reference in self.pairs if reference} & tok.special_ids | {samples.end}
        # An answer longer than twice the longest reference is wrong anyway.
        self.max_new_tokens = min(
            MAX_ANSWER_TOKENS, 2 * max((len(reference) for _, reference in self.pairs), default=0) + 1
        )

    def take(self, model: Model) -> list[JsonDict]:
        """Return the prompts, the generated answers and the references."""
        generated = _generate(
            model, self.tok, [prompt for prompt, _ in self.pairs], self.max_new_tokens, 0.0, self.ends
        )
        return [
            {
                "prompt": self.tok.decode(prompt, skip_special_tokens=not self.show_special),
                "text": text,
                "reference": self.tok.decode(reference, skip_special_tokens=True),
            }
            for (prompt, reference), text in zip(self.pairs, generated, strict=True)
        ]


class MaskedPrompts:
    """Texts with some tokens masked."""

    def __init__(self, samples: MaskedLMDataset, tok: Tokenizer, count: int) -> None:
        self.tok = tok
        batch = samples.batch(range(min(count, len(samples))))
        self.texts, self.masked = batch.targets[:, :MASKED_TOKENS], batch.loss_mask[:, :MASKED_TOKENS]
        self.documents = None if batch.documents is None else batch.documents[:, :MASKED_TOKENS]
        self.inputs = self.texts.masked_fill(self.masked, samples.mask)

    @torch.no_grad()
    def take(self, model: Model) -> list[JsonDict]:
        """Return the texts with mask tokens, with the predicted tokens, and the originals."""
        device = model.token_embedding.table.weight.device
        documents = None if self.documents is None else self.documents.to(device)
        predicted = (
            clone_sharing_parameters(model).eval()(self.inputs.to(device), documents=documents).argmax(-1).cpu()
        )
        filled = self.texts.where(~self.masked, predicted)
        rows = zip(self.inputs, filled, self.texts, strict=True)
        return [dict(zip(("prompt", "text", "reference"), map(self._decode, row), strict=True)) for row in rows]

    def _decode(self, ids: Tensor) -> str:
        return self.tok.decode(number for number in ids.tolist() if number in self.tok.ids)


def _generate(
    model: Model, tok: Tokenizer, prompts: list[list[int]], max_new_tokens: int, temperature: float, ends: set[int]
) -> list[str]:
    """Generate after each prompt, with a fixed seed."""
    found = generate(
        cast("Decoder | Seq2Seq", model),
        tok,
        prompts,
        max_new_tokens,
        temperature,
        stop_token_ids=tuple(sorted(ends)),
        max_len=model.spec.max_len,  # no longer than in training
        weights="own",
        record="*embed[width=0]",  # recording disables CUDA graphs, which do not pay off for so few tokens
    )
    return [one.text for one in found]
