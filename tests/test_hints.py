"""Names from other tools are errors that give ours, and every name given exists."""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import typer

import glasshouse as gh
from glasshouse import cli, config, hints, registry, spec
from glasshouse.errors import ConfigError, InputError
from glasshouse.training.run import Data, Train


def fields(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    return config._hints(kind)


def is_union(kinds: object) -> bool:
    return get_origin(kinds) in (Union, UnionType)


def exists(kinds: Any, path: list[str]) -> bool:  # noqa: ANN401 - a dataclass or a union of them
    parts = [get_origin(part) or part for part in (get_args(kinds) if is_union(kinds) else (kinds,))]
    options = [kind for part in parts for kind in (part.kinds.values() if registry.is_sort(part) else (part,))]
    options = [kind for kind in options if dataclasses.is_dataclass(kind)]
    return any(
        path[0] in fields(kind) and (len(path) == 1 or exists(fields(kind)[path[0]], path[1:])) for kind in options
    )


def name_of(ours: str) -> str:
    return ours.partition(",")[0]


def test_spec_names_exist() -> None:
    assert [one for one in set(hints.SPEC.values()) if not exists(spec.Spec, name_of(one).split("."))] == []


def test_run_settings_exist() -> None:
    for ours in set(hints.RUN.values()):
        section, _, rest = name_of(ours).partition(".")
        if section in ("train", "data"):
            assert exists({"train": Train, "data": Data}[section], rest.split(".")), ours
        else:
            assert (section, rest) == ("model", "from")


def test_generation_names_exist() -> None:
    options = {flag for one in typer.main.get_command(cli.app).commands["generate"].params for flag in one.opts}  # type: ignore[attr-defined]
    known = {*fields(gh.SamplingParams), *inspect.signature(gh.generate).parameters}
    for name in map(name_of, hints.GENERATION.values()):
        assert name in known or f"--{name.replace('_', '-')}" in options


def test_no_hint_hides_a_setting() -> None:
    assert not {*hints.RUN} & ({*fields(Train)} | {*fields(Data)})
    assert not {*hints.SPEC} & {name for kind in get_args(spec.Spec) for name in fields(kind)}
    assert not {*hints.GENERATION} & {*fields(gh.SamplingParams)}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("train.learning_rate=1e-3", "train.learning_rate is called train.lr here."),
        (
            "train.batch_size=8",
            "train.batch_size is called train.batch_tokens here, counted in tokens: sequences times",
        ),
        ("train.warmup_steps=8", "train.warmup_steps is called train.schedule.warmup here."),
        ("train.gradient_accumulation_steps=8", "train.gradient_accumulation_steps is called train.grad_accum here."),
        ("train.gradient_checkpointing=true", "is called train.activation_checkpointing here."),
        ("train.ema_decay=0.99", "train.ema_decay is called train.ema here, the decay."),
        ("train.dtype=bf16", "train.dtype is called train.precision here."),
        ("train.precision=bf16", "train.precision is 'bf16'; bf16 is called bfloat16 here."),
        ("data.block_size=64", "data.block_size is called data.seq_len here."),
        ("train.optimizer.rest.lr=1", "train.optimizer.rest is called train.optimizer.adamw here."),
    ],
)
def test_a_setting_from_another_tool_gets_a_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        gh.Run.load("stdlib", setting)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("n_embd", "d_model"), ("hidden_size", "d_model"), ("num_layers", "n_layers"), ("n_head", "n_heads")],
)
def test_a_spec_field_from_another_tool_gets_a_sentence(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is called {ours} here.$"):
        gh.preset("gpt2", **{name: 2})


def test_a_nested_spec_field_gets_one_too() -> None:
    with pytest.raises(ConfigError, match=r"^position.rope_theta is called position.theta here.$"):
        gh.preset("llama-small", position={"kind": "rotary", "rope_theta": 1})


def test_sampling_and_dtype_names() -> None:
    with pytest.raises(InputError, match=r"^num_beams is called beams here.$"):
        gh.generate(gh.build(gh.preset("tiny-decoder")), None, [[1]], num_beams=2)
    with pytest.raises(InputError, match=r"^dtype is 'fp16'; fp16 is called float16 here.$"):
        gh.build(gh.preset("tiny-decoder"), dtype="fp16")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "stdlib", "--learning-rate", "1"], "--learning-rate is called train.lr=VALUE here"),
        (["train", "stdlib", "--lr", "1"], "--lr is called train.lr=VALUE here"),
        (["train", "stdlib", "--n-embd", "1"], "--n-embd is called model.d_model=VALUE here"),
        (["generate", "x", "y", "--max-tokens", "1"], "--max-tokens is called --max-new-tokens here."),
        (["generate", "x", "y", "--eos-token-id", "1"], "No such option: --eos-token-id"),  # nor is there one like it
    ],
)
def test_a_flag_from_another_tool_gets_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.app(words)
    assert left.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_site_names_exist() -> None:
    models = [gh.build(gh.preset(name)) for name in ("tiny-decoder", "tiny-seq2seq")]
    known = {re.sub(r"^(en|de)coder\.|\.\d+$", "", name) for model in models for name in gh.inspection.sites(model)}
    known |= {name.removesuffix(".0") for name in known}
    assert {name_of(ours) for ours in hints.SITES.values()} <= known
