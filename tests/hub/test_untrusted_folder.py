"""Malicious folders: each is refused in one sentence, with no code run and nothing read outside."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import glasshouse as gh
from glasshouse.hub.verified import fingerprints

Table = dict[str, Any]
Damage = Callable[[Path], object]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION, POOLING, VERIFIED = "generation_config.json", "1_Pooling/config.json", "verified.json"
LONG = "x" * 5000
UGLY = "red\x1b[31m\nline"
DIGITS = 10**4000  # the most that Python's json reads is 4300 digits
ENDLESS = 10**400  # no float holds it

# The watch ----------------------------------------------------------------------------------------------------

SECONDS = 10  # all of this takes milliseconds; only a hang takes longer
TRUSTED = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), gh.__path__[0])]
PROCESSES = re.compile(r"socket\.|subprocess\.|pickle\.|shutil\.|os\.(system|exec|fork|posix_spawn|spawn|startfile)")
CHANGES = re.compile(r"os\.(remove|rename|mkdir|rmdir|link|symlink|truncate|chmod|chown|utime)")
HINTS = {  # which `get_type_hints` evaluates; any other text that is compiled came from elsewhere
    hint
    for kind in (*vars(gh.spec).values(), gh.config.Settings)
    if isinstance(kind, type)
    for hint in inspect.get_annotations(kind).values()
}

recorded: list[tuple[str, tuple[Any, ...]]] = []
watching = False


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if watching:
        recorded.append((event, arguments))


sys.addaudithook(listen)


def is_within(path: object, roots: list[Path]) -> bool:
    real = Path(os.fsdecode(path)).resolve()  # type: ignore[arg-type]
    return any(real.is_relative_to(root) for root in roots)


def is_forbidden(event: str, arguments: tuple[Any, ...], roots: list[Path]) -> bool:
    """Return whether an audit event is more than reading data under the roots, or an import of installed code."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return False
        data = Path(os.fsdecode(path)).suffix in (".json", ".safetensors") and not flags & (os.O_WRONLY | os.O_RDWR)
        return not (is_within(path, TRUSTED) or (data and is_within(path, roots)))
    if event in ("os.listdir", "os.scandir"):
        return not is_within(arguments[0] or ".", [*TRUSTED, *roots])
    if event == "compile":
        source, name = arguments
        if source is None or not str(name).startswith("<"):
            return not is_within(name, TRUSTED)
        return (source.decode() if isinstance(source, bytes) else str(source)) not in HINTS
    if event == "exec":
        name = arguments[0].co_filename
        return not (name.startswith("<") or is_within(name, TRUSTED))
    return bool(PROCESSES.match(event) or CHANGES.match(event))


@contextmanager
def audited(*roots: Path) -> Iterator[list[str]]:
    """Record audit events; at the end put those that reading these folders does not need into the list."""

    def too_long(*_: object) -> None:
        pytest.fail(f"not done after {SECONDS} seconds")

    global watching
    found: list[str] = []
    recorded.clear()
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    watching = True
    try:
        yield found
    finally:
        watching = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        real = [root.resolve() for root in roots]
        found += [f"{event} {arguments}" for event, arguments in recorded if is_forbidden(event, arguments, real)]


def refuse(folder: Path, file: str, reason: str, **options: object) -> str:
    """Load, and assert that the error is one readable sentence that names the file and the reason."""
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    quiet, refused = warnings.catch_warnings(action="error"), pytest.raises(gh.GlasshouseError)
    with quiet, audited(root) as forbidden, refused as caught:
        gh.load(folder, **options)  # type: ignore[arg-type]
    assert forbidden == []
    text = str(caught.value)
    assert text.isprintable(), repr(text[:400])
    shown = text.replace(str(folder.parent), "")
    assert len(shown) < 500, shown[:500]
    assert re.search(r"[.?]$", shown), shown
    assert any(name in shown for name in file.split("|")), shown
    assert re.search(reason, shown), shown
    return text


# Sound folders ------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 61, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_len": 16}
LLAMA = {**SMALL, "n_kv_heads": 2, "d_ff": 24}
BART: Table = {
    "position": {"kind": "learned", "offset": 2},
    "embed_norm": True,
    "embed_scale": False,
    "qkv_bias": True,
    "out_bias": True,
    "init": "normal",
    "head": {"kind": "next_token", "bias": True},
}
SPECS = {
    "gpt2": gh.preset("gpt2", **SMALL),
    "own": gh.preset("gpt2", **SMALL, position="alibi"),
    "llama": gh.preset("llama-small", **LLAMA),
    "mistral": gh.preset("llama-small", **LLAMA, windows=[5]),
    "qwen2": gh.preset("llama-small", **LLAMA, windows=[5, 0], qkv_bias=True),
    "bert": gh.preset("tiny-encoder", **SMALL),
    "bert-bare": gh.preset("tiny-encoder", **SMALL, head="none"),
    "bert-labels": gh.preset("tiny-encoder", **SMALL, head={"kind": "sequence_classification", "n_labels": 3}),
    "t5": gh.preset("t5-small", **SMALL, d_ff=24),
    "bart": gh.preset("tiny-seq2seq", **SMALL, **BART),
}


@pytest.fixture(scope="module")
def valid_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small valid folder of each kind; all but `own` are in the format of transformers."""
    place = tmp_path_factory.mktemp("sound")
    for name, spec in SPECS.items():
        torch.manual_seed(0)
        gh.save(gh.build(spec), None, place / name)
        kind = read(place / name / CONFIG)["model_type"]
        assert kind == {"own": "glasshouse"}.get(name, name.partition("-")[0])
        if name != "own":
            edit(CONFIG, lambda t: t.pop("glasshouse"))(place / name)
    shutil.copytree(place / "gpt2", place / "sharded")
    shard(place / "sharded")
    gh.save(gh.build(SPECS["gpt2"]), None, place / "ours")  # of a family, with our spec
    shutil.copytree(place / "gpt2", place / "worded")
    tokenizer()(place / "worded")
    return place


@pytest.fixture
def outside(valid_checkpoints: Path, tmp_path: Path) -> Path:
    """Make a valid folder next to the malicious one, as the target of links and paths."""
    shutil.copytree(valid_checkpoints / "worded", tmp_path / "outside")
    (tmp_path / "outside" / "words.json").write_text('{"pad_token": "w1"}')
    (tmp_path / "outside" / "pooling.json").write_text('{"pooling_mode_mean_tokens": true}')
    return tmp_path / "outside"


def shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    half = len(tensors) // 2
    names = sorted(tensors)
    weight_map = {name: FIRST if number < half else SECOND for number, name in enumerate(names)}
    for file in (FIRST, SECOND):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", [*SPECS, "ours", "sharded", "worded"])
def test_valid_checkpoints_are_loaded_and_nothing_else_is_read(valid_checkpoints: Path, name: str) -> None:
    with audited(valid_checkpoints / name) as forbidden:
        model, tok = gh.load(valid_checkpoints / name)
    assert forbidden == []
    assert model.spec == SPECS.get(name, model.spec) or name != "own"
    assert (tok is not None) == (name == "worded")
    opened = {Path(arguments[0]).name for event, arguments in recorded if event == "open"}
    assert opened >= {CONFIG, FIRST, SECOND} if name == "sharded" else opened >= {CONFIG, WEIGHTS}


# Damage -------------------------------------------------------------------------------------------------------


def read(path: Path) -> Table:
    return json.loads(path.read_text())


def write(name: str, content: object) -> Damage:
    """Replace a file by bytes, text or (as JSON) anything else."""

    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return damage


def edit(name: str, change: Callable[[Table], object]) -> Damage:
    def damage(folder: Path) -> None:
        table = read(folder / name)
        change(table)
        (folder / name).write_text(json.dumps(table))

    return damage


def config(**changes: object) -> Damage:
    return edit(CONFIG, lambda table: table.update(changes))


def spec(**changes: object) -> Damage:
    return edit(CONFIG, lambda table: table["glasshouse"]["spec"].update(changes))


def rope(**changes: object) -> Damage:
    return config(rope_parameters=changes, rope_scaling=None)


def tensors(change: Callable[[dict[str, Tensor]], object], name: str = WEIGHTS) -> Damage:
    def damage(folder: Path) -> None:
        held = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
        change(held)
        save_file(held, folder / name, {"format": "pt"})

    return damage


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32, file: str = WEIGHTS) -> Damage:
    return tensors(lambda held: held.update({name: torch.zeros(shape).to(dtype)}), file)


def swap(one: str, other: str) -> Damage:
    return tensors(lambda held: held.update({one: held[other], other: held[one]}))


def raw(header: Callable[[], bytes], data: bytes = b"", length: int | None = None, size: int | None = None) -> Damage:
    """Write a safetensors file by hand; beyond the given bytes it is sparse, up to its size."""

    def damage(folder: Path) -> None:
        made = header()
        with (folder / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(made) if length is None else length) + made + data)
            file.truncate(size)

    return damage


def described(change: Callable[[Table], object]) -> Damage:
    """Change the header of the weights, not the data."""

    def damage(folder: Path) -> None:
        whole = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:end])
        change(header)
        raw(lambda: json.dumps(header).encode(), whole[end:])(folder)

    return damage


def entries(count: int, prefix: str = "") -> bytes:
    """Return a valid header of empty tensors."""
    entry = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    return ("{" + ", ".join(f'"{prefix}{i}": {entry}' for i in range(count)) + "}").encode()


def cut(name: str, length: int) -> Damage:
    return lambda folder: os.truncate(
        folder / name, (folder / name).stat().st_size + length if length < 0 else length
    )


def mapped(to: object) -> Damage:
    return edit(INDEX, lambda table: table.update(weight_map=dict.fromkeys(table["weight_map"], to)))


def promised(name: str, to: str = FIRST) -> Damage:
    return edit(INDEX, lambda table: table["weight_map"].update({name: to}))


def gone(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def instead(name: str, make: Damage) -> Damage:
    """Remove a file and put something else under its name."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        make(folder / name)

    return damage


def link(name: str, target: str) -> Damage:
    """Create a symlink; OUTSIDE in its target is the absolute path of the folder next to it."""
    return instead(name, lambda path: path.symlink_to(target.replace("OUTSIDE", str(sibling(path)))))


def sibling(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "model").with_name("outside")


def fifo(name: str) -> Damage:
    return instead(name, os.mkfifo)


def directory(name: str) -> Damage:
    return instead(name, Path.mkdir)


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def words(count: int = 61) -> Table:
    model = tokenizers.models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, count)}}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return json.loads(made.to_str())


def tokenizer(count: int = 61, **changes: object) -> Damage:
    return write(TOKENIZER, {**words(count), **changes})


def split(expression: str) -> Table:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(expression: str) -> Table:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": ""}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# What is refused ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    base: str
    damage: Damage
    file: str  # which the message has to name; `|` separates alternatives
    reason: str  # and the reason it has to give, as a regular expression


def on(base: str, file: str, cases: dict[str, tuple[Damage, str]]) -> dict[str, Case]:
    return {name: Case(base, damage, file, reason) for name, (damage, reason) in cases.items()}


EITHER = f"{CONFIG}|{WEIGHTS}"  # where the two do not fit together
BIAS, MATRIX = "transformer.ln_f.bias", "transformer.h.0.attn.c_attn.weight"
MASK = "transformer.h.0.attn.masked_bias"  # of old files, and read by nothing: room to fool a count of numbers
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
UNSOUND = "not a valid safetensors file"

JSON = {
    "empty": (write(CONFIG, ""), "not valid JSON"),
    "half": (write(CONFIG, '{"model_type": "gpt2",'), "not valid JSON"),
    "not-utf-8": (write(CONFIG, b'{"model_type": "\xff"}'), "not valid JSON"),
    "many-digits": (write(CONFIG, f'{{"n_layer": {"9" * 5000}}}'), "not valid JSON"),
    "deep-lists": (write(CONFIG, "[" * 100_000), "not valid JSON"),
    "deep-tables": (write(CONFIG, '{"a":' * 100_000), "not valid JSON"),
    "list": (write(CONFIG, []), "not contain a JSON object"),
    "number": (write(CONFIG, 5), "not contain a JSON object"),
    "null": (write(CONFIG, None), "not contain a JSON object"),
    "forty-megabytes": (cut(CONFIG, 40_000_000), "40000000 bytes"),
    "missing": (gone(CONFIG), "there is no"),
    "directory": (directory(CONFIG), "not a file"),
    "fifo": (fifo(CONFIG), "not a file"),
    "link-out": (link(CONFIG, "OUTSIDE/config.json"), "outside its folder"),
    "link-to-itself": (link(CONFIG, CONFIG), "link|not a file"),
}
SETTINGS = {
    "no-model-type": (edit(CONFIG, lambda t: t.pop("model_type")), "model_type"),
    "unknown-model-type": (config(model_type="mamba"), "mamba.*not supported; gpt2"),
    "model-type-list": (config(model_type=["gpt2"]), "model_type"),
    "model-type-table": (config(model_type={}), "model_type"),
    "model-type-long": (config(model_type=LONG), "model_type"),
    "unknown-architecture": (config(architectures=["GPT2ForQuestionAnswering"]), "GPT2ForQuestionAnswering"),
    "architecture-list": (config(architectures=[["GPT2LMHeadModel"]]), "architecture"),
    "architecture-number": (config(architectures=[5]), "architecture"),
    "architecture-long": (config(architectures=[LONG]), "architecture"),
    "architectures-number": (config(architectures=5), "architecture"),
    "unknown-key": (config(colour="green"), "colour = 'green'"),
    "unknown-key-long": (config(**{LONG: 1}), "xxx"),
    "unknown-key-ugly": (config(**{UGLY: 1}), "red"),
    "unknown-key-with-a-long-value": (config(colour=[LONG] * 9), "colour"),
    "quantised": (config(quantization_config={"bits": 4, "quant_method": "gptq"}), "quantization_config"),
    "kernel-from-the-hub": (config(_attn_implementation="someone/kernel"), "_attn_implementation"),
    "cross-attention": (config(add_cross_attention=True), "add_cross_attention"),
    "size-string": (config(n_embd="16"), "n_embd = '16'.*an integer"),
    "size-fraction": (config(n_embd=16.5), "n_embd = 16.5.*an integer"),
    "size-true": (config(n_embd=True), "n_embd = True.*an integer"),
    "size-nan": (config(n_embd=float("nan")), "n_embd = nan.*an integer"),
    "size-infinite": (write(CONFIG, '{"model_type": "gpt2", "n_embd": 1e400}'), "n_embd = inf.*an integer"),
    "size-zero": (config(n_embd=0), "d_model is 0"),
    "size-negative": (config(n_embd=-1), "d_model is -1"),
    "heads-zero": (config(n_head=0), "n_heads is 0"),
    "heads-that-do-not-divide": (config(n_head=3), "d_model is 16"),
    "layers-10^9": (config(n_layer=10**9), "1000000000 layers"),
    "layers-digits": (config(n_layer=DIGITS), "layers|digits"),
    "layers-zero": (config(n_layer=0), "n_layers is 0"),
    "layers-negative": (config(n_layer=-3), "n_layers is -3"),
    "eps-nan": (config(layer_norm_epsilon=float("nan")), "eps is nan"),
    "eps-infinite": (config(layer_norm_epsilon=float("inf")), "eps is inf"),
    "eps-zero": (config(layer_norm_epsilon=0), "eps is 0"),
    "eps-beyond-floats": (config(layer_norm_epsilon=ENDLESS), "layer_norm_epsilon|digits"),
    "dropout-nan": (config(resid_pdrop=float("nan")), "dropout is nan"),
    "switch-number": (config(scale_attn_weights=1), "scale_attn_weights = 1.*true or false"),
    "activation-unknown": (config(activation_function="snake"), "activation_function = 'snake'"),
    "activation-list": (config(activation_function=["gelu"]), "activation_function"),
    "activation-megabytes": (config(activation_function="x" * 2_000_000), "activation_function"),
    "start-string": (config(bos_token_id="1"), "bos_token_id"),
    "end-string": (config(eos_token_id="1"), "eos_token_id"),
    "end-table": (config(eos_token_id={"1": 1}), "eos_token_id"),
}
TOO_LARGE = {
    "width-null": (config(n_embd=None), "parameters"),
    "width-10^18": (config(n_embd=10**18), "parameters"),
    "width-digits": (config(n_embd=DIGITS), ""),
    "vocabulary-10^12": (config(vocab_size=10**12), "parameters"),
    "vocabulary-digits": (config(vocab_size=DIGITS), ""),
    "positions-10^12": (config(n_positions=10**12), "parameters"),
    "a-layer-more": (config(n_layer=3), "parameters"),
}
ROPE = {
    "rope-dynamic": (rope(rope_type="dynamic", factor=2.0), "dynamic.*KV cache"),
    "rope-dynamic-of-old": (config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    # transformers uses the second if both are given
    "rope-two-that-disagree": (config(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_scaling"),
    "rope-longrope": (rope(rope_type="longrope", factor=2.0), "longrope"),
    "rope-list": (config(rope_parameters=[1]), "rope_parameters = .1.*JSON object"),
    "rope-list-long": (config(rope_parameters=[LONG]), "rope_parameters.*JSON object"),
    "rope-type-list": (rope(rope_type=["linear"]), "rope_type"),
    "rope-type-long": (rope(rope_type=LONG), "rope_type"),
    "rope-unknown-key": (rope(rope_type="default", colour=1), "colour = 1"),
    "rope-factor-missing": (rope(rope_type="linear"), "lacks factor"),
    "rope-factor-nan": (rope(rope_type="linear", factor=float("nan")), "factor is nan"),
    "rope-factor-string": (rope(rope_type="linear", factor="2"), "factor is '2'"),
    "rope-factor-beyond-floats": (rope(rope_type="linear", factor=ENDLESS), "factor|digits"),
    "rope-theta-string": (config(rope_theta="1e4", rope_parameters=None), "rope_theta = '1e4'.*number"),
    "rope-theta-one": (rope(rope_theta=1), "theta is 1"),
    "rope-theta-beyond-floats": (rope(rope_theta=ENDLESS), "rope_theta|digits"),
    "rope-yarn-without-turns": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=16, beta_fast=1e308),
        "beta_fast",
    ),
    "rope-yarn-with-endless-turns": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=16, beta_slow=5e-324),
        "beta_slow",
    ),
    "rope-yarn-beyond-floats": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=ENDLESS),
        "original_max|digits",
    ),
    "grouped-heads-negative": (config(num_key_value_heads=-1), "n_kv_heads is -1"),
    "width-of-heads-negative": (config(head_dim=-2), "d_head is -2"),
    "width-of-heads-odd": (config(head_dim=3), "d_head is 3"),
}
WINDOWS = {
    "window-string": (config(sliding_window="x"), "'x'"),
    "window-types-number": (config(layer_types=5), "layer_types"),
    "window-types-lists": (config(layer_types=[[], []]), "layer_types"),
    "window-types-unknown": (config(layer_types=["chunked_attention"] * 2), "layer_types"),
    "window-types-too-few": (config(layer_types=["full_attention"]), "layer_types"),
    "window-layers-10^9": (config(num_hidden_layers=10**9, layer_types=None), "1000000000 layers"),
    "window-layers-negative": (config(layer_types=None, max_window_layers=-(10**15)), "max_window_layers"),
}
LABELS = {
    "labels-list": (config(id2label=["a", "b", "c"]), "id2label"),
    "labels-numbers": (config(id2label={"0": 0, "1": 1}), "id2label"),
    "labels-with-a-gap": (config(id2label={"0": "a", "2": "b"}), "id2label"),
    "labels-twice-the-same": (config(id2label={"0": "a", "1": "a", "2": "b"}), "different names"),
    "labels-twice-the-same-long": (config(id2label={"0": LONG, "1": LONG}), "different names"),
    "labels-none": (config(id2label={}, num_labels=0), "labels is 0"),
}
OWN = {
    "own-no-table": (edit(CONFIG, lambda t: t.pop("glasshouse")), "no spec"),
    "own-no-spec": (edit(CONFIG, lambda t: t["glasshouse"].pop("spec")), "no spec"),
    "own-table-list": (config(glasshouse=[]), "no spec"),
    "own-of-the-future": (edit(CONFIG, lambda t: t["glasshouse"].update(format=3)), "format 3.*reads format 2"),
    "own-format-long": (edit(CONFIG, lambda t: t["glasshouse"].update(format=LONG)), "format"),
    "own-spec-list": (edit(CONFIG, lambda t: t["glasshouse"].update(spec=[])), "kind|table"),
    "own-kind-list": (spec(kind=[]), "kind"),
    "own-choice-list": (spec(position=[]), "position"),
    "own-choice-of-a-table": (spec(head={"kind": {}}), "head"),
    "own-setting-unknown": (spec(colour=1), "colour is not a setting"),
    "own-setting-unknown-long": (spec(**{LONG: 1}), "not a setting"),
    "own-setting-unknown-ugly": (spec(**{UGLY: 1}), "not a setting"),
    "own-value-long": (spec(norm_placement=LONG), "norm_placement"),
    "own-eps-beyond-floats": (spec(norm={"kind": "layer", "eps": ENDLESS}), "eps|digits"),
    "own-key-unknown": (config(colour="green"), "colour"),
}
OURS = {
    "ours-another-depth": (config(n_layer=1), "n_layers"),
    "ours-another-spec": (spec(attention_scale=0.5), "attention_scale"),
    "ours-of-the-future": (edit(CONFIG, lambda t: t["glasshouse"].update(format=3)), "format 3"),
    "ours-key-unknown": (config(colour="green"), "colour = 'green'"),
}
FILE = {
    "empty": (cut(WEIGHTS, 0), "0 bytes"),
    "cut-in-the-length": (cut(WEIGHTS, 7), "truncated"),
    "cut-after-the-length": (cut(WEIGHTS, 8), "truncated"),
    "cut-in-the-header": (cut(WEIGHTS, 50), "truncated"),
    "cut-in-the-data": (cut(WEIGHTS, -5), UNSOUND),
    "longer": (cut(WEIGHTS, 50_000), UNSOUND),
    "header-of-0-bytes": (raw(lambda: b""), UNSOUND),
    "header-of-2^63-bytes": (raw(lambda: b"{}", length=2**63), "truncated"),
    "header-of-100-MB-promised": (raw(lambda: b"{}", length=100_000_000), "truncated"),
    "header-of-100-MB": (raw(lambda: b"{", length=100_000_000, size=100_000_008), "header of 100000000 bytes"),
    "header-of-40-MB-that-is-sound": (raw(lambda: entries(40, "x" * 1_000_000)), r"header of 4\d+ bytes"),
    "header-of-half-a-million-tensors": (raw(lambda: entries(500_000)), "header|tensors"),
    "header-not-JSON": (raw(lambda: b'{"a"'), UNSOUND),
    "header-list": (raw(lambda: b"[]"), UNSOUND),
    "header-deep": (raw(lambda: b'{"a":' * 100_000), UNSOUND),
    "header-not-utf-8": (raw(lambda: b'{"\xff": 1}'), UNSOUND),
    "overlapping": (described(lambda h: h[BIAS].update(h["transformer.ln_f.weight"])), UNSOUND),
    "offsets-beyond": (described(lambda h: h[BIAS].update(data_offsets=[0, 2**62])), UNSOUND),
    "offsets-negative": (described(lambda h: h[BIAS].update(data_offsets=[-64, 0])), UNSOUND),
    "offsets-backwards": (described(lambda h: h[BIAS].update(data_offsets=[64, 0])), UNSOUND),
    "dtype-unknown": (described(lambda h: h[BIAS].update(dtype="F31")), UNSOUND),
    "shape-that-wraps": (
        described(lambda h: h.update(x={"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]})),
        UNSOUND,
    ),
    "shape-of-70-axes": (put("x", *[1] * 70), " x"),
    "directory": (directory(WEIGHTS), "not a file"),
    "fifo": (fifo(WEIGHTS), "not a file"),
    "dangling": (link(WEIGHTS, "nowhere"), "not a file"),
    "dangling-out": (link(WEIGHTS, "/nowhere/at/all"), "outside its folder"),
    "link-to-itself": (link(WEIGHTS, WEIGHTS), "link|not a file"),
    "link-out": (link(WEIGHTS, "OUTSIDE/model.safetensors"), "outside its folder"),
    "link-out-by-dots": (link(WEIGHTS, "../outside/model.safetensors"), "outside its folder"),
    "missing": (gone(WEIGHTS), "neither model.safetensors"),
    "tensor-missing": (tensors(lambda held: held.pop(BIAS)), "parameters|lacks"),
    "tensor-missing-but-as-many-numbers": (both(put(MASK, 99), tensors(lambda held: held.pop(BIAS))), BIAS),
    "tensor-extra": (put("evil", 1), "evil"),
    "tensor-extra-empty": (put("evil", 0), "evil"),
    "tensor-name-long": (put(LONG, 1), "xxx"),
    "tensor-name-ugly": (put(UGLY, 1), "red"),
    "shape-longer": (put(BIAS, 17), r"\[17\].*\[16\]"),
    "shape-one-axis-less": (both(put(MASK, 999), put(MATRIX, 16)), "c_attn"),
    "shape-no-axis": (both(put(MASK, 999), put(MATRIX)), "c_attn"),
    "shape-one-axis-more": (put(MATRIX, 16, 48, 1), "c_attn"),
    "shape-of-too-few-parts": (both(put(MASK, 999), put(MATRIX, 16, 1)), "c_attn"),
    "shape-turned": (put(MATRIX, 48, 16), "c_attn"),
    "dtype-int8": (put(BIAS, 16, dtype=torch.int8), "int8"),
    "dtype-int8-of-all": (tensors(lambda held: held.update({k: v.char() for k, v in held.items()})), "int8"),
    "dtype-float8": (put(BIAS, 16, dtype=torch.float8_e4m3fn), "float8"),
    "dtype-float8-of-a-copy": (put("lm_head.weight", 61, 16, dtype=torch.float8_e4m3fn), "float8"),
    "dtype-complex": (put(BIAS, 16, dtype=torch.complex64), "complex"),
}
MORE_SHAPES = {
    # the total number of rows is right
    "shape-of-queries-and-keys-swapped": Case("llama", swap(QUERY, KEY), WEIGHTS, r"\[8, 16\]"),
    "shape-of-a-row-turned": Case("bart", put("final_logits_bias", 61, 1), WEIGHTS, r"\[61, 1\]"),
    "tensor-under-two-names": Case("bert", put("bert.embeddings.LayerNorm.gamma", 16), WEIGHTS, "LayerNorm"),
    # 16 parameters per layer: few enough to fit in four megabytes
    "own-layers-of-four-megabytes": Case(
        "own",
        both(
            spec(n_layers=200_000, vocab_size=1, d_model=1, n_heads=1, n_kv_heads=1, d_head=1, d_ff=1),
            tensors(lambda held: (held.clear(), held.update(x=torch.zeros(4_000_000, dtype=torch.uint8)))),
        ),
        EITHER,
        "",
    ),
    "labels-10^9": Case("bert-labels", config(id2label=None, num_labels=10**9), EITHER, "labels|parameters"),
    "own-layers-10^9": Case("own", spec(n_layers=10**9), EITHER, ""),
    "labels-of-another-number": Case(
        "bert-labels", config(id2label={"0": "a", "1": "b"}), WEIGHTS, r"\[3, 16\].*\[2, 16\]"
    ),
    "distance-beyond-floats": Case(
        "t5", config(relative_attention_max_distance=ENDLESS), CONFIG, "max_distance|digits"
    ),
    "window-negative": Case("mistral", config(sliding_window=-3), CONFIG, "windows is"),
    "window-digits": Case("mistral", config(sliding_window=DIGITS), CONFIG, "window|digits"),
}
SHARDS = {
    "index-not-JSON": (write(INDEX, "{"), "not valid JSON"),
    "index-list": (write(INDEX, []), "not contain a JSON object"),
    "index-fifo": (fifo(INDEX), "not a file"),
    "index-link-out": (link(INDEX, "OUTSIDE/config.json"), "outside its folder"),
    "map-missing": (write(INDEX, {"metadata": {}}), "no weight_map"),
    "map-list": (write(INDEX, {"weight_map": [FIRST]}), "no weight_map"),
    "map-empty": (write(INDEX, {"weight_map": {}}), "weight_map"),
    "map-to-numbers": (mapped(5), "weight_map"),
    "map-to-lists": (mapped([FIRST]), "weight_map"),
    "map-to-nothing": (mapped(""), "lists the file ''"),
    "map-by-dots": (mapped("../outside/model.safetensors"), r"lists the file '\.\./outside"),
    "map-by-dots-inside": (mapped(f"a/../{FIRST}"), "lists the file 'a/"),
    "map-to-an-absolute-path": (
        lambda folder: mapped(str(folder.with_name("outside") / WEIGHTS))(folder),
        "lists the file '/",
    ),
    "map-to-a-drive": (mapped("C:\\model.safetensors"), "lists the file 'C:"),
    "map-to-a-pickle": (mapped("pytorch_model.bin"), "lists the file 'pytorch_model.bin'"),
    "map-to-a-zero-byte": (mapped("a\0.safetensors"), "lists the file 'a"),
    "map-to-half-a-character": (mapped("\ud800.safetensors"), "lists the file"),
    "map-to-a-long-name": (mapped(f"{LONG}.safetensors"), "xxx"),
    "map-of-more": (promised("evil"), "evil"),
    "map-of-more-ugly": (promised(UGLY), "red"),
    "map-of-more-half-a-character": (promised("\ud800"), "lists"),
    "map-of-more-long": (promised(LONG), "xxx"),
    "shard-missing": (gone(SECOND), f"{SECOND}.*missing"),
    "shard-directory": (directory(SECOND), f"{SECOND}.*not a file"),
    "shard-fifo": (fifo(SECOND), f"{SECOND}.*not a file"),
    "shard-cut": (cut(SECOND, -5), f"{SECOND}.*{UNSOUND}"),
    "shard-link-out": (link(SECOND, "OUTSIDE/model.safetensors"), f"{SECOND}.*outside its folder"),
    "shard-with-more": (put("evil", 1, file=SECOND), f"{SECOND}.*evil"),
    "shard-with-what-another-has": (put("transformer.h.0.ln_1.bias", 16, file=SECOND), f"{SECOND}.*ln_1.bias"),
    "shard-with-an-ugly-name": (put(UGLY, 1, file=SECOND), f"{SECOND}.*red"),
}
ENTRIES = f"{INDEX}|{FIRST}|{SECOND}"
CODE = {
    f"{key}-in-{base}-{name.removesuffix('.json').replace('/', '-')}": Case(
        base, both(first, edit(name, lambda t, k=key: t.update({k: {"AutoModel": "hostile.Model"}}))), name, key
    )
    for key in ("auto_map", "custom_pipelines", "trust_remote_code")
    for base, name, first in (
        ("gpt2", CONFIG, both()),
        ("ours", CONFIG, both()),
        ("own", CONFIG, both()),
        ("sharded", INDEX, both()),
        ("gpt2", GENERATION, both()),
        ("bert-bare", POOLING, write(POOLING, {"pooling_mode_mean_tokens": True})),
    )
}
WORDS = {
    "words-not-JSON": (write(TOKENIZER, "{"), "not JSON"),
    "words-empty": (write(TOKENIZER, ""), "not JSON"),
    "words-not-utf-8": (write(TOKENIZER, b"\xff"), "not UTF-8"),
    "words-list": (write(TOKENIZER, []), "list instead"),
    "words-deep-lists": (write(TOKENIZER, "[" * 100_000), "nested"),
    "words-deep-tables": (write(TOKENIZER, '{"a":' * 100_000), "nested"),
    "words-deep-inside": (tokenizer(normalizer=json.loads(nested(600))), "cannot be used|nested"),
    "words-of-the-future": (tokenizer(version="2.0"), "version '2.0'"),
    "words-version-long": (tokenizer(version=LONG), "version"),
    "words-without-a-model": (tokenizer(model=None), "no model"),
    "words-model-unknown": (tokenizer(model={"type": "Hostile"}), "cannot be used"),
    "words-vocabulary-null": (
        tokenizer(model={"type": "WordLevel", "vocab": None, "unk_token": "a"}),
        "cannot be used",
    ),
    "words-merge-unknown-long": (
        tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", LONG]]}),
        "cannot be used",
    ),
    "words-merge-without-its-prefix-long": (
        tokenizer(
            model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", LONG]], "continuing_subword_prefix": f"#{LONG}"}
        ),
        "merge",
    ),
    "words-half-a-character": (write(TOKENIZER, json.dumps(words()).replace("w60", "\\ud800")), "cannot be used"),
    "words-201-MB": (both(tokenizer(), cut(TOKENIZER, 201_000_000)), "201000000 bytes"),
    "words-more-than-the-model": (tokenizer(62), "62 tokens.*vocab_size is 61"),
    "words-far-beyond-the-model": (
        tokenizer(model={"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}),
        "the id 4294967295",
    ),
    "words-catastrophic-split": (tokenizer(pre_tokenizer=split("(a+)+$")), r"\(a\+\)\+\$"),
    "words-catastrophic-normalizer": (tokenizer(normalizer=replace("(a|aa)+$")), r"\(a\|aa\)"),
    "words-catastrophic-decoder": (tokenizer(decoder=replace("(.*)*x")), r"\(\.\*\)\*x"),
    "words-catastrophic-inside": (
        tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [split(r"\w+"), split("(x*)*y")]}),
        r"\(x\*\)\*y",
    ),
    "words-charsmap-of-junk": (tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "used"),
    "words-that-grow": (
        tokenizer(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": LONG}),
        "1 character into 5000",
    ),
    "words-directory": (directory(TOKENIZER), "not a file"),
    "words-fifo": (fifo(TOKENIZER), "not a file"),
    "words-link-out": (link(TOKENIZER, "OUTSIDE/tokenizer.json"), "outside its folder"),
    "words-link-to-itself": (link(TOKENIZER, TOKENIZER), "link|not a file"),
}
WORD_SETTINGS = {
    "not-JSON": ("{", "not JSON"),
    "list": ([], "list instead"),
    "deep": ("[" * 100_000, "nested"),
    "role-list": ({"pad_token": ["w1"]}, "pad_token"),
    "role-long": ({"pad_token": [LONG]}, "pad_token"),
}
TOKENIZER_SETTINGS = {
    f"{name.removesuffix('.json')}-{what}": Case("worded", damage, f"{name}|{TOKENIZER}", reason)
    for name in (TOKENIZER_CONFIG, SPECIAL)
    for what, damage, reason in (
        *((what, write(name, content), reason) for what, (content, reason) in WORD_SETTINGS.items()),
        ("fifo", fifo(name), "not a file"),
        ("directory", directory(name), "not a file"),
        ("dangling", link(name, "nowhere"), "not a file"),
        ("link-out", link(name, "OUTSIDE/words.json"), "outside its folder"),
    )
} | {
    f"{key}-in-tokenizer_config": Case(
        "worded", write(TOKENIZER_CONFIG, {key: {"a": "hostile.A"}}), TOKENIZER_CONFIG, key
    )
    for key in ("auto_map", "trust_remote_code")
}
GENERATING = {
    "generation-not-JSON": (write(GENERATION, "{"), "not valid JSON"),
    "generation-list": (write(GENERATION, []), "not contain a JSON object"),
    "generation-end-string": (write(GENERATION, {"eos_token_id": "1"}), "eos_token_id"),
    "generation-end-of-strings": (write(GENERATION, {"eos_token_id": [1, "2"]}), "eos_token_id"),
    "generation-fifo": (fifo(GENERATION), "not a file"),
    "generation-link-out": (link(GENERATION, "OUTSIDE/generation_config.json"), "outside its folder"),
}
POOLINGS = {
    "pooling-not-JSON": (write(POOLING, "{"), "not valid JSON"),
    "pooling-list": (write(POOLING, []), "not contain a JSON object"),
    "pooling-none": (write(POOLING, {}), "mean_tokens"),
    "pooling-two": (write(POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}), "cls_token"),
    "pooling-unknown": (write(POOLING, {"pooling_mode_max_tokens": True}), "max_tokens"),
    "pooling-number": (write(POOLING, {"pooling_mode_mean_tokens": 1}), "mean_tokens"),
    "pooling-thousands": (write(POOLING, {f"pooling_mode_{i}": True for i in range(5000)}), "mean_tokens"),
    "pooling-fifo": (fifo(POOLING), "not a file"),
    "pooling-link-out": (link(POOLING, "OUTSIDE/pooling.json"), "outside its folder"),
}
LOOSE = {
    "pooling-folder-link-out": Case("bert-bare", link("1_Pooling", "OUTSIDE"), POOLING, "outside its folder"),
    "verified-link-out": Case("gpt2", link(VERIFIED, "OUTSIDE/words.json"), VERIFIED, "outside its folder"),
    "verified-fifo": Case("gpt2", fifo(VERIFIED), VERIFIED, "not a file"),
}
CASES = {
    **{f"config-{name}": case for name, case in on("gpt2", CONFIG, JSON | SETTINGS).items()},
    **{f"config-{name}": case for name, case in on("gpt2", EITHER, TOO_LARGE).items()},
    **on("llama", CONFIG, ROPE),
    **on("qwen2", CONFIG, WINDOWS),
    **on("bert-labels", CONFIG, LABELS),
    **on("own", CONFIG, OWN),
    **on("ours", CONFIG, OURS),
    **{f"weights-{name}": case for name, case in on("gpt2", WEIGHTS, FILE).items()},
    **MORE_SHAPES,
    **on("sharded", ENTRIES, SHARDS),
    **CODE,
    **on("gpt2", TOKENIZER, WORDS),
    **TOKENIZER_SETTINGS,
    **on("gpt2", GENERATION, GENERATING),
    **on("bert-bare", POOLING, POOLINGS),
    **LOOSE,
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(valid_checkpoints: Path, outside: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    shutil.copytree(valid_checkpoints / case.base, tmp_path / "model")
    case.damage(tmp_path / "model")
    refuse(tmp_path / "model", case.file, case.reason)


def test_the_target_of_outside_links_is_valid(outside: Path) -> None:
    _, tok = gh.load(outside)
    assert tok is not None


@pytest.fixture
def model(valid_checkpoints: Path, tmp_path: Path) -> Path:
    shutil.copytree(valid_checkpoints / "gpt2", tmp_path / "model")
    return tmp_path / "model"


def test_a_flipped_bit_in_the_header_is_refused_or_changes_nothing(model: Path) -> None:
    whole = (model / WEIGHTS).read_bytes()
    expected = gh.load(model)[0].state_dict()
    refused = 0
    for offset in [*range(8), *range(8, 8 + int.from_bytes(whole[:8], "little"), 19)]:
        flipped = bytearray(whole)
        flipped[offset] ^= 1
        (model / WEIGHTS).write_bytes(flipped)
        try:
            found = gh.load(model)[0].state_dict()
        except gh.GlasshouseError as error:
            assert WEIGHTS in str(error), offset  # noqa: PT017 - either outcome is right
            refused += 1
        else:
            assert all(tensor.equal(found[key]) for key, tensor in expected.items()), offset
    assert refused > 100


def test_json_as_deep_as_the_parser_allows_is_refused_in_one_sentence(model: Path) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 250, limit):
        write(CONFIG, f'{{"model_type": "gpt2", "n_layer": 2, "colour": {nested(depth)}}}')(model)
        with pytest.raises(gh.GlasshouseError, match=r"config\.json"):
            gh.load(model)


# Code ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it creates the file at its path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.ckpt"])
def test_a_pickle_is_not_opened_and_the_error_says_how_to_convert_it(model: Path, file: str) -> None:
    bomb = pickle.dumps(Bomb(str(model.parent / "gone-off")))
    (model / WEIGHTS).unlink()
    (model / file).write_bytes(bomb)
    text = refuse(model, file, r"convert it .*save_pretrained")
    assert "safetensors" in text
    assert not (model.parent / "gone-off").exists()
    pickle.loads(bomb)  # it would have
    assert (model.parent / "gone-off").exists()


@pytest.mark.parametrize("ignored", [(), ("auto_map",)], ids=["plain", "with-the-key-ignored"])
def test_code_next_to_the_weights_is_never_opened(model: Path, ignored: tuple[str, ...]) -> None:
    (model / "hostile.py").write_text(f"import pathlib; pathlib.Path({str(model.parent / 'ran')!r}).touch()")
    (model / "chat_template.jinja").write_text("{{ cycler.__init__.__globals__.os.system('id') }}")
    config(auto_map={"AutoModelForCausalLM": "hostile.Model"})(model)
    refuse(model, CONFIG, "auto_map", ignore=ignored)
    edit(CONFIG, lambda table: table.pop("auto_map"))(model)
    with audited(model) as forbidden:
        gh.load(model)
    assert forbidden == []
    assert not (model.parent / "ran").exists()


def test_a_key_of_the_rope_settings_can_be_ignored_as_the_error_says(valid_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(valid_checkpoints / "llama", tmp_path / "model")
    rope(rope_type="default", colour=1)(tmp_path / "model")
    refuse(tmp_path / "model", CONFIG, r"ignore=\['colour'\]")
    gh.load(tmp_path / "model", ignore=["colour"])


# The cache of huggingface_hub ---------------------------------------------------------------------------------


@pytest.fixture
def snapshot(valid_checkpoints: Path, tmp_path: Path) -> Path:
    """Lay out a model as the hub's cache does: symlinks to blobs named by their hash."""
    return cache(valid_checkpoints / "bert-bare", tmp_path / "hub" / "models--someone--model")


def cache(folder: Path, repository: Path) -> Path:
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (repository / "blobs" / "pooling").write_text('{"pooling_mode_cls_token": true}')
    (snapshot / POOLING).symlink_to("../../../blobs/pooling")
    return snapshot


def test_links_inside_one_cached_repository_are_followed(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "named"):
        with audited(snapshot.parents[1]) as forbidden:
            model, _ = gh.load(place)
        assert forbidden == []
        assert model.spec.head == gh.spec.Pooled("first")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, POOLING])
def test_links_to_another_repository_are_not(valid_checkpoints: Path, snapshot: Path, name: str) -> None:
    other = cache(valid_checkpoints / "bert-bare", snapshot.parents[2] / "models--someone--secret")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to((other / name).resolve())
    refuse(snapshot, name, "outside its folder")


def test_a_cache_whose_blobs_are_links_is_refused(snapshot: Path, outside: Path) -> None:
    blob = (snapshot / WEIGHTS).resolve()
    blob.unlink()
    blob.symlink_to(outside / WEIGHTS)
    refuse(snapshot, WEIGHTS, "outside its folder")
    blobs = blob.parent.rename(outside / "blobs")
    blob.parent.symlink_to(blobs)
    refuse(snapshot, CONFIG, "outside its folder")


@pytest.mark.parametrize(
    ("snapshots", "file"),
    [
        ("models--someone--model/snapshots", WEIGHTS),
        ("models--someone--model/refs", CONFIG),
        ("datasets--someone--model/snapshots", CONFIG),
        ("model/snapshots", CONFIG),
    ],
)
def test_only_a_snapshot_may_link_and_only_to_blobs(
    valid_checkpoints: Path, tmp_path: Path, snapshots: str, file: str
) -> None:
    snapshot = cache(valid_checkpoints / "gpt2", tmp_path / "cache")
    (tmp_path / "cache" / "more").mkdir()
    shutil.copy(valid_checkpoints / "gpt2" / WEIGHTS, tmp_path / "cache" / "more")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(f"../../more/{WEIGHTS}")
    repository, name = snapshots.split("/")
    snapshot.parent.rename(snapshot.parent.with_name(name))
    (tmp_path / "cache").rename(tmp_path / repository)
    refuse(tmp_path / snapshots / snapshot.name, file, "outside its folder")


# What the user gives, and what is shown -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    ["nowhere/at/all", "model/model.safetensors", "~nobody-of-this-name/model", LONG, "a\0b"],
    ids=["nowhere", "a-file", "home-of-nobody", "long", "zero-byte"],
)
def test_a_path_that_is_no_folder_is_refused_in_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(model.parent)
    for given in (place, Path(place)):
        with audited(model) as forbidden, pytest.raises(gh.GlasshouseError, match=r"no.* folder") as caught:
            gh.load(given)
        assert forbidden == []
        assert len(str(caught.value)) < 400


SEEN = {"date": "2026-11-15", "differences": {"cached": 2e-7}}
VERIFICATIONS = {
    "not-JSON": "{",
    "list": "[]",
    "deep": "[" * 100_000,
    "table-of-nothing": '{"date": "2026-11-15"}',
    "no-differences": json.dumps({**SEEN, "differences": {}}),
    "differences-of-words": json.dumps({**SEEN, "differences": {"cached": "none"}}),
    "differences-nan": json.dumps({**SEEN, "differences": {"cached": float("nan")}}),
    "no-date": json.dumps({"differences": SEEN["differences"]}),
    "date-table": json.dumps({**SEEN, "date": {}}),
    "date-long": json.dumps({**SEEN, "date": LONG}),
    "date-ugly": json.dumps({**SEEN, "date": UGLY}),
    "check-ugly": json.dumps({**SEEN, "differences": {UGLY: 0.0}}),
    "files-of-words": json.dumps({**SEEN, "files": "large"}),
    "of-other-weights": json.dumps({**SEEN, "files": {WEIGHTS: "0" * 64}}),
}


def of_these_weights(model: Path, text: str) -> str:
    """Complete a table with the hashes of the files, so that only its other defects show."""
    if not text.startswith('{"'):
        return text
    return json.dumps({"files": fingerprints(model)} | json.loads(text))


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_damaged_results_of_verify_are_reported_without_an_error(
    model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(VERIFIED, of_these_weights(model, VERIFICATIONS[name]))(model)
    with audited(model) as forbidden:
        gh.load(model)
    assert forbidden == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert len(line.replace(str(model), "")) < 400
    assert "glasshouse verify" in line
    assert "2026" not in line


def test_valid_results_of_verify_are_shown(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(VERIFIED, of_these_weights(model, json.dumps(SEEN)))(model)
    gh.load(model)
    assert "verified 2026-11-15, largest differences: cached 2.0e-07" in capsys.readouterr().err


# The watch sees -----------------------------------------------------------------------------------------------


def connect() -> None:
    with socket.socket() as one, pytest.raises(OSError, match=r"refused|denied|unreachable"):
        one.connect(("127.0.0.1", 9))


PROVOKED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "reading-outside": ("open", lambda model: (model.parent / "secret.json").read_text()),
    "reading-through-a-link": ("open", lambda model: (model / "link.json").read_text()),
    "reading-code-inside": ("open", lambda model: (model / "hostile.py").read_text()),
    "writing-inside": ("open", lambda model: (model / CONFIG).open("a").close()),
    "removing": ("os.remove", lambda model: (model / CONFIG).unlink()),
    "listing-outside": ("os.listdir", lambda model: list(model.parent.iterdir())),
    "connecting": ("socket.connect", lambda model: connect()),
    "looking-a-name-up": ("socket.getaddrinfo", lambda model: socket.getaddrinfo("127.0.0.1", 9)),
    "a-process": ("subprocess.Popen", lambda model: subprocess.run(["true"], check=True)),
    "a-shell": ("os.system", lambda model: os.system("true")),
    "a-pickle": ("pickle.find_class", lambda model: pickle.loads(pickle.dumps(Bomb(str(model / "gone-off"))))),
    "compiling": ("compile", lambda model: compile("1 + 1", "<string>", "eval")),
    "evaluating": ("compile", lambda model: eval("1 + 1")),
    "running-code-inside": ("exec", lambda model: exec(compile("1", str(model / "hostile.py"), "exec"))),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_the_audit_hook_sees_forbidden_events(model: Path, name: str) -> None:
    (model / "hostile.py").write_text("1")
    (model.parent / "secret.json").write_text("{}")
    (model / "link.json").symlink_to("../secret.json")
    event, provoke = PROVOKED[name]
    with audited(model) as forbidden:
        provoke(model)
    assert any(line.startswith(f"{event} ") for line in forbidden), forbidden


def test_the_audit_hook_sees_a_hang(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(model / "pipe.json")
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 50))
    with pytest.raises(pytest.fail.Exception, match="not done"), audited(model):
        (model / "pipe.json").read_text()
