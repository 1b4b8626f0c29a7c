"""Code in a model folder, named by a setting, pickled or lying there, is never opened."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hub.audit import audited, refuse
from hub.damage import CONFIG, GENERATION, INDEX, POOLING, WEIGHTS, Bomb, Case, RefuseCase, both, config, edit, write

import glasshouse as gh

CASES = {
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


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(refuse_case: RefuseCase, name: str) -> None:
    refuse_case(CASES[name])


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
