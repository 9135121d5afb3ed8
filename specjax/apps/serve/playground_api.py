"""The playground's page and its endpoints: chats with the server's engine, and their rounds."""

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
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from specjax.apps.playground.page import answer_parts, page
from specjax.apps.playground.replay_round import RecordedRow
from specjax.apps.serve.connections import Answer, Completions
from specjax.apps.serve.requests import RequestError
from specjax.engine import requests as engine_requests
from specjax.engine.outputs import Delta, Output
from specjax.engine.plan import DecodePlan
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
    """The endpoints of the page, whose chats are requests like those to /v1."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._replaying = asyncio.Lock()
        self._num_replays = 0
        self._text: str | None = None

    def routes(self) -> list[Route]:
        """Return the routes of the page."""
        return [
            Route("/", self.page),
            Route("/playground/chat", self.chat, methods=["POST"]),
            Route("/playground/answers/{id}/rounds", self.rounds),
        ]

    async def page(self, request: Request) -> Response:
        """Answer GET / with the page (docs/serving.md)."""
        if self._text is None:
            # Its tables are computed once.
            self._text = await anyio.to_thread.run_sync(self._page)
        return HTMLResponse(self._text)

    async def chat(self, request: Request) -> Answer:
        """Answer POST /playground/chat, which is a streamed /v1/chat/completions of one sample.

        The rounds of the answer are found by the id of its chunks.
        """
        completion = await self._completions.read(request, chat=True)
        if not completion.stream:
            raise RequestError(400, "stream=false: use true, as the page does", "stream")
        if completion.n > 1:
            raise RequestError(400, f"n={completion.n}: use 1, as the page does", "n")
        if completion.sampling.seed is None:
            # With a seed, rounds can be computed again.
            sampling = replace(completion.sampling, seed=secrets.randbelow(_SEEDS))
            completion = replace(completion, sampling=sampling)
        answer = self._completions.start(completion)
        asked = engine_requests.Request(0, completion.prompts[0], completion.sampling)
        plan: DecodePlan | None = None

        def keep(delta: Delta) -> None:
            nonlocal plan
            if plan is None:
                # At its first tokens: drafters may copy from the requests that have ended by then.
                plan = self._completions.plan
            if delta.output is not None:
                self._answers[answer.writer.id] = KeptAnswer(plan, asked, delta.output)
                if len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)

        answer.reply.on_delta = keep
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
        loop = self._completions.plan.loop
        served = {
            "model": self._completions.reader.model_name,
            "drafter": loop.drafter.name,
            "drafters": [part.name for part in loop.drafter.parts],
            "longest": loop.drafter.num_nodes,
            "rule": loop.rule.name,
            "exact": loop.rule.exact,
        }
        return page({"served": served, "runs": []})

    async def _lines(self, answer: KeptAnswer) -> AsyncIterator[bytes]:
        self._num_replays += 1
        try:
            async with self._replaying:
                async for part in iterate_in_threadpool(_parts(answer)):
                    yield json.dumps(part, separators=(",", ":")).encode() + b"\n"
        finally:
            self._num_replays -= 1


def _parts(answer: KeptAnswer) -> Iterator[dict[str, Any]]:
    """Yield an answer as the page reads it, and its rounds; an error may be the last part."""
    recorded = RecordedRow.of_output(answer.output)
    try:
        yield from answer_parts(answer.plan, answer.request, recorded, "")
    except InputError as error:
        yield {"error": str(error)}
