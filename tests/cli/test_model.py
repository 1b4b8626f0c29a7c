"""Commands for models as scripts and people meet them: answers and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import glasshouse as gh
from cli.runner import Call

SIZE = {"vocab_size": 61, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_len": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gh.save(gh.build(gh.preset("gpt2", **SIZE)), None, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_verify_saves_its_result_and_load_shows_it(
    folder: Path, call: Call, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    done = call("verify", folder)
    assert done.code == 0, done.err
    shown = dict(re.findall(r"^(cached|batched|padded|round trip|transformers) +([0-9.e+-]+)", done.out, re.M))
    assert len(shown) == 5
    table = json.loads((folder / "verified.json").read_text())
    assert {name: f"{value:.1e}" for name, value in table["differences"].items()} == shown
    assert table["differences"]["round trip"] == 0
    assert all(value <= table["limits"][name] for name, value in table["differences"].items())
    gh.load(folder)
    assert f"verified {table['date']}" in capfdbinary.readouterr().err.decode()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("preset", "not_compared"),
    [("tiny-seq2seq", {"transformers"}), ("tiny-encoder", {"cached"}), ("tiny-decoder", {"transformers"})],
)
def test_verify_reports_what_it_could_not_compare(preset: str, not_compared: set[str], tmp_path: Path) -> None:
    settings = {"norm_placement": "sandwich"} if preset == "tiny-decoder" else {}
    gh.save(gh.build(gh.preset(preset, **settings)), None, tmp_path / "model")
    checks = gh.evaluation.verify(tmp_path / "model")
    assert {check.name for check in checks if check.difference is None} == not_compared
    assert all(check.passed for check in checks)


def test_verify_fails_a_model_that_depends_on_how_it_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is looked at, a batch that matters, a cache that forgets: each shows."""
    real = gh.models.Decoder.forward

    def broken(self, ids, *, lengths=None, cache=None, **told):  # noqa: ANN001, ANN003, ANN202
        out = real(self, ids, lengths=lengths, cache=cache, **told)
        return out * (1 + 1e-3 * (ids.shape[1] + len(ids) + (cache is not None)))

    monkeypatch.setattr(gh.models.Decoder, "forward", broken)
    failed = {check.name for check in gh.evaluation.verify(folder) if not check.passed}
    assert failed == {"cached", "batched", "padded", "transformers"}


def test_verify_fails_a_model_with_nan_weights(folder: Path) -> None:
    model, _ = gh.load(folder)
    with torch.no_grad():
        model.token_embedding.table.weight[7] = torch.nan  # one token of 61: most rows of a batch do not meet it
    gh.save(model, None, folder)
    assert not any(check.passed for check in gh.evaluation.verify(folder) if check.name != "cached")


def test_a_verification_result_does_not_apply_to_other_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gh.evaluation.verify(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    gh.load(folder, check=False)
    assert "is of other weights or another config" in capsys.readouterr().err


def test_verify_knows_every_architecture_it_reads(tmp_path: Path) -> None:
    config = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    for kind, its in ((hf.BertForPreTraining, hf.BertConfig), (hf.RobertaForMaskedLM, hf.RobertaConfig)):
        kind(its(**config, num_attention_heads=2)).save_pretrained(tmp_path / kind.__name__)
        assert all(check.passed for check in gh.evaluation.verify(tmp_path / kind.__name__))


def test_export_keeps_the_stored_type_and_ignores_on_request(folder: Path, tmp_path: Path, call: Call) -> None:
    gh.save(gh.load(folder)[0].bfloat16(), None, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "green"}))
    assert "colour" in call("export", folder, tmp_path / "out").err
    assert call("export", folder, tmp_path / "out", "--ignore", "colour").code == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_export_names_the_family_or_the_obstacle(folder: Path, tmp_path: Path, call: Call) -> None:
    done = call("export", folder, tmp_path / "out")
    assert done.code == 0, done.err
    assert "of type gpt2, without a tokenizer" in done.out
    assert (tmp_path / "out" / "config.json").exists()
    gh.save(gh.build(gh.preset("gpt2", **SIZE, position="alibi")), None, tmp_path / "alibi")
    done = call("export", tmp_path / "alibi", tmp_path / "never")
    assert done.code == 1
    assert done.err.startswith("error: no transformers family can express this model")
    assert "position" in done.err
    assert not (tmp_path / "never").exists()


def test_a_mistake_is_one_sentence_and_exit_code_one(tmp_path: Path, call: Call) -> None:
    done = call("verify", tmp_path / "absent" / "model")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there is no folder")
    assert done.err.count("\n") == 1
    assert call("verify").code == 2
