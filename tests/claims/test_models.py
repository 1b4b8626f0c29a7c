"""Models: statements M1 to M6."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh

Grow = Callable[..., Any]
Watch = Callable[[nn.Module], list[Any]]
Agree = Callable[..., None]


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


# M1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vaswani-base", "bert-base"])
def test_m1_blocks_are_alike_and_share_no_weight(name: str) -> None:
    """All blocks of an encoder have the same parts and sizes, and no parameter in common; six in the original."""
    model = gh.build(gh.preset(name), device="meta")
    blocks = model.encoder.blocks if name == "vaswani-base" else model.stack.blocks
    assert len(blocks) == (6 if name == "vaswani-base" else 12)
    shapes = [{place: value.shape for place, value in block.named_parameters()} for block in blocks]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(str(block) == str(blocks[0]) for block in blocks)
    distinct = {id(parameter) for block in blocks for parameter in block.parameters()}
    assert len(distinct) == len(blocks) * len(shapes[0])


def test_m1_a_step_on_one_block_leaves_the_others(grow: Grow, watch: Watch) -> None:
    """Changing all of block 1's values leaves block 0's output as it was and changes its own."""
    model = grow("encoder", n_layers=3)
    calls = [watch(block) for block in model.stack.blocks]
    ids = random_ids(2, 5)
    model(ids)
    with torch.no_grad():
        for parameter in model.stack.blocks[1].parameters():
            parameter.mul_(1.5)
    model(ids)
    same = [torch.equal(seen[0].output, seen[1].output) for seen in calls]
    assert same == [True, False, False]
    # Block 2 still is the function it was: on its old input it gives its old output.
    assert torch.equal(model.stack.blocks[2](*calls[2][0].args), calls[2][0].output)


@pytest.mark.parametrize("position", ["none", "sinusoidal", "learned", "rotary", "relative", "alibi"])
def test_m1_every_position_sees_every_other(grow: Grow, watch: Watch, position: str) -> None:
    """In a single encoder layer, each position's output has a gradient at the vector of each position."""
    model = grow("encoder", n_layers=1, position=position)
    embedded = watch(model.token)
    logits = model(random_ids(1, 6))
    for i in range(6):
        pull = torch.randn(23, dtype=torch.float64)
        (gradient,) = torch.autograd.grad((logits[0, i] * pull).sum(), embedded[0].output, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).all()


# M2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["none", "sinusoidal", "learned", "rotary", "relative", "alibi"])
@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_m2_the_next_token_comes_from_those_before(grow: Grow, agree: Agree, kind: str, position: str) -> None:
    """Row i of a pass over all tokens is what the tokens up to i alone give, and every one of them counts."""
    model = grow(kind, position=position)
    source, ids = random_ids(2, 5), random_ids(2, 7)

    def call(target: Tensor) -> Tensor:
        return model(source, target) if kind == "seq2seq" else model(target)

    logits = call(ids)
    for i in range(7):
        agree(call(ids[:, : i + 1])[:, -1], logits[:, i])
    for j in range(7):
        other = ids.clone()
        other[:, j] = (ids[:, j] + 1) % 23
        assert (call(other)[:, -1] != logits[:, -1]).any(-1).all()


@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_m2_a_text_written_token_by_token(grow: Grow, kind: str) -> None:
    """Appending the likeliest token ten times writes a text of which one pass predicts each token from its prefix."""
    model = grow(kind)
    source, text = random_ids(3, 5), random_ids(3, 2)
    with torch.no_grad():
        for _ in range(10):
            logits = model(source, text) if kind == "seq2seq" else model(text)
            text = torch.cat([text, logits[:, -1].argmax(-1, keepdim=True)], 1)
        logits = model(source, text) if kind == "seq2seq" else model(text)
    assert text.shape == (3, 12)
    assert torch.equal(logits[:, 1:-1].argmax(-1), text[:, 2:])


def test_m2_the_source_is_felt_through_the_encoders_vectors_alone(grow: Grow, watch: Watch) -> None:
    """Every source token changes every target position; with the encoder's output put in place, no source does."""
    model = grow("seq2seq")
    source, target = random_ids(2, 5), random_ids(2, 4)
    encoder = watch(model.encoder)
    logits = model(source, target)
    for j in range(5):
        other = source.clone()
        other[:, j] = (source[:, j] + 1) % 23
        assert (model(other, target) != logits).any(-1).all()
    vectors = encoder[0].output
    handle = model.encoder.register_forward_hook(lambda *_: vectors)
    assert torch.equal(model((source + 1) % 23, target), logits)
    handle.remove()


# M3 ---------------------------------------------------------------------------------------------------------


def test_m3_parameters_of_the_original_by_arithmetic() -> None:
    """The module's parameters number what width 512, d_ff 2048, 37,000 tokens and 6 + 6 layers come to by hand."""
    d_model, d_ff, vocab_size, n_encoder, n_decoder = 512, 2048, 37_000, 6, 6
    embedding = vocab_size * d_model  # once: source, target and output share it; sinusoids have no parameter
    attention = 4 * d_model * d_model  # Wq, Wk, Wv, Wo, without biases, as in the paper's formulas
    feedforward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    norm = 2 * d_model
    encoder_block = attention + feedforward + 2 * norm
    decoder_block = 2 * attention + feedforward + 3 * norm
    expected = embedding + n_encoder * encoder_block + n_decoder * decoder_block

    model = gh.build(gh.preset("vaswani-base"), device="meta")
    counted = sum(parameter.numel() for parameter in model.parameters())
    print(f"\nM3 parameters of the original: {counted:,}")
    assert counted == expected
    assert gh.count_parameters(gh.preset("vaswani-base")) == expected
    # The paper rounds to 65 million, which leaves its vocabulary and biases open by a few percent.
    assert abs(counted / 65e6 - 1) < 0.05


def test_m3_the_parts_of_the_original() -> None:
    """Width 512, 8 heads of 64, 6 + 6 layers, and one table of 37,000 rows for source, target and logits."""
    model = gh.build(gh.preset("vaswani-base"), device="meta")
    heads: list[tuple[int, ...]] = []
    for block in [*model.encoder.blocks, *model.decoder.blocks]:
        attentions = [block.attention.layer, *([block.cross.layer] if hasattr(block, "cross") else [])]
        for attention in attentions:
            attention.attend.register_forward_pre_hook(lambda _, args: heads.append(tuple(args[0].shape)))
            assert attention.attend.scale == 1 / math.sqrt(64)
            assert attention.out.weight.shape == (512, 512)
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    assert model(ids, ids).shape == (1, 3, 37_000)
    assert heads == [(1, 8, 3, 64)] * (6 + 2 * 6)
    assert [tuple(p.shape) for p in model.parameters() if 37_000 in p.shape] == [(37_000, 512)]


def vaswani_by_hand(weights: dict[str, Tensor], source: Tensor, target: Tensor, n_layers: int) -> Tensor:
    """Run the paper's encoder-decoder, written out once more with plain products, on ids [S] and [T]."""
    table = weights["token_embedding.table.weight"]
    width, n_heads = table.shape[1], 8

    def embed(ids: Tensor) -> Tensor:
        rows = []
        for t, token in enumerate(ids.tolist()):
            angles = [t / 10_000 ** (2 * k / width) for k in range(width // 2)]
            code = torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=table.dtype)
            rows.append(table[token] * math.sqrt(width) + code)
        return torch.stack(rows)

    def attend(x: Tensor, memory: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, causal: bool) -> Tensor:
        heads = []
        for q, k, v in zip(
            *((a @ w.T).chunk(n_heads, -1) for a, w in ((x, wq), (memory, wk), (memory, wv))), strict=True
        ):
            scores = q @ k.T / math.sqrt(width / n_heads)
            if causal:
                for i in range(len(x)):
                    scores[i, i + 1 :] = -math.inf
            powers = scores.exp()
            heads.append(powers / powers.sum(-1, keepdim=True) @ v)
        return torch.cat(heads, -1) @ wo.T

    def norm(x: Tensor, place: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * weights[f"{place}.weight"] + weights[f"{place}.bias"]

    def block(x: Tensor, place: str, memory: Tensor | None) -> Tensor:
        parts = ("query", "key", "value", "out")
        own = [weights[f"{place}.attention.layer.{part}.weight"] for part in parts]
        x = norm(x + attend(x, x, *own, causal=memory is not None), f"{place}.attention.norm")
        if memory is not None:
            cross = [weights[f"{place}.cross.layer.{part}.weight"] for part in parts]
            x = norm(x + attend(x, memory, *cross, causal=False), f"{place}.cross.norm")
        up, down = f"{place}.feedforward.layer.up", f"{place}.feedforward.layer.down"
        hidden = (x @ weights[f"{up}.weight"].T + weights[f"{up}.bias"]).clamp(min=0)
        return norm(x + hidden @ weights[f"{down}.weight"].T + weights[f"{down}.bias"], f"{place}.feedforward.norm")

    memory = embed(source)
    for n in range(n_layers):
        memory = block(memory, f"encoder.blocks.{n}", None)
    x = embed(target)
    for n in range(n_layers):
        x = block(x, f"decoder.blocks.{n}", memory)
    return x @ table.T


def test_m3_the_original_written_out_once_more(agree: Agree) -> None:
    """A smaller original has the logits of the paper's equations worked once more in plain products."""
    model = gh.build(gh.preset("vaswani-base", vocab_size=23, d_model=32, n_layers=2), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        source, target = random_ids(5), random_ids(4)
        expected = vaswani_by_hand(model.state_dict(), source, target, n_layers=2)
        agree(model(source[None], target[None])[0], expected)


# M4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_m4_logits_are_the_vector_times_the_embedding_matrix(
    grow: Grow, watch: Watch, agree: Agree, tied: bool
) -> None:
    """Logit v is the dot product of the last vector and row v of the table, or, untied, of the head's own matrix."""
    model = grow("decoder", head={"kind": "next_token", "tied": tied})
    calls = watch(model.stack)
    logits = model(random_ids(2, 5))
    matrix = model.token_embedding.table.weight if tied else model.head.weight
    assert logits.shape == (2, 5, 23)
    for b in range(2):
        for i in range(5):
            agree(logits[b, i], torch.stack([torch.dot(calls[0].output[b, i], row) for row in matrix]))


def test_m4_p_fish_given_thanks_for_all_the() -> None:
    """Softmax makes logits P(next | prefix); over all continuations it sums to 1; trained, fish follows."""
    words = ["thanks", "for", "all", "the", "fish", "so", "long", "and"]
    model = gh.build(
        gh.preset("tiny-decoder", vocab_size=len(words), d_model=16, n_layers=1, n_heads=2, d_ff=16),
        dtype=torch.float64,
    )

    def chances(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            powers = [math.exp(logit) for logit in model(torch.tensor([prefix]))[0, -1].tolist()]
        return [power / sum(powers) for power in powers]

    *prefix, fish = range(5)
    text = torch.tensor([[*prefix, fish]])
    first = chances(prefix)
    # The chain rule: all texts that go on by two words, each with its product of chances.
    total = sum(first[a] * b for a in range(len(words)) for b in chances([*prefix, a]))
    assert abs(total - 1) < 1e-12

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1])[0], text[0, 1:]).backward()
        optimizer.step()
    trained = chances(prefix)
    print(f"\nM4 P(fish | thanks for all the): {first[fish]:.3f} at first, {trained[fish]:.3f} after 40 steps")
    assert abs(sum(trained) - 1) < 1e-12
    assert trained[fish] > 0.9 > 0.5 > first[fish]


# M5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1024, 2048, 4096])
@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal"])
def test_m5_long_contexts_train_and_run(position: str, length: int) -> None:
    """One step lowers the loss over the whole context, and the first token is felt at the last position."""
    spec = gh.preset(
        "gpt2", vocab_size=64, d_model=16, n_layers=1, n_heads=2, max_len=length, position=position,
        dropout=0.0, attention_dropout=0.0, embed_dropout=0.0, init={"kind": "normal", "std": 0.1},
    )  # fmt: skip
    model = gh.build(spec)
    ids = torch.randint(64, (1, length + 1))

    def loss() -> Tensor:
        return F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])

    before = loss()
    before.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    with torch.no_grad():
        after = loss()
        assert after < before
        logits = model(ids[:, :-1])
        ids[0, 0] = (ids[0, 0] + 1) % 64
        other = model(ids[:, :-1])
    assert logits.shape == (1, length, 64)
    assert logits.isfinite().all()
    assert not torch.equal(other[0, -1], logits[0, -1])


# M6 ---------------------------------------------------------------------------------------------------------


def test_m6_one_parallel_pass_equals_sequential_steps(agree: Agree) -> None:
    """S losses from one teacher-forced pass equal those of S steps, with their gradients; the ratio is printed."""
    length = 128
    spec = gh.preset("gpt2", vocab_size=64, d_model=64, n_layers=2, n_heads=4, max_len=length)
    model = gh.build(spec, dtype=torch.float64).eval()
    parameters = list(model.parameters())
    ids = torch.randint(64, (1, length + 1))

    def parallel() -> Tensor:
        return F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")

    def step(n: int) -> Tensor:
        return F.cross_entropy(model(ids[:, :n])[0, -1], ids[0, n])

    def train_in_parallel() -> tuple[Tensor, list[Tensor]]:
        losses = parallel()
        return losses.detach(), list(torch.autograd.grad(losses.mean(), parameters))

    def train_in_steps() -> tuple[Tensor, list[Tensor]]:
        losses, total = [], [torch.zeros_like(parameter) for parameter in parameters]
        for n in range(1, length + 1):
            loss = step(n)
            for part, gradient in zip(total, torch.autograd.grad(loss / length, parameters), strict=True):
                part += gradient
            losses.append(loss.detach())
        return torch.stack(losses), total

    def read_with_cache() -> Tensor:
        with torch.no_grad():
            cache = model.make_cache(1, length)
            logits = [model(ids[:, n : n + 1], cache=cache)[0, 0] for n in range(length)]
        return F.cross_entropy(torch.stack(logits), ids[0, 1:], reduction="none")

    (losses, gradients), seconds = best_of(5, train_in_parallel)
    (in_steps, summed), seconds_in_steps = best_of(1, train_in_steps)
    agree(in_steps, losses)
    for (name, _), one, other in zip(model.named_parameters(), summed, gradients, strict=True):
        if name.endswith(".key.bias"):  # it moves a row's scores alike: 0 but for rounding, beside gradients near 0.1
            assert max(one.abs().max(), other.abs().max()) < 1e-13
        else:
            agree(one, other)
    with torch.no_grad():
        read, reading = best_of(5, parallel)
    cached, reading_in_steps = best_of(1, read_with_cache)
    agree(cached, read)
    print(
        f"\nM6 {length} tokens, one thread: {seconds_in_steps / seconds:.0f} times as long in steps as in one "
        f"pass to train, {reading_in_steps / reading:.0f} times to read with a cache"
    )


def best_of(repeats: int, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the shortest time of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return result, min(times)
