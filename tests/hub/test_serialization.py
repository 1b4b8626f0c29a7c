"""Load and save: native format, variants of published files, dtypes, shards, the hub's cache."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
import transformers as hf
from hub.hf_models import make
from safetensors.torch import load_file, save_file

import glasshouse as gh
from glasshouse import hub
from glasshouse.hub import model_folder as hub_folder

SIZE = {"vocab_size": 61, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_len": 16}


def tiny(**settings: object) -> gh.models.Decoder:
    return gh.build(gh.preset("gpt2", **SIZE, **settings)).eval()


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(tensor.equal(its[name]) for name, tensor in mine.items())


# Tokenizers without tokenizer.json ---------------------------------------------------------------------------


def test_vocabulary_files_load_and_are_saved_as_a_tokenizer_json(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    gh.save(tiny(), None, folder)
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    model, tok = gh.load(folder)
    assert tok is not None
    assert (tok.encode("B a"), model.tokenizer_fingerprint) == ([1, 6, 5, 2], tok.fingerprint)
    gh.save(model, tok, folder)  # in place of the older files
    again, same = gh.load(folder)
    assert same is not None
    assert same.fingerprint == tok.fingerprint
    assert same_weights(again, model)
    assert hf.AutoTokenizer.from_pretrained(folder).encode("B a") == [1, 6, 5, 2]
    assert not (folder / "vocab.txt").exists()


def test_a_tokenizer_of_another_class_is_left_out_with_a_warning(tmp_path: Path) -> None:
    gh.save(tiny(), None, tmp_path / "model")
    for name in ("source.spm", "target.spm", "vocab.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    with pytest.warns(
        UserWarning, match=r"MarianTokenizer is not supported; .* The model loads without a tokenizer\.$"
    ):
        _, tok = gh.load(tmp_path / "model")
    assert tok is None


# What no family can say -------------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize("name", gh.presets())
def test_every_preset_is_saved_and_comes_back(name: str, tmp_path: Path) -> None:
    small = {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 61, "max_len": 16}
    model = gh.build(gh.preset(name, **small))
    gh.save(model, None, tmp_path / "model")
    back, _ = gh.load(tmp_path / "model")
    assert back.spec == model.spec
    assert same_weights(model, back)


@pytest.mark.parametrize(
    ("settings", "family", "fields"),
    [
        ({"position": "alibi"}, "gpt2", "position"),
        ({"norm_placement": "sandwich"}, "gpt2", "norm_placement"),
        ({"attention_softcap": 30.0}, "gpt2", "attention_softcap"),
        ({"logit_softcap": 30.0}, "gpt2", "logit_softcap"),
        ({"d_head": 12, "ffn_bias": False}, "gpt2", "ffn_bias, d_head"),
    ],
)
def test_export_names_the_unsupported_fields(
    settings: dict[str, object], family: str, fields: str, tmp_path: Path
) -> None:
    model = tiny(**settings)
    with pytest.raises(gh.ConfigError) as error:
        hub.export(model, None, tmp_path / "exported")
    assert f"the nearest is {family}" in str(error.value)
    assert set(fields.split(", ")) == set(str(error.value).split("support its ")[1].removesuffix(".").split(", "))
    assert not (tmp_path / "exported").exists()
    gh.save(model, None, tmp_path / "saved")
    assert same_weights(model, gh.load(tmp_path / "saved")[0])


def test_training_settings_survive_if_the_family_cannot_express_them(tmp_path: Path) -> None:
    spec = gh.preset("llama-small", **SIZE, n_kv_heads=1, dropout=0.25, embed_dropout=0.5, init="zero_output")
    gh.save(gh.build(spec), None, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
    assert gh.load(tmp_path / "model")[0].spec == spec


def test_a_config_edited_on_one_side_only_is_refused(tmp_path: Path) -> None:
    gh.save(tiny(), None, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 1e-3}))
    with pytest.raises(gh.StoreError, match="contradicts its own section 'glasshouse' \\(in norm\\)"):
        gh.load(tmp_path / "model")


# Variants of published files -------------------------------------------------------------------------------


def rewrite(folder: Path, change: dict[str, str]) -> None:
    """Rename tensors of a saved model by parts of their names."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in change.items():
            name = re.sub(old, new, name)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", {"transformer.": ""}),  # as GPT-2 itself was published
        ("bert-masked", {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}),  # as BERT was
        ("bert-bare", {"^": "bert."}),
        ("bert-masked", {"cls.predictions.bias": "cls.predictions.decoder.bias"}),
        ("t5", {"^shared": "encoder.embed_tokens"}),
    ],
)
def test_older_names_mean_the_same(name: str, change: dict[str, str], tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path)
    before, _ = gh.load(tmp_path, dtype=torch.float64)
    rewrite(tmp_path, change)
    after, _ = gh.load(tmp_path, dtype=torch.float64)
    assert after.spec == before.spec
    assert same_weights(before, after)


def test_unused_tensors_are_ignored(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()  # the tied head, once more
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = gh.load(tmp_path)
    assert model.spec.head == gh.spec.NextToken(tied=True)


def test_a_stored_head_overrides_the_config_as_in_transformers(tmp_path: Path) -> None:
    theirs = make("gpt2")
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(61, 40))
    theirs.save_pretrained(tmp_path)
    model, _ = gh.load(tmp_path)
    assert model.spec.head == gh.spec.NextToken(tied=False)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = hf.GPT2LMHeadModel.from_pretrained(tmp_path)(ids).logits
        assert (model(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_logits_bias_that_is_absent_is_none(tmp_path: Path) -> None:
    make("bart").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = gh.load(tmp_path)
    assert model.spec.head == gh.spec.NextToken(tied=True, bias=False)
    hub.export(model, None, tmp_path / "exported")
    assert hf.BartForConditionalGeneration.from_pretrained(tmp_path / "exported").final_logits_bias.abs().max() == 0


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5, 7]}')
    assert gh.load(tmp_path)[0].spec.end_ids == (2, 5, 7)


def test_ids_beyond_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path)  # whose config still says 50256
    spec = gh.load(tmp_path)[0].spec
    assert (spec.start_id, spec.end_ids) == (None, ())


def test_labels_keep_their_names(tmp_path: Path) -> None:
    make("bert-labels").save_pretrained(tmp_path / "theirs")
    model, _ = gh.load(tmp_path / "theirs")
    assert model.spec.head.labels == ("bad", "fair", "good")
    hub.export(model, None, tmp_path / "ours")
    assert hf.AutoConfig.from_pretrained(tmp_path / "ours").id2label == {0: "bad", 1: "fair", 2: "good"}


def test_older_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    make("llama-llama3").save_pretrained(tmp_path)
    expected = gh.load(tmp_path)[0].spec
    path = tmp_path / "config.json"
    table = json.loads(path.read_text())
    rope = table.pop("rope_parameters")
    table |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    path.write_text(json.dumps(table))
    assert gh.load(tmp_path)[0].spec == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "colour", "green"),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("bert-masked", "position_embedding_type", "relative_key"),
        ("bart", "decoder_ffn_dim", 57),
        ("bart", "decoder_attention_heads", None),
        ("t5", "dense_act_fn", "gelu_new"),
        ("t5", "is_gated_act", True),
        ("marian", "share_encoder_decoder_embeddings", False),
        ("gpt2", "n_embd", "forty"),
        ("gpt2", "activation_function", "mish"),
        ("gpt2", "architectures", ["GPT2DoubleHeadsModel"]),
        ("gpt2", "model_type", "gpt3"),
    ],
)
def test_unsupported_settings_are_named(name: str, key: str, value: object, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(gh.StoreError) as error:
        gh.load(tmp_path)
    word = {"rope_parameters": "dynamic", "architectures": "GPT2DoubleHeadsModel"}.get(key, key)
    assert word in str(error.value)
    assert "config.json" in str(error.value)


def test_a_key_may_be_ignored(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    expected, _ = gh.load(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "green"}))
    model, _ = gh.load(tmp_path, ignore=["colour"])
    assert model.spec == expected.spec
    assert same_weights(model, expected)


# Shards, types, memory --------------------------------------------------------------------------------------


def test_shards_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    monkeypatch.setattr(hub_folder, "SHARD_BYTES", 8000)
    gh.save(model, None, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    assert same_weights(model, gh.load(tmp_path / "model")[0])
    theirs = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert theirs.transformer.wte.weight.equal(model.token_embedding.table.weight)


def test_shards_of_transformers_are_read(tmp_path: Path) -> None:
    theirs = make("t5-1.1")
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert same_weights(gh.load(tmp_path / "one")[0], gh.load(tmp_path / "many")[0])


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),  # the CPU is many times faster in it
        (torch.float16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_types(stored: torch.dtype, asked: torch.dtype | None, expected: torch.dtype, tmp_path: Path) -> None:
    model = tiny().to(stored)
    gh.save(model, None, tmp_path / "model")
    back, _ = gh.load(tmp_path / "model", dtype=asked)
    assert {weight.dtype for weight in back.parameters()} == {expected}
    assert same_weights(model.to(expected), back)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")


MEASURE = """
import torch
import glasshouse as gh, glasshouse.hub
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
gh.load(folder + "/small", dtype=dtype)  # what is needed once, whatever the size
before = anonymous()
model, _ = gh.load(folder + "/large", dtype=dtype)
loaded = anonymous()
copies = [torch.ones_like(weight) for weight in model.parameters()]  # what the allocator rounds up counts, too
size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
print((loaded - before) / (anonymous() - loaded), size, file=open(folder + "/measured", "w"))
"""


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of memory")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.1), ("bfloat16", 1.1)])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=20_000, n_embd=640, n_layer=3, n_head=10)),
        (
            hf.LlamaForCausalLM,
            hf.LlamaConfig(
                vocab_size=20_000,
                hidden_size=640,
                intermediate_size=2560,
                num_hidden_layers=3,
                num_attention_heads=10,
                num_key_value_heads=5,
            ),
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_loading_takes_no_more_memory_than_the_weights(
    kind: type[hf.PreTrainedModel], config: hf.PreTrainedConfig, dtype: str, most: float, tmp_path: Path
) -> None:
    """In the stored dtype far less: the file stays memory-mapped."""
    make("gpt2").save_pretrained(tmp_path / "small")
    kind(config).save_pretrained(tmp_path / "large")
    code = processes.run(exec, MEASURE, {"folder": str(tmp_path), "dtype": getattr(torch, dtype)})
    assert code == 0
    grown, size = map(float, (tmp_path / "measured").read_text().split())
    assert size > 50e6
    assert grown <= most


def test_training_a_loaded_model_leaves_the_file_alone(tmp_path: Path) -> None:
    gh.save(tiny(), None, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    model, _ = gh.load(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(10)[None]).square().mean().backward()
    optimizer.step()
    assert not same_weights(model, gh.load(tmp_path / "model")[0])
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    gh.save(model, None, tmp_path / "model")  # over the file that its own weights are mapped from
    assert same_weights(model, gh.load(tmp_path / "model")[0])


# Places -----------------------------------------------------------------------------------------------------


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("two years of work")
    with pytest.raises(gh.StoreError, match=r"contains 'thesis.txt', which would be lost"):
        gh.save(tiny(), None, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "two years of work"


def test_a_save_that_fails_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny()
    gh.save(first, None, tmp_path / "model")

    def fail(*_: object) -> None:
        raise OSError("no space left on the device")

    monkeypatch.setattr(gh.store, "write_tensors", fail)
    with pytest.raises(OSError, match="no space"):
        gh.save(tiny(), None, tmp_path / "model")
    assert same_weights(first, gh.load(tmp_path / "model")[0])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_changed_by_hand_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    first, model = tiny(), tiny()
    gh.save(first, None, tmp_path / "model")
    model.stack.blocks[0].feedforward = torch.nn.Linear(16, 16)
    for write in (gh.save, hub.export):
        with pytest.raises(gh.InputError, match=r"blocks.0.feedforward is Linear\(.*, but the spec has PreNorm"):
            write(model, None, tmp_path / "model")
    for changed, sentence in (
        (
            tiny().to(torch.float8_e4m3fn),
            "token_embedding.table.weight is torch.float8_e4m3fn, which cannot be saved",
        ),
        (tiny().to("meta"), "token_embedding.table.weight is on the device 'meta' and has no data"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            gh.save(changed, None, tmp_path / "model")
    assert same_weights(first, gh.load(tmp_path / "model")[0])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_model_is_saved_as_the_model_it_is(tmp_path: Path) -> None:
    model = tiny()
    plain = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.stack.blocks[0] = torch.compile(model.stack.blocks[0])
    gh.save(torch.compile(model), None, tmp_path / "model")
    back, _ = gh.load(tmp_path / "model")
    assert all(weight.equal(plain[name]) for name, weight in back.state_dict().items())


def cached_repository(home: Path, folder: Path) -> None:
    """Lay out a model as huggingface_hub does: blobs, and a snapshot of symlinks to them."""
    repository = home / "hub" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))  # noqa: PTH118


@pytest.mark.long
@pytest.mark.slow
def test_a_hub_id_is_found_in_the_cache_without_a_network(tmp_path: Path) -> None:
    model = tiny()
    gh.save(model, None, tmp_path / "model")
    cached_repository(tmp_path / "home", tmp_path / "model")
    code = (
        "import glasshouse as gh\n"
        "for revision in (None, 'main', '0123456789abcdef0123456789abcdef01234567'):\n"
        "    model, _ = gh.load('someone/tiny', revision=revision)\n"
        "print(gh.count_parameters(model.spec))\n"
        "for revision in (None, 'v2'):\n"
        "    try:\n        gh.load('someone/absent', revision=revision)\n"
        "    except gh.InputError as error:\n        print(error)\n"
    )
    surroundings = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=surroundings, check=False)
    assert done.returncode == 0, done.stderr
    count, *sentences = done.stdout.splitlines()
    assert int(count) == gh.count_parameters(model.spec)
    assert sentences == 2 * [
        "there is no folder 'someone/absent', no model of that name in the cache, and the Hugging Face hub "
        "cannot be reached; give the folder of a model, or try again with a connection."
    ]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RepositoryNotFoundError", "no public model of that name on the Hugging Face hub; give another, or set"),
        ("GatedRepoError", "'someone/absent' is a gated repository of the hub; accept its terms"),
        ("RevisionNotFoundError", "revision is 'v2', which 'someone/absent' does not have on the hub"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: object, **__: object) -> None:
        error = getattr(errors, kind)
        raise error.__new__(error, "404 Client Error.\n\nA page of text")  # created without a server response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(gh.InputError, match=message) as caught:
        gh.load("someone/absent", revision="v2")
    assert "Client Error" not in str(caught.value)


def test_a_folder_without_a_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(gh.StoreError, match=r"there is no .*config\.json"):
        gh.load(tmp_path)
    with pytest.raises(gh.InputError, match="there is no folder"):
        gh.load(tmp_path / "absent")
    with pytest.raises(gh.InputError, match="revision is 'main'"):
        gh.load(tmp_path, revision="main")


def test_a_file_or_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").write_text("kept")
    with pytest.raises(gh.StoreError, match="is a file"):
        gh.save(tiny(), None, tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "kept"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(gh.StoreError, match="the current folder"):
        gh.save(tiny(), None, ".")


def test_a_symlink_to_a_folder_is_kept_and_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        model = tiny()
        gh.save(model, None, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert same_weights(model, gh.load(tmp_path / "disk")[0])
    monkeypatch.setenv("HOME", str(tmp_path))
    gh.save(tiny(), None, "~/mine")
    gh.load("~/mine")
    assert (tmp_path / "mine" / "config.json").exists()


# What goes along with the weights ---------------------------------------------------------------------------


def test_a_model_generates_the_same_after_a_round_trip(tmp_path: Path) -> None:
    """Generation settings are in generation_config.json, or in older folders in config.json."""
    theirs = make("bart")
    settings = {"num_beams": 3, "forced_bos_token_id": 7, "forced_eos_token_id": 2, "no_repeat_ngram_size": 2}
    theirs.generation_config.update(**settings, bad_words_ids=[[11]])
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.arange(3, 15)[None]
    for older in (False, True):
        if older:
            path = tmp_path / "theirs" / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | settings | {"bad_words_ids": [[11]]}))
            (tmp_path / "theirs" / "generation_config.json").unlink()
        expected = hf.BartForConditionalGeneration.from_pretrained(tmp_path / "theirs").generate(ids, max_length=12)
        gh.save(gh.load(tmp_path / "theirs")[0], None, tmp_path / "ours")
        back = hf.BartForConditionalGeneration.from_pretrained(tmp_path / "ours")
        assert back.generate(ids, max_length=12).equal(expected)
        assert (back.generation_config.num_beams, back.generation_config.forced_bos_token_id) == (3, 7)


def test_changed_end_tokens_override_the_generation_config(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.7}')
    model, _ = gh.load(tmp_path / "theirs")
    model.spec = dataclasses.replace(model.spec, end_ids=(5,))
    gh.save(model, None, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["temperature"]) == (5, 0.7)


@pytest.mark.parametrize("family", hub.FAMILIES.values(), ids=hub.FAMILIES)
def test_defaults_are_those_of_transformers(family: hub.family.Family) -> None:
    config = hf.AutoConfig.for_model(family.model_type)
    zero = {"d_ff", "n_kv_heads", "d_head", "n_layers"}  # sizes derived from others if absent
    for mapping in family.key_mappings:
        if not (mapping.spec_field in zero and mapping.default == 0) and mapping.hf_key != "n_positions":
            assert getattr(config, mapping.hf_key) == mapping.default, mapping.hf_key


def test_files_of_other_versions_of_gpt_neox(tmp_path: Path) -> None:
    """Old ones have masks and frequencies, too; the head is embed_out in files, and lm_head in transformers 5."""
    make("gpt_neox").save_pretrained(tmp_path / "model")
    before, _ = gh.load(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    for name, extra in (
        ("bias", torch.ones(1, 1, 4, 4)),
        ("masked_bias", torch.ones(())),
        ("rotary_emb.inv_freq", 0),
    ):
        tensors[f"gpt_neox.layers.0.attention.{name}"] = torch.as_tensor(extra)
    save_file(tensors, path)
    after, _ = gh.load(tmp_path / "model")
    assert after.spec == before.spec
    assert same_weights(before, after)
