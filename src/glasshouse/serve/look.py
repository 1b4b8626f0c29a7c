"""The inspection page on the API server: its static files, and its requests, which run between engine steps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glasshouse.page.app import page_routes, respond
from glasshouse.page.endpoints import endpoints
from glasshouse.page.files import index_page
from glasshouse.page.guard import policy, security_headers
from glasshouse.page.manifest import PAGE_ENDPOINTS, available_views, views
from glasshouse.page.model_loader import LoadedModel, ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.served_model import ServedModel

MEMORY = 2 * 2**30  # bytes of activations that are kept for the views, of all models and keys together
SHARED = PAGE_ENDPOINTS - {"checkpoints", "save"}  # which are of runs, and of files


class ServedPage:
    """The page of every model; what it has computed for one key is not reused for another."""

    def __init__(self, api: Api, n_keys: int) -> None:
        self._memory = MEMORY // (len(api.models) * max(1, n_keys))
        self._loaders = {name: _loader(served) for name, served in api.models.items()}
        self._traces: dict[tuple[str, str], TraceCache] = {}  # by model and key
        self._known = endpoints()
        self._endpoints = {name: _endpoints(loader) for name, loader in self._loaders.items()}

    def routes(self) -> list[Route]:
        """Return the routes of the page itself, which contain nothing of a model and need no key."""
        page = index_page(served=True)
        return page_routes(page, security_headers(policy(page)))

    async def endpoint(self, api: Api, request: Request) -> Response:
        """Answer a request of the page about the model that the query names, or the first."""
        name = request.query_params.get("model") or next(iter(self._loaders))
        api.model(name)  # raises for one that is not served
        asked = request.path_params["name"]
        if asked not in self._endpoints[name]:
            raise ApiError(f"the page has no endpoint {asked[:40]!r} here.", 404)
        endpoint = self._known[asked]
        body = await api.read_body(request)
        key = request.scope[KEY]
        traces = self._traces.setdefault((name, key), TraceCache(self._loaders[name], self._memory))
        if endpoint.needs_model:
            return await api.runner.call(lambda: respond(traces, endpoint, body), key, api.deadline())
        return await api.in_thread(request, lambda: respond(traces, endpoint, body))


def _loader(served: ServedModel) -> ModelLoader:
    return ModelLoader(served.name, given=LoadedModel(served.model, served.tok, served.max_len), served=True)


def _endpoints(loader: ModelLoader) -> set[str]:
    return {*SHARED, *(name for view in available_views(loader) for name in views()[view].endpoints)}
