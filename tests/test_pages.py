"""Paged caches: who holds which page, what attention reads, and rows of an engine as alone."""

import collections
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from jax.sharding import NamedSharding, PartitionSpec
from test_sharding import collectives

from specjax.core.cache import KVCache, Window, commit
from specjax.core.cached_entries import encode
from specjax.distributed.sharding import make_mesh, use
from specjax.engine.pages import PagePool
from specjax.models.cpu import library
from specjax.models.kernels import tpu_attention
from specjax.models.kernels.attention_kernel import attend_window_and_cache
from specjax.models.layers import cpu_attention
from specjax.models.layers.attention import (
    attend,
    attend_cache,
    attend_rows,
    cached_blocks,
    most_attended,
)

SIZE = 4


class Device:
    """What pages contain, as a model with two caches would write it: positions and tokens so far.

    The entries of the second cache depend on the token after each position too.
    """

    def __init__(self, pool):
        self.pool = pool
        self.content = collections.defaultdict(dict)
        self.rows = {}

    def write(self, request, tokens, start, end):
        """Write the entries of positions `start` to `end`; nobody else may hold these pages."""
        pages = self.pool.pages(request)
        for position in range(start, end):
            page = pages[position // SIZE]
            assert sum(page in self.pool.pages(other) for other in self.rows) == 1
            entry = (tuple(tokens[: position + 1]), tuple(tokens[: position + 2]))
            self.content[page][position % SIZE] = entry

    def check(self):
        """Each row finds what it would have written; no page is lost, or held and unused."""
        holders = collections.Counter()
        for request, (tokens, filled) in self.rows.items():
            pages = self.pool.pages(request)
            assert len(set(pages)) == len(pages)
            holders.update(pages)
            for position in range(filled):
                entry = (tuple(tokens[: position + 1]), tuple(tokens[: position + 2]))
                assert self.content[pages[position // SIZE]][position % SIZE] == entry
        assert holders.keys().isdisjoint(self.pool._unused)
        assert len(holders) + self.pool.num_unused == self.pool.num_pages
        assert [holders[page] for page in range(self.pool.num_pages)] == self.pool._holders


def a_thousand_requests(pool_class, seed, rounds=3500):
    """Requests with common beginnings come, grow, are put back and aborted; return the pool."""
    rng = random.Random(seed)
    pool = pool_class(24, SIZE, following=1)
    device = Device(pool)
    beginnings = [[rng.randrange(3) for _ in range(30)] for _ in range(3)]
    shared = requests = 0
    for _ in range(rounds):
        action = rng.random()
        if action < 0.4 and len(device.rows) < 6:
            requests += 1
            beginning = rng.choice(beginnings)[: rng.randrange(1, 30)]
            tokens = beginning + [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
            filled = pool.open(requests, tokens, len(tokens) - 2)
            assert filled <= max(len(tokens) - 2, 0)
            shared += filled
            if not pool.reserve(requests, len(tokens) + 3):
                pool.close(requests)
                device.check()
                continue
            device.rows[requests] = tokens, filled
            device.write(requests, tokens, filled, len(tokens) - 1)
            device.rows[requests] = tokens, len(tokens) - 1
            pool.publish(requests, tokens, max(len(tokens) - 2, 0))
        elif action < 0.8 and device.rows:
            request = rng.choice(list(device.rows))
            tokens, filled = device.rows[request]
            new = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            if len(tokens) < 40 and pool.reserve(request, len(tokens) + 3):
                tokens = tokens + new
                device.write(request, tokens, filled, len(tokens) - 1)
                device.rows[request] = tokens, len(tokens) - 1
                pool.take_back(request, len(tokens))
                pool.publish(request, tokens, len(tokens) - 2)
        elif device.rows:
            request = rng.choice(list(device.rows))
            pool.close(request)
            del device.rows[request]
        if rng.random() < 0.002:
            # As if the weights had changed.
            pool.forget()
            for request in device.rows:
                pool.close(request)
            device.rows.clear()
        device.check()
    for request in device.rows:
        pool.close(request)
    return pool, requests, shared


@pytest.mark.parametrize("seed", [0, 1])
def test_no_page_is_leaked_or_overwritten_in_a_thousand_requests(seed):
    pool, requests, shared = a_thousand_requests(PagePool, seed)
    assert pool.num_unused == pool.num_pages
    assert not pool._held
    assert requests > 1000
    assert shared > 500


class FreesSharedPages(PagePool):
    """Broken: pages of an ended request are free, whoever else holds them."""

    def _release(self, pages):
        for page in pages:
            self._holders[page] = 0
            self._unused[page] = None


class SharesPartOfAPage(PagePool):
    """Broken: a page is shared that is not full yet."""

    def publish(self, request, tokens, filled):
        padded = -(-filled // self.size) * self.size
        super().publish(request, [*tokens, *[0] * self.size], padded)


class ForgetsTheNextToken(PagePool):
    """Broken: the token after a page does not matter."""

    def __init__(self, num_pages, size, following):
        super().__init__(num_pages, size, following - 1)


class KeepsKeysOfTakenPages(PagePool):
    """Broken: a page that is taken for other tokens is still found by its earlier ones."""

    def reserve(self, request, num_tokens):
        known = dict(self._known)
        done = super().reserve(request, num_tokens)
        self._known = known
        return done


@pytest.mark.parametrize(
    "broken", [FreesSharedPages, SharesPartOfAPage, ForgetsTheNextToken, KeepsKeysOfTakenPages]
)
def test_a_broken_pool_is_found(broken):
    with pytest.raises((AssertionError, KeyError)):
        a_thousand_requests(broken, 0)


def test_prefixes_with_equal_hashes_are_told_apart():
    assert hash((0, (-1,) * SIZE)) == hash((0, (-2,) * SIZE))
    pool = PagePool(4, SIZE, following=0)
    pool.open("a", [-1] * SIZE, 0)
    pool.reserve("a", SIZE)
    pool.publish("a", [-1] * SIZE, SIZE)
    assert pool.open("b", [-2] * (SIZE + 2), SIZE) == 0
    assert pool.open("c", [-1] * (SIZE + 2), SIZE) == SIZE


def test_the_least_recently_used_prefix_is_given_up_first_and_its_end_before_its_beginning():
    pool = PagePool(4, SIZE, following=0)
    first, second = [1] * 2 * SIZE, [2] * 2 * SIZE
    for name, tokens in (("first", first), ("second", second)):
        assert pool.open(name, tokens, 0) == 0
        assert pool.reserve(name, 2 * SIZE)
        pool.publish(name, tokens, 2 * SIZE)
    assert not pool.reserve("first", 3 * SIZE)
    pool.close("first")
    pool.close("second")
    pool.open("new", [], 0)
    assert pool.reserve("new", SIZE)
    assert len(pool.known_prefix(first, 2 * SIZE)) == 1
    assert len(pool.known_prefix(second, 2 * SIZE)) == 2


LAYERS, ROWS, HEADS, CAPACITY, WIDTH = 2, 4, 2, 512, 16
LENGTHS = (0, 1, 300, 512)


def two_caches(size, dtype, width=WIDTH):
    """A dense cache, and a pool in which each row has pages for its tokens, in any order.

    What no row has committed is not a number.
    """
    rng = np.random.default_rng(0)
    num_pages = ROWS * CAPACITY // size + 3
    order = rng.permutation(num_pages)
    pages = np.full((ROWS, CAPACITY // size), num_pages)
    for row, length in enumerate(LENGTHS):
        count = -(-length // size)
        pages[row, :count], order = order[:count], order[count:]

    def entries():
        shape = (LAYERS, ROWS, HEADS, CAPACITY, width)
        dense = rng.standard_normal(shape).astype(np.float32)
        pool = np.full((LAYERS, num_pages, HEADS, size, width), np.nan, np.float32)
        for row, length in enumerate(LENGTHS):
            for position in range(length):
                page = pages[row, position // size]
                pool[:, page, :, position % size] = dense[:, row, :, position]
        stored = jnp.dtype(dtype)
        return encode(jnp.asarray(dense), stored), encode(jnp.asarray(pool), stored)

    (keys, paged_keys), (values, paged_values) = entries(), entries()
    length = jnp.asarray(LENGTHS, jnp.int32)
    paged = KVCache(paged_keys, paged_values, length, jnp.asarray(pages, jnp.int32))
    return KVCache(keys, values, length), paged


@functools.partial(jax.jit, static_argnames=("softcap", "sinks"))
def every_form(query, window, cache, **limits):
    """What each form makes of a window that is seen whole, and a cache; without pages once."""
    seen = jnp.ones((1, 1, query.shape[2], window.k.shape[3]), bool)
    start = attend(query, window.k[1], window.v[1], seen, limits.get("softcap"))
    ways = [
        attend_cache(query, cache, 1, start, cached_blocks(cache), **limits),
        attend_rows(query, cache, 1, start, **limits),
        attend_window_and_cache(query, cache, window, 1, seen, **limits),
        tpu_attention.attend_committed(query, cache, 1, start, **limits),
    ]
    if library.available():
        ways.append(cpu_attention.attend_window_and_cache(query, cache, window, 1, seen, **limits))
    return [way.weighted / way.denominator for way in ways]


USUAL = [
    (64, "float32", True),
    (128, "float32", False),
    (128, "int8", True),
    (256, "int8", False),
]
"""Each size of pages, and each type of a cache with and without a sliding window."""
OTHERS = sorted({*itertools.product((64, 128, 256), ("float32", "int8"), (False, True))} - {*USUAL})


@pytest.mark.parametrize(("size", "dtype", "sliding"), [*USUAL, *slow(*OTHERS)])
def test_attention_reads_pages_as_it_reads_rows(size, dtype, sliding):
    """The same blocks of keys, and so the same bits, in each form; of narrow and of wide heads."""
    width = 128 if sliding else WIDTH
    dense, paged = two_caches(size, dtype, width)
    assert paged.capacity == dense.capacity
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.standard_normal((ROWS, HEADS, 10, width)), jnp.float32)
    window = Window(
        *(
            jnp.asarray(rng.standard_normal((LAYERS, ROWS, HEADS, 3, width)), jnp.float32)
            for _ in range(2)
        )
    )
    limits = {}
    if sliding:
        ages = jnp.asarray(rng.integers(0, 200, (ROWS, 10)))
        limits = {"oldest": dense.length[:, None] - ages, "softcap": 2.0, "sinks": 5}

    found, wanted = (every_form(query, window, cache, **limits) for cache in (paged, dense))
    for way, (found, wanted) in enumerate(zip(found, wanted, strict=True)):
        if size == 64 and way in (1, 3):
            # Here the blocks are those of 128 keys, or pages.
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
            continue
        np.testing.assert_array_equal(found, wanted)


def _next_pages(attend):
    """Broken: a row's pages are those with the next numbers."""

    def broken(*, pages, **operands):
        other = jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape)
        return attend(pages=other, **operands)

    return broken


def _nothing_hidden(program):
    """Broken: numbers of a page that are not committed are multiplied by 0."""

    def broken(*refs, hidden, **options):
        return program(*refs, hidden=False, **options)

    return broken


def _without_the_last_block(schedule):
    """Broken: a row's last block is not read."""

    def broken(length, oldest, block, *rest):
        return schedule(jnp.maximum(length - block, 0), oldest, block, *rest)

    return broken


def _as_it_is(schedule):
    """Not broken."""
    return schedule


def _sinks_are_skipped(schedule):
    """Broken: the blocks before the oldest position are skipped, those with sinks too."""

    def broken(length, oldest, block, most_blocks, sink_blocks):
        return schedule(length, oldest, block, most_blocks, 0)

    return broken


def _merged_with_the_next_row(schedule):
    """Broken: what is accumulated for a row starts with what there was for another."""

    def broken(*arguments):
        row, *rest = schedule(*arguments)
        return jnp.zeros_like(row), *rest

    return broken


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("_attend", _next_pages),
        ("_program", _nothing_hidden),
        ("_schedule", _as_it_is),
        ("_schedule", _without_the_last_block),
        ("_schedule", _sinks_are_skipped),
        ("_schedule", _merged_with_the_next_row),
    ],
)
def test_a_broken_tpu_kernel_is_noticed(name, damage, monkeypatch):
    """With the blocks between sinks and sliding windows skipped; the kernel itself agrees."""
    dense, paged = two_caches(128, "float32")
    monkeypatch.setattr(tpu_attention, "_BLOCK", 128)
    oldest = jnp.broadcast_to(dense.length[:, None] - 20, (ROWS, 3))
    limits = {"oldest": oldest, "sinks": 5}
    query = jnp.asarray(
        np.random.default_rng(1).standard_normal((ROWS, HEADS, 3, WIDTH)), "float32"
    )
    nothing = attend(query, dense.k[1], dense.v[1], jnp.zeros((ROWS, 1, 3, CAPACITY), bool))
    monkeypatch.setattr(tpu_attention, name, damage(getattr(tpu_attention, name)))

    @jax.jit
    def both():
        wanted = attend_cache(query, dense, 1, nothing, cached_blocks(dense), **limits)
        return wanted, tpu_attention.attend_committed(query, paged, 1, nothing, **limits)

    wanted, found = ((way.weighted / way.denominator)[1:] for way in both())
    broken = damage is not _as_it_is
    assert np.allclose(found, wanted, atol=1e-3 if broken else 1e-5) != broken


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_tokens_are_committed_to_their_rows_pages_only(dtype):
    """Across the end of a page, for rows that have a next page and one that has none."""
    dense, paged = two_caches(128, dtype)
    length = jnp.asarray([0, 126, 300, 382], jnp.int32)
    dense, paged = dense.replace(length=length), paged.replace(length=length)
    before = jax.tree.map(np.asarray, (paged.k, paged.v))
    rng = np.random.default_rng(2)
    shape = (LAYERS, ROWS, HEADS, 5, WIDTH)
    window = Window(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2)))
    slots = jnp.broadcast_to(jnp.asarray([0, 2, 4]), (ROWS, 3))
    count = jnp.asarray([3, 3, 2, 3])
    dense, paged = (jax.jit(commit)(cache, window, slots, count) for cache in (dense, paged))
    np.testing.assert_array_equal(paged.length, dense.length)
    written = collections.defaultdict(set)
    for row in range(ROWS):
        for position in range(int(length[row]), int(length[row] + count[row])):
            page = int(paged.pages[row, position // 128])
            if page == paged.k.shape[1]:
                assert row == 0 or (row, position) == (1, 128)
                continue
            written[page].add(position % 128)
            for pool, whole in zip(*map(jax.tree.leaves, (paged, dense)), strict=False):
                if pool.ndim == 5:
                    np.testing.assert_array_equal(
                        pool[:, page, :, position % 128], whole[:, row, :, position]
                    )
    assert sum(map(len, written.values())) == 2 + 2 + 3
    for pool, old in zip(*map(jax.tree.leaves, ((paged.k, paged.v), before)), strict=True):
        pool = np.asarray(pool)
        changed = ~((pool == old) | (np.isnan(pool) & np.isnan(old))).all(axis=(0, 2, 4))
        for page, slots in enumerate(changed):
            assert set(np.flatnonzero(slots)) <= written[page]


@pytest.mark.parametrize("shards", [2, pytest.param(1, id="broken: pages of any device")])
def test_devices_read_and_write_their_own_pages(shards):
    """Each has a pool with the pages of its rows, and sends no keys."""
    dense, _ = two_caches(128, "float32")
    dense = dense.replace(length=jnp.asarray([0, 1, 300, 400]))
    number = ROWS * CAPACITY // 128
    order = np.random.default_rng(0).permutation(number // 2)

    def pool(rows):
        apart = rows.reshape(LAYERS, ROWS, HEADS, -1, 128, WIDTH).swapaxes(2, 3)
        apart = apart.reshape(LAYERS, 2, number // 2, HEADS, 128, WIDTH)
        mixed = jnp.zeros_like(apart).at[:, :, order].set(apart)
        return mixed.reshape(LAYERS, number, *apart.shape[3:])

    pages = jnp.asarray(np.concatenate([order, order]).reshape(ROWS, -1), jnp.int32)
    paged = KVCache(pool(dense.k), pool(dense.v), dense.length, pages, shards)
    rng = np.random.default_rng(2)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query = normal(ROWS, HEADS, 3, WIDTH)
    window = Window(*(normal(LAYERS, ROWS, HEADS, 5, WIDTH) for _ in range(2)))
    slots = jnp.asarray(rng.integers(0, 400, (ROWS, 7)))
    of_heads = jnp.asarray(rng.integers(0, 400, (ROWS, LAYERS, HEADS, 7)))

    def all_ways(cache, query, window):
        start = attend(query, window.k[1], window.v[1], jnp.ones((1, 1, 3, 5), bool))
        first = jnp.broadcast_to(jnp.arange(3), (ROWS, 3))
        grown = commit(cache, window, first, jnp.asarray([3, 0, 2, 3]))
        ways = [
            attend_cache(query, grown, 1, start, cached_blocks(grown)),
            attend_rows(query, grown, 1, start),
        ]
        copies = [grown.gathered(chosen, grown.length) for chosen in (slots, of_heads)]
        most = most_attended(query, grown, 1, 9)
        mixed = [way.weighted / way.denominator for way in ways]
        hidden = jnp.arange(7)[None, :] < grown.length[:, None]
        kept = [jnp.where(hidden[None, :, None, :, None], one.k, 0) for one in copies]
        return (mixed, kept, most), grown

    mesh = make_mesh(data=2, devices=jax.devices()[:2])

    def of_rows(array):
        # Arrays of all layers have five axes.
        spec = PartitionSpec(*[None] * (array.ndim == 5), "data")
        return jax.device_put(array, NamedSharding(mesh, spec))

    operands = jax.tree.map(of_rows, (paged, query, window))
    wanted, _ = jax.jit(all_ways)(dense, query, window)
    with use(mesh):
        program = jax.jit(all_ways).lower(*operands).compile()
    found, grown = program(*operands)
    equal = [
        np.allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    ]
    assert grown.k.sharding.shard_shape(grown.k.shape)[1] == number // 2 or shards == 1
    sent = {shape for _, shape in collectives(program)}
    if shards == 1:
        assert not all(equal)
        assert any(shape.endswith(f",{WIDTH}]") for shape in sent)
    else:
        assert all(equal)
        # The longest row's length, and the attention of a row's tokens, among which it chooses.
        assert sent <= {"s32[]", f"f32[2,{HEADS},{CAPACITY}]"}
