"""What the parts of a round cost: measured by timed rounds, and corrected while decoding."""

import inspect
import types

import jax
import numpy as np
import pytest

from specjax.draft_length.cost_filter import CostFilter
from specjax.draft_length.cost_measurement import Measurement
from specjax.draft_length.policy import Work
from specjax.errors import InputError
from specjax.files import environment, measured_seconds

TRUE = np.array([1.0, 1.1, 1.2, 1.5, 0.2, 0.05])
"""Passes at four widths; a first draft token and a further one."""


def steps(rng, seconds, count):
    """Steps of the loop: how often each part ran, and how long all took, within 5 %."""
    for _ in range(count):
        ran = np.zeros(len(seconds))
        for _ in range(16):
            ran[rng.integers(4)] += 1
            drafted = rng.integers(0, 5)
            ran[4] += drafted > 0
            ran[5] += max(drafted - 1, 0)
        yield ran, ran @ seconds * rng.uniform(0.95, 1.05)


def test_costs_are_found_from_wrong_figures():
    estimate = CostFilter(TRUE * np.array([1, 1.5, 1.5, 1.5, 2, 2]), 4)
    for ran, seconds in steps(np.random.default_rng(0), TRUE, 300):
        estimate.update(ran, seconds)
    np.testing.assert_allclose(estimate.seconds[:4], TRUE[:4], rtol=0.15)
    np.testing.assert_allclose(estimate.seconds[4:], TRUE[4:], atol=0.1)


def test_a_machine_that_grows_slow_changes_what_did_not_run_too():
    estimate = CostFilter(TRUE, 4)
    for _ in range(60):
        estimate.update(np.array([16.0, 0, 0, 0, 0, 0]), 16 * 2.0)
    np.testing.assert_allclose(estimate.seconds[0], 2.0, rtol=0.05)
    assert (estimate.seconds > 1.5 * TRUE).all()


def test_a_longer_context_changes_what_ran():
    estimate = CostFilter(TRUE, 4)
    for _ in range(100):
        estimate.update(np.array([16.0, 0, 0, 0, 0, 0]), 16 * 1.0)
        estimate.update(np.array([4.0, 0, 0, 12, 12, 0]), 4 * 1.0 + 12 * (2.5 + 0.2))
    assert estimate.seconds[3] / estimate.seconds[0] > 2.1


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf"), 1e9, 1e-9])
@pytest.mark.parametrize("times", [1, 2])
def test_a_clock_that_jumps_is_forgotten(times, seconds):
    estimate = CostFilter(TRUE, 4)
    rng = np.random.default_rng(1)
    for ran, _ in steps(rng, TRUE, times):
        estimate.update(ran, seconds)
    assert np.isfinite(estimate.seconds).all()
    for ran, after in steps(rng, TRUE, 100):
        estimate.update(ran, after)
    np.testing.assert_allclose(estimate.seconds[:4], TRUE[:4], rtol=0.15)


@pytest.mark.parametrize("share", [3.0, 1 / 3])
def test_what_changes_for_good_is_believed_the_second_time(share):
    estimate = CostFilter(TRUE, 4)
    ran = np.array([0.0, 8, 8, 0, 16, 16])
    expected = ran @ TRUE
    estimate.update(ran, share * expected)
    once = ran @ estimate.seconds / expected
    assert 1 / 1.5 < once < 1.5
    estimate.update(ran, share * expected)
    np.testing.assert_allclose(ran @ estimate.seconds, share * expected, rtol=0.35)


def test_a_figure_whose_timings_disagree_is_corrected_alone():
    """One width came out at half its time by luck: the others are not to rise with it."""
    low = TRUE * np.array([1, 1, 1, 0.5, 1, 1])
    timed = CostFilter(low, 4, TRUE - low)
    unknown = CostFilter(low, 4)
    for estimate in (timed, unknown):
        for _ in range(2):
            estimate.update(np.array([0.0, 0, 0, 16, 16, 0]), 16 * (TRUE[3] + TRUE[4]))
    others = np.array([0, 1, 2])
    np.testing.assert_allclose(timed.seconds[others], TRUE[others], rtol=0.1)
    np.testing.assert_allclose(timed.seconds[3], TRUE[3], rtol=0.15)
    # Without them what did not run rises as well.
    assert unknown.seconds[0] > 1.05 * TRUE[0] > timed.seconds[0]


def test_a_wider_pass_is_never_cheaper():
    estimate = CostFilter([1.0, 0.5, 2.0, 0.0], 3)
    assert estimate.seconds[:3].tolist() == [1.0, 1.0, 2.0]
    assert (estimate.seconds > 0).all()


def test_one_slow_round_of_a_kind_does_not_change_what_is_measured():
    true = np.array([1.0, 1.1, 1.4, 0.2, 0.3, 0.05, 0.0, 0.7, 0.4])
    measurement = Measurement(3, (4, 4))
    kinds = timed(measurement, true)
    nothing = (0, 0)
    assert set(kinds) == {
        *((width, nothing) for width in range(3)),
        *((0, lengths) for lengths in ((4, 0), (1, 0), (0, 4), (0, 1))),
    }
    np.testing.assert_allclose(measurement.figures().seconds, true, atol=1e-9)
    np.testing.assert_allclose(measurement.figures().spread, 0.0, atol=1e-9)


def test_a_lookup_that_runs_twice_a_round_costs_no_more():
    """Before its draft, and after the round, to learn whether it has a further one."""
    true = np.array([1.0, 1.2, 1.7, 0.2, 0.1, 0.05, 0.0, 0.3, 0.4])
    measurement = Measurement(3, (4, 4))
    timed(measurement, true, runs=2)
    np.testing.assert_allclose(measurement.figures().seconds, true, atol=1e-9)


def test_what_was_not_caught_up_is_taken_to_cost_a_first_token():
    """And may well be off by as much; what is known of it stays."""
    true = np.array([1.0, 1.1, 1.4, 0.2, 0.3, 0.05, 0.0, 0.7, 0.4])
    measurement = Measurement(3, (4, 4))
    timed(measurement, true, late=False)
    figures = measurement.figures()
    np.testing.assert_allclose(figures.seconds[-2:], true[3:5], atol=1e-9)
    np.testing.assert_allclose(figures.spread[-2:], true[3:5], atol=1e-9)
    measurement = Measurement(3, (4, 4), true)
    timed(measurement, true, late=False)
    np.testing.assert_allclose(measurement.figures().seconds, true, atol=1e-9)


def test_a_drafter_that_could_not_run_is_not_taken_to_be_free():
    """No row had room for its drafts: what is guessed is corrected, and not kept."""
    true = np.array([2.0, 2.2, 2.8, 0.2, 0.3, 0.05, 0.1, 0.7, 0.4])
    measurement = Measurement(3, (4, 4))
    timed(measurement, true, found=(0, 4))
    figures = measurement.figures()
    assert not figures.complete
    np.testing.assert_allclose(figures.seconds[[3, 5, 7]], 0.5)
    np.testing.assert_allclose(figures.spread[[3, 5, 7]], 0.5)
    others = [0, 1, 2, 4, 6, 8]
    np.testing.assert_allclose(figures.seconds[others], true[others], atol=1e-9)
    measurement = Measurement(3, (0, 4))
    timed(measurement, true, found=(0, 4))
    assert measurement.figures().complete


@pytest.mark.parametrize("jump", [-50.0, float("nan"), float("inf")])
def test_readings_of_a_clock_that_jumps_do_not_count(jump):
    true = np.array([1.0, 1.1, 1.4, 0.2, 0.3, 0.05, 0.0, 0.7, 0.4])
    for known in (None, true):
        measurement = Measurement(3, (4, 4), known)
        timed(measurement, true, late=known is None, jump=jump)
        np.testing.assert_allclose(measurement.figures().seconds, true, atol=1e-9)
    measurement = Measurement(3, (4, 4))
    timed(measurement, 0 * true, jump=jump)
    with pytest.raises(InputError, match="says that a round takes 0 seconds.*use a whole number"):
        measurement.figures()


def test_kept_figures_are_of_one_machine_and_version(monkeypatch):
    """Also where machines share a home folder: JAX calls every CPU "cpu"."""
    device = jax.devices()[0]
    here = measured_seconds.seconds_file("x", device=device)
    assert here == measured_seconds.seconds_file("x", device=device)
    found = {here, measured_seconds.seconds_file("y", device=device)}
    other = types.SimpleNamespace(device_kind="another")
    found.add(inspect.unwrap(measured_seconds.seconds_file)("x", device=other))
    for name, value in (("cpu_model", "a CPU"), ("versions", {"specjax": "0.0"})):
        with monkeypatch.context() as patched:
            patched.setattr(measured_seconds, name, lambda value=value: value)
            found.add(measured_seconds.seconds_file("x", device=device))
    assert len(found) == 5
    assert environment.cpu_model()


def timed(measurement, true, found=(4, 1), *, late=True, runs=1, jump=7.0):
    """The kinds of rounds that were timed, each one's second by 7 too slow, or by a `jump`.

    The passes of `true` figures hold 1, 2 and 5 tokens; the drafters find so many at most, and
    where they are `late` read first what they missed while others were timed. They run `runs` times
    for one draft.
    """
    kinds = []
    ran = np.zeros(2, bool)
    while (kind := measurement.next) is not None:
        kinds.append(kind)
        drafted = np.minimum(kind.lengths, found)
        width = max(kind.narrowest, (0, 1, 2, 2, 2)[drafted.max()])
        missed = (drafted > 0) & ~ran & late
        ran = drafted > 0
        passes = np.eye(3, dtype=int)[width]
        work = Work(passes, runs * ran, np.maximum(drafted - 1, 0), 1 * missed, np.array(0))
        took = true @ work.counts()
        measurement.add(took + (jump if kinds.count(kind) == 2 else 0.0), work)
    return kinds


def test_a_drafter_is_not_believed_too_dear_for_good():
    """Of kept figures those of drafting are timed again, on a machine of another speed."""
    kept = np.array([1.0, 1.1, 1.4, 0.5, 0.1, 0.05, 0.0, 0.9, 0.4])
    now = 2 * np.array([1.0, 1.1, 1.4, 0.2, 0.3, 0.05, 0.0, 0.7, 0.4])
    measurement = Measurement(3, (4, 4), kept)
    kinds = timed(measurement, now)
    assert set(kinds) == {(0, lengths) for lengths in ((0, 0), (4, 0), (1, 0), (0, 4), (0, 1))}
    # What is believed too cheap is corrected by the rounds that it causes.
    want = 2 * np.array([1.0, 1.1, 1.4, 0.2, 0.1, 0.05, 0.0, 0.7, 0.4])
    np.testing.assert_allclose(measurement.figures().seconds, want, atol=1e-9)
    # A pass that takes less than was known is no reason to draft less, either.
    now = np.array([1.0, 1.05, 1.15, 0.1, 0.1, 0.05, 0.0, 0.3, 0.3])
    measurement = Measurement(3, (4, 4), np.array([1.0, 1.3, 2.2, 0.1, 0.1, 0.05, 0.0, 0.3, 0.3]))
    timed(measurement, now)
    _, narrow, wide, first, _, further, *_ = measurement.figures().seconds
    assert narrow + first == pytest.approx(now[1] + now[3])
    assert wide + first + 3 * further == pytest.approx(now[2] + now[3] + 3 * now[5])
    # Where nothing was drafted, what was known stays.
    measurement = Measurement(3, (4, 4), kept)
    timed(measurement, kept, found=(0, 1))
    np.testing.assert_allclose(measurement.figures().seconds, kept, atol=1e-9)
