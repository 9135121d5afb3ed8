"""Drafters that attend to few of their own keys: which keys they see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import refused
from conftest import slow
from decoding import (
    PROMPTS,
    draft_model,
    first_state,
    make_call,
    observed,
)
from test_decoder import CAPACITY, TOKENS, after_cache, causal, near, prefilled
from tiny_models import block_head, eagle_head, mtp_head

from specjax import make_drafter
from specjax.core.cache import KVCache
from specjax.core.round import make_context
from specjax.drafters import head_drafter
from specjax.engine.requests import SamplingParams
from specjax.methods.draft_model.drafter import DraftModel
from specjax.models.config import SlidingWindow
from specjax.sampling import SharedNoise
from specjax.testing import Tabular

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


def test_heads_attend_to_as_many_tokens_as_the_rows_that_they_were_trained_on(tiny):
    untrained = eagle_head(tiny, spread=0.3)
    head = dataclasses.replace(untrained, training={"config": {"row_tokens": 64}})
    by_default, every = head_drafter(head, tiny), head_drafter(head, tiny, sliding_window=None)
    windows = [by_default, every, head_drafter(head, tiny, sliding_window=7)]
    windows.append(head_drafter(untrained, tiny))
    assert [one.drafter.sliding_window for one in windows] == [64, None, 7, None]


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
