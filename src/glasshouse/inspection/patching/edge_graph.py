"""The edges of a pre-norm model: from every writer to the residual stream into every later reader of it.

A pre-norm residual stream is a sum. So what a reader (the queries, keys or values of a head, a feed-forward layer,
the logits) is given can be taken apart by writer (the embedding, a head, a feed-forward layer), and summed again with
some of them as in another run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.sites import PARTS, Site, parts_of, sites, sublayer_of, suggest_site, unwrap_model
from glasshouse.layers.attention import MultiHeadAttention
from glasshouse.layers.sublayer import STREAM
from glasshouse.models import Model, Seq2Seq
from glasshouse.models.stack import Stack


@dataclass(frozen=True)
class Stream:
    """The residual stream at one place, and the norm that it is read through."""

    stack: str  # the prefix of its sites
    columns: slice  # of the writers so far, in the graph
    site: Site
    norm: str  # the path of the module


@dataclass(frozen=True)
class Readers:
    """The readers of one module: the queries, keys or values of each head, a feed-forward layer, or the logits."""

    rows: slice  # in the graph
    stream: Stream
    into: Site  # the output of the norm, or of the projection of all heads after it
    is_projected: bool


@dataclass(frozen=True)
class Writers:
    """The writers of one module: the embedding, the heads of a layer, or a feed-forward layer."""

    columns: slice  # in the graph
    stack: str
    site: Site


class EdgeGraph:
    """The writers and readers of a model in the order of the forward pass, named by site.

    >>> import glasshouse as gh
    >>> graph = EdgeGraph(gh.build(gh.preset("tiny-decoder", n_layers=1, n_heads=2, n_kv_heads=1)))
    >>> print(*graph.writer_names)
    embed z.0[head=0] z.0[head=1] ffn_out.0
    >>> print(*graph.reader_names)
    q.0[head=0] q.0[head=1] k.0[head=0] v.0[head=0] ffn.0 logits
    >>> int(graph.exists.sum())  # the embedding into four readers of heads, 3 writers into ffn.0, 4 into the logits
    11
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Model = unwrap_model(model)
        if (placement := self.model.spec.norm_placement) not in ("pre", "parallel"):
            raise InputError(
                f"norm_placement is {placement!r}, but edges need 'pre' or 'parallel', where the residual stream is "
                "a sum; use path_patching."
            )
        if (over := self.model.spec.qk_norm_over) != "head":
            raise InputError(
                f"qk_norm_over is {over!r}, but edges need 'head', where a query depends on what its own head reads "
                "alone; use path_patching."
            )
        if self.model.spec.value_embeddings:
            raise InputError(
                "value_embeddings is true, but edges need a value that is a projection of what its head reads; "
                "use path_patching."
            )
        self.writers: list[Writers] = []
        self.readers: list[Readers] = []
        self.writer_names: list[str] = []
        self.reader_names: list[str] = []
        self._sites = sites(self.model)
        self._inputs: list[tuple[int, int]] = []  # a writer, and a reader that it is computed from
        if isinstance(self.model, Seq2Seq):
            memory = self._add_stack("encoder.", "encoder", self.model.encoder)
            last = self._add_stack("decoder.", "decoder", self.model.decoder, memory)
        else:
            last = self._add_stack("", "stack", self.model.stack)
        self._read(last, self._sites[f"{last.stack}final"], ["logits"])
        self.exists = torch.zeros(len(self.reader_names), len(self.writer_names), dtype=torch.bool)
        for one in self.readers:
            self.exists[one.rows, one.stream.columns] = True
        self._computed_from = torch.zeros_like(self.exists.T)  # [writer, reader]
        self._computed_from[tuple(torch.tensor(self._inputs).T)] = True

    def place(self, writer: str, reader: str) -> tuple[int, int]:
        """Return the row and column of an edge."""
        for name, known, what in ((writer, self.writer_names, "writer"), (reader, self.reader_names, "reader")):
            if name not in known:
                some = [one for one in known if one.partition("[")[0] == name.partition("[")[0]]
                if some and some != [name]:
                    raise InputError(f"the model has no {what} {name!r}; it has {some[0]} to {some[-1]}.")
                raise InputError(f"the model has no {what} {name!r}; {suggest_site(name, known)}")
        row, column = self.reader_names.index(reader), self.writer_names.index(writer)
        if not self.exists[row, column]:
            raise InputError(f"there is no edge from {writer} to {reader}; give a writer before the reader.")
        return row, column

    def connected(self, edges: Tensor) -> Tensor:
        """Return the edges [reader, writer] that lie on a path from an embedding to the logits; others do nothing."""
        is_embedding, is_logits = ~self._computed_from.any(1), ~self._computed_from.any(0)
        while True:
            writes = (self._computed_from & edges.any(1)).any(1) | is_embedding
            is_read = (self._computed_from & edges.any(0)[:, None]).any(0) | is_logits
            kept = edges & writes & is_read[:, None]
            if torch.equal(kept, edges):
                return kept
            edges = kept

    def drawn_path(self, made: torch.Generator) -> Iterator[tuple[int, int]]:
        """Yield the edges, by row and column, of a path that is drawn at random from the logits to an embedding."""
        readers = (~self._computed_from.any(0)).nonzero()[:, 0]
        while len(readers):
            row = int(readers[torch.randint(len(readers), (), generator=made)])
            writers = self.exists[row].nonzero()[:, 0]
            column = int(writers[torch.randint(len(writers), (), generator=made)])
            yield row, column
            readers = self._computed_from[column].nonzero()[:, 0]

    def _add_stack(self, prefix: str, path: str, stack: Stack, memory: Stream | None = None) -> Stream:
        """Add the writers and readers of a stack, and return its stream after the last layer."""
        start = len(self.writer_names)
        self._write(prefix, "embed", ["embed"])
        for number, block in enumerate(stack.blocks):
            site = self._sites[f"{prefix}resid_pre.{number}"]
            read = slice(start, len(self.writer_names)), site
            for part in parts_of(block):
                norm = f"{path}.blocks.{number}.{part}.norm"
                if self.model.spec.norm_placement != "parallel":  # where all parts read the input of the block
                    read = slice(start, len(self.writer_names)), site
                stream = Stream(prefix, *read, norm)
                if part == "feedforward":
                    readers = self._read(stream, self._sites[f"{prefix}ffn_norm.{number}"], [f"{prefix}ffn.{number}"])
                    (column,) = self._write(prefix, f"ffn_out.{number}", [f"ffn_out.{number}"])
                    self._inputs.append((column, readers[0]))
                else:
                    layer, source = sublayer_of(block, part), stream if part == "attention" else memory
                    assert source is not None
                    self._add_heads(layer, number, norm.removesuffix("norm") + "layer", stream, source)
                site = self._sites[f"{prefix}{PARTS[part][1]}.{number}"]
        return Stream(prefix, slice(start, len(self.writer_names)), site, f"{path}.norm")

    def _add_heads(self, layer: nn.Module, number: int, path: str, stream: Stream, source: Stream) -> None:
        """Add the heads of an attention layer with queries from one stream, and keys and values from another."""
        if not isinstance(layer, MultiHeadAttention):
            raise InputError(
                f"the attention of layer {number} is a {type(layer).__name__}, whose heads have no edges; "
                "use path_patching."
            )
        rows = []
        for kind, given in (("query", stream), ("key", source), ("value", source)):
            count = layer.n_heads if kind == "query" else layer.n_kv_heads
            name = f"{layer.prefix}{kind[0]}.{number}"
            into = Site(stream.stack + name, STREAM, self.model, f"{path}.{kind}", "output")
            rows.append(self._read(given, into, _heads(stream.stack + name, count), is_projected=True))
        columns = self._write(
            stream.stack, f"{layer.prefix}result.{number}", _heads(f"{layer.prefix}z.{number}", layer.n_heads)
        )
        for head, column in enumerate(columns):
            self._inputs += [(column, each[head * len(each) // layer.n_heads]) for each in rows]

    def _read(self, stream: Stream, into: Site, names: list[str], *, is_projected: bool = False) -> range:
        """Add readers, and return their rows."""
        rows = range(len(self.reader_names), len(self.reader_names) + len(names))
        self.reader_names += names
        self.readers.append(Readers(slice(rows.start, rows.stop), stream, into, is_projected))
        return rows

    def _write(self, stack: str, site: str, names: list[str]) -> range:
        """Add writers, and return their columns."""
        columns = range(len(self.writer_names), len(self.writer_names) + len(names))
        self.writer_names += [stack + name for name in names]
        self.writers.append(Writers(slice(columns.start, columns.stop), stack, self._sites[stack + site]))
        return columns


def _heads(name: str, count: int) -> list[str]:
    return [f"{name}[head={head}]" for head in range(count)]
