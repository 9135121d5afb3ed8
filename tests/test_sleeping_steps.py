"""Under "auto", rounds in which all drafters sleep run plain decoding's program: the same rows."""

import functools
import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import (
    PROMPTS,
    copied,
    decode,
    draft_model,
    first_state,
    make_session,
    mixed,
    observed,
)
from heads import eagle_head, medusa_head, mtp_head
from specjax.decoding.engine.learned_costs import LearnedCosts
from specjax.decoding.engine.next_step import NextStep
from specjax.draft_length.cost_filter import CostFilter

from specjax.cache import KVCache
from specjax.decoding import loop
from specjax.decoding.generate import add_prompts, open_engine
from specjax.decoding.programs import start
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.state import RUNNING
from specjax.drafters import head_drafter, take_turns, turns
from specjax.drafters.lookup.ngram import Ngram
from specjax.drafters.lookup.token_recycling import TokenRecycling

NEW = 72
"""Enough that features would be lost if nobody observed."""


def made(name, tiny, similar):
    lookup = Ngram(prompt_lookup_min=1, num_speculative_tokens=2)
    two = functools.partial(head_drafter, num_speculative_tokens=2)
    return {
        "ngram": lambda: lookup,
        "similar": lambda: draft_model(similar, num_speculative_tokens=3),
        "eagle3": lambda: head_drafter(eagle_head(tiny), tiny, num_speculative_tokens=1),
        "mtp": lambda: head_drafter(mtp_head(tiny), tiny, num_speculative_tokens=1),
        "token_recycling": lambda: TokenRecycling(tiny.config.vocab_size),
        "turns": lambda: take_turns(lookup, two(eagle_head(tiny), tiny)),
        "turns_model": lambda: take_turns(lookup, draft_model(similar, num_speculative_tokens=3)),
        "turns_medusa": lambda: take_turns(lookup, two(medusa_head(tiny), tiny)),
        # What may never draft is no reason to draft, or to observe.
        "turns_0": lambda: take_turns(lookup, never(head_drafter(eagle_head(tiny), tiny))),
    }[name]()


def never(loaded):
    return loaded._replace(drafter=replace(loaded.drafter, num_speculative_tokens=0))


@dataclass(frozen=True, kw_only=True)
class Wrong(Ngram):
    """Finds what is seldom the next token."""

    def propose(self, params, state, context, noise):
        draft, state = super().propose(params, state, context, noise)
        return draft.replace(tokens=(draft.tokens + 1) % context.target.vocab_size), state


def figures(plan, wider):
    """Seconds of the parts of a round: a pass costs `wider` more for each compiled width."""
    passes = 1 + wider * np.arange(len(plan.widths))
    return np.array([*passes, *[0.01] * (3 * len(plan.drafter.parts))])


class Scripted(LearnedCosts):
    """Drafts pay for some steps, then for some they do not, and so on."""

    seen: list
    steps: int = 0

    def after_step(self, state, seconds, *intention):
        self.seen.append((self.next_step.plain, bool(state.policy.work.passes[1:].sum())))
        self.steps += 1
        dear = self.steps % 8 >= 3
        state = super().after_step(state, 1.0, *intention)
        self.estimate = CostFilter(figures(self.plan, 5.0 if dear else 0.0), len(self.plan.widths))
        state = state.replace(policy=state.policy.replace(costs=on_device(self.costs())))
        return state

    def save(self):
        pass


def on_device(costs):
    return jax.tree.map(lambda part: jnp.asarray(part, jnp.float32), costs)


UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""What a row keeps of its distribution has nothing to do with who sleeps."""

# One capacity, so that most of the tests have the same programs.
OPTIONS = dict(
    verify="coupled",
    batch_size=4,
    sampling=mixed(max_new_tokens=NEW, **UNFILTERED),
    max_length=40 + NEW,
)


@pytest.fixture(scope="module")
def wanted(tiny):
    """The tokens of plain decoding."""
    plain = make_session(tiny, PROMPTS, **OPTIONS)
    engine = open_engine(plain)
    add_prompts(engine, plain, range(len(PROMPTS)))
    return tokens_of(engine)


def tokens_of(engine):
    return {one.id: one.output.token_ids for one in engine if one.output is not None}


@pytest.mark.parametrize(
    ("name", "rule"),
    [("turns_medusa", "rejection"), *slow(("turns_model", "rejection"), ("turns_model", "block"))],
)
def test_rows_of_a_random_rule_can_be_replayed(name, rule, tiny, similar):
    """Plain steps advance each row's noise as rounds that draft nothing do."""
    drafter = made(name, tiny, similar)
    options = {**OPTIONS, "verify": rule}
    engine = auto_engine(scripted, drafter, tiny, **options)
    outputs = {one.id: one.output for one in engine if one.output is not None}
    assert {slept for slept, _ in engine.costs.seen} == {True, False}
    counts = [outputs[index].rounds for index in range(len(PROMPTS))]
    lengths = set(range(drafter.drafter.num_speculative_tokens + 1))
    assert lengths <= set(np.concatenate([one.drafted for one in counts]).tolist())
    assert {-1, 0, 1} == set(np.concatenate([one.drafter for one in counts]).tolist())
    most = max(len(one.drafted) for one in counts)

    def rows(name):
        return np.stack([padded(getattr(one, name), most) for one in counts])

    again = decode(
        tiny,
        PROMPTS,
        drafter=drafter,
        num_speculative_tokens="auto",
        replay=(rows("drafted"), rows("drafter")),
        **options,
    )
    assert again.token_ids == [outputs[index].token_ids for index in range(len(PROMPTS))]
    for name in ("drafted", "accepted", "emitted", "drafter"):
        for mine, one in zip(getattr(again, name), counts, strict=True):
            before = np.asarray(getattr(one, name))
            np.testing.assert_array_equal(mine[: len(before)], before)


def padded(values, most):
    values = np.asarray(values)
    return np.pad(values, (0, most - len(values)), constant_values=-1)


def auto_engine(costs, drafter, tiny, **options):
    """An engine with all prompts, and with figures that begin at what `costs` makes of a plan."""
    options = {**OPTIONS, **options}
    session = make_session(tiny, PROMPTS, drafter=drafter, num_speculative_tokens="auto", **options)
    engine = open_engine(session)
    engine.costs = costs(session.plan)
    add_prompts(engine, session, range(len(PROMPTS)))
    return engine


def scripted(plan):
    costs = Scripted(CostFilter(figures(plan, 0.0), len(plan.widths)), None)
    costs.seen, costs.plan = [], plan
    return costs


DRAFTERS = "ngram", "similar", "eagle3", "mtp", "token_recycling", "turns_0"


@pytest.mark.parametrize("name", ["turns", *slow(*DRAFTERS)])
def test_rows_are_those_of_plain_decoding(name, tiny, similar, wanted):
    engine = auto_engine(scripted, made(name, tiny, similar), tiny)
    assert tokens_of(engine) == wanted
    slept = [slept for slept, _ in engine.costs.seen]
    assert {True, False} <= set(slept)
    # Some drafter drafts again after it has slept.
    assert any(drafted for _, drafted in engine.costs.seen[slept.index(True) :])


class Recorded(NextStep):
    """Says when new rows came."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def rows_admitted(self):
        super().rows_admitted()
        self.events.append("admitted")


class Dear(LearnedCosts):
    """Wider passes always take so much longer than width 1; what is done with them is kept."""

    wider: float

    def __init__(self, plan, wider):
        super().__init__(CostFilter(figures(plan, wider), len(plan.widths)), None)
        self.plan, self.wider, self.events = plan, wider, []
        self.next_step = Recorded(self.events)

    def rounds(self, most):
        rounds = super().rounds(most)
        self.events.append(("plain" if self.next_step.plain else "drafting", rounds))
        return rounds

    def after_step(self, state, seconds, *intention):
        ran = state.policy.work.counts()
        return super().after_step(state, float(ran @ figures(self.plan, self.wider)), *intention)


def test_of_new_rows_it_is_soon_asked_whether_they_draft(tiny, similar):
    """Plain steps grow long while nothing is drafted, and begin anew at a single round."""
    dear = functools.partial(Dear, wider=5.0)
    sampling = mixed(max_new_tokens=60, **UNFILTERED)
    sampling[0] = replace(sampling[0], max_new_tokens=8)
    engine = auto_engine(dear, made("turns", tiny, similar), tiny, sampling=sampling)
    for _ in engine:
        pass
    events = engine.costs.events
    plain = [event for event in events if event[0] == "plain"]
    assert max(rounds for _, rounds in plain) == 16
    after = [two for one, two in itertools.pairwise(events) if one == "admitted" and two in plain]
    assert after
    assert all(rounds == 1 for _, rounds in after)


def test_a_lookup_is_tried_again_after_it_slept(tiny):
    """What it finds while it sleeps is drafted then, and shows whether its chances changed."""
    drafter = Wrong(prompt_lookup_min=1, num_speculative_tokens=2)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=200)
    dear = functools.partial(Dear, wider=0.3)
    engine = auto_engine(dear, drafter, tiny, sampling=sampling, batch_size=8, max_length=None)
    drafted = [
        output.rounds.drafted.tolist()
        for output in (one.output for one in engine)
        if output is not None
    ]
    some = np.any([np.asarray(rounds)[:180] > 0 for rounds in drafted], axis=0)
    # Due after 31 rounds, and asked after plain steps of up to 16.
    tries = [some[begin : begin + 50].sum() for begin in range(60, 130)]
    assert 1 <= min(tries) <= max(tries) <= 2


def test_parameters_may_be_replaced_while_drafters_sleep(tiny, similar, wanted):
    engine = auto_engine(functools.partial(Dear, wider=5.0), made("turns", tiny, similar), tiny)
    got = {}
    replaced = False
    for delta in engine:
        if not replaced and engine.costs.next_step.plain:
            replaced = True
            engine.update_params(tiny.params)
        if delta.output is not None:
            got[delta.id] = delta.output.token_ids
    assert replaced
    assert got == wanted


BROKEN = 1000
"""Added to the numbers of rows in which nobody observes before features have no room."""


@pytest.fixture
def room_of_broken_rows(monkeypatch):
    """The number of a row says whether it is one, so that a program serves both."""
    room = turns._room

    def by_number(state, context):
        return jnp.where((context.index >= BROKEN).any(), 1000, room(state, context))

    monkeypatch.setattr(turns, "_room", by_number)


@functools.cache
def steps_of(plan):
    return tuple(
        jax.jit(functools.partial(one, plan))
        for one in (loop.step, loop.plain_step, loop.look_ahead)
    )


def states(session, dear_from, first_row):
    """The state after each step: steps that draft, and plain ones from a round on."""
    plan, params, batch = session.plan, session.params, session.batch_size
    nobody, many = np.zeros(batch, bool), np.int32(batch + 1)
    step, plain_step, look_ahead = steps_of(plan)
    state, number, intention = first_state(session), 0, None
    state = state.replace(rows=state.rows.replace(index=state.rows.index + first_row))
    while bool((state.status == RUNNING).any()):
        costs = on_device(learned(plan, 5.0 if number >= dear_from else 0.0).costs())
        state = state.replace(policy=state.policy.replace(costs=costs))
        sleeps = intention is not None and not intention.drafts and intention.room > 0
        rounds = 16 if sleeps else 1
        program = plain_step if sleeps else step
        state, seen = program(params, state, nobody, np.int32(rounds), many)
        emitted = seen.rounds.emitted if sleeps else jnp.full_like(seen.rounds.emitted, -1)
        policy, intention = look_ahead(params, state, emitted, many)
        state = state.replace(policy=policy)
        yield state, bool(sleeps)
        number += 1


def learned(plan, wider):
    return LearnedCosts(CostFilter(figures(plan, wider), len(plan.widths)), None)


def assert_fresh(session, state):
    """Each drafter's state, with what waits to be observed, is that of a fresh prompt."""
    plan, params = session.plan, session.params
    again = start(plan, params, state.tokens, state.rows, state.length, state.status)
    got, wanted = observed(session, copied(state)), observed(session, again)
    for cache, other in zip(caches(got), caches(wanted), strict=True):
        np.testing.assert_array_equal(cache.length, other.length)
        held = np.arange(cache.capacity)[None, :] < np.asarray(cache.length)[:, None]
        held = held[None, :, None, :, None]
        for part, same in ((cache.k, other.k), (cache.v, other.v)):
            part, same = np.where(held, part, 0), np.where(held, same, 0)
            np.testing.assert_allclose(part, same, atol=2e-5, rtol=1e-4)


def caches(state):
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache))
    return [one for one in leaves if isinstance(one, KVCache)]


def sleeping_session(name, tiny, similar):
    sampling = mixed(max_new_tokens=NEW, **UNFILTERED)[:4]
    options = dict(num_speculative_tokens="auto", sampling=sampling)
    return make_session(
        tiny, PROMPTS[:4], drafter=made(name, tiny, similar), batch_size=4, **options
    )


def assert_all_fresh(session, first_row=0):
    """States are fresh in the first steps that sleep, and in those after them; some sleep."""
    slept = []
    for state, sleeps in states(session, 4, first_row):
        slept.append(sleeps)
        if any(slept) and len(slept) < 12:
            assert_fresh(session, state)
    assert any(slept)


@pytest.mark.usefixtures("room_of_broken_rows")
@pytest.mark.parametrize("name", ["eagle3", *slow("similar", "mtp")])
def test_states_are_fresh_after_plain_steps(name, tiny, similar):
    assert_all_fresh(sleeping_session(name, tiny, similar))


@pytest.mark.usefixtures("room_of_broken_rows")
def test_features_that_are_lost_are_found(tiny, similar):
    """A broken variant: nobody observes before features have no room."""
    session = sleeping_session("eagle3", tiny, similar)
    with pytest.raises(AssertionError, match="Not equal"):
        assert_all_fresh(session, BROKEN)
