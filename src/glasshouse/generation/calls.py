"""Prompts in, completions out: the engine for whoever has all prompts at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from glasshouse import device as machine
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.generation.admission import cache_bytes, check_count, check_model, read_prompt
from glasshouse.generation.arrangement import Weights
from glasshouse.generation.engine import Engine
from glasshouse.generation.options import Options
from glasshouse.generation.published import rules_of
from glasshouse.generation.request import Completion
from glasshouse.generation.speculation import Speculator
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.text import Tokenizer

Prompt = str | bytes | Sequence[int]

MOST_SLOTS = 64  # rows in a batch, unless the caller knows better
WORTH_A_COPY = 100  # steps; in fewer, a CPU does not make up for the time that copying the weights takes
MEMORY_SHARE = 4  # of the memory, at most one part in so many goes to the cache


def generate(
    model: Decoder | Seq2Seq,
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
    slots: int | None = None,
    speculator: Speculator | None = None,
    weights: Weights | None = None,
    record: str | Sequence[str] = (),
    progress: Callable[[int], None] = lambda new: None,
    **settings: object,
) -> list[Completion]:
    """Continue each prompt, or translate it where the model has an encoder; return `n` completions for each.

    A prompt is a text or a list of ids, for which no tokenizer is needed. What comes out for a prompt does not depend
    on the others. Samples of one prompt get seeds that count up from `seed`; a search returns its `n` best.
    Further settings are those of `Options`; `slots`, `speculator` and `weights` are those of `Engine`, except that
    weights are copied only where so much is to be written that it pays. `progress` is called with the number of new
    tokens after each step.

    `record` names sites, as for `gh.record`, and each completion's `seen` has what stood there while it was written,
    without a second pass: by position in prompt and output, with no axis for the batch. A token is seen when the one
    after it is chosen, so the last of the output is missing unless an end token or a stop string came after it.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> one, two = gh.generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> len(one.ids), one.finish_reason
    (5, 'length')
    >>> one, two = gh.generate(model, None, [[1, 2, 3], [4]], max_new_tokens=5, record=("resid_post.1", "pattern.0"))
    >>> one.seen["resid_post.1"].shape, two.seen["pattern.0"].shape, one.seen.axes("pattern.0")
    (torch.Size([7, 64]), torch.Size([4, 5, 5]), ('head', 'query', 'key'))
    """
    options = Options.parse(
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
    check_model(model)
    rows = [read_prompt(prompt, tok, model.spec) for prompt in as_list(prompts)]
    check_count("n", n)
    if beams == 1 and n > 1 and temperature == 0:
        raise InputError(f"n is {n}, but without a temperature or beams all samples are the same; give one of them.")
    if not rows:
        return []
    max_len, source_len = lengths_for(model, rows, options)
    copies = 1 if beams > 1 else n
    if slots is None:
        slots = max(beams, slots_for(model, max_len, source_len, len(rows) * copies * beams))
    turns = -(-len(rows) * copies * beams // slots)
    engine = Engine(
        model,
        tok,
        slots=slots,
        max_len=max_len,
        source_len=source_len,
        speculator=speculator,
        weights=weights_for(turns * options.max_new_tokens) if weights is None else weights,
        record=record,
    )
    requests = [
        engine.submit(row, one, n_best=n if beams > 1 else 1, keep_tree=keep_tree)
        for row in rows
        for one in options.with_seeds(copies)
    ]
    before, busy = 0, True
    while busy:
        busy = engine.step()
        now = sum(len(request.ids) for request in requests)
        progress(now - before)
        before = now
    return [completion for request in requests for completion in request.completions()]


def stream(model: Decoder | Seq2Seq, tok: Tokenizer, prompt: Prompt, **settings: object) -> Iterator[str]:
    """Yield the text that continues one prompt as it is written, in whole characters; settings as in `generate`.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=270)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=270))
    >>> pieces = list(gh.stream(model, tok, "to be", max_new_tokens=8))
    >>> "".join(pieces) == gh.generate(model, tok, "to be", max_new_tokens=8)[0].text
    True
    """
    options = Options.parse(settings)
    check_model(model)
    row = read_prompt(prompt, tok, model.spec)
    max_len, source_len = lengths_for(model, [row], options)
    weights = weights_for(options.max_new_tokens)
    engine = Engine(model, tok, slots=options.beams, max_len=max_len, source_len=source_len, weights=weights)
    yield from engine.stream(engine.submit(row, options))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts one by one: a single text, or a single list of ids, is one prompt."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    tolist = getattr(prompts, "tolist", None)
    many = list(prompts if tolist is None else tolist())
    if many and all(isinstance(one, int) for one in many):
        raise InputError(
            f"prompts is a list of ids that begins with {many[0]}; put it in a list, one for each prompt."
        )
    return many


def lengths_for(model: Decoder | Seq2Seq, rows: Sequence[Sequence[int]], options: Options) -> tuple[int, int | None]:
    """Return how many tokens a sequence, and a source, must have room for."""
    longest = max(map(len, rows))
    most = model.spec.max_len
    if isinstance(model, Seq2Seq):
        return min(most, 1 + len(rules_of(model).opening) + options.max_new_tokens), longest
    if isinstance(model.spec.position, spec.Learned) or longest <= most:
        return min(most, longest + options.max_new_tokens), None
    raise InputError(f"a prompt has {longest} tokens, but max_len is {most}; shorten it.")


def weights_for(steps: int) -> Weights:
    """Return how an engine that will take so many steps had better hold the weights.

    >>> weights_for(8), weights_for(256)
    ('own', 'copy')
    """
    return "copy" if steps >= WORTH_A_COPY else "own"


def slots_for(model: Decoder | Seq2Seq, max_len: int, source_len: int | None, wanted: int) -> int:
    """Return how many rows to run side by side: as many as are wanted, within reason and memory."""
    weight = model.token.table.weight
    each = cache_bytes(model.spec, 1, max_len, source_len or 0, weight.element_size())
    return max(1, min(wanted, MOST_SLOTS, machine.memory_bytes(weight.device) // MEMORY_SHARE // each))
