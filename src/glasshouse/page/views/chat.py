"""The declaration of the chat view, which calls the API of the server that the page is served by."""

from __future__ import annotations

from glasshouse.config import JsonDict
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.heads import LMHead
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import View


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened: none that a saved page could contain."""
    return []


def applies(loader: ModelLoader) -> bool:
    """Whether there is a server to chat with, and the model generates."""
    model = loader.get("").model if loader.served else None
    return isinstance(model, Decoder | Seq2Seq) and isinstance(model.head, LMHead)


VIEW = View(name="chat", title="Chat", endpoints={}, initial_requests=initial_requests, applies=applies)
