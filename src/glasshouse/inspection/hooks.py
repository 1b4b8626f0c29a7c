"""Who looks at a model or changes it just now: kept beside the model, which has hooks for as long as someone does."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.attention_recompute import recompute_attention, softcap_of
from glasshouse.inspection.sites import Selection, Site, unwrap_compiled, unwrap_model
from glasshouse.layers.attend import Explicit, Fused
from glasshouse.layers.mask import Mask
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES

INSIDE = ("scores", "pattern")  # what a kernel works out and no module hands on


class AttendCall(NamedTuple):
    """A kernel and what it was given in a call."""

    attend: Fused | Explicit
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask


@dataclass(frozen=True, eq=False)
class Hook:
    """What someone does at one site: change what passes there, or read it."""

    selection: Selection
    edit: Callable[[Tensor], Tensor] | None = None  # of the whole value
    read: Callable[[Tensor], None] | None = None  # of the part selected
    capture: Callable[[AttendCall], None] | None = None  # of a pattern: what it is worked out from
    in_graph: bool = False  # the very tensor that goes on is wanted, not one like it
    position_dependent: bool = (
        False  # the change goes by rows and positions, which come otherwise while a text is written
    )


class CallListener(Protocol):
    """Someone who keeps what belongs to one call apart from what belongs to another."""

    @property
    def complete(self) -> bool:
        """Whether all that is wanted of the call has been seen."""

    def begin(self) -> None:
        """Learn that a call of the model begins."""

    def end(self, whole: bool) -> None:
        """Learn that it has ended, by itself or, if it is not whole, by an error or because no more was needed."""


class HookManager:
    """The uses of one model, in the order in which they came: at a site, all changes act before anyone reads."""

    def __init__(self) -> None:
        self.number = next(_numbers)  # several models are locked in this order, so that nobody waits in a ring
        self.lock = threading.RLock()
        self.owner = 0  # the thread whose calls are looked at; those of others pass as if nobody did
        self.hooks: dict[Hook, None] = {}  # a set in order
        self.calls: list[CallListener] = []
        self.undo = ExitStack()

    @contextmanager
    def registered(self, uses: Iterable[Hook], calls: CallListener | None = None) -> Iterator[None]:
        """Have these uses act on the calls of this thread; another that wants the model as well waits."""
        mine = dict.fromkeys(uses)
        with self.lock, _eagerly():
            try:
                self.owner = threading.get_ident()
                self.calls += [calls] if calls is not None else []
                self._arrange(self.hooks | mine)
                yield
            finally:  # whichever of several blocks ends first, as those of generators may
                self.calls = [one for one in self.calls if one is not calls]
                self._arrange({use: None for use in self.hooks if use not in mine})

    def end(self, whole: bool) -> None:
        """Tell those who want to know that the call has ended."""
        for one in self.calls:
            one.end(whole)

    def stop(self) -> None:
        """Tell them that no more is computed: the call is whole for those who have all they wanted of it."""
        for one in self.calls:
            one.end(one.complete)

    def _arrange(self, uses: dict[Hook, None]) -> None:
        """Leave the model as it is without anyone, then place what these uses need."""
        self.undo.close()
        self.hooks = uses
        by_site: dict[Site, list[Hook]] = {}
        for use in uses:
            by_site.setdefault(use.selection.site, []).append(use)
        changed = {
            (site.model, site.path)
            for site, users in by_site.items()
            if site.hook_point in INSIDE
            and (
                any(use.edit is not None or use.in_graph for use in users)
                or isinstance(site.module, HookedExplicit)  # the model is a copy of one that is edited
            )
        }
        for model, path in changed:  # first, as hooks belong on what then stands there
            self._open_up(model, path, by_site)
        for site, users in by_site.items():
            if site.hook_point not in INSIDE:
                self._watch(site, users)
            elif (site.model, site.path) not in changed:
                self._work_out(site, users)
        if self.calls:
            self._follow_calls(next(iter(by_site)).model)

    def _follow_calls(self, model: nn.Module) -> None:
        """Put hooks around a call of the whole model."""

        def begins(module: nn.Module, args: tuple[Any, ...]) -> None:
            for one in self.calls if threading.get_ident() == self.owner else ():
                one.begin()

        def ends(module: nn.Module, args: tuple[Any, ...], value: Tensor | None) -> None:
            if threading.get_ident() == self.owner:
                self.end(value is not None)  # after an error there is none

        self.undo.callback(model.register_forward_pre_hook(begins).remove)
        self.undo.callback(model.register_forward_hook(ends, always_call=True).remove)

    def _watch(self, site: Site, uses: list[Hook]) -> None:
        """Put a hook at a module's door."""

        def given(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            assert isinstance(site.hook_point, int)
            value = self._pass(args[site.hook_point], uses)
            return (
                None
                if value is args[site.hook_point]
                else (*args[: site.hook_point], value, *args[site.hook_point + 1 :])
            )

        def gives(module: nn.Module, args: tuple[Any, ...], value: Tensor) -> Tensor | None:
            return self._pass(value, uses)

        if site.hook_point == "output":
            handle = site.module.register_forward_hook(gives)
        else:
            handle = site.module.register_forward_pre_hook(given)
        self.undo.callback(handle.remove)

    def _work_out(self, site: Site, uses: list[Hook]) -> None:
        """Have what a fused kernel never holds worked out from what it was given."""

        def gives(module: nn.Module, args: tuple[Tensor, Tensor, Tensor, Mask], value: Tensor) -> None:
            q, k, v, mask = args
            active = self._active(uses)
            _check_not_captured(active, value)
            for use in active:
                if use.capture is not None:
                    use.capture(AttendCall(module, q.detach(), k.detach(), v.detach(), mask))  # type: ignore[arg-type]
                if use.read is not None:
                    use.read(recompute_attention(use.selection, module, q, k, mask))  # type: ignore[arg-type]

        self.undo.callback(site.module.register_forward_hook(gives).remove)

    def _open_up(self, model: nn.Module, path: str, by_site: dict[Site, list[Hook]]) -> None:
        """Put a kernel that is written out in the place of the one that stands there."""
        here = {site.hook_point: uses for site, uses in by_site.items() if (site.model, site.path) == (model, path)}
        above, _, name = path.rpartition(".")
        attention, stood = model.get_submodule(above), model.get_submodule(path)
        former = unwrap_compiled(stood)
        assert isinstance(former, Fused | Explicit)
        opened = HookedExplicit(
            former,
            lambda: any(self._active(uses) for uses in here.values()),
            lambda scores: self._pass(scores, here.get("scores", [])),
            lambda pattern: self._pass(pattern, here.get("pattern", [])),
        )
        for (
            hooks
        ) in HOOK_ATTRIBUTES:  # the very same dictionaries: what others put there or take away meanwhile stays so
            setattr(opened, hooks, getattr(stood, hooks))
        setattr(attention, name, opened)
        self.undo.callback(setattr, attention, name, stood)

    def _pass(self, value: Tensor, uses: list[Hook]) -> Tensor:
        active = self._active(uses)
        _check_not_captured(active, value)
        for use in active:
            if use.edit is not None:
                value = use.edit(value)
        for use in active:
            if use.read is not None:
                use.read(value if use.in_graph else use.selection.of(value))
        return value

    def _active(self, uses: list[Hook]) -> list[Hook]:
        """Return those of some uses that act now: a copy of the model, such as an engine's, may keep its hooks."""
        return [use for use in uses if use in self.hooks] if threading.get_ident() == self.owner else []


class HookedExplicit(Explicit):
    """A kernel whose scores and weights pass before the eyes of whoever looks at them or changes them."""

    def __init__(
        self,
        former: Fused | Explicit,
        is_watched: Callable[[], bool],
        scores_hook: Callable[[Tensor], Tensor],
        pattern_hook: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(former.scale, former.dropout, softcap_of(former))
        self.original = (former,)  # not a child: the tree keeps its shape
        self.train(former.training)
        self.is_hooked, self.scores_hook, self.pattern_hook = is_watched, scores_hook, pattern_hook

    def train(self, mode: bool = True) -> HookedExplicit:
        """Set the mode of the kernel that will be back, too."""
        self.original[0].train(mode)
        return super().train(mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attend with q [B, H, Q, d] over k and v [B, H_kv, K, d]; return [B, H, Q, d]."""
        if not self.is_hooked():
            return self.original[0].forward(q, k, v, mask)
        return super().forward(q, k, v, mask)

    def scores(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """Return what the softmax receives, as changed."""
        (former,) = self.original
        made = former.scores(q, k, mask) if isinstance(former, Explicit) else super().scores(q, k, mask)
        return self.scores_hook(made)

    def pattern(self, scores: Tensor) -> Tensor:
        """Return the attention weights, as changed."""
        (former,) = self.original
        made = former.pattern(scores) if isinstance(former, Explicit) else super().pattern(scores)
        return self.pattern_hook(made)


def _check_not_captured(uses: list[Hook], value: Tensor) -> None:
    """Refuse to read what becomes part of a graph: it would be read once, and never again when the graph runs."""
    read = next((use.selection.name for use in uses if use.read is not None), None)
    if read is not None and value.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(f"{read} is recorded around an engine; give its name to generate as record.")


_numbers = itertools.count()
_boards: WeakKeyDictionary[nn.Module, HookManager] = WeakKeyDictionary()
_making = threading.Lock()
_eager = threading.Lock()
_eager_users = ExitStack()
_eager_count = 0


def hook_manager_of(model: nn.Module) -> HookManager:
    """Return the board of a model."""
    with _making:
        return _boards.setdefault(unwrap_model(model), HookManager())


@contextmanager
def _eagerly() -> Iterator[None]:
    """Have what is compiled run uncompiled meanwhile: hooks that come after the first compiled call never fire.

    Torch has one switch for the whole process, so it is turned by the first who comes and the last who leaves.
    """
    global _eager_count
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and to import it takes seconds
        yield
        return
    with _eager:
        if _eager_count == 0:
            _eager_users.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_count += 1
    try:
        yield
    finally:
        with _eager:
            _eager_count -= 1
            if _eager_count == 0:
                _eager_users.close()
