"""M10: copying with recurrent encoder-decoders, without and with additive attention, and without recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from trained_claims.experiment import SMALL, BatchSampler, Result, build, evaluate, log, make_rng, train

LETTERS = 26
START = LETTERS  # the decoder's first input


class AdditiveAttention(nn.Module):
    """Attention as it was first added to recurrent models: score(s, h) = v . tanh(W s + U h)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(width, width, bias=False)
        self.of_source = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor, states: Tensor, keys: Tensor) -> Tensor:
        """Return the mean of the source's states [B, S, D], weighted for a state [B, D]; keys are U h [B, S, D]."""
        scores = self.score(torch.tanh(self.of_state(state)[:, None] + keys))  # [B, S, 1]
        return (scores.softmax(1) * states).sum(1)


class RecurrentSeq2Seq(nn.Module):
    """A GRU reads the source and another writes the target, given the source as one vector at each step.

    That vector is the encoder's last state or, with attention, a mean of all its states, weighted anew for each step.
    """

    def __init__(self, seed: int, attention: bool, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(LETTERS + 1, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.attention = AdditiveAttention(width) if attention else None
        self.decoder = nn.GRUCell(2 * width, width)
        self.head = nn.Linear(2 * width, LETTERS + 1)

    def forward(self, source: Tensor, target: Tensor, **_: None) -> Tensor:
        """Map letters [B, S] and the decoder's inputs [B, T] to logits [B, T, V]; all texts are of one length."""
        states, last = self.encoder(self.embedding(source))
        state = seen = last[0]
        keys = self.attention.of_source(states) if self.attention else None
        found = []
        for given in self.embedding(target).unbind(1):
            if self.attention is not None:
                seen = self.attention(state, states, keys)
            state = self.decoder(torch.cat([given, seen], -1), state)
            found.append(torch.cat([state, seen], -1))
        return self.head(torch.stack(found, 1))


def copies(rows: int, lengths: tuple[int, int]) -> BatchSampler:
    """Sample random letters, as many in each row of a batch, with themselves as the target."""

    def sample(rng: torch.Generator) -> Batch:
        length = int(torch.randint(lengths[0], lengths[1] + 1, (1,), generator=rng))
        source = torch.randint(LETTERS, (rows, length), generator=rng)
        ids = torch.cat([torch.full((rows, 1), START), source[:, :-1]], 1)
        return Batch(ids, source, torch.ones_like(source, dtype=torch.bool), source=source)

    return sample


KINDS = ("GRUs", "GRUs with attention", "attention alone")


def untrained(kind: str, seed: int, longest: int) -> nn.Module:
    """Return a model of a kind; their sizes are within an eighth of each other."""
    if kind == "attention alone":
        shape = SMALL | {"n_layers": 1, "n_encoder_layers": 1, "d_ff": 64, "max_len": longest}
        return build(seed, kind="seq2seq", vocab_size=LETTERS + 1, position="sinusoidal", **shape)
    return RecurrentSeq2Seq(seed, attention=kind == "GRUs with attention")


def by_length(seeds: int = 3, steps: int = 1000, longest: int = 20) -> Result:
    """Train on texts of all lengths, and return the share of letters that are copied, by length."""
    result, at_longest = Result(along="letters in the text"), {}
    lengths = [*range(2, longest + 1, 2)]
    for kind in KINDS:
        each: list[dict[int, float]] = []
        for seed in range(seeds):
            model = untrained(kind, seed, longest)
            train(model, copies(32, (1, longest)), steps, 3e-3, seed=seed)
            tests = {one: copies(200, (one, one))(make_rng(10**6 + one)) for one in lengths}
            each.append({one: evaluate(model, [batch])["accuracy"] for one, batch in tests.items()})
            log(f"M10: {kind}, seed {seed}: {' '.join(f'{one}:{right:.2f}' for one, right in each[-1].items())}")
        result.figures[f"{kind}: parameters"] = sum(one.numel() for one in model.parameters())
        at_longest[kind] = [one[lengths[-1]] for one in each]
        result.add(f"{kind}: letters right in the shortest texts", [one[lengths[0]] for one in each])
        result.add(f"{kind}: letters right in the longest texts", at_longest[kind])
        result.curves[kind] = [(float(one), sum(right[one] for right in each) / seeds) for one in lengths]
    gains = [a - b for a, b in zip(at_longest["GRUs with attention"], at_longest["GRUs"], strict=True)]
    result.figures["gain by attention in the longest texts, the least of the seeds"] = min(gains)
    result.figures["attention alone in the longest texts, the least of the seeds"] = min(
        at_longest["attention alone"]
    )
    return result
