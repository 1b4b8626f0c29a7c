"""Attention maps for later use: the queries and keys of a call, from which any slice of a map is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.attention_recompute import recompute_attention
from glasshouse.inspection.hooks import AttendCall, Hook, hook_manager_of
from glasshouse.inspection.sites import Index, Selection, Site, select

EVERY = slice(None)


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention of one layer in one call; it stores queries and keys, not their products, to save memory."""

    site: Site
    kernel: AttendCall

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        q, k = self.kernel.q, self.kernel.k
        return (q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    @property
    def n_bytes(self) -> int:
        """How much memory it uses."""
        tensors = [self.kernel.q, self.kernel.k, self.kernel.v, self.kernel.mask.bias]
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def weights(self, head: Index = EVERY, query: Index = EVERY, key: Index = EVERY) -> Tensor:
        """Return attention weights [B, head, query, key]; an integer index removes its axis."""
        return self._part("pattern", head, query, key)

    def scores(self, head: Index = EVERY, query: Index = EVERY, key: Index = EVERY) -> Tensor:
        """Return the input of the softmax, [B, head, query, key]."""
        return self._part("scores", head, query, key)

    def _part(self, point: str, head: Index, query: Index, key: Index) -> Tensor:
        site = replace(self.site, hook_point=point)  # type: ignore[arg-type]
        attend, q, k, _, mask, _ = self.kernel
        return recompute_attention(Selection(site, (EVERY, head, query, key)), attend, q, k, mask)


@contextmanager
def capture_attention(model: nn.Module, *names: str) -> Iterator[dict[str, AttentionMap]]:
    """Capture the queries and keys of the named patterns, such as `pattern.*`, while the model is called.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with capture_attention(model, "pattern.*") as maps:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> maps["pattern.1"].shape, maps["pattern.1"].weights(head=2, query=0)
    ((1, 4, 3, 3), tensor([[1., 0., 0.]]))
    """
    maps: dict[str, AttentionMap] = {}
    selections = [one for name in names for one in select(model, name)]
    for one in selections:
        if one.site.hook_point != "pattern" or not one.whole:
            raise InputError(f"{one.name} is not a whole pattern; name one, such as pattern.0.")

    def capture(site: Site, kernel: AttendCall) -> None:
        maps[site.name] = AttentionMap(site, kernel)

    with hook_manager_of(model).registered(Hook(one, capture=partial(capture, one.site)) for one in selections):
        yield maps
