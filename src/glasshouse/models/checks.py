"""Checks of a model: its length, its tokenizer, and that its modules match its spec."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError, check_count, distinct
from glasshouse.layers.attend.kernel import Attend
from glasshouse.models.builder import instantiate
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.models.weights import first_names
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer


def check_length(s: Spec, length: int | None, name: str = "max_len", owner: str = "the model") -> int:
    """Return the maximum sequence length, which only a table of learned positions limits; by default max_len.

    >>> from glasshouse.spec import preset
    >>> check_length(preset("tiny-decoder", max_len=64, position="rotary"), 100)
    100
    >>> check_length(preset("tiny-decoder", max_len=64, position="learned"), 100)
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: max_len is 100, but the model has positions for 64; reduce it.
    """
    if length is None:
        return s.max_len
    if s.position_limit is not None and check_count(name, length) > s.position_limit:
        raise InputError(f"{name} is {length}, but {owner} has positions for {s.position_limit}; reduce it.")
    return check_count(name, length)


def check_tokenizer(model: Decoder | Encoder | Seq2Seq, tok: Tokenizer, name: str = "the tokenizer") -> None:
    """Raise InputError for the tokenizer of another model, by its fingerprint or its size.

    A newly built model has no fingerprint and accepts any tokenizer that fits its vocab_size.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    >>> check_tokenizer(model, gh.Tokenizer.train(texts=["to be"], vocab_size=263))
    >>> check_tokenizer(model, gh.Tokenizer.train(texts=["to be"], vocab_size=264))
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: the tokenizer has 264 tokens, but vocab_size is 263, so it is another model's.
    """
    if not isinstance(tok, Tokenizer):
        raise InputError(f"{name} is a {type(tok).__name__}, but it must be a gh.Tokenizer, as gh.load returns it.")
    if len(tok) > model.spec.vocab_size:
        raise InputError(
            f"{name} has {len(tok)} tokens, but vocab_size is {model.spec.vocab_size}, so it is another model's."
        )
    if model.tokenizer_fingerprint not in (None, tok.fingerprint):
        given, known = distinct(tok.fingerprint, str(model.tokenizer_fingerprint))
        raise InputError(
            f"{name} ({given}) is not the one that the model was trained with ({known}); use the one saved with the "
            "model."
        )


REMEDY = "restore the modules of the spec (LoRA: by lora.merge)."


def checked_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, each once, after checking a model's modules against its spec.

    A saved model is loaded into modules built from its spec, so a model whose modules were replaced, added or removed
    could not be restored: the error names the first difference. Wrappers of torch.compile are ignored.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> len(checked_weights(model)) == len(list(model.parameters()))
    True
    >>> model.stack.norm = nn.Identity()
    >>> checked_weights(model)
    Traceback (most recent call last):
    glasshouse.errors.InputError: stack.norm is Identity(), but the spec has RMSNorm...
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, Decoder | Encoder | Seq2Seq):
        raise InputError(
            f"the model is a {type(model).__name__}, but it must be one that gh.build or gh.load returned."
        )
    with torch.device("meta"):
        built = instantiate(model.spec)
    _check_modules(_modules(model), _modules(built))
    weights = {_plain(name): weight for name, weight in model.state_dict(keep_vars=True).items()}
    expected, shared = built.state_dict(keep_vars=True), first_names(built)
    if extra := sorted(weights.keys() - expected.keys()):
        raise InputError(f"the model has {extra[0]}, which its spec does not have; {REMEDY}")
    first: dict[Tensor, str] = {}
    for name, reference in expected.items():
        if name not in weights:
            raise InputError(f"the model lacks {name}, which its spec has; {REMEDY}")
        weight = weights[name]
        if weight.shape != reference.shape:
            raise InputError(
                f"{name} has shape {list(weight.shape)}, but the spec needs {list(reference.shape)}; {REMEDY}"
            )
        if (other := first.setdefault(weight, name)) == shared[name]:
            continue
        if other != name:
            raise InputError(f"{name} and {other} share one parameter, but the spec has two; give each its own.")
        raise InputError(f"{name} and {shared[name]} are two parameters, but in the spec they are one; share it.")
    return {name: weights[name] for name, other in shared.items() if name == other}


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    every = model.named_modules(remove_duplicate=False)
    return {_plain(name): module for name, module in every if not hasattr(module, "_orig_mod")}


def _plain(name: str) -> str:
    """Return a name without the prefixes of torch.compile."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _check_modules(present: dict[str, nn.Module], expected: dict[str, nn.Module]) -> None:
    """Raise InputError for modules that compute something other than the spec's."""
    for name, reference in expected.items():
        if name not in present:
            raise InputError(f"the model has no module {name}, which its spec has; {REMEDY}")
        module = present[name]
        if isinstance(reference, nn.Dropout) or (isinstance(reference, Attend) and isinstance(module, Attend)):
            continue  # dropout matters in training only, and an edit replaces the attention
        if _describe(module) != _describe(reference):
            raise InputError(
                f"{name} is {_describe(module)}, but the spec has {_describe(reference)} there; {REMEDY}"
            )


def _describe(module: nn.Module) -> str:
    """Return the type of a module, with its settings if it has no children."""
    return type(module).__name__ if next(module.children(), None) is not None else repr(module)
