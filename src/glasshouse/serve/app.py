"""The Starlette app: routes and error responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from glasshouse.config import JsonDict
from glasshouse.models import Seq2Seq
from glasshouse.serve.answers.kept import CANDIDATES
from glasshouse.serve.api import Api
from glasshouse.serve.endpoints.answers import answer_comparison, opened_answer
from glasshouse.serve.endpoints.chat import chat_completions
from glasshouse.serve.endpoints.completions import completions
from glasshouse.serve.endpoints.embeddings import embeddings
from glasshouse.serve.endpoints.metrics import metrics_text
from glasshouse.serve.endpoints.responses import responses
from glasshouse.serve.endpoints.tokenization import detokenize, tokenize
from glasshouse.serve.look import ServedPage
from glasshouse.serve.runtime.exchange import DisconnectedError
from glasshouse.serve.schema import openapi
from glasshouse.serve.schema.errors import REQUEST_ID, ApiError, timed_out, unavailable
from glasshouse.serve.served_model import ServedModel
from glasshouse.version import __version__
from glasshouse.web import json_response

Endpoint = Callable[[Api, Request], Awaitable[Response]]

POSTS: dict[str, Endpoint] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def make_app(api: Api, look: ServedPage | None = None) -> Starlette:
    """Return the app without access control; put a gate in front of it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.runner.start()
        yield
        api.close()

    gets = {
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/health": health,
        "/ready": ready,
        "/props": props,
        "/metrics": metrics,
        "/openapi.json": document,
    }
    routes = [Route(path, partial(answer, api, endpoint), methods=["POST"]) for path, endpoint in POSTS.items()]
    routes += [Route(path, partial(answer, api, endpoint), methods=["GET"]) for path, endpoint in gets.items()]
    if look is not None:
        routes += look.routes()
        compared = partial(answer, api, answer_comparison)
        routes.append(Route("/v1/answers/comparison", compared, methods=["POST"]))
        routes.append(Route("/v1/answers/{id}", partial(answer, api, opened_answer), methods=["GET"]))
        routes.append(Route("/api/{name:path}", partial(answer, api, look.endpoint), methods=["POST"]))
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


async def answer(api: Api, endpoint: Endpoint, request: Request) -> Response:
    """Answer a request; an error is reported in OpenAI's shape."""
    try:
        return await endpoint(api, request)
    except ApiError as error:
        return error.response()
    except TimeoutError:  # of `Runner.call`
        return timed_out(api.limits.timeout).response()
    except (ClientDisconnect, DisconnectedError):
        return Response(status_code=499)
    except Exception as error:  # a bug: report it, without what the client sent, and keep serving
        api.log.exception(error, request_id=REQUEST_ID.get())
        return ApiError(f"internal error ({type(error).__name__}).", 500, kind="server_error").response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return ApiError("this path does not take this method.", 405, headers=error.headers).response()
    return ApiError("there is no such path; see /openapi.json.", error.status_code).response()


async def health(api: Api, request: Request) -> Response:
    """Liveness check: the process answers, and the engine thread runs."""
    if api.runner.has_failed:
        raise unavailable(api.runner.closed_reason)
    return json_response({"status": "ok"})


async def ready(api: Api, request: Request) -> Response:
    """Readiness check: the models are warmed up, and no engine has failed."""
    broken = [name for name, lane in api.runner.lanes.items() if lane.broken]
    if broken:
        raise unavailable(f"the engine of {broken[0]!r} has failed; restart the server.")
    if not api.runner.ready:
        raise unavailable("the models are warming up.")
    return json_response({"status": "ready"})


async def models(api: Api, request: Request) -> Response:
    """List the models."""
    return json_response({"object": "list", "data": [_description(api, one) for one in api.models.values()]})


async def model(api: Api, request: Request) -> Response:
    """Describe a model."""
    return json_response(_description(api, api.model(request.path_params["name"])))


def _description(api: Api, served: ServedModel) -> JsonDict:
    return {
        "id": served.name,
        "object": "model",
        "created": api.started,
        "owned_by": "glasshouse",
        "max_model_len": served.max_len,
    }


async def props(api: Api, request: Request) -> Response:
    """Describe the capabilities of the models."""
    found: JsonDict = {"version": __version__, "internals": api.internals}
    found["models"] = [_props(one, internals=api.internals) for one in api.models.values()]
    if api.answers is not None:
        limits = {"max_answers": api.answers.max_answers, "max_bytes": api.answers.max_bytes}
        found["look"] = {**limits, "candidates": CANDIDATES}
    return json_response(found)


def _props(served: ServedModel, *, internals: bool) -> JsonDict:
    s = served.model.spec
    return {
        "id": served.name,
        "kind": "encoder-decoder" if isinstance(served.model, Seq2Seq) else type(served.model).__name__.lower(),
        "max_len": served.max_len,
        "vocab_size": s.vocab_size,
        "slots": 0 if served.engine is None else len(served.engine.slots),
        "generates": served.engine is not None,
        "chats": served.chats,
        "embeds": served.embeds,
        "steering": {} if served.engine is None else {n: v.site for n, v in served.engine.steering.items()},
        "probes": {n: p.site for n, p in served.engine.probes.items()} if internals and served.engine else {},
    }


async def metrics(api: Api, request: Request) -> Response:
    """Return the metrics."""
    return PlainTextResponse(metrics_text(api), media_type="text/plain; version=0.0.4")


async def document(api: Api, request: Request) -> Response:
    """Return the OpenAPI document."""
    return json_response(openapi.document(api.models, look=api.answers is not None))
