"""The warp against a plain sort-based one, and the identities of two distributions."""

import functools
import re

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings

from specjax.sampling import (
    WarpFlags,
    acceptance_probability,
    argmax,
    overlap,
    residual,
    top_k,
    warp,
)

VOCAB, ROWS = 9, 3
QUICK = settings(max_examples=150, deadline=None)

# A coarse grid, so that ties are common.
grid = st.sampled_from([-np.inf, -60.0, -3.0, -1.5, -1.0, -0.5, -0.0, 0.0, 0.25, 2.0, 4.0, 60.0])
logits_of = st.one_of(
    hnp.arrays(np.float64, (ROWS, VOCAB), elements=grid),
    hnp.arrays(
        np.float64, (ROWS, VOCAB), elements=st.floats(-30, 30, width=32, allow_subnormal=False)
    ),
)


def rows_of(elements):
    return st.lists(elements, min_size=ROWS, max_size=ROWS).map(np.array)


temperatures = rows_of(st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]))
top_ks = rows_of(st.integers(0, VOCAB + 2))
top_ps = rows_of(st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0]))
min_ps = rows_of(st.sampled_from([0.0, 0.03, 0.2, 0.6, 1.0]))


def reference(logits, temperature, top_k, top_p, min_p):
    """One row by sorting; None where rounding decides who is in."""
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(logits)]
    # Logits that rounding makes one there are one here.
    scores = (logits - logits.max()) / temperature
    kept = np.ones(VOCAB, bool)
    if top_k:
        kept &= scores >= np.sort(scores)[::-1][min(top_k, VOCAB) - 1]
    p = np.where(kept, np.exp(scores - scores.max()), 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order])
        if np.abs(mass - top_p).min() < 1e-9:
            return None
        last = order[np.argmax(mass >= top_p)]
        if np.any((np.abs(p - p[last]) < 1e-9 * p[last]) & (scores != scores[last])):
            return None
        kept &= p >= p[last]
        p = np.where(kept, p, 0)
    if np.abs(p / p.max() - min_p).min() < 1e-9 and 0 < min_p < 1:
        return None
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@functools.cache
def compiled(flags):
    return jax.jit(functools.partial(warp, flags=flags))


@QUICK
@given(logits_of, temperatures, top_ks, top_ps, min_ps)
@example(
    np.zeros((ROWS, VOCAB)), np.ones(ROWS), np.full(ROWS, 3), np.full(ROWS, 0.8), np.zeros(ROWS)
)
@example(
    np.tile([0.0, 1.0, *[2e-21] * (VOCAB - 2)], (ROWS, 1)),
    *map(np.full, [ROWS] * 4, (0.7, 2, 0.5, 0.0)),
)
def test_warp_is_the_sorted_one(logits, temperature, top_k, top_p, min_p):
    assume(np.all(logits.max(axis=1) > -np.inf))
    wanted = [reference(*row) for row in zip(logits, temperature, top_k, top_p, min_p, strict=True)]
    assume(all(row is not None for row in wanted))
    with jax.enable_x64(True):
        arguments = (logits, temperature, top_k, top_p, min_p)
        everything = np.asarray(compiled(WarpFlags())(*arguments))
        needed = np.asarray(compiled(WarpFlags.of(temperature, top_k, top_p, min_p))(*arguments))
    np.testing.assert_allclose(np.exp(everything), np.stack(wanted), atol=1e-12, rtol=1e-12)
    np.testing.assert_array_equal(everything > -np.inf, np.stack(wanted) > 0)
    np.testing.assert_allclose(needed, everything, atol=1e-12)


@QUICK
@given(logits_of, temperatures, top_ks, top_ps, min_ps)
def test_warp_makes_distributions_in_single_precision(logits, temperature, top_k, top_p, min_p):
    assume(np.all(logits.max(axis=1) > -np.inf))
    logits = logits.astype(np.float32)
    logp = np.asarray(compiled(WarpFlags())(logits, temperature, top_k, top_p, min_p))
    assert logp.dtype == np.float32
    assert not np.any(np.isnan(logp))
    np.testing.assert_allclose(np.exp(logp.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    # The likeliest token is always in, and nothing of probability 0 comes in.
    best = logits.argmax(axis=1)
    assert np.all(logp[np.arange(ROWS), best] > -np.inf)
    assert np.all(logp[logits == -np.inf] == -np.inf)


WARP = jax.jit(warp)


def test_greedy_is_the_first_argmax_beside_sampled_rows():
    logits = jnp.array([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0]])
    logp = WARP(logits, jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(logp[0], [-np.inf, 0.0, -np.inf])
    np.testing.assert_allclose(logp[1], jax.nn.log_softmax(logits[1]), rtol=1e-6)
    np.testing.assert_array_equal(WARP(logits, 0.0)[1], [-np.inf, 0.0, -np.inf])


@pytest.mark.parametrize(
    ("probabilities", "parameters", "kept"),
    [
        # Tokens that tie at a threshold are kept.
        ([1, 9, 3, 3, 3], (1.0, 2), [0, 1, 1, 1, 1]),
        ([1, 9, 3, 3, 3], (1.0, 0, 0.5), [0, 1, 1, 1, 1]),
        ([1, 9, 3, 3, 3], (1.0, 0, 0.3), [0, 1, 0, 0, 0]),
        # At temperature 0.5 the probabilities are (0.783, 0.196, 0.022): one token reaches 0.7.
        ([6, 3, 1], (0.5, 0, 0.7), [1, 0, 0]),
        ([6, 3, 1], (1.0, 0, 0.7), [1, 1, 0]),
        # 0.4 is less than 0.6, but after top-k it is everything.
        ([4, 2, 2, 2], (1.0, 1, 0.6), [1, 0, 0, 0]),
        # A tiny temperature makes no NaN.
        ([1, 2, 0, 2], (1e-30,), [0, 1, 0, 1]),
    ],
)
def test_tokens_that_are_kept(probabilities, parameters, kept):
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(probabilities, np.float32))
    p = np.exp(WARP(logits, *parameters))
    np.testing.assert_array_equal(p > 0, kept)
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)


def test_large_vocabulary_keeps_exactly_k():
    logits = jax.random.normal(jax.random.key(0), (2, 49152))
    for k in (1, 2, 50, 49151):
        logp = WARP(logits, 0.8, k)
        distinct = np.asarray(jnp.sort(logits, axis=-1)[:, -k])
        np.testing.assert_array_equal(logp > -np.inf, np.asarray(logits) >= distinct[:, None])


def test_types_and_shapes():
    assert warp(jnp.zeros(4, jnp.bfloat16), 1.0).dtype == jnp.float32
    assert warp(np.zeros((2, 3, 4), np.float32), jnp.ones((2, 3))).shape == (2, 3, 4)
    assert warp(jnp.full(4, -jnp.inf), 1.0).tolist() == [-np.inf] * 4
    with jax.enable_x64(True):
        assert warp(jnp.zeros(4), 1.0).dtype == jnp.float64


def test_bad_numbers_name_the_remedy():
    for name, value in (("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(ValueError, match=rf"{name}=.*: it must be"):
            warp(jnp.zeros(3), **{"temperature": 1.0, name: value})


def test_flags_say_what_some_row_asks_for():
    assert WarpFlags.of(0.0) == WarpFlags(True, False, False, False, False)
    mixed = WarpFlags.of(np.array([0.0, 1.0]), np.array([0, 5]), 1.0, np.array([0.0, 0.1]))
    assert mixed == WarpFlags(True, True, True, False, True)
    assert WarpFlags.of(jnp.zeros(1), jnp.zeros(1, int), jnp.ones(1), jnp.zeros(1)) == WarpFlags()


def program(platform="cpu", **flags):
    """Return the StableHLO of a warp for one row on a platform, with these flags alone."""
    logits, row = jnp.zeros((1, 64)), jnp.ones(1)
    off = dict.fromkeys(("greedy", "sampled", "top_k", "top_p", "min_p"), False)
    call = jax.jit(functools.partial(warp, flags=WarpFlags(**{**off, **flags})))
    traced = call.trace(logits, row, jnp.ones(1, int), row, row)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_what_no_row_asks_for_is_not_in_the_program():
    assert "exponential" not in program(greedy=True)
    assert "stablehlo.while" not in program(sampled=True)
    assert program(sampled=True, top_k=True).count("stablehlo.while") == 1
    assert program(sampled=True, top_p=True).count("stablehlo.while") == 1
    assert "sort" not in program(sampled=True, top_k=True, top_p=True, min_p=True)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_an_accelerator_waits_for_no_data(platform):
    accelerator, cpu = (
        program(name, sampled=True, top_k=True, top_p=True) for name in (platform, "cpu")
    )
    # Both have the choice of the platform, which compilers resolve; a CPU also skips searches.
    assert cpu.count("stablehlo.case") == accelerator.count("stablehlo.case") + 2
    trips = r"cond {\s*%\w+ = stablehlo.constant dense<(\d+)>"
    assert re.findall(trips, accelerator) == ["8", "8"]
    assert re.findall(trips, cpu) == ["31", "30"]


@functools.cache
def compiled_for_accelerators():
    return jax.jit(lambda *arguments: warp(*arguments, flags=WarpFlags()))


@QUICK
@given(logits_of, temperatures, top_ks, top_ps, min_ps, st.sampled_from([np.float32, np.float64]))
def test_four_bits_per_pass_find_what_one_bit_finds(
    logits, temperature, top_k, top_p, min_p, dtype
):
    with jax.enable_x64(dtype == np.float64), np.errstate(over="ignore"):
        arguments = jnp.asarray(logits, dtype), temperature, top_k, top_p, min_p
        one_bit = compiled(WarpFlags())(*arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x))
            four_bits = compiled_for_accelerators()(*arguments)
    np.testing.assert_array_equal(one_bit, four_bits)


@QUICK
@given(logits_of)
def test_argmax_is_the_first_largest(values):
    np.testing.assert_array_equal(jax.jit(argmax)(values), np.argmax(values.astype(np.float32), 1))


weights = hnp.arrays(
    np.float64, (VOCAB,), elements=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1))
).filter(lambda w: w.sum() > 0)


@QUICK
@given(weights, weights)
@example(np.ones(VOCAB), np.ones(VOCAB))
@example(np.eye(VOCAB)[0], np.eye(VOCAB)[1])
@example(np.eye(VOCAB)[0], np.eye(VOCAB)[0])
def test_identities_of_two_distributions(p, q):
    p, q = p / p.sum(), q / q.sum()
    with np.errstate(divide="ignore"), jax.enable_x64(True):
        logp, logq = jnp.asarray(np.log(p)), jnp.asarray(np.log(q))
        shared = float(overlap(logp, logq))
        accept = np.asarray(acceptance_probability(logp, logq))
        left = np.exp(np.asarray(residual(logp, logq)))
    assert shared == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=1e-12)
    assert (q * accept).sum() == pytest.approx(shared, abs=1e-12)
    assert left.sum() == pytest.approx(1)
    # Accepting, or else drawing from the residual, gives p: Leviathan et al., appendix A.1.
    np.testing.assert_allclose(q * accept + (1 - shared) * left, p, atol=1e-9)
    assert np.all(accept[p == 0] == 0)
    assert np.all(accept[(q == 0) & (p > 0)] == 1)


def test_residual_of_equal_distributions_is_the_distribution():
    logp = jnp.log(jnp.array([[0.2, 0.8, 0.0], [0.5, 0.0, 0.5]]))
    np.testing.assert_array_equal(residual(logp, logp), logp)


@pytest.mark.parametrize(("vocab", "count"), [(2000, 1), (2000, 7), (1990, 5), (300, 4), (5, 5)])
def test_the_largest_values_are_those_of_a_sort(vocab, count):
    """Few different values, so that many are equal; a row of nothing but -inf; one of a few."""
    values = np.random.default_rng(0).integers(0, 40, (3, 2, vocab)).astype(np.float32)
    values[1] = -np.inf
    values[1, 0, vocab - 2 :] = 1.0
    best, index = jax.jit(top_k, static_argnums=1)(values, count)
    wanted, where = jax.lax.top_k(values, count)
    np.testing.assert_array_equal(best, wanted)
    np.testing.assert_array_equal(index, where)
