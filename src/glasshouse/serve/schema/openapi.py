"""The OpenAPI document, made from the same tables that parse the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from glasshouse.config import JsonDict
from glasshouse.serve.schema import requests
from glasshouse.serve.schema.fields import Table
from glasshouse.version import __version__

POSTS: Mapping[str, tuple[str, Table]] = {
    "/v1/completions": ("Continue a prompt.", requests.COMPLETIONS),
    "/v1/chat/completions": ("Reply to a conversation.", requests.CHAT),
    "/v1/responses": ("Reply to a conversation, without state.", requests.RESPONSES),
    "/v1/embeddings": ("Embed texts.", requests.EMBEDDINGS),
    "/tokenize": ("Encode a text or a conversation.", requests.TOKENIZE),
    "/detokenize": ("Decode token ids.", requests.DETOKENIZE),
}
GETS = {
    "/v1/models": "List the models.",
    "/v1/models/{name}": "Describe a model.",
    "/health": "Whether the process answers.",
    "/ready": "Whether it takes requests: it does not while it warms up and shuts down.",
    "/props": "What the models can do.",
    "/metrics": "Metrics for Prometheus.",
    "/openapi.json": "This document.",
}
# Beside the page.
ANSWER = {"/v1/answers/{id}": "An answer with what each token was drawn from."}
COMPARISON = {"/v1/answers/comparison": ("Where two answers part.", requests.ANSWER_COMPARISON)}


def document(models: Iterable[str], *, look: bool = False) -> JsonDict:
    """Return the document of a server with models of these names.

    >>> list(document(["mine"])["paths"])[:2]
    ['/v1/completions', '/v1/chat/completions']
    """
    names = {"type": "string", "enum": list(models)}
    paths: JsonDict = {}
    for path, (summary, table) in ({**POSTS, **COMPARISON} if look else POSTS).items():
        schema = table.schema()
        if "model" in table.fields:
            schema["properties"]["model"] = names
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses()}}
    for path, summary in (GETS | ANSWER if look else GETS).items():
        paths[path] = {"get": {"summary": summary, "responses": _responses()}}
        for name, schema in (("name", names), ("id", {"type": "string"})):
            if f"{{{name}}}" in path:
                given = {"name": name, "in": "path", "required": True, "schema": schema}
                paths[path]["get"]["parameters"] = [given]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Glasshouse", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def _responses() -> JsonDict:
    error = {
        "type": "object",
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
        "required": ["error"],
    }
    return {
        "200": {"description": "The answer."},
        "4XX": {"description": "What is wrong.", "content": {"application/json": {"schema": error}}},
        "503": {"description": "Not now.", "content": {"application/json": {"schema": error}}},
    }
