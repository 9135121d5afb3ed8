"""The HTTP routes of a server: OpenAI's API, health and metrics."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.apps.serve.connections import Answer, Completions, error_response
from specjax.apps.serve.metrics import CONTENT_TYPE
from specjax.apps.serve.playground_api import Playground
from specjax.apps.serve.requests import RequestError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Api:
    """The HTTP endpoints of a server with one engine.

    The methods take a request of Starlette and return its response.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._engine, self._reader = completions.engine, completions.reader

    async def chat(self, request: Request) -> Answer:
        """Answer POST /v1/chat/completions."""
        return self._completions.start(await self._completions.read(request, chat=True))

    async def text(self, request: Request) -> Answer:
        """Answer POST /v1/completions."""
        return self._completions.start(await self._completions.read(request, chat=False))

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name}."""
        self._reader.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """Answer GET /health with status 200, or 503 once the engine has failed."""
        if self._engine.failure is not None:
            raise RequestError(503, "the engine has failed")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics in Prometheus's text format."""
        engine = self._engine
        text = engine.counters.text(
            self._reader.model_name,
            running=engine.num_running,
            waiting=engine.num_waiting,
            preempted=engine.engine.statistics.put_back,
        )
        return Response(text, media_type=CONTENT_TYPE)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._reader.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "specjax",
            "max_model_len": self._completions.plan.options.max_length,
        }


class RequireKey:
    """Middleware that refuses requests to /v1 and /playground that lack the API key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with status 401."""
        if scope["type"] == "http" and scope["path"].startswith(("/v1", "/playground")):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_app(api: Api, playground: Playground, host: str, api_key: str | None = None) -> Starlette:
    """Return the ASGI application of a server that listens on `host`.

    With `api_key`, requests to /v1 and /playground must have it as their bearer token.
    """
    middleware = []
    if host in _LOOPBACK:
        # A page of another site whose name was made to point here is not answered.
        hosts = [*_LOOPBACK, "[::1]"]
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
    if api_key is not None:
        middleware.append(Middleware(RequireKey, key=api_key))
    routes = [
        *playground.routes(),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.text, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={RequestError: _refused, HTTPException: _not_found, Exception: _failed},
    )


async def _refused(request: Request, error: RequestError) -> Response:
    return error_response(error)


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path!r:.80}: {error.detail}"
    return error_response(RequestError(error.status_code, message))


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response to a request on which this program failed; stderr has the traceback."""
    return error_response(RequestError(500, "the server failed on this request"))
