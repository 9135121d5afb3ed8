"""After every round each cache equals a fresh prefill of the tokens that it declares."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import (
    PROMPTS,
    columns,
    draft_model,
    first_state,
    make_call,
    mixed,
    observed,
    rounds,
)

from specjax.core.none import NoDrafter
from specjax.core.prefill import prefill


def fresh(model, params, tokens, lengths, capacity):
    cache = model.make_cache(len(tokens), capacity)
    program = jax.jit(prefill, static_argnums=(0, 5))
    return program(model, params, tokens, lengths, cache, (64,))[0]


def assert_holds(cache, tokens, lengths, model, params):
    """The cache holds exactly the first `lengths` tokens of each row."""
    np.testing.assert_array_equal(cache.length, lengths)
    wanted = fresh(model, params, tokens, lengths, cache.capacity)
    held = (jnp.arange(cache.capacity)[None, :] < lengths[:, None])[None, :, None, :, None]
    for got, want in ((cache.k, wanted.k), (cache.v, wanted.v)):
        got, want = jnp.where(held, got, 0), jnp.where(held, want, 0)
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)


def assert_caches(call, state, draft=None, part=0):
    tokens, length = state.tokens, state.length
    target, params = call.plan.loop.target, call.plan.params[0]
    assert_holds(state.cache, tokens, length - 1, target, params)
    if draft is not None:
        after = jnp.maximum(length - 2, 0)
        cache = observed(call, state)[part].cache
        assert_holds(cache, tokens, after, draft.architecture, draft.params)


@pytest.fixture(scope="module")
def laddered(tiny, similar):
    """A call, its states, and counts of the rounds between them; rows end one by one.

    With all rows running nothing may be drafted; then, as rows finish, two, then three.
    """
    sampling = [
        request.__class__(temperature=1.0, max_new_tokens=3 + 2 * row)
        for row, request in enumerate(mixed())
    ]
    call = make_call(
        tiny,
        PROMPTS,
        drafter=draft_model(similar),
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=((8, 8, 0), (5, 7, 2)),
        sampling=sampling,
    )
    counts, state = [], first_state(call)
    return call, [state, *rounds(call, state, counts)], columns(counts)


def test_a_draft_cache_follows_rounds_without_a_draft(laddered, similar):
    call, states, counts = laddered
    for state in states[1:]:
        assert_caches(call, state, similar)
    assert set(counts.drafted.ravel().tolist()) == {-1, 0, 1, 2, 3}


def one_too_many(cache):
    """A slot more than was committed."""
    return cache.replace(length=cache.length + 1)


def from_another_slot(cache):
    """The last token that was committed has the keys and values of the one before."""
    rows, last = np.arange(len(cache.length)), cache.length - 1
    k, v = (
        part.at[:, rows, :, last].set(part[:, rows, :, last - 1]) for part in (cache.k, cache.v)
    )
    return cache.replace(k=k, v=v)


@pytest.mark.parametrize("broken", [one_too_many, from_another_slot])
def test_broken_commits_are_found(broken, laddered, similar):
    """Of the target, and of the draft model."""
    call, states, counts = laddered
    # After the first round that accepted a draft.
    state = states[1 + int(np.argmax((counts.accepted > 0).any(axis=0)))]
    with pytest.raises(AssertionError):
        assert_caches(call, state.replace(cache=broken(state.cache)))
    (part,) = state.drafter
    own = part.replace(drafter=part.drafter.replace(cache=broken(part.drafter.cache)))
    with pytest.raises(AssertionError):
        assert_caches(call, state.replace(drafter=(own,)), similar)


def drafted_keys(call, state):
    """The draft model's keys, rows first, once it has observed all."""
    return np.moveaxis(observed(call, state)[0].cache.k, 1, 0)


def test_finished_rows_freeze(laddered):
    call, states, _ = laddered
    for before, state in itertools.pairwise(states[1:]):
        done = np.asarray(before.status) != 0
        for old, new in (
            (before.tokens, state.tokens),
            (before.length, state.length),
            (before.status, state.status),
            (before.cache.length, state.cache.length),
            (np.moveaxis(before.cache.k, 1, 0), np.moveaxis(state.cache.k, 1, 0)),
            (drafted_keys(call, before), drafted_keys(call, state)),
        ):
            np.testing.assert_array_equal(np.asarray(old)[done], np.asarray(new)[done])
        assert (np.asarray(state.round > before.round) == ~done).all()


def test_plain_decoding_is_the_loop_without_drafts(tiny):
    plain = make_call(tiny, PROMPTS, drafter=NoDrafter(), sampling=mixed(max_new_tokens=4))
    assert plain.plan.loop.widths == (1,)
    state = first_state(plain)
    assert len(list(rounds(plain, state))) == 4
