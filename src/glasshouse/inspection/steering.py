"""Steering vectors: directions of the residual stream, from contrasting texts, that change what a model generates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glasshouse import store
from glasshouse.errors import InputError, StoreError
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import sites, unwrap_model
from glasshouse.models import Decoder, Model
from glasshouse.models.prompt import Prompt, encode_prompt
from glasshouse.text import Tokenizer

SAMPLE = 64  # numbers of each parameter that tell one model from another
KIND = "steering vector"


@dataclass(frozen=True, eq=False, repr=False)
class SteeringVector:
    """A vector to add to the residual stream of one model, at one site and every position."""

    vector: Tensor  # [D], float32
    site: str  # such as resid_post.3
    fingerprint: str  # of the model that it was made for

    def __repr__(self) -> str:
        norm = float(self.vector.norm())
        return f"SteeringVector({self.site!r}, {len(self.vector)} dimensions, norm {norm:.4g})"

    @property
    def layer(self) -> int:
        """The layer after which it is added."""
        return int(self.site.rpartition(".")[2])

    def check(self, model: Model, name: str = "the steering vector") -> None:
        """Raise InputError for another model than the one that it was made for."""
        if self.fingerprint != model_fingerprint(model):
            raise InputError(f"{name} was made for another model, whose weights differ; make one for this model.")

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file."""
        metadata = {"kind": KIND, "site": self.site, "fingerprint": self.fingerprint}
        store.write_tensors(Path(path), {"vector": self.vector}, metadata)

    @classmethod
    def load(cls, path: str | Path) -> SteeringVector:
        """Read a file of `save`."""
        if not Path(path).is_file():
            raise StoreError(f"there is no {str(path)!r}; make it with glasshouse steer make.")
        metadata, tensors = store.read_metadata(Path(path)), store.read_tensors(Path(path))
        vector, site = tensors.get("vector"), metadata.get("site", "")
        if (
            metadata.get("kind") != KIND
            or vector is None
            or vector.dim() != 1
            or not vector.is_floating_point()
            or not re.fullmatch(r"resid_post\.\d{1,6}", site, re.ASCII)
        ):
            raise StoreError(f"{str(path)!r} is no steering vector; make one with glasshouse steer make.")
        if not bool(vector.isfinite().all()):
            raise StoreError(f"{str(path)!r} has numbers that are not finite; make it again.")
        return cls(vector.float().clone(), site, metadata.get("fingerprint", ""))


def steering_vector(
    model: Model,
    tok: Tokenizer | None,
    positive: Sequence[Prompt],
    negative: Sequence[Prompt],
    *,
    site: str | None = None,
) -> SteeringVector:
    """Return the difference in means of the residual stream: over positive texts, minus that over negative ones.

    Each text counts once: its mean is over its tokens, without the first. `site` is resid_post of a layer, by default
    of the middle one. At a scale of 1 the vector moves a negative text to where the positive ones are on average;
    useful scales are of that order.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> made = gh.steering_vector(model, None, [[1, 2], [1, 3]], [[4, 5]], site="resid_post.0")
    >>> made.vector.shape, made.site
    (torch.Size([64]), 'resid_post.0')
    >>> with gh.edit(model, {made.site: gh.inspection.add(4.0 * made.vector)}):
    ...     completions = gh.generate(model, None, [[1, 2]])
    """
    whole = unwrap_model(model)
    if not isinstance(whole, Decoder):
        raise InputError(f"the model is a {type(whole).__name__}, but steering is for decoders; give one.")
    n_layers = whole.spec.n_layers
    site = f"resid_post.{n_layers // 2}" if site is None else site
    if not site.startswith("resid_post.") or site not in sites(whole):
        raise InputError(f"site is {site!r}, but it must be one of resid_post.0 to resid_post.{n_layers - 1}.")
    means = [_mean_activation(whole, tok, texts, site, name) for texts, name in _named(positive, negative)]
    return SteeringVector(means[0] - means[1], site, model_fingerprint(whole))


def _named(positive: Sequence[Prompt], negative: Sequence[Prompt]) -> list[tuple[Sequence[Prompt], str]]:
    return [(positive, "positive"), (negative, "negative")]


def _mean_activation(model: Decoder, tok: Tokenizer | None, texts: Sequence[Prompt], site: str, name: str) -> Tensor:
    """Return the mean over texts of the mean over their tokens, [D], in float32.

    The first token is left out of longer texts: it is an attention sink, whose norm would make lengths count.
    """
    if isinstance(texts, str | bytes) or not len(texts):
        raise InputError(f"{name} has no texts; give a list of them.")
    total = torch.zeros(model.spec.d_model, dtype=torch.float64)
    device = model.token_embedding.table.weight.device
    with eval_mode(model):
        for text in texts:
            ids = encode_prompt(text, tok, model.spec)
            with record(model, site, stop=True) as seen:
                model(torch.tensor([ids], device=device))
            values = seen[site][0].double()
            total += values[min(1, len(ids) - 1) :].mean(0).cpu()
    return (total / len(texts)).float()


def model_fingerprint(model: Model) -> str:
    """Return a hash of some numbers of each parameter, the same in every dtype and file format.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> model_fingerprint(model) == model_fingerprint(gh.build(gh.preset("tiny-decoder")))
    False
    """
    whole = unwrap_model(model)
    digest = hashlib.sha256()
    for name, parameter in sorted(whole.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].to(torch.bfloat16).float().cpu()
        digest.update(f"{name} {list(parameter.shape)} {some.tolist()}".encode())
    return digest.hexdigest()
