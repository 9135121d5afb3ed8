"""`Engine`, which decodes any number of requests together in a fixed number of slots.

The compiled loop returns when a row has finished and requests are waiting. The waiting prompts are
then read separately, a bounded number of tokens at a time, and moved into free slots while the
other rows keep their state. If the host has nothing to decide, the next step starts before the
results of the last one are read.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.controllers import Controller, LearnsCosts, Limits
from specjax.core.packed import Packed
from specjax.core.state import RUNNING, Seen
from specjax.distributed import processes
from specjax.drafters import Drafter, LoadedDrafter, make_drafter
from specjax.engine.device_rows import DeviceRows
from specjax.engine.options import (
    DecodeOptions,
    read_arguments,
    read_sampling,
    takes_options,
)
from specjax.engine.outputs import (
    ABORTED,
    Delta,
    Follower,
    RequestId,
    failure_message,
)
from specjax.engine.page_pool import PagePool
from specjax.engine.programs import Programs
from specjax.engine.prompts import Prompt, encode_prompt
from specjax.engine.request_pages import RequestPages
from specjax.engine.rows import Row
from specjax.engine.sampling_params import SamplingParams, one_per_prompt
from specjax.engine.scheduler import Request, Scheduler
from specjax.engine.session import (
    Session,
    check_length,
    check_request,
    plan_engine,
    round_up,
)
from specjax.engine.statistics import Statistics, Step
from specjax.engine.timed_steps import step_record
from specjax.errors import InputError, shown
from specjax.fields import Choice, Whole
from specjax.loading.load import place_model
from specjax.loading.model import MODEL_KIND, Model

_ROUNDS_WHILE_READING = 4
"""The maximum number of rounds per step while prompts for free slots are being read."""
_ROUNDS_PER_STOP = 8
"""The maximum number of rounds per step while some row has stop strings."""
_RECENT_STEPS = 5
"""The number of latest steps from which the remaining time of rows is estimated."""
_RUNNING_ROWS = Choice(("continue", "abort"))


@dataclass
class _Prompts:
    """Requests whose prompts are being read, each with its slot.

    All prompts are read together, up to `position`.
    """

    taken: list[tuple[int, Request]]
    position: int = 0
    begun: bool = False

    @property
    def longest(self) -> int:
        """The position up to which the longest prompt of an unaborted request must be read."""
        left = [request for _, request in self.taken if not request.ended]
        return max((self.position, *(len(request.row.tokens) - 1 for request in left)))

    def count(self, end: int) -> int:
        """Return the number of tokens of unaborted requests from the position to `end`."""
        left = [request for _, request in self.taken if not request.ended]
        return sum(max(min(len(one.row.tokens) - 1, end) - self.position, 0) for one in left)


@dataclass(frozen=True)
class _Reading:
    """Prompts being read, or rows being admitted, on the devices; done once `ready` is available.

    `begun` is a clock reading in seconds.
    """

    ready: jax.Array
    begun: float


@dataclass(frozen=True)
class _Running:
    """A step running on the devices: its rows' requests, its limits, and the results to come.

    It runs at most `rounds` rounds. `begun` is a clock reading in seconds, `waiting` the number of
    waiting requests at that time.
    """

    rows: tuple[Request | None, ...]
    seen: Packed
    begun: float
    waiting: int
    limits: Limits
    rounds: int


class Engine:
    """A decoder for requests that arrive at any time; each gets the output that it would get alone.

        engine = Engine(model, drafter="ngram", batch_size=8)
        engine.add("Name three rivers.")
        for delta in engine:
            print(delta.text, end="")

    With greedy decoding and with `verify="coupled"`, a request's tokens depend only on its prompt,
    its parameters and its key, which derives from the request's seed or else from its number in
    order of arrival. With `rejection` and `block` the same holds for fixed draft lengths. If there
    are several processes, each must make the same calls in the same order.
    """

    @takes_options(DecodeOptions)
    def __init__(
        self,
        target: Model,
        *,
        drafter: LoadedDrafter | Drafter | str | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> None:
        """Create an engine with `batch_size` slots; nothing compiles before the first step.

        On a `mesh`, by default that of the target, rows and weights are sharded as in `generate`.
        `options` are the fields of DecodeOptions. Raises InputError for bad input.
        """
        MODEL_KIND.check("target", target)
        target = target if mesh is None else place_model(target, mesh)
        options, _ = read_arguments(options)
        if isinstance(drafter, str):
            drafter = make_drafter(
                drafter, target, num_speculative_tokens=options.fixed_draft_length
            )
        self._open(plan_engine(target, drafter, options))

    @classmethod
    def of(cls, session: Session) -> Engine:
        """Return an engine for a planned session, without adding the session's prompts."""
        engine = cls.__new__(cls)
        engine._open(session)
        return engine

    def _open(self, session: Session) -> None:
        self._rows = DeviceRows(session)
        self._begin_control(session)
        self.step_limits: list[tuple[Limits, int]] = []
        """The draft limits and the maximum number of rounds of each step."""
        self._scheduler = Scheduler(session.batch_size)
        self.statistics = Statistics(session.batch_size)
        self._pages = None if session.plan.page_size is None else RequestPages(session)
        self._reading: _Prompts | None = None
        self._under_way: deque[_Reading | _Running] = deque()
        self._ended_slots: set[int] = set()
        self._ready: deque[Delta] = deque()
        cached = max(part.max_cached_requests for part in session.plan.drafter.parts)
        self._outputs: deque[tuple[Sequence[int], Sequence[int]]] = deque(maxlen=cached)
        """The prompts and outputs of the latest finished requests, for drafters that copy them."""
        self._has_new_outputs = False
        self._number = 0
        self._clock_s = self._start_s = time.perf_counter()
        self._closed = self._torn = False

    def _begin_control(self, session: Session) -> None:
        """Let the session's controller begin, without what an earlier one has learned."""
        self._controller_state = session.controller.init(session.step_sizes)
        self._costs_are_known = False

    @property
    def session(self) -> Session:
        """The session of the engine: its model, drafter, options and program."""
        return self._rows.session

    @property
    def num_unfinished(self) -> int:
        """The number of samples whose last delta has not been returned yet."""
        return len(self._scheduler) + sum(delta.output is not None for delta in self._ready)

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait for a slot."""
        return self._scheduler.num_waiting

    def compile(self, *, fewer_rows: bool = False) -> Programs:
        """Return the programs, compiling them if necessary.

        With `fewer_rows`, also compile the programs for fewer rows, which otherwise a later step
        may have to compile. Raises InputError.
        """
        with self._compiling():
            if fewer_rows:
                self._rows.compile_fewer()
            programs = self._rows.compile()
            if not self._costs_are_known:
                self._tell_costs()
            return programs

    def _tell_costs(self) -> None:
        """Let a controller that learns from costs know those of the compiled programs."""
        self._costs_are_known = True
        controller = self.session.controller
        if isinstance(controller, LearnsCosts):
            records = self._rows.timed_steps()
            self._controller_state = controller.know_costs(self._controller_state, records)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Record the seconds spent compiling in this context as `statistics.compile_s` only.

        They are excluded from the times of steps and requests.
        """
        before = self._rows.compile_s
        yield
        seconds = self._rows.compile_s - before
        if not seconds:
            return
        self.statistics.compile_s += seconds
        self._clock_s += seconds
        for request in self._scheduler:
            request.leave_out(seconds)

    @takes_options(SamplingParams)
    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | Mapping[str, Any] = SamplingParams(),  # noqa: B008 - frozen
        *,
        id: RequestId | None = None,
        n: int = 1,
        **options: Any,
    ) -> RequestId:
        """Add a request; return its id, by default its number in order of arrival.

        `sampling` may be a dict of the fields of SamplingParams; `options` are such fields too, as
        `temperature=0.8, max_new_tokens=100`, and replace those of `sampling`. Each of `n` samples
        is a separate row; the first equals the result of the request alone. Consecutive rows with
        the same prompt read it once; if caches have pages, they share full pages with
        `enable_prefix_caching`, and nothing without it. If prompt and output reach the engine's
        `max_length`, the output ends with the reason "length". Raises InputError for an id in use,
        a prompt that cannot be encoded or does not fit, more than eight stop tokens including the
        model's, and sampling parameters that the target does not support.
        """
        self._check_open()
        name = self._free_number() if id is None else id
        if not isinstance(name, int | str) or isinstance(name, bool):
            raise InputError(f"id={shown(name)}: use a whole number or a text")
        if self._scheduler.has(name):
            raise InputError(f"id={shown(name)}: a request with this id is unfinished; use another")
        n = Whole(1).check("n", n)
        (sampling,) = one_per_prompt(read_sampling(sampling, options), 1)
        ids = self.encode(prompt, sampling, f"prompt of request {shown(name)}")
        with self._compiling():
            self._rows.serve(sampling)
        rows = [Row(self._number, ids, sampling, sample) for sample in range(n)]
        self.add_rows(name, rows)
        return name

    def encode(
        self, prompt: Prompt, sampling: SamplingParams, where: str = "prompt"
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt as `add` would encode it; errors call it `where`.

        This changes nothing and may be called from any thread. Raises InputError as `add` does.
        """
        session = self.session
        check_request(session.model, sampling)
        ids = encode_prompt(session.model, prompt, where)
        check_length(session.model, where, len(ids), session.max_length)
        stops = len(session.stop_ids(sampling))
        if stops > session.num_stop_ids:
            raise InputError(
                f"sampling.stop_token_ids: {where} has {stops} tokens that end its output, the "
                f"model's own included; use at most {session.num_stop_ids}"
            )
        return tuple(ids)

    def _free_number(self) -> int:
        """Return the number of the next request, or the next larger one that is not in use."""
        numbers = itertools.count(self._number)
        return next(number for number in numbers if not self._scheduler.has(number))

    def add_rows(self, id: RequestId, rows: list[Row]) -> None:
        """Add rows, already encoded and checked, as the samples of one request.

        Raises InputError if the engine is closed.
        """
        self._check_open()
        now = time.perf_counter()
        if not self._scheduler:
            self._clock_s = now
        self._number += 1
        for row in rows:
            params = row.sampling
            follower = Follower(self.session.model.tokenizer, params.stop, logprobs=params.logprobs)
            self._scheduler.add(Request(id, row, follower, now))

    def step(self) -> list[Delta]:
        """Decode a few rounds; return the new output of each request.

        If slots are free, prompts of waiting requests are read first. The list is empty if all
        requests have finished. Raises InputError if programs do not fit into memory, or if an
        earlier step failed and its tokens are lost.
        """
        self._check_open()
        self._advance()
        deltas = list(self._ready)
        self._ready.clear()
        return deltas

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas of all steps, until every request has finished."""
        self._check_open()
        while self._scheduler or self._ready:
            if not self._ready:
                self._check_open()
                self._advance()
            while self._ready:
                yield self._ready.popleft()

    def abort(self, id: RequestId) -> None:
        """End a request; its last deltas, with the reason "abort", come with the next step.

        Raises InputError for an id that is unknown or finished.
        """
        self._check_open()
        if not isinstance(id, int | str) or isinstance(id, bool) or not self._scheduler.has(id):
            raise InputError(
                f"id={shown(id)}: no unfinished request has this id; abort one that was added and "
                "has not finished"
            )
        self._abort(self._scheduler.samples(id))

    def update_params(
        self, params: Any, drafter_params: Any = None, *, running: str = "continue"
    ) -> None:
        """Decode with new parameters of the same target from now on.

        Results already in progress with the old ones appear in the next step's deltas. The
        drafter's parameters (`LoadedDrafter.params`) stay if none are given, except those that a
        trained head shares with its target. If `running` is "continue", rows that are decoding or
        whose prompts are being read keep the cache computed with the old parameters; if it is
        "abort", they end; this includes rows that were put back for lack of pages, which otherwise
        read their tokens again with the new parameters. Learned draft lengths are discarded. Raises
        InputError unless trees, shapes and dtypes are unchanged.
        """
        self._check_open()
        running = _RUNNING_ROWS.check("running", running)
        while self._under_way:
            self._look()
        if self._pages is not None:
            # First, so that no interruption leaves prefixes of other weights.
            with self._as_a_whole():
                self._pages.forget()
        self._rows.update_params(params, drafter_params)
        self._begin_control(self.session)
        if running == "abort":
            self._abort([request for request in self._scheduler if request.begun is not None])

    def control(self, controller: Controller | None) -> None:
        """Let another controller choose draft lengths from now on; None stands for fixed lengths.

        Lengths are numbers that a program takes, so nothing is compiled, except on an accelerator
        if a single drafter had a fixed length until now, or will have one. What the earlier
        controller learned is discarded. Raises InputError if `controller` is not a length
        controller.
        """
        self._check_open()
        self._rows.replace_session(self.session.controlled_by(controller))
        self._begin_control(self.session)

    def close(self) -> None:
        """Free the engine's memory on the devices.

        Unfinished requests, and deltas that no step has returned, are dropped. If interrupted, it
        can be called again.
        """
        self._closed = True
        self._scheduler = Scheduler(self.session.batch_size)
        self._ready.clear()
        self._rest()

    def __enter__(self) -> Engine:
        """Return the engine, which is closed when the context exits."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("the engine is closed: make another one")
        if self._torn:
            raise InputError(
                "the engine failed or was interrupted within a step, some of whose tokens are "
                "lost: make another one"
            )

    @contextlib.contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        """Mark the engine as failed if the code in this context is interrupted or raises.

        Such code would leave requests with only some tokens of a step, so no other step may follow.
        """
        try:
            yield
        except BaseException:
            self._torn = True
            raise

    def _abort(self, requests: list[Request]) -> None:
        with self._as_a_whole():
            for request in requests:
                self._end(request, [], [], request.follower.end(ABORTED))
        if self._reading and all(request.ended for _, request in self._reading.taken):
            self._reading = None

    def _steps_under_way(self) -> int:
        """Return the number of steps running on the devices."""
        return sum(isinstance(work, _Running) for work in self._under_way)

    def _host_may_end_rows(self) -> bool:
        """Return whether a request in some slot has stop strings, which only the host finds."""
        return any(
            request is not None and request.row.sampling.stop for request in self._scheduler.slots
        )

    def _most_under_way(self) -> int:
        """Return how many steps may run at once: one if the host may end rows between steps."""
        return 1 if self._host_may_end_rows() else 2

    def _advance(self) -> None:
        """Start the work that can start now, then wait for the oldest step in progress."""
        while self._steps_under_way() < self._most_under_way() and self._dispatch():
            pass
        if self._under_way:
            self._look()
        if not self._scheduler:
            self._rest()

    def _dispatch(self) -> bool:
        """Start reading prompts and a step of rounds; return False if nothing can decode."""
        if not self._scheduler:
            return False
        self.compile()
        self._read_prompts()
        slots = self._admitted()
        if not any(slots):
            return False
        num_rows, options = self.session.num_rows, self.session.options
        rounds = options.rounds_per_step
        waiting, enough = self.num_waiting, num_rows + 1
        if self._reading or (waiting and self._free_slots()):
            rounds = min(rounds, _ROUNDS_WHILE_READING)
        if self._host_may_end_rows():
            rounds = min(rounds, _ROUNDS_PER_STOP)
        if self._pages is not None:
            rounds = self._reserve(slots, rounds)
            if not rounds:
                return not self._steps_under_way() and self._dispatch()
        if waiting:
            free = num_rows - sum(request is not None for request in slots)
            enough = min(free + options.rows_per_refill, num_rows)
        if not (waiting or self._reading):
            kept = [slot for slot, request in enumerate(slots) if request is not None]
            with self._compiling():
                self._rows.narrow(kept, self._seconds_left(slots))
        if self._has_new_outputs:
            self._rows.cache_outputs(self._outputs)
            self._has_new_outputs = False
        unfinished = sum(request is not None for request in slots)
        limits, rounds = self._choose(unfinished, rounds)
        self.step_limits.append((limits, rounds))
        begun = time.perf_counter()
        with self._as_a_whole():
            table = None if self._pages is None else self._pages.table(slots)
            seen = self._rows.step(limits, self._ended_slots, rounds, enough, table)
            self._ended_slots.clear()
            rows = self._rows.by_row(slots)
            self._under_way.append(_Running(rows, seen, begun, waiting, limits, rounds))
        return True

    def _reserve(self, slots: Sequence[Request | None], rounds: int) -> int:
        """Reserve pages for a step of up to `rounds` rounds; return how many rounds it may have.

        It is 0 if there are too few pages for a round: steps under way may not need all that they
        have, or else the latest request has been put back.
        """
        running = [request for request in slots if request is not None]
        while rounds:
            reserved = {one: rounds + self._begun_rounds(one) for one in running}
            with self._as_a_whole():
                short = self._pages.reserve(reserved)
            if short is None:
                return rounds
            rounds //= 2
        if not self._steps_under_way():
            self._put_back(short)
        return 0

    def _begun_rounds(self, request: Request) -> int:
        """Return the most rounds of a request in the steps under way."""
        return sum(
            work.rounds
            for work in self._under_way
            if isinstance(work, _Running) and request in work.rows
        )

    def _put_back(self, pool: PagePool) -> None:
        """Let the latest request with pages of a pool wait again, until there are pages for it.

        Its row will read prompt and output, and continue with its next round.
        """
        slots = self._scheduler.slots
        last = max(
            (one for slot, one in enumerate(slots) if one and self._pages.pool(slot) is pool),
            key=lambda request: (request.row.number, request.row.sample),
        )
        with self._as_a_whole():
            self._ended_slots.add(self._scheduler.put_back(last))
            if self._reading:
                self._reading.taken = [pair for pair in self._reading.taken if pair[1] is not last]
                self._reading = self._reading if self._reading.taken else None
            self._pages.close(last)
            follower = last.follower
            last.row = replace(
                last.row, emitted=tuple(follower.token_ids), rounds=follower.num_rounds
            )
            self.statistics.put_back += 1

    def _choose(self, unfinished: int, most_rounds: int) -> tuple[Limits, int]:
        """Return the limits and the number of rounds that the controller chooses for the next step.

        All processes use the choice of process 0. Raises InputError if the controller returns
        anything else than valid limits, a number of rounds and a state.
        """
        controller, num_drafters = self.session.controller, len(self.session.plan.drafter.parts)
        chosen = controller.choose(self._controller_state, unfinished, most_rounds)
        if not _is_choice(chosen, num_drafters, most_rounds):
            raise InputError(
                f"controller={shown(controller, 80)}: choose returned {shown(chosen, 120)}; return "
                f"(Limits, rounds, state) with the limits of {num_drafters} drafter(s) and 1 to "
                f"{most_rounds} rounds"
            )
        *chosen, self._controller_state = chosen
        (longest, confidence), rounds = processes.from_first(chosen)
        return Limits(tuple(longest), tuple(confidence)), rounds

    def _seconds_left(self, slots: Sequence[Request | None]) -> float:
        """Estimate the seconds until all requests in the slots end, from recent steps."""
        if not self.statistics.steps:
            return 0.0
        last = self.statistics.steps[-1]
        tokens = max(self._tokens_left(request) for request in slots if request)
        pace = max(last.tokens / max(last.row_rounds, 1), 1.0)
        recent = itertools.islice(reversed(self.statistics.steps), _RECENT_STEPS)
        round_s = sorted(step.seconds / step.rounds for step in recent)
        return tokens / pace * round_s[(len(round_s) - 1) // 2]  # the median: a clock may jump

    def _tokens_left(self, request: Request) -> int:
        """Return the maximum number of tokens that a request may still emit."""
        room = self.session.max_length - len(request.row.prompt)
        return min(request.row.sampling.max_new_tokens, room) - len(request.follower.token_ids)

    def _admitted(self) -> tuple[Request | None, ...]:
        """Return the requests in the slots, without those whose prompts are being read."""
        reading = [request for _, request in self._reading.taken] if self._reading else []
        return tuple(
            None if any(request is unread for unread in reading) else request
            for request in self._scheduler.slots
        )

    def _read_prompts(self) -> None:
        """Read prompts of waiting requests, as far as free slots and token budget allow."""
        budget = self.session.options.prefill_budget
        while True:
            if self._reading is None:
                with self._as_a_whole():
                    self._reading = self._next_prompts()
                if self._reading is None:
                    return
            reading = self._reading
            if not reading.begun:
                self._begin(reading)
            left = reading.longest - reading.position
            count = self._part(left, budget) if any(self._admitted()) else left
            if left and not count:
                return
            if count:
                begun, end = time.perf_counter(), reading.position + count
                with self._as_a_whole():
                    self.statistics.prompt_tokens += reading.count(end)
                    ready = self._rows.read(reading.position, end, self._table_of(reading))
                    self._under_way.append(_Reading(ready, begun))
                    reading.position = end
                budget -= round_up(count, self.session.plan.chunks[-1])
            if reading.position == reading.longest:
                self._admit()

    def _next_prompts(self) -> _Prompts | None:
        """Return the prompts to read next, whose requests get slots; None if there are none.

        Each device along `data` reads one, or none of a pool that has other beginnings of it.
        """
        if self._pages is None:
            taken = self._scheduler.take(self._scheduler.free_slots[: self.session.prefill_rows])
            return _Prompts(taken) if taken else None
        reading, pools = _Prompts([]), set()
        while slots := self._free_slots(pools):
            request = self._scheduler.next_waiting
            if pools and self._pages.known_tokens(request, slots[0]) != reading.position:
                break
            pools.add(self._pages.pool(slots[0]))
            reading.taken += self._scheduler.take(slots)
            reading.position = self._pages.begin(request, slots[0])
            self.statistics.shared_tokens += reading.position
        return reading if pools else None

    def _free_slots(self, without: Collection[PagePool] = ()) -> list[int]:
        """Return the free slots that the next request can get; if caches have pages, one at most.

        This is one where there are pages for it, of another pool than those in `without`.
        """
        request, free = self._scheduler.next_waiting, self._scheduler.free_slots
        if self._pages is None or request is None:
            return free if request else []
        rounds = self.session.options.rounds_per_step
        others = {one: rounds + self._begun_rounds(one) for one in self._scheduler.slots if one}
        free = [slot for slot in free if self._pages.pool(slot) not in without]
        slot = self._pages.find_slot(request, free, others)
        return [] if slot is None else [slot]

    def _table_of(self, reading: _Prompts) -> np.ndarray | None:
        """Return the pages of the requests that are being read, by slot; None without pages."""
        if self._pages is None:
            return None
        requests = dict(reading.taken)
        return self._pages.table([requests.get(slot) for slot in range(self.session.num_rows)])

    def _part(self, left: int, budget: int) -> int:
        """Return how many of the `left` tokens of a prompt to read next within `budget`.

        Reading stops after a whole chunk of the largest size or at the end of the prompt, so that a
        prompt's chunks do not depend on what else is read.
        """
        chunks = self.session.plan.chunks
        if round_up(left, chunks[-1]) <= budget:
            return left
        if budget == self.session.options.prefill_budget:
            budget = max(budget, chunks[0])
        budget = max(budget, 0)
        return min(left, budget - budget % chunks[0])

    def _begin(self, reading: _Prompts) -> None:
        """Start the new rows of `reading`, whose prompts may have been read for earlier rows."""
        self._rows.begin()
        slots, requests = zip(*reading.taken, strict=True)
        now = time.perf_counter()
        for request in requests:
            if request.begun is None:  # otherwise it was put back
                request.begun = now
        rows = [request.row for request in requests]
        if self._rows.reuse_rows(rows):
            reading.position = reading.longest
        else:
            with self._as_a_whole():
                self._rows.new_rows(rows, slots, reading.position)
        reading.begun = True

    def _admit(self) -> None:
        """Move the rows whose prompts have been read into their slots."""
        taken, begun = self._reading.taken, time.perf_counter()
        read = all(len(request.row.tokens) <= self._reading.position + 1 for _, request in taken)
        slots = [slot for slot, _ in taken]
        with self._as_a_whole():
            ready = self._rows.admit(slots, all_read=read)
            self._under_way.append(_Reading(ready, begun))
            # Requests aborted meanwhile have given up their slots, but their rows occupy them.
            for slot, request in taken:
                self._ended_slots.discard(slot)
                if request.ended:
                    self._ended_slots.add(slot)
                elif self._pages is not None:
                    # A draft model's cache is one token behind.
                    self._pages.take_back(request, request.num_tokens - 2, 0)
            self._reading = None

    def _look(self) -> None:
        """Wait for the oldest step in progress, or for prompts, and collect the new output.

        Work is removed from the queue only once it is done, since waiting may be interrupted.
        """
        while not isinstance(oldest := self._under_way[0], _Running):
            jax.block_until_ready(oldest.ready)
            self._under_way.popleft()
            self.statistics.prefill_s += self._lap(oldest.begun)
            if not self._under_way:
                return
        seen = oldest.seen.read()
        with self._as_a_whole():
            self._under_way.popleft()
            seconds = self._lap(oldest.begun)
            self._take(oldest, seen, seconds)
        record = step_record(self.session, oldest.limits, seen, seconds)
        self._controller_state = self.session.controller.update(self._controller_state, record)

    def _take(self, step: _Running, seen: Seen, seconds: float) -> None:
        """Queue the deltas of a finished step for each of its requests, and count its tokens."""
        first, emitted = self.statistics.rounds, seen.rounds.emitted >= 0
        ran = np.flatnonzero(emitted.any(axis=0))
        rounds = int(ran[-1]) + 1 if len(ran) else 0
        tokens = row_rounds = 0
        for row, request in enumerate(step.rows):
            if request is not None and not request.ended:
                tokens += self._follow(request, row, seen, first)
                row_rounds += int(emitted[row].sum())
        end_s = self._clock_s - self._start_s
        self.statistics.add_step(Step(end_s, seconds, rounds, row_rounds, tokens, step.waiting))

    def _follow(self, request: Request, row: int, seen: Seen, first_round: int) -> int:
        """Queue the delta of the request in `row` of a step; return its number of new tokens."""
        counts = jax.tree.map(lambda array: array[row], seen.rounds)
        new, status = int(np.maximum(counts.emitted, 0).sum()), int(seen.status[row])
        if not new and status == RUNNING:
            return 0
        logprobs = None if seen.logprobs is None else seen.logprobs[row, :new]
        try:
            fresh, drafter, text = request.follower.follow(
                status, seen.tokens[row, :new].tolist(), logprobs, counts, first_round
            )
        except InputError as refused:  # tokens without text end this request only
            request.follower.end_without_text(str(refused))
            fresh, drafter, text = [], [], ""
        if self._pages is not None:
            rounds = self._begun_rounds(request)
            self._pages.take_back(request, int(seen.cached[row]), rounds)
        gap = request.see_tokens(len(fresh), self._clock_s)
        if gap is not None:
            self.statistics.between_tokens_s.extend([gap] * len(fresh))
        if not request.ended:
            self._ready.append(_delta(request, fresh, drafter, text))
            return len(fresh)
        if status == RUNNING:
            self._ended_slots.add(self._scheduler.slots.index(request))
        self._end(request, fresh, drafter, text)
        return len(fresh)

    def _end(self, request: Request, fresh: list[int], drafter: list[int], text: str) -> None:
        """Make a request's last delta ready; its slot is free, and its id may be used again."""
        slot = self._scheduler.free(request)
        if self._pages is not None:
            self._pages.close(request)
        if request.follower.finish_reason == ABORTED and slot is not None:
            self._ended_slots.add(slot)
        times = request.times(time.perf_counter())
        self.statistics.add_request(times, aborted=request.follower.finish_reason == ABORTED)
        output = request.follower.output(request.id, request.row.sample, times)
        output = replace(output, lossy=self.session.is_lossy(request.row.sampling))
        self.statistics.lossy |= output.lossy
        if output.failure is not None:
            failed = {f"request {shown(request.id)}": output.failure}
            output = replace(output, error=failure_message(self.session.model, failed))
        last = _delta(request, fresh, drafter, text)
        self._ready.append(replace(last, finish_reason=output.finish_reason, output=output))
        if self._outputs.maxlen and output.failure is None and output.finish_reason != ABORTED:
            self._outputs.append((request.row.prompt, output.token_ids))
            self._has_new_outputs = True

    def _lap(self, begun: float) -> float:
        """Return the seconds spent on work that began at the clock reading `begun`.

        The time before earlier work finished is not counted again.
        """
        now = time.perf_counter()
        seconds = now - max(self._clock_s, begun)
        self._clock_s = now
        return seconds

    def _rest(self) -> None:
        """Wait for work in progress and free the memory on the devices, when no request is left.

        The caches are kept for later requests with the same prefixes, if these are shared.
        """
        while self._under_way:
            oldest = self._under_way[0]
            jax.block_until_ready(oldest.seen if isinstance(oldest, _Running) else oldest.ready)
            self._under_way.popleft()
        self._reading = None
        if self.session.options.enable_prefix_caching and not self._closed:
            return
        self._ended_slots.clear()
        self._rows.free()


def _delta(request: Request, fresh: list[int], drafter: list[int], text: str) -> Delta:
    """What a step added to a request."""
    logprobs = request.follower.newest_logprobs(len(fresh))
    return Delta(request.id, request.row.sample, fresh, drafter, text, logprobs=logprobs)


def _is_choice(chosen: Any, num_drafters: int, most_rounds: int) -> bool:
    """Return whether a controller's choice has valid limits, a number of rounds, and a state."""
    if not isinstance(chosen, tuple) or len(chosen) != 3 or not isinstance(chosen[0], Limits):
        return False
    (longest, confidence), rounds, _ = chosen
    wholes = (*longest, rounds)
    return (
        len(longest) == len(confidence) == num_drafters
        and all(isinstance(number, int | np.integer) and number >= 0 for number in wholes)
        and all(isinstance(number, float | int | np.number) for number in confidence)
        and 1 <= rounds <= most_rounds
    )
