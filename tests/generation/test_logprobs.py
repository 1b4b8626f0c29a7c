"""Log-probabilities beside the sampled token: the most probable alternatives, and those of a given prompt."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.generation import prompt_logprobs as module
from glasshouse.generation.prompt_logprobs import prompt_logprobs
from glasshouse.generation.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    return gh.build(gh.preset("tiny-decoder", vocab_size=50)).eval()


def reference(model: gh.models.Decoder, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(-1)


def test_top_logprobs_are_those_of_the_whole_text(model: gh.models.Decoder) -> None:
    engine = gh.Engine(model, slots=3, max_len=32)
    wanted = (0, 2, 5)
    requests = [
        engine.submit([1, 2, 3 + k], max_new_tokens=6, temperature=0.8, seed=k, top_logprobs=k) for k in wanted
    ]
    engine.run()
    for k, request in zip(wanted, requests, strict=True):
        (found,) = request.completions()
        if k == 0:
            assert found.top_logprobs is None
            continue
        assert found.top_logprobs is not None
        expected = reference(model, [*request.prompt, *found.ids])[len(request.prompt) - 1 : -1]
        values, ids = expected.topk(k)
        assert [[token for token, _ in top] for top in found.top_logprobs] == ids.tolist()
        for top, row in zip(found.top_logprobs, values.tolist(), strict=True):
            assert [value for _, value in top] == pytest.approx(row, abs=1e-4)


def test_top_logprobs_end_with_the_text_before_a_stop_string() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)  # every token is a byte
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok))).eval()
    (plain,) = gh.generate(model, tok, "to be", max_new_tokens=40, temperature=1.0)
    stop = plain.text[10:12]
    (found,) = gh.generate(model, tok, "to be", max_new_tokens=40, temperature=1.0, stop=stop, top_logprobs=3)
    assert found.finish_reason == "stop"
    assert found.top_logprobs is not None
    assert len(found.top_logprobs) == len(found.ids) == len(found.logprobs)


def test_top_logprobs_exclude_beams(model: gh.models.Decoder) -> None:
    with pytest.raises(gh.InputError, match="top_logprobs"):
        gh.generate(model, None, [[1]], beams=2, top_logprobs=1)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 20])
def test_prompt_logprobs_are_those_of_one_pass(
    model: gh.models.Decoder, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 8)
    ids = torch.randint(50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    (found,) = prompt_logprobs(model, [ids], top=2)
    logprobs = reference(model, ids)[:-1]
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] if length > 1 else torch.tensor([])
    assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert [[token for token, _ in top] for top in found.top] == logprobs.topk(2).indices.tolist()


@pytest.mark.parametrize("chunk", [8, 64, 1000])
def test_prompt_logprobs_of_a_batch_are_those_of_each_text_alone(model: gh.models.Decoder, chunk: int) -> None:
    generator = torch.Generator().manual_seed(chunk)
    lengths = (3, 30, 5, 4, 1, 12, 2)
    prompts = [torch.randint(50, (length,), generator=generator).tolist() for length in lengths]
    prompts += [[*prompts[2][:-1], token] for token in (7, 8)]  # one question, three answers of a token
    starts = [1, 22, 5, 2, 1, 12, 1, 3, 1]
    counts: list[int] = []
    found = prompt_logprobs(model, prompts, top=1, starts=starts, chunk=chunk, progress=counts.append)
    for ids, start, one in zip(prompts, starts, found, strict=True):
        (whole,) = prompt_logprobs(model, [ids], top=1)
        assert one.logprobs == pytest.approx(whole.logprobs[start - 1 :], abs=1e-5)
        assert [[token for token, _ in top] for top in one.top] == [
            [token for token, _ in top] for top in whole.top[start - 1 :]
        ]
    assert sum(counts) == len(prompts) - 1  # a text of one token has nothing to predict


def test_presence_penalty_counts_once() -> None:
    sampler = Sampler(slots=2, vocab_size=4, device=torch.device("cpu"))
    options = gh.SamplingParams(presence_penalty=1.0, frequency_penalty=0.25, temperature=1.0)
    for slot in range(2):
        sampler.slots.set(slot, options, prompt=[3], end_ids=[])
    sampler.slots.count_tokens(torch.tensor([[1, 1], [2, 0]]), torch.tensor([2, 1]))
    expected = torch.tensor([[0.0, -1.5, 0.0, 0.0], [0.0, 0.0, -1.25, 0.0]])  # -1 once, -0.25 for each use
    torch.testing.assert_close(sampler.distribution(torch.zeros(2, 4)), expected.softmax(-1))


def test_presence_penalty_in_a_beam_search(model: gh.models.Decoder) -> None:
    (found,) = gh.generate(model, None, [[1, 2]], beams=3, max_new_tokens=20, presence_penalty=100.0)
    assert len(set(found.ids)) == len(found.ids)  # no token twice


def test_prefixes_are_shared_within_a_namespace() -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder")).eval()
    engine = gh.Engine(model, slots=4, max_len=64)
    prompt = list(range(1, 30))

    def run(namespace: str) -> tuple[int, list[int]]:
        before = engine.slots.n_reused
        request = engine.make_request(prompt, gh.SamplingParams(max_new_tokens=5), namespace=namespace)
        engine.enqueue(request)
        engine.run()
        return engine.slots.n_reused - before, request.ids

    found = [run(namespace) for namespace in ("a", "b", "b", "a")]
    assert [reused for reused, _ in found] == [0, 0, 28, 28]  # b's requests have not evicted what a's had cached
    assert len({tuple(ids) for _, ids in found}) == 1
    held = engine.make_request(prompt, gh.SamplingParams(max_new_tokens=20), namespace="c")
    engine.enqueue(held)  # while it runs, others of its namespace may copy from its slot
    engine.step()
    assert [run(namespace)[0] for namespace in ("d", "c")] == [0, 28]


def test_final_tokens_are_never_dropped() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    ids = tok.encode("né\no\n\nto")
    detokenizer = gh.generation.detokenizer.Detokenizer(tok, stop=["\n\n"])
    final = []
    for token in ids:
        detokenizer.add(token)
        final.append(detokenizer.n_final)
    # n | half of é | é | \n may begin the stop string | o | \n | the second: 5 tokens are kept
    assert final == [1, 1, 3, 3, 5, 5, 5, 5, 5]
