"""Medusa heads in the decoding loop: exact, and always at the state that a fresh prefill gives."""

import numpy as np
import pytest
from decoding import (
    PROMPTS,
    accepted_lengths,
    first_state,
    make_call,
    mixed,
    observed,
    rounds,
)
from test_decoder import one_pass
from tiny_models import medusa_head

from specjax.drafters import head_drafter
from specjax.errors import InputError


def test_as_many_tokens_as_heads_by_default(tiny):
    drafter = head_drafter(medusa_head(tiny), tiny, draft_sample_method="greedy")
    assert drafter.drafter.num_speculative_tokens == 3
    assert not drafter.drafter.sampled
    with pytest.raises(InputError, match=r"draft_p_min=1\.0"):
        head_drafter(medusa_head(tiny), tiny, draft_p_min=1.0)


def assert_fresh(call, state):
    """The state, with what waits to be observed, is the true feature of the last token but one."""
    tokens = np.asarray(state.tokens)
    features = one_pass(call.plan.model, tokens, features=("final_norm",)).features
    known = np.maximum(np.asarray(state.length) - 2, 0)
    wanted = np.asarray(features["final_norm"])[np.arange(len(known)), known]
    # A finished row's feature is not read any more, and a row of one token has none.
    read = np.asarray(state.active & (state.length > 1))
    got = np.asarray(observed(call, state)[0].feature)
    np.testing.assert_allclose(got[read], wanted[read], atol=3e-5, rtol=1e-4)


def test_the_state_equals_a_fresh_one_after_every_round(tiny):
    drafter = head_drafter(medusa_head(tiny, spread=0.3), tiny)
    requests = mixed(max_new_tokens=14)
    call = make_call(tiny, PROMPTS, drafter=drafter, sampling=requests)
    before = first_state(call)
    assert_fresh(call, before)
    counts = []
    for state in rounds(call, before, counts):
        assert_fresh(call, state)
        late, before = (
            state.replace(
                drafter=before.drafter, features=before.features, status=0 * state.status
            ),
            state,
        )
    # The comparison finds a feature of another position.
    with pytest.raises(AssertionError):
        assert_fresh(call, late)
    assert {0, 1, 2, 3} <= accepted_lengths(counts)
