"""Knowledge distillation: a student learns a teacher's distribution over tokens or labels, beside the targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import hub
from glasshouse.config import Settings, require, require_positive
from glasshouse.data import Batch, Corpus, Dataset
from glasshouse.errors import InputError, distinct
from glasshouse.models import Model
from glasshouse.models.checks import check_length
from glasshouse.objectives.loss.cross_entropy import cross_entropy, reference_precision
from glasshouse.objectives.metrics import MetricSums, Report
from glasshouse.objectives.objective import Evaluation, Objective
from glasshouse.objectives.registry import find_objective
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer

UNPREPARED = "distillation has no teacher and no samples yet; call prepare with the student first."


@dataclass(frozen=True)
class Distillation(Settings, Objective[Dataset]):
    """Cross-entropy mixed with the KL divergence from a teacher's softened distribution (Hinton et al., 2015).

    It adds to the objective that model and data decide: next tokens, masked tokens, answers, targets or labels. The
    teacher is a model of the same kind with the same tokenizer, which a new student gets; it runs in eval mode.
    """

    kind: ClassVar[str] = "distillation"
    models = "models of every kind"
    model_kinds = ("decoder", "encoder", "seq2seq")
    data_kind = None
    parallel = False

    teacher: str  # model or run folder of the teacher, or its hub id
    temperature: float = 2.0  # both distributions are softened by; the divergence is multiplied by its square
    mixing: float = 0.5  # weight of the divergence; the rest is that of the cross-entropy

    def check(self) -> None:
        require_positive(self, "temperature")
        require(0 <= self.mixing <= 1, "distillation.mixing", self.mixing, "from 0 to 1")

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the teacher."""
        return hub.load(self.teacher, device="meta")[1]

    def extra_parameters(self, model: Model) -> int:
        """Return the size of the teacher."""
        teacher, _ = hub.load(self.teacher, device="meta")
        return sum(weight.numel() for weight in teacher.parameters())

    def prepare(self, model: Model, corpus: Corpus, seq_len: int) -> Objective[Any]:
        """Load the teacher to the device of the model, and check that it speaks of the same tokens."""
        if corpus.kind == "preferences":
            raise InputError("the objective is distillation, but the data are preferences; use dpo, or other data.")
        device = next(model.parameters()).device
        teacher, tok = hub.load(self.teacher, device=device, dtype=torch.float32)
        self._check_teacher(teacher, tok, model, corpus)
        check_length(teacher.spec, seq_len, "data.seq_len", "the teacher")
        return _Distilling(self, find_objective(model.spec, corpus), teacher.requires_grad_(False).eval())

    def _check_teacher(self, teacher: Model, tok: Tokenizer | None, model: Model, corpus: Corpus) -> None:
        known = teacher.tokenizer_fingerprint or (tok and tok.fingerprint)
        if known != corpus.tokenizer.fingerprint:
            given, wanted = distinct(str(known), corpus.tokenizer.fingerprint)
            raise InputError(
                f"the teacher {self.teacher!r} has another tokenizer than the student ({given}, not {wanted}); "
                "choose another teacher, or leave data.tokenizer out."
            )
        for name in ("kind", "head.kind", "head.labels", "vocab_size"):
            own, other = (_field(one, name) for one in (model, teacher))
            if own != other:
                raise InputError(
                    f"the {name} of the teacher {self.teacher!r} is {other!r} and that of the student {own!r}; "
                    "choose two models that predict the same."
                )

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> Dataset:
        """Raise: only with a model, the objective that it adds to is known."""
        raise InputError(UNPREPARED)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Raise likewise."""
        raise InputError(UNPREPARED)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Raise likewise, without a teacher."""
        raise InputError(UNPREPARED)


class _Distilling(Objective[Dataset]):
    """The objective of a student, with its teacher."""

    models, model_kinds, data_kind, parallel = Distillation.models, Distillation.model_kinds, None, False

    def __init__(self, choice: Distillation, own: Objective[Any], teacher: Model) -> None:
        self.choice, self.own, self.teacher = choice, own, teacher
        self.compares_answers = own.compares_answers  # type: ignore[misc] # of the class elsewhere

    def frozen_models(self) -> dict[str, Model]:
        return {"teacher": self.teacher}

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> Dataset:
        return self.own.make_dataset(corpus, batch_size=batch_size, seq_len=seq_len, seed=seed, start_id=start_id)

    def dataset_for(self, s: Spec, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0) -> Dataset:
        return self.own.dataset_for(s, corpus, batch_size=batch_size, seq_len=seq_len, seed=seed)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        return self.own.samples_for_tokens(corpus, tokens, seq_len)

    def token_bytes(self, tok: Tokenizer) -> Tensor | None:
        return self.own.token_bytes(tok)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy and the divergence from the teacher, mixed, and summed over targets."""
        logits = batch.forward(model)
        with torch.no_grad(), reference_precision(logits):
            taught = batch.forward(self.teacher)
        divergence = distillation_loss(logits, taught, batch.loss_mask, self.choice.temperature)
        hard = cross_entropy(logits, batch, smoothing)
        return (1 - self.choice.mixing) * hard + self.choice.mixing * divergence

    @torch.no_grad()
    def evaluate_batch(self, model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
        """Evaluate the student as without a teacher, and the teacher's cross-entropy."""
        sums = self.own.evaluate_batch(model, batch, token_bytes)
        taught = float(cross_entropy(batch.forward(self.teacher), batch))
        return replace(sums, others={**sums.others, "teacher_loss": (taught, sums.n_targets)})

    def evaluate(self, evaluation: Evaluation, samples: Dataset) -> Report:
        return self.own.evaluate(evaluation, samples)


def distillation_loss(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return T**2 * KL(teacher || student) of logits softened by T, summed over the positions of the mask.

    The square keeps the gradient of about the same size at every temperature.

    >>> logits = torch.tensor([[[2.0, 0.0], [1.0, 1.0]]])
    >>> mask = torch.tensor([[True, False]])
    >>> distillation_loss(logits, logits, mask, temperature=2.0).item()
    0.0
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    ours, theirs = (F.log_softmax(one.to(wide) / temperature, dim=-1) for one in (student, teacher))
    each = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    return temperature**2 * each.masked_fill(~mask, 0.0).sum()


def _field(model: Model, name: str) -> object:
    found: object = model.spec
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
