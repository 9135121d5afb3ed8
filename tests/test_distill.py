"""Draft models made of a target's layers: their loss, and decoding with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import SOME
from toy_training import two_rows, with_features

from specjax.core.cache import commit, make_cache
from specjax.errors import InputError
from train.methods.distill import DistillLoss, distill_method, some_layers

V = 61


@pytest.fixture(scope="module")
def batch(tiny):
    return with_features(tiny, two_rows(V))


def shaken(params, seed=0, size=0.3):
    """The parameters with noise, so that nothing is the target's own."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [leaf * (1 + size * rng.standard_normal(leaf.shape, np.float32)) for leaf in leaves]
    return jax.tree.unflatten(tree, list(map(jnp.asarray, noisy)))


def distributions_of(model, params, tokens):
    """Logits after each token of one conversation, a token at a time through the cache."""
    config = model.config
    cache = make_cache(
        config.num_layers, 1, config.num_kv_heads, 32, config.head_dim, jnp.dtype("float32")
    )
    seen, one = jnp.ones((1, 1, 1), bool), jnp.ones(1, jnp.int32)

    def step(cache, token, position):
        window = model.make_window(1, 1)
        result = model.extend(params, token, position, cache, window, 0, seen)
        return commit(cache, result.window, jnp.zeros((1, 1), jnp.int32), one), result.logits

    logits, step = [], jax.jit(step)
    for position, token in enumerate(np.asarray(tokens)):
        cache, here = step(cache, jnp.array([[token]]), jnp.array([[position]]))
        logits.append(np.asarray(here[0, 0], np.float64))
    return np.stack(logits)


def slow_loss(target, draft, batch, ids, loss):
    """The definition: conversation by conversation, label by label."""
    kl = tv = weight = 0.0
    correct, along, counts = (np.zeros(loss.depths) for _ in range(3))
    tokens, segments, labels = (np.asarray(x) for x in (batch.tokens, batch.segments, batch.labels))
    for row in range(2):
        right = {}
        for segment in set(segments[row]) - {0}:
            where = np.flatnonzero(segments[row] == segment)
            theirs, ours = (
                distributions_of(model.architecture, model.params, tokens[row, where])[:, ids]
                for model in (target, draft)
            )
            for label in set(labels[row]) & set(where):
                before = label - 1 - where[0]
                p, q = (np.exp(x[before]) / np.exp(x[before]).sum() for x in (theirs, ours))
                weight += 1
                if tokens[row, label] in ids:
                    kl += np.sum(p * np.log(p / q))
                    tv += 0.5 * np.abs(p - q).sum()
                right[label] = tokens[row, label] in ids and p.argmax() == q.argmax()
        for label in right:
            for depth in range(loss.depths):
                if label + depth in right:
                    counts[depth] += 1
                    correct[depth] += right[label + depth]
                    along[depth] += all(right[label + i] for i in range(depth + 1))
    return loss.kl * kl + loss.tv * tv, {"kl": kl, "tv": tv}, weight, correct, along, counts


def test_the_loss_by_definition(tiny, batch):
    loss = DistillLoss(kl=0.7, tv=0.3, depths=3)
    method = distill_method(tiny, (0, 2), SOME, loss)
    params = shaken(method.init(jax.random.key(0)), size=0.1)
    arguments = (params, tiny.params, batch, jax.random.key(0))
    total, measures = jax.jit(method.loss)(*arguments)
    config = dataclasses.replace(tiny.config, num_layers=2)
    draft = dataclasses.replace(tiny, config=config, params={**tiny.params, **params})
    wanted, parts, weight, correct, along, counts = slow_loss(tiny, draft, batch, SOME, loss)
    np.testing.assert_allclose(total, wanted, rtol=1e-4)
    for name, value in parts.items():
        np.testing.assert_allclose(measures.losses[name], value, rtol=1e-4)
    assert measures.weight == weight
    np.testing.assert_array_equal(measures.correct, correct)
    np.testing.assert_array_equal(measures.prefix_correct, along)
    np.testing.assert_array_equal(measures.counts, counts)
    assert 0 < along[1] < correct[1] < counts[1] < counts[0]


def test_all_layers_are_the_target_itself(tiny, batch):
    """No training is needed to see that each row predicts its own label, and no other."""
    method = distill_method(tiny, (0, 1, 2), None, DistillLoss())
    params = method.init(jax.random.key(0))
    loss = jax.jit(method.loss)
    total, measures = loss(params, tiny.params, batch, jax.random.key(0))
    np.testing.assert_allclose(total / measures.weight, 0, atol=1e-5)
    np.testing.assert_array_equal(measures.prefix_correct, measures.counts)
    # The broken variant learns each label from the wrong row.
    late = {"final_norm": jnp.roll(batch.features["final_norm"], 1, axis=1)}
    total, measures = loss(params, tiny.params, batch.replace(features=late), jax.random.key(0))
    assert total / measures.weight > 0.1
    assert measures.correct[0] < 0.5 * measures.counts[0]


@pytest.mark.parametrize("part", ["kl", "tv"])
def test_gradients(part, tiny, batch):
    loss = DistillLoss(**{"kl": 0.0, "tv": 0.0, part: 1.0})
    method = distill_method(tiny, (0, 2), SOME, loss)
    params = shaken(method.init(jax.random.key(0)))
    both = jax.value_and_grad(method.loss, has_aux=True)
    gradient = jax.jit(both)
    (total, measures), grads = gradient(params, tiny.params, batch, jax.random.key(0))
    assert list(measures.losses) == [part]
    assert total > 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)

    def same(other):
        (value, _), theirs = gradient(params, tiny.params, other, jax.random.key(0))
        pairs = zip(*map(jax.tree.leaves, (grads, theirs)), strict=True)
        close = [np.allclose(mine, other, atol=1e-6) for mine, other in pairs]
        return bool(np.isclose(value, total, rtol=1e-6)) and all(close)

    # Tokens after the last label of its conversation, and padding, have no influence.
    tokens = batch.tokens.at[0, 20].set(3).at[0, 21:].set(9)
    assert same(batch.replace(tokens=tokens))
    # Nor have features of rows that no label is predicted from.
    rows = np.zeros((2, 24), bool)
    for row in range(2):
        rows[row, np.asarray(batch.labels[row])[np.asarray(batch.labels[row]) >= 0] - 1] = True
    features = jnp.where(rows[:, :, None], batch.features["final_norm"], 7.0)
    assert same(batch.replace(features={"final_norm": features}))
    # A conversation is not seen from another one of its row; but from its own labels.
    assert not same(batch.replace(tokens=batch.tokens.at[0, 11].set(3)))
    other = batch.tokens.at[0, :4].set(3)
    alone = batch.replace(labels=batch.labels.at[0, :6].set(-1), tokens=other)
    (_, before), _ = gradient(
        params, tiny.params, alone.replace(tokens=batch.tokens), jax.random.key(0)
    )
    (_, after), _ = gradient(params, tiny.params, alone, jax.random.key(0))
    np.testing.assert_allclose(before.losses[part], after.losses[part], rtol=1e-6)


def test_training_brings_the_draft_to_the_target(tiny, batch):
    method = distill_method(tiny, (0, 2), None, DistillLoss())
    optimizer = optax.adam(1e-2)

    def step(params, state):
        (total, measures), grads = jax.value_and_grad(method.loss, has_aux=True)(
            params, tiny.params, batch, jax.random.key(0)
        )
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, total / measures.weight

    params = method.init(jax.random.key(0))
    state, losses = optimizer.init(params), []
    step = jax.jit(step)
    for _ in range(30):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]


def test_layers_that_lie_apart_give_the_same_draft(tiny):
    apart = dataclasses.replace(
        tiny,
        form=dataclasses.replace(tiny.form, layers="apart"),
        params={
            **tiny.params,
            "layers": {
                str(layer): jax.tree.map(lambda leaf: leaf[layer], tiny.params["layers"])  # noqa: B023
                for layer in range(3)
            },
        },
    )
    one, other = some_layers(tiny, (2, 0)), some_layers(apart, (2, 0))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, theirs in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_layers_that_the_target_does_not_have(tiny):
    with pytest.raises(
        InputError, match=r"^distill\.layers=\(0, 3\): .* no layer 3; use some of 0\.\.2"
    ):
        distill_method(tiny, (0, 3), None, DistillLoss())
    with pytest.raises(InputError, match=r"^distill\.layers=\(\): name the"):
        distill_method(tiny, (), None, DistillLoss())
