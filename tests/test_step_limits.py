"""Steps under limits that change: drafters sleep and wake, runs are repeated, clocks mislead.

A drafter whose limit is 0 sleeps: what was committed meanwhile waits to be observed. Its state,
with what waits, is that of a fresh prompt, and no limits change a token of plain decoding.
"""

import functools
import itertools
import json
import math
import types
from dataclasses import dataclass, replace

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import program_counts
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    Scripted,
    decode,
    draft_model,
    greedy,
    make_call,
    mixed,
    observed,
)
from jax.extend.core import jaxprs_in_params
from tiny_models import eagle_head, medusa_head, mtp_head

from specjax.controllers import Auto, ByBatch, Fixed, Recorded
from specjax.core import initial_state, turn_taking
from specjax.core.cache import KVCache
from specjax.core.round import one_round
from specjax.core.state import admit, lend
from specjax.distributed import processes
from specjax.drafters import TreeOptions, head_drafter, merge_drafters, take_turns
from specjax.engine import engine as engines
from specjax.engine import plan as calls
from specjax.engine.generate import decode_requests, expected_acceptance, generate, open_engine
from specjax.engine.plan import widths as plan_widths
from specjax.engine.programs import row_arguments
from specjax.engine.requests import Request, SamplingParams
from specjax.loading.load import random_model
from specjax.methods.draft_model import drafter as draft_models
from specjax.methods.early_exit import EarlyExit
from specjax.methods.ngram import Ngram
from specjax.methods.suffix import Suffix
from specjax.methods.token_recycling import TokenRecycling
from specjax.models.form import Form

NEW = 48
"""Enough that features would be lost if nobody observed."""
TREE = {
    "static": TreeOptions(kind="static", choices=((0,), (1,), (0, 0), (1, 0))),
    "dynamic": TreeOptions(kind="dynamic", topk=2, depth=2, num_nodes=5),
}
REQUESTS = [
    replace(request, max_new_tokens=NEW if number in (0, 7) else NEW - 4 * number)
    for number, request in enumerate(mixed(top_k=0, top_p=1.0, min_p=0.0))
]
"""Rows that end one after another, so that others are admitted while drafters sleep."""
OPTIONS = dict(batch_size=4, sampling=REQUESTS, max_length=40 + NEW)


def made(name, tiny, similar):
    """A drafter by name; those that are joined, by +, draft in one program."""

    def part(name):
        kind, _, tree = name.partition("/")
        options = dict(tree=TREE[tree]) if tree else dict(num_speculative_tokens=2)
        two = functools.partial(mtp_head, num_modules=2)
        heads = {"medusa": medusa_head, "eagle3": eagle_head, "mtp": two}
        if kind in heads:
            return head_drafter(heads[kind](tiny, spread=0.3), tiny, **options)
        return {
            "ngram": lambda: Ngram(prompt_lookup_min=1, **options),
            "suffix": lambda: Suffix(**options),
            "draft_model": lambda: draft_model(similar, **options),
            "early_exit": lambda: EarlyExit(3, exit_layer=2, **options),
            "token_recycling": lambda: TokenRecycling(61, **options),
            "merged": lambda: merge_drafters(part("ngram"), part("eagle3")),
        }[kind]()

    return take_turns(*map(part, name.split("+")))


FEW = "suffix+eagle3/static"
"""A chain that is found and a static tree that is drawn, with caches and features."""
CHAINS = "ngram+draft_model+medusa+eagle3+mtp"
TREES = "ngram+token_recycling/static+medusa/static+eagle3/dynamic"
ALONE = "ngram draft_model early_exit medusa eagle3 mtp token_recycling/static merged+draft_model"
ALONE += " medusa/static eagle3/static eagle3/dynamic early_exit/static merged suffix"


def scripted(drafter):
    """All draft, none, each alone, one token each, and none for longer than features are kept."""
    most = tuple(part.num_nodes for part in drafter.drafter.parts)
    sure = tuple(0.2 * (number % 2) for number in range(len(most)))
    none, one, any_ = (0,) * len(most), (1,) * len(most), (0.0,) * len(most)
    alone = [
        tuple(count * (other == number) for other in range(len(most)))
        for number, count in enumerate(most)
    ]
    return Scripted(
        (
            (most, any_, 2),
            (none, any_, 3),
            *((each, sure, 1 + number % 5) for number, each in enumerate(alone)),
            (one, any_, 1),
            *[(none, any_, 5)] * 7,
            *((each, any_, 2) for each in reversed(alone)),
            (most, sure, 4),
        )
    )


@pytest.fixture(scope="module")
def call_of(tiny, similar):
    def of(name, rule="rejection", controller=None):
        drafter = drafters(name)
        options = dict(controller=controller or scripted(drafter), **OPTIONS)
        call = make_call(tiny, PROMPTS, drafter=drafter, verify=rule, **options)
        # Passes of several widths are in test_loop_output_comparison.
        widths = call.plan.loop.widths if conftest.full else call.plan.loop.widths[-1:]
        overlaps = name == FEW and rule == "rejection"
        return call.with_loop(widths=widths, overlaps=overlaps)

    drafters = functools.cache(lambda name: made(name, tiny, similar))
    return of


@pytest.fixture(scope="module")
def assert_plain(tiny):
    """Compares tokens with those of plain decoding: of greedy rows, or all under `coupled`."""

    @functools.cache
    def plain(rule):
        requests = [replace(request, temperature=0.0) for request in REQUESTS]
        options = OPTIONS if rule == "coupled" else {**OPTIONS, "sampling": requests}
        return decode(tiny, PROMPTS, verify=rule, **options).token_ids

    def compare(tokens, rule="rejection"):
        for got, wanted, request in zip(tokens, plain(rule), REQUESTS, strict=True):
            if rule == "coupled" or request.temperature == 0:
                assert got == wanted

    return compare


BROKEN = 1000
"""Added to the numbers of rows in which nobody observes before features have no room."""


@pytest.fixture(scope="module", autouse=True)
def one_program():
    """The number of a row says whether it is one, so that a program serves both."""
    would_lose = turn_taking._would_lose_features

    def by_number(state, context):
        return would_lose(state, context) & ~(context.index >= BROKEN).any()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_taking, "_would_lose_features", by_number)
        # Programs of fewer rows are for one test to compile.
        patch.setattr(engines.Engine, "_seconds_left", lambda *_: 0.0)
        yield


class Watched:
    """An engine of a call that compares each state after a step with fresh ones."""

    def __init__(self, call, first_row=0, change=None, admit=None, narrows=False):
        self.call, self.engine, self.change = call, open_engine(call.plan), change
        self.compiled = self.engine.compile()
        if admit is not None:
            self.engine._rows._programs = self.compiled._replace(admit=admit)
        # Rows are admitted right after the step in which others ended.
        self.engine._most_under_way = lambda: 1
        if narrows:
            self.engine._seconds_left = lambda slots: np.inf
        for request in call.requests:
            self.engine.submit(
                [replace(request, number=first_row + request.number)], request.number
            )
        self.steps = self.compared = self.most_unobserved = 0
        self.fewest_rows = call.plan.num_rows

    def tokens(self):
        """The output of all prompts."""
        ended, rows = {}, self.engine._rows
        while self.engine.num_unfinished:
            ended |= {one.id: one.output for one in self.engine.step() if one.output is not None}
            if rows._state is None:
                continue
            rows._state = self.change(rows._state) if self.change else rows._state
            self.steps += 1
            self.fewest_rows = min(self.fewest_rows, len(rows._state.length))
            if self.steps <= 16 or conftest.full:
                self.compare(rows._state)
        return [ended[prompt].token_ids for prompt in range(len(ended))]

    def compare(self, state):
        """Each drafter's state, with what waits to be observed, is that of a fresh prompt."""
        parts = self.call.plan.loop.drafter.parts
        for part, before in zip(parts, state.drafter, strict=True):
            if part.features:
                self.most_unobserved = max(self.most_unobserved, int(before.unobserved.max()))
        got = on_host(observed(self.call, state))
        for slot in np.flatnonzero(np.asarray(state.active)):
            fresh = self.fresh(np.asarray(state.tokens)[slot, : int(state.length[slot])])
            for part, mine, wanted in zip(parts, got, on_host(fresh.drafter), strict=True):
                if not part.pass_features:
                    assert_alike(mine, wanted.drafter, slot)
                    self.compared += 1

    def fresh(self, tokens):
        """The state of a row whose prompt is `tokens`."""
        request = Request(0, tuple(tokens.tolist()), SamplingParams(max_new_tokens=1))
        none = row_arguments(self.call.plan, [], self.call.plan.num_rows)
        arguments = row_arguments(self.call.plan, [request], self.call.plan.prefill_rows)
        params, slots = self.call.plan.params, jnp.zeros(1, jnp.int32)
        empty = self.compiled.empty(params, *none)
        state, new = self.compiled.new(params, empty, slots, slots, *arguments)
        end = np.int32(len(tokens) - 1)
        state, new, _ = self.compiled.read(params, state, new, slots, None, np.int32(0), end)
        return lend(state, new, slots)


def on_host(state):
    return jax.tree.map(np.asarray, state)


def assert_alike(got, wanted, slot):
    """A row of a state is that of a state of one row, but for the windows of the last round."""
    if isinstance(got, draft_models.DraftModelState):
        got, wanted = got.cache, wanted.cache
    for mine, other in zip(parts_of(got), parts_of(wanted), strict=True):
        if not isinstance(mine, KVCache):
            np.testing.assert_allclose(mine[slot], other[0], atol=3e-5, rtol=1e-4)
            continue
        held = int(other.length[0])
        assert int(mine.length[slot]) == held
        for one, same in ((mine.k, other.k), (mine.v, other.v)):
            np.testing.assert_allclose(
                one[:, slot, :, :held], same[:, 0, :, :held], atol=3e-5, rtol=1e-4
            )


def parts_of(state):
    return jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (FEW, "rejection"),
        *slow(
            *(
                (name, "coupled")
                for name in (FEW, "draft_model+eagle3", CHAINS, TREES, *ALONE.split())
            )
        ),
    ],
)
def test_drafters_that_sleep_and_wake(name, rule, call_of, assert_plain):
    """Their states are fresh after each step, and tokens those of plain decoding."""
    watched = Watched(call_of(name, rule))
    assert_plain(watched.tokens(), rule)
    slept = [not any(limits.longest) for limits, _ in watched.engine.step_limits]
    assert {True, False} <= set(slept)
    drafter = watched.call.plan.loop.drafter
    if any(part.observes for part in drafter.parts):
        assert watched.compared > 0
        kept = drafter.kept_features
        assert 0.5 * kept <= watched.most_unobserved <= kept


@pytest.mark.slow  # programs of two rows and of one
def test_states_stay_fresh_in_programs_of_fewer_rows(call_of, assert_plain):
    watched = Watched(call_of(FEW), narrows=True)
    assert_plain(watched.tokens())
    assert watched.fewest_rows == 1


def unobserved_plus(state, more):
    """A state in which more, or fewer, of each row's tokens wait to be observed."""
    parts = (
        part.replace(unobserved=jnp.maximum(part.unobserved + more, 0)) for part in state.drafter
    )
    return state.replace(drafter=tuple(parts))


@jax.jit
def admit_with_old_counts(state, slots, sources, new):
    admitted = admit(state, slots, new)
    pairs = zip(admitted.drafter, state.drafter, strict=True)
    parts = tuple(part.replace(unobserved=old.unobserved) for part, old in pairs)
    return admitted.replace(drafter=parts), slots


@pytest.mark.parametrize(
    "broken",
    [
        dict(first_row=BROKEN),
        dict(change=functools.partial(unobserved_plus, more=1)),
        dict(change=functools.partial(unobserved_plus, more=-1)),
        dict(admit=admit_with_old_counts),
    ],
    ids=["loses_features", "observes_twice", "misses_a_token", "keeps_counts_on_admission"],
)
def test_broken_states_are_found(broken, call_of):
    with pytest.raises(AssertionError):
        Watched(call_of(FEW), **broken).tokens()


COUNTS = ("width", "drafted", "accepted", "emitted", "drafter", "first_round")


def assert_same_run(one, other):
    assert one.token_ids == other.token_ids
    for name in COUNTS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


CONTROLLERS = {
    "scripted": None,
    "by_batch": ByBatch(((1, 1, 4), (2, 3, 3), (4, 4, 1))),
    "auto": Auto(),
}


WAITS = {
    "ngram": 0,
    "suffix": 1,
    "medusa": 0,
    "eagle3": 0,
    "eagle3/static": 0,
    "eagle3/dynamic": 0,
    "early_exit": 0,
    "merged": 0,
    "mtp": 0,
    "draft_model": 1,
}
"""Branches and loops of a greedy round of full drafts that depend on data: a lookup, and reading
what a cache lacks."""


@pytest.mark.parametrize(
    "name",
    ["eagle3", *slow("mtp", "ngram", "merged", "early_exit", "medusa/static", "draft_model")],
)
def test_full_drafts_are_those_of_fixed_lengths(name, call_of, assert_plain):
    call = call_of(name, controller=Fixed())
    first, full = decode_requests(*call), decode_requests(*with_full_drafts(call))
    assert_plain(first.token_ids)
    # Each pass has the full width.
    width = np.where(first.width < 0, -1, full.width)
    assert_same_run(full, replace(first, width=width))


@pytest.mark.parametrize("name", WAITS)
def test_full_drafts_wait_for_no_data(name):
    """With the attention kernel, which does not wait either."""
    config, form = tiny_config(head_dim=16), Form("stacked", "kernel")
    target, similar = (
        replace(random_model(config, seed, dtype="float32"), form=form) for seed in (0, 1)
    )
    call = make_call(target, [[1, 2, 3]], drafter=made(name, target, similar))
    full = waits(with_full_drafts(call))
    assert full == WAITS[name]
    widths = plan_widths(call.plan.loop.drafter.num_nodes, "cuda")
    assert waits(call.with_loop(widths=widths)) >= full + 2


def test_an_accelerator_has_full_drafts_at_fixed_lengths(call_of, monkeypatch):
    on_cpu = call_of("eagle3", controller=Fixed())
    assert not on_cpu.plan.loop.full_drafts
    monkeypatch.setattr(
        calls, "first_device", lambda placement: types.SimpleNamespace(platform="cuda")
    )
    fixed = on_cpu.controlled_by(None).plan.loop
    assert (fixed.full_drafts, fixed.widths) == (True, (3,))
    for controller in (Auto(), Fixed(1), ByBatch(((1, 2, 1),))):
        plan = on_cpu.controlled_by(None).controlled_by(controller).plan.loop
        assert (plan.full_drafts, plan.widths) == (False, (1, 3))
    # Drafters that take turns sleep in most rounds.
    assert not call_of("ngram+eagle3", controller=Fixed()).plan.loop.full_drafts


def with_full_drafts(call):
    return call.with_loop(full_drafts=True, widths=(1 + call.plan.loop.drafter.num_nodes,))


def waits(call):
    """The number of branches and loops of a round that depend on data, other than platforms."""
    arguments = call.plan.params, *row_arguments(call.plan, [], call.plan.num_rows)
    state = jax.eval_shape(functools.partial(initial_state.start, call.plan.loop), *arguments)
    round_ = functools.partial(one_round, call.plan.loop)
    found = equations(jax.make_jaxpr(round_)(call.plan.params, state).jaxpr)
    names = [
        equation.primitive.name
        for equation in found
        if equation.params.get("branches_platforms") is None
    ]
    return names.count("while") + names.count("cond")


def equations(jaxpr):
    """All equations of a jaxpr outside of kernels, those of inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("name", "rule", "controller"),
    [
        *((FEW, "rejection", controller) for controller in CONTROLLERS),
        *slow(*itertools.product((CHAINS, TREES), ("rejection",), CONTROLLERS)),
        *slow(*((CHAINS, "block", controller) for controller in CONTROLLERS)),
    ],
)
def test_recorded_limits_repeat_a_run(name, rule, controller, call_of, assert_plain):
    """Tokens, counts and draws, whatever chose the limits: no clock is asked."""
    call = call_of(name, rule, CONTROLLERS[controller])
    first = decode_requests(*call, engine=open_engine(call.plan, 4))
    assert_plain(first.token_ids)
    assert len({limits for limits, _ in first.step_limits}) > 1
    again = call.controlled_by(Recorded(first.step_limits))
    assert_same_run(decode_requests(*again), first)
    # The limits are what makes it the same.
    assert decode_requests(*call.controlled_by(Fixed())).token_ids != first.token_ids


@dataclass(frozen=True)
class Remembering:
    """A controller whose state is that of another one, and the records of its steps."""

    inner: object

    def init(self, sizes):
        return self.inner.init(sizes), ()

    def choose(self, state, unfinished, most_rounds):
        *chosen, after = self.inner.choose(state[0], unfinished, most_rounds)
        return *chosen, (after, state[1])

    def update(self, state, record):
        return self.inner.update(state[0], record), (*state[1], record)


@pytest.mark.parametrize("controller", ["scripted", "by_batch"])
def test_expected_acceptance_is_that_of_the_limits(controller, call_of):
    """By the first candidate of each node that was reached: its q is what is recorded."""
    call = call_of(FEW)
    inner = CONTROLLERS[controller] or Scripted(call.plan.options.length_controller.steps[:5])
    call = call.controlled_by(Remembering(inner))
    engine = open_engine(call.plan, 4)
    result = decode_requests(*call, engine=engine)
    accepted = sum(record.accepted for record in engine._control.state[1])
    tree = call.plan.loop.drafter.parts[1].tree
    firsts = accepted[0].sum() + accepted[1][: tree.num_nodes][np.array(tree.ranks) == 0].sum()
    expected = expected_acceptance(*call, [result])
    rate = firsts / expected.num_nodes
    assert abs(rate - expected.mean) < 5 * expected.decision_error
    # Other limits have another expectation.
    assert expected_acceptance(*call.controlled_by(Fixed())).num_nodes != expected.num_nodes


CLOCKS = {
    "stops": itertools.repeat(7.0),
    "jumps": itertools.cycle([0.0, 1e12, -1e12, 1.0, math.inf]),
    "is_no_number": itertools.chain([0.0, 1.0], itertools.repeat(math.nan)),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_clock_changes_no_greedy_token(clock, call_of, assert_plain, monkeypatch):
    time = types.SimpleNamespace(perf_counter=functools.partial(next, CLOCKS[clock]))
    monkeypatch.setattr(engines, "time", time)
    assert_plain(decode_requests(*call_of(FEW, controller=Auto())).token_ids)


def test_all_processes_take_the_limits_of_the_first(call_of, assert_plain, monkeypatch):
    """What a process chooses is replaced by what the first one says, which comes as JSON."""
    call = call_of(FEW)
    first = decode_requests(*call)
    said = iter(first.step_limits)
    monkeypatch.setattr(processes, "from_first", lambda _: json.loads(json.dumps(next(said))))
    other = decode_requests(*call.controlled_by(Fixed()))
    assert_same_run(other, first)
    assert other.step_limits == first.step_limits


SHORT = dict(drafter=Ngram(num_speculative_tokens=1))


def test_equal_programs_serve_other_requests(tiny):
    """Other temperatures, three prompts for four, more tokens, and filters."""
    prompts = [list(range(1, 51)) * 4] * 4

    def run(prompts, new_tokens, **fields):
        requests = SamplingParams(max_new_tokens=new_tokens, **fields)
        got = generate(tiny, prompts, sampling=requests, **SHORT)
        assert {len(tokens) for tokens in got.token_ids} == {new_tokens}

    run(prompts, 60, temperature=0.8)
    made = program_counts.compiled()
    run(prompts, 60, temperature=1.2)
    run(prompts[:3], 60, temperature=0.8)
    run(prompts, 160, temperature=0.8, top_p=0.9, top_k=9, min_p=0.01)
    assert program_counts.compiled() == made


def test_an_engine_serves_its_first_top_p_at_once(tiny):
    # What makes keys of seeds is compiled once in a process.
    generate(tiny, PROMPTS[:2], sampling=SamplingParams(temperature=0.8), **SHORT)
    engine = engines.Engine(tiny, batch_size=4, max_length=500, **SHORT)
    engine.add(PROMPTS[0], greedy(max_new_tokens=40))
    engine.step()
    made = program_counts.compiled()
    engine.add(PROMPTS[1], SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=20))
    assert len([one for one in engine if one.output is not None]) == 2
    assert program_counts.compiled() == made
