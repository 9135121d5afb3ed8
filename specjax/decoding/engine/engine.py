"""`Engine`: any number of requests through a fixed number of slots, decoded together.

The compiled loop returns when a row has finished and requests wait; the next ones' prompts are read
apart, a bounded number of tokens at a time, and put into the free slots while the other rows keep
what they have. Where the host has nothing to decide, the next step is under way before the last
one is looked at.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import sampling
from specjax.decoding.engine.outputs import (
    ABORTED,
    Delta,
    Follower,
    RequestId,
    Times,
    broken_logits,
)
from specjax.decoding.engine.scheduler import Request, Scheduler
from specjax.decoding.engine.statistics import Statistics, Step
from specjax.decoding.learned_costs import LearnedCosts
from specjax.decoding.options import BATCH_SIZE, DecodeOptions
from specjax.decoding.plan import (
    Setup,
    check_length,
    check_request,
    flags_of,
    longest_row,
    plan_setup,
)
from specjax.decoding.programs import Programs, compile_setup
from specjax.decoding.prompts import Prompt, encode_prompt
from specjax.decoding.rows import Row, row_arguments
from specjax.decoding.sampling_params import SamplingParams, one_per_prompt
from specjax.decoding.state import RUNNING, Seen, State
from specjax.draft_length.policy import Policy
from specjax.drafters import Drafter, LoadedDrafter, make_drafter
from specjax.errors import InputError, shown
from specjax.fields import Choice, Whole
from specjax.loading.load import place_model
from specjax.loading.model import MODEL_KIND, Model

_LONGEST = 2048
"""Tokens of a row where the caller does not say, and the target has so many positions."""
_SLOTS = 8
_ROUNDS_WHILE_READING = 4
"""Rounds between two parts of a prompt that is too long to be read at once."""
_RUNNING_ROWS = Choice(("continue", "abort"))


@dataclass(frozen=True)
class Schedule:
    """How an engine shares its time.

    A step ends after `rounds_per_step` rounds, or when `refill_rows` rows have finished and
    requests wait. Between two steps at most `max_prefill_tokens` tokens of prompts are read while
    rows decode, rounded up to whole chunks.
    """

    rounds_per_step: int = 16
    refill_rows: int = 1
    max_prefill_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("rounds_per_step", "refill_rows", "max_prefill_tokens"):
            Whole(1).check(name, getattr(self, name))


@dataclass
class _Prompts:
    """Prompts that are being read, in the state of rows that are admitted then."""

    taken: list[tuple[int, Request]]
    state: State
    longest: int
    begun: float
    position: int = 0


@dataclass(frozen=True)
class _Admitted:
    """Rows that were put into their slots, once `ready` is there."""

    ready: jax.Array
    begun: float


@dataclass(frozen=True)
class _Running:
    """A step that is under way: the requests in the slots, and what the host will see of it."""

    slots: tuple[Request | None, ...]
    seen: Seen
    begun: float
    waiting: int


class Engine:
    """Decodes requests that come at any time; each gets what it would get alone.

        engine = Engine(model, drafter="ngram", batch_size=8)
        engine.add("Name three rivers.")
        for delta in engine:
            print(delta.text, end="")

    With greedy decoding and with `verify="coupled"` a request's tokens depend on nothing but its
    prompt, its parameters and its key, which is that of its own seed, else of its number in order
    of arrival; with `rejection` and `block` the same holds for fixed draft lengths. Of several
    processes, each makes the same calls in the same order.
    """

    def __init__(
        self,
        target: Model,
        *,
        drafter: LoadedDrafter | Drafter | str | None = None,
        num_speculative_tokens: int | str | None = None,
        verify: str | sampling.Rule = "rejection",
        batch_size: int = _SLOTS,
        max_length: int | None = None,
        rounds_per_step: int = Schedule.rounds_per_step,
        refill_rows: int = Schedule.refill_rows,
        max_prefill_tokens: int = Schedule.max_prefill_tokens,
        seed: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        """An engine with `batch_size` slots; nothing is compiled before the first step.

        `max_length` bounds a request's prompt and output (2048 tokens by default, or the target's
        positions); the other options are those of `generate` and of `Schedule`. Raises InputError.
        """
        MODEL_KIND.check("target", target)
        target = target if mesh is None else place_model(target, mesh)
        options = DecodeOptions(
            num_speculative_tokens=num_speculative_tokens,
            verify=verify,
            batch_size=BATCH_SIZE.check("batch_size", batch_size),
            max_length=max_length,
        )
        if isinstance(drafter, str):
            drafter = make_drafter(
                drafter, target, num_speculative_tokens=options.fixed_draft_length
            )
        longest = longest_row(target, max_length)
        if max_length is None:
            longest = min(longest, _LONGEST)
        setup = plan_setup(
            target,
            drafter=drafter,
            options=options,
            seed=seed,
            batch_size=batch_size,
            capacity=longest,
            max_length=longest,
            flags=sampling.WarpFlags(*[False] * 5),
        )
        self._open(setup, Schedule(rounds_per_step, refill_rows, max_prefill_tokens))

    @classmethod
    def of(
        cls,
        setup: Setup,
        schedule: Schedule = Schedule(),
        replayed_rounds: int = 0,
    ) -> Engine:
        """An engine of a setup; `replayed_rounds` as for `rows.row_arguments`."""
        engine = cls.__new__(cls)
        engine._open(setup, schedule, replayed_rounds)
        return engine

    def _open(self, setup: Setup, schedule: Schedule, replayed_rounds: int = 0) -> None:
        self._setup, self._schedule, self._replayed_rounds = setup, schedule, replayed_rounds
        self._programs: Programs | None = None
        self._scheduler = Scheduler(setup.batch_size)
        self._state: State | None = None
        self._policy: Policy | None = None
        self.costs: LearnedCosts | None = None
        """What "auto" knows of costs, once it decodes."""
        self.statistics = Statistics(setup.batch_size)
        self._reading: _Prompts | None = None
        self._under_way: deque[_Admitted | _Running] = deque()
        self._ended_slots: set[int] = set()
        self._ready: list[Delta] = []
        self._samples: dict[RequestId, int] = {}
        """Unfinished samples of each request."""
        self._number, self._rounds = 0, 0
        self._clock_s = self._start_s = time.perf_counter()
        self._closed = False

    @property
    def setup(self) -> Setup:
        """What it decodes with."""
        return self._setup

    @property
    def num_unfinished(self) -> int:
        """Rows that wait or decode."""
        return len(self._scheduler)

    @property
    def num_waiting(self) -> int:
        """Rows that wait for a slot."""
        return len(self._scheduler.waiting)

    @property
    def compile_s(self) -> float:
        """Seconds that compiling took."""
        return self.compile().seconds

    def compile(self) -> Programs:
        """The compiled programs; made now if they are not yet."""
        if self._programs is None:
            self._programs = compile_setup(self._setup, self._replayed_rounds)
        return self._programs

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] = SamplingParams(),  # noqa: B008 - frozen
        *,
        id: RequestId | None = None,
        n: int = 1,
    ) -> RequestId:
        """Add a request; returns its id, by default its number in order of arrival.

        Of `n` samples each is a row of its own; the first is what the request gives alone. Raises
        InputError for an id that is in use, for a prompt that cannot be encoded or has no room, and
        for parameters that the target cannot serve.
        """
        self._check_open()
        number = self._number
        name = number if id is None else id
        if not isinstance(name, int | str) or isinstance(name, bool):
            raise InputError(f"id={shown(name)}: use a whole number or a text")
        if name in self._samples:
            raise InputError(f"id={shown(name)}: a request with this id is unfinished; use another")
        n = Whole(1).check("n", n)
        where = f"request {shown(name)}"
        setup = self._setup
        (params,) = one_per_prompt(params, 1)
        check_request(setup.model, params)
        ids = encode_prompt(setup.model, prompt, where)
        check_length(setup.model, where, len(ids), setup.max_length, setup.max_length)
        stops = len(setup.stop_ids(params))
        if stops > setup.num_stop_ids:
            raise InputError(
                f"sampling.stop_token_ids: {where} has {stops} tokens that end it, the model's own "
                f"included; use at most {setup.num_stop_ids}"
            )
        self._serve(params)
        self.add_rows(name, [Row(number, tuple(ids), params, sample) for sample in range(n)])
        return name

    def add_rows(self, id: RequestId, rows: list[Row]) -> None:
        """Add rows that were checked before as the samples of one request."""
        self._check_open()
        now = time.perf_counter()
        if not self._scheduler:
            self._clock_s = now
        self._number += 1
        self._samples[id] = len(rows)
        for row in rows:
            params = row.sampling
            follower = Follower(self._setup.model.tokenizer, params.stop, logprobs=params.logprobs)
            self._scheduler.waiting.append(Request(id, row, follower, now))

    def step(self) -> list[Delta]:
        """Decode for a few rounds; what that added, request by request.

        Prompts of waiting requests are read first where slots are free. Without unfinished requests
        there is nothing to do and nothing to return.
        """
        self._check_open()
        while len(self._steps_under_way()) < self._ahead() and self._dispatch():
            pass
        deltas, self._ready = self._ready, []
        if self._steps_under_way():
            deltas += self._look()
        if not self._scheduler:
            self._rest()
            if self.costs is not None:
                self.costs.save()
        return deltas

    def __iter__(self) -> Iterator[Delta]:
        """The deltas of all steps, until no request is left."""
        while self._scheduler or self._ready:
            yield from self.step()

    def abort(self, id: RequestId) -> None:
        """End a request: its deltas, with the reason "abort", come with the next step.

        Raises InputError for an id that is unknown or finished.
        """
        self._check_open()
        if id not in self._samples:
            raise InputError(
                f"id={shown(id)}: no unfinished request has this id; abort one that was added and "
                "has not finished"
            )
        for request in [one for one in self._scheduler if one.id == id]:
            text = request.follower.end(ABORTED)
            self._ready.append(self._last_delta(request, [], [], text))

    def update_params(
        self, params: Any, drafter_params: Any = None, *, running: str = "continue"
    ) -> None:
        """Decode with other parameters of the same target from the next step on.

        Those of the drafter stay where none are given. Rows that are `running` continue, with what
        was read of them by the old parameters, or "abort". What was learned of costs and acceptance
        is dropped. Raises InputError unless trees, shapes and dtypes are as they were.
        """
        self._check_open()
        running = _RUNNING_ROWS.check("running", running)
        setup = self._setup
        _check_same("params", setup.model.params, params)
        drafter = setup.drafter
        if drafter_params is not None:
            _check_same("drafter_params", drafter.params, drafter_params)
            drafter = drafter._replace(params=drafter_params)
        if running == "abort":
            for id in dict.fromkeys(one.id for one in self._scheduler.slots if one is not None):
                self.abort(id)
        self._setup = replace(setup, model=replace(setup.model, params=params), drafter=drafter)
        self.costs = self._policy = None
        if self._state is not None and self._state.policy is not None:
            fresh = self.compile().empty(self._setup.params, *self._no_rows()).policy
            self._state = self._state.replace(policy=fresh)

    def close(self) -> None:
        """End: unfinished requests are dropped, and memory on the devices is given back."""
        if self._closed:
            return
        self._rest()
        self._scheduler = Scheduler(self._setup.batch_size)
        self._samples, self._reading, self._ready = {}, None, []
        self._closed = True

    def __enter__(self) -> Engine:
        """The engine, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("the engine is closed: make another one")

    def _serve(self, params: SamplingParams) -> None:
        """Make the programs able to do what a request asks for; they are compiled anew if not."""
        plan = self._setup.plan
        able = replace(
            plan,
            flags=plan.flags.union(flags_of([params])),
            logprobs=plan.logprobs or params.logprobs,
        )
        if able != plan:
            self._setup, self._programs = replace(self._setup, plan=able), None

    def _no_rows(self) -> tuple:
        return row_arguments(self._setup, [], self._setup.num_rows, self._replayed_rounds)

    def _steps_under_way(self) -> list[_Running]:
        return [one for one in self._under_way if isinstance(one, _Running)]

    def _ahead(self) -> int:
        """How many steps may be under way: one where the host decides something between them."""
        decides = self._setup.plan.draft_length.auto or any(
            request is not None and request.row.sampling.stop for request in self._scheduler.slots
        )
        return 1 if decides else 2

    def _dispatch(self) -> bool:
        """Begin to read prompts, and a step of rounds; False where there is nothing to do."""
        self._read_prompts()
        reading = {id(request) for _, request in self._reading.taken} if self._reading else set()
        slots = tuple(
            None if request is None or id(request) in reading else request
            for request in self._scheduler.slots
        )
        if not any(slots):
            return False
        programs, setup = self.compile(), self._setup
        ended = np.zeros(setup.num_rows, bool)
        ended[list(self._ended_slots)] = True
        self._ended_slots.clear()
        rounds = self._schedule.rounds_per_step
        if self._reading:
            rounds = min(rounds, _ROUNDS_WHILE_READING)
        if self.costs is not None:
            rounds = self.costs.rounds(rounds)
        waiting, enough = len(self._scheduler.waiting), setup.num_rows
        if waiting:
            free = setup.num_rows - sum(request is not None for request in slots)
            enough = min(free + self._schedule.refill_rows, enough)
        begun = time.perf_counter()
        self._state, seen = programs.step(
            setup.params, self._state, ended, np.int32(rounds), np.int32(enough)
        )
        for part in jax.tree.leaves(seen):
            part.copy_to_host_async()
        self._under_way.append(_Running(slots, seen, begun, waiting))
        return True

    def _read_prompts(self) -> None:
        """Read prompts of waiting requests, as far as slots and the tokens of one step allow."""
        setup, budget = self._setup, self._schedule.max_prefill_tokens
        while True:
            if self._reading is None:
                taken = self._scheduler.take(setup.prefill_rows)
                if not taken:
                    return
                self._begin(taken)
            reading = self._reading
            decoding = self._scheduler.num_free + len(reading.taken) < setup.batch_size
            if decoding and budget <= 0:
                return
            left = reading.longest - reading.position
            count = min(left, budget) if decoding else left
            if count > 0:
                end = min(reading.position + _round_up(count, setup.plan.chunk), reading.longest)
                reading.state = self._programs.read(
                    setup.params, reading.state, np.int32(reading.position), np.int32(end)
                )
                budget -= end - reading.position
                reading.position = end
            if reading.position == reading.longest:
                self._admit()

    def _begin(self, taken: list[tuple[int, Request]]) -> None:
        setup, programs, now = self._setup, self.compile(), time.perf_counter()
        if self._state is None:
            self._state = programs.empty(setup.params, *self._no_rows())
            if self._policy is not None:
                self._state = self._state.replace(policy=self._policy)
            if setup.plan.draft_length.auto:
                if self.costs is None:
                    first = itertools.islice(self._scheduler, setup.batch_size)
                    committed = max(len(request.row.prompt) for request in first)
                    self.costs = LearnedCosts.of_setup(setup, committed)
                self._state = self.costs.begin(self._state)
        for _, request in taken:
            request.begun = now
        rows = [request.row for _, request in taken]
        arguments = row_arguments(setup, rows, setup.prefill_rows, self._replayed_rounds)
        self._reading = _Prompts(
            taken,
            programs.new(setup.params, *arguments),
            max(len(row.prompt) for row in rows) - 1,
            now,
        )

    def _admit(self) -> None:
        """Put the rows whose prompts were read into their slots."""
        reading, setup = self._reading, self._setup
        slots = np.full(setup.prefill_rows, setup.num_rows, np.int32)
        slots[: len(reading.taken)] = [slot for slot, _ in reading.taken]
        self._state = self._programs.admit(self._state, slots, reading.state)
        self._under_way.append(_Admitted(reading.state.length, reading.begun))
        # Those that were aborted meanwhile have no slot any more, but are in one.
        for slot, request in reading.taken:
            self._ended_slots.discard(slot)
            if request.ended:
                self._ended_slots.add(slot)
        self._reading = None

    def _look(self) -> list[Delta]:
        """Wait for the oldest step under way; what it added."""
        while not isinstance(one := self._under_way.popleft(), _Running):
            jax.block_until_ready(one.ready)
            self.statistics.prefill_s += self._lap(one.begun)
        # The program's outputs are there together.
        seen = jax.tree.map(np.asarray, one.seen)
        seconds = self._lap(one.begun)
        if self.costs is not None:
            self._state = self.costs.after_step(self._state, seconds)
        first, emitted = self._rounds, seen.rounds.emitted
        ran = np.flatnonzero((emitted >= 0).any(axis=0))
        rounds = int(ran[-1]) + 1 if len(ran) else 0
        self._rounds += rounds
        deltas = []
        for slot, request in enumerate(one.slots):
            if request is not None and not request.ended:
                deltas += self._follow(request, slot, seen, first)
        tokens = sum(len(delta.token_ids) for delta in deltas)
        self.statistics.add_step(
            Step(
                self._clock_s - self._start_s,
                seconds,
                rounds,
                int((emitted >= 0).sum()),
                tokens,
                one.waiting,
            )
        )
        return deltas

    def _follow(self, request: Request, slot: int, seen: Seen, first_round: int) -> list[Delta]:
        """What a step added to the request in a slot."""
        counts = jax.tree.map(lambda part: part[slot], seen.rounds)
        new, status = int(np.maximum(counts.emitted, 0).sum()), int(seen.status[slot])
        if not new and status == RUNNING:
            return []
        logprobs = None if seen.logprobs is None else seen.logprobs[slot, :new]
        fresh, drafted, text = request.follower.follow(
            status, seen.tokens[slot, :new].tolist(), logprobs, counts, first_round
        )
        self._time_tokens(request, len(fresh))
        if not request.ended:
            return [Delta(request.id, request.row.sample, fresh, drafted, text)]
        if status == RUNNING:
            self._ended_slots.add(slot)
        return [self._last_delta(request, fresh, drafted, text)]

    def _time_tokens(self, request: Request, count: int) -> None:
        if not count:
            return
        now = self._clock_s
        if request.first_token is None:
            request.first_token = now
            self.statistics.first_token_s.append(now - request.added)
        else:
            gap = (now - request.last_token) / count
            self.statistics.between_tokens_s.extend([gap] * count)
        request.last_token = now

    def _last_delta(
        self, request: Request, fresh: list[int], drafted: list[bool], text: str
    ) -> Delta:
        """A request's end: its slot is free, and its id may be used again."""
        slot = self._scheduler.free(request)
        if request.follower.finish_reason == ABORTED and slot is not None:
            self._ended_slots.add(slot)
        self._samples[request.id] -= 1
        if not self._samples[request.id]:
            del self._samples[request.id]
        now = time.perf_counter()
        begun = now if request.begun is None else request.begun
        first = now if request.first_token is None else request.first_token
        times = Times(begun - request.added, first - request.added, now - request.added)
        self.statistics.requests += 1
        self.statistics.waiting_s.append(times.waiting_s)
        self.statistics.total_s.append(times.total_s)
        follower, sample = request.follower, request.row.sample
        output = follower.output(request.id, sample, times)
        if output.finish_reason == "error":
            name = f"request {shown(request.id)}"
            message = broken_logits(self._setup.model, {name: len(output.token_ids)})
            output = replace(output, error=message)
        return Delta(request.id, sample, fresh, drafted, text, output.finish_reason, output)

    def _lap(self, begun: float) -> float:
        """Seconds since what was under way before had finished, or since this was begun."""
        now = time.perf_counter()
        seconds = now - max(self._clock_s, begun)
        self._clock_s = now
        return seconds

    def _rest(self) -> None:
        """Without requests: wait for what is under way, and keep nothing on the devices."""
        while self._under_way:
            one = self._under_way.popleft()
            jax.block_until_ready(one.seen if isinstance(one, _Running) else one.ready)
        if self._state is not None:
            if self.costs is not None:
                self.costs.end(self._state)
            self._policy = self._state.policy
        self._state = None
        self._ended_slots.clear()


def _check_same(name: str, old: Any, new: Any) -> None:
    """Raise InputError unless two trees of arrays have the same leaves."""

    def form(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype).name), tree)

    if form(old) != form(new):
        raise InputError(
            f"{name}: its tree, shapes or dtypes are not those of the parameters it replaces; give "
            "the same model's"
        )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
