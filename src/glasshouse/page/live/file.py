"""The HTML file of a live page: the page, the graphs and weights of the model, and its tokenizer."""

from __future__ import annotations

import base64

from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.inspection.logit_lens import label_names, n_logits
from glasshouse.layers.attention import scale_of
from glasshouse.models import Decoder, Encoder, Seq2Seq
from glasshouse.models.generation_config import read_token_rules
from glasshouse.models.heads import LMHead, NoHead, Pooler
from glasshouse.page.files import index_page, worker_script
from glasshouse.page.html_export import POLICY, Responses, standalone
from glasshouse.page.live.program import export_program, rounded
from glasshouse.page.live.steps import describe_steps
from glasshouse.page.live.tokenizer import describe_tokenizer
from glasshouse.page.manifest import views
from glasshouse.page.model_loader import LoadedModel
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, fragment, with_defaults
from glasshouse.text import Tokenizer

MAX_PARAMETERS = 10_000_000
MAX_TOKENS = 1024  # of a text, whatever the model takes: more would take a browser seconds, and its memory
PAGE_BYTES = 700_000  # of scripts, styles and the tokenizer, about
LIVE_POLICY = f"{POLICY}; worker-src blob:"
# The views that a live page has, and the endpoints that its worker answers; tests/page/test_live.py compares.
LIVE_VIEWS = ("overview", "tokens", "attention", "residual", "interventions", "walkthrough", "seq2seq", "notes")
CARDS: JsonDict = {"notes_all": 1}  # of the notes, all: Python alone computes them, for the text of the file
LIVE_ENDPOINTS = (
    "tokenize",
    "next",
    "generate",
    "word_merges",
    "train_bpe",
    "maps",
    "tile",
    "scores",
    "query_key",
    "lens",
    "norms",
    "cosine_similarity",
    "logit_attribution",
    "loss",
    "ablate_each",
    "compare_predictions",
    "patch_each",
    "overview",
    "layer_heads",
    "walkthrough",
    "cross_attention",
    "beams",
)


def export_live(traces: TraceCache, given: JsonDict) -> str:
    """Return a page in which the model itself runs, without a server; it opens at a state."""
    loaded = traces.loader.get(str(given.get("checkpoint", "")))
    tok = _checked(loaded)
    tokenizer = describe_tokenizer(tok)
    program = export_program(rounded(loaded.model))
    responses = Responses(traces)
    for name in ("model", "glossary", "opening_selection"):
        responses.add(name, {})
    state = with_defaults(traces, given)
    for name, body in views()["notes"].initial_requests(traces, forward_pass_of(loaded, state), state | CARDS):
        responses.add(name, body)
    shown = given | {name: state[name] for name in ("text", "appended", "layer", "head", "key")} | {"checkpoint": ""}
    of_one: JsonDict = {"checkpoints": [], "planned_steps": None, "folders": {}, "run": False}
    known = responses.known | {"model {}": responses.known["model {}"] | of_one}  # type: ignore[operator]
    file = {"program": program.to_json(), "about": _about(loaded, tok), "tokenizer": tokenizer}
    elements = {
        "saved": {"fragment": fragment(shown), "selection": ["token", "head"], "responses": known},
        "live": {"script": worker_script(), "endpoints": LIVE_ENDPOINTS, "views": LIVE_VIEWS, "file": file},
    }
    weights = base64.b64encode(program.packed_weights()).decode()
    return standalone(index_page(), elements, "main.js", policy=LIVE_POLICY, texts={"weights": weights})


def _checked(loaded: LoadedModel) -> Tokenizer:
    """Return the tokenizer; raise InputError for a model that a live page cannot have."""
    count = sum(one.numel() for one in loaded.model.parameters())
    if count > MAX_PARAMETERS:
        size = (count * 2 * 4 / 3 + PAGE_BYTES) / 1e6
        raise InputError(
            f"the model has {count:,} parameters, so that the live page would have {size:,.0f} MB; it may have at "
            f"most {MAX_PARAMETERS:,} parameters: save a snapshot instead."
        )
    if loaded.tok is None:
        raise InputError("the model has no tokenizer, but a live page needs one; save a snapshot instead.")
    return loaded.tok


def _about(loaded: LoadedModel, tok: Tokenizer) -> JsonDict:
    """Return what the worker needs to know of the model besides its graphs."""
    model = loaded.model
    s = model.spec
    limits = (s.position_limit, loaded.longest, MAX_TOKENS)
    return {
        **{name: getattr(s, name) for name in ("kind", "n_layers", "n_heads", "n_kv_heads", "d_head", "start_id")},
        "n_encoder_layers": model.spec.n_encoder_layers if isinstance(model, Seq2Seq) else 0,
        "head": s.head.kind,
        "predicts_tokens": isinstance(model.head, LMHead),
        "n_outputs": 0 if isinstance(model.head, NoHead | Pooler) else n_logits(model),
        "labels": label_names(model) or None,
        "end_ids": list(s.end_ids),
        "suppressed": list(read_token_rules(model).suppressed) if isinstance(model, Decoder | Seq2Seq) else [],
        "opening": loaded.start(),
        "mask_id": tok.special_id("mask") if isinstance(model, Encoder) else None,
        "limit": min(one for one in limits if one is not None),
        "scale": scale_of(s),
        "softcap": s.attention_softcap,
        "biased": s.position.kind in ("relative", "alibi"),
        "walkthrough": describe_steps(model),
    }
