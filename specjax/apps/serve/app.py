"""The HTTP routes of a server: OpenAI's API, health and metrics."""

from __future__ import annotations

import hmac
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.apps.serve.connections import error_response, read_body, start_answer
from specjax.apps.serve.engine_thread import EngineThread
from specjax.apps.serve.metrics import CONTENT_TYPE
from specjax.apps.serve.playground_api import Playground
from specjax.apps.serve.requests import RequestError, RequestReader

_ENCODERS = 2
"""The number of bodies that are read and encoded at once, each in a thread."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Api:
    """The HTTP endpoints of a server with one engine.

    Bodies of more than `max_body_bytes` are refused. The methods take a request of Starlette and
    return its response.
    """

    def __init__(self, engine: EngineThread, reader: RequestReader, max_body_bytes: int) -> None:
        self.engine, self.reader, self._max_body_bytes = engine, reader, max_body_bytes
        self._encoders = anyio.CapacityLimiter(_ENCODERS)

    async def chat(self, request: Request) -> ASGIApp:
        """Answer POST /v1/chat/completions."""
        return await self._complete(request, chat=True)

    async def text(self, request: Request) -> ASGIApp:
        """Answer POST /v1/completions."""
        return await self._complete(request, chat=False)

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name}."""
        self.reader.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """Answer GET /health with status 200, or 503 once the engine has failed."""
        if self.engine.failure is not None:
            raise RequestError(503, "the engine has failed")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics in Prometheus's text format."""
        engine = self.engine
        text = engine.counters.text(
            self.reader.model_name,
            running=engine.num_running,
            waiting=engine.num_waiting,
            preempted=engine.engine.statistics.put_back,
        )
        return Response(text, media_type=CONTENT_TYPE)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.reader.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "specjax",
            "max_model_len": self.engine.engine.plan.options.max_length,
        }

    async def _complete(self, request: Request, *, chat: bool) -> ASGIApp:
        body = await read_body(request, self._max_body_bytes)
        completion = await anyio.to_thread.run_sync(
            lambda: self.reader.read(body, chat=chat), limiter=self._encoders
        )
        if self.engine.failure is not None:
            raise RequestError(503, "the engine has failed")
        return start_answer(self.engine, completion, self.reader.model_name)


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
