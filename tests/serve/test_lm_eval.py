"""lm-eval's client: tasks of all three kinds through the server score as the model itself does.

It is not among the development dependencies: `make serving` installs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.conftest import TEXT

import glasshouse as gh
from glasshouse.serve import ServedModel, Server

lm_eval = pytest.importorskip("lm_eval")
task_module = pytest.importorskip("lm_eval.api.task")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.long

MAX_LEN = 64
DOCUMENTS = [
    {"question": "to be, or not to", "choices": [" be", " suffer", " the mind"], "answer": 0},
    {"question": "whether 'tis nobler in the", "choices": [" question", " mind", " é"], "answer": 1},
    {"question": "that is", "choices": [" the question:\nwhether", " or", " 漢字 ü"], "answer": 2},
    {"question": "to be, or not to be, that is the question:\n" * 4 + "to", "choices": [" be", " or"], "answer": 0},
]
COMMON = {"dataset_path": "", "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(DOCUMENTS)}}
COMMON |= {"test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}


@pytest.fixture(scope="module")
def model(tok: gh.Tokenizer) -> gh.models.Decoder:
    """A model with many end tokens: as often as not, the token after a prompt is one of them."""
    torch.manual_seed(3)
    end_ids = tuple(range(1, len(tok), 2))
    return gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=MAX_LEN, end_ids=end_ids)).eval()


@pytest.fixture(scope="module")
def server(tok: gh.Tokenizer, model: gh.models.Decoder) -> Iterator[Server]:
    made = Server([ServedModel("mine", model, tok, slots=4)])
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module", params=[1, 3], ids=lambda count: f"{count} at once")
def settings(
    request: pytest.FixtureRequest,
    server: Server,
    model: gh.models.Decoder,
    tok: gh.Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("lm-eval") / "model"
    gh.save(model, tok, folder)
    return {
        "model": "mine",
        "base_url": f"{server.address}/v1/completions",
        "tokenizer": str(folder),  # of the same folder that is served
        "max_length": MAX_LEN,
        "batch_size": 2,
        "num_concurrent": request.param,
    }


def evaluate(settings: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a task; return its metrics, and the samples in the order of the documents."""
    task = task_module.ConfigurableTask(config={"task": "ours", **COMMON, **config})
    found = lm_eval.simple_evaluate("local-completions", settings, tasks=[task], log_samples=True, bootstrap_iters=0)
    return found["results"]["ours"], sorted(found["samples"]["ours"], key=lambda one: one["doc_id"])


def score(model: gh.models.Decoder, ids: list[int], start: int) -> tuple[float, bool]:
    """Return the log-likelihood of ids from a position on, and whether they are greedy, by the logits of a pass."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[start - 1 :]
    rest = torch.tensor(ids[start:])
    return float(logprobs.gather(1, rest[:, None]).sum()), bool((logprobs.argmax(1) == rest).all())


def test_multiple_choice(settings: dict[str, Any], model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    config = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    metrics, samples = evaluate(settings, config)
    right, ended = 0, 0
    for document, sample in zip(DOCUMENTS, samples, strict=True):
        expected = []
        for choice in document["choices"]:
            whole, n_context = tok.encode(document["question"] + choice), len(tok.encode(document["question"]))
            ids = whole[-(MAX_LEN - 1) :]  # lm-eval cuts on the left, and generates one more token
            expected.append(score(model, ids, n_context - (len(whole) - len(ids))))
            ended += gh.generate(model, tok, [ids], max_new_tokens=1)[0].finish_reason == "stop"
        found = [one for (one,) in sample["resps"]]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        values = [value for value, _ in expected]
        right += values.index(max(values)) == document["answer"]
    assert ended  # an end token after the prompt must not cost the last token of the prompt its score
    assert metrics["acc,none"] == right / len(DOCUMENTS)


def test_perplexity_of_texts(settings: dict[str, Any], model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    config = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    prefix = tok.token_to_id("<|endoftext|>")
    _, samples = evaluate({**settings, "custom_prefix_token_id": prefix}, config)
    for document, sample in zip(DOCUMENTS[:3], samples, strict=False):  # the last does not fit, and has windows
        ((found,),) = sample["resps"]
        assert found == pytest.approx(score(model, [prefix, *tok.encode(document["question"])], 1)[0], abs=1e-3)


def test_generation(settings: dict[str, Any], model: gh.models.Decoder, tok: gh.Tokenizer) -> None:
    stop = TEXT[5]
    config = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": [stop], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    _, samples = evaluate(settings, config)
    for document, sample in zip(DOCUMENTS, samples, strict=True):
        ids = tok.encode(document["question"])[-(MAX_LEN - 1 - 12) :]
        (expected,) = gh.generate(model, tok, [ids], max_new_tokens=12, stop=stop)
        assert sample["resps"] == [[expected.text]]
