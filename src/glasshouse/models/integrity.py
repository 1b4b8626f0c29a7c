"""Whether a model still is what its spec says: what a saved folder, which is built anew from the spec, relies on."""

from __future__ import annotations

import torch
from torch import nn

from glasshouse.errors import InputError
from glasshouse.layers.attend import Explicit, Fused
from glasshouse.models.builder import instantiate
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq

REMEDY = "put back what the spec builds (LoRA: by lora.merge)."
KERNELS = Fused | Explicit  # which agree with each other


def checked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name, if its modules are those that its spec builds.

    A saved model is loaded into modules built from its spec, so a model whose modules were replaced, added or removed
    by hand would not come back: the first difference is named. Wrappers of torch.compile are looked through.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> len(checked_parameters(model)) == len(list(model.parameters()))
    True
    >>> model.stack.norm = nn.Identity()
    >>> checked_parameters(model)
    Traceback (most recent call last):
    glasshouse.errors.InputError: stack.norm is Identity(), but the spec builds RMSNorm...
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, Decoder | Encoder | Seq2Seq):
        raise InputError(f"the model is a {type(model).__name__}, but it must be one that glasshouse built.")
    with torch.device("meta"):
        built = instantiate(model.spec)
    _check_modules(_modules(model), _modules(built))
    weights = {_plain(name): weight for name, weight in model.named_parameters(remove_duplicate=False)}
    expected = dict(built.named_parameters())
    stored = {_plain(name) for name in model.state_dict()}
    if extra := sorted((weights.keys() | stored) - expected.keys()):
        raise InputError(f"the model holds {extra[0]}, which its spec does not have; {REMEDY}")
    first: dict[nn.Parameter, str] = {}
    for name, wanted in expected.items():
        if name not in weights:
            raise InputError(f"the model lacks {name}, which its spec has; {REMEDY}")
        weight = weights[name]
        if weight.shape != wanted.shape:
            raise InputError(
                f"{name} has shape {list(weight.shape)}, but the spec asks for {list(wanted.shape)}; {REMEDY}"
            )
        if (other := first.setdefault(weight, name)) != name:
            raise InputError(f"{name} and {other} are one parameter, but the spec has two; give each its own.")
    return weights


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    every = model.named_modules(remove_duplicate=False)
    return {_plain(name): module for name, module in every if not hasattr(module, "_orig_mod")}


def _plain(name: str) -> str:
    """Return a name without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _check_modules(present: dict[str, nn.Module], expected: dict[str, nn.Module]) -> None:
    """Refuse modules that compute something other than those that the spec builds."""
    for name, wanted in expected.items():
        if name not in present:
            raise InputError(f"the model has no module {name}, which its spec has; {REMEDY}")
        here = present[name]
        if isinstance(wanted, nn.Dropout) or (isinstance(wanted, KERNELS) and isinstance(here, KERNELS)):
            continue  # dropout acts in training alone
        if _describe(here) != _describe(wanted):
            raise InputError(f"{name} is {_describe(here)}, but the spec builds {_describe(wanted)} there; {REMEDY}")


def _describe(module: nn.Module) -> str:
    """Return the type of a module, and of one without children its settings as well."""
    return type(module).__name__ if next(module.children(), None) is not None else repr(module)
