"""The playground's page and its endpoints: chats, rounds of answers, plain decoding."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.decoding.engine.outputs import Delta, Output
from specjax.decoding.rows import Row
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.session import Session
from specjax.errors import InputError
from specjax.playground.page import answer_parts, page
from specjax.playground.replay_round import RecordedRow
from specjax.serving.connections import Answer, Writer, error_response, read_body
from specjax.serving.playground_engines import PlaygroundEngine, PlaygroundEngines, Setting
from specjax.serving.requests import Completion, RequestError, RequestReader, read_object
from specjax.serving.responses import DONE, ResponseWriter, event

MOST_ANSWERS = 16
"""The number of answers that are kept, so that their rounds can be requested."""
_MOST_REPLAYS = 4
"""The number of requests for rounds that may wait or run at once; they run one after another."""
_SEEDS = 1 << 31


@dataclass(frozen=True)
class KeptAnswer:
    """An answer, with everything needed to compute its rounds and its plain decoding.

    `speed` is in tokens per second after the first step, None for an answer of one step.
    """

    setting: Setting
    session: Session
    row: Row
    output: Output
    speed: float | None


class Playground:
    """The endpoints of the page; `defaults` has the sampling parameters that a request omits."""

    def __init__(
        self,
        session: Session,
        model_name: str,
        defaults: SamplingParams,
        max_body_bytes: int,
        *,
        needs_key: bool,
    ) -> None:
        self.engines = PlaygroundEngines(session, defaults)
        self._model_name, self._defaults, self._needs_key = model_name, defaults, needs_key
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
            Route("/playground/answers/{id}/plain", self.plain, methods=["POST"]),
            Route("/playground/answers/{id}/rounds", self.rounds),
        ]

    async def page(self, request: Request) -> Response:
        """Answer GET / with the page (docs/playground.md)."""
        if self._text is None:
            # Its tables and what it offers are computed once.
            self._text = await anyio.to_thread.run_sync(self._page)
        return HTMLResponse(self._text)

    async def engine(self, request: Request) -> Response:
        """Answer POST /playground/engine: make the engine of a setting; return its seconds."""
        setting = await self._setting(request)
        async with self.engines.using(setting) as engine:
            return JSONResponse({"compile_s": engine.compile_s, "longest": engine.longest})

    async def chat(self, request: Request) -> ASGIApp:
        """Answer POST /playground/chat, which is /v1/chat/completions with a setting, streamed."""
        values = await self._values(request)
        setting = self.engines.read(values)

        async def answer(engine: PlaygroundEngine) -> Answer:
            completion = await self._completion(engine, values)
            session, sampling = engine.session, completion.sampling
            row = Row(0, completion.prompts[0], sampling)

            def keep(id: str, output: Output, speed: float | None) -> None:
                kept = KeptAnswer(setting, engine.session, row, output, speed)
                self._answers[id] = kept
                if len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)

            drafters = [part.name for part in session.plan.drafter.parts]
            tokenizer = session.model.tokenizer
            writer = _KeepingWriter(completion, self._model_name, tokenizer, drafters, keep=keep)
            return _answer(engine, row, writer)

        return _Turn(self.engines, setting, answer)

    async def plain(self, request: Request) -> ASGIApp:
        """Answer POST /playground/answers/{id}/plain with the speed of plain decoding."""
        await self._values(request)
        kept = self._kept(request)
        count = len(kept.output.token_ids)
        sampling = replace(kept.row.sampling, max_new_tokens=count, ignore_eos=True)
        row = replace(kept.row, sampling=sampling)

        async def answer(engine: PlaygroundEngine) -> Answer:
            return _answer(engine, row, _PlainWriter(kept.speed))

        return _Turn(self.engines, replace(kept.setting, length=0), answer)

    async def rounds(self, request: Request) -> Response:
        """Answer GET /playground/answers/{id}/rounds with a line of JSON for each round."""
        answer = self._kept(request)
        if self._num_replays >= _MOST_REPLAYS:
            raise RequestError(429, "the rounds of other answers are being computed: try later")
        return StreamingResponse(self._lines(answer), media_type="application/x-ndjson")

    def _page(self) -> str:
        served = {
            "model": self._model_name,
            "default": vars(self.engines.default),
            "longest": self.engines.longest,
            "drafters": self.engines.offers(),
            "needs_key": self._needs_key,
        }
        return page({"served": served, "runs": []})

    async def _values(self, request: Request) -> dict[str, Any]:
        return read_object(await read_body(request, self._max_body_bytes))

    async def _completion(self, engine: PlaygroundEngine, values: dict[str, Any]) -> Completion:
        """Return a chat's request, with a seed, so that its rounds can be computed again."""
        reader = RequestReader(engine.thread.engine, self._model_name, self._defaults, 1)
        completion = await anyio.to_thread.run_sync(lambda: reader.completion(values, chat=True))
        if not completion.stream:
            raise RequestError(400, "stream=false: use true, as the page does", "stream")
        if completion.sampling.seed is not None:
            return completion
        sampling = replace(completion.sampling, seed=secrets.randbelow(_SEEDS))
        return replace(completion, sampling=sampling)

    async def _setting(self, request: Request) -> Setting:
        values = await self._values(request)
        setting = self.engines.read(values)
        if values:
            raise RequestError(400, f"{next(iter(values))!r:.60}: give drafter, rule and length")
        return setting

    def _kept(self, request: Request) -> KeptAnswer:
        answer = self._answers.get(request.path_params["id"])
        if answer is None:
            message = f"there is no such answer among the last {MOST_ANSWERS}: ask again"
            raise RequestError(404, message)
        return answer

    async def _lines(self, answer: KeptAnswer) -> AsyncIterator[bytes]:
        self._num_replays += 1
        try:
            async with self._replaying:
                async for part in iterate_in_threadpool(_parts(answer)):
                    yield json.dumps(part, separators=(",", ":")).encode() + b"\n"
        finally:
            self._num_replays -= 1


class _TimedReply:
    """A reply of one sample that, once read, has its `output` and its `speed` in tokens/s.

    The speed leaves out the first step, whose tokens come with the prompt's pass. It is None for an
    answer of one step.
    """

    def __init__(self, reply: AsyncIterable[tuple[int, Delta]]) -> None:
        self._reply = reply
        self.output: Output | None = None
        self.speed: float | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        first = None
        async for prompt, delta in self._reply:
            first = len(delta.token_ids) if first is None else first
            if delta.output is not None:
                self.output = delta.output
                later, times = len(delta.output.token_ids) - first, delta.output.times
                if later and times.total_s > times.first_token_s:
                    self.speed = later / (times.total_s - times.first_token_s)
            yield prompt, delta


@dataclass(frozen=True)
class _KeepingWriter(ResponseWriter):
    """A writer whose stream ends with the id of the answer, which it passes to `keep`."""

    keep: Callable[[str, Output, float | None], None] = field(kw_only=True)

    async def events(self, reply: AsyncIterable[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of a chat, then one with the answer's id and tokens per second."""
        timed = _TimedReply(reply)
        async for one in super().events(timed):
            if one == DONE and timed.output is not None:
                self.keep(self.id, timed.output, timed.speed)
                yield event({"answer": {"id": self.id, "tokens_per_second": timed.speed}})
            yield one


@dataclass(frozen=True)
class _PlainWriter(Writer):
    """A writer of two speeds: that of an answer (`speed`) and that of plain decoding."""

    speed: float | None
    stream = False

    async def whole(self, reply: AsyncIterable[tuple[int, Delta]]) -> dict[str, Any]:
        """Return both speeds in tokens per second once the reply has ended."""
        timed = _TimedReply(reply)
        async for _ in timed:
            pass
        return {"tokens_per_second": self.speed, "plain_tokens_per_second": timed.speed}


@dataclass(frozen=True)
class _Turn:
    """An ASGI response that waits for the engine of a setting to exist and to be free."""

    engines: PlaygroundEngines
    setting: Setting
    answer: Callable[[PlaygroundEngine], Awaitable[Answer]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            async with self.engines.using(self.setting) as engine:
                answer = await self.answer(engine)
                await answer(scope, receive, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)


def _answer(engine: PlaygroundEngine, row: Row, writer: Any) -> Answer:
    reply = engine.thread.submit([row.prompt], row.sampling, 1)
    if reply is None:
        raise RequestError(429, "an earlier answer is still being ended: try again")
    return Answer(engine.thread, reply, writer)


def _parts(answer: KeptAnswer) -> Iterator[dict[str, Any]]:
    """Yield an answer as the page reads it, and its rounds; an error may be the last part."""
    rounds = answer.output.rounds
    counts = (rounds.drafted, rounds.accepted, rounds.emitted, rounds.drafter)
    recorded = RecordedRow(
        tuple(answer.output.token_ids), *(tuple(part.tolist()) for part in counts)
    )
    try:
        yield from answer_parts(answer.session, answer.row, recorded, "")
    except InputError as error:
        yield {"error": str(error)}
