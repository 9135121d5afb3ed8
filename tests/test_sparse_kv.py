"""The target over few of its committed keys: which keys drafts see, and that drafting is exact."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import row_count, slow, tiny_config
from decoding import (
    PROMPTS,
    coupled,
    first_state,
    make_call,
    mixed,
    new_tokens,
    rounds,
)
from test_decoder import after_cache, causal, near, one_pass
from test_loop_cache import assert_caches
from test_sharding import mesh_of
from tiny_models import small_model

from specjax import make_drafter
from specjax.core.cache import KVCache
from specjax.core.cached_entries import encode
from specjax.core.round import make_context
from specjax.errors import InputError
from specjax.loading.load import place_model, random_model
from specjax.loading.quantize import has_quantized
from specjax.methods.sparse_kv import OBSERVED, Chosen, SparseKV
from specjax.models.config import SlidingWindow
from specjax.models.features import QUERIES
from specjax.models.layers.attention import group_queries, most_attended
from specjax.testing import check_drafter

NEW = 32
OPTIONS = {
    "recent": dict(budget=6, sinks=2),
    "scores": dict(budget=36, keep="scores", refresh=5),
    "scores, ratio": dict(budget=36, keep="scores", refresh=5, ratio=0.8),
}


def made(name, target):
    return SparseKV(target.architecture, **OPTIONS[name])


@pytest.fixture(scope="module")
def plain(tiny):
    return coupled(tiny, None, NEW, batch_size=1)


@pytest.mark.parametrize("name", ["scores", *slow("scores, ratio")])
def test_tokens_and_caches_are_those_of_plain_decoding(name, tiny, plain):
    options = dict(verify="coupled", sampling=mixed(max_new_tokens=NEW), num_speculative_tokens=2)
    call = make_call(tiny, PROMPTS, drafter=made(name, tiny), **options)
    counts = []
    for number, state in enumerate(rounds(call, first_state(call), counts)):
        if number < 4:
            assert_caches(call, state)
    assert_caches(call, state)
    assert new_tokens(call, state) == plain.token_ids
    accepted = {int(each) for count in counts for each in count.accepted}
    assert {0, 2} <= accepted


def context_of(drafter, target, length, cache):
    """What a drafter may read of rows with these lengths and this cache."""
    call = make_call(target, [[1]] * len(length), drafter=drafter, batch_size=len(length))
    state = first_state(call)
    fixed = state.rows.replace(max_length=length + 8)
    state = state.replace(length=length, cache=cache, rows=fixed)
    return make_context(call.plan.loop, target.params, state)


def numbered(target, length):
    """A cache in which each key is its position, its layer and its head."""
    empty = target.architecture.make_cache(len(length), 256)
    layers, batch, heads, slots, width = empty.k.shape
    layer, _, head, slot = np.meshgrid(
        *map(np.arange, (layers, batch, heads, slots)), indexing="ij"
    )
    keys = np.stack([slot, layer, head, *[slot] * (width - 3)], axis=-1).astype(np.float32)
    return empty.replace(k=jnp.asarray(keys), v=jnp.asarray(keys) + 0.5, length=length - 1)


def assert_copied(cache, row, slots):
    """A row of a copied cache holds the keys and values of `slots` [L, G, T]."""
    layers, heads, count = slots.shape
    assert cache.length[row] == count
    keys = np.asarray(cache.k[:, row, :, :count])
    np.testing.assert_array_equal(keys[..., 0], slots)
    np.testing.assert_array_equal(keys[..., 1], np.arange(layers)[:, None, None] + 0 * slots)
    np.testing.assert_array_equal(keys[..., 2], np.arange(heads)[None, :, None] + 0 * slots)
    np.testing.assert_array_equal(cache.v[:, row, :, :count], keys + 0.5)


def test_the_first_and_the_latest_keys_are_copied(tiny):
    drafter, length = made("recent", tiny), jnp.array([1, 7, 8, 40])
    context = context_of(drafter, tiny, length, numbered(tiny, length))
    cache, _ = drafter.committed((), (), context)
    wanted = [[], [*range(6)], [0, 1, 3, 4, 5, 6], [0, 1, 35, 36, 37, 38]]
    for row, slots in enumerate(wanted):
        assert_copied(cache, row, np.broadcast_to(np.array(slots, int), (3, 2, len(slots))))


def test_a_share_of_the_keys_is_copied_if_it_is_more(tiny):
    drafter = SparseKV(tiny.architecture, budget=6, sinks=2, ratio=0.25)
    length = jnp.array([29, 41])
    cache, _ = drafter.committed((), (), context_of(drafter, tiny, length, numbered(tiny, length)))
    for row, slots in enumerate([[0, 1, *range(23, 28)], [0, 1, *range(32, 40)]]):
        assert_copied(cache, row, np.broadcast_to(np.array(slots), (3, 2, len(slots))))

    drafter = SparseKV(tiny.architecture, budget=36, keep="scores", ratio=0.5, refresh=10)
    length = jnp.array([60, 100])
    context = context_of(drafter, tiny, length, numbered(tiny, length))
    cache, state = drafter.committed((), drafter.init((), 2, 256), context)
    assert state.length.tolist() == [58, 98]
    for row, slots in enumerate([[*range(4), *range(26, 59)], [*range(4), *range(53, 99)]]):
        assert_copied(cache, row, np.broadcast_to(np.array(slots), (3, 2, len(slots))))


def by_scores(target, queries, cache, length, count):
    """The tokens [L, G, A] before the latest 32 to which queries [T, D] attend most."""
    config = target.config
    heads = queries.reshape(len(queries), config.num_layers, config.num_heads, -1)
    view = cache.replace(length=jnp.array([length - OBSERVED]))
    grouped = [
        group_queries(jnp.asarray(heads[None, :, layer]), config.num_kv_heads, 1.0)
        for layer in range(config.num_layers)
    ]
    return np.stack(
        [most_attended(query, view, layer, count)[0] for layer, query in enumerate(grouped)]
    )


def test_chosen_keys_and_all_that_follow_are_copied(tiny):
    """Each once. A row with few keys has all; one that is not due keeps its choice."""
    drafter, length = made("scores", tiny), jnp.array([37, 38, 60, 60])
    context = context_of(drafter, tiny, length, numbered(tiny, length))
    queries = 0.01 * np.random.default_rng(0).standard_normal(context.features[QUERIES].shape)
    context = context.replace(features={QUERIES: jnp.asarray(queries, jnp.float32)})
    chosen = jnp.broadcast_to(jnp.array([20, 3, 7, 11]), (4, 3, 2, 4))
    cache, state = drafter.committed((), Chosen(chosen, jnp.array([0, 0, 56, 55])), context)
    assert state.length.tolist() == [0, 38, 56, 60]
    np.testing.assert_array_equal(state.slots[1], np.broadcast_to(np.arange(4), (3, 2, 4)))
    np.testing.assert_array_equal(state.slots[2], chosen[2])
    positions = np.arange(59 - OBSERVED, 59) % queries.shape[1]
    own = context.cache.take(jnp.array([3]))
    wanted = by_scores(tiny, np.asarray(context.features[QUERIES])[3, positions], own, 60, 4)
    np.testing.assert_array_equal(state.slots[3], wanted)
    assert len(np.unique(wanted.reshape(-1, 4), axis=0)) > 1
    assert_copied(cache, 0, np.broadcast_to(np.arange(36), (3, 2, 36)))
    for row in (1, 2, 3):
        later = np.arange(int(state.length[row]) - OBSERVED, int(length[row]) - 1)
        assert state.slots[row].max() < later[0]
        later = np.broadcast_to(later, (3, 2, len(later)))
        assert_copied(cache, row, np.concatenate([state.slots[row], later], axis=-1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Late(SparseKV):
    """A broken variant, without the query of the latest verified token."""

    def _choose(self, state, context):
        kept, rows = context.features[QUERIES], jnp.arange(len(context.length))
        known = kept.at[rows, (context.length - 2) % kept.shape[1]].set(0)
        return super()._choose(state, context.replace(features={QUERIES: known}))


@pytest.mark.parametrize("kind", [SparseKV, *slow(Late)])
def test_keys_are_chosen_by_the_queries_of_verification(kind, tiny):
    """Those of a fresh pass over the committed tokens; a prompt's count as zeros."""
    drafter = kind(tiny.architecture, **OPTIONS["scores"])
    call = make_call(
        tiny, PROMPTS, drafter=drafter, sampling=mixed(max_new_tokens=NEW), num_speculative_tokens=2
    )
    state, chosen = first_state(call), []
    for after in rounds(call, state):
        before, now = state.drafter[0].drafter, after.drafter[0].drafter
        for row in np.flatnonzero((now.length != before.length) & (before.length > 0)):
            chosen.append((row, int(now.length[row]), np.asarray(now.slots[row])))
        state = after
    tokens = np.asarray(state.tokens[:, : int(state.length.max())])
    queries = np.array(one_pass(tiny, tokens, features=(QUERIES,)).features[QUERIES])
    for row, prompt in enumerate(PROMPTS):
        queries[row, : len(prompt) - 1] = 0
    equal, kept = [], min(OBSERVED, call.plan.loop.drafter.kept_features)
    for row, length, slots in chosen:
        own = queries[row, length - 1 - kept : length - 1]
        wanted = by_scores(tiny, own, state.cache.take(jnp.array([row])), length, 4)
        equal.append(np.array_equal(slots, wanted))
    assert len(equal) > 5
    assert all(equal) == (kind is SparseKV)


def test_a_draft_token_is_that_of_a_pass_that_sees_the_same_keys(tiny):
    """Earlier tokens see all before them; only the last one sees few."""
    drafter, count = made("recent", tiny), 30
    tokens = np.random.default_rng(0).integers(61, size=(1, count))
    call = make_call(tiny, tokens.tolist(), drafter=drafter)
    context = make_context(call.plan.loop, tiny.params, first_state(call))
    cache, _ = drafter.committed((), (), context)
    last = np.full((1, 1), count - 1)
    logits = after_cache(tiny, cache, tokens[:, -1:], last, np.ones((1, 1, 1), bool)).logits
    visible = np.array(causal(count))
    visible[0, -1, 2 : count - 5] = False
    empty = tiny.architecture.make_cache(1, 256)
    wanted = after_cache(tiny, empty, tokens, np.arange(count)[None], visible).logits
    near(logits[:, 0], wanted[:, -1])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_most_attended_tokens(dtype):
    rng = np.random.default_rng(0)
    query, keys = rng.standard_normal((2, 3, 5, 8)), rng.standard_normal((4, 2, 3, 64, 8))
    stored = jnp.asarray(keys, jnp.float32)
    encoded = encode(stored, jnp.dtype(dtype))
    cache = KVCache(encoded, encoded, jnp.array([50, 7]))
    got = np.asarray(most_attended(jnp.asarray(query, jnp.float32), cache, 2, 6))
    for row, length in enumerate((50, 7)):
        scores = np.einsum("gxc,gyc->gxy", query[row], cache.rounded(stored[2, row])[:, :length])
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        total = np.pad(weights.sum(axis=1), ((0, 0), (2, 2)))
        pooled = sum(total[:, shift : shift + length] for shift in range(5))
        np.testing.assert_array_equal(got[row], np.argsort(-pooled, axis=1)[:, :6])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_of_chosen_keys_keep_the_distribution(rule):
    target, prompt = small_model(8), (1, 2, 3, 1, 2) * 8
    drafter = SparseKV(target.architecture, budget=33, keep="scores", refresh=2)
    check = check_drafter(drafter, target, row_count(12_000), prompt=prompt, verify=rule)
    assert check.passed, check
    assert 1.4 < check.acceptance_length < 2.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recent", "scores"])
def test_on_a_mesh(name, tiny, plain):
    """Rows on two devices, and heads on two."""
    placed = place_model(tiny, mesh_of(2, 2))
    drafter = make_drafter("sparse_kv", placed, **OPTIONS[name])
    assert coupled(placed, drafter, NEW).token_ids == plain.token_ids


@pytest.mark.parametrize("keep", ["recent", *slow("scores")])
def test_a_copy_in_fewer_bits_drafts(keep):
    shape = dict(hidden_size=32, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8)
    target = random_model(tiny_config(**shape), 0, dtype="float32")
    drafter = make_drafter("sparse_kv", target, weights="int8", budget=36, keep=keep)
    assert has_quantized(drafter.params)
    got = coupled(target, drafter, NEW)
    assert got.token_ids == coupled(target, None, NEW, batch_size=1).token_ids
    assert got.accepted.max() > 1


def test_bad_targets(tiny):
    windowed = dataclasses.replace(tiny.config, sliding_window=SlidingWindow(8))
    with pytest.raises(InputError, match="sparse_kv: the target has layers with sliding windows"):
        make_drafter("sparse_kv", random_model(windowed, 0))
