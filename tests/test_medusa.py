"""Medusa heads in the decoding loop: exact, and always at the state that a fresh prefill gives."""

import numpy as np
import pytest
from conftest import row_count, slow, tiny_config
from decoding import (
    PROMPTS,
    assert_ends,
    changed,
    columns,
    decode,
    first_state,
    make_session,
    mixed,
    observed,
    rounds,
)
from heads import SOME, medusa_head
from test_decoder import one_pass

from specjax.drafters import head_drafter
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.testing import check_drafter

NEW = 24
V = 61
FORMS = {
    "shared": dict(original_lm_head=True, ids=SOME),
    "own": dict(original_lm_head=False, num_layers=2),
    "projected": dict(projection=True, ids=SOME),
}


@pytest.fixture(scope="module")
def plain(tiny):
    options = dict(sampling=mixed(max_new_tokens=NEW), batch_size=1)
    return decode(tiny, PROMPTS, verify="coupled", **options)


# As trees in test_tree_drafters, and as any heads that start from features in test_pair_heads.
@pytest.mark.parametrize(
    ("form", "length"),
    slow(("shared", 5), ("projected", 3), ("own", 2)),
)
def test_coupled_and_greedy_rows_are_those_of_plain_decoding(form, length, tiny, plain):
    got = decode(
        tiny,
        PROMPTS,
        drafter=head_drafter(medusa_head(tiny, **FORMS[form]), tiny),
        verify="coupled",
        sampling=mixed(max_new_tokens=NEW),
        num_speculative_tokens=length,
    )
    assert got.token_ids == plain.token_ids
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


@pytest.mark.slow  # as of a draft model (test_loop_output_comparison)
def test_a_row_does_not_depend_on_its_neighbours(tiny, plain):
    drafter = head_drafter(medusa_head(tiny, ids=SOME), tiny, draft_p_min=0.06)
    request = dict(drafter=drafter, sampling=mixed(max_new_tokens=9))
    together = decode(tiny, PROMPTS, **request, batch_size=8)
    alone = decode(tiny, PROMPTS, **request, batch_size=1)
    assert together.token_ids == alone.token_ids
    for row in (0, 5):
        assert together.token_ids[row] == plain.token_ids[row][:9]
    drafted = set(together.drafted[together.emitted > 0].tolist())
    assert drafted == {0, 1, 2, 3}


@pytest.mark.slow  # as drafts of any kind (test_loop_output_comparison); states are compared above
def test_the_end_of_room_and_of_sequence(tiny):
    assert_ends(tiny, head_drafter(medusa_head(tiny, ids=SOME), tiny))


def assert_fresh(session, state):
    """The state, with what waits to be observed, is the true feature of the last token but one."""
    tokens = np.asarray(state.tokens)
    features = one_pass(session.model, tokens, features=("final_norm",)).features
    known = np.maximum(np.asarray(state.length) - 2, 0)
    wanted = np.asarray(features["final_norm"])[np.arange(len(known)), known]
    # A finished row's feature is not read any more, and a row of one token has none.
    read = np.asarray(state.active & (state.length > 1))
    got = np.asarray(observed(session, state)[0].feature)
    np.testing.assert_allclose(got[read], wanted[read], atol=3e-5, rtol=1e-4)


def test_the_state_equals_a_fresh_one_after_every_round(tiny):
    drafter = head_drafter(medusa_head(tiny, spread=0.3), tiny)
    requests = mixed(max_new_tokens=14)
    session = make_session(tiny, PROMPTS, drafter=drafter, sampling=requests)
    before = first_state(session)
    assert_fresh(session, before)
    counts = []
    for state in rounds(session, before, counts):
        assert_fresh(session, state)
        late, before = (
            state.replace(
                drafter=before.drafter, features=before.features, status=0 * state.status
            ),
            state,
        )
    # The comparison finds a feature of another position.
    with pytest.raises(AssertionError):
        assert_fresh(session, late)
    counts = columns(counts)
    participated = np.asarray(counts.emitted) > 0
    assert {0, 1, 2, 3} <= set(np.asarray(counts.accepted)[participated].tolist())


@pytest.fixture(scope="module")
def small():
    shape = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4)
    config = tiny_config(vocab_size=8, num_layers=2, max_positions=64, **shape)
    return random_model(config, 0, dtype="float32")


def first_distribution_for_all(drafter):
    """The broken variant claims that every token was drawn from the first head's distribution."""

    def propose(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return draft.replace(logq_row=0 * draft.logq_row), state

    return changed(drafter, propose=propose)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        # Of trees in test_tree_drafters.
        *slow(("rejection", False)),
        # As any distribution that is not the drafter's own (test_loop_distribution).
        *slow(("rejection", True), ("block", False)),
    ],
)
def test_the_distribution_is_the_targets(rule, broken, small):
    head = medusa_head(
        small, heads=2, original_lm_head=False, spread=3.0, ids=np.arange(7, dtype=np.int32)
    )
    drafter = head_drafter(head, small)
    drafter = first_distribution_for_all(drafter) if broken else drafter
    check = check_drafter(drafter, small, row_count(20_000), verify=rule)
    assert check.passed != broken, check
    assert 1.2 < check.acceptance_length < 2.5
