"""Read requests for completions, and send responses that end when the client disconnects."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specjax.apps.serve.engine_thread import EngineThread, Reply
from specjax.apps.serve.requests import Completion, RequestError, RequestReader
from specjax.apps.serve.responses import ResponseWriter
from specjax.engine.plan import DecodePlan

_BODY_S = 30.0
"""Seconds within which the body of a request must arrive."""
_DISCARDED = 16
"""A body of up to this many times the largest size is read to its end before it is refused, since a
client that is still sending reads no response."""
_ENCODERS = 2
"""The number of bodies that are read and encoded at once, each in a thread."""
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


@dataclass
class Answer:
    """An ASGI response that sends a reply; the request is aborted if the client disconnects."""

    engine: EngineThread
    reply: Reply
    writer: ResponseWriter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until it is complete or the client has disconnected."""
        sending = self._events(send) if self.writer.stream else self._whole(scope, receive, send)
        tasks = [asyncio.create_task(sending), asyncio.create_task(_disconnected(receive))]
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
            response = error_response(error)
        await response(scope, receive, send)

    async def _events(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in _EVENT_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self.writer.events(self.reply):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@dataclass
class Completions:
    """Requests for completions by one engine: how they are read, and how they are answered.

    Bodies of more than `max_body_bytes` are refused.
    """

    engine: EngineThread
    reader: RequestReader
    max_body_bytes: int
    _encoders: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(_ENCODERS)
    )

    @property
    def plan(self) -> DecodePlan:
        """The engine's plan of the moment."""
        return self.engine.engine.plan

    async def read(self, request: Request, *, chat: bool) -> Completion:
        """Return the checked request in a body, of the chat or of the text API.

        Raises RequestError for an invalid one, and if the engine has failed.
        """
        body = await read_body(request, self.max_body_bytes)
        completion = await anyio.to_thread.run_sync(
            lambda: self.reader.read(body, chat=chat), limiter=self._encoders
        )
        if self.engine.failure is not None:
            raise RequestError(503, "the engine has failed")
        return completion

    def start(self, completion: Completion) -> Answer:
        """Submit a request; return its response. Raises RequestError if too many samples wait."""
        reply = self.engine.submit(completion.prompts, completion.sampling, completion.n)
        if reply is None:
            message = f"{self.engine.num_unfinished} samples run or wait: try again later"
            raise RequestError(429, message, code="rate_limit_exceeded")
        drafters = [part.name for part in self.plan.loop.drafter.parts]
        tokenizer, longest = self.plan.model.tokenizer, self.plan.options.max_length
        name = self.reader.model_name
        writer = ResponseWriter(completion, name, tokenizer, drafters, longest)
        return Answer(self.engine, reply, writer)


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request, of at most `most` bytes.

    Raises RequestError if the body is late, too large or not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also, a browser sends this type to another site only if that site allows it.
        raise RequestError(415, f"content-type {kind!r:.60}: send application/json")
    body, size = bytearray(), 0
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


def error_response(error: RequestError) -> Response:
    """Return the HTTP response for an error: its status, and OpenAI's error object as JSON."""
    return JSONResponse(error.body(), error.status)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
