"""Passes over the rows that have not finished alone: the rest of a batch costs no arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import PROMPTS, decode, draft_model, first_state, greedy, make_session, mixed
from heads import eagle_drafter
from test_strict import copied_shapes, lowered

import specjax
from specjax.cache import CacheRows, KVCache
from specjax.decoding import loop
from specjax.decoding.engine.learned_costs import LearnedCosts
from specjax.decoding.generate import decode_session
from specjax.distributed import sharding
from specjax.draft_length.cost_filter import CostFilter
from specjax.drafters import TokenRecycling, make_drafter, take_turns
from specjax.drafters.lookup.ngram import Ngram
from specjax.loading.load import place_model, random_model
from specjax.models.config import SlidingWindow
from specjax.models.decoder import Form
from specjax.trees import DynamicTree

APART = Form("apart", "rows")
# Rows end one after the other.
NEW = (3, 18, 5, 24, 4, 2, 9, 13)
DRAFTERS = {
    "none": lambda model, other: None,
    "ngram": lambda model, other: Ngram(prompt_lookup_min=1),
    "draft_model": lambda model, other: draft_model(other),
    # It reads a feature of every slot of a pass.
    "token_recycling": lambda model, other: TokenRecycling(61),
    "eagle3": lambda model, other: eagle_drafter(model, spread=0.3),
    "eagle3_dynamic": lambda model, other: dynamic(eagle_drafter(model, spread=0.3)),
    "turns": lambda model, other: take_turns(
        Ngram(prompt_lookup_min=1), eagle_drafter(model, spread=0.3)
    ),
}


def dynamic(loaded):
    drafter = dataclasses.replace(
        loaded.drafter, tree=DynamicTree(2, 3, 5), num_speculative_tokens=3
    )
    return loaded._replace(drafter=drafter)


@pytest.fixture(scope="module")
def apart(tiny):
    return random_model(tiny.config, 0, dtype="float32", form=APART)


def session_of(model, drafter, *, rule="coupled", row_counts=None, **options):
    requests = [
        dataclasses.replace(one, max_new_tokens=new) for one, new in zip(mixed(), NEW, strict=True)
    ]
    options = dict(num_speculative_tokens=None if drafter is None else 3) | options
    session = make_session(
        model, PROMPTS, drafter=drafter, sampling=requests, verify=rule, batch_size=8, **options
    )
    if row_counts is None:
        return session
    return dataclasses.replace(
        session, plan=dataclasses.replace(session.plan, row_counts=row_counts)
    )


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("none", "coupled"),
        ("eagle3_dynamic", "coupled"),
        ("token_recycling", "rejection"),
        *slow(
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
    partial, whole = (
        decode_session(session_of(apart, drafter, rule=rule, row_counts=counts))
        for counts in (None if name == "none" else (2, 4), ())
    )
    assert partial.token_ids == whole.token_ids
    for part in ("drafted", "accepted", "emitted", "first_round"):
        np.testing.assert_array_equal(getattr(partial, part), getattr(whole, part))


@pytest.mark.parametrize("name", ["ngram", *slow("draft_model")])
def test_layers_with_a_window_know_their_rows_positions(name, unrelated):
    config = tiny_config(sliding_window=SlidingWindow(8, (True, False)))
    model = random_model(config, 0, dtype="float32", form=APART)
    drafter = DRAFTERS[name](model, unrelated)
    partial, whole = (
        decode_session(session_of(model, drafter, row_counts=counts)) for counts in ((2, 4), ())
    )
    assert partial.token_ids == whole.token_ids


def broken_take(cache, rows):
    """The first rows of the cache, whichever are asked for."""
    return CacheRows(cache.k, cache.v, jnp.arange(len(rows)), cache.length[rows])


def broken_argsort(x, **options):
    """The rows as they lie, also those that have finished."""
    del options
    return jnp.arange(len(x))


@pytest.mark.parametrize(
    ("place", "name", "broken", "own"),
    # Programs are kept by their plan: ones that no other test has.
    [(KVCache, "take", broken_take, (3, 4)), (loop.jnp, "argsort", broken_argsort, (1, 3))],
)
def test_broken_variants_fail(place, name, broken, own, apart, monkeypatch):
    drafter = Ngram(prompt_lookup_min=1)
    plain = decode_session(session_of(apart, drafter, row_counts=()))
    monkeypatch.setattr(place, name, broken)
    got = decode_session(session_of(apart, drafter, row_counts=own))
    assert got.token_ids != plain.token_ids


def test_which_batches_have_them(apart, tiny):
    counts = lambda session: session.plan.row_counts  # noqa: E731
    drafter = Ngram(prompt_lookup_min=1)
    assert counts(session_of(apart, None)) == (2, 4)
    assert counts(session_of(apart, drafter)) == (4,)
    assert counts(session_of(apart, drafter, num_speculative_tokens="auto")) == (4,)
    auto = session_of(apart, drafter, num_speculative_tokens="auto")
    assert auto.plan.without_drafts.row_counts == (2, 4)
    assert counts(session_of(tiny, drafter)) == ()
    assert session_of(tiny, drafter).plan.without_drafts.row_counts == ()
    assert counts(make_session(apart, PROMPTS[:3], sampling=greedy())) == (1,)
    assert counts(make_session(apart, PROMPTS[:1], sampling=greedy())) == ()
    mesh = sharding.make_mesh(2, 1, jax.devices()[:2])
    assert counts(session_of(place_model(apart, mesh), None)) == ()


@pytest.mark.usefixtures("as_shipped")
def test_the_cache_is_read_where_it_lies():
    shape = dict(hidden_size=26, intermediate_size=42, vocab_size=67)
    model = random_model(tiny_config(**shape), 0, dtype="float32", form=APART)
    session = make_session(
        model,
        PROMPTS[:4],
        drafter=Ngram(prompt_lookup_min=1),
        sampling=mixed()[:4],
        num_speculative_tokens=3,
    )
    assert session.plan.row_counts == (2,)
    state, program = lowered(session)
    text = program.compile().as_text()
    layers, rows, *rest = state.cache.k.shape
    kept = {(layers, count, *rest) for count in (rows, *session.plan.row_counts)}
    kept |= {(count, *rest) for count in (rows, *session.plan.row_counts)}
    assert not copied_shapes(text) & kept
    # Some pass is over half of the rows.
    assert f"[{rows // 2},1,{model.config.vocab_size}]" in text


def auto_state(apart):
    session = session_of(apart, Ngram(prompt_lookup_min=1), num_speculative_tokens="auto")
    state = first_state(session)
    ended = np.ones(8, bool)
    ended[[2, 5]] = False
    return session, state, ended


@pytest.mark.parametrize("program", [loop.step, loop.plain_step])
def test_rounds_that_are_timed_are_over_all_rows(program, apart):
    """Others count as partial; there only two rows of eight are left."""
    session, state, ended = auto_state(apart)
    run = jax.jit(program, static_argnums=0)
    look_ahead = jax.jit(loop.look_ahead, static_argnums=0)
    for forced in (-1, 0):
        policy = state.policy.replace(forced=jnp.full_like(state.policy.forced, forced))
        measures = bool(policy.measures)
        assert measures == (forced == 0)
        after, seen = run(
            session.plan,
            session.params,
            state.replace(policy=policy),
            ended,
            jnp.int32(2),
            jnp.int32(9),
        )
        if program is loop.plain_step:
            policy, _ = look_ahead(
                session.plan, session.params, after, seen.rounds.emitted, jnp.int32(9)
            )
        else:
            policy = after.policy
        assert int(policy.work.passes.sum()) == 2
        assert int(policy.work.partial) == (0 if measures else 2)


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
        after = costs.after_step(begun, 40.0)
        changed = float(costs.estimate.seconds[0]) != 1.0
        assert changed == (not partial)
        assert int(after.policy.work.partial) == 0


def test_an_engine_with_few_requests_gives_what_they_give_alone(apart):
    """Rows come and go, so that passes over some rows and over all follow each other."""
    engine = specjax.Engine(apart, drafter="ngram", num_speculative_tokens=3, batch_size=8)
    alone, got = {}, {}
    for number, (prompt, new) in enumerate(zip(PROMPTS * 2, NEW * 2, strict=True)):
        params = greedy(max_new_tokens=new)
        engine.add(prompt, params, id=number)
        if number % 5 == 4:
            for _ in range(3):
                got |= {one.id: one.output for one in engine.step() if one.output is not None}
        alone[number] = (prompt, params)
    got |= {one.id: one.output for one in engine if one.output is not None}
    drafter = make_drafter("ngram", apart, num_speculative_tokens=3)
    for number, (prompt, params) in alone.items():
        (wanted,) = decode(
            apart,
            [prompt],
            drafter=drafter,
            num_speculative_tokens=3,
            sampling=params,
            max_length=600,
        ).token_ids
        assert got[number].token_ids == wanted
