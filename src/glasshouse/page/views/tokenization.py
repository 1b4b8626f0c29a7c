"""Endpoints for tokenization: tokens, the BPE merges of a word, and BPE training."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.escaping import show_whitespace
from glasshouse.inspection.saliency import Method
from glasshouse.models import Seq2Seq
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.model_loader import LoadedModel
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.saliency import TokenSaliency, saliency_request, token_saliency
from glasshouse.text.bpe import algorithm as bpe
from glasshouse.text.bpe import pretokenizer

MAX_MERGES = 400  # replayed
MAX_TRAINING_CHARS = 20_000  # characters of the training text
RUNNERS_UP = 4
LONGEST = 100  # bytes of the longest word shown; of a longer one, only the token
SHOWN, REPLAYED = 12, 200  # candidates and merges that the page requests


@dataclass(frozen=True)
class Tokenize(Settings):
    """Parameters of tokenization."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)


def tokenize(traces: TraceCache, params: Tokenize) -> JsonDict:
    """Return the tokens of a prompt, without a forward pass."""
    loaded = traces.loader.get(params.forward_pass.checkpoint)
    inputs = loaded.inputs(params.forward_pass.prompt)
    rows = [serialization.describe_tokens(row[0].tolist(), loaded.tok) for row in inputs]
    if isinstance(loaded.model, Seq2Seq):
        return {"source": rows[0], "target": rows[1], "start": len(loaded.start())}
    for place in params.forward_pass.prompt.masked:
        if 0 <= place < len(rows[0]):
            rows[0][place]["masked"] = True
    return {"text": rows[0]}


@dataclass(frozen=True)
class WordMerges(Settings):
    """Parameters of the BPE merges of a word."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    side: str = "text"  # or source, target
    position: int = 0


def word_merges(traces: TraceCache, params: WordMerges) -> JsonDict:
    """Return the merges of the word that contains a token, and the merge tree of each of its tokens."""
    loaded = traces.loader.get(params.forward_pass.checkpoint)
    tok = loaded.tok
    if tok is None or not tok.merge_ranks:
        raise InputError("the tokenizer is not byte-level BPE, so it has no merges.")
    ids = _row(loaded, params.forward_pass, params.side)
    require(0 <= params.position < len(ids), "position", params.position, f"within 0 and {len(ids) - 1}")
    found = _word_at(loaded, ids, params.position)
    if found is None:
        return {
            "word": serialization.describe_tokens([ids[params.position]], tok)[0]["text"],
            "steps": [],
            "trees": [],
        }
    states = list(bpe.merge_steps(found, tok.merge_ranks))
    steps: list[JsonDict] = [{"tokens": [show_whitespace(one) for one in states[0]]}]
    for before, after in pairwise(states):
        pair = min((two for two in pairwise(before) if two in tok.merge_ranks), key=tok.merge_ranks.__getitem__)
        merge = [show_whitespace(pair[0]), show_whitespace(pair[1])]
        steps.append(
            {"rank": tok.merge_ranks[pair], "merge": merge, "tokens": [show_whitespace(one) for one in after]}
        )
    return {
        "word": show_whitespace(found),
        "steps": steps,
        "trees": [_tree(one, tok.merge_ranks) for one in states[-1]],
    }


def _tree(token: bytes, ranks: dict[bpe.Pair, int]) -> JsonDict:
    halves = bpe.find_merge(token, ranks) if len(token) > 1 else None
    parts = [] if halves is None else [_tree(half, ranks) for half in halves]
    rank = None if halves is None else ranks[halves]
    return {"text": show_whitespace(token), "rank": rank, "parts": parts}


def _row(loaded: LoadedModel, forward_pass: ForwardPass, side: str) -> list[int]:
    inputs = loaded.inputs(forward_pass.prompt)
    return inputs[0 if side == "source" else -1][0].tolist()


def _word_at(loaded: LoadedModel, ids: list[int], position: int) -> bytes | None:
    """Return the word that contains a token; None for special tokens and where words and tokens do not align."""
    tok = loaded.tok
    assert tok is not None
    if ids[position] in tok.special_ids:
        return None
    whole = tok.decode_bytes([one for one in ids if one not in tok.special_ids])
    start = len(tok.decode_bytes([one for one in ids[:position] if one not in tok.special_ids]))
    try:
        split = tok.pretokenize(whole.decode())
    except UnicodeDecodeError:
        return tok.decode_bytes([ids[position]])
    end = 0
    for one in split:
        end += len(one)
        if start < end:
            return one if len(one) <= LONGEST else tok.decode_bytes([ids[position]])
    return None


@dataclass(frozen=True)
class TrainBpe(Settings):
    """Parameters of BPE training on a text."""

    text: str = ""
    merges: int = 50


def train_bpe(traces: TraceCache, params: TrainBpe) -> JsonDict:
    """Replay BPE training on a text: each merge, its count, the runners-up, and the resulting tokens."""
    require(0 < params.merges <= MAX_MERGES, "merges", params.merges, f"within 1 and {MAX_MERGES}")
    text = params.text[:MAX_TRAINING_CHARS]
    split = [one.encode(errors="surrogatepass") for one in pretokenizer.split(text, "gpt2")]
    counts: dict[bytes, int] = {}
    for one in split:
        counts[one] = counts.get(one, 0) + 1
    now = [[bytes([byte]) for byte in one] for one in split]
    steps: list[JsonDict] = []
    for merge in bpe.learn(counts, 256 + params.merges, RUNNERS_UP):
        token = merge.pair[0] + merge.pair[1]
        now = [bpe.merge_pair(one, merge.pair, token) for one in now]
        steps.append(
            {
                "merge": [show_whitespace(half) for half in merge.pair],
                "token": show_whitespace(token),
                "count": merge.count,
                "runners_up": [
                    {"merge": [show_whitespace(half) for half in pair], "count": n} for pair, n in merge.runners_up
                ],
                "tokens": sum(map(len, now)),
            }
        )
    return {
        "words": [[show_whitespace(bytes([byte])) for byte in one] for one in split],
        "steps": steps,
        "cut": len(params.text) > MAX_TRAINING_CHARS,
    }


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened."""
    loaded = traces.loader.get(forward_pass.checkpoint)
    asked, plain = forward_pass.to_json(), forward_pass.unedited.to_json()
    here: JsonDict = {"forward_pass": asked, "position": state["token"], "show": SHOWN}
    requests = [("next", here)]
    if loaded.tok is not None and loaded.tok.merge_ranks:
        side = {"side": "target"} if isinstance(loaded.model, Seq2Seq) else {}
        requests.append(("word_merges", {"forward_pass": plain, "position": state["token"], **side}))
    if loaded.tok is not None:
        row = loaded.inputs(forward_pass.prompt)[-1][0].tolist()
        text = forward_pass.prompt.text or "".join(
            one["text"] for one in serialization.describe_tokens(row, loaded.tok)
        )
        requests.append(("train_bpe", {"text": text, "merges": REPLAYED}))
    if method := state.get("tokens_saliency"):
        requests.append(saliency_request(forward_pass, state, method))
    return requests


def control_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests of the choice of a method."""
    return [saliency_request(forward_pass, state, method) for method in get_args(Method)]


VIEW = View(
    name="tokens",
    title="Tokens",
    endpoints={
        "token_saliency": Endpoint(TokenSaliency, token_saliency),
        "word_merges": Endpoint(WordMerges, word_merges, needs_model=False),
        "train_bpe": Endpoint(TrainBpe, train_bpe, needs_model=False),
    },
    initial_requests=initial_requests,
    control_requests=control_requests,
    state_keys=("incorrect_token", "output", "saliency"),
)
