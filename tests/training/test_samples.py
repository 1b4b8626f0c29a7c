"""Samples: what the model of each checkpoint writes, and a run that has them is a run that has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import KINDS, SAYING, Told, assert_same, killed, losses, table

import glasshouse as gh
from glasshouse.data.dataset import make_dataset
from glasshouse.errors import ConfigError
from glasshouse.generation import engine
from glasshouse.layers import lora
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES
from glasshouse.training import Run, samples, train
from glasshouse.training.loop import Result
from glasshouse.training.samples import MaskedPrompts, SourcePrompts, TextPrompts, make_prompts

LENGTH = 16  # of a row in `table`


def read(data_folder: Path, out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_folder / out / "samples.jsonl").read_text().splitlines()]


def chats(data_folder: Path, **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run on conversations, of which each says a number twice."""
    said = (
        [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": f"{number}!"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"{number}."},
        ]
        for number in range(10, 60)
    )
    (data_folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in said))
    settings = table(data_folder, **choices)
    settings["data"] |= {"path": str(data_folder / "chats.jsonl"), "kind": "chat", "seq_len": 48}
    return settings


# What they show


def slowly(model: Any, prompt: list[int], ends: set[int], most: int, source: list[int] | None = None) -> list[int]:  # noqa: ANN401
    """Greedy, by the whole sequence at each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + most and len(ids) < model.spec.max_len:
        given = [torch.tensor([one]) for one in ([source, ids] if source is not None else [ids])]
        with torch.no_grad():
            ids.append(int(model(*given)[0, -1].argmax()))
        if ids[-1] in ends:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def test_texts_are_begun_and_go_on(data_folder: Path) -> None:
    for number in range(8):
        (data_folder / f"{number}.txt").write_text(f"{number} {SAYING}" * 3)
    settings = table(
        data_folder, keep_checkpoints=100, ema=0.9, steps=6
    )  # the weights that learn are shown, not their average
    settings["data"] |= {"path": str(data_folder / "[0-9].txt"), "val_fraction": 0.3}
    result = train(Run.from_dict(settings))
    tok, held = result.datasets.tok, result.datasets.validation
    end = tok.special_id("eos")
    assert end is not None
    lines = read(data_folder)
    assert [line["step"] for line in lines] == [0, 3, 4, 6]  # 4: the best so far
    for line in lines[1:]:
        model, _ = gh.load(data_folder / "run" / "checkpoints" / f"step-{line['step']:08}")
        assert len(line["samples"]) == len(held) == 3
        for number, sample in enumerate(line["samples"]):
            begun = held.item(number)[0][: LENGTH // 2].tolist()  # 12 are too many for rows of 16
            assert sample["prompt"] == tok.decode(begun)
            (expected,) = gh.generate(model, tok, [[end, *begun]], 48, temperature=0.8, max_len=LENGTH)
            assert sample == {"prompt": tok.decode(begun), "text": expected.text}
    torch.manual_seed(0)
    new = gh.build(result.model.spec)
    (expected,) = gh.generate(new, tok, [[end, *held.item(0)[0][:8].tolist()]], 48, temperature=0.8, max_len=16)
    assert lines[0]["samples"][0]["text"] == expected.text
    assert lines[0] != lines[-1]


def test_sources_are_answered(data_folder: Path) -> None:
    result = train(Run.from_dict(table(data_folder, "seq2seq", steps=6)))
    tok, held = result.datasets.tok, result.datasets.validation
    end = tok.special_id("eos")
    assert end is not None
    model, _ = gh.load(data_folder / "run" / "checkpoints" / "step-00000006")
    found = read(data_folder)[-1]["samples"]
    assert len(found) == 3
    pairs = [[part.tolist() for part in held.item(number)] for number in range(3)]
    longest = max(len(target) for _, target in pairs)
    for (source, target), sample in zip(pairs, found, strict=True):
        written = slowly(model, [end], {end}, 2 * longest + 1, [*source, end])
        text = tok.decode(written, skip_special_tokens=True)
        assert sample == {"prompt": tok.decode(source), "text": text, "reference": tok.decode(target)}
        assert " ".join(sample["prompt"]) == sample["reference"]  # as the pairs are made


def test_the_first_turn_of_a_conversation_is_answered(data_folder: Path) -> None:
    result = train(Run.from_dict(chats(data_folder, steps=6)))
    tok = result.datasets.tok
    model, _ = gh.load(data_folder / "run" / "checkpoints" / "step-00000006")
    end = tok.token_to_id("<|end|>")
    assert end is not None
    for sample in read(data_folder)[-1]["samples"]:
        number = sample["reference"].removesuffix("!")
        asked = tok.encode_chat([{"role": "user", "content": f"{number}?"}], add_generation_prompt=True).ids
        assert sample["prompt"] == f"<|user|>{number}?<|end|><|assistant|>" == tok.decode(asked)
        most = 2 * len([*tok.encode(f"{number}!"), end]) + 1
        ends = {end, *result.model.spec.end_ids}
        assert sample["text"] == tok.decode(slowly(model, list(asked), ends, most), skip_special_tokens=True)


def test_what_is_hidden_is_filled_in(data_folder: Path) -> None:
    result = train(Run.from_dict(table(data_folder, "encoder", steps=6)))
    tok = result.datasets.tok
    mask = tok.special_id("mask")
    assert mask is not None
    model, _ = gh.load(data_folder / "run" / "checkpoints" / "step-00000006")
    held = make_dataset(model.spec, result.datasets.validation, batch_size=1, seq_len=LENGTH)
    for row, sample in enumerate(read(data_folder)[-1]["samples"]):
        batch = held.batch([row])
        assert sample["reference"] == tok.decode(batch.targets[0])
        targets, hidden = batch.targets[0].tolist(), batch.loss_mask[0].tolist()
        shown = [mask if hides else token for token, hides in zip(targets, hidden, strict=True)]
        assert sample["prompt"] == tok.decode(shown)
        assert mask in shown
        with torch.no_grad():
            said = model(torch.tensor([shown]), documents=batch.documents)[0].argmax(-1).tolist()
        filled = [said[at] if token == mask else token for at, token in enumerate(shown)]
        assert sample["text"] == tok.decode(filled)


def test_labels_are_not_written(data_folder: Path) -> None:
    settings = table(data_folder, "encoder", steps=2)
    settings["model"].pop("head")
    settings["data"] |= {"path": str(data_folder / "labels.tsv"), "kind": "labelled"}
    train(Run.from_dict(settings))
    assert (data_folder / "run" / "probes.jsonl").exists()
    assert not (data_folder / "run" / "samples.jsonl").exists()


def test_few_short_and_empty_texts(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    for name, text in (("a", ""), ("b", "be"), ("c", "to be, or not to be")):
        (tmp_path / f"{name}.txt").write_text(text)
    corpus = gh.data.prepare(str(tmp_path / "*.txt"), tok, tmp_path / "ids")
    held = gh.data.CausalLMDataset(corpus, 8)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    prompts = make_prompts(held, tok, length=256, count=5)
    assert isinstance(prompts, TextPrompts)
    assert [sample["prompt"] for sample in prompts.take(model)] == ["b", "to be, or "]
    assert make_prompts(held, tok, length=256, count=0) is None


# What they leave alone


def prompts_for(kind: str, data_folder: Path) -> tuple[gh.models.Model, Any]:
    """A model with dropout and adapters, that learns, and prompts for it."""
    tok = gh.Tokenizer.train(texts=[SAYING], vocab_size=270)
    form, path = ("pairs", "a.tsv") if kind == "seq2seq" else ("text", "a.txt")
    corpus = gh.data.prepare(data_folder / path, tok, data_folder / f"{kind}-ids", kind=form)  # type: ignore[arg-type]
    end = tok.special_id("eos")
    settings = {**KINDS[kind], "vocab_size": len(tok), "start_id": end, "end_ids": [end], "dropout": 0.3}
    model = gh.build(gh.preset(str(settings.pop("preset")), **settings)).train()
    model.head.eval()
    lora.attach(model, lora.LoRA(dropout=0.5))
    return model, make_prompts(make_dataset(model.spec, corpus, batch_size=1, seq_len=16), tok, 16, 2)


@pytest.mark.parametrize(
    ("kind", "form"), [("decoder", TextPrompts), ("seq2seq", SourcePrompts), ("encoder", MaskedPrompts)]
)
def test_a_model_is_left_as_it_was(kind: str, form: type, data_folder: Path) -> None:
    model, prompts = prompts_for(kind, data_folder)
    assert isinstance(prompts, form)

    def state() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [(weight.requires_grad, weight.grad is None) for weight in model.parameters()],
            [len(getattr(module, hooks)) for module in model.modules() for hooks in HOOK_ATTRIBUTES],
            torch.get_rng_state().tolist(),
        ]

    before, weights = state(), {name: weight.clone() for name, weight in model.state_dict().items()}
    found = prompts.take(model)
    assert state() == before
    assert all(weight.equal(weights[name]) for name, weight in model.state_dict().items())
    assert found == prompts.take(model)
    assert json.loads(json.dumps(found)) == found


def test_an_engine_captures_no_graph_and_copies_no_weights(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    real = engine.ModelRunner

    def passes(*arguments: Any, **choices: Any) -> Any:  # noqa: ANN401
        asked.append(choices)
        return real(*arguments, **choices)

    monkeypatch.setattr(engine, "ModelRunner", passes)
    for kind in ("decoder", "seq2seq"):
        model, prompts = prompts_for(kind, data_folder)
        prompts.take(model)
    assert asked == [{"weights": "own", "compile": False, "watched": True}] * 2


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("decoder", {"activation_checkpointing": True, "ema": 0.9}),
        ("encoder", {}),
        ("seq2seq", {"activation_checkpointing": True}),
    ],
)
def test_a_run_learns_the_same_with_and_without(kind: str, choices: dict[str, Any], data_folder: Path) -> None:
    train(Run.from_dict(table(data_folder, kind, **choices)))
    train(Run.from_dict(table(data_folder, kind, "without", sample_prompts=0, **choices)))
    assert_same(data_folder, "run", "without")
    assert not (data_folder / "without" / "samples.jsonl").exists()
    assert [line["step"] for line in read(data_folder)] == [0, 3, 4, 6, 8, 9, 12]


def test_how_many_may_change_when_a_run_goes_on(data_folder: Path) -> None:
    train(Run.from_dict(table(data_folder, "seq2seq", steps=3, sample_prompts=1)))
    before = read(data_folder)
    assert [len(line["samples"]) for line in before] == [1, 1]
    train(Run.from_dict(table(data_folder, "seq2seq", steps=3, sample_prompts=2)))
    assert read(data_folder) == before
    with pytest.raises(ConfigError, match=r"train\.samples is -1, but it must be 0 or more"):
        Run.from_dict(table(data_folder, samples=-1))


# Whatever happens


def test_killed_and_resumed_it_has_the_same_lines(data_folder: Path) -> None:
    train(Run.from_dict(table(data_folder, out="whole")))
    settings = table(data_folder)
    killed(settings)
    assert read(data_folder)[-1]["step"] < 12
    newest = max((data_folder / "run" / "checkpoints").glob("step-*"))
    (newest / "model.safetensors").write_bytes(b"")  # its line is there
    train(Run.from_dict(settings))
    assert_same(data_folder, "whole", "run")
    assert (data_folder / "run" / "samples.jsonl").read_bytes() == (
        data_folder / "whole" / "samples.jsonl"
    ).read_bytes()


def test_where_they_fail_it_is_said_once_and_training_goes_on(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:  # noqa: ANN401
        raise torch.OutOfMemoryError("CUDA out of memory\nand a page about it")

    monkeypatch.setattr(samples, "generate", fails)
    told = Told()
    result: Result = train(Run.from_dict(table(data_folder)), told)
    assert [text for text in told.said if text.startswith("no samples")] == [
        "no samples at step 0 (OutOfMemoryError: CUDA out of memory); training continues"
    ]
    assert result.steps == 12
    assert len((data_folder / "run" / "probes.jsonl").read_text().splitlines()) == 7
    monkeypatch.undo()
    train(Run.from_dict(table(data_folder, out="whole")))
    assert losses(data_folder) == losses(data_folder, "whole")
