"""Draft lengths that follow costs and acceptance: decisions, and what is lost to the best one."""

import dataclasses
import functools
import itertools
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import PROMPTS, decode, decode_at_costs, draft_model, greedy, make_session, mixed

from specjax.decoding import loop
from specjax.decoding.engine import engine as engine_module
from specjax.decoding.engine.device_rows import DeviceRows
from specjax.decoding.engine.learned_costs import LearnedCosts, costs_key
from specjax.decoding.generate import add_prompts, decode_session, open_engine
from specjax.decoding.sampling_params import SamplingParams
from specjax.draft_length import survival
from specjax.draft_length.cost_filter import CostFilter
from specjax.draft_length.cost_measurement import Measurement
from specjax.draft_length.limits import DraftLength
from specjax.draft_length.policy import (
    NOT_FORCED,
    Costs,
    Decisions,
    LengthDecision,
    Policy,
    new_policy,
    row_weights,
)
from specjax.drafters import TokenRecycling, TreeOptions, make_drafter, take_turns, turns
from specjax.drafters.base import Context
from specjax.drafters.lookup.ngram import Ngram
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.sampling import Rejection
from specjax.testing import Tabular
from specjax.testing.drafters import first_rows, make_plan
from specjax.trees import Draft

OBSERVE = jax.jit(survival.observe)
BEST_LENGTH = jax.jit(LengthDecision.best_length, static_argnums=1)
ROW_WEIGHTS = jax.jit(row_weights)


def observed(known, history, drafter, confidence, depth, accepted):
    """What is known after a round of chains of `depth` tokens by row, of which some passed."""
    step = jnp.arange(confidence.shape[1])[None, :]
    depth, accepted = jnp.asarray(depth)[:, None], jnp.asarray(accepted)[:, None]
    return OBSERVE(
        known,
        history,
        jnp.asarray(drafter),
        confidence,
        step,
        step < depth,
        step < jnp.minimum(accepted + 1, depth),
        step < accepted,
        jnp.zeros(known.tested.shape[0], jnp.int32),
    )


def seen(survived, confidence, drafter, depth, rounds, longest=4, drafters=2):
    """What is known after some rounds of one row that accepts `survived` of `depth` tokens."""
    known = survival.no_survival(drafters, longest, longest)
    history, sure = survival.no_history(1, drafters), jnp.full((1, longest), confidence)
    for _ in range(rounds):
        known, history = observed(known, history, [drafter], sure, [depth], [survived])
    return known, history


def test_rows_without_a_draft_count_alike_in_and_between_rounds():
    """Of a drafter that ran and found nothing: in a round, or to learn whether to draft."""
    known, history = seen(3, 0.9, 0, 4, rounds=5)[:2]
    nobody, declined = jnp.array([-1]), jnp.array([2, 0])
    nothing = jnp.zeros((1, 4), bool)
    step = jnp.arange(4)[None, :]
    round_, same = OBSERVE(
        known, history, nobody, jnp.full((1, 4), 0.9), step, nothing, nothing, nothing, declined
    )
    between = survival.decline(known, declined, 1)
    jax.tree.map(np.testing.assert_allclose, (round_, same), (between, history))
    rate = survival.draft_rate(known)
    assert survival.draft_rate(between)[0] < rate[0]
    assert survival.draft_rate(between)[1] == rate[1]


def test_chances_follow_what_was_accepted():
    known, history = seen(survived=2, confidence=0.6, drafter=1, depth=4, rounds=200)
    chance = survival.chances(known)[1, :, int(survival.confidence_class(jnp.asarray(0.6)))]
    assert (chance[:2] > 0.9).all()
    assert chance[2] < 0.1
    # The fourth was never tested: it is as all depths are.
    assert 0.5 < chance[3] < 0.8
    # Another drafter's chances, and those of another confidence, are what they were.
    before = survival.chances(survival.no_survival(2, 4, 4))
    np.testing.assert_allclose(survival.chances(known)[0], before[0])
    np.testing.assert_allclose(survival.chances(known)[1, 0, 0], before[1, 0, 0], rtol=1e-6)
    factor = survival.row_factor(history)[0]
    assert 0.9 < float(factor[1]) < 1.1
    assert float(factor[0]) == 1.0


def test_a_row_that_accepts_less_than_others_has_a_lower_factor():
    known, _ = seen(survived=4, confidence=0.6, drafter=0, depth=4, rounds=100)
    history = survival.no_history(2, 2)
    for _ in range(10):
        known, history = observed(known, history, [0, -1], jnp.full((2, 4), 0.6), [4, 0], [0, 0])
    factor = survival.row_factor(history)
    assert float(factor[0, 0]) < 0.6
    assert float(factor[1, 0]) == float(factor[0, 1]) == 1.0


def length_decision(expected, price, first=0.0, further=0.0, rows=1, limit=None, **fields):
    longest = len(expected)
    limit = [longest] * rows if limit is None else limit
    return LengthDecision(
        chances=jnp.broadcast_to(jnp.asarray(expected)[:, None], (longest, 8)),
        expected=jnp.asarray(expected),
        nodes=jnp.cumprod(jnp.asarray(expected)),
        rate=jnp.float32(1.0),
        free=jnp.bool_(False),
        factor=jnp.ones(len(limit)),
        weight=jnp.ones(len(limit)),
        price=jnp.asarray(price),
        first=jnp.float32(first),
        further=jnp.float32(further),
        limit=jnp.asarray(limit),
        **{
            "planned": jnp.int32(0),
            "at_least": jnp.int32(0),
            "forced": jnp.int32(NOT_FORCED),
            **fields,
        },
    )


def best_by_hand(one, depth, survived):
    """The best length of several rows, by trying each."""
    values = {depth: -float(one.price[depth])}
    for length in range(depth + 1, len(one.expected) + 1):
        gain = 0.0
        for row, limit in enumerate(one.limit):
            chance = float(survived[row])
            for step in range(depth, min(length, int(limit))):
                chance *= 1.0 if step == depth else float(one.expected[step])
                gain += chance
        later = float(one.further) * (length - 1 - depth)
        values[length] = gain - float(one.price[length]) - later
    return max(values, key=lambda length: (round(values[length], 5), -length))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_length_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    expected = rng.uniform(0.2, 0.95, 4)
    price = np.concatenate([[1.0], 1 + np.cumsum(rng.uniform(0, 0.6, 4))])
    one = length_decision(
        expected, price, rng.uniform(0, 0.3), rng.uniform(0, 0.3), limit=[4, 2, 0]
    )
    for depth, survived in itertools.product(range(4), ([0.9] * 3, [0.1] * 3, [0.7, 0.2, 1.0])):
        got = BEST_LENGTH(one, depth, np.array(survived, np.float32), np.ones(3, bool))
        assert int(got) == best_by_hand(one, depth, survived)


def test_late_rows_count_for_more():
    """By how much one more token a round in each row would shorten the mean of their times."""
    active = np.array([True, True, True, False])
    left, new, rounds = np.array([40, 90, 40, 99]), np.array([30, 20, 60, 5]), np.array([20] * 4)

    def mean_time(rate):
        return ((left / rate)[active] ** 4).sum() ** (1 / 4)

    # As if four more rounds had gone as those of the batch on average.
    rate = (new + 4 * new[active].sum() / rounds[active].sum()) / (rounds + 4.0)
    shorter = [mean_time(rate) - mean_time(rate + 1e-6 * one) for one in np.eye(4)]
    weight = np.asarray(ROW_WEIGHTS(active, left, new, rounds))
    np.testing.assert_allclose(weight, 3 * np.array(shorter) / np.sum(shorter), rtol=1e-4)
    assert weight[1] > 2.5
    same = ROW_WEIGHTS(np.array([True, False, True]), *(np.full(3, 5) for _ in range(3)))
    np.testing.assert_allclose(same, [1, 0, 1])
    # A row that has left has one token, whatever its prompt had.
    left = ROW_WEIGHTS(np.array([True, False]), *map(np.array, ([9, 9], [20, -4], [20, 9])))
    np.testing.assert_allclose(left, [1, 0])
    assert ROW_WEIGHTS(np.zeros(2, bool), *(np.zeros(2, int),) * 3).sum() == 0


def test_a_late_row_decides():
    """A row that is worth more than all others, and accepts nothing, ends the draft."""
    one = length_decision([0.9, 0.9], [2.0, 2.2, 2.4], rows=2)
    chances, every = jnp.array([0.9, 0.0]), jnp.ones(2, bool)
    assert int(BEST_LENGTH(one, 0, chances, every)) == 2
    late = dataclasses.replace(one, weight=jnp.array([0.1, 1.9]))
    assert int(BEST_LENGTH(late, 0, chances, every)) == 0


def test_what_is_forced_is_drafted_and_what_is_due_too():
    dear = dict(expected=[0.5, 0.5], price=[1.0, 9.0, 99.0])
    every = jnp.ones(1, bool)
    assert int(BEST_LENGTH(length_decision(**dear), 0, jnp.ones(1), every)) == 0
    due = length_decision(**dear, at_least=jnp.int32(1))
    assert [int(BEST_LENGTH(due, depth, jnp.ones(1), every)) for depth in (0, 1)] == [1, 1]
    forced = length_decision(**dear, forced=jnp.int32(2))
    assert [int(BEST_LENGTH(forced, depth, jnp.ones(1), every)) for depth in (0, 1)] == [2, 2]


def test_the_likelier_nodes_of_a_tree_without_confidences_are_kept():
    """Three candidates for one token, of which the first is right, as was seen."""
    part = TokenRecycling(8, tree=TreeOptions(kind="static", choices=((0,), (1,), (2,))))
    topology = part.shape.topology
    known, history = survival.no_survival(1, 1, 3), survival.no_history(1, 1)
    every, right = jnp.ones((1, 3), bool), jnp.array([[True, False, False]])
    unknown, depth = jnp.full((1, 3), survival.UNKNOWN), jnp.zeros((1, 3), int)
    for _ in range(60):
        known, history = OBSERVE(
            known, history, jnp.array([0]), unknown, depth, every, every, right, jnp.array([0])
        )
    costs = Costs(jnp.array([1.0, 1.3, 1.6, 1.9]), *[jnp.array([0.01])] * 3)
    policy = new_policy(1, 1, 3, 4).replace(costs=costs, survival=known)
    decisions = Decisions(policy, history, jnp.array([True]), jnp.ones(1), (1, 2, 3, 4))
    none = jnp.int32(0)
    find = jax.jit(
        lambda decisions: decisions.decide_length(0, jnp.array([1]), none, none, tree_nodes=3)
    )
    one = find(decisions)
    # Of a round's context only the decision on its length is looked at.
    context = object.__new__(Context)
    object.__setattr__(context, "length_decision", one)
    draft = Draft(jnp.array([[3, 4, 5]]), every, jnp.full((1, 3), -1), None, topology)
    kept, length = turns._decided_after(part, context, draft)
    assert (kept.valid.tolist(), int(length)) == ([[True, False, False]], 1)
    # As if all were alike, each would seem to be accepted in a third of the rounds.
    assert int(one.best_of_draft(unknown, every, topology)) == 3


def test_nothing_is_expected_of_nodes_that_a_drafter_does_not_have():
    """Beside one with larger trees, whose passes cost nothing more."""
    costs = Costs(jnp.ones(4), jnp.array([1.4, 0.1]), *[jnp.array([0.01, 0.01])] * 2)
    policy = new_policy(2, 1, 32, 4).replace(costs=costs)
    history = survival.no_history(1, 2)
    decisions = Decisions(policy, history, jnp.array([True]), jnp.ones(1), (1, 2, 4, 33))

    @functools.partial(jax.jit, static_argnums=0)
    def planned(nodes):
        none = jnp.int32(0)
        return decisions.decide_length(0, jnp.array([1]), none, none, tree_nodes=nodes).planned

    assert int(planned(32)) > 3
    assert int(planned(3)) == 0


def test_a_chain_that_looks_and_stops_has_run_once_more():
    """Its second token is as likely as any other: it is not drafted, but was looked for."""
    table = jnp.zeros((4, 4)).at[1, 2].set(9.0)
    request, prompt = greedy(), (3, 1)
    further = []
    for p_min in (0.5, 0.0):
        drafter, own = take_turns(draft_model((Tabular(4), table), draft_p_min=p_min))
        plan = make_plan(
            Tabular(4), drafter, DraftLength(3), verify=Rejection(), request=request, capacity=8
        )
        rows = first_rows(plan, prompt, request, np.arange(1), 0)
        state = loop.start(plan, (table, own), *rows)
        proposal = jax.jit(
            lambda state, plan=plan, own=own: loop.propose(plan, (table, own), state)
        )(state)
        further.append((int(proposal.draft.valid.sum()), proposal.further.tolist()))
    assert further == [(1, [1]), (3, [2])]


def test_a_replay_drafts_the_same_beside_any_number_of_rows():
    ladder = ((1, 1, 4), (2, 8, 1))
    active = jnp.array([True, True, False])
    assert DraftLength(4, ladder).limit(active).tolist() == [1, 1, 0]
    assert DraftLength(4, ladder, replayed=True).limit(active).tolist() == [4, 4, 0]


def test_a_run_with_a_ladder_is_replayed_in_other_batches(tiny):
    rounds = np.full((2, 3), 3, np.int32), np.zeros((2, 3), np.int32)
    session = make_session(
        tiny,
        PROMPTS[1:3],
        drafter=Ngram(num_speculative_tokens=3),
        num_speculative_tokens_per_batch_size=((1, 1, 1), (2, 8, 3)),
        replay=rounds,
        batch_size=1,
    )
    assert session.plan.draft_length.limit(jnp.array([True])).tolist() == [3]


class Injected(LearnedCosts):
    """Costs that a test sets: `seconds_of(committed)` are the true figures at a length."""

    def begin_with(self, seconds_of, session):
        self.seconds_of, self.spent, self.session = seconds_of, 0.0, session
        return self

    def after_step(self, state, seconds, *intention):
        ran = state.policy.work.counts()
        seconds = float(ran @ self.seconds_of(int(state.length.max())))
        self.spent += seconds
        return super().after_step(state, seconds, *intention)

    def save(self):
        pass


LONGEST, NEW = 4, 1600


def hindsight(right, length, seconds_of, widths, first):
    """The seconds of fixed drafts of `length` tokens; `right[i]` says whether token i is right."""
    position, spent = 0, 0.0
    while position < len(right):
        figures = seconds_of(first + position)
        drafted = min(length, len(right) - position - 1)
        width = next(i for i, width in enumerate(widths) if width > drafted)
        spent += figures[width]
        if drafted:
            spent += figures[-3] + figures[-2] * (drafted - 1)
        accepted = 0
        while accepted < drafted and right[position + accepted]:
            accepted += 1
        position += accepted + 1
    return spent


def steady(committed):
    return np.array([1.0, 1.1, 1.2, 1.5, 0.1, 0.05, 0.0])


def jump(committed):
    """Wide passes and drafts become three times as dear half-way."""
    return steady(committed) * (1 if committed < NEW / 2 else np.array([1, 1.4, 1.7, 2, 3, 3, 1]))


@pytest.fixture(scope="module")
def long_target():
    return random_model(tiny_config(num_layers=1, max_positions=2048), 0, dtype="float32")


@pytest.mark.parametrize(
    ("acceptance", "seconds_of"),
    [
        (0.0, steady),
        (0.6, jump),
        (0.9, steady),
        *slow((0.3, steady), (0.6, steady), (0.0, jump), (0.3, jump), (0.9, jump)),
    ],
)
def test_little_is_lost_to_the_best_fixed_length(acceptance, seconds_of, long_target):
    prompt, requests = [[5, 6, 7]], greedy(max_new_tokens=NEW)
    plain = decode(long_target, prompt, sampling=requests)
    drafter = make_drafter(
        "simulated", long_target, continuations=plain.token_ids, acceptance=acceptance
    )
    session = make_session(
        long_target,
        prompt,
        drafter=drafter,
        sampling=requests,
        draft_length=DraftLength(LONGEST, auto=True),
        num_speculative_tokens=LONGEST,
    )
    widths = session.plan.widths
    assert widths == (1, 4, 5)
    # The figures that hold: those of the widths that are compiled.
    pick = np.array([0, 2, 3, 4, 5, 6])
    learned = Injected(CostFilter(seconds_of(0)[pick], len(widths)), None)
    learned.begin_with(lambda committed: seconds_of(committed)[pick], session)
    got = decode_at_costs(session, learned)
    assert got.token_ids == plain.token_ids
    replay = np.asarray(session.drafter.params)[0][0][:NEW]
    right = replay == np.asarray(plain.token_ids[0])
    best = min(
        hindsight(right, length, lambda n: seconds_of(n)[pick], widths, 3)
        for length in range(LONGEST + 1)
    )
    assert learned.spent < 1.03 * best


def simulated(target, prompts, requests, wrong, batch_size=4):
    """A session with drafts that are right but for those tokens of a row that are `wrong`."""
    plain = decode(target, prompts, sampling=requests)
    drafts = [
        [(token + wrong(row, at)) % target.config.vocab_size for at, token in enumerate(tokens)]
        for row, tokens in enumerate(plain.token_ids)
    ]
    session = make_session(
        target,
        prompts,
        drafter=make_drafter("simulated", target, continuations=drafts, acceptance=1.0),
        sampling=requests,
        draft_length=DraftLength(LONGEST, auto=True),
        num_speculative_tokens=LONGEST,
        batch_size=batch_size,
    )
    return session, plain


def equally(active, *_):
    return active.astype(jnp.float32)


@pytest.mark.slow  # decisions for late rows are above
def test_a_batch_does_not_wait_for_a_row_that_accepts_nothing(long_target, monkeypatch):
    """Where it would be all that is decoded in the end; if others wait, drafts pay."""
    figures = np.array([1.0, 1.5, 1.6, 0.1, 0.05, 0.0])
    spent = []
    # Another number of tokens, so that the last is another program.
    for count, new, weights in ((4, 200, row_weights), (16, 200, row_weights), (4, 300, equally)):
        monkeypatch.setattr(loop, "row_weights", weights)
        prompts = [[5, 6, 7 + number] for number in range(count)]
        session, plain = simulated(
            long_target, prompts, greedy(max_new_tokens=new), lambda row, _: row % 4 == 0
        )
        learned = Injected(CostFilter(figures, 3), None)
        learned.begin_with(lambda committed: figures, session)
        assert decode_at_costs(session, learned).token_ids == plain.token_ids
        spent.append(learned.spent / (count / 4 * new))
    assert spent[0] < 1.05
    assert spent[1] < 0.85
    assert spent[2] > 1.08


def test_a_plain_round_that_is_believed_too_dear_is_timed_again(long_target, monkeypatch):
    """Half of the draft tokens are right: until then this seems to pay, and no round is plain."""
    requests = greedy(max_new_tokens=NEW)
    true = np.array([1.0, 1.9, 2.0, 0.1, 0.05, 0.0])
    off = np.array([0.6, 0, 0, 0, 0, 0])
    half = np.random.default_rng(0).integers(2, size=NEW)
    # Of as many tokens, and so with the programs of above.
    session, _ = simulated(long_target, [[5, 6, 7]], requests, lambda _, at: half[at], batch_size=1)
    found = []
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr(LearnedCosts, "_check_plain", lambda self, state, **_: state)
        learned = Injected(CostFilter(true + off, 3, off / 2), None)
        learned.begin_with(lambda committed: true, session)
        decode_at_costs(session, learned)
        found.append((learned.estimate.seconds[0], learned.spent))
    assert found[0][0] < 1.1
    assert found[1][0] > 1.5
    assert found[0][1] < 1.05 * NEW < 1.15 * NEW < found[1][1]


def lengths_drafted(result):
    return set(result.drafted[result.emitted > 0].tolist())


@pytest.fixture(scope="module")
def dear():
    """Costs at which a draft sometimes pays."""
    return lambda plan: CostFilter(
        [
            *(1 + 0.04 * np.arange(len(plan.widths))),
            *[0.05] * (3 * len(plan.drafter.parts)),
        ],
        len(plan.widths),
    )


def decode_auto(target, costs, **options):
    session = make_session(target, PROMPTS, num_speculative_tokens="auto", **options)
    learned = Injected(costs(session.plan), None)
    figures = learned.estimate.seconds.copy()
    learned.begin_with(lambda committed: figures, session)
    return session, decode_at_costs(session, learned)


def pair(similar):
    lookup = Ngram(prompt_lookup_min=1, num_speculative_tokens=2)
    return take_turns(lookup, draft_model(similar, num_speculative_tokens=2))


# The default one, with plain steps among the rounds, is in test_sleeping_steps.
@pytest.mark.parametrize("rule", slow("rejection", "coupled"))
def test_rounds_can_be_replayed(rule, tiny, similar, dear):
    """Whoever drafted, and whatever it costs elsewhere: the same tokens and counts."""
    options = dict(drafter=pair(similar), sampling=mixed(max_new_tokens=30), verify=rule)
    _, got = decode_auto(tiny, dear, **options)
    assert len(lengths_drafted(got)) >= 3
    assert {-1, 0, 1} == set(got.drafter.ravel().tolist())
    if rule == "coupled":
        plain = decode(tiny, PROMPTS, sampling=options["sampling"], verify=rule)
        assert got.token_ids == plain.token_ids
    again = decode(
        tiny,
        PROMPTS,
        num_speculative_tokens="auto",
        replay=(got.drafted, got.drafter),
        **options,
    )
    assert again.token_ids == got.token_ids
    for name in ("drafted", "accepted", "emitted", "drafter"):
        np.testing.assert_array_equal(getattr(again, name), getattr(got, name))


def test_a_replay_of_other_drafters_is_refused(tiny, similar):
    drafters = pair(similar)
    options = dict(sampling=greedy(max_new_tokens=2))
    longer = np.full((len(PROMPTS), 3), 8, np.int32), np.ones((len(PROMPTS), 3), np.int32)
    with pytest.raises(InputError, match=r"replay has a draft of 8 tokens by draft_model.*most"):
        make_session(tiny, PROMPTS, drafter=drafters, replay=longer, **options)
    third = np.ones((len(PROMPTS), 3), np.int32), np.full((len(PROMPTS), 3), 2, np.int32)
    with pytest.raises(InputError, match=r"replay has drafts of 3 drafters, not of ngram\+draft"):
        make_session(tiny, PROMPTS, drafter=drafters, replay=third, **options)
    with pytest.raises(InputError, match="replay has 8 rows for 1 prompts"):
        make_session(tiny, PROMPTS[:1], drafter=drafters, replay=third, **options)


@pytest.mark.slow  # rows are aborted in test_engine
def test_a_row_that_was_left_does_not_harm_the_next(tiny, similar, dear):
    session = make_session(
        tiny,
        PROMPTS[:2],
        drafter=draft_model(similar, num_speculative_tokens=2),
        num_speculative_tokens="auto",
        sampling=greedy(max_new_tokens=40),
        batch_size=1,
    )
    engine = open_engine(session)
    engine.costs = LearnedCosts(dear(session.plan), None)
    want = decode_session(session, engine=engine)
    add_prompts(engine, session, [0])
    engine.step()
    engine.abort(0)
    assert [delta.finish_reason for delta in engine] == ["abort"]
    assert decode_session(session, engine=engine).token_ids == want.token_ids


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder in which nothing is kept yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def injected(session, seconds_of):
    """What is known of a session where nothing is kept, and a clock that a test sets."""
    known = LearnedCosts.of_setup(session, 5)
    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    # Whatever is decoded, the clock is the test's.
    return Injected(**fields | {"key": None}).begin_with(seconds_of, session)


def test_a_clock_that_stands_still_is_an_error(tiny, kept):
    session = make_session(
        tiny,
        PROMPTS[:1],
        drafter=Ngram(num_speculative_tokens=2),
        num_speculative_tokens="auto",
        sampling=greedy(max_new_tokens=60),
    )
    learned = injected(session, lambda committed: np.zeros(len(session.plan.widths) + 3))
    with pytest.raises(InputError, match=r'num_speculative_tokens="auto".*use a whole number'):
        decode_at_costs(session, learned)


def test_the_first_rounds_measure_costs_that_are_kept(tiny, similar, kept):
    """They commit the tokens of plain decoding; a batch that ends early leaves the rest to do."""
    sampling = greedy(max_new_tokens=20)
    session = make_session(
        tiny,
        PROMPTS,
        drafter=pair(similar),
        num_speculative_tokens="auto",
        sampling=sampling,
        batch_size=1,
    )
    widths = len(session.plan.widths)
    true = np.array([*np.linspace(1.0, 1.5, widths), 0.1, 0.2, 0.0, 0.05, 0.1, 0.3])
    learned = injected(session, lambda committed: true)
    assert learned.estimate is None
    got = decode_at_costs(session, learned)
    assert got.token_ids == decode(tiny, PROMPTS, sampling=sampling, batch_size=1).token_ids
    rounds = (got.emitted > 0).sum(axis=1)
    assert rounds[0] < 3 * (widths + 6) < rounds.sum()
    assert learned.measurement is None
    assert 3 * (widths + 6) < learned.measure_s < learned.spent
    np.testing.assert_allclose(learned.estimate.first, true, atol=0.03)
    LearnedCosts.save(learned)
    (file,) = kept.rglob("*.json")
    again = LearnedCosts.of_setup(session, 5)
    assert again.measurement is None
    np.testing.assert_allclose(again.estimate.seconds, learned.estimate.seconds)
    old = json.loads(file.read_text()) | {"at": 1.6e9}
    file.write_text(json.dumps(old))
    again = LearnedCosts.of_setup(session, 5)
    np.testing.assert_allclose(again.estimate.seconds, learned.estimate.seconds)
    assert again.measurement.next.lengths == (0, 0)
    assert again.rounds(16) == 1
    # A future time is another clock's.
    file.write_text(json.dumps(old | {"at": 1e12}))
    assert LearnedCosts.of_setup(session, 5).measurement is not None
    for damage in ("{", '{"seconds": [1], "at": 1}', '{"seconds": "x"}', "[]", '{"at": 1}'):
        file.write_text(damage)
        assert LearnedCosts.of_setup(session, 5).estimate is None


def test_costs_that_are_not_known_yet_are_not_kept(tiny, kept):
    session = make_session(
        tiny,
        PROMPTS[:1],
        drafter=Ngram(num_speculative_tokens=2),
        num_speculative_tokens="auto",
        sampling=greedy(max_new_tokens=3),
    )
    learned = LearnedCosts.of_setup(session, len(PROMPTS[0]))
    decode_at_costs(session, learned)
    assert learned.estimate is None
    assert learned.measure_s > 0
    assert not list(kept.rglob("*.json"))


def auto_row(target, new):
    """One row of greedy tokens, and costs that are known of old."""
    session = make_session(
        target,
        PROMPTS[:1],
        drafter=Ngram(num_speculative_tokens=2),
        num_speculative_tokens="auto",
        sampling=greedy(max_new_tokens=new),
    )
    widths = len(session.plan.widths)
    known = np.linspace(1.0, 1.5, widths + 3)
    return session, LearnedCosts(None, None, Measurement(widths, [2], known))


def test_what_was_forced_says_nothing_of_the_pace(tiny, kept):
    """Of a measurement that rows were too short for, too."""
    session, learned = auto_row(tiny, 6)
    got = decode_at_costs(session, learned)
    assert learned.measurement is None
    assert 4 <= (got.emitted > 0).sum() < 8
    fresh = new_policy(1, 2, 2, len(session.plan.widths))
    assert float(learned.policy.earned) == float(fresh.earned)
    assert float(learned.policy.spent) == float(fresh.spent)


def test_a_clock_that_jumps_back_ends_nothing(tiny, kept, monkeypatch):
    calls, timed = itertools.count(), []

    def jumping():
        return time.perf_counter() - 9.0 * (next(calls) % 5 == 0)

    def add(self, seconds, work):
        timed.append(seconds)
        measured(self, seconds, work)

    measured = Measurement.add
    monkeypatch.setattr(Measurement, "add", add)
    monkeypatch.setattr(engine_module, "time", types.SimpleNamespace(perf_counter=jumping))
    session, learned = auto_row(tiny, 60)
    got = decode_at_costs(session, learned)
    assert min(timed) < 0
    assert learned.estimate.seconds.min() > 0
    monkeypatch.undo()
    plain = decode(tiny, PROMPTS[:1], sampling=greedy(max_new_tokens=60))
    assert got.token_ids == plain.token_ids


def test_costs_of_short_prompts_are_not_those_of_long_ones(tiny, kept):
    """Kept figures are for prompts of the same size, to a power of two, as those measured."""

    def known(*lengths):
        session = make_session(
            tiny,
            [[5] * length for length in lengths],
            drafter=Ngram(num_speculative_tokens=2),
            num_speculative_tokens="auto",
            sampling=greedy(max_new_tokens=230),
            batch_size=1,
        )
        with open_engine(session) as engine:
            add_prompts(engine, session, range(len(lengths)))
            engine.step()
            return engine.costs

    for length in (5, 300):
        fresh = known(length)
        assert fresh.estimate is None
        widths = fresh.measurement.num_widths
        fresh.estimate = CostFilter(np.full(widths + 3, float(length)), widths)
        fresh.save()
    figures = [known(length).estimate.first[0] for length in (7, 290, 5)]
    assert figures == [5.0, 300.0, 5.0]
    # What is decoded first is what was measured, not the longest prompt of all.
    assert known(4, 300).estimate.first[0] == 5.0


def test_an_engine_has_the_costs_of_what_it_decodes(tiny, kept, monkeypatch):
    """Long prompts change no figure of short ones, and what is not known yet is measured."""
    monkeypatch.setattr(CostFilter, "update", lambda *_: None)
    session = make_session(
        tiny,
        [[5] * length for length in (5, 300, 520)],
        drafter=Ngram(num_speculative_tokens=2),
        num_speculative_tokens="auto",
        sampling=greedy(max_new_tokens=30),
        batch_size=1,
    )
    widths = len(session.plan.widths)

    def kept_of(length):
        return LearnedCosts.of_setup(session, length)

    for length in (5, 300):
        fresh = kept_of(length)
        fresh.estimate = CostFilter(length * np.array([*[1.0] * widths, 0.01, 0.01, 0.01]), widths)
        fresh.save()
    with open_engine(session) as engine:
        first, tested = [], []
        # The last two follow each other into the slot.
        for index in ([0], [1], [0], [0, 1]):
            decode_session(session, index=index, engine=engine)
            first.append(engine.costs.estimate.first[0])
            tested.append(float(engine.costs.policy.survival.tested.sum()))
        assert first == [5.0, 300.0, 5.0, 300.0]
        # What was accepted is known of whatever is decoded.
        assert tested == sorted(tested)
        assert 0 < tested[0] < tested[-1]
        assert engine.costs.measure_s == 0
        decode_session(session, index=[2], engine=engine)
        assert engine.costs.measurement is None
        measure_s = engine.costs.measure_s
        assert measure_s > 0
        decode_session(session, index=[0, 2], engine=engine)
        assert engine.costs.measure_s == measure_s
    assert [kept_of(length).estimate.first[0] for length in (5, 300)] == [5.0, 300.0]
    assert kept_of(520).estimate.first[0] < 5.0
    # Attention reads whole blocks.
    assert kept_of(200).estimate.first[0] == 5.0


def test_other_programs_have_other_costs(tiny, kept):
    """A request for what the programs cannot do yet, as an engine may get at any time."""
    session, _ = auto_row(tiny, 6)
    rows = DeviceRows(session)
    rows.costs = before = LearnedCosts.of_setup(session, 1)
    rows.serve(greedy())
    assert rows.costs is before
    rows.serve(SamplingParams(temperature=1.0))
    assert rows.costs.file != before.file
    assert rows.costs.key == costs_key(rows.setup, 1) != before.key


def test_figures_of_other_work_are_the_beginning_also_where_they_were_not_measured_yet(tiny, kept):
    """Two requests in a row that ask for something new, before anything is decoded."""
    session, _ = auto_row(tiny, 6)
    rows, widths = DeviceRows(session), len(session.plan.widths)
    figures = np.array([*[1.0] * widths, 0.01, 0.01, 0.01])
    rows.costs = LearnedCosts.of_setup(session, 1)
    rows.costs.estimate, rows.costs.measurement = CostFilter(figures, widths), None
    for asked in ({}, {"top_p": 0.9}, {"logprobs": True}):
        rows.serve(SamplingParams(temperature=1.0, **asked))
        np.testing.assert_allclose(rows.costs.measurement.known, figures)


def test_a_drafter_that_never_pays_is_looked_at_now_and_then(tiny, unrelated, monkeypatch):
    """And less often, or never, where it has to read what it missed before each look."""
    look_again = Policy.look_again

    def look(self, number, passes):
        # One program for all: the last run, in which they do not count, is told by a figure.
        return look_again(self, number, jnp.where(self.costs.further[number] < 0.4, passes, 0))

    monkeypatch.setattr(Policy, "look_again", look)
    looks, spent, new = [], [], 400
    for catch_up, further in ((0.0, 0.3), (0.1, 0.3), (0.5, 0.3), (0.5, 0.5)):
        session = make_session(
            tiny,
            [[5]],
            drafter=draft_model(unrelated, num_speculative_tokens=2),
            num_speculative_tokens="auto",
            sampling=greedy(max_new_tokens=new),
        )
        widths = len(session.plan.widths)
        estimate = CostFilter([*[1.0] * widths, 0.3, further, catch_up], widths)
        learned = Injected(estimate, None)
        figures = estimate.seconds.copy()
        learned.begin_with(lambda committed, figures=figures: figures, session)
        got = decode_at_costs(session, learned)
        later = got.drafted[0][got.emitted[0] > 0][100:]
        assert set(later[later > 0].tolist()) <= {1}
        looks.append((later > 0).mean())
        spent.append(learned.spent / new)
    assert looks[2] == 0 < looks[1] < looks[0] < 0.06
    assert looks[3] > 0
    assert spent[2] < spent[3] - 0.01


def test_a_drafter_without_a_draft_makes_no_pass_wider_for_the_next(tiny, similar):
    """A lookup is asked again and again, in vain: what comes after it pays for its own width."""
    plan = make_session(
        tiny,
        [[5, 9, 2, 7]],
        drafter=take_turns(
            Ngram(prompt_lookup_min=4, prompt_lookup_max=4, num_speculative_tokens=2),
            draft_model(similar, num_speculative_tokens=2),
        ),
        num_speculative_tokens="auto",
        batch_size=1,
        sampling=greedy(max_new_tokens=8),
    )
    params, plan = plan.params, plan.plan
    index = np.arange(1)
    state = loop.start(plan, params, *first_rows(plan, (5, 9, 2, 7), greedy(), index, 0))
    nothing = jnp.full(2, 1e-6)
    dear = jnp.asarray([1.0, *(5.0,) * (len(plan.widths) - 1)])
    costs = Costs(dear, first=nothing, further=nothing, catch_up=jnp.zeros(2))
    idle = jnp.asarray([10**6, 0], jnp.int32)
    policy = state.policy.replace(costs=costs, idle_rounds=idle)
    _, counts = jax.jit(loop.run, static_argnums=0)(
        plan, params, state.replace(policy=policy), jnp.int32(4)
    )
    drafted = np.asarray(counts.drafted)[0]
    assert (drafted >= 0).sum() > 0
    assert drafted.max() <= 0
