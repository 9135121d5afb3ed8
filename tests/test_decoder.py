"""`extend` and prefill: however tokens are split into forwards, the result is one causal pass."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config

from specjax.core.cache import commit, put
from specjax.core.prefill import prefill
from specjax.errors import InputError
from specjax.loading.load import random_model

TOKENS = np.random.default_rng(0).integers(61, size=(3, 300)).astype(np.int32)
FEATURES = ("final_norm", "pre_norm", "layer_input:0", "layer_input:1", "layer_input:2")
CAPACITY = 512


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("features", "num_layers"))
def extend(decoder, params, tokens, positions, cache, window, start, visible, **options):
    return decoder.extend(params, tokens, positions, cache, window, start, visible, **options)


def causal(length):
    return jnp.tril(jnp.ones((1, length, length), bool))


def one_pass(model, tokens, **options):
    """All tokens at once after an empty cache."""
    batch, length = tokens.shape
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    cache = model.architecture.make_cache(batch, CAPACITY)
    return after_cache(model, cache, tokens, positions, causal(length), **options)


def after_cache(model, cache, tokens, positions, visible, **options):
    """All tokens at once after a cache, in a window of their own."""
    decoder, window = model.architecture, model.architecture.make_window(*tokens.shape)
    tokens, positions, visible = map(jnp.asarray, (tokens, positions, visible))
    return extend(decoder, model.params, tokens, positions, cache, window, 0, visible, **options)


near = functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-4)


def at_positions(values, positions):
    """The entries of [B, S, ...] at each row's positions."""
    return np.take_along_axis(np.asarray(values), positions[:, :, None], axis=1)


def prefilled(model, lengths, chunks=(64,), features=()):
    """The cache, and the features of all positions, gathered chunk by chunk."""
    cache = model.architecture.make_cache(len(lengths), CAPACITY)
    tokens = jnp.asarray(TOKENS[: len(lengths)])
    width = model.config.hidden_size
    kept = {name: jnp.zeros((len(lengths), CAPACITY, width)) for name in features}

    def follow(kept, cache, first, count, found, chunk):
        where = (first + jnp.arange(chunk))[None, :]
        return {name: put(kept[name], where, value) for name, value in found.items()}

    program = jax.jit(prefill, static_argnums=(0, 5, 6, 7))
    arguments = model.params, tokens, jnp.asarray(lengths, jnp.int32), cache
    return program(model.architecture, *arguments, chunks, features, follow, kept)


@pytest.fixture(scope="module")
def whole(tiny):
    return one_pass(tiny, TOKENS, features=FEATURES)


@pytest.mark.parametrize("chunks", [(64, 7), *slow(((7,),), ((64,),), ((300,),), ((512,),))])
def test_prefill_in_chunks_is_one_pass(chunks, tiny, whole):
    lengths = [300, 1, 131]
    cache, features = prefilled(tiny, lengths, chunks, FEATURES)
    assert cache.length.tolist() == lengths
    for row, length in enumerate(lengths):
        for got, want in ((cache.k, whole.window.k), (cache.v, whole.window.v)):
            near(got[:, row, :, :length], want[:, row, :, :length])
            assert not np.asarray(got[:, row, :, length:]).any()
        for name in FEATURES:
            near(features[name][row, :length], whole.features[name][row, :length])


def test_prefill_of_nothing_is_the_empty_cache(tiny):
    cache, _ = prefilled(tiny, [0, 0, 0])
    assert cache.length.tolist() == [0, 0, 0]
    assert not np.asarray(cache.k).any()


@pytest.mark.parametrize("committed", [[0, 0, 0], [0, 5, 1], [250, 255, 256], [257, 100, 290]])
def test_tokens_at_once_after_a_cache(committed, tiny, whole):
    """Rows of different lengths, on both sides of the block edge at 256."""
    count = 9
    cache, _ = prefilled(tiny, committed)
    rows = np.array(committed)[:, None] + np.arange(count)[None, :]
    tokens = np.take_along_axis(TOKENS, rows, axis=1)
    got = after_cache(tiny, cache, tokens, rows, causal(count), features=FEATURES)
    near(got.logits, at_positions(whole.logits, rows))
    for name in FEATURES:
        near(got.features[name], at_positions(whole.features[name], rows))


def test_one_by_one_is_at_once(tiny, whole):
    """Through the window alone, each token in its slot, the cache after them as it was."""
    committed, count = [250, 3, 0], 6
    cache, _ = prefilled(tiny, committed)
    window = tiny.architecture.make_window(3, count)
    for slot in range(count):
        rows = np.array(committed)[:, None] + slot
        got = extend(
            tiny.architecture,
            tiny.params,
            jnp.asarray(np.take_along_axis(TOKENS, rows, axis=1)),
            jnp.asarray(rows),
            cache,
            window,
            jnp.int32(slot),
            causal(count)[:, slot : slot + 1],
        )
        window = got.window
        near(got.logits, at_positions(whole.logits, rows))
    cache = commit(cache, window, jnp.tile(jnp.arange(count), (3, 1)), jnp.array([6, 2, 4]))
    again, _ = prefilled(tiny, [256, 5, 4])
    assert cache.length.tolist() == [256, 5, 4]
    for row, length in enumerate([256, 5, 4]):
        near(cache.k[:, row, :, :length], again.k[:, row, :, :length])


def test_the_order_of_slots_does_not_matter(tiny):
    """Results depend on the mask and the positions, not on the slots of the window."""
    count, order = 5, np.array([3, 0, 4, 1, 2])
    cache, _ = prefilled(tiny, [7, 7, 7])
    tokens = TOKENS[:, 7 : 7 + count]
    positions = np.broadcast_to(np.arange(7, 7 + count), tokens.shape)
    visible = np.asarray(causal(count))
    logits, reordered = (
        after_cache(
            tiny, cache, tokens[:, slots], positions[:, slots], visible[:, slots][:, :, slots]
        ).logits
        for slots in (np.arange(count), order)
    )
    near(logits[:, order], reordered)


def test_siblings_do_not_see_each_other(tiny, whole):
    """Two children of one node at one position: each has the logits of its own path."""
    cache, _ = prefilled(tiny, [4, 4, 4])
    other = (TOKENS[:, 5] + 1) % 61
    tokens = np.stack([TOKENS[:, 4], other, TOKENS[:, 5]], axis=1)
    positions = np.broadcast_to(np.array([4, 5, 5]), tokens.shape)
    visible = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    got = after_cache(tiny, cache, tokens, positions, visible).logits
    near(got[:, 2], whole.logits[:, 5])
    path = TOKENS[:, :6].copy()
    path[:, 5] = other
    near(got[:, 1], one_pass(tiny, path).logits[:, 5])


@pytest.mark.parametrize("exit_layer", [2, *slow(1, 3)])
def test_early_exit_runs_the_first_layers(exit_layer, tiny, whole):
    short = tiny_config(num_layers=exit_layer)
    params = dict(tiny.params)
    params["layers"] = jax.tree.map(lambda leaf: leaf[:exit_layer], params["layers"])
    model = random_model(short, 0, dtype="float32")
    wanted = one_pass(type(model)("short", short, params, None, model.dtype), TOKENS)
    got = one_pass(tiny, TOKENS, num_layers=exit_layer, features=("pre_norm",))
    near(got.logits, wanted.logits)
    if exit_layer < 3:
        near(got.features["pre_norm"], whole.features[f"layer_input:{exit_layer}"])


def test_final_norm_is_what_the_head_reads(tiny, whole):
    head = tiny.params["head"]["kernel"]
    logits = jnp.einsum("btd,dv->btv", whole.features["final_norm"], head)
    near(whole.logits, logits)


@pytest.mark.parametrize("name", ["layer_input:3", "layer_output:1", "layer_input:x"])
def test_an_unknown_feature_is_named(name, tiny):
    with pytest.raises(ValueError, match=f"feature '{name}' is unknown: use final_norm"):
        one_pass(tiny, TOKENS[:, :2], features=(name,))


def test_commit_appends_the_chosen_slots(tiny):
    """Ragged counts, slots out of order, and a row that fills the cache."""
    decoder = tiny.architecture
    cache = decoder.make_cache(3, 8).replace(length=jnp.array([0, 7, 8], jnp.int32))
    window = decoder.make_window(3, 4)
    shape = window.k.shape
    values = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + 1
    window = window.replace(k=values, v=-values)
    slots = jnp.array([[0, 2, 3, 0], [1, 0, 0, 0], [3, 3, 3, 3]])
    got = jax.jit(commit)(cache, window, slots, jnp.array([3, 1, 0], jnp.int32))
    assert got.length.tolist() == [3, 8, 8]
    assert (got.k[:, 0, :, :3] == values[:, 0, :, jnp.array([0, 2, 3])].transpose(1, 2, 0, 3)).all()
    assert (got.k[:, 1, :, 7] == values[:, 1, :, 1]).all()
    assert (got.v == -got.k).all()
    for row, (first, last) in enumerate([(3, 8), (0, 7), (0, 8)]):
        assert not np.asarray(got.k[:, row, :, first:last]).any()


def test_boxed_parameters_are_taken_as_they_are(tiny):
    """As `Decoder.init` gives them, each with the names of its axes; others are refused."""
    decoder = tiny.architecture
    boxed = decoder.init(jax.random.key(0))
    tokens, seen = jnp.ones((1, 3), jnp.int32), jnp.tril(jnp.ones((1, 3, 3), bool))
    logits = [
        decoder.extend(params, tokens, jnp.arange(3)[None], None, None, 0, seen).logits
        for params in (boxed, nn.meta.unbox(boxed))
    ]
    np.testing.assert_array_equal(*logits)
    others = {name: value for name, value in boxed.items() if name != "final_norm"}
    for params, says in (
        (others | {"final_norm": {"scale": jnp.ones(3)}}, "scale has the shape .3,.; it has to"),
        (others, "params.final_norm is missing"),
    ):
        with pytest.raises(InputError, match=says):
            decoder.extend(params, tokens, jnp.arange(3)[None], None, None, 0, seen)
