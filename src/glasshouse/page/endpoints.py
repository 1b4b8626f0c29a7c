"""API endpoints of the page by name: its own and those that its views declare."""

from __future__ import annotations

from glasshouse.page import model_info
from glasshouse.page.glossary import Glossary, glossary
from glasshouse.page.manifest import views
from glasshouse.page.view import Endpoint
from glasshouse.page.views import next_token, tokenization

PAGE = {
    "model": Endpoint(model_info.ModelInfo, model_info.model_info, needs_model=False),
    "opening_selection": Endpoint(model_info.ModelInfo, model_info.opening_selection),
    "checkpoints": Endpoint(model_info.Checkpoints, model_info.checkpoints, needs_model=False),
    "glossary": Endpoint(Glossary, glossary, needs_model=False),
    "tokenize": Endpoint(tokenization.Tokenize, tokenization.tokenize, needs_model=False),
    "next": Endpoint(next_token.Next, next_token.next_tokens),
    "generate": Endpoint(next_token.Generate, next_token.generate_text),
}


def endpoints() -> dict[str, Endpoint]:
    """Return all endpoints, those of the views of installed packages included."""
    return PAGE | {name: endpoint for view in views().values() for name, endpoint in view.endpoints.items()}
