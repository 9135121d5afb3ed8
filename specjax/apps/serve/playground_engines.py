"""The playground's engines: one per drafter and rule chosen on the page, and few at a time.

They decode one row each, over the weights that the server has loaded, beside the engine that serves
/v1. Draft lengths are numbers that their programs take, so that length 0 is plain decoding.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio.to_thread

from specjax.apps.serve.engine_thread import EngineThread, warm_up
from specjax.apps.serve.requests import RequestError, refused
from specjax.controllers import Auto, Controller, Limits, StepRecord, StepSizes
from specjax.controllers.auto import AutoState
from specjax.controllers.fixed import up_to
from specjax.drafters import LoadedDrafter, check_options, make_drafter
from specjax.engine.engine import Engine
from specjax.engine.options import AUTO, FIXED, RULE_NAME
from specjax.engine.plan import DecodePlan, plan_engine
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.fields import Choice, Either, Whole
from specjax.methods.find_head import shipped_heads
from specjax.methods.ngram import NGRAM
from specjax.methods.registry import METHODS, TRAINED
from specjax.sampling import RULES

MOST_ENGINES = 3
"""The most engines of the playground; the one not used for longest makes room for another."""
_MOST_ASKING = 16
"""Requests of the playground that may run or wait at once."""


class ChosenLength(Controller):
    """A length controller that uses the length chosen last on the page, a number or "auto".

    What `Auto` has learned is kept while a number is chosen.
    """

    def __init__(self) -> None:
        self.length: int | str = AUTO
        self._auto = Auto()

    def init(self, sizes: StepSizes) -> AutoState:
        """Return the state of `Auto`."""
        return self._auto.init(sizes)

    def choose(
        self, state: AutoState, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, AutoState]:
        """Return the next step's limits, its most rounds, and the new state.

        The limits are those of the chosen length, or those that `Auto` chooses. `unfinished` is the
        number of rows that decode.
        """
        if isinstance(self.length, int):
            return up_to(state.estimates.sizes, self.length), most_rounds, state
        return self._auto.choose(state, unfinished, most_rounds)

    def update(self, state: AutoState, record: StepRecord) -> AutoState:
        """Return the state after a step, from which `Auto` learns if it chose the step's limits."""
        return state if isinstance(self.length, int) else self._auto.update(state, record)


@dataclass(frozen=True)
class Setting:
    """What a page has chosen: a drafter and a rule by name, and a draft length or "auto"."""

    drafter: str
    rule: str
    length: int | str


@dataclass(eq=False)
class PlaygroundEngine:
    """An engine for one drafter and one rule, in its own thread.

    `lengths` sets its draft lengths, `compile_s` is how long its programs took to compile, in
    seconds, and `lock` is held while it answers. `num_asking` counts the callers that use it or
    wait for it.
    """

    thread: EngineThread
    lengths: ChosenLength
    compile_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_asking: int = 0

    @property
    def plan(self) -> DecodePlan:
        """The plan of the engine."""
        return self.thread.engine.plan

    @property
    def longest(self) -> int:
        """The longest draft, in tokens of a chain or nodes of a tree."""
        return self.plan.loop.drafter.num_nodes


class PlaygroundEngines:
    """At most `MOST_ENGINES` engines beside the one of `plan`, by drafter and rule.

    Only drafters of the server's own plan, those without weights, and heads that come with
    specjax are made: nothing that a request says is a path or the name of a model. `defaults` is
    the sampling that their programs are compiled for.
    """

    def __init__(self, plan: DecodePlan, defaults: SamplingParams) -> None:
        self._plan, self._defaults = plan, defaults
        self._kept: OrderedDict[tuple[str, str], PlaygroundEngine] = OrderedDict()
        self._making = asyncio.Lock()
        self._num_asking = 0
        self._own = _own_drafters(plan)

    @property
    def longest(self) -> int:
        """The longest draft of the drafter that the server was started with."""
        return self._plan.loop.drafter.num_nodes

    @property
    def default(self) -> Setting:
        """The drafter, the rule and the length that the server was started with."""
        options = self._plan.options
        length = options.fixed_draft_length
        if options.num_speculative_tokens == FIXED:
            length = self.longest
        return Setting(
            self._plan.loop.drafter.name, options.verify.name, AUTO if length is None else length
        )

    def offers(self) -> dict[str, dict[str, Any]]:
        """Return, for each drafter by name, whether the page may choose it, and with which rules.

        Each value has `reason`, why it cannot be chosen or None, and `rules`, the same by rule.
        Nothing large is loaded, but this takes a moment.
        """
        heads = shipped_heads().get(self._plan.model.name, [])
        joined = [_with_lookup(kind) for kind in heads if not METHODS[kind].alone]
        names = dict.fromkeys((*self._own, *METHODS, *joined))
        return {name: self._offer(name, heads) for name in names}

    def read(self, values: dict[str, Any]) -> Setting:
        """Return the setting in the fields of a request, and remove it from `values`.

        Raises RequestError for an invalid setting.
        """
        default = self.default
        names = (*dict.fromkeys((*self._own, *METHODS, *map(_with_lookup, TRAINED))),)
        given = {name: values.pop(name, getattr(default, name)) for name in vars(default)}
        kinds = {
            "drafter": Choice(names),
            "rule": RULE_NAME,
            "length": Either((Choice((AUTO,)), Whole(0)), remedy="use auto or a whole number"),
        }
        for name, kind in kinds.items():
            with refused(name):
                given[name] = kind.check(name, given[name])
        return Setting(**given)

    @asynccontextmanager
    async def using(self, setting: Setting) -> AsyncIterator[PlaygroundEngine]:
        """Yield the engine for a setting, which is the caller's alone while in the context.

        It is made if there is none. Raises RequestError for a setting that the model does not
        allow, and if too many callers wait.
        """
        if self._num_asking >= _MOST_ASKING:
            raise _busy(f"{self._num_asking} requests of the playground run or wait")
        self._num_asking += 1
        try:
            engine = await self._engine(setting)
            try:
                async with engine.lock:
                    if engine.thread.failure is not None:
                        raise RequestError(500, "the engine has failed: ask again")
                    if setting.length != AUTO and setting.length > engine.longest:
                        message = f"length={setting.length}: {setting.drafter} drafts at most "
                        raise RequestError(400, f"{message}{engine.longest} tokens", "length")
                    engine.lengths.length = setting.length
                    yield engine
            finally:
                engine.num_asking -= 1
        finally:
            self._num_asking -= 1

    async def stop(self) -> None:
        """Stop all engines and abort their requests."""
        for engine in list(self._kept.values()):
            await anyio.to_thread.run_sync(engine.thread.stop)
        self._kept.clear()

    def abort_all(self) -> None:
        """Abort the requests of all engines."""
        for engine in self._kept.values():
            engine.thread.abort_all()

    async def _engine(self, setting: Setting) -> PlaygroundEngine:
        key = (setting.drafter, setting.rule)
        async with self._making:
            if key not in self._kept:
                if len(self._kept) >= MOST_ENGINES:
                    await self._remove_one()
                made = await anyio.to_thread.run_sync(self._make, setting)
                made.thread.start(on_failure=lambda: self._kept.pop(key, None))
                self._kept[key] = made
            self._kept.move_to_end(key)
            self._kept[key].num_asking += 1
            return self._kept[key]

    async def _remove_one(self) -> None:
        """Remove the engine unused for the longest time; raise RequestError if all are in use."""
        unused = [key for key, engine in self._kept.items() if not engine.num_asking]
        if not unused:
            raise _busy(f"all {MOST_ENGINES} engines of the playground are in use")
        await anyio.to_thread.run_sync(self._kept.pop(unused[0]).thread.stop)

    def _make(self, setting: Setting) -> PlaygroundEngine:
        """Return a compiled engine. Raises RequestError for what the model does not allow."""
        begun, lengths = time.perf_counter(), ChosenLength()
        with refused("drafter"):
            heads = shipped_heads().get(self._plan.model.name, [])
            if reason := self._not_offered(setting.drafter, heads):
                raise InputError(f"drafter={setting.drafter}: {reason}")
            drafter = self._drafter(setting.drafter)
            engine = Engine.of(self._planned(drafter, setting.rule, lengths))
            warm_up(engine, self._defaults)
        thread = EngineThread(engine, max_waiting=0)
        return PlaygroundEngine(thread, lengths, time.perf_counter() - begun)

    def _planned(self, drafter: LoadedDrafter, rule: str, lengths: ChosenLength) -> DecodePlan:
        own = self._plan.options
        verify = own.verify if own.verify.name == rule else RULES[rule]
        # One row needs no pool, least of all one of the size that the server's rows share.
        options = replace(
            own.controlled_by(lengths),
            batch_size=1,
            verify=verify,
            kv_page_size=None,
            num_kv_pages=None,
            enable_prefix_caching=False,
        )
        return plan_engine(self._plan.model, drafter, options)

    def _drafter(self, name: str) -> LoadedDrafter:
        if name in self._own:
            return self._own[name]
        length = self._plan.options.fixed_draft_length
        return make_drafter(name, self._plan.model, num_speculative_tokens=length)

    def _offer(self, name: str, heads: list[str]) -> dict[str, Any]:
        rules: dict[str, str | None] = dict.fromkeys(RULES)
        reason = self._not_offered(name, heads)
        # A head drafts a chain, which all rules take; to load it takes long.
        if reason is None and (name in self._own or not _trained_parts(name)):
            for rule in RULES:
                try:
                    self._planned(self._drafter(name), rule, ChosenLength())
                except InputError as error:
                    rules[rule] = str(error)
        return {"reason": reason, "rules": rules}

    def _not_offered(self, name: str, heads: list[str]) -> str | None:
        """Return why a drafter cannot be made, or None."""
        if name in self._own:
            return None
        if name in METHODS and (reason := METHODS[name].not_offered):
            return reason
        if missing := [part for part in _trained_parts(name) if part not in heads]:
            return (
                f"no {missing[0]} head comes with specjax for {self._plan.model.name}; start "
                "the server with one"
            )
        try:
            check_options(name, None, {})
        except InputError as error:
            return str(error)
        return None


def _own_drafters(plan: DecodePlan) -> dict[str, LoadedDrafter]:
    """Return the drafters that a plan has, together and each alone, by name."""
    turns, params = plan.drafter
    alone = {
        part.name: LoadedDrafter(part, own) for part, own in zip(turns.parts, params, strict=True)
    }
    return {turns.name: plan.drafter, **alone}


def _with_lookup(name: str) -> str:
    """Return the name of a drafter that takes turns with prompt lookup."""
    return f"{NGRAM.name}+{name}"


def _trained_parts(name: str) -> list[str]:
    return [part for part in name.split("+") if part in TRAINED]


def _busy(message: str) -> RequestError:
    return RequestError(429, f"{message}: try again later", code="rate_limit_exceeded")
