"""What was seen while a model answered a question: kept for the next look, within a limit of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.inspection import AttentionMap, capture_attention, edit, mean_ablate, record, scale, sites
from glasshouse.inspection.editing import AblationEdit
from glasshouse.inspection.forward_pass import eval_mode, final_stack
from glasshouse.inspection.sites import select
from glasshouse.page.forward_pass import Edit, ForwardPass, Mean, Patch, Prompt, Scale
from glasshouse.page.model_loader import LoadedModel, ModelLoader

T = TypeVar("T")

MEMORY = 2 * 2**30  # bytes that are kept of all forward_passes together
TEXTS = 16  # whose ids are remembered
SHARE = (
    0.75  # of that, at most, for the usual sites of one forward_pass; what would take more is recorded when asked for
)


class TraceCache:
    """The traces of recent forward_passes to one loader."""

    def __init__(self, loader: ModelLoader, memory: int = MEMORY) -> None:
        self.loader, self.memory = loader, memory
        self.lock = threading.RLock()  # one pass at a time: two would only share the same cores
        self._read: OrderedDict[tuple[Prompt, str], tuple[Tensor, ...]] = OrderedDict()
        self._versions: dict[str, tuple[LoadedModel, int]] = {}  # by checkpoint
        self._kept: OrderedDict[tuple[ForwardPass, str], Tensor | AttentionMap] = OrderedDict()

    def trace(self, forward_pass: ForwardPass) -> Trace:
        """Return the trace of a question."""
        loaded = self.loader.get(forward_pass.checkpoint)
        with self.lock:
            self._forget(forward_pass.checkpoint, loaded)
            known = (forward_pass.prompt, forward_pass.checkpoint)
            if known not in self._read:  # a long text is read once, not for each tile of a map
                self._read[known] = loaded.inputs(forward_pass.prompt)
            self._read.move_to_end(known)
            while len(self._read) > TEXTS:
                self._read.popitem(last=False)
            return Trace(self, loaded, forward_pass, self._read[known])

    def _forget(self, checkpoint: str, loaded: LoadedModel) -> None:
        """Let go of what was seen of models that are gone, which maps would keep alive, or have learned since."""
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
        """How much is kept now."""
        return sum(size_of(one) for one in self._kept.values())

    def get(self, forward_pass: ForwardPass, name: str) -> Tensor | AttentionMap | None:
        """Return what is kept of a question under a name."""
        with self.lock:
            if (forward_pass, name) not in self._kept:
                return None
            self._kept.move_to_end((forward_pass, name))
            return self._kept[forward_pass, name]

    def put(self, forward_pass: ForwardPass, name: str, value: Tensor | AttentionMap) -> None:
        """Keep something; what was not looked at for longest goes."""
        with self.lock:
            self._kept[forward_pass, name] = value
            self._kept.move_to_end((forward_pass, name))
            while self.n_bytes > self.memory and len(self._kept) > 1:
                self._kept.popitem(last=False)


class Trace:
    """One forward_pass and what is known of it: sites are recorded when first asked for, most of them in one pass."""

    def __init__(
        self, traces: TraceCache, loaded: LoadedModel, forward_pass: ForwardPass, inputs: tuple[Tensor, ...]
    ) -> None:
        self.traces, self.loaded, self.forward_pass, self.inputs = traces, loaded, forward_pass, inputs
        self.model, self.tok = loaded.model, loaded.tok
        self.prefix, self.stack = final_stack(self.model)

    @property
    def ids(self) -> list[int]:
        """What the stack reads that the head reads from: the text, or the target."""
        return self.inputs[-1][0].tolist()

    def activation(self, name: str) -> Tensor:
        """Return what stood at a site, without the batch: one row is all there is."""
        value = self._see(name)
        assert isinstance(value, Tensor)
        return value[0]

    def attention_map(self, name: str) -> AttentionMap:
        """Return the attention map of a name such as pattern.3."""
        value = self._see(name)
        assert isinstance(value, AttentionMap)
        return value

    def residual_sites(self) -> list[str]:
        """Return the sites of the stream that the head reads: embedded, and after each layer."""
        depth = len(self.stack.blocks)
        return [f"{self.prefix}embed", *(f"{self.prefix}resid_post.{layer}" for layer in range(depth))]

    def run(self, work: Callable[[], T]) -> T:
        """Do some work on the model while it is changed as the question says."""
        with self.traces.lock, eval_mode(self.model), edit(self.model, self.edits()):
            return work()

    def edits(self) -> dict[str, list[Callable[[Tensor], Tensor] | AblationEdit]]:
        """Return the changes as `edit` takes them."""
        made: dict[str, list[Callable[[Tensor], Tensor] | AblationEdit]] = {}
        for one in self.forward_pass.edits:
            for place in select(self.model, one.site):
                if place.site.hook_point in ("scores", "pattern"):
                    raise InputError(
                        f"{one.site} is to be changed, of which the page keeps no map; change z instead."
                    )
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
        """Return what stood at a site, or a part of one, on the other text."""
        if self.forward_pass.patch_from is None:
            raise InputError(f"{site} is to be patched, but there is no other text; write one.")
        other = self.traces.trace(self.forward_pass.patch_pass)
        with eval_mode(other.model), record(other.model, site, stop=True) as seen:
            other.model(*other.inputs)
        return seen[site]

    def _see(self, name: str) -> Tensor | AttentionMap:
        with self.traces.lock:
            if (known := self.traces.get(self.forward_pass, name)) is not None:
                return known
            found = self._pass(self._usual() | {name})
            for each, value in found.items():
                self.traces.put(self.forward_pass, each, value)
            return found[name]

    def _usual(self) -> set[str]:
        """Return what is recorded along with anything, as a second pass would cost more: if there is room for it."""
        kinds = {"resid_post", "pattern", "cross_pattern"}
        usual = {name for name in sites(self.model) if name.rpartition(".")[0].rpartition(".")[2] in kinds}
        usual |= {f"{self.prefix}embed", f"{self.prefix}final"}
        return usual if sum(map(self._size, usual)) <= SHARE * self.traces.memory else set()

    def _size(self, name: str) -> int:
        """Return about how many bytes are kept of a site: of a map, its queries, keys and values."""
        s = self.model.spec
        width = (s.n_heads + 2 * s.n_kv_heads) * s.d_head if "pattern" in name else s.d_model
        length = max(one.shape[1] for one in self.inputs)
        return length * width * self.model.token_embedding.table.weight.element_size()

    def _pass(self, names: set[str]) -> dict[str, Tensor | AttentionMap]:
        """Call the model once and return what stood at these sites; it is computed no further than to the last."""
        known = sites(self.model)
        order = [name for name in known if name in names]
        maps = [name for name in order if known[name].hook_point == "pattern"]
        # A map is seen when its kernel has run; what the layer adds to the stream comes right after.
        last = order[-1].replace("pattern", "attn_out") if order[-1] in maps else order[-1]
        recorded = [name for name in dict.fromkeys([*order, last]) if name not in maps]
        edits = self.edits()  # before, as patches call the model themselves
        with (
            eval_mode(self.model),
            edit(self.model, edits),
            capture_attention(self.model, *maps) as kept,
            record(self.model, *recorded, stop=True) as seen,
        ):
            self.model(*self.inputs)
        return {**kept, **{name: seen[name] for name in order if name not in maps}}


def size_of(value: Tensor | AttentionMap) -> int:
    """Return the bytes that a value holds."""
    return value.n_bytes if isinstance(value, AttentionMap) else value.numel() * value.element_size()


def check_patch_shape(site: str, there: Tensor, old: Tensor) -> Tensor:
    """Return what stood at a site on the other text, if it fits where it is put."""
    if there.shape != old.shape:
        raise InputError(
            f"{site} has shape {list(there.shape)} on the other text, but {list(old.shape)} here; give texts of the "
            "same length, or patch single positions that both have."
        )
    return there
