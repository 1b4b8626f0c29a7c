"""Forward hooks at the sites of a model, registered only while a recording or an edit is active."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.attention_map import AttendCall, recompute_attention
from glasshouse.inspection.derived_sites import DERIVED, derive, output_of
from glasshouse.inspection.sites import Selection, Site, unwrap_compiled, unwrap_model
from glasshouse.layers.attend.backends import Explicit
from glasshouse.layers.attend.kernel import Attend, Backend
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES
from glasshouse.layers.sublayer import INSIDE
from glasshouse.models.stack import Stack


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook at one site: it edits the activation, or reads it."""

    selection: Selection
    edit: Callable[[Tensor], Tensor] | None = None  # of the whole activation
    read: Callable[[Tensor], None] | None = None  # of the selected slice
    capture: Callable[[AttendCall], None] | None = None  # of a pattern: the arguments it is computed from
    in_graph: bool = False  # read the tensor of the autograd graph itself, not a recomputed one
    captured: bool = False  # what it reads is a result of the CUDA graph that is captured
    by_position: bool = False  # edits some positions alone, which the hook manager tells during generation
    position_dependent: bool = False  # depends on rows or positions in a way that differs between prefill and decode


@dataclass(frozen=True)
class GeneratedTokens:
    """The tokens of a forward pass during generation: their positions, and where each one's prompt ends."""

    rows: Tensor  # of the engine's cache; all broadcast to [B, S]
    positions: Tensor
    prompt_lengths: Tensor

    def selected(self, selection: Selection) -> Tensor:
        """Return which tokens a selection has, [B, S]."""
        match selection.span, selection.index[selection.site.axes.index("position")]:
            case "prompt", _:
                return self.positions < self.prompt_lengths
            case "new", _:
                return self.positions >= self.prompt_lengths
            case _, int(position):
                return self.positions == position
            case _, slice(start=start, stop=stop):
                after = self.positions >= (start or 0)
                return after if stop is None else after & (self.positions < stop)
        raise AssertionError(selection)


class CallListener(Protocol):
    """Is notified when a forward pass of the model begins and ends."""

    @property
    def complete(self) -> bool:
        """Whether everything requested of this forward pass has been recorded."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of a forward pass with these arguments."""

    def end(self, whole: bool) -> None:
        """Handle its end; `whole` is False if it raised an error or was stopped early."""


class HookManager:
    """The hooks of one model, in order of registration: at a site, all edits run before any read."""

    def __init__(self) -> None:
        self.number = next(_numbers)  # several models are locked in this order, which rules out a deadlock
        self.lock = threading.RLock()
        self.owner = 0  # the thread whose calls are hooked; hooks do nothing in other threads
        self.hooks: dict[Hook, None] = {}  # an ordered set
        self.listeners: list[CallListener] = []
        self.generated: GeneratedTokens | None = None  # in a forward pass of an engine
        self.undo = ExitStack()

    @contextmanager
    def registered(self, hooks: Iterable[Hook], listener: CallListener | None = None) -> Iterator[None]:
        """Register hooks for the calls of this thread; other threads that want to hook the model wait."""
        mine = dict.fromkeys(hooks)
        with self.lock, _force_eager():
            try:
                self.owner = threading.get_ident()
                self.listeners += [listener] if listener is not None else []
                self._install(self.hooks | mine)
                yield
            finally:  # blocks may end in any order, as those of generators do
                self.listeners = [one for one in self.listeners if one is not listener]
                self._install({hook: None for hook in self.hooks if hook not in mine})

    def edited_sites(self) -> list[Site]:
        """Return the sites that are edited in calls of this thread."""
        return [hook.selection.site for hook in self._active(list(self.hooks)) if hook.edit is not None]

    def end(self, whole: bool) -> None:
        """Notify the listeners that the forward pass has ended."""
        for one in self.listeners:
            one.end(whole)

    def stop(self) -> None:
        """Notify them that it was stopped early: it counts as whole for those that are complete."""
        for one in self.listeners:
            one.end(one.complete)

    def _install(self, hooks: dict[Hook, None]) -> None:
        """Remove every hook from the model, then install these."""
        self.undo.close()
        self.hooks = hooks
        by_site: dict[Site, list[Hook]] = {}
        for hook in hooks:
            by_site.setdefault(hook.selection.site, []).append(hook)
        replaced = {
            (site.model, site.path)
            for site, site_hooks in by_site.items()
            if site.hook_point in INSIDE
            and (
                any(hook.edit is not None or hook.in_graph for hook in site_hooks)
                or isinstance(site.module, HookedAttend)  # the model is a copy of one that is edited
            )
        }
        for model, path in replaced:  # first: the other hooks go on the new module
            self._replace_kernel(model, path, by_site)
        if (first := next((hook for hook in hooks if hook.by_position), None)) is not None:
            self._hook_stacks(first.selection.site.model)
        for site, site_hooks in by_site.items():
            if site.hook_point in DERIVED:
                self._hook_derived(site, site_hooks)
            elif site.hook_point not in INSIDE:
                self._hook_module(site, site_hooks)
            elif (site.model, site.path) not in replaced:
                self._hook_recompute(site, site_hooks)
        if self.listeners:
            self._hook_model(next(iter(by_site)).model)

    def _hook_model(self, model: nn.Module) -> None:
        """Register hooks on the whole model that notify the listeners."""

        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for one in self.listeners if threading.get_ident() == self.owner else ():
                one.begin(args, kwargs)

        def after_forward(module: nn.Module, args: tuple[Any, ...], value: Tensor | None) -> None:
            if threading.get_ident() == self.owner:
                self.end(value is not None)  # None after an error

        self.undo.callback(model.register_forward_pre_hook(before_forward, with_kwargs=True).remove)
        self.undo.callback(model.register_forward_hook(after_forward, always_call=True).remove)

    def _hook_stacks(self, model: nn.Module) -> None:
        """Register hooks on the stacks that keep the positions of the tokens of a forward pass during generation."""

        def before_forward(stack: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() != self.owner:
                return
            _, layout, cache, *_ = (*args, None)
            self.generated = None
            if cache is not None and (lengths := cast(Stack, stack).prompt_lengths) is not None:
                self.generated = GeneratedTokens(cache.cache_rows, layout.positions, lengths[cache.cache_rows])

        for module in model.modules():
            if isinstance(module, Stack):
                self.undo.callback(module.register_forward_pre_hook(before_forward).remove)

    def _hook_module(self, site: Site, hooks: list[Hook]) -> None:
        """Register a hook on the input or output of a module."""

        def on_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            assert isinstance(site.hook_point, int)
            value = self._apply(args[site.hook_point], hooks)
            return (
                None
                if value is args[site.hook_point]
                else (*args[: site.hook_point], value, *args[site.hook_point + 1 :])
            )

        def on_output(module: nn.Module, args: tuple[Any, ...], value: Tensor) -> Tensor | None:
            return self._apply(value, hooks)

        if site.hook_point == "output":
            handle = site.module.register_forward_hook(on_output)
        else:
            handle = site.module.register_forward_pre_hook(on_input)
        self.undo.callback(handle.remove)

    def _hook_derived(self, site: Site, hooks: list[Hook]) -> None:
        """Register a hook that derives the activation from a module's input, and the output from the activation."""

        def on_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            active = self._active(hooks)
            if not active:
                return None
            value = self._apply(derive(site, args[0]), hooks)
            if all(hook.edit is None and not hook.in_graph for hook in active):
                return None
            return output_of(site, args[0], value).to(output.dtype)

        self.undo.callback(site.module.register_forward_hook(on_output).remove)

    def _hook_recompute(self, site: Site, hooks: list[Hook]) -> None:
        """Recompute scores or pattern from the inputs of the attention, as fused kernels never materialize them."""

        def on_output(module: nn.Module, args: tuple[Tensor, Tensor, Tensor, Backend], value: Tensor) -> None:
            attend, (q, k, v, backend) = cast(Attend, module), args
            active = self._active(hooks)
            _check_not_captured(active, value)
            for hook in active:
                if hook.capture is not None:
                    call = AttendCall(attend, q.detach(), k.detach(), v.detach(), backend.mask, backend.name)
                    hook.capture(call)
                if hook.read is not None:
                    hook.read(recompute_attention(hook.selection, attend, q, k, backend.mask))

        self.undo.callback(site.module.register_forward_hook(on_output).remove)

    def _replace_kernel(self, model: nn.Module, path: str, by_site: dict[Site, list[Hook]]) -> None:
        """Replace the attention of a layer by one with explicit scores and pattern, and hooks on them."""
        here = {site.hook_point: hooks for site, hooks in by_site.items() if (site.model, site.path) == (model, path)}
        parent, _, name = path.rpartition(".")
        attention, module = model.get_submodule(parent), model.get_submodule(path)
        original = unwrap_compiled(module)
        assert isinstance(original, Attend)
        hooked = HookedAttend(
            original,
            lambda: any(self._active(hooks) for hooks in here.values()),
            lambda scores: self._apply(scores, here.get("scores", [])),
            lambda pattern: self._apply(pattern, here.get("pattern", [])),
        )
        for attribute in HOOK_ATTRIBUTES:  # the same dictionaries: hooks that others add or remove meanwhile persist
            setattr(hooked, attribute, getattr(module, attribute))
        setattr(attention, name, hooked)
        self.undo.callback(setattr, attention, name, module)

    def _apply(self, value: Tensor, hooks: list[Hook]) -> Tensor:
        active = self._active(hooks)
        _check_not_captured(active, value)
        for hook in active:
            if hook.edit is not None:
                value = hook.edit(value)
        for hook in active:
            if hook.read is not None:
                hook.read(value if hook.in_graph else hook.selection.of(value))
        return value

    def _active(self, hooks: list[Hook]) -> list[Hook]:
        """Return the hooks registered for this thread; a copy of the model, such as an engine's, may keep others."""
        return [hook for hook in hooks if hook in self.hooks] if threading.get_ident() == self.owner else []


class HookedAttend(Attend):
    """Attention by the explicit backend, with hooks on its scores and pattern."""

    def __init__(
        self,
        original: Attend,
        is_hooked: Callable[[], bool],
        scores_hook: Callable[[Tensor], Tensor],
        pattern_hook: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(original.scale, original.dropout, original.softcap)
        self.original = (original,)  # not a submodule: the module tree keeps its shape
        self.train(original.training)
        self.is_hooked, self.scores_hook, self.pattern_hook = is_hooked, scores_hook, pattern_hook

    def train(self, mode: bool = True) -> HookedAttend:
        """Set the mode of the original module, too."""
        self.original[0].train(mode)
        return super().train(mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> Tensor:
        """Attend with q [B, H, Q, d] over k and v [B, H_kv, K, d]; return [B, H, Q, d]."""
        if not self.is_hooked():
            return self.original[0].forward(q, k, v, backend)
        dense = backend.mask.to_dense(q.shape[2], k.shape[2], q.device)
        return super().forward(q, k, v, Explicit(backend.mask, dense))

    def scores(self, q: Tensor, k: Tensor, dense: Tensor | None) -> Tensor:
        """Return the input of the softmax, after the hook."""
        return self.scores_hook(self.original[0].scores(q, k, dense))

    def pattern(self, scores: Tensor) -> Tensor:
        """Return the attention weights, after the hook."""
        return self.pattern_hook(self.original[0].pattern(scores))


def _check_not_captured(hooks: list[Hook], value: Tensor) -> None:
    """Raise InputError while a CUDA graph is captured: the hook would not run when the graph is replayed."""
    name = next((hook.selection.name for hook in hooks if hook.read is not None and not hook.captured), None)
    if name is not None and value.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(f"{name} is recorded around an engine; pass its name to generate as record.")


_numbers = itertools.count()
_managers: WeakKeyDictionary[nn.Module, HookManager] = WeakKeyDictionary()
_managers_lock = threading.Lock()
_eager_lock = threading.Lock()
_eager_stance = ExitStack()
_eager_count = 0


def hook_manager_of(model: nn.Module) -> HookManager:
    """Return the hook manager of a model."""
    with _managers_lock:
        return _managers.setdefault(unwrap_model(model), HookManager())


@contextmanager
def _force_eager() -> Iterator[None]:
    """Run compiled modules eagerly: hooks registered after the first compiled call never fire.

    The stance of torch.compile is process-wide, so the first to enter sets it and the last to leave resets it.
    """
    global _eager_count
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and importing it takes seconds
        yield
        return
    with _eager_lock:
        if _eager_count == 0:
            _eager_stance.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_count += 1
    try:
        yield
    finally:
        with _eager_lock:
            _eager_count -= 1
            if _eager_count == 0:
                _eager_stance.close()
