"""Deliberately broken variants in the matrix: each fails the check that it belongs to.

What shows in few tokens only is in test_tree_distribution, and rules alone in enumerations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cells import (
    ROWS,
    Cell,
    Program,
    expected,
    joint_test,
    outputs_of,
    restarted,
    taken,
)
from conformance.checks import FEW, assert_cache, assert_outputs
from conformance.methods import LENGTH, VOCAB, drafter
from decoding import Deciding, changed

from specjax import sampling
from specjax.core.drafter import LoadedDrafter
from specjax.drafters import take_turns
from specjax.sampling import RULES, Decision


def program_of(method, topology, rule, **functions):
    """Return the program of a cell whose drafter has other functions."""
    turns, params = drafter(method, topology)
    made = changed(LoadedDrafter(turns.parts[0], params[0]), **functions)
    return Program.of(take_turns(made), RULES[rule] if isinstance(rule, str) else rule)


def one_distribution_late(real, params, state, context, noise):
    """Each node names the distribution of another one."""
    draft, state = real(params, state, context, noise)
    return draft.replace(logq_row=(draft.logq_row + 1) % draft.logq.shape[1]), state


def claimed(real, params, state, context, noise):
    """The likeliest tokens count as drawn from their distributions."""
    draft, state = real(params, state, context, noise)
    rows = jnp.maximum(draft.logq_row, 0)[:, :, None]
    likeliest = jnp.argmax(jnp.take_along_axis(draft.logq, rows, axis=1), axis=2)
    return draft.replace(tokens=likeliest.astype(jnp.int32)), state


def uniformly_drawn(real, params, state, context, noise):
    """Copied tokens count as drawn from a uniform distribution."""
    draft, state = real(params, state, context, noise)
    step = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]), draft.tokens.shape)
    return draft.replace(logq=jnp.full((*step.shape, VOCAB), -jnp.log(VOCAB)), logq_row=step), state


def shortened(real, params, state, context, noise):
    """A draft ends before a token that turned out to be unlikely."""
    draft, state = real(params, state, context, noise)
    rows = jnp.maximum(draft.logq_row, 0)[:, :, None]
    own = jnp.take_along_axis(draft.logq, rows, axis=1)
    own = jnp.take_along_axis(own, draft.tokens[:, :, None], axis=2)[..., 0]
    likely = jnp.cumprod(own > jnp.log(0.3), axis=1).astype(bool)
    return draft.replace(valid=draft.valid & likely), state


def residual_is_p(tokens, num_valid, target, draft, uniforms):
    accepted, _ = sampling.rejection(tokens, num_valid, target, draft, uniforms)
    return Decision(accepted, target(accepted))


@pytest.mark.parametrize(
    ("method", "topology", "rule", "propose"),
    [
        ("draft_model", "chain", "rejection", one_distribution_late),
        ("draft_model", "chain", "block", claimed),
        ("draft_model", "chain", "rejection", shortened),
        ("draft_model", "chain", Deciding(residual_is_p), None),
        ("medusa", "static", "rejection", one_distribution_late),
        ("corpus", "chain", "rejection", uniformly_drawn),
    ],
)
def test_other_distributions_are_found(method, topology, rule, propose):
    program = program_of(method, topology, rule, propose=propose)
    found, _ = joint_test(program, FEW // 2)
    assert found.statistic > found.threshold, found


def features_of_the_position_before(real, params, state, context, accepted):
    moved = {name: jnp.roll(value, 1, axis=1) for name, value in accepted.features.items()}
    return real(params, state, context, accepted.replace(features=moved))


def prompts_alone(real, params, state, context, accepted):
    return real(params, state, context, accepted) if accepted.tokens.shape[1] > 9 else state


@pytest.mark.parametrize(
    ("method", "observe"),
    [("eagle3", features_of_the_position_before), ("draft_model", prompts_alone)],
)
def test_states_that_do_not_follow_are_found(method, observe):
    """Tokens are right; rows that are put back draft otherwise than those that stayed."""
    program = program_of(method, "chain", "coupled", observe=observe)
    state = program.start(expected()[0])
    assert_outputs(*program.run(state), "coupled")
    for _ in range(3):
        state, _ = program.run(state, 1)
    assert_cache(state)
    _, stayed = program.run(state)
    _, again = program.run(restarted(program, state))
    assert (stayed.accepted != again.accepted).any()


def of_the_neighbour(real, params, state, context, noise):
    """A row drafts as far as its neighbour's draft has even tokens."""
    draft, state = real(params, state, context, noise)
    even = jnp.cumprod(jnp.roll(draft.tokens, 1, axis=0) % 2 == 0, axis=1).astype(bool)
    return draft.replace(valid=draft.valid & even), state


def test_rows_that_look_at_each_other_are_found():
    program = program_of("draft_model", "chain", "coupled", propose=of_the_neighbour)
    state, counts = program.run(program.start(expected()[0]))
    assert_outputs(state, counts, "coupled")
    order, everyone = np.random.default_rng(1).permutation(ROWS), jnp.ones(ROWS, bool)
    _, other = program.run(program.start(taken(expected()[0], order, everyone)))
    assert (other.drafted != counts.drafted[order]).any()


def one_too_many(state):
    return state.replace(cache=state.cache.replace(length=state.cache.length + 1))


def from_another_slot(state):
    cache, rows, last = state.cache, np.arange(ROWS), state.cache.length - 1
    moved = {
        name: part.at[:, rows, :, last].set(part[:, rows, :, last - 1])
        for name, part in (("k", cache.k), ("v", cache.v))
    }
    return state.replace(cache=cache.replace(**moved))


def an_output_too_long(state):
    tokens = state.tokens.at[jnp.arange(ROWS), state.length].set(0)
    return state.replace(tokens=tokens, length=state.length + 1)


def test_wrong_caches_and_ends_are_found():
    program = Cell("ngram", "chain", "coupled").program
    first = program.start(expected()[0])
    state, _ = program.run(first, LENGTH)
    assert_cache(state)
    for change in (one_too_many, from_another_slot):
        with pytest.raises(AssertionError):
            assert_cache(change(state))
    last, counts = program.run(first)
    assert_outputs(last, counts, "coupled")
    with pytest.raises(AssertionError):
        assert_outputs(an_output_too_long(last), counts, "coupled")
    swapped = last.replace(tokens=jnp.roll(last.tokens, 1, axis=0))
    assert outputs_of(swapped) != outputs_of(last)
    with pytest.raises(AssertionError):
        assert_outputs(jax.block_until_ready(swapped), counts, "coupled")
