"""The HTTP routes of a server: OpenAI's API, health and metrics."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.playground.page import page
from specjax.serving.engine_thread import EngineThread, Reply
from specjax.serving.metrics import CONTENT_TYPE
from specjax.serving.requests import RequestError, RequestReader
from specjax.serving.responses import ResponseWriter

_BODY_S = 30.0
"""Seconds within which the body of a request must arrive."""
_DISCARDED = 16
"""Of so many times the largest body, the rest is read before it is refused: a client that still
sends reads no response."""
_ENCODERS = 2
"""The number of bodies that are read and encoded at once, each in a thread."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


class Api:
    """The HTTP endpoints of one engine; bodies of more than `max_body_bytes` are refused."""

    def __init__(self, engine: EngineThread, reader: RequestReader, max_body_bytes: int) -> None:
        self.engine, self.reader, self._max_body_bytes = engine, reader, max_body_bytes
        self._encoders = anyio.CapacityLimiter(_ENCODERS)

    async def chat(self, request: Request) -> ASGIApp:
        """Answer POST /v1/chat/completions."""
        return await self._complete(request, chat=True)

    async def text(self, request: Request) -> ASGIApp:
        """Answer POST /v1/completions."""
        return await self._complete(request, chat=False)

    async def playground(self, request: Request) -> Response:
        """Answer GET / with the page that has a chat (docs/playground.md)."""
        plan = self.engine.engine.session.plan
        served = {
            "model": self.reader.model_name,
            "drafter": plan.drafter.name,
            "rule": plan.rule.name,
        }
        # The first time, the page's tables are computed.
        text = await anyio.to_thread.run_sync(lambda: page({"served": served, "runs": []}))
        return HTMLResponse(text)

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
            self.reader.model_name, running=engine.num_running, waiting=engine.num_waiting
        )
        return Response(text, media_type=CONTENT_TYPE)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.reader.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "specjax",
            "max_model_len": self.engine.engine.session.max_length,
        }

    async def _complete(self, request: Request, *, chat: bool) -> ASGIApp:
        body = await self._body(request)
        completion = await anyio.to_thread.run_sync(
            lambda: self.reader.read(body, chat=chat), limiter=self._encoders
        )
        if self.engine.failure is not None:
            raise RequestError(503, "the engine has failed")
        reply = self.engine.submit(completion.prompts, completion.sampling, completion.n)
        if reply is None:
            message = f"{self.engine.num_unfinished} samples run or wait: try again later"
            raise RequestError(429, message, code="rate_limit_exceeded")
        tokenizer = self.reader.engine.session.model.tokenizer
        writer = ResponseWriter(completion, self.reader.model_name, tokenizer)
        return Answer(self.engine, reply, writer)

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request. Raises RequestError if it is late, too large or no JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also, a browser sends this type to another site only if that site allows it.
            raise RequestError(415, f"content-type {kind!r:.60}: send application/json")
        body, size, most = bytearray(), 0, self._max_body_bytes
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in request.stream():
                    size += len(piece)
                    if size <= most:
                        body += piece
                    elif size > _DISCARDED * most:
                        break
        except TimeoutError:
            raise RequestError(408, f"the body took more than {_BODY_S:g} seconds") from None
        if size > most:
            raise RequestError(413, f"the body has more than {most} bytes: send a smaller request")
        return bytes(body)


@dataclass
class Answer:
    """An ASGI response that sends a reply; the request is aborted if the client disconnects."""

    engine: EngineThread
    reply: Reply
    writer: ResponseWriter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until it is complete or the client has disconnected."""
        stream = self.writer.request.stream
        tasks = [
            asyncio.create_task(
                self._events(send) if stream else self._whole(scope, receive, send)
            ),
            asyncio.create_task(_disconnected(receive)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            self.engine.cancel(self.reply)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = JSONResponse(await self.writer.whole(self.reply))
        except RequestError as error:
            response = _error_response(error)
        await response(scope, receive, send)

    async def _events(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in _EVENT_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self.writer.events(self.reply):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class RequireKey:
    """Middleware that refuses requests to /v1 that lack the API key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with status 401."""
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_app(api: Api, host: str, api_key: str | None = None) -> Starlette:
    """Return the ASGI application for `host`; with `api_key`, requests to /v1 need it."""
    middleware = []
    if host in _LOOPBACK:
        # A page of another site whose name was made to point here is not answered.
        hosts = [*_LOOPBACK, "[::1]"]
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
    if api_key is not None:
        middleware.append(Middleware(RequireKey, key=api_key))
    routes = [
        Route("/", api.playground),
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
    return _error_response(error)


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path!r:.80}: {error.detail}"
    return _error_response(RequestError(error.status_code, message))


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response to a request on which this program failed.

    The traceback is printed on stderr.
    """
    return _error_response(RequestError(500, "the server failed on this request"))


def _error_response(error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
