"""An engine in a thread of its own, whose results are delivered to an event loop.

Neither waits for the other: the event loop puts calls into a queue that the thread empties between
two steps, and the thread schedules a callback on the loop with the deltas of each step.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from specjax.apps.serve.metrics import Counters
from specjax.apps.serve.requests import RequestError
from specjax.engine.engine import Engine
from specjax.engine.outputs import Delta
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.files.log import LOGGER

_WARM_UP_TOKENS = 16


class Reply:
    """The engine's output for the prompts of one HTTP request, as an asynchronous iterator.

    Its items are (index of the prompt, delta). It ends when all samples have ended, and raises the
    RequestError with which the engine ended it, if any.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_unfinished = num_samples
        self.on_delta: Callable[[Delta], object] = lambda delta: None
        """Called with each delta before it is delivered."""
        self._arrived: asyncio.Queue[tuple[int, Delta] | RequestError] = asyncio.Queue()

    def put(self, item: tuple[int, Delta] | RequestError) -> None:
        """Append a delta with the index of its prompt, or an error that ends the reply."""
        if isinstance(item, tuple):
            self.on_delta(item[1])
        self._arrived.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas, each with the index of its prompt. Raises RequestError on failure."""
        while self.num_unfinished:
            item = await self._arrived.get()
            if isinstance(item, RequestError):
                raise item
            self.num_unfinished -= item[1].output is not None
            yield item


class EngineThread:
    """A thread that runs an engine; all methods are called on the event loop's thread.

    If the engine fails, decoding stops, and `failure` is the cause.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self.engine = engine
        self.capacity = engine.plan.options.batch_size + max_waiting
        """The maximum number of unfinished samples."""
        self.counters = Counters(engine.plan.loop.drafter.num_speculative_tokens)
        self.failure: BaseException | None = None
        self.num_running = self.num_waiting = 0
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._open: dict[int, tuple[Reply, int, int]] = {}
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, on_failure: Callable[[], None]) -> None:
        """Start the thread, which delivers results to the running event loop.

        `on_failure` is called there if the engine fails.
        """
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step and wait; unfinished requests are dropped."""
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join()
        if self.failure is None:
            self.engine.close()

    @property
    def num_unfinished(self) -> int:
        """The number of samples whose reply is still awaited."""
        return sum(samples for _, _, samples in self._open.values())

    def submit(
        self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, n: int
    ) -> Reply | None:
        """Add `n` samples of each prompt; return their reply.

        Returns None, adding nothing, if more than `capacity` samples would be unfinished.
        """
        if self.num_unfinished + n * len(prompts) > self.capacity:
            return None
        reply = Reply(n * len(prompts))
        self.counters.prompt_tokens += sum(map(len, prompts))
        for index, prompt in enumerate(prompts):
            number = next(self._ids)
            self._open[number] = (reply, index, n)
            self._calls.put(functools.partial(self._add, number, prompt, sampling, n))
        return reply

    def cancel(self, reply: Reply) -> None:
        """Abort the unfinished samples of a reply that is no longer awaited."""
        numbers = [number for number, (owner, *_) in self._open.items() if owner is reply]
        for number in numbers:
            del self._open[number]
            self._calls.put(functools.partial(self._abort, number))

    def abort_all(self) -> None:
        """Abort all requests; their replies end with the reason "abort"."""
        for number in self._open:
            self._calls.put(functools.partial(self._abort, number))

    def _run(self) -> None:
        """Alternate between calls from the queue and engine steps, in the engine's thread."""
        try:
            while True:
                while not self._calls.empty() or not self.engine.num_unfinished:
                    call = self._calls.get()
                    if call is None:
                        return
                    call()
                deltas = self.engine.step()
                waiting = self.engine.num_waiting
                self._tell(self._deliver, deltas, self.engine.num_unfinished - waiting, waiting)
        except BaseException as error:
            self._tell(self._fail, error)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        """Schedule a call on the event loop's thread, unless the loop has ended."""
        with suppress(RuntimeError):  # the loop has ended first
            self._loop.call_soon_threadsafe(what, *arguments)

    def _add(self, number: int, prompt: tuple[int, ...], sampling: SamplingParams, n: int) -> None:
        """Add a request in the engine's thread, or report why it is refused."""
        try:
            self.engine.add(list(prompt), sampling, id=number, n=n)
        except InputError as error:
            self._tell(self._refuse, number, RequestError(400, str(error)))

    def _abort(self, number: int) -> None:
        """Abort a request in the engine's thread, unless it has finished."""
        with suppress(InputError):  # it has finished meanwhile
            self.engine.abort(number)

    def _deliver(self, deltas: list[Delta], running: int, waiting: int) -> None:
        """Pass the deltas of a step to the replies that await them."""
        self.num_running, self.num_waiting = running, waiting
        for delta in deltas:
            self.counters.add(delta)
            if delta.id not in self._open:
                continue  # the reply was cancelled
            reply, index, samples = self._open[delta.id]
            reply.put((index, delta))
            if delta.output is not None:
                del self._open[delta.id]
                if samples > 1:
                    self._open[delta.id] = (reply, index, samples - 1)

    def _refuse(self, number: int, error: RequestError) -> None:
        """End the reply of request `number` with an error."""
        if number in self._open:
            reply, _, _ = self._open.pop(number)
            reply.put(error)

    def _fail(self, error: BaseException) -> None:
        """Record the engine's failure and end all replies."""
        self.failure = error
        self.num_running = self.num_waiting = 0
        for number in list(self._open):
            self._refuse(number, RequestError(500, "the engine has failed"))
        self._on_failure()


def warm_up(engine: Engine, defaults: SamplingParams) -> None:
    """Compile all programs that requests may need, and run each of them once.

    `defaults` are the sampling parameters for fields that requests leave out. Raises InputError if
    the model does not support them, for programs that do not fit into memory, and for a model whose
    logits are not numbers.
    """
    unused = engine.plan.model.config.unused_tokens
    token = next(token for token in itertools.count() if token not in unused)
    sampling = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    rows = engine.plan.options.batch_size
    # The defaults come first, since programs are compiled for the sampling of earlier requests.
    first = {"min_tokens": min(defaults.min_tokens, 1)}
    first["forced_token_ids"] = defaults.forced_token_ids[:1]
    engine.add([token], replace(defaults, max_new_tokens=1, **first))
    engine.compile(fewer_rows=True)
    while rows:
        LOGGER.info("running the programs for %d row%s once", rows, "s" * (rows > 1))
        engine.add([token], sampling, n=rows)
        # The second step runs with fewer rows, and adding a request returns to all rows.
        deltas = [*engine.step(), *engine.step()]
        engine.add([token], sampling)
        for delta in [*deltas, *engine]:
            if delta.output is not None and delta.output.error is not None:
                raise InputError(delta.output.error)
        rows //= 2
