"""Drafters that attend to few of their own keys: which keys they see, and that they stay exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import refused
from conftest import row_count, slow
from decoding import (
    PROMPTS,
    changed,
    coupled,
    decode,
    draft_model,
    first_state,
    make_call,
    mixed,
    observed,
    rounds,
)
from test_decoder import CAPACITY, TOKENS, after_cache, causal, near, prefilled
from test_loop_cache import assert_holds
from test_pair_heads import assert_fresh
from tiny_models import block_head, eagle_head, mtp_head, small_model

from specjax import make_drafter
from specjax.core.cache import KVCache
from specjax.core.round import make_context
from specjax.drafters import head_drafter
from specjax.engine.requests import SamplingParams
from specjax.methods.draft_model.drafter import DraftModel
from specjax.models.config import SlidingWindow
from specjax.sampling import SharedNoise
from specjax.testing import Tabular, check_drafter

FEW = dict(sliding_window=5, sinks=2)
NEW = 16


def with_window(model, window):
    config = dataclasses.replace(model.config, sliding_window=window)
    return dataclasses.replace(model, config=config)


def drafter_of(name, tiny, similar, **options):
    options = {**FEW, **options}
    if name == "draft_model":
        return draft_model(similar, **options)
    head = {
        "eagle3": lambda: eagle_head(tiny, spread=0.3),
        "mtp_2": lambda: mtp_head(tiny, spread=0.3, num_modules=2),
        "dflash": lambda: block_head(tiny, spread=0.3),
    }[name]()
    return head_drafter(head, tiny, **options)


@pytest.fixture(scope="module")
def plain(tiny):
    return coupled(tiny, None, NEW, batch_size=1)


@pytest.mark.parametrize(("size", "sinks"), [(3, 2), (40, 0), *slow((270, 3), (1, 0), (20, 290))])
def test_tokens_attend_to_the_first_and_the_latest_before_them(size, sinks, tiny):
    """On both sides of the edge of a block of keys, in the window and in the cache."""
    few = with_window(tiny, SlidingWindow(size, sinks=sinks))
    tokens = TOKENS.shape[1]
    position = np.arange(tokens)
    visible = (position > position[:, None] - size) | (position < sinks)
    visible = visible[None] & np.array(causal(tokens))
    every = np.broadcast_to(position, TOKENS.shape)
    empty = tiny.architecture.make_cache(len(TOKENS), CAPACITY)
    wanted = after_cache(tiny, empty, TOKENS, every, visible)
    committed, count = [0, 5, 290], 9
    cache, _ = prefilled(few, committed, (64, 7))
    for row, length in enumerate(committed):
        near(cache.k[:, row, :, :length], wanted.window.k[:, row, :, :length])
    rows = np.array(committed)[:, None] + np.arange(count)[None, :]
    got = after_cache(few, cache, np.take_along_axis(TOKENS, rows, axis=1), rows, causal(count))
    near(got.logits, np.take_along_axis(np.asarray(wanted.logits), rows[:, :, None], axis=1))


def distributions(call):
    """A function of two positions: a draft's log-probabilities if keys between had other values."""
    state = first_state(call)
    context = make_context(call.plan.loop, call.plan.params[0], state)
    drafter, params = call.plan.loop.drafter.parts[0], call.plan.params[1][0]
    own = observed(call, state)[0]

    noise = SharedNoise(lambda depth: jnp.zeros((1, call.plan.model.config.vocab_size)))

    @jax.jit
    def logq(first, last):
        def spoil(node):
            if not isinstance(node, KVCache):
                return node
            slots = jnp.arange(node.capacity).reshape(1, 1, 1, -1, 1)
            return node.replace(v=node.v + 3.0 * ((slots >= first) & (slots < last)))

        spoilt = jax.tree.map(spoil, own, is_leaf=lambda node: isinstance(node, KVCache))
        return drafter.propose(params, spoilt, context, noise)[0].logq

    return lambda first, last: np.asarray(logq(first, last))


@pytest.mark.parametrize("name", ["eagle3", *slow("draft_model", "mtp_2", "dflash")])
def test_drafts_depend_on_no_other_keys(name, tiny, similar):
    """Not on those between the sinks and the window; but on these, and on all without a window.

    A window that is longer than the row changes no bit.
    """
    options = dict(sampling=SamplingParams(temperature=0.8), num_speculative_tokens=2)
    few, every, longer = (
        distributions(
            make_call(
                tiny, PROMPTS[2:3], drafter=drafter_of(name, tiny, similar, **limits), **options
            )
        )
        for limits in (
            {},
            {"sliding_window": None, "sinks": 0},
            {"sliding_window": 64, "sinks": 0},
        )
    )
    np.testing.assert_array_equal(longer(0, 0), every(0, 0))
    # The oldest key that any token sees is the fifth before the last but one.
    length = len(PROMPTS[2])
    hidden = 2, length - 6
    np.testing.assert_array_equal(few(*hidden), few(0, 0))
    for seen in ((0, 1), (1, 2), (length - 4, length)):
        assert np.abs(few(*seen) - few(0, 0)).max() > 1e-4
    assert np.abs(every(*hidden) - every(0, 0)).max() > 1e-4


@pytest.mark.parametrize("name", ["draft_model", "eagle3", *slow("mtp_2", "dflash")])
def test_tokens_are_those_of_plain_decoding_and_states_those_of_a_fresh_prefill(
    name, tiny, similar, plain
):
    drafter = drafter_of(name, tiny, similar)
    options = dict(verify="coupled", sampling=mixed(max_new_tokens=NEW), num_speculative_tokens=2)
    call = make_call(tiny, PROMPTS, drafter=drafter, **options)
    counts = []
    for number, state in enumerate(rounds(call, first_state(call), counts)):
        if number > 3 or name == "dflash":
            continue
        if name != "draft_model":
            assert_fresh(call, state)
            continue
        few = with_window(similar, SlidingWindow(5, sinks=2))
        after = jnp.maximum(state.length - 2, 0)
        cache = observed(call, state)[0].cache
        assert_holds(cache, state.tokens, after, few.architecture, similar.params)
    for row, tokens in enumerate(plain.token_ids):
        begin = len(PROMPTS[row])
        assert state.tokens[row, begin : begin + len(tokens)].tolist() == tokens
    accepted = {int(each) for count in counts for each in count.accepted}
    assert {0, 1} <= accepted


@pytest.mark.parametrize("name", ["draft_model", *slow("eagle3", "mtp_2", "dflash")])
def test_rows_draft_as_they_do_alone(name, tiny, similar):
    options = dict(
        drafter=drafter_of(name, tiny, similar),
        sampling=mixed(max_new_tokens=NEW),
        num_speculative_tokens=2,
    )
    together = decode(tiny, PROMPTS, batch_size=4, **options)
    alone = decode(tiny, PROMPTS, batch_size=1, **options)
    assert together.token_ids == alone.token_ids
    for counts in ("drafted", "accepted", "emitted"):
        np.testing.assert_array_equal(getattr(together, counts), getattr(alone, counts))


def test_heads_attend_to_as_many_tokens_as_the_rows_that_they_were_trained_on(tiny):
    untrained = eagle_head(tiny, spread=0.3)
    head = dataclasses.replace(untrained, training={"config": {"row_tokens": 64}})
    by_default, every = head_drafter(head, tiny), head_drafter(head, tiny, sliding_window=None)
    windows = [by_default, every, head_drafter(head, tiny, sliding_window=7)]
    windows.append(head_drafter(untrained, tiny))
    assert [one.drafter.sliding_window for one in windows] == [64, None, 7, None]


def small_drafter(target, **options):
    """The target itself, over few of its keys."""
    return draft_model(target, **{"sliding_window": 2, "sinks": 1, **options})


@pytest.mark.parametrize("rule", ["rejection", *slow("block")])
def test_sampled_drafts_keep_the_distribution(rule):
    target = small_model(8)
    drafter = small_drafter(target)
    check = check_drafter(drafter, target, row_count(12_000), prompt=(1, 2, 3, 1, 2), verify=rule)
    assert check.passed, check
    assert 1.4 < check.acceptance_length < 2.9


def test_the_distribution_over_all_keys_is_found():
    """A broken variant: a draft over few keys counts as drawn from the distribution over all."""
    target = small_model(8)
    few, everything = small_drafter(target), draft_model(target, num_speculative_tokens=1)

    def propose(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        claimed, _ = everything.drafter.propose(params, state, context, noise)
        return draft.replace(logq=claimed.logq), state

    broken = changed(few, propose=propose)
    options = dict(prompt=(1, 2, 3, 1, 2), num_speculative_tokens=1)
    assert not check_drafter(broken, target, row_count(12_000), **options).passed


def test_what_cannot_be_is_refused(tiny, similar):
    refused(
        lambda: draft_model(with_window(similar, SlidingWindow(8)), sliding_window=4),
        "drafter.sliding_window=4: the draft model has layers with windows of 8 tokens; leave it",
    )
    refused(
        lambda: DraftModel(Tabular(8), sliding_window=4),
        "drafter.sliding_window=4: the draft model is no decoder; leave it out",
    )
    refused(
        lambda: make_drafter("draft_model", tiny, similar, sinks=4),
        "drafter.sinks=4: sinks are kept in addition to a window; "
        "set drafter.sliding_window too, or leave sinks out",
    )
