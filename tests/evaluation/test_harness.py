"""Tasks of lm-eval in this process score as transformers and our server do, and edits take effect.

It is not among the development dependencies: `make serving` installs it.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse.cli import main
from glasshouse.serve import ServedModel, Server

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.long

ITEMS = [
    {"question": "if __name__ == ", "choices": ['"__main__":', "'main':", "__main__:"], "answer": 0},
    {"question": "for i in ", "choices": ["range(10):", "10:", "while 10:"], "answer": 0},
    {"question": "    def __init__(", "choices": ["this):", "self):", "x, self):"], "answer": 1},
    {"question": "with open(path) ", "choices": ["in f:", "f:", "as f:"], "answer": 2},
    {"question": "try:\n    import foo\nexcept ", "choices": ["import:", "foo:", "ImportError:"], "answer": 2},
    {"question": "x = [i for i ", "choices": ["of y]", "in y]", "from y]"], "answer": 1},
    {"question": "raise ", "choices": ["'an error'", "ValueError", "None"], "answer": 0},
    {"question": "while ", "choices": ["True:", "for:", "é漢:"], "answer": 0},
    {"question": "from os import ", "choices": ["elephants", "path", "os"], "answer": 1},
    {"question": "lambda x", "choices": [":", "=", "."], "answer": 0},  # one question, answers of a token each
    {"question": "x = 1\n" * 200 + "x = ", "choices": ["1", "banana"], "answer": 0},  # longer than max_len
]
TARGETS = [' "__main__":', " range(10):", "self, name):", " as f:", " ImportError:", " in range(10)]", " ValueError"]
EDITS: dict[str, Any] = {"z.1[head=1]": 0.0, "ffn_out.3": 0.0}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks of ours."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "choice.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in ITEMS))
    texts = [
        {"question": one["question"].rstrip(), "target": text} for one, text in zip(ITEMS, TARGETS, strict=False)
    ]
    (folder / "text.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in texts))
    common = f"""\
dataset_path: json
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
dataset_kwargs: {{cache_dir: {folder / "cache"}, data_files: {{test: DATA}}}}
"""
    (folder / "choice.yaml").write_text(
        common.replace("DATA", str(folder / "choice.jsonl"))
        + "task: our_choice\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    )
    (folder / "text.yaml").write_text(
        common.replace("DATA", str(folder / "text.jsonl"))
        + 'task: our_text\noutput_type: generate_until\ndoc_to_target: "{{target}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "rolling.yaml").write_text(
        common.replace("DATA", str(folder / "text.jsonl"))
        + "task: our_rolling\noutput_type: loglikelihood_rolling\ndoc_to_target: '{{question}}'\n"
        "metric_list: [{metric: word_perplexity}]\n"
    )
    (folder / "group.yaml").write_text(
        "group: our_group\ntask: [our_choice, our_text]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    return folder


@pytest.fixture(scope="module")
def loaded() -> tuple[gh.models.Decoder, gh.Tokenizer]:
    return gh.load("python-3m", device="cpu")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("exported") / "model"
    gh.hub.convert("python-3m", folder)
    return folder


@pytest.fixture(scope="module")
def server(loaded: tuple[gh.models.Decoder, gh.Tokenizer]) -> Iterator[Server]:
    made = Server([ServedModel("mine", *loaded, slots=4)])
    made.start()
    yield made
    made.close()


def evaluate(lm: Any, tasks: Path, arguments: dict[str, Any] | None = None) -> dict[str, Any]:  # noqa: ANN401
    """Return the metrics and responses of both tasks, by the task."""
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    names = ["our_choice", "our_text"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = lm_eval.simple_evaluate(lm, arguments, tasks=names, task_manager=manager, bootstrap_iters=0)
    responses = {}
    for name in names:
        samples = sorted(found["samples"][name], key=lambda one: one["doc_id"])
        responses[name] = [one for sample in samples for (one,) in sample["resps"]]
    metrics = {name: {key: one for key, one in found["results"][name].items() if "," in key} for name in names}
    return {"metrics": metrics, "responses": responses}


def adapter(loaded: tuple[gh.models.Decoder, gh.Tokenizer]) -> Any:  # noqa: ANN401
    return gh.evaluation.GlasshouseLM(*loaded)


def test_figures_are_those_of_transformers(
    loaded: tuple[gh.models.Decoder, gh.Tokenizer], exported: Path, tasks: Path
) -> None:
    ours = evaluate(adapter(loaded), tasks)
    theirs = evaluate("hf", tasks, {"pretrained": str(exported), "device": "cpu", "dtype": "float32"})
    assert ours["metrics"] == theirs["metrics"]
    assert 0 < ours["metrics"]["our_choice"]["acc,none"] < 1
    assert 0 < ours["metrics"]["our_text"]["exact_match,none"] < 1
    assert ours["responses"]["our_text"] == theirs["responses"]["our_text"]
    choices = [one["responses"]["our_choice"] for one in (ours, theirs)]
    assert [value for value, _ in choices[0]] == pytest.approx([value for value, _ in choices[1]], abs=1e-3)
    assert [greedy for _, greedy in choices[0]] == [greedy for _, greedy in choices[1]]


def test_figures_are_those_of_the_server(
    loaded: tuple[gh.models.Decoder, gh.Tokenizer], exported: Path, server: Server, tasks: Path
) -> None:
    ours = evaluate(adapter(loaded), tasks)
    address = f"{server.address}/v1/completions"
    client = {"model": "mine", "base_url": address, "tokenizer": str(exported), "max_length": 512, "batch_size": 2}
    theirs = evaluate("local-completions", tasks, client)
    assert ours["metrics"] == theirs["metrics"]
    assert ours["responses"]["our_text"] == theirs["responses"]["our_text"]
    short = slice(0, -2)  # the client cuts one more token of what is too long
    choices = [one["responses"]["our_choice"][short] for one in (ours, theirs)]
    assert [value for value, _ in choices[0]] == pytest.approx([value for value, _ in choices[1]], abs=1e-3)


@pytest.mark.parametrize("edited", [False, True])
def test_scores_are_those_of_forward_passes(
    loaded: tuple[gh.models.Decoder, gh.Tokenizer], tasks: Path, edited: bool
) -> None:
    model, tok = loaded
    right, expected, texts = 0, [], []
    with gh.edit(model, EDITS) if edited else nullcontext(), torch.no_grad():
        found = evaluate(adapter(loaded), tasks)
        for item in ITEMS:
            scores = []
            start = len(tok.encode(item["question"].rstrip(" ")))
            for choice in item["choices"]:
                ids = tok.encode(item["question"] + choice)
                kept = ids[-(model.spec.max_len + 1) :]
                logprobs = model(torch.tensor([kept[:-1]]))[0].log_softmax(-1)
                own = logprobs.gather(1, torch.tensor(kept[1:])[:, None])[start - len(ids) :]
                scores.append(float(own.sum()))
            expected += scores
            right += scores.index(max(scores)) == item["answer"]
        for item in ITEMS[: len(TARGETS)]:
            (completion,) = gh.generate(model, tok, item["question"].rstrip(), max_new_tokens=12, stop="\n")
            texts.append(completion.text)
    assert [value for value, _ in found["responses"]["our_choice"]] == pytest.approx(expected, abs=1e-3)
    assert found["metrics"]["our_choice"]["acc,none"] == right / len(ITEMS)
    assert found["responses"]["our_text"] == texts


def test_ablated_and_steered_models_have_figures_of_their_own(
    loaded: tuple[gh.models.Decoder, gh.Tokenizer],
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tok = loaded
    vector = gh.steering_vector(model, tok, ["1, 2, 3"], ["a, b, c"])
    vector.save(tmp_path / "numbers.safetensors")

    def figures(*options: str) -> dict[str, Any]:
        words = ["--tasks", "our_choice,our_text", "--include-path", str(tasks), "--device", "cpu", "--json"]
        monkeypatch.setattr(sys, "argv", ["glasshouse", "eval", "python-3m", *words, *options])
        with pytest.raises(SystemExit, match="0"):
            main()
        return json.loads(capsys.readouterr().out)

    whole = figures()
    ablated = figures(*(word for site in EDITS for word in ("--ablate", site)))
    steered = figures("--steer", f"{tmp_path / 'numbers.safetensors'}=8")
    for found, edits in ((ablated, EDITS), (steered, {vector.site: gh.inspection.add(8 * vector.vector)})):
        assert found != whole
        with gh.edit(model, edits):
            expected = evaluate(adapter(loaded), tasks)["metrics"]
        for name, metrics in expected.items():
            assert {key: found[name]["metrics"][key] for key in metrics if "stderr" not in key} == {
                key: value for key, value in metrics.items() if "stderr" not in key
            }
    assert {key: one for key, one in whole["our_choice"].items() if key != "metrics"} == {
        "n_fewshot": 0,
        "n_items": len(ITEMS),
        "n_evaluated": len(ITEMS),
    }


def test_rolling_windows_fewshot_and_limit(
    loaded: tuple[gh.models.Decoder, gh.Tokenizer], exported: Path, tasks: Path
) -> None:
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {"pretrained": str(exported), "device": "cpu", "dtype": "float32"}
    names = ["our_rolling", "our_choice"]
    theirs = lm_eval.simple_evaluate("hf", arguments, tasks=names, limit=4, num_fewshot=2, task_manager=manager)
    with pytest.warns(UserWarning, match="were cut on the left"):
        ours = gh.evaluation.evaluate_tasks(*loaded, names, include_path=tasks, limit=4, num_fewshot=2)
    for name in names:
        figures = {key: value for key, value in theirs["results"][name].items() if "," in key and value != "N/A"}
        assert ours[name].metrics == pytest.approx(figures)
        assert (ours[name].n_fewshot, ours[name].n_evaluated) == (2, 4)
    assert ours["our_choice"].n_items == len(ITEMS)
    assert ours["our_rolling"].metrics["word_perplexity,none"] > 1


def test_groups_and_patterns(loaded: tuple[gh.models.Decoder, gh.Tokenizer], tasks: Path) -> None:
    run = gh.evaluation.evaluate_tasks
    found = run(*loaded, "our_[cgt]*", include_path=tasks, limit=2)  # the group itself would have its tasks again
    assert list(found) == ["our_choice", "our_text"]
    grouped = run(*loaded, "our_group", include_path=tasks, limit=2)
    assert {name: grouped[name] for name in found} == found
    whole = grouped["our_group"]
    assert whole.metrics["acc,none"] == found["our_choice"].metrics["acc,none"]
    assert (whole.n_items, whole.n_evaluated) == (sum(one.n_items for one in found.values()), 4)


def test_a_model_by_its_name(tasks: Path) -> None:
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    assert gh.evaluation.GlasshouseLM is not None  # which registers it
    found = lm_eval.simple_evaluate(
        "glasshouse", {"model": "python-3m"}, tasks=["our_choice"], task_manager=manager, limit=2
    )
    assert found["n-samples"]["our_choice"]["effective"] == 2


def test_chat_template(loaded: tuple[gh.models.Decoder, gh.Tokenizer]) -> None:
    tok = gh.text.chat.tokens.with_chat_template(gh.Tokenizer.train(texts=["to be"], vocab_size=263))
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok)))
    lm = gh.evaluation.GlasshouseLM(model, tok)
    chat = [{"role": "user", "content": "To be?"}]
    assert lm.tok_encode(lm.apply_chat_template(chat)) == tok.encode_chat(chat, add_generation_prompt=True).ids
    chat.append({"role": "assistant", "content": "Or"})
    continued = lm.apply_chat_template(chat, add_generation_prompt=False)
    assert lm.tok_encode(continued) == [
        *tok.encode_chat(chat[:1], add_generation_prompt=True).ids,
        *tok.encode("Or"),
    ]


def test_refusals(loaded: tuple[gh.models.Decoder, gh.Tokenizer], tasks: Path) -> None:
    make, run = gh.evaluation.GlasshouseLM, gh.evaluation.evaluate_tasks
    with pytest.raises(gh.InputError, match="of type Encoder, but tasks are for decoders"):
        make(gh.build(gh.preset("tiny-encoder")))
    with pytest.raises(gh.InputError, match="there is no tokenizer"):
        make(loaded[0])
    with pytest.raises(gh.InputError, match="no task 'our_choise' in lm-eval; did you mean our_choice"):
        run(*loaded, "our_choise", include_path=tasks)
    with pytest.raises(gh.InputError, match="there is no folder 'nowhere'"):
        run(*loaded, "our_choice", include_path="nowhere")
    with (
        pytest.raises(gh.InputError, match="of some positions"),
        gh.edit(loaded[0], {"resid_post.1[position=0]": 0.0}),
    ):
        run(*loaded, "our_choice", include_path=tasks)
    with (
        pytest.raises(gh.InputError, match="depends on rows"),
        gh.edit(loaded[0], {"z.1": gh.inspection.mean_ablate()}),
    ):
        run(*loaded, "our_choice", include_path=tasks)
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    short = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=8))
    with pytest.raises(gh.InputError, match="generates up to 12 tokens, but the model's max_len is 8"):
        run(short, tok, "our_text", include_path=tasks)
