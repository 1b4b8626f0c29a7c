"""Generation for prompts that are all known in advance: `generate` and `stream`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from glasshouse.errors import InputError, check_count
from glasshouse.generation.engine.capacity import check_beams, choose_slots, choose_weights, required_lengths
from glasshouse.generation.engine.engine import Engine
from glasshouse.generation.engine.inference_model import Weights
from glasshouse.generation.request import Completion, Request
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.generation.speculation import Speculator
from glasshouse.generation.validation import check_model
from glasshouse.models import Model
from glasshouse.models.checks import check_length
from glasshouse.models.prompt import Prompt, encode_prompt
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer


def generate(
    model: Model,
    tok: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    beams: int = 1,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    *,
    n: int = 1,
    keep_tree: bool = False,
    max_len: int | None = None,
    slots: int | None = None,
    speculator: Speculator | None = None,
    weights: Weights | None = None,
    record: str | Sequence[str] = (),
    progress: Callable[[int], None] = lambda new: None,
    **settings: object,
) -> list[Completion]:
    """Generate from each prompt, or translate it with an encoder-decoder; return `n` completions for each.

    A prompt is a text or a list of ids, which needs no tokenizer. The completion of a prompt does not depend on the
    other prompts. Samples of one prompt get seeds that count up from `seed`; a beam search returns its `n` best.
    Further settings are those of `SamplingParams`; `slots`, `speculator` and `weights` are those of `Engine`, except
    that weights are copied only for generations long enough to pay off. `progress` is called with the number of new
    tokens after each step.

    Prompt and completion together, or the target of an encoder-decoder, have at most `max_len` tokens. Without it,
    only a table of learned positions limits them; a warning is issued if that truncates completions, or if they are
    longer than the model was trained for (its spec's max_len). NaN outputs of the model raise an error.

    `record` names sites, as for `gh.record`, and each completion's `recording` has their activations during its
    generation, without a second pass: by position in prompt and output, with no batch axis. A token is recorded when
    the next one is sampled, so the last of the output is missing unless an end token or a stop string came after it.
    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> one, two = gh.generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> len(one.ids), one.finish_reason
    (5, 'length')
    >>> one, two = gh.generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5, record=("resid_post.1", "pattern.0"))
    >>> one.recording["resid_post.1"].shape, two.recording["pattern.0"].shape, one.recording.axes("pattern.0")
    (torch.Size([7, 64]), torch.Size([4, 5, 5]), ('head', 'query', 'key'))
    """
    options = SamplingParams.parse(
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "beams": beams,
            "seed": seed,
            "stop": stop,
            **settings,
        }
    )
    requests = generate_requests(
        model,
        tok,
        prompts,
        options,
        n=n,
        keep_tree=keep_tree,
        max_len=max_len,
        slots=slots,
        speculator=speculator,
        weights=weights,
        record=record,
        progress=progress,
    )
    messages = [message for request in requests if (message := length_warning(model.spec, request))]
    if max_len is None and messages:
        prefix = "" if len(requests) == 1 else f"{len(messages)} of {len(requests)} completions, such as this: "
        warnings.warn(prefix + messages[0], stacklevel=2)
    return [completion for request in requests for completion in request.completions()]


def generate_requests(
    model: Model,
    tok: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt],
    options: SamplingParams,
    *,
    n: int = 1,
    keep_tree: bool = False,
    max_len: int | None = None,
    slots: int | None = None,
    speculator: Speculator | None = None,
    weights: Weights | None = None,
    record: str | Sequence[str] = (),
    progress: Callable[[int], None] = lambda new: None,
) -> list[Request]:
    """Run `generate` and return its requests: one per beam search, or one for each of `n` samples of a prompt.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> params = SamplingParams(beams=3, max_new_tokens=5)
    >>> requests = generate_requests(model, None, [[1, 2, 3], [4]], params, n=2)
    >>> [len(request.completions()) for request in requests]
    [2, 2]
    """
    model = check_model(model)
    prompt_ids = [encode_prompt(prompt, tok, model.spec) for prompt in as_list(prompts)]
    check_count("n", n)
    beams = options.beams
    if beams == 1 and n > 1 and options.temperature == 0:
        raise InputError(f"n is {n}, but without a temperature or beams all samples are equal; set one of them.")
    if not prompt_ids:
        return []
    length, source_len = required_lengths(model, prompt_ids, options)
    if max_len is not None:
        length = min(length, check_length(model.spec, max_len))
    check_beams(model, beams, length, source_len or 0)
    copies = 1 if beams > 1 else n
    if slots is None:
        slots = max(beams, choose_slots(model, length, source_len, len(prompt_ids) * copies * beams))
    rounds = -(-len(prompt_ids) * copies * beams // slots)
    engine = Engine(
        model,
        tok,
        slots=slots,
        max_len=length,
        source_len=source_len,
        speculator=speculator,
        weights=choose_weights(rounds * options.max_new_tokens) if weights is None else weights,
        record=record,
    )
    requests = [
        engine.submit_ids(ids, one, n_best=n if beams > 1 else 1, keep_tree=keep_tree)
        for ids in prompt_ids
        for one in options.with_seeds(copies)
    ]
    before, busy = 0, True
    while busy:
        busy = engine.step()
        now = sum(len(request.ids) for request in requests)
        progress(now - before)
        before = now
    for request in requests:
        request.raise_on_error()
    return requests


def stream(model: Model, tok: Tokenizer | None, prompt: Prompt, **settings: object) -> Iterator[str]:
    """Yield the completion of one prompt as it is generated, in whole characters; settings as in `generate`.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=270)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=270))
    >>> pieces = list(gh.stream(model, tok, "to be", max_new_tokens=8))
    >>> "".join(pieces) == gh.generate(model, tok, "to be", max_new_tokens=8)[0].text
    True
    """
    options = SamplingParams.parse(settings)
    model = check_model(model)
    if tok is None:
        raise InputError(
            "there is no tokenizer, so there is no text to stream; give tok, or call gh.generate for ids."
        )
    ids = encode_prompt(prompt, tok, model.spec)
    max_len, source_len = required_lengths(model, [ids], options)
    check_beams(model, options.beams, max_len, source_len or 0)
    weights = choose_weights(options.max_new_tokens)
    engine = Engine(model, tok, slots=options.beams, max_len=max_len, source_len=source_len, weights=weights)
    request = engine.submit_ids(ids, options)
    yield from engine.stream(request)
    if message := length_warning(model.spec, request):
        warnings.warn(message, stacklevel=2)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a single text, or a single list of ids, is one prompt."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    tolist = getattr(prompts, "tolist", None)
    values: object = prompts if tolist is None else tolist()
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise InputError(
            f"prompts is {prompts!r}, but it must be a text, or a list whose items are texts or lists of ids."
        )
    many = list(values)
    if many and all(isinstance(one, int) for one in many):
        raise InputError(
            f"prompts is a list of ids that begins with {many[0]}; put it in a list, one for each prompt."
        )
    return many


def length_warning(s: Spec, request: Request) -> str | None:
    """Return a warning if a finished request was truncated at the maximum length, or exceeds the trained length.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", max_len=64, position="learned"))
    >>> engine = gh.Engine(model)
    >>> request = engine.submit([1, 2, 3, 4, 5, 6], max_new_tokens=400)
    >>> engine.run()
    >>> print(length_warning(model.spec, request))
    58 of 400 new tokens were generated: with the prompt of 6 they fill the model's 64 positions (max_len).
    """
    before, total = len(request.prompt), len(request.prompt) + request.limit
    if request.truncated:
        limit = (
            f"the model's {total} positions (max_len)" if total == s.position_limit else f"max_len, which is {total}"
        )
        return (
            f"{request.limit} of {request.options.max_new_tokens} new tokens were generated: with the prompt of "
            f"{before} they fill {limit}."
        )
    if before + len(request.ids) > s.max_len:
        return (
            f"the text has {before + len(request.ids)} tokens, but the model was trained on sequences of at most "
            f"{s.max_len} (max_len), so quality may drop beyond that."
        )
    return None
