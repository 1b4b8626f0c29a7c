"""README's chat by LoRA, on a trivial task: what a model answers, and that it ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf

import glasshouse as gh
from glasshouse.layers import lora
from glasshouse.text.chat.tokens import chat_token_ids
from glasshouse.training import Run, train
from glasshouse.training.setup import model as model_setup

WORDS = ["red", "blue", "green", "rose", "house", "tree", "river", "stone", "light", "night"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, which has seen these words and no conversation, and with conversations."""
    folder, draw = tmp_path_factory.mktemp("chat"), random.Random(0)
    lines = (f"Say {word}. The {draw.choice(WORDS)} is {word}. " for word in draw.choices(WORDS, k=6000))
    (folder / "my.txt").write_text("".join(lines))
    chats = (
        [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]
        for word in draw.choices(WORDS, k=600)
    )
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in chats))
    pretrain(folder, "my", steps=3)
    return folder


def pretrain(folder: Path, name: str, steps: int) -> None:
    data = {"path": str(folder / "my.txt"), "vocab_size": 400, "seq_len": 64}
    table = {"model": {"preset": "tiny-decoder"}, "data": data, "train": settings(folder / name, steps)}
    train(Run.from_dict(table), progress=False)


def settings(out: Path, steps: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    chosen = {"steps": steps, "batch_tokens": 2048, "out": str(out), "probes": [], "sample_prompts": 0}
    return {**chosen, **more}


def fine_tune(folder: Path, name: str, steps: int = 2, **choice: Any) -> gh.training.Result:  # noqa: ANN401
    table = {
        "model": {"from": str(folder / "my" / "model")},
        "data": {"path": str(folder / "chat.jsonl"), "kind": "chat", "seq_len": 64},
        "train": settings(folder / name, steps, lr=1e-2, lora={"rank": 8, **choice}),
    }
    return train(Run.from_dict(table), progress=False)


def test_the_tokens_of_a_chat_are_new_to_a_base_model_alone(base: Path) -> None:
    _, tok = gh.load(base / "my")
    assert tok is not None
    assert tok.chat_template is None
    with pytest.raises(gh.InputError, match="has no chat template: its model was not trained on conversations"):
        tok.encode_chat([{"role": "user", "content": "a"}])

    fine_tune(base, "short")
    model, chatting = gh.load(base / "short")
    assert chatting is not None
    assert chatting.chat_template is not None
    assert chatting.fingerprint == tok.fingerprint
    table = json.loads((base / "short" / "adapter" / "adapter_config.json").read_text())
    new = sorted(chat_token_ids(chatting))
    assert [chatting.id_to_token(one) for one in new] == ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    assert set(map(tuple, table["trainable_token_indices"].values())) == {tuple(new)}
    before, after = (gh.load(base / one)[0].token_embedding.table.weight for one in ("my", "short"))
    # The template has a system message, but these conversations have none, so its row only gets the head's gradient.
    assert (before != after).any(1).nonzero().flatten().tolist() == new

    # What was trained on conversations has seen them: fine-tuned again, it keeps its rows.
    assert model_setup.new_tokens(chatting, chatting) == []
    assert model.spec == gh.load(base / "my")[0].spec


def test_the_adapter_is_pefts(base: Path) -> None:
    fine_tune(base, "adapted", modules_to_save=["stack.norm"])
    theirs = hf.AutoModelForCausalLM.from_pretrained(base / "my" / "model", dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(theirs, base / "adapted" / "adapter").eval()
    ids = torch.tensor([[3, 40, 41, 6, 5, 42, 6]])
    with torch.no_grad():
        expected = gh.load(base / "adapted")[0](ids)
        torch.testing.assert_close(with_adapter(ids).logits, expected, rtol=1e-4, atol=1e-5)
    ours, _ = gh.load(base / "my")
    gh.hub.load_adapter(ours, base / "adapted" / "adapter")
    torch.testing.assert_close(ours(ids), expected, rtol=1e-4, atol=1e-5)
    assert len(lora.trained_rows(ours)) in (1, 2)


@pytest.mark.long
def test_it_answers_and_ends_and_without_the_rows_hardly_answers(base: Path) -> None:
    """By README's recipe and settings; how many words two small layers learn to repeat is a matter of the seed."""
    pretrain(base, "trained", steps=150)
    chosen = (f"model.from={base / 'trained' / 'model'}", f"data.path={base / 'chat.jsonl'}", "train.lr=1e-2")
    sizes = ("data.seq_len=64", "train.batch_tokens=2048", "train.steps=300", "train.lora.rank=8")
    found = {}
    for name, rows in (("trained-rows", ()), ("frozen-rows", ("train.lora.token_ids=[300]",))):
        train(Run.load("finetune-chat", *chosen, *sizes, *rows, f"train.out={base / name}"), progress=False)
        found[name] = answers(base / name)
    assert {one.finish_reason for one in found["trained-rows"].values()} == {"stop"}
    right = {name: sum(one.text == word for word, one in told.items()) for name, told in found.items()}
    assert right["trained-rows"] >= 3 > right["frozen-rows"]


def answers(folder: Path) -> dict[str, gh.Completion]:
    model, tok = gh.load(folder)
    assert tok is not None
    end = tok.token_to_id("<|end|>")
    assert end is not None
    chats = {word: [{"role": "user", "content": f"Say {word}."}] for word in WORDS}
    ids = [tok.encode_chat(chat, add_generation_prompt=True).ids for chat in chats.values()]
    return dict(zip(WORDS, gh.generate(model, tok, ids, max_new_tokens=16, stop_token_ids=[end]), strict=True))
