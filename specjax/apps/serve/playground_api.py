"""The playground's page and its endpoints: engines of settings, chats, rounds of answers."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.apps.playground.page import answer_parts, page
from specjax.apps.playground.replay_round import RecordedRow
from specjax.apps.serve.connections import Answer, error_response, read_body, start_answer
from specjax.apps.serve.playground_engines import PlaygroundEngine, PlaygroundEngines, Setting
from specjax.apps.serve.requests import RequestError, RequestReader, read_object
from specjax.engine import requests as engine_requests
from specjax.engine.outputs import Output
from specjax.engine.plan import DecodePlan
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError

MOST_ANSWERS = 16
"""The number of answers that are kept, so that their rounds can be requested."""
_MOST_REPLAYS = 4
"""The number of requests for rounds that may wait or run at once; they run one after another."""
_SEEDS = 1 << 31


@dataclass(frozen=True)
class KeptAnswer:
    """An answer, with everything needed to compute its rounds again."""

    plan: DecodePlan
    request: engine_requests.Request
    output: Output


class Playground:
    """The endpoints of the page; `defaults` has the sampling parameters that a request omits."""

    def __init__(
        self,
        plan: DecodePlan,
        model_name: str,
        defaults: SamplingParams,
        max_body_bytes: int,
    ) -> None:
        self.engines = PlaygroundEngines(plan, defaults)
        self._model_name, self._defaults = model_name, defaults
        self._max_body_bytes = max_body_bytes
        self._answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._replaying = asyncio.Lock()
        self._num_replays = 0
        self._text: str | None = None

    def routes(self) -> list[Route]:
        """Return the routes of the page."""
        return [
            Route("/", self.page),
            Route("/playground/engine", self.engine, methods=["POST"]),
            Route("/playground/chat", self.chat, methods=["POST"]),
            Route("/playground/answers/{id}/rounds", self.rounds),
        ]

    async def page(self, request: Request) -> Response:
        """Answer GET / with the page (docs/serving.md)."""
        if self._text is None:
            # Its tables and what it offers are computed once.
            self._text = await anyio.to_thread.run_sync(self._page)
        return HTMLResponse(self._text)

    async def engine(self, request: Request) -> Response:
        """Answer POST /playground/engine: make the engine of a setting; return its seconds."""
        values = await self._values(request)
        setting = self.engines.read(values)
        if values:
            raise RequestError(400, f"{next(iter(values))!r:.60}: give drafter, rule and length")
        async with self.engines.using(setting) as engine:
            return JSONResponse({"compile_s": engine.compile_s, "longest": engine.longest})

    async def chat(self, request: Request) -> ASGIApp:
        """Answer POST /playground/chat, which is /v1/chat/completions with a setting, streamed.

        The rounds of the answer are found by the id of its chunks.
        """
        values = await self._values(request)
        return _Turn(self, self.engines.read(values), values)

    async def answer(self, engine: PlaygroundEngine, values: dict[str, Any]) -> Answer:
        """Start a chat in an engine; return its response. Raises RequestError."""
        reader = RequestReader(engine.thread.engine, self._model_name, self._defaults, 1)
        completion = await anyio.to_thread.run_sync(lambda: reader.completion(values, chat=True))
        if not completion.stream:
            raise RequestError(400, "stream=false: use true, as the page does", "stream")
        if completion.sampling.seed is None:
            # With a seed, rounds can be computed again.
            sampling = replace(completion.sampling, seed=secrets.randbelow(_SEEDS))
            completion = replace(completion, sampling=sampling)
        answer = start_answer(engine.thread, completion, self._model_name)
        request = engine_requests.Request(0, completion.prompts[0], completion.sampling)

        def keep(output: Output) -> None:
            self._answers[answer.writer.id] = KeptAnswer(engine.plan, request, output)
            if len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)

        answer.reply.on_output = keep
        return answer

    async def rounds(self, request: Request) -> Response:
        """Answer GET /playground/answers/{id}/rounds with a line of JSON for each round."""
        answer = self._answers.get(request.path_params["id"])
        if answer is None:
            message = f"there is no such answer among the last {MOST_ANSWERS}: ask again"
            raise RequestError(404, message)
        if self._num_replays >= _MOST_REPLAYS:
            raise RequestError(429, "the rounds of other answers are being computed: try later")
        return StreamingResponse(self._lines(answer), media_type="application/x-ndjson")

    def _page(self) -> str:
        served = {
            "model": self._model_name,
            "default": vars(self.engines.default),
            "longest": self.engines.longest,
            "drafters": self.engines.offers(),
        }
        return page({"served": served, "runs": []})

    async def _values(self, request: Request) -> dict[str, Any]:
        return read_object(await read_body(request, self._max_body_bytes))

    async def _lines(self, answer: KeptAnswer) -> AsyncIterator[bytes]:
        self._num_replays += 1
        try:
            async with self._replaying:
                async for part in iterate_in_threadpool(_parts(answer)):
                    yield json.dumps(part, separators=(",", ":")).encode() + b"\n"
        finally:
            self._num_replays -= 1


@dataclass(frozen=True)
class _Turn:
    """An ASGI response to a chat that waits for its engine to exist and to be free."""

    playground: Playground
    setting: Setting
    values: dict[str, Any]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            async with self.playground.engines.using(self.setting) as engine:
                answer = await self.playground.answer(engine, self.values)
                await answer(scope, receive, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)


def _parts(answer: KeptAnswer) -> Iterator[dict[str, Any]]:
    """Yield an answer as the page reads it, and its rounds; an error may be the last part."""
    rounds = answer.output.rounds
    counts = (rounds.drafted, rounds.accepted, rounds.emitted, rounds.drafter)
    recorded = RecordedRow(
        tuple(answer.output.token_ids), *(tuple(part.tolist()) for part in counts)
    )
    try:
        yield from answer_parts(answer.plan, answer.request, recorded, "")
    except InputError as error:
        yield {"error": str(error)}
