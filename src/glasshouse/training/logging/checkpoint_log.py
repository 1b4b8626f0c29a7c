"""What is logged at each checkpoint: probes and samples, always on the same few validation texts and prompts.

Probes are metrics of activations and attention; samples are generated text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.data import (
    Batch,
    CausalLMDataset,
    ChatDataset,
    Dataset,
    MaskedLMDataset,
    PreferenceBatch,
    PreferenceDataset,
    Seq2SeqDataset,
)
from glasshouse.errors import InputError
from glasshouse.generation import generate
from glasshouse.inspection.geometry import residual_norms
from glasshouse.inspection.head_scoring import head_scores, repeated_tokens
from glasshouse.inspection.inputs.stack_input import make_stack_input
from glasshouse.inspection.logit_lens import lens
from glasshouse.layers.module_swap import clone_sharing_parameters
from glasshouse.models import Decoder, Model, Seq2Seq
from glasshouse.models.heads import LMHead
from glasshouse.objectives.loss.cross_entropy import autocast
from glasshouse.text import Tokenizer
from glasshouse.training.checkpoint.folder import PROBES, SAMPLES
from glasshouse.training.logging.journal import Journal
from glasshouse.training.run import PROBE_NAMES

ROWS, LONGEST = 4, 126  # texts, and tokens of each: short enough that a GPU compiles no kernel for them
DIGITS = 6
PROMPT_TOKENS, NEW_TOKENS = 12, 48  # for running text
MAX_ANSWER_TOKENS = 96
MASKED_TOKENS = 64  # length of a text with masked tokens
TEMPERATURE = 0.8  # for running text; answers are decoded greedily


class CheckpointLog:
    """Writes probes.jsonl and samples.jsonl at each checkpoint.

    An error is logged once per reason, and training continues. Both use the trained weights, even if their EMA is
    validated and saved: they show how training proceeds.
    """

    def __init__(
        self,
        folder: Path,
        probes: Probes,
        prompts: Prompts | None,
        log: Callable[[str], None],
        *,
        writes: bool = True,
    ) -> None:
        self._functions: dict[str, Callable[[Model], JsonDict]] = {"probes": probes.take} if probes.names else {}
        if prompts is not None:
            self._functions["samples"] = lambda model: {"samples": prompts.take(model)}
        self._log, self._logged = log, set[str]()
        files = {"probes": PROBES, "samples": SAMPLES}
        self._journals = {name: Journal(folder / file, writes=writes) for name, file in files.items()}

    def write(self, step: int, model: Model) -> None:
        """Write the probes and samples of a model after a step."""
        for name, function in self._functions.items():
            try:
                found = function(model)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if reason not in self._logged:
                    self._log(f"no {name} at step {step} ({reason}); training continues")
                self._logged.add(reason)
            else:
                self._journals[name].write(step, **found)

    def truncate(self, step: int) -> None:
        """Drop the lines from a step on."""
        for journal in self._journals.values():
            journal.truncate(step)


# Probes -----------------------------------------------------------------------------------------------------


class Probes:
    """Metrics of a model on some validation texts, and on repeated random tokens.

    "entropy" is the attention entropy of each head in nats, "induction" and "previous_token" its attention to the
    token after an earlier copy of the current one and to the previous token, [layer][head]. "resid_norms" is the mean
    norm of the residual stream and "logit_lens" the loss of the logit lens, after the embedding and each layer,
    [layer + 1].

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> metrics = Probes(model, Batch(ids, targets=ids + 1, loss_mask=ids > 0)).take(model)
    >>> {name: len(values) for name, values in metrics.items()}
    {'entropy': 2, 'induction': 2, 'previous_token': 2, 'resid_norms': 3, 'logit_lens': 3}
    """

    def __init__(
        self,
        model: Model,
        texts: Batch,
        *,
        names: Sequence[str] | None = None,  # None: all that apply to the model
        length: int = LONGEST,  # sequence length, at most
        autocast_dtype: torch.dtype = torch.float32,
    ) -> None:
        unsupported = _unsupported(model)
        for name in names or ():
            if name in unsupported:
                raise InputError(f"train.probes has {name!r}, but {unsupported[name]}; leave it out.")
        self.names = tuple(name for name in PROBE_NAMES if name not in unsupported) if names is None else tuple(names)
        self.autocast_dtype = autocast_dtype
        self.device = model.token_embedding.table.weight.device
        self.texts = texts.to(self.device)
        length = min(length, LONGEST)
        # An odd length ends one token early.
        self.repeated = repeated_tokens(model.spec.vocab_size, -(-length // 2), ROWS)[:, :length].to(self.device)

    def take(self, model: Model) -> JsonDict:
        """Return the metrics by name, as JSON values: six digits, and None where not finite."""
        batch, found = self.texts, {}
        if batch.source is None:
            inputs: tuple[Tensor, ...] = (batch.ids,)
            call: JsonDict = {"documents": batch.documents, "lengths": batch.lengths}
        else:
            inputs = (batch.source, batch.ids)
            call = {"lengths": batch.source_lengths, "target_lengths": batch.lengths}
        with autocast(self.device, self.autocast_dtype):
            if "entropy" in self.names:
                found["entropy"] = head_scores(model, *inputs, **call).entropy
            if {"induction", "previous_token"} & set(self.names):
                scores = head_scores(model, self.repeated)
                found |= {"induction": scores.induction, "previous_token": scores.previous}
            if "resid_norms" in self.names:
                real = make_stack_input(model, inputs, call).real
                found["resid_norms"] = residual_norms(model, *inputs, **call)[:, real].mean(1)
            if "logit_lens" in self.names:
                output = lens(model, *inputs, targets=batch.targets, top_k=1, **call)
                found["logit_lens"] = output.loss[:, batch.loss_mask].mean(1)
        return {name: _rounded(found[name].tolist()) for name in self.names}


def first_texts(val_samples: Dataset) -> Batch:
    """Return the first validation samples, truncated to `LONGEST` tokens."""
    batch = val_samples.batch(range(min(ROWS, len(val_samples))))
    if isinstance(batch, PreferenceBatch):
        batch = batch.sequences()
    present = {name: tensor for name, tensor in vars(batch).items() if tensor is not None}
    rows = {name: tensor[:, :LONGEST] for name, tensor in present.items() if tensor.dim() == 2}
    lengths = {name: tensor.clamp(max=LONGEST) for name, tensor in present.items() if name.endswith("lengths")}
    return replace(batch, **rows, **lengths)


def _unsupported(model: Model) -> dict[str, str]:
    """Return the probes that do not apply to a model, and why."""
    unsupported: dict[str, str] = {}
    if not isinstance(model, Decoder):
        why = f"it needs a decoder, and the model is of kind {model.spec.kind}"
        unsupported |= {"induction": why, "previous_token": why}
    if not isinstance(model.head, LMHead):
        unsupported["logit_lens"] = f"it needs a language-model head, and the model's is {model.spec.head.kind}"
    return unsupported


def _rounded(value: Any) -> Any:  # noqa: ANN401 - numbers in lists, in lists
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


# Samples ----------------------------------------------------------------------------------------------------


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
        case Seq2SeqDataset() | ChatDataset() | PreferenceDataset():
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
    """Sources, the first messages of conversations, or prompts of preferences, with reference answers."""

    def __init__(self, samples: Seq2SeqDataset | ChatDataset | PreferenceDataset, tok: Tokenizer, count: int) -> None:
        self.tok = tok
        self.pairs: list[tuple[list[int], list[int]]] = []
        for item in samples.item_indices[:count].tolist():
            first, second = (part.tolist() for part in samples.corpus.item(item)[:2])
            if isinstance(samples, Seq2SeqDataset):
                self.pairs.append((samples.source(first), second))
            elif isinstance(samples, PreferenceDataset):
                self.pairs.append((first, second))
            elif len(second) > 1 and second[0]:  # lengths of the context and of the answer to it
                self.pairs.append((first[: second[0]], first[second[0] : second[0] + second[1]]))
        self.show_special = not isinstance(samples, Seq2SeqDataset)  # they mark the roles
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
