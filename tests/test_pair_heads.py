"""EAGLE heads and MTP modules in the loop: exact, and at the state that a fresh prefill gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import (
    PROMPTS,
    accepted_lengths,
    changed,
    first_state,
    make_call,
    mixed,
    observed,
    rounds,
)
from test_decoder import one_pass
from tiny_models import eagle_drafter, eagle_head, mtp_drafter

from specjax.core.drafter import Accepted
from specjax.core.round import make_context
from specjax.drafters import head_drafter
from specjax.errors import InputError

FORMS = {
    "eagle": dict(version=1),
    "eagle_bias_reduced": dict(version=1, fc_bias=True, vocabulary=40),
    "eagle3": dict(),
    "eagle3_reduced": dict(vocabulary=40),
    "eagle3_flags": dict(
        vocabulary=40,
        norm_before_residual=True,
        norm_before_fc=True,
        fc_norm=True,
        norm_output=True,
        own_embedding=True,
    ),
    "eagle3_borrowed": dict(vocabulary=40, own_head=False, num_kv_heads=4),
    "mtp": dict(),
    "mtp_2": dict(num_modules=2, vocabulary=40, concat="hidden_first", zero_first_embedding=True),
    "mtp_3": dict(num_modules=3, hidden="pre_norm", recursion="raw"),
}


def drafter_of(form, target, **options):
    make = mtp_drafter if form.startswith("mtp") else eagle_drafter
    return make(target, **{**FORMS[form], **options})


@functools.partial(jax.jit, static_argnums=(0, 1))
def observe_all(plan, drafter, target_params, params, features, state):
    context = make_context(plan, target_params, state)
    following = jnp.pad(state.tokens[:, 1:], ((0, 0), (0, 1)))
    count = jnp.maximum(state.length - 1, 0)
    empty = drafter.init(params, *state.tokens.shape)
    return drafter.observe(params, empty, context, Accepted(following, count, features))


def fresh(call, state, part):
    """The drafter's state, made anew from the tokens that are committed."""
    drafter, params = call.plan.loop.drafter.parts[part], call.plan.params[1][part]
    tokens = np.asarray(state.tokens)
    features = one_pass(call.plan.model, tokens, features=drafter.features).features
    return observe_all(call.plan.loop, drafter, call.plan.params[0], params, features, state)


def assert_fresh(call, state, part=0, got=None):
    """With what waits to be observed, caches and outputs are what the committed tokens give."""
    wanted = fresh(call, state, part)
    assert_alike(state, observed(call, state)[part] if got is None else got, wanted)


def assert_alike(state, got, wanted):
    """Two states of a head after the committed tokens of `state`."""
    for module, (mine, theirs) in enumerate(zip(got.caches, wanted.caches, strict=True)):
        np.testing.assert_array_equal(mine.length, jnp.maximum(state.length - 1 - module, 0))
        held = jnp.arange(mine.capacity)[None, :] < mine.length[:, None]
        held = held[None, :, None, :, None]
        for one, other in ((mine.k, theirs.k), (mine.v, theirs.v)):
            np.testing.assert_allclose(
                jnp.where(held, one, 0), jnp.where(held, other, 0), atol=3e-5, rtol=1e-4
            )
    # A finished row's last output is not read any more.
    active = np.asarray(state.active)
    np.testing.assert_allclose(
        np.asarray(got.outputs)[active], np.asarray(wanted.outputs)[active], atol=3e-5, rtol=1e-4
    )


def call_of(tiny, drafter, new_tokens=14):
    options = dict(num_speculative_tokens=3, sampling=mixed(max_new_tokens=new_tokens))
    return make_call(tiny, PROMPTS, drafter=drafter, **options)


@pytest.mark.parametrize(
    "form", ["mtp_2", *slow("eagle3_flags", "eagle3_borrowed", "eagle", "mtp", "mtp_3")]
)
def test_the_state_equals_a_fresh_one_after_every_round(form, tiny):
    call = call_of(tiny, drafter_of(form, tiny, spread=0.3), new_tokens=24)
    state = first_state(call)
    assert_fresh(call, state)
    counts = []
    for state in rounds(call, state, counts):
        assert_fresh(call, state)
    assert {0, 1, 2, 3} <= accepted_lengths(counts)


def test_features_that_are_observed_late_are_found_out(tiny):
    """The broken variant reads what the round emitted, with the features of one position earlier.

    The round before it is one of the drafter above, whose program is compiled.
    """

    def late(real, params, state, context, accepted):
        moved = {name: jnp.roll(value, 1, axis=1) for name, value in accepted.features.items()}
        return real(params, state, context, accepted.replace(features=moved))

    drafter = drafter_of("mtp_2", tiny, spread=0.3)
    true, broken = call_of(tiny, drafter), call_of(tiny, changed(drafter, observe=late))
    state = next(rounds(true, first_state(true)))
    assert_fresh(true, state)
    with pytest.raises(AssertionError):
        assert_fresh(true, state, got=observed(broken, state)[0])


def test_options_are_checked(tiny):
    with pytest.raises(InputError, match=r"draft_p_min=1.5: use a number in \[0, 1\)"):
        head_drafter(eagle_head(tiny), tiny, draft_p_min=1.5)
