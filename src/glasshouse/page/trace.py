"""Activations of forward passes, in an LRU cache with a memory limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.inspection import AttentionMap, capture_attention, edit, mean_ablate, record, scale, sites
from glasshouse.inspection.editing import AblationEdit
from glasshouse.inspection.inputs.forward_pass import eval_mode, final_stack
from glasshouse.inspection.sites import select
from glasshouse.page.forward_pass import Edit, ForwardPass, Mean, PagePrompt, Patch, Scale
from glasshouse.page.model_loader import LoadedModel, ModelLoader

T = TypeVar("T")

MEMORY = 2 * 2**30  # bytes of the cache
TEXTS = 16  # prompts whose ids are cached
SHARE = 0.75  # maximum share for the default sites of one forward pass; beyond it, sites are recorded on request


class TraceCache:
    """LRU cache of the traces of one model."""

    def __init__(self, loader: ModelLoader, memory: int = MEMORY) -> None:
        self.loader, self.memory = loader, memory
        self.lock = threading.RLock()  # one forward pass at a time: two would compete for the same cores
        self._read: OrderedDict[tuple[PagePrompt, str], tuple[Tensor, ...]] = OrderedDict()
        self._versions: dict[str, tuple[LoadedModel, int]] = {}  # by checkpoint
        self._kept: OrderedDict[tuple[ForwardPass, str], Tensor | AttentionMap] = OrderedDict()

    def trace(self, forward_pass: ForwardPass) -> Trace:
        """Return the trace of a forward pass."""
        loaded = self.loader.get(forward_pass.checkpoint)
        with self.lock:
            self._forget(forward_pass.checkpoint, loaded)
            known = (forward_pass.prompt, forward_pass.checkpoint)
            if known not in self._read:  # a long text is tokenized once, not for each tile of a map
                self._read[known] = loaded.inputs(forward_pass.prompt)
            self._read.move_to_end(known)
            while len(self._read) > TEXTS:
                self._read.popitem(last=False)
            return Trace(self, loaded, forward_pass, self._read[known])

    def _forget(self, checkpoint: str, loaded: LoadedModel) -> None:
        """Evict entries of models that are unloaded, which maps would keep alive, or whose weights have changed."""
        version = (loaded, sum(weight._version for weight in loaded.model.parameters()))
        if self._versions.setdefault(checkpoint, version) != version:
            self._versions[checkpoint] = version
            for kept in [one for one in self._kept if one[0].checkpoint == checkpoint]:
                del self._kept[kept]
        for gone in [one for one in self._versions if not self.loader.is_loaded(one)]:
            del self._versions[gone]
        for kept in [one for one in self._kept if not self.loader.is_loaded(one[0].checkpoint)]:
            del self._kept[kept]

    @property
    def n_bytes(self) -> int:
        """Bytes in the cache."""
        return sum(size_of(one) for one in self._kept.values())

    def get(self, forward_pass: ForwardPass, name: str) -> Tensor | AttentionMap | None:
        """Return a cached value of a forward pass."""
        with self.lock:
            if (forward_pass, name) not in self._kept:
                return None
            self._kept.move_to_end((forward_pass, name))
            return self._kept[forward_pass, name]

    def put(self, forward_pass: ForwardPass, name: str, value: Tensor | AttentionMap) -> None:
        """Cache a value; the least recently used ones are evicted."""
        with self.lock:
            self._kept[forward_pass, name] = value
            self._kept.move_to_end((forward_pass, name))
            while self.n_bytes > self.memory and len(self._kept) > 1:
                self._kept.popitem(last=False)


class Trace:
    """One forward pass: sites are recorded on first use, most of them in one pass."""

    def __init__(
        self, traces: TraceCache, loaded: LoadedModel, forward_pass: ForwardPass, inputs: tuple[Tensor, ...]
    ) -> None:
        self.traces, self.loaded, self.forward_pass, self.inputs = traces, loaded, forward_pass, inputs
        self.model, self.tok = loaded.model, loaded.tok
        self.prefix, self.stack = final_stack(self.model)

    @property
    def ids(self) -> list[int]:
        """The input ids of the stack that the head is on: the text, or the target."""
        return self.inputs[-1][0].tolist()

    def activation(self, name: str) -> Tensor:
        """Return the activation at a site, without the batch axis."""
        return self.activations([name])[name]

    def activations(self, names: list[str]) -> dict[str, Tensor]:
        """Return the activations at several sites, without the batch axis, from one forward pass."""
        return {name: one[0] for name, one in self._see(names).items() if isinstance(one, Tensor)}

    def attention_map(self, name: str) -> AttentionMap:
        """Return the attention map of a site such as pattern.3."""
        value = self._see([name])[name]
        assert isinstance(value, AttentionMap)
        return value

    def residual_sites(self) -> list[str]:
        """Return the residual-stream sites of that stack: the embedding, and after each layer."""
        depth = len(self.stack.blocks)
        return [f"{self.prefix}embed", *(f"{self.prefix}resid_post.{layer}" for layer in range(depth))]

    def run(self, work: Callable[[], T]) -> T:
        """Run a function on the model with the edits applied."""
        with self.traces.lock, eval_mode(self.model), edit(self.model, self.edits()):
            return work()

    def edits(self) -> dict[str, list[Callable[[Tensor], Tensor] | AblationEdit]]:
        """Return the edits as `edit` takes them."""
        made: dict[str, list[Callable[[Tensor], Tensor] | AblationEdit]] = {}
        for one in self.forward_pass.edits:
            for place in select(self.model, one.site):
                if place.site.hook_point in ("scores", "pattern"):
                    raise InputError(f"{one.site} cannot be edited on the page; edit z instead.")
            made.setdefault(one.site, []).append(self._edit(one))
        return made

    def _edit(self, one: Edit) -> Callable[[Tensor], Tensor] | AblationEdit:
        match one:
            case Scale(factor=factor):
                return scale(factor)
            case Mean():
                return mean_ablate()
            case Patch(site=site):
                there = self._elsewhere(site)
                return lambda old: check_patch_shape(site, there, old)

    def _elsewhere(self, site: str) -> Tensor:
        """Return the activation at a site on the other prompt."""
        if self.forward_pass.patch_from is None:
            raise InputError(f"{site} is patched, but there is no second text; enter one.")
        other = self.traces.trace(self.forward_pass.patch_pass)
        with eval_mode(other.model), record(other.model, site, stop=True) as seen:
            other.model(*other.inputs)
        return seen[site]

    def _see(self, names: list[str]) -> dict[str, Tensor | AttentionMap]:
        with self.traces.lock:
            kept = {name: self.traces.get(self.forward_pass, name) for name in names}
            known = {name: one for name, one in kept.items() if one is not None}
            if missing := kept.keys() - known.keys():
                found = self._pass(self._usual() | missing)
                for name, value in found.items():
                    self.traces.put(self.forward_pass, name, value)
                known |= {name: found[name] for name in missing}
            return known

    def _usual(self) -> set[str]:
        """Return the sites that are always recorded if memory allows, as a second pass would cost more."""
        kinds = {"resid_post", "pattern", "cross_pattern"}
        usual = {name for name in sites(self.model) if name.rpartition(".")[0].rpartition(".")[2] in kinds}
        usual |= {f"{self.prefix}embed", f"{self.prefix}final"}
        return usual if sum(map(self._size, usual)) <= SHARE * self.traces.memory else set()

    def _size(self, name: str) -> int:
        """Estimate the bytes of a site; of a map, its queries, keys and values."""
        s = self.model.spec
        width = (s.n_heads + 2 * s.n_kv_heads) * s.d_head if "pattern" in name else s.d_model
        length = max(one.shape[1] for one in self.inputs)
        return length * width * self.model.token_embedding.table.weight.element_size()

    def _pass(self, names: set[str]) -> dict[str, Tensor | AttentionMap]:
        """Run the model up to the last of these sites and return their activations."""
        known = sites(self.model)
        order = [name for name in known if name in names]
        maps = [name for name in order if known[name].hook_point == "pattern"]
        # A map is captured when its kernel has run; the attention output comes right after.
        last = order[-1].replace("pattern", "attn_out") if order[-1] in maps else order[-1]
        recorded = [name for name in dict.fromkeys([*order, last]) if name not in maps]
        edits = self.edits()  # first, as patches run the model themselves
        with (
            eval_mode(self.model),
            edit(self.model, edits),
            capture_attention(self.model, *maps) as kept,
            record(self.model, *recorded, stop=True) as seen,
        ):
            self.model(*self.inputs)
        return {**kept, **{name: seen[name] for name in order if name not in maps}}


def size_of(value: Tensor | AttentionMap) -> int:
    """Return the size of a value in bytes."""
    return value.n_bytes if isinstance(value, AttentionMap) else value.numel() * value.element_size()


def check_patch_shape(site: str, there: Tensor, old: Tensor) -> Tensor:
    """Return the activation from the other prompt if its shape matches."""
    if there.shape != old.shape:
        raise InputError(
            f"{site} has shape {list(there.shape)} on the other text, but {list(old.shape)} here; give texts of the "
            "same length, or patch single positions that both have."
        )
    return there
