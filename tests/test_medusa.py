"""Medusa heads in the decoding loop: exact, and always at the state that a fresh prefill gives."""

import numpy as np
import pytest
from conftest import row_count, slow
from decoding import (
    PROMPTS,
    accepted_lengths,
    changed,
    coupled,
    first_state,
    make_call,
    mixed,
    observed,
    rounds,
)
from test_decoder import one_pass
from tiny_models import SOME, medusa_head, small_model

from specjax.drafters import head_drafter
from specjax.errors import InputError
from specjax.testing import check_drafter

FORMS = {
    "shared": dict(original_lm_head=True, ids=SOME),
    "own": dict(original_lm_head=False, num_layers=2),
    "projected": dict(projection=True, ids=SOME),
}


# As trees in test_tree_drafters, and as any heads that start from features in test_pair_heads.
@pytest.mark.parametrize(
    ("form", "length"),
    slow(("shared", 5), ("projected", 3), ("own", 2)),
)
def test_coupled_and_greedy_rows_are_those_of_plain_decoding(form, length, tiny):
    drafter = head_drafter(medusa_head(tiny, **FORMS[form]), tiny)
    got = coupled(tiny, drafter, num_speculative_tokens=length)
    assert got.token_ids == coupled(tiny, batch_size=1).token_ids
    # There are three heads, whatever is asked for.
    assert got.drafted.max() == min(length, 3)
    participated = got.emitted > 0
    assert 0 < got.accepted[participated].sum() < got.drafted[participated].sum()
    # A prompt of one token has no feature to draft from.
    assert [row for row in range(8) if got.drafted[row, 0] == 0] == [0, 5]


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


def first_distribution_for_all(drafter):
    """The broken variant claims that every token was drawn from the first head's distribution."""

    def propose(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return draft.replace(logq_row=0 * draft.logq_row), state

    return changed(drafter, propose=propose)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        # Trees are in test_tree_drafters; distributions that are not the drafter's own are found as
        # in test_loop_distribution.
        *slow(("rejection", False), ("rejection", True), ("block", False)),
    ],
)
def test_the_distribution_is_the_targets(rule, broken):
    target, ids = small_model(8), np.arange(7, dtype=np.int32)
    head = medusa_head(target, heads=2, original_lm_head=False, spread=3.0, ids=ids)
    drafter = head_drafter(head, target)
    drafter = first_distribution_for_all(drafter) if broken else drafter
    check = check_drafter(drafter, target, row_count(20_000), verify=rule)
    assert check.passed != broken, check
    assert 1.2 < check.acceptance_length < 2.5
