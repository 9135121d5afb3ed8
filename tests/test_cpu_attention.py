"""Attention as a kernel in C++: XLA's results, and the same bits at any number of tokens."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow

from specjax.core.cache import KVCache, Window
from specjax.core.cached_entries import decode, encode
from specjax.models.cpu import library
from specjax.models.layers import cpu_attention
from specjax.models.layers.attention import attend, attend_rows

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)
LAYERS, ROWS, HEADS, REPEATS, CAPACITY = 2, 3, 2, 3, 512
LENGTHS = (300, 7, 0)


def random_arrays(width, slots, seed=0, dtype="float32"):
    """A cache with rows of different lengths, and a window."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    shape = (LAYERS, ROWS, HEADS)
    keys, values = (encode(array(*shape, CAPACITY, width), jnp.dtype(dtype)) for _ in range(2))
    cache = KVCache(keys, values, jnp.asarray(LENGTHS, jnp.int32))
    return cache, Window(array(*shape, slots, width), array(*shape, slots, width)), array


def divided(partial):
    return np.asarray(partial.weighted / partial.denominator)


WIDTHS, SLOTS, DTYPES = (8, 64, 72), (1, 5, 70), ("float32", "bfloat16", "int8")
CASES = list(itertools.product(range(3), repeat=3))
PAIRS = [case for case in CASES if sum(case) % 3 == 0]
"""Each two of width, slots and dtype together."""


def cases_of(indices):
    return [(WIDTHS[width], SLOTS[slots], DTYPES[dtype]) for width, slots, dtype in indices]


@pytest.mark.parametrize("sinks", [(None, 0), *slow([(70,)])])
@pytest.mark.parametrize(
    ("width", "slots", "dtype"),
    [*cases_of(PAIRS), *slow(*cases_of(case for case in CASES if case not in PAIRS))],
)
def test_the_result_is_that_of_xla(width, slots, sinks, dtype):
    """With and without a soft cap."""
    assert library.available()
    cache, window, array = random_arrays(width, slots, dtype=dtype)
    tokens = min(slots, 5)
    queries = tokens * REPEATS
    query = array(ROWS, HEADS, queries, width)
    visible = np.tril(np.ones((tokens, slots), bool))
    seen = jnp.asarray(np.repeat(visible, REPEATS, axis=0))[None, None]
    ages = np.random.default_rng(1).integers(-3, 290, (ROWS, queries))
    oldest = jnp.asarray(ages, jnp.int32)
    limits = [{} if few is None else {"oldest": oldest, "sinks": few} for few in sinks]
    cases = [dict(softcap=softcap, **others) for softcap in (None, 3.0) for others in limits]

    @jax.jit
    def both_ways(layer):
        found, wanted = [], []
        for case in cases:
            start = attend(query, window.k[layer], window.v[layer], seen, case["softcap"])
            wanted.append(attend_rows(query, cache, layer, start=start, split=False, **case))
            kernel = cpu_attention.attend_window_and_cache
            found.append(kernel(query, cache, window, layer, seen, **case))
        return found, wanted

    for layer in range(LAYERS):
        for found, wanted in zip(*both_ways(layer), strict=True):
            np.testing.assert_allclose(divided(found), divided(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_query_has_the_same_bits_whatever_the_number_of_tokens(dtype):
    cache, window, array = random_arrays(64, 5, dtype=dtype)
    query = array(ROWS, HEADS, 5, 64)
    seen = jnp.asarray(np.tril(np.ones((5, 5), bool)))[None, None]
    together = divided(cpu_attention.attend_window_and_cache(query, cache, window, 0, seen))
    for token in range(5):
        alone = cpu_attention.attend_window_and_cache(
            query[:, :, token : token + 1], cache, window, 0, seen[:, :, token : token + 1]
        )
        np.testing.assert_array_equal(divided(alone)[:, :, 0], together[:, :, token])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_may_be_elsewhere_in_larger_arrays(dtype):
    assert library.available()
    cache, window, array = random_arrays(64, 5, dtype=dtype)
    query, seen = array(ROWS, HEADS, 5, 64), jnp.asarray(np.tril(np.ones((5, 5), bool)))[None, None]
    rows, larger = jnp.array([3, 1, 0], jnp.int32), cache.take(jnp.array([2, 1, 1, 0]))
    mixed = [
        divided(cpu_attention.attend_window_and_cache(query, one, window, 1, seen))
        for one in (cache, larger.lend(rows, cache.length))
    ]
    np.testing.assert_array_equal(*mixed)


def test_what_it_is_not_for():
    cache, _, _ = random_arrays(64, 1)
    assert cpu_attention.attends(cache, 5)
    assert not cpu_attention.attends(cache, 256)
    narrow = cache.replace(k=cache.k.astype(jnp.float16))
    assert not cpu_attention.attends(narrow, 5)
    odd, _, _ = random_arrays(12, 1)
    assert not cpu_attention.attends(odd, 5)
    # A block of 64 keys would go on into the pages of other rows.
    for size, takes in ((32, False), (64, True), (96, False), (128, True)):
        pool = jnp.zeros((LAYERS, 9, HEADS, size, 64))
        paged = KVCache(pool, pool, cache.length, jnp.zeros((ROWS, 3), jnp.int32))
        assert cpu_attention.attends(paged, 5) == takes


def test_a_token_has_the_same_bits_in_the_window_and_in_an_8_bit_cache():
    cache, window, array = random_arrays(64, 1, dtype="int8")
    query, length = array(ROWS, HEADS, 2, 64), jnp.full(ROWS, 9, jnp.int32)
    last = 8
    part = jax.tree.map(lambda entries: entries[:, :, :, last : last + 1], (cache.k, cache.v))
    window = Window(*(decode(entries, jnp.dtype("float32")) for entries in part))
    nothing = jnp.zeros((1, 1, 2, 1), bool)
    committed, pending = (
        cpu_attention.attend_window_and_cache(query, cache.replace(length=count), window, 1, seen)
        for count, seen in ((length, nothing), (length - 1, ~nothing))
    )
    np.testing.assert_allclose(divided(committed), divided(pending), rtol=2e-6)
