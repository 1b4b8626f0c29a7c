"""Samples: text generated at each checkpoint, without an effect on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import first_of
from runs import KINDS, SAYING, RecordingReporter, assert_same, killed, logged_table, losses, table

import glasshouse as gh
from glasshouse.errors import ConfigError
from glasshouse.generation.engine import engine
from glasshouse.layers import lora
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES
from glasshouse.objectives import make_dataset
from glasshouse.training import Run, train
from glasshouse.training.logging import checkpoint_log
from glasshouse.training.logging.checkpoint_log import MaskedPrompts, SourcePrompts, TextPrompts, make_prompts
from glasshouse.training.result import Result

pytestmark = pytest.mark.slow

LENGTH = 16  # of a sequence in `table`


def read(data_folder: Path, out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_folder / out / "samples.jsonl").read_text().splitlines()]


def chats(data_folder: Path, **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run on conversations that each repeat a number."""
    conversations = (
        [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": f"{number}!"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"{number}."},
        ]
        for number in range(10, 60)
    )
    (data_folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    settings = logged_table(data_folder, **choices)
    settings["data"] |= {"path": str(data_folder / "chats.jsonl"), "kind": "chat", "seq_len": 48}
    return settings


# Content


def greedy(
    model: Any,  # noqa: ANN401
    prompt: list[int],
    ends: set[int],
    max_new_tokens: int,
    source: list[int] | None = None,
) -> list[int]:
    """Greedy decoding without a KV cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_new_tokens and len(ids) < model.spec.max_len:
        given = [torch.tensor([one]) for one in ([source, ids] if source is not None else [ids])]
        with torch.no_grad():
            ids.append(int(model(*given)[0, -1].argmax()))
        if ids[-1] in ends:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def test_text_prompts_are_continued(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_log, "NEW_TOKENS", 48)
    for number in range(8):
        (data_folder / f"{number}.txt").write_text(f"{number} {SAYING}" * 3)
    settings = logged_table(
        data_folder, keep_checkpoints=100, ema=0.9, steps=6
    )  # samples use the weights, not their EMA
    settings["data"] |= {"path": str(data_folder / "[0-9].txt"), "val_fraction": 0.3}
    result = train(Run.from_dict(settings))
    tok, validation = result.datasets.tok, result.datasets.validation
    end = tok.special_id("eos")
    assert end is not None
    lines = read(data_folder)
    assert [line["step"] for line in lines] == [0, 3, 4, 6]  # 4: the best so far
    for line in lines[1:]:
        model, _ = gh.load(data_folder / "run" / "checkpoints" / f"step-{line['step']:08}")
        assert len(line["samples"]) == len(validation) == 3
        for number, sample in enumerate(line["samples"]):
            prompt = validation.item(number)[0][: LENGTH // 2].tolist()  # 12 are too many for sequences of 16
            assert sample["prompt"] == tok.decode(prompt)
            (expected,) = gh.generate(model, tok, [[end, *prompt]], 48, temperature=0.8, max_len=LENGTH)
            assert sample == {"prompt": tok.decode(prompt), "text": expected.text}
    torch.manual_seed(0)
    new = gh.build(result.model.spec)
    (expected,) = gh.generate(new, tok, [[end, *validation.item(0)[0][:8].tolist()]], 48, temperature=0.8, max_len=16)
    assert lines[0]["samples"][0]["text"] == expected.text
    assert lines[0] != lines[-1]


@pytest.mark.long
def test_sources_are_translated(data_folder: Path) -> None:
    result = train(Run.from_dict(logged_table(data_folder, "seq2seq", steps=6)))
    tok, validation = result.datasets.tok, result.datasets.validation
    end = tok.special_id("eos")
    assert end is not None
    model, _ = gh.load(data_folder / "run" / "checkpoints" / "step-00000006")
    found = read(data_folder)[-1]["samples"]
    assert len(found) == 3
    pairs = [[part.tolist() for part in validation.item(number)] for number in range(3)]
    longest = max(len(target) for _, target in pairs)
    for (source, target), sample in zip(pairs, found, strict=True):
        generated = greedy(model, [end], {end}, 2 * longest + 1, [*source, end])
        text = tok.decode(generated, skip_special_tokens=True)
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
        prompt = tok.encode_chat([{"role": "user", "content": f"{number}?"}], add_generation_prompt=True).ids
        assert sample["prompt"] == f"<|user|>{number}?<|end|><|assistant|>" == tok.decode(prompt)
        max_new_tokens = 2 * len([*tok.encode(f"{number}!"), end]) + 1
        ends = {end, *result.model.spec.end_ids}
        assert sample["text"] == tok.decode(
            greedy(model, list(prompt), ends, max_new_tokens), skip_special_tokens=True
        )


def test_masked_tokens_are_predicted(data_folder: Path) -> None:
    result = train(Run.from_dict(logged_table(data_folder, "encoder", steps=6)))
    tok = result.datasets.tok
    mask = tok.special_id("mask")
    assert mask is not None
    model, _ = gh.load(data_folder / "run" / "checkpoints" / "step-00000006")
    val_samples = make_dataset(model.spec, result.datasets.validation, batch_size=1, seq_len=LENGTH)
    for row, sample in enumerate(read(data_folder)[-1]["samples"]):
        batch = val_samples.batch([row])
        assert sample["reference"] == tok.decode(batch.targets[0])
        targets, masked = batch.targets[0].tolist(), batch.loss_mask[0].tolist()
        inputs = [mask if hides else token for token, hides in zip(targets, masked, strict=True)]
        assert sample["prompt"] == tok.decode(inputs)
        assert mask in inputs
        with torch.no_grad():
            predicted = model(torch.tensor([inputs]), documents=batch.documents)[0].argmax(-1).tolist()
        filled = [predicted[at] if token == mask else token for at, token in enumerate(inputs)]
        assert sample["text"] == tok.decode(filled)


def test_classification_has_no_samples(data_folder: Path) -> None:
    settings = logged_table(data_folder, "encoder", steps=2)
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
    val_samples = gh.data.CausalLMDataset(corpus, 8)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    prompts = make_prompts(val_samples, tok, length=256, count=5)
    assert isinstance(prompts, TextPrompts)
    assert [sample["prompt"] for sample in prompts.take(model)] == ["b", "to be, or "]
    assert make_prompts(val_samples, tok, length=256, count=0) is None


# No side effects


def prompts_for(kind: str, data_folder: Path) -> tuple[gh.models.Model, Any]:
    """A model in training mode with dropout and LoRA, and prompts for it."""
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
def test_the_model_is_unchanged(kind: str, form: type, data_folder: Path) -> None:
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
    calls: list[dict[str, Any]] = []
    real = engine.ModelRunner

    def passes(*arguments: Any, **choices: Any) -> Any:  # noqa: ANN401
        calls.append(choices)
        return real(*arguments, **choices)

    monkeypatch.setattr(engine, "ModelRunner", passes)
    for kind in ("decoder", "seq2seq"):
        model, prompts = prompts_for(kind, data_folder)
        prompts.take(model)
    assert [(one["weights"], one["compile"], bool(one["sites"])) for one in calls] == [("own", False, True)] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "choices"),
    first_of(
        [
            ("decoder", {"activation_checkpointing": True, "ema": 0.9}),
            ("encoder", {}),
            ("seq2seq", {"activation_checkpointing": True}),
        ]
    ),
)
def test_training_is_the_same_with_and_without_samples(kind: str, choices: dict[str, Any], data_folder: Path) -> None:
    train(Run.from_dict(logged_table(data_folder, kind, **choices)))
    train(Run.from_dict(logged_table(data_folder, kind, "without", sample_prompts=0, **choices)))
    assert_same(data_folder, "run", "without")
    assert not (data_folder / "without" / "samples.jsonl").exists()
    assert [line["step"] for line in read(data_folder)] == [0, 3, 4, 6, 8, 9, 12]


@pytest.mark.long
def test_sample_prompts_may_change_on_resume(data_folder: Path) -> None:
    train(Run.from_dict(logged_table(data_folder, "seq2seq", steps=3, sample_prompts=1)))
    before = read(data_folder)
    assert [len(line["samples"]) for line in before] == [1, 1]
    train(Run.from_dict(logged_table(data_folder, "seq2seq", steps=3, sample_prompts=2)))
    assert read(data_folder) == before
    with pytest.raises(ConfigError, match=r"train\.sample_prompts is -1, but it must be 0 or more"):
        Run.from_dict(logged_table(data_folder, sample_prompts=-1))


# Failures


@pytest.mark.long
def test_killed_and_resumed_has_the_same_lines(data_folder: Path) -> None:
    train(Run.from_dict(logged_table(data_folder, out="whole")))
    settings = logged_table(data_folder)
    killed(settings)
    assert read(data_folder)[-1]["step"] < 12
    newest = max((data_folder / "run" / "checkpoints").glob("step-*"))
    (newest / "model.safetensors").write_bytes(b"")  # its line is there
    train(Run.from_dict(settings))
    assert_same(data_folder, "whole", "run")
    assert (data_folder / "run" / "samples.jsonl").read_bytes() == (
        data_folder / "whole" / "samples.jsonl"
    ).read_bytes()


@pytest.mark.long
def test_an_error_is_logged_once_and_training_continues(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:  # noqa: ANN401
        raise torch.OutOfMemoryError("CUDA out of memory\nand a page about it")

    monkeypatch.setattr(checkpoint_log, "generate", fails)
    reporter = RecordingReporter()
    result: Result = train(Run.from_dict(logged_table(data_folder)), reporter)
    assert [text for text in reporter.messages if text.startswith("no samples")] == [
        "no samples at step 0 (OutOfMemoryError: CUDA out of memory); training continues"
    ]
    assert result.steps == 12
    assert len((data_folder / "run" / "probes.jsonl").read_text().splitlines()) == 7
    monkeypatch.undo()
    train(Run.from_dict(table(data_folder, out="whole")))
    assert losses(data_folder) == losses(data_folder, "whole")
