import itertools
import json

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import metrics

# Two requests: the first drafts twice and once finds nothing to draft, the second is shorter and
# loses two tokens of its last pass to the end of the sequence.
DRAFTED = np.array([[3, 0, 3, 2], [3, 3, -1, -1]])
ACCEPTED = np.array([[3, 0, 1, 0], [0, 2, -1, -1]])
EMITTED = np.array([[4, 1, 2, 1], [1, 1, -1, -1]])
WIDTH = np.array([[4, 1, 4, 4], [4, 4, -1, -1]])


def test_pooled_numbers_by_hand():
    assert metrics.num_drafts(DRAFTED) == 5
    assert metrics.num_draft_tokens(DRAFTED) == 14
    assert metrics.num_accepted_tokens(ACCEPTED) == 6
    assert metrics.num_accepted_tokens_per_pos(DRAFTED, ACCEPTED) == (3, 2, 1)
    assert metrics.acceptance_length(ACCEPTED) == pytest.approx(12 / 6)
    assert metrics.tau_drafted(DRAFTED, ACCEPTED) == pytest.approx(11 / 5)
    assert metrics.acceptance_rate(DRAFTED, ACCEPTED) == pytest.approx(6 / 14)
    assert metrics.acceptance_at_pos(DRAFTED, ACCEPTED) == pytest.approx((3 / 5, 2 / 5, 1 / 5))
    assert metrics.cond_acceptance_at_pos(DRAFTED, ACCEPTED) == pytest.approx((3 / 5, 2 / 3, 1 / 2))
    assert metrics.tokens_per_round(EMITTED) == pytest.approx(10 / 6)
    assert metrics.accept_lengths(EMITTED) == [[4, 1, 2, 1], [1, 1]]


def test_requests_weigh_equally_in_per_request_means():
    assert metrics.per_request_mean(metrics.acceptance_length, ACCEPTED) == pytest.approx(2.0)
    rate = metrics.per_request_mean(metrics.acceptance_rate, DRAFTED, ACCEPTED)
    assert rate == pytest.approx((4 / 8 + 2 / 6) / 2)


def test_requests_without_a_value_leave_the_mean():
    drafted, accepted = np.array([[2], [0]]), np.array([[1], [0]])
    assert metrics.per_request_mean(metrics.acceptance_rate, drafted, accepted) == 0.5
    assert metrics.per_request_mean(metrics.acceptance_rate, drafted[1:], accepted[1:]) is None


def test_a_draft_that_ends_early_leaves_the_conditional_denominator():
    drafted, accepted = np.array([[3, 1]]), np.array([[3, 1]])
    assert metrics.acceptance_at_pos(drafted, accepted) == (1.0, 0.5, 0.5)
    assert metrics.cond_acceptance_at_pos(drafted, accepted) == (1.0, 1.0, 1.0)


def test_positions_are_the_longest_path_of_a_tree():
    drafted, accepted = np.array([[60, 60]]), np.array([[2, 0]])
    assert metrics.acceptance_at_pos(drafted, accepted, positions=3) == (0.5, 0.5, 0.0)


@st.composite
def counts(draw):
    """Consistent counts of up to 4 rows and 6 rounds, rows ending at different rounds."""
    rows, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    arrays = np.full((4, rows, rounds), -1)
    for row in range(rows):
        for column in range(draw(st.integers(0, rounds))):
            drafted = draw(st.integers(0, 5))
            accepted = draw(st.integers(0, drafted))
            arrays[:, row, column] = drafted, accepted, accepted + 1, drafted + 1
    return tuple(arrays)


@settings(deadline=None)
@given(counts())
def test_relations_between_the_numbers(run):
    drafted, accepted, emitted, width = run
    summary = metrics.summarize(drafted, accepted, emitted, width)
    assert summary.num_accepted_tokens == sum(summary.num_accepted_tokens_per_pos)
    assert summary.tokens_per_round == summary.acceptance_length  # nothing was truncated
    assert sum(map(sum, metrics.accept_lengths(emitted))) == summary.num_emitted_tokens
    assert sum(summary.rounds_by_width.values()) == summary.num_rounds
    if summary.num_drafts:
        rates = summary.acceptance_at_pos
        assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
        assert summary.tau_drafted == pytest.approx(1 + sum(rates))
        assert summary.tau_drafted >= summary.acceptance_length
    # JSON has no NaN: `allow_nan=False` refuses one.
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False)) == summary.to_dict()


@settings(deadline=None)
@given(counts(), st.integers(0, 40))
def test_truncating_keeps_exactly_the_kept_tokens(run, kept):
    drafted, accepted, emitted, width = run
    limit = np.full(len(drafted), kept)
    truncated = metrics.truncate_rounds(drafted, accepted, emitted, width, limit)
    totals = np.maximum(emitted, 0).sum(axis=1)
    np.testing.assert_array_equal(np.maximum(truncated[2], 0).sum(axis=1), np.minimum(totals, kept))
    stays = truncated[2] >= 0
    np.testing.assert_array_equal(stays, truncated[2] > 0)  # no pass stays that kept nothing
    for before, after in zip(run, truncated, strict=True):
        assert (after[~stays] == -1).all()
        assert (after[stays] <= before[stays]).all()
    assert (truncated[1][stays] <= truncated[2][stays]).all()
    again = metrics.truncate_rounds(*truncated, limit)
    for once, twice in zip(truncated, again, strict=True):
        np.testing.assert_array_equal(once, twice)
    assert metrics.summarize(*truncated).num_emitted_tokens == np.minimum(totals, kept).sum()


def test_the_truncated_pass_loses_tokens_and_keeps_its_cost():
    kept = np.array([6, 1])
    drafted, accepted, emitted, width = metrics.truncate_rounds(
        DRAFTED, ACCEPTED, EMITTED, WIDTH, kept
    )
    np.testing.assert_array_equal(emitted, [[4, 1, 1, -1], [1, -1, -1, -1]])
    np.testing.assert_array_equal(accepted, [[3, 0, 1, -1], [0, -1, -1, -1]])
    np.testing.assert_array_equal(drafted, [[3, 0, 3, -1], [3, -1, -1, -1]])
    np.testing.assert_array_equal(width, [[4, 1, 4, -1], [4, -1, -1, -1]])


def test_summary_of_plain_decoding():
    zeros = np.zeros((2, 5), int)
    summary = metrics.summarize(zeros, zeros, zeros + 1, np.ones(5, int))
    assert summary.acceptance_length == summary.tokens_per_round == summary.mean_width == 1.0
    assert summary.acceptance_rate is summary.tau_drafted is None
    assert summary.acceptance_at_pos == ()


def test_summary_of_no_rounds_has_no_nan():
    empty = np.zeros((0, 0), int)
    summary = metrics.summarize(empty, empty, empty, empty)
    assert summary.acceptance_length is None
    json.dumps(summary.to_dict(), allow_nan=False)


def test_one_width_per_round_serves_all_rows_that_participated():
    by_round = metrics.summarize(DRAFTED, ACCEPTED, EMITTED, np.array([4, 1, 4, 4]))
    assert by_round.rounds_by_width == {1: 2, 4: 4}
    by_row = metrics.summarize(DRAFTED, ACCEPTED, EMITTED, WIDTH)
    assert by_row.rounds_by_width == {1: 1, 4: 5}
    assert by_row.mean_width == pytest.approx(21 / 6)
    assert by_row.to_dict()["rounds_by_width"] == {"1": 1, "4": 5}


def test_numbers_of_a_line_that_llama_cpp_prints():
    accepted = np.repeat([3, 2, 1, 0], [42, 13, 15, 17])[None]
    drafted = np.full_like(accepted, 3)
    drafted[:, -2:] = 2
    summary = metrics.summarize(drafted, accepted, accepted + 1, np.full_like(drafted, 4))
    assert (summary.num_accepted_tokens, summary.num_draft_tokens) == (167, 259)
    assert round(summary.acceptance_rate, 3) == 0.645
    assert round(summary.tau_drafted, 2) == 2.92
    assert [round(one, 3) for one in summary.acceptance_at_pos] == [0.805, 0.632, 0.483]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accepted": DRAFTED, "drafted": ACCEPTED}, "accepted exceeds drafted"),
        ({"emitted": np.maximum(EMITTED, 0)}, "emitted and drafted are padded"),
    ],
)
def test_counts_that_do_not_fit_are_refused(changed, message):
    run = {"drafted": DRAFTED, "accepted": ACCEPTED, "emitted": EMITTED, "width": WIDTH} | changed
    with pytest.raises(ValueError, match=message):
        metrics.summarize(**run)


def test_expected_acceptance_ignores_padding():
    overlaps = np.array([[[0.5, 0.7], [np.nan, -1.0]], [[0.9, -1.0], [-1.0, -1.0]]])
    result = metrics.expected_acceptance(overlaps)
    assert result.num_nodes == 3
    assert result.mean == pytest.approx(0.7)
    assert result.decision_error == pytest.approx(np.sqrt(0.25 + 0.21 + 0.09) / 3)
    assert metrics.expected_acceptance(overlaps[:1]).standard_error is None
    nothing = metrics.expected_acceptance(np.full((2, 3), -1.0))
    assert nothing == metrics.ExpectedAcceptance(None, None, None, 0)


def test_errors_describe_repeated_runs():
    rng = np.random.default_rng(1)
    runs, rows, nodes = 2000, 40, 6
    level = rng.uniform(0.2, 0.8, (runs, rows, 1))  # nodes of a request resemble each other
    overlaps = level + rng.uniform(-0.2, 0.2, (runs, rows, nodes))
    results = [metrics.expected_acceptance(run) for run in overlaps]
    means = np.array([result.mean for result in results])
    claimed = np.mean([result.standard_error for result in results])
    assert claimed == pytest.approx(means.std(), rel=0.06)
    measured = (rng.uniform(size=overlaps.shape) < overlaps).mean(axis=(1, 2))
    claimed = np.mean([result.decision_error for result in results])
    assert claimed == pytest.approx((measured - means).std(), rel=0.06)


def test_predicted_speedup(monkeypatch):
    widths = np.array([[1, 4, 4, -1], [1, 4, -1, -1]])
    seconds = {1: 10.0, 4: 15.0, 8: 20.0}
    predicted = metrics.predicted_speedup(2.0, 10.0, 1.0, widths, seconds)
    assert predicted == pytest.approx(2.0 * 10 / (1 + (2 * 10 + 3 * 15) / 5))
    assert metrics.predicted_speedup(1.0, 10.0, 0.0, np.array([1, 1]), seconds) == 1.0
    assert metrics.predicted_speedup(1.0, 10.0, 0.0, np.array([-1]), seconds) is None
    with pytest.raises(ValueError, match="no entry for width 4"):
        metrics.predicted_speedup(2.0, 10.0, 1.0, widths, {1: 10.0})
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for arguments, said in (
        ((None, 10.0, 1.0, widths, seconds), "tokens_per_round=None: pass one number"),
        ((2.0, 10.0, 1.0, [1.5], seconds), r"widths are float64\[1\]: pass the width"),
        ((2.0, 10.0, 1.0, widths, [1.0]), r"seconds_of_width=\[1.0\]: pass seconds by width"),
    ):
        with pytest.raises(ValueError, match=said):
            metrics.predicted_speedup(*arguments)
