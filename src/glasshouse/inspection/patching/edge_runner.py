"""Runs of a model with chosen edges, each reader being given the sum of what its edges carry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.editing import MAX_ELEMENTS, edit
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.parameters.linear_weights import weight_and_bias
from glasshouse.inspection.patching.activation_patching import check_same_lengths, metric_and_baselines
from glasshouse.inspection.patching.edge_graph import EdgeGraph, Readers, Writers
from glasshouse.inspection.patching.metrics import Metric, check_has_gradient, keep_last_logit
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import Selection, Site, unwrap_compiled, unwrap_model
from glasshouse.inspection.token_gradients import check_differentiable, midpoints

# Sites at which an edit would be overridden, or would change the stream beside its writers.
NOT_WRITTEN = re.compile(r"(encoder\.|decoder\.)?((cross_)?(resid_\w+|attn_out)\.\d+|final|\w*norm(_scale)?(\.\d+)?)")

Read = Callable[[Readers], Tensor]  # what readers are given, [B, readers, S, D]


class EdgeRunner:
    """Runs a model on a corrupted prompt with chosen edges; use it inside `eval_mode`."""

    def __init__(self, model: nn.Module, corrupted: CallArguments, clean: CallArguments) -> None:
        self.model, self.graph, self.corrupted = model, EdgeGraph(model), corrupted
        check_same_lengths(corrupted, clean)
        for site in hook_manager_of(model).edited_sites():
            if NOT_WRITTEN.fullmatch(site.name):
                raise InputError(
                    f"{site.name} is edited, but edges take apart what the norms read, which is not a sum of what is "
                    "written then; edit what is written (z, hidden, ffn_out, embed), or use path_patching."
                )
        self.corrupted_output, normal = self._record(corrupted)
        self.clean_output, other = self._record(clean)
        for one in self.graph.writers:
            if (here := normal[one.site.name].shape) != (there := other[one.site.name].shape):
                raise InputError(
                    f"{one.site.name} has shape {list(there)} on clean, but {list(here)} on corrupted; give prompts "
                    "of the same length."
                )
        # By stack, as source and target differ in length, [W, B, S, D]; zero for the writers of the other stack.
        self._normal = self._by_writer(normal)
        self._difference = {at: clean - self._normal[at] for at, clean in self._by_writer(other).items()}
        self._streams = {one.stream.site: normal[one.stream.site.name] for one in self.graph.readers}

    def run(self, edges: Tensor, patched: Tensor) -> Tensor:
        """Return the outputs on the corrupted prompt, [n, B, ...], for n choices of edges, [n, reader, writer].

        An edge of `edges` carries what its writer computes from its own edges, one of `patched` what it writes in the
        clean run, and every other edge what it writes in the corrupted run. Numbers between 0 and 1 are shares.
        """
        most = sum(one.numel() + 3 * one.shape[1:].numel() * self._n_heads for one in self._normal.values())
        step = max(1, MAX_ELEMENTS // max(most, self.corrupted_output.numel()))
        return torch.cat([self._run(*some) for some in zip(edges.split(step), patched.split(step), strict=True)])

    def _run(self, edges: Tensor, patched: Tensor) -> Tensor:
        count = len(edges)
        # What each writer writes more than in the corrupted run, filled as the pass goes on.
        change = {at: one.new_zeros(len(one), count, *one.shape[1:]) for at, one in self._normal.items()}
        edges, patched = (one.to(next(iter(change.values()))) for one in (edges, patched))

        def read(readers: Readers) -> Tensor:
            stream = readers.stream
            own, clean = edges[:, readers.rows, stream.columns], patched[:, readers.rows, stream.columns]
            given = torch.einsum("nrw,wnbsd->nbrsd", own, change[stream.stack][stream.columns])
            given += torch.einsum("nrw,wbsd->nbrsd", clean, self._difference[stream.stack][stream.columns])
            return (given + self._streams[stream.site][:, None]).flatten(0, 1)

        def write(writers: Writers, value: Tensor) -> None:
            own = _heads_first(value).unflatten(1, (count, -1))
            change[writers.stack][writers.columns] = own - self._normal[writers.stack][writers.columns][:, None]

        writing = [_hook(one.site, read=partial(write, one)) for one in self.graph.writers]
        with hook_manager_of(self.model).registered([*self._reading(read), *writing]):
            output = self.corrupted.repeated(count).run(self.model)
        return output.unflatten(0, (count, -1))

    @property
    def _n_heads(self) -> int:
        return unwrap_model(self.model).spec.n_heads

    def _record(self, prompt: CallArguments) -> tuple[Tensor, Recording]:
        """Return the output of a prompt, with what each writer writes and the streams that are read."""
        names = {one.site.name for one in self.graph.writers} | {one.stream.site.name for one in self.graph.readers}
        with record(self.model, *names) as seen:
            output = prompt.run(self.model)
        return output, seen

    def _by_writer(self, seen: Recording) -> dict[str, Tensor]:
        """Return what each writer writes, [W, B, S, D], by stack."""
        found: dict[str, Tensor] = {}
        for one in self.graph.writers:
            value = _heads_first(seen[one.site.name])
            if one.stack not in found:
                found[one.stack] = value.new_zeros(len(self.graph.writer_names), *value.shape[1:])
            found[one.stack][one.columns] = value
        return found

    def _reading(self, read: Read) -> Iterator[Hook]:
        """Yield hooks that give every reader what `read` returns."""
        for one in self.graph.readers:
            norm = unwrap_compiled(self.graph.model.get_submodule(one.stream.norm))
            into = partial(_project, one.into) if one.is_projected else _only
            yield _hook(one.into, edit=partial(_through, read, one, norm, into))


class EdgeScorer(EdgeRunner):
    """Finds the effect of edges on a metric: 0 as the corrupted run, 1 as the clean run.

    Use it inside `eval_mode`.
    """

    def __init__(
        self, model: nn.Module, corrupted: CallArguments, clean: CallArguments, metric: Metric | None
    ) -> None:
        if metric is None:
            keep_last_logit(model, corrupted, clean)
        super().__init__(model, corrupted, clean)
        self.metric, self.corrupted_baseline, self.clean_baseline = metric_and_baselines(
            model, (corrupted, clean), (self.corrupted_output, self.clean_output), metric
        )

    def effects(self, edges: Tensor, patched: Tensor) -> Tensor:
        """Return the effect of each of n choices of edges, as in `run`, [n]."""
        values = torch.stack([self.metric(output) for output in self.run(edges, patched)])
        return (values - self.corrupted_baseline) / (self.clean_baseline - self.corrupted_baseline)

    def attribution(self, steps: int) -> Tensor:
        """Return the estimated effect of patching each edge alone, [reader, writer]; NaN where there is none."""
        gain = torch.stack([self.slopes(share) for share in _shares(steps)]).mean(0)
        return self._relative(gain).cpu().where(self.graph.exists, torch.nan)

    def attribution_by_position(self, writer: str, reader: str, steps: int) -> Tensor:
        """Return the estimated effect of patching an edge at each position alone, [position]."""
        row, column = self.graph.place(writer, reader)
        (readers,) = [one for one in self.graph.readers if one.rows.start <= row < one.rows.stop]
        difference = self._difference[readers.stream.stack][column]
        gains = []
        for share in _shares(steps):
            (grad,) = [grad for one, grad in self._gradients(share) if one is readers]
            gains.append((grad[:, row - readers.rows.start] * difference).sum((0, 2)))
        return self._relative(torch.stack(gains).mean(0)).cpu()

    def _relative(self, gain: Tensor) -> Tensor:
        return gain.to(self.clean_baseline) / (self.clean_baseline - self.corrupted_baseline)

    def slopes(self, share: float) -> Tensor:
        """Return the gradient of the metric by what each reader is given, times each writer's difference, [R, W].

        The product is summed over the batch, positions and width.
        """
        found = torch.zeros(self.graph.exists.shape).to(self._difference[self.graph.writers[0].stack])
        for readers, grad in self._gradients(share):
            difference = self._difference[readers.stream.stack][readers.stream.columns]
            found[readers.rows, readers.stream.columns] = torch.einsum("brsd,wbsd->rw", grad, difference)
        return found

    def _gradients(self, share: float) -> list[tuple[Readers, Tensor]]:
        """Return the gradient of the metric by what readers are given, [B, readers, S, D].

        It is that on the corrupted prompt with its embeddings moved to the clean ones by `share` of the way.
        """
        check_differentiable(self.graph.model)
        streams: dict[Site, Tensor] = {}
        given: list[tuple[Readers, Tensor]] = []

        def read(readers: Readers) -> Tensor:
            count = readers.rows.stop - readers.rows.start
            # A tensor of its own for each reader.
            given.append((readers, streams[readers.stream.site][:, None].repeat(1, count, 1, 1)))
            return given[-1][1]

        seeing = [_hook(site, read=partial(streams.__setitem__, site)) for site in self._streams]
        start = {
            one.site.name: (self._normal[one.stack] + share * self._difference[one.stack])[one.columns.start]
            for one in self.graph.writers
            if one.site.name.endswith("embed")
        }
        with torch.enable_grad(), edit(self.model, {name: one.requires_grad_() for name, one in start.items()}):
            with hook_manager_of(self.model).registered([*seeing, *self._reading(read)]):
                value = check_has_gradient(self.metric(self.corrupted.run(self.model)))
            grads = torch.autograd.grad(value, [one for _, one in given], materialize_grads=True)
        return [(readers, grad) for (readers, _), grad in zip(given, grads, strict=True)]


def _shares(steps: int) -> list[float]:
    """Return midpoints of equal parts of the way between the prompts; of one step, the corrupted prompt."""
    return [0.0] if steps == 1 else midpoints(steps)


def _hook(
    site: Site, edit: Callable[[Tensor], Tensor] | None = None, read: Callable[[Tensor], None] | None = None
) -> Hook:
    return Hook(Selection(site, (slice(None),) * len(site.axes)), edit=edit, read=read)


def _heads_first(value: Tensor) -> Tensor:
    """Return what writers write, [W, B, S, D]: of heads [B, W, S, D] or of one writer [B, S, D]."""
    return value.transpose(0, 1) if value.dim() == 4 else value[None]


def _through(
    read: Read, readers: Readers, norm: nn.Module, into: Callable[[Tensor], Tensor], output: Tensor
) -> Tensor:
    """Return a module's output for what its readers are given."""
    return into(norm.forward(read(readers)))  # by `forward`, which bypasses hooks


def _only(x: Tensor) -> Tensor:
    """Return the input [B, S, D] of a single reader [B, 1, S, D]."""
    return x[:, 0]


def _project(site: Site, x: Tensor) -> Tensor:
    """Return the queries, keys or values of heads with an input each [B, H, S, D], as the projection does."""
    weight, bias = weight_and_bias(site.module, x)
    by_head = x @ weight.unflatten(0, (x.shape[1], -1)).transpose(1, 2)  # [B, H, S, d]
    return by_head.transpose(1, 2).flatten(-2) + bias
