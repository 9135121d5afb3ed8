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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.controllers import Controller, Limits
from specjax.core.plan import Recording
from specjax.core.state import RUNNING, Packed, Seen
from specjax.drafters import Drafter, LoadedDrafter, make_drafter
from specjax.engine.device_rows import DeviceRows
from specjax.engine.grammars import table_of
from specjax.engine.length_control import LengthControl, step_record
from specjax.engine.options import DecodeOptions, read_arguments, read_sampling
from specjax.engine.outputs import ABORTED, Delta, RequestId
from specjax.engine.plan import DecodePlan, check_length, check_sampling, plan_engine, round_up
from specjax.engine.programs import Programs
from specjax.engine.recording import RecordedRows
from specjax.engine.requests import (
    Prompt,
    Request,
    SamplingParams,
    encode_prompt,
    one_per_prompt,
)
from specjax.engine.rows import Row
from specjax.engine.scheduler import Reading, Scheduler
from specjax.engine.statistics import Statistics, Step
from specjax.errors import InputError, shown
from specjax.fields import Choice, Items, Text, Whole, takes_options
from specjax.loading.load import place_model
from specjax.loading.model import MODEL_KIND, Model
from specjax.models.features import check_features

_RECENT_STEPS = 5
"""The number of latest steps from which the remaining time of rows is estimated."""
_RUNNING_ROWS = Choice(("continue", "abort"))
_FEATURES = Items(Text(), remedy="use names of features, such as ('final_norm',)")


@dataclass(frozen=True)
class _RunningStep:
    """A step running on the devices: its rows, its limits, and its results (`Seen`) once `ready`.

    It runs at most `rounds` rounds. `begun` is a clock reading in seconds, `waiting` the number of
    waiting requests at that time.
    """

    rows: tuple[Row | None, ...]
    ready: Packed
    begun: float
    waiting: int
    limits: Limits
    rounds: int


@dataclass(frozen=True)
class _RunningPrefill:
    """Prompts being read, or rows being admitted, on the devices; done once `ready` is available.

    `begun` is a clock reading in seconds.
    """

    ready: jax.Array
    begun: float


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
    def of(cls, plan: DecodePlan) -> Engine:
        """Return an engine for a plan."""
        engine = cls.__new__(cls)
        engine._open(plan)
        return engine

    def _open(self, plan: DecodePlan) -> None:
        self._rows = DeviceRows(plan)
        self._control = LengthControl(plan)
        self.step_limits: list[tuple[Limits, int]] = []
        """The draft limits and the maximum number of rounds of each step."""
        self.statistics = Statistics(plan.options.batch_size)
        self._scheduler = Scheduler(plan)
        self._under_way: deque[_RunningPrefill | _RunningStep] = deque()
        self._ready: deque[Delta] = deque()
        cached = max(part.max_cached_requests for part in plan.loop.drafter.parts)
        self._outputs: deque[tuple[Sequence[int], Sequence[int]]] = deque(maxlen=cached)
        """The prompts and outputs of the latest finished requests, for drafters that copy them."""
        self._has_new_outputs = False
        self._number = 0
        self._clock_s = self._start_s = time.perf_counter()
        self._closed = self._torn = False

    @property
    def plan(self) -> DecodePlan:
        """The plan of the engine: its model, drafter, options and program."""
        return self._rows.plan

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
            self._control.know_costs(self._rows.timed_steps)
            return programs

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
        for row in self._scheduler:
            row.leave_out(seconds)

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
        self.submit([Request(self._number, ids, sampling, sample) for sample in range(n)], name)
        return name

    def encode(
        self, prompt: Prompt, sampling: SamplingParams, where: str = "prompt"
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt as `add` would encode it; errors call it `where`.

        This changes nothing and may be called from any thread. Raises InputError as `add` does.
        """
        plan = self.plan
        check_sampling(plan.model, sampling)
        ids = encode_prompt(plan.model, prompt, where)
        check_length(plan.model, where, len(ids), plan.options.max_length, sampling)
        stops = len(plan.stop_ids(sampling))
        if stops > plan.num_stop_ids:
            raise InputError(
                f"sampling.stop_token_ids: {where} has {stops} tokens that end its output, the "
                f"model's own included; use at most {plan.num_stop_ids}"
            )
        return tuple(ids)

    def _free_number(self) -> int:
        """Return the number of the next request, or the next larger one that is not in use."""
        numbers = itertools.count(self._number)
        return next(number for number in numbers if not self._scheduler.has(number))

    def submit(self, requests: Sequence[Request], id: RequestId | None = None) -> None:
        """Add requests that are encoded and checked already, each with its number as its id.

        With an `id` they are the samples of one request. Raises InputError if the engine is closed.
        """
        self._check_open()
        now = time.perf_counter()
        if not self._scheduler:
            self._clock_s = now
        self._number += len(requests) if id is None else 1
        tokenizer = self.plan.model.tokenizer
        for request in requests:
            name = request.number if id is None else id
            grammar = table_of(self.plan.model, request.sampling)
            self._scheduler.add(Row(name, request, tokenizer, now, grammar))

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
        self, params: Any = None, drafter_params: Any = None, *, running: str = "continue"
    ) -> None:
        """Decode with new parameters of the same target, of its drafter, or of both from now on.

        Results already in progress with the old ones appear in the next step's deltas. The target's
        parameters stay if none are given, as do the drafter's (`LoadedDrafter.params`), except
        those that a trained head shares with its target. If `running` is "continue", rows that are
        decoding or whose prompts are being read keep the cache computed with the old parameters; if
        it is "abort", they end; this includes rows that were put back for lack of pages, which
        otherwise read their tokens again with the new parameters. With another target learned draft
        lengths and shared beginnings are discarded. Raises InputError unless trees, shapes and
        dtypes are unchanged.
        """
        self._check_open()
        running = _RUNNING_ROWS.check("running", running)
        if params is None and drafter_params is None:
            raise InputError("params=None, drafter_params=None: give new parameters of one of them")
        self.wait()
        if params is not None and self._scheduler.pages is not None:
            # First, so that no interruption leaves prefixes of other weights.
            with self._as_a_whole():
                self._scheduler.pages.forget()
        self._rows.update_params(params, drafter_params)
        if params is not None:
            self._control = LengthControl(self.plan)
        if running == "abort":
            self._abort([row for row in self._scheduler if row.begun is not None])

    def wait(self) -> None:
        """Wait for the work in progress, until the devices are idle; the next step has its deltas.

        Raises InputError as `step` does.
        """
        self._check_open()
        while self._under_way:
            self._look()

    def record(self, features: Sequence[str], *, rows: int = 64, tokens: int = 512) -> None:
        """Keep the tokens of finished requests, and the target's features at them, on the devices.

        From now on `recorded` has up to `rows` of the latest requests, with up to `tokens` tokens
        each, the last ones if there are more. `features` are names as `final_norm`; without any,
        nothing is recorded any more. Requests that failed or were aborted are left out, and so are
        tokens that were read for an earlier request with the same beginning. What was recorded
        before is discarded. Raises InputError for an unknown feature, for more than the devices'
        memory, and while requests are unfinished.
        """
        self._check_open()
        names = _FEATURES.check("features", features)
        rows, tokens = Whole(1).check("rows", rows), Whole(2).check("tokens", tokens)
        check_features(names, self.plan.model.config.num_layers, "features: ")
        if self._scheduler:
            raise InputError(
                f"record: {len(self._scheduler)} requests are unfinished; call it before `add`, or "
                "when all have finished"
            )
        tokens = min(tokens, self.plan.loop.capacity) if names else 0
        if self._scheduler.pages is not None:
            with self._as_a_whole():
                self._scheduler.pages.forget()
        with self._compiling():
            self._rows.record(Recording(tuple(dict.fromkeys(names)), tokens), rows)

    @property
    def recorded(self) -> RecordedRows | None:
        """The latest finished requests, as `record` asks for them; None unless it was called.

        The arrays are valid until the next step.
        """
        return self._rows.recorded

    @property
    def num_recorded(self) -> int:
        """The number of requests recorded since `record`.

        The latest is in row (`num_recorded` - 1) modulo the number of rows.
        """
        return self._rows.num_recorded

    def control(self, controller: Controller | None) -> None:
        """Let another controller choose draft lengths from now on; None stands for fixed lengths.

        Lengths are numbers that a program takes, so nothing is compiled, except on an accelerator
        if a single drafter had a fixed length until now, or will have one. What the earlier
        controller learned is discarded. Raises InputError if `controller` is not a length
        controller.
        """
        self._check_open()
        self._rows.replace_plan(self.plan.controlled_by(controller))
        self._control = LengthControl(self.plan)

    def close(self) -> None:
        """Free the engine's memory on the devices.

        Unfinished requests, and deltas that no step has returned, are dropped. If interrupted, it
        can be called again.
        """
        self._closed = True
        self._scheduler = Scheduler(self.plan)
        self._ready.clear()
        self._rest()
        self._rows.recorded = None

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

    def _abort(self, rows: Sequence[Row]) -> None:
        with self._as_a_whole():
            for row in rows:
                self._end(row, row.abort())
        self._scheduler.stop_reading_ended()

    @property
    def _steps_under_way(self) -> int:
        """The number of steps running on the devices."""
        return sum(isinstance(work, _RunningStep) for work in self._under_way)

    def _most_under_way(self) -> int:
        """Return how many steps may run at once: one if the host may end rows between steps."""
        return 1 if self._scheduler.host_may_end_rows else 2

    def _advance(self) -> None:
        """Start the work that can start now, then wait for the oldest step in progress."""
        while self._steps_under_way < self._most_under_way() and self._dispatch():
            pass
        if self._under_way:
            self._look()
        if not self._scheduler:
            self._rest()

    def _dispatch(self) -> bool:
        """Start reading prompts and a step of rounds; return False if nothing can decode."""
        scheduler = self._scheduler
        if not scheduler:
            return False
        self.compile()
        self._read_prompts()
        decoding = scheduler.decoding
        if not decoding:
            return False
        with self._as_a_whole():
            rounds, short = scheduler.reserve(scheduler.most_rounds())
            if not rounds and not self._steps_under_way:
                scheduler.put_back(short)
                self.statistics.put_back += 1
        if not rounds:
            # Steps under way may not need all the pages that they have.
            return not self._steps_under_way and self._dispatch()
        if not (self.num_waiting or scheduler.reading):
            with self._compiling():
                self._rows.narrow(list(decoding), self._seconds_left(decoding.values()))
        if self._has_new_outputs:
            self._rows.cache_outputs(self._outputs)
            self._has_new_outputs = False
        limits, rounds = self._control.choose(len(decoding), rounds)
        self.step_limits.append((limits, rounds))
        begun = time.perf_counter()
        with self._as_a_whole():
            ended, enough = scheduler.ended_slots, scheduler.enough_idle()
            ready = self._rows.step(limits, ended, rounds, enough, scheduler.table(decoding))
            ended.clear()
            for row in decoding.values():
                row.rounds_under_way += rounds
            rows = self._rows.by_row(decoding)
            self._under_way.append(
                _RunningStep(rows, ready, begun, self.num_waiting, limits, rounds)
            )
        return True

    def _seconds_left(self, rows: Iterable[Row]) -> float:
        """Estimate the seconds until all of some rows end, from recent steps."""
        if not self.statistics.steps:
            return 0.0
        last, longest = self.statistics.steps[-1], self.plan.options.max_length
        tokens = max(row.most_tokens(longest) - len(row.token_ids) for row in rows)
        pace = max(last.tokens / max(last.row_rounds, 1), 1.0)
        recent = itertools.islice(reversed(self.statistics.steps), _RECENT_STEPS)
        round_s = sorted(step.seconds / step.rounds for step in recent)
        return tokens / pace * round_s[(len(round_s) - 1) // 2]  # the median: a clock may jump

    def _read_prompts(self) -> None:
        """Read prompts of waiting requests, as far as free slots and token budget allow."""
        budget = self.plan.options.prefill_budget
        while True:
            if self._scheduler.reading is None:
                with self._as_a_whole():
                    reading = self._scheduler.read_next()
                    if reading is None:
                        return
                    self.statistics.shared_tokens += reading.num_shared
                    self.statistics.reread_tokens += reading.num_reread
            reading = self._scheduler.reading
            if not reading.begun:
                self._begin(reading)
            count = self._scheduler.next_part(budget)
            if not count and reading.position < reading.longest:
                return
            if count:
                begun, end = time.perf_counter(), reading.position + count
                with self._as_a_whole():
                    self.statistics.prompt_tokens += reading.count(end)
                    pages = self._scheduler.table(reading.rows)
                    ready = self._rows.read(reading.position, end, pages)
                    self._under_way.append(_RunningPrefill(ready, begun))
                    before, reading.position = reading.position, end
                    if self._scheduler.keeps_states(before):
                        self._scheduler.keep(self._rows.cached_states())
                budget -= round_up(count, self.plan.loop.chunks[-1])
            if reading.position == reading.longest:
                self._admit(reading)

    def _begin(self, reading: Reading) -> None:
        """Start the new rows of `reading`, whose prompts may have been read for earlier rows."""
        self._rows.begin()
        now = time.perf_counter()
        for row in reading.rows.values():
            row.num_shared = reading.position
            if row.begun is None:  # otherwise it was put back
                row.begun = now
        requests = [row.request for row in reading.rows.values()]
        if self._rows.reuse_rows(requests):
            reading.position = reading.longest
        else:
            with self._as_a_whole():
                slots = list(reading.rows)
                self._rows.new_rows(requests, slots, reading.position, reading.states)
        reading.begun = True

    def _admit(self, reading: Reading) -> None:
        """Move the rows whose prompts have been read into their slots."""
        begun, end = time.perf_counter(), reading.position + 1
        all_read = all(len(row.request.tokens) <= end for row in reading.rows.values())
        with self._as_a_whole():
            ready = self._rows.admit(list(reading.rows), all_read=all_read)
            self._under_way.append(_RunningPrefill(ready, begun))
            self._scheduler.admit()

    def _look(self) -> None:
        """Wait for the oldest step in progress, or for prompts, and collect the new output.

        Work is removed from the queue only once it is done, since waiting may be interrupted.
        """
        while not isinstance(oldest := self._under_way[0], _RunningStep):
            jax.block_until_ready(oldest.ready)
            self._under_way.popleft()
            self.statistics.prefill_s += self._lap(oldest.begun)
            if not self._under_way:
                return
        seen = oldest.ready.read()
        with self._as_a_whole():
            self._under_way.popleft()
            seconds = self._lap(oldest.begun)
            self._take(oldest, seen, seconds)
        self._control.learn(step_record(self.plan, oldest.limits, seen, seconds))

    def _take(self, step: _RunningStep, seen: Seen, seconds: float) -> None:
        """Queue the deltas of a finished step for each of its rows, and count its tokens."""
        first, emitted = self.statistics.rounds, seen.rounds.emitted >= 0
        ran = np.flatnonzero(emitted.any(axis=0))
        rounds = int(ran[-1]) + 1 if len(ran) else 0
        tokens = row_rounds = 0
        for index, row in enumerate(step.rows):
            if row is None:
                continue
            row.rounds_under_way -= step.rounds
            if not row.ended:
                tokens += self._follow(row, index, seen, first)
                row_rounds += int(emitted[index].sum())
        end_s = self._clock_s - self._start_s
        self.statistics.add_step(Step(end_s, seconds, rounds, row_rounds, tokens, step.waiting))

    def _follow(self, row: Row, index: int, seen: Seen, first_round: int) -> int:
        """Queue the delta of the row at `index` of a step; return its number of new tokens."""
        counts = jax.tree.map(lambda array: array[index], seen.rounds)
        new, status = int(np.maximum(counts.emitted, 0).sum()), int(seen.status[index])
        if not new and status == RUNNING:
            return 0
        logprobs = None if seen.logprobs is None else seen.logprobs[index, :new]
        tokens = seen.tokens[index, :new].tolist()
        delta = row.follow(status, tokens, logprobs, counts, first_round)
        if self._scheduler.pages is not None:
            self._scheduler.pages.take_back(row, int(seen.cached[index]))
        count = len(delta.token_ids)
        gap = row.see_tokens(count, self._clock_s)
        if gap is not None:
            self.statistics.between_tokens_s.extend([gap] * count)
        if not row.ended:
            self._ready.append(delta)
            return count
        if status == RUNNING:
            self._scheduler.ended_slots.add(self._scheduler.slots.index(row))
        self._end(row, delta)
        return count

    def _end(self, row: Row, delta: Delta) -> None:
        """Make a row's last delta ready; its slot is free, and its id may be used again."""
        slot, aborted = self._scheduler.free(row), row.finish_reason == ABORTED
        if aborted and slot is not None:
            self._scheduler.ended_slots.add(slot)
        output = row.output(self.plan, time.perf_counter())
        complete = output.failure is None and not aborted
        if complete and self.recorded is not None:
            self._rows.record_row(slot, row.num_shared, len(row.request.prompt), row.num_tokens)
        self.statistics.add_request(output.times, aborted=aborted)
        self.statistics.lossy |= output.lossy
        self._ready.append(replace(delta, finish_reason=output.finish_reason, output=output))
        if self._outputs.maxlen and complete:
            self._outputs.append((row.request.prompt, output.token_ids))
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
            jax.block_until_ready(self._under_way[0].ready)
            self._under_way.popleft()
        self._scheduler.reading = None
        if self.plan.options.enable_prefix_caching and not self._closed:
            return
        self._scheduler.ended_slots.clear()
        self._rows.free()
