"""Model surgery: kept weights are bit-equal, new ones computed by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.layers import lora
from glasshouse.models import Model, with_classifier, with_tokenizer
from glasshouse.text.bpe.byte_level import BYTE_TO_UNICODE

TEXT = "a rose is a rose, and a nose is a nose"
SMALL, LARGE = (gh.Tokenizer.train(texts=[TEXT], vocab_size=size) for size in (266, 272))
HEADS = {
    "decoder": [
        {"kind": "next_token", "tied": tied, "bias": bias} for tied in (True, False) for bias in (True, False)
    ],
    "encoder": [{"kind": "masked_token", "tied": tied} for tied in (True, False)] + [{"kind": "pooled"}],
    "seq2seq": [{"kind": "next_token", "tied": tied} for tied in (True, False)],
}
EVERY = [(kind, head) for kind, heads in HEADS.items() for head in heads]
every_head = pytest.mark.parametrize(("kind", "head"), EVERY, ids=str)


def make(kind: str, tok: gh.Tokenizer = SMALL, **settings: object) -> Model:
    torch.manual_seed(0)
    fields = {"vocab_size": len(tok), "value_embeddings": True, **settings}
    model = gh.build(gh.preset(f"tiny-{kind}", **fields), dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    model.tokenizer_fingerprint = tok.fingerprint
    return model


def run(model: Model, ids: list[int]) -> Tensor:
    row = torch.tensor([ids])
    with torch.no_grad():
        return model(row, row[:, :3])[0] if model.spec.kind == "seq2seq" else model(row)[0]


def per_token(model: Model) -> list[Tensor]:
    """Return every tensor with a row per token."""
    return [weight for weight in model.parameters() if len(weight) == model.spec.vocab_size]


def edited(
    tok: gh.Tokenizer, folder: Path, edit: Callable[[dict[str, object]], None], **roles: str | None
) -> gh.Tokenizer:
    """Return a tokenizer loaded from the modified files of another."""
    tok.save(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    edit(document)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return gh.Tokenizer.from_json(json.dumps(document), config | {f"{role}_token": t for role, t in roles.items()})


def renamed(tok: gh.Tokenizer, folder: Path, names: dict[str, str], **roles: str | None) -> gh.Tokenizer:
    def edit(document: dict[str, object]) -> None:
        text = json.dumps(document)
        for one, other in names.items():
            text = text.replace(json.dumps(one), json.dumps(other))
        document |= json.loads(text)

    return edited(tok, folder, edit, **roles)


def permuted(tok: gh.Tokenizer, folder: Path) -> tuple[gh.Tokenizer, list[int]]:
    """Return a tokenizer with the same tokens under other ids, and the new id of each old one."""
    order = torch.randperm(len(tok), generator=torch.Generator().manual_seed(1)).tolist()

    def edit(document: dict) -> None:
        document["model"]["vocab"] = {token: order[number] for token, number in document["model"]["vocab"].items()}
        for token in document["added_tokens"]:
            token["id"] = order[token["id"]]
        document["added_tokens"].sort(key=lambda token: token["id"])

    return edited(tok, folder, edit), order


@pytest.mark.few(3)
@every_head
def test_the_same_tokenizer_changes_nothing(kind: str, head: dict[str, object]) -> None:
    model = make(kind, head=head)
    grafted = with_tokenizer(model, SMALL, SMALL)
    ids = SMALL.encode(TEXT)
    assert torch.equal(run(grafted, ids), run(model, ids))
    assert type(grafted) is type(model)
    assert grafted.training is model.training is False
    for (name, one), (other_name, two) in zip(grafted.named_parameters(), model.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, two)
        assert one.data_ptr() != two.data_ptr()
        assert one.dtype == two.dtype == torch.float64
        assert one.requires_grad


@pytest.mark.few(3)
@every_head
def test_other_ids_for_the_same_tokens(kind: str, head: dict[str, object], tmp_path: Path) -> None:
    new, order = permuted(SMALL, tmp_path)
    assert new.encode(TEXT) == [order[number] for number in SMALL.encode(TEXT)]
    model = make(kind, head=head, start_id=3, end_ids=[0, 6], pad_id=2)
    grafted = with_tokenizer(model, SMALL, new)
    assert per_token(model)
    for one, two in zip(per_token(grafted), per_token(model), strict=True):
        assert torch.equal(one[order], two)
    theirs, ours = run(model, SMALL.encode(TEXT)), run(grafted, new.encode(TEXT))
    ours = ours[:, order] if head["kind"] != "pooled" else ours
    assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max()  # a sum of 64 may be taken in another order
    s = grafted.spec
    assert (s.start_id, s.end_ids, s.pad_id) == (order[3], (order[0], order[6]), order[2])
    assert grafted.tokenizer_fingerprint == new.fingerprint


@pytest.mark.few(3)
@every_head
def test_more_merges(kind: str, head: dict[str, object]) -> None:
    assert [LARGE.id_to_token(number) for number in range(266)] == [
        SMALL.id_to_token(number) for number in range(266)
    ]
    model = make(kind, head=head)
    grafted = with_tokenizer(model, SMALL, LARGE)
    assert grafted.spec.vocab_size == 272
    for one, two in zip(per_token(grafted), per_token(model), strict=True):
        assert torch.equal(one[:266], two)
        for number in range(266, 272):
            pieces = SMALL.encode(LARGE.decode([number]), add_special_tokens=False)
            assert len(pieces) > 1
            mean = torch.stack([two[piece] for piece in pieces]).sum(0) / len(pieces)
            assert (one[number] - mean).abs().max() < 1e-15 * len(pieces) * two.abs().max()
    ids = SMALL.encode(TEXT)  # the new one has other ids, but these still mean the same
    theirs, ours = run(model, ids), run(grafted, ids)
    ours = ours if head["kind"] == "pooled" else ours[:, :266]
    assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max()


def test_a_new_token_by_hand() -> None:
    old, new = (gh.Tokenizer.train(texts=["to be"], vocab_size=size) for size in (263, 264))
    assert new.id_to_token(263) == "be"
    model = make("decoder", old)
    with torch.no_grad():
        model.token_embedding.table.weight[old.token_to_id("b")] = 3.0
        model.token_embedding.table.weight[old.token_to_id("e")] = 5.0
    assert with_tokenizer(model, old, new).token_embedding.table.weight[263].tolist() == [4.0] * 64


def test_fewer_tokens_and_back() -> None:
    model = make("decoder", LARGE)
    shrunk = with_tokenizer(model, LARGE, SMALL)
    for one, two in zip(per_token(shrunk), per_token(model), strict=True):
        assert torch.equal(one, two[:266])
    again = with_tokenizer(shrunk, SMALL, LARGE)
    assert torch.equal(again.token_embedding.table.weight[:266], model.token_embedding.table.weight[:266])


def test_special_tokens_by_role_then_by_nothing(tmp_path: Path) -> None:
    names = {"<|endoftext|>": "</s>", "<|mask|>": "[MASK]", "<|user|>": "[USER]"}
    new = renamed(SMALL, tmp_path, names, bos="</s>", eos="</s>", mask="[MASK]")
    model = make("decoder", start_id=0, end_ids=[0, 4], pad_id=1)
    table = model.token_embedding.table.weight
    grafted = with_tokenizer(model, SMALL, new)
    assert torch.equal(grafted.token_embedding.table.weight[:4], table[:4])
    assert (grafted.token_embedding.table.weight[4] - table.sum(0) / 266).abs().max() < 1e-14 * table.abs().max()
    assert torch.equal(grafted.token_embedding.table.weight[5:], table[5:])
    assert (grafted.spec.start_id, grafted.spec.end_ids, grafted.spec.pad_id) == (0, (0,), 1)  # [USER] is another


def test_one_token_with_the_roles_of_two(tmp_path: Path) -> None:
    names = {"<|endoftext|>": "<s>", "<|end|>": "</s>"}
    old = renamed(SMALL, tmp_path, names, bos="<s>", eos="</s>")
    model = make("decoder", old)
    grafted = with_tokenizer(model, old, SMALL)
    both = model.token_embedding.table.weight[[0, 6]]
    assert torch.equal(grafted.token_embedding.table.weight[0], (both[0] + both[1]) / 2)
    assert (grafted.spec.start_id, grafted.spec.end_ids, grafted.spec.pad_id) == (0, (0,), 1)  # the new one's


def words(*tokens: str) -> gh.Tokenizer:
    model = {"type": "WordLevel", "vocab": {token: number for number, token in enumerate(tokens)}, "unk_token": "?"}
    return gh.Tokenizer.from_json(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )


def test_letters_that_are_bytes_elsewhere() -> None:
    old, new = words("?", "rose", "Ã"), SMALL  # Ã is how a byte-level vocabulary writes the byte C3
    model = make("encoder", old)
    table = with_tokenizer(model, old, new).token_embedding.table.weight
    mean = model.token_embedding.table.weight.mean(0)
    assert torch.equal(table[new.token_to_id("Ã")], mean)  # no text by itself
    assert torch.equal(
        table[new.token_to_id("a")], model.token_embedding.table.weight[0]
    )  # a word that the old one did not know
    back = with_tokenizer(make("encoder", new), new, old).token_embedding.table.weight
    theirs = make("encoder", new).token_embedding.table.weight
    assert torch.equal(
        back[2], (theirs[new.token_to_id(BYTE_TO_UNICODE[0xC3])] + theirs[new.token_to_id(BYTE_TO_UNICODE[0x83])]) / 2
    )


def test_padded_vocabulary_rows() -> None:
    model = make("decoder", vocab_size=300)  # as published ones are rounded up
    gap = gh.Tokenizer.from_json(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 2}, "unk_token": "?"}})
    )
    table = with_tokenizer(model, SMALL, gap).token_embedding.table.weight
    assert table.shape == (3, 64)
    assert torch.equal(
        table[1], model.token_embedding.table.weight[:266].mean(0)
    )  # of the tokens, not of the spare rows
    assert torch.equal(table[2], model.token_embedding.table.weight[SMALL.token_to_id("a")])


def test_the_generation_config_is_dropped() -> None:
    model = make("decoder")
    model.extra_files = {"generation_config.json": {"suppress_tokens": [5]}, "modules.json": []}
    assert with_tokenizer(model, SMALL, LARGE).extra_files == {"modules.json": []}
    assert model.extra_files.keys() == {"generation_config.json", "modules.json"}


def test_a_resized_model_is_saved_and_trains(tmp_path: Path) -> None:
    grafted = with_tokenizer(make("decoder", head={"kind": "next_token", "tied": False}), SMALL, LARGE)
    gh.save(grafted, LARGE, tmp_path / "model")
    again, tok = gh.load(tmp_path / "model")
    assert tok is not None
    assert again.spec == grafted.spec
    ids = LARGE.encode(TEXT)
    assert torch.equal(run(again, ids), run(grafted, ids))
    row = torch.tensor([ids])
    torch.nn.functional.cross_entropy(grafted(row)[0, :-1], row[0, 1:]).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in grafted.parameters())


@every_head
def test_a_classifier_keeps_the_trunk(kind: str, head: dict[str, object]) -> None:
    model = make(kind, head=head).train()
    if kind == "seq2seq":
        with pytest.raises(
            InputError, match="the model is a seq2seq, but a classifier needs an encoder or a decoder"
        ):
            with_classifier(model, 5)
        return
    torch.manual_seed(7)
    labelled = with_classifier(model, 5)
    trunk = {name: weight for name, weight in model.named_parameters() if not name.startswith("head.")}
    kept = {name: weight for name, weight in labelled.named_parameters() if not name.startswith("head.")}
    assert trunk.keys() == kept.keys()
    for name, weight in trunk.items():
        assert torch.equal(weight, kept[name])
        assert weight.data_ptr() != kept[name].data_ptr()
    assert labelled.tokenizer_fingerprint == model.tokenizer_fingerprint
    assert labelled.training
    pooling = "mean" if head["kind"] == "pooled" else "last" if kind == "decoder" else "first"
    assert (labelled.spec.head.kind, labelled.spec.head.pooling) == ("sequence_classification", pooling)
    # Normal with deviation 0.02, biases at 0; drawn anew, and the same from the same seed.
    assert labelled.head.classifier.weight.shape == (5, 64)
    assert 0.015 < labelled.head.classifier.weight.std() < 0.025
    bias = labelled.head.classifier.bias
    if kind == "decoder" and pooling == "last":  # one linear layer without a bias, as transformers has it
        assert bias is None
        assert sum(weight.numel() for weight in labelled.head.parameters()) == 5 * 64
    else:
        assert not bias.any()
    again = with_classifier(model, 5)
    assert not torch.equal(again.head.classifier.weight, labelled.head.classifier.weight)
    torch.manual_seed(7)
    again = with_classifier(model, 5)
    assert torch.equal(again.head.classifier.weight, labelled.head.classifier.weight)


@every_head
def test_a_token_classifier_keeps_the_trunk(kind: str, head: dict[str, object]) -> None:
    model = make(kind, head=head)
    if kind != "encoder":
        with pytest.raises(InputError, match="classifier needs an encoder"):
            with_classifier(model, 5, per_token=True)
        return
    tagging = with_classifier(model, 5, per_token=True)
    assert (tagging.spec.head.kind, tagging.spec.head.n_labels) == ("token_classification", 5)
    ids = torch.tensor([[10, 11, 12]])
    vectors = gh.build(dataclasses.replace(model.spec, head=gh.spec.NoHead()), dtype=torch.float64)
    vectors.load_state_dict({n: w for n, w in model.state_dict().items() if not n.startswith("head.")})
    expected = vectors.eval()(ids) @ tagging.head.classifier.weight.T + tagging.head.classifier.bias
    assert torch.allclose(tagging.eval()(ids), expected)


def test_a_classifier_trains() -> None:
    model = with_classifier(with_classifier(make("encoder", dropout=0.0, embed_dropout=0.0), 2), 3)
    assert model.spec.head.n_labels == 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids, labels = torch.tensor([[10, 11], [12, 13], [14, 15]]), torch.tensor([2, 0, 1])
    losses = []
    for _ in itertools.repeat(None, 60):
        loss = torch.nn.functional.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 1.0 < losses[0]
    assert model(ids).argmax(1).equal(labels)


def test_invalid_arguments_are_refused() -> None:
    model = make("decoder")
    with pytest.raises(InputError, match="the old tokenizer has 272 tokens, but vocab_size is 266"):
        with_tokenizer(model, LARGE, SMALL)
    other = gh.Tokenizer.train(texts=["quite another text"], vocab_size=266)
    with pytest.raises(InputError, match=r"the old tokenizer .* is not the one that the model was trained with"):
        with_tokenizer(model, other, LARGE)
    lora.attach(model, lora.LoRA(rank=2))
    with pytest.raises(InputError, match=r"query is LoRALinear, but the spec has Linear\(.*LoRA: by lora.merge"):
        with_tokenizer(model, SMALL, LARGE)
