"""Models: statements M1 to M6."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import first_of
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh

BuildModel = Callable[..., Any]
RecordCalls = Callable[[nn.Module], list[Any]]
AssertClose = Callable[..., None]


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


# M1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vaswani-base", "bert-base"])
def test_m1_blocks_are_identical_and_share_no_weights(name: str) -> None:
    """All blocks of an encoder have the same modules and sizes, and share no parameter; six in the original."""
    model = gh.build(gh.preset(name), device="meta")
    blocks = model.encoder.blocks if name == "vaswani-base" else model.stack.blocks
    assert len(blocks) == (6 if name == "vaswani-base" else 12)
    shapes = [{name: value.shape for name, value in block.named_parameters()} for block in blocks]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(str(block) == str(blocks[0]) for block in blocks)
    distinct = {id(parameter) for block in blocks for parameter in block.parameters()}
    assert len(distinct) == len(blocks) * len(shapes[0])


def test_m1_changing_one_block_does_not_change_others(build_model: BuildModel, record_calls: RecordCalls) -> None:
    """Changing all weights of block 1 changes its output and not that of block 0."""
    model = build_model("encoder", n_layers=3)
    calls = [record_calls(block) for block in model.stack.blocks]
    ids = random_ids(2, 5)
    model(ids)
    with torch.no_grad():
        for parameter in model.stack.blocks[1].parameters():
            parameter.mul_(1.5)
    model(ids)
    same = [torch.equal(first.output, second.output) for first, second in calls]
    assert same == [True, False, False]
    # Block 2 is the same function: its old input gives its old output.
    assert torch.equal(model.stack.blocks[2](*calls[2][0].args), calls[2][0].output)


@pytest.mark.parametrize("position", ["none", "sinusoidal", "learned", "rotary", "relative", "alibi"])
def test_m1_every_position_attends_to_every_other(
    build_model: BuildModel, record_calls: RecordCalls, position: str
) -> None:
    """In a single encoder layer, each position's output has a gradient at the embedding of each position."""
    model = build_model("encoder", n_layers=1, position=position)
    embedded = record_calls(model.token_embedding)
    logits = model(random_ids(1, 6))
    for i in range(6):
        pull = torch.randn(23, dtype=torch.float64)
        (gradient,) = torch.autograd.grad((logits[0, i] * pull).sum(), embedded[0].output, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).all()


# M2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "position"),
    first_of(
        [("decoder", "rotary"), ("decoder", "alibi"), ("seq2seq", "relative"), ("seq2seq", "sinusoidal")]
        + [("decoder", one) for one in ("none", "sinusoidal", "learned", "relative")]
        + [("seq2seq", one) for one in ("none", "learned", "rotary", "alibi")],
        4,
    ),
)
def test_m2_next_token_depends_on_the_prefix(
    build_model: BuildModel, assert_close: AssertClose, kind: str, position: str
) -> None:
    """Row i of a pass over all tokens equals a pass over the tokens up to i, and depends on each of them."""
    model = build_model(kind, position=position)
    source, ids = random_ids(2, 5), random_ids(2, 7)

    def call(target: Tensor) -> Tensor:
        return model(source, target) if kind == "seq2seq" else model(target)

    logits = call(ids)
    for i in range(7):
        assert_close(call(ids[:, : i + 1])[:, -1], logits[:, i])
    for j in range(7):
        other = ids.clone()
        other[:, j] = (ids[:, j] + 1) % 23
        assert (call(other)[:, -1] != logits[:, -1]).any(-1).all()


@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_m2_greedy_decoding_matches_one_pass(build_model: BuildModel, kind: str) -> None:
    """One pass over a text of ten greedily decoded tokens predicts each of them from its prefix."""
    model = build_model(kind)
    source, text = random_ids(3, 5), random_ids(3, 2)
    with torch.no_grad():
        for _ in range(10):
            logits = model(source, text) if kind == "seq2seq" else model(text)
            text = torch.cat([text, logits[:, -1].argmax(-1, keepdim=True)], 1)
        logits = model(source, text) if kind == "seq2seq" else model(text)
    assert text.shape == (3, 12)
    assert torch.equal(logits[:, 1:-1].argmax(-1), text[:, 2:])


def test_m2_source_acts_only_through_encoder_output(build_model: BuildModel, record_calls: RecordCalls) -> None:
    """Every source token changes every target position; with the encoder's output patched in, none does."""
    model = build_model("seq2seq")
    source, target = random_ids(2, 5), random_ids(2, 4)
    encoder = record_calls(model.encoder)
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


def test_m3_original_parameter_count_by_arithmetic() -> None:
    """The parameter count equals the one computed from d_model 512, d_ff 2048, 37,000 tokens and 6 + 6 layers."""
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
    # The paper rounds to 65 million; its vocabulary and biases are known only within a few percent.
    assert abs(counted / 65e6 - 1) < 0.05


def test_m3_original_architecture() -> None:
    """Width 512, 8 heads of 64, 6 + 6 layers, and one embedding of 37,000 rows for source, target and logits."""
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


def reference_vaswani(weights: dict[str, Tensor], source: Tensor, target: Tensor, n_layers: int) -> Tensor:
    """Run the paper's encoder-decoder, written with plain matmuls, on ids [S] and [T]."""
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

    def norm(x: Tensor, prefix: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]

    def block(x: Tensor, prefix: str, memory: Tensor | None) -> Tensor:
        parts = ("query", "key", "value", "out")
        own = [weights[f"{prefix}.attention.layer.{part}.weight"] for part in parts]
        x = norm(x + attend(x, x, *own, causal=memory is not None), f"{prefix}.attention.norm")
        if memory is not None:
            cross = [weights[f"{prefix}.cross.layer.{part}.weight"] for part in parts]
            x = norm(x + attend(x, memory, *cross, causal=False), f"{prefix}.cross.norm")
        up, down = f"{prefix}.feedforward.layer.up", f"{prefix}.feedforward.layer.down"
        hidden = (x @ weights[f"{up}.weight"].T + weights[f"{up}.bias"]).clamp(min=0)
        return norm(x + hidden @ weights[f"{down}.weight"].T + weights[f"{down}.bias"], f"{prefix}.feedforward.norm")

    memory = embed(source)
    for n in range(n_layers):
        memory = block(memory, f"encoder.blocks.{n}", None)
    x = embed(target)
    for n in range(n_layers):
        x = block(x, f"decoder.blocks.{n}", memory)
    return x @ table.T


def test_m3_original_matches_reference_equations(assert_close: AssertClose) -> None:
    """A smaller model of the original architecture has the logits of the paper's equations in plain matmuls."""
    model = gh.build(gh.preset("vaswani-base", vocab_size=23, d_model=32, n_layers=2), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        source, target = random_ids(5), random_ids(4)
        expected = reference_vaswani(model.state_dict(), source, target, n_layers=2)
        assert_close(model(source[None], target[None])[0], expected)


# M4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_m4_logits_are_hidden_state_times_embedding_matrix(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, tied: bool
) -> None:
    """Logit v is the dot product of the last hidden state and row v of the embedding, or of the untied head."""
    model = build_model("decoder", head={"kind": "next_token", "tied": tied})
    calls = record_calls(model.stack)
    logits = model(random_ids(2, 5))
    matrix = model.token_embedding.table.weight if tied else model.head.weight
    assert logits.shape == (2, 5, 23)
    for b in range(2):
        for i in range(5):
            assert_close(logits[b, i], torch.stack([torch.dot(calls[0].output[b, i], row) for row in matrix]))


def test_m4_p_fish_given_thanks_for_all_the() -> None:
    """Softmax of the logits is P(next | prefix); it sums to 1 over all continuations; trained, fish follows."""
    words = ["thanks", "for", "all", "the", "fish", "so", "long", "and"]
    model = gh.build(
        gh.preset("tiny-decoder", vocab_size=len(words), d_model=16, n_layers=1, n_heads=2, d_ff=16),
        dtype=torch.float64,
    )

    def probabilities(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            powers = [math.exp(logit) for logit in model(torch.tensor([prefix]))[0, -1].tolist()]
        return [power / sum(powers) for power in powers]

    *prefix, fish = range(5)
    text = torch.tensor([[*prefix, fish]])
    first = probabilities(prefix)
    # The chain rule: all continuations by two words, each with its product of probabilities.
    total = sum(first[a] * b for a in range(len(words)) for b in probabilities([*prefix, a]))
    assert abs(total - 1) < 1e-12

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1])[0], text[0, 1:]).backward()
        optimizer.step()
    trained = probabilities(prefix)
    print(f"\nM4 P(fish | thanks for all the): {first[fish]:.3f} untrained, {trained[fish]:.3f} after 40 steps")
    assert abs(sum(trained) - 1) < 1e-12
    assert trained[fish] > 0.9 > 0.5 > first[fish]


# M5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("length", [1024, 2048, 4096])
@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal"])
def test_m5_long_contexts_train_and_run(position: str, length: int) -> None:
    """One step lowers the loss over the whole context, and the first token affects the last position."""
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


def test_m6_one_parallel_pass_equals_sequential_steps(assert_close: AssertClose) -> None:
    """S losses and gradients of one teacher-forced pass equal those of S sequential steps; prints the time ratio."""
    length = 64
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

    def decode_with_cache() -> Tensor:
        with torch.no_grad():
            cache = model.make_cache(1, length)
            logits = [model(ids[:, n : n + 1], cache=cache)[0, 0] for n in range(length)]
        return F.cross_entropy(torch.stack(logits), ids[0, 1:], reduction="none")

    (losses, gradients), seconds = best_of(5, train_in_parallel)
    (in_steps, summed), seconds_in_steps = best_of(1, train_in_steps)
    assert_close(in_steps, losses)
    for (name, _), one, other in zip(model.named_parameters(), summed, gradients, strict=True):
        if name.endswith(
            ".key.bias"
        ):  # it shifts all scores of a row: 0 up to rounding, where other gradients are near 0.1
            assert max(one.abs().max(), other.abs().max()) < 1e-13
        else:
            assert_close(one, other)
    with torch.no_grad():
        full, full_seconds = best_of(5, parallel)
    cached, cached_seconds = best_of(1, decode_with_cache)
    assert_close(cached, full)
    print(
        f"\nM6 {length} tokens, one thread: sequential training takes {seconds_in_steps / seconds:.0f} times as "
        f"long as one pass, decoding with a KV cache {cached_seconds / full_seconds:.0f} times"
    )


def best_of(repeats: int, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the shortest time of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return result, min(times)
