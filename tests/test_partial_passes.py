"""Partial passes: over half of the rows, where these hold all that are unfinished."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    decode,
    decode_at_costs,
    draft_model,
    first_state,
    greedy,
    make_session,
    mixed,
)
from heads import eagle_drafter
from test_broken_logits import spoiled
from test_strict import copied_shapes, lowered

import specjax
from specjax import sampling
from specjax.cache import CacheRows, KVCache
from specjax.decoding import loop
from specjax.decoding.engine.learned_costs import LearnedCosts
from specjax.decoding.generate import decode_session
from specjax.decoding.state import STOPPED
from specjax.distributed import sharding
from specjax.draft_length.cost_filter import CostFilter
from specjax.draft_length.policy import Costs
from specjax.drafters import TokenRecycling, take_turns
from specjax.drafters.growth.options import TreeOptions
from specjax.drafters.lookup.ngram import Ngram
from specjax.errors import InputError
from specjax.loading.load import place_model, random_model
from specjax.models.config import SlidingWindow
from specjax.models.decoder import Form
from specjax.trees import DynamicTree

APART = Form("apart", "rows")
# Rows end one after the other.
NEW = (3, 18, 5, 24, 4, 2, 9, 13)
FILTERED = mixed(logprobs=True)
WARM = [dataclasses.replace(one, top_k=0, top_p=1.0, min_p=0.0) for one in FILTERED]
NGRAM = Ngram(prompt_lookup_min=1, num_speculative_tokens=2)
RECYCLING = TokenRecycling(61, tree=TreeOptions(kind="static", topk=2, depth=2, num_nodes=4))
DRAFTERS = {
    "none": lambda model, other: None,
    "ngram": lambda model, other: NGRAM,
    "draft_model": lambda model, other: draft_model(other),
    # It reads a feature of every slot of a pass.
    "token_recycling": lambda model, other: RECYCLING,
    "eagle3": lambda model, other: eagle_drafter(model, spread=0.3),
    "eagle3_dynamic": lambda model, other: dynamic(eagle_drafter(model, spread=0.3)),
    "turns": lambda model, other: take_turns(
        Ngram(prompt_lookup_min=1), eagle_drafter(model, spread=0.3)
    ),
}


def dynamic(loaded):
    drafter = dataclasses.replace(
        loaded.drafter, tree=DynamicTree(2, 2, 4), num_speculative_tokens=2
    )
    return loaded._replace(drafter=drafter)


@pytest.fixture(scope="module")
def apart():
    return random_model(tiny_config(num_layers=2), 0, dtype="float32", form=APART)


def session_of(model, drafter, *, rule="coupled", partial_rows=4, sampling=None, **options):
    requests = [
        dataclasses.replace(one, max_new_tokens=new)
        for one, new in zip(sampling or WARM, NEW, strict=True)
    ]
    options = dict(num_speculative_tokens=None if drafter is None else 2) | options
    session = make_session(
        model, PROMPTS, drafter=drafter, sampling=requests, verify=rule, batch_size=8, **options
    )
    plan = dataclasses.replace(session.plan, partial_rows=partial_rows)
    return dataclasses.replace(session, plan=plan)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none", "coupled"),
        ("eagle3_dynamic", "coupled"),
        # What a pass's features are read for is in the test of rows that fail.
        *slow(
            ("token_recycling", "rejection"),
            ("ngram", "rejection"),
            ("draft_model", "block"),
            ("eagle3", "block"),
            ("turns", "rejection"),
        ),
        *slow(("eagle3", "rejection"), ("ngram", "coupled"), ("eagle3_dynamic", "rejection")),
    ],
)
def test_rows_are_those_of_whole_passes(name, rule, apart, unrelated):
    """Tokens, log-probabilities and rounds, of greedy rows and of sampled ones."""
    drafter = DRAFTERS[name](apart, unrelated)
    # Which rows filters are taken of has nothing to do with drafts.
    sampling = FILTERED if name in ("none", "ngram") else WARM
    partial, whole = (
        decode_session(session_of(apart, drafter, rule=rule, partial_rows=rows, sampling=sampling))
        for rows in (4, None)
    )
    for mine, other in zip(partial.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)
    assert partial.token_ids == whole.token_ids
    for part in ("drafted", "accepted", "emitted", "first_round"):
        np.testing.assert_array_equal(getattr(partial, part), getattr(whole, part))


@pytest.mark.parametrize("name", ["ngram", *slow("none", "draft_model")])
def test_layers_with_a_window_know_their_rows_positions(name, unrelated):
    config = tiny_config(num_layers=2, sliding_window=SlidingWindow(8, (True, False)))
    model = random_model(config, 0, dtype="float32", form=APART)
    drafter = DRAFTERS[name](model, unrelated)
    partial, whole = (
        decode_session(session_of(model, drafter, partial_rows=rows)) for rows in (4, None)
    )
    assert partial.token_ids == whole.token_ids


def broken_take(cache, rows):
    """The first rows of the cache, whichever are asked for."""
    return CacheRows(cache.k, cache.v, jnp.arange(len(rows)), cache.length[rows])


def broken_order(state):
    """The rows as they lie, also those that have finished."""
    return jnp.arange(len(state.length))


@pytest.mark.parametrize(
    ("place", "name", "broken", "rows"),
    # Programs are kept by their plan: ones that no other test has.
    [(KVCache, "take", broken_take, 3), (loop, "unfinished_first", broken_order, 2)],
)
def test_broken_variants_fail(place, name, broken, rows, apart, monkeypatch):
    whole = decode_session(session_of(apart, None, partial_rows=None))
    monkeypatch.setattr(place, name, broken)
    got = decode_session(session_of(apart, None, partial_rows=rows))
    assert got.token_ids != whole.token_ids


@pytest.mark.parametrize("name", ["ngram", *slow("turns")])
def test_the_length_that_follows_costs_keeps_the_tokens(name, apart, unrelated):
    """Under "auto" as well, whichever rounds its plain program runs."""
    drafter = DRAFTERS[name](apart, unrelated)
    plain = decode_session(session_of(apart, None, partial_rows=None))
    auto = session_of(apart, drafter, num_speculative_tokens="auto")
    for wider in (0.0, 5.0):
        widths = len(auto.plan.widths)
        seconds = 1 + wider * np.arange(widths)
        others = np.full(3 * len(auto.plan.drafter.parts), 0.01)
        costs = LearnedCosts(CostFilter(np.concatenate([seconds, others]), widths), None)
        assert decode_at_costs(auto, costs).token_ids == plain.token_ids


def test_rows_that_fail_beside_others(apart):
    """A row whose logits are not numbers ends alike in passes over all rows and over some."""
    options = dict(drafter=RECYCLING, rule="rejection")
    whole = decode_session(session_of(apart, partial_rows=None, **options))
    # The longest row, when most of the others have finished.
    token = whole.token_ids[3][14]
    broken = spoiled(apart, token)
    partial, whole = (
        decode_session(session_of(broken, partial_rows=rows, **options)) for rows in (4, None)
    )
    assert partial.token_ids == whole.token_ids
    assert partial.finish_reasons == whole.finish_reasons
    assert "error" in partial.finish_reasons


@pytest.mark.parametrize("rule", slow("rejection", "block"))
def test_rounds_of_auto_can_be_replayed(rule, apart, unrelated):
    drafter = DRAFTERS["turns"](apart, unrelated)
    options = dict(rule=rule, num_speculative_tokens="auto")
    auto = session_of(apart, drafter, **options)
    widths = len(auto.plan.widths)
    figures = np.concatenate([np.ones(widths), np.full(6, 0.01)])
    first = decode_at_costs(auto, LearnedCosts(CostFilter(figures, widths), None))
    assert first.drafted.max() > 0
    replay = first.drafted, first.drafter
    again = decode_session(session_of(apart, drafter, replay=replay, **options))
    assert again.token_ids == first.token_ids


def test_which_batches_have_them(apart, tiny):
    def rows(model, batch, **options):
        requests = greedy()
        return make_session(model, PROMPTS[:batch], sampling=requests, **options).plan.partial_rows

    assert [rows(apart, batch) for batch in (1, 2, 3, 8)] == [None, 1, 1, 4]
    assert rows(apart, 8, drafter=NGRAM, num_speculative_tokens="auto") == 4
    assert rows(tiny, 8) is None
    mesh = sharding.make_mesh(2, 1, jax.devices()[:2])
    assert rows(place_model(apart, mesh), 8) is None


def test_a_rule_is_tried_with_as_many_rows(apart):
    class Whole(sampling.UniformRule):
        """Takes all the rows of a batch or none."""

        name, exact, takes_trees = "whole", True, False

        def decide(self, tokens, count, logp, draft, uniforms):
            assert tokens.shape[0] == 8
            return sampling.RULES["rejection"].decide(tokens, count, logp, draft, uniforms)

    with pytest.raises(InputError, match="fails for drafts"):
        session_of(apart, NGRAM, rule=Whole())


def test_what_a_partial_pass_costs():
    """As much as one over all rows with as many tokens, on straight lines, within bounds."""
    nothing = jnp.zeros(1)
    costs = Costs(jnp.array([10.0, 14.0, 20.0]), nothing + 1, nothing + 2, nothing + 3)
    half = costs.of_share((1, 2, 5), 0.5)
    np.testing.assert_allclose(half.passes, [8.0, 10.0, 15.0])
    for name in ("first", "further", "catch_up"):
        np.testing.assert_array_equal(getattr(half, name), getattr(costs, name))
    # Never dearer than all rows, nor cheaper than their share.
    steep = Costs(jnp.array([10.0, 90.0, 20.0]), nothing, nothing, nothing).of_share((1, 2, 5), 0.5)
    np.testing.assert_allclose(steep.passes, [5.0, 45.0, 20.0])
    alone = Costs(jnp.array([10.0]), nothing, nothing, nothing)
    assert alone.of_share((1,), 0.5) is alone


@pytest.mark.parametrize("wider", [0.5, 2.0])
def test_drafts_of_the_last_rows_are_priced_as_their_passes(wider, apart):
    """With two rows of eight left, a wide pass costs fewer plain rounds than with all of them."""
    session, state, ended = auto_state(apart)
    widths = np.asarray(session.plan.widths)
    seconds = 1 + wider * (widths > widths[-1] // 2 + 1)
    costs = Costs(*(jnp.asarray(part, jnp.float32) for part in (seconds, [0.0], [0.0], [0.0])))
    state = state.replace(policy=state.policy.replace(costs=costs))
    few = state.replace(status=jnp.where(ended, STOPPED, state.status))

    @jax.jit
    def price(state):
        context = loop.make_context(session.plan, session.params[0], state)
        decisions, none = context.decisions, jnp.int32(0)
        return decisions.decide_length(0, jnp.full(8, 2), none, none).price

    prices = price(state), price(few)
    whole, partial = (np.asarray(price / price[0]) for price in prices)
    assert whole[-1] == pytest.approx(1 + wider)
    assert partial[-1] < whole[-1]


@pytest.mark.usefixtures("as_shipped")
def test_the_cache_is_read_where_it_lies():
    shape = dict(hidden_size=26, intermediate_size=42, vocab_size=67)
    config = tiny_config(num_layers=2, **shape)
    model = random_model(config, 0, dtype="float32", form=APART)
    session = make_session(
        model,
        PROMPTS[:4],
        drafter=NGRAM,
        sampling=greedy(),
        every_width=True,
    )
    assert session.plan.partial_rows == 2
    state, program = lowered(session)
    text = program.compile().as_text()
    layers, rows, *rest = state.cache.k.shape
    kept = {(layers, count, *rest) for count in (rows, session.plan.partial_rows)}
    kept |= {(count, *rest) for count in (rows, session.plan.partial_rows)}
    assert not copied_shapes(text) & kept
    # Some pass is over half of the rows.
    assert f"[{rows // 2},1,{model.config.vocab_size}]" in text


def auto_state(apart):
    session = session_of(apart, NGRAM, sampling=[greedy()] * 8, num_speculative_tokens="auto")
    state = first_state(session)
    ended = np.ones(8, bool)
    ended[[2, 5]] = False
    return session, state, ended


@pytest.mark.parametrize("program", [loop.step, loop.plain_step])
def test_rounds_that_are_timed_are_over_all_rows(program, apart, monkeypatch):
    """Others are partial, and counted so; there only two rows of eight are left."""
    ran = []
    real = loop.verify_some_rows

    def observed(*arguments):
        found = real(*arguments)
        jax.debug.callback(lambda _: ran.append(1), found.tokens)
        return found

    monkeypatch.setattr(loop, "verify_some_rows", observed)
    session, state, ended = auto_state(apart)
    run = jax.jit(functools.partial(program, session.plan))
    look_ahead = jax.jit(functools.partial(loop.look_ahead, session.plan))
    for forced in (-1, 0):
        policy = state.policy.replace(forced=jnp.full_like(state.policy.forced, forced))
        measures = bool(policy.measures)
        assert measures == (forced == 0)
        ran.clear()
        begun = state.replace(policy=policy)
        after, seen = run(session.params, begun, ended, jnp.int32(2), jnp.int32(9))
        jax.effects_barrier()
        policy = after.policy
        if program is loop.plain_step:
            policy, _ = look_ahead(session.params, after, seen.rounds.emitted, jnp.int32(9))
        assert int(policy.work.passes.sum()) == 2
        assert len(ran) == int(policy.work.partial) == (0 if measures else 2)


def test_partial_rounds_say_nothing_of_costs(apart):
    session, state, _ = auto_state(apart)
    widths = len(session.plan.widths)
    for partial in (0, 1):
        costs = LearnedCosts(CostFilter(np.ones(widths + 3), widths), None)
        begun = costs.begin(state)
        work = begun.policy.work.replace(
            passes=begun.policy.work.passes.at[0].add(4), partial=jnp.int32(partial)
        )
        begun = begun.replace(policy=begun.policy.replace(work=work))
        costs._since = 3.0
        after = costs.after_step(begun, 40.0)
        assert costs._since == (43.0 if partial else 0.0)
        changed = float(costs.estimate.seconds[0]) != 1.0
        assert changed == (not partial)
        assert int(after.policy.work.partial) == 0


def test_an_engine_with_few_requests_gives_what_they_give_alone(apart):
    """Rows come and go, so that passes over some rows and over all follow each other."""
    engine = specjax.Engine(apart, drafter=NGRAM, batch_size=8, max_length=256)
    alone, got = {}, {}
    for number, (prompt, new) in enumerate(zip(PROMPTS * 2, NEW * 2, strict=True)):
        params = greedy(max_new_tokens=new)
        engine.add(prompt, params, id=number)
        if number % 5 == 4:
            for _ in range(3):
                got |= {one.id: one.output for one in engine.step() if one.output is not None}
        alone[number] = (prompt, params)
    got |= {one.id: one.output for one in engine if one.output is not None}
    for number, (prompt, params) in alone.items():
        (wanted,) = decode(apart, [prompt], sampling=params).token_ids
        assert got[number].token_ids == wanted
