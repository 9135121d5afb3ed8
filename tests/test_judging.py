"""Losses by blocks of labels are the losses by definition, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.data.batches import Batch
from train.methods import draft_losses
from train.methods.draft_losses import (
    Scoring,
    Teacher,
    cross_entropy,
    kl_divergence,
    score_drafts,
    variation,
)

K, B, A, D, V = 3, 2, 11, 6, 9
PARTS = ((kl_divergence, 0.5), (variation, 2.0), (cross_entropy, 0.25))


@pytest.fixture(scope="module")
def case():
    """States, one kernel and one for each draft, a teacher, what counts, and weights."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    teacher = Teacher(
        normal(B, A, D),
        normal(D, V),
        jnp.asarray(rng.integers(V, size=(B, A)).astype(np.int32)),
        jnp.ones((B, A), bool),
    )
    # A draft never counts where there is no label so far on.
    within = np.arange(A)[None, None, :] + np.arange(K)[:, None, None] < A
    counted = jnp.asarray((rng.random((K, B, A)) < 0.7) & within)
    weights = jnp.asarray(np.array([1, 0.8, 2], np.float32))
    return normal(K, B, A, D), normal(K, D, V), teacher, counted, weights


def whole(states, kernel, teacher, counted, weights):
    """Every logit at once, by the definitions."""
    p = jax.nn.softmax(jnp.einsum("bad,dv->bav", teacher.features, teacher.columns))
    total, losses, right = 0.0, [], []
    for draft in range(K):
        own = kernel if kernel.ndim == 2 else kernel[draft]
        q = jax.nn.softmax(jnp.einsum("bad,dv->bav", states[draft], own))
        # The truth of the label `draft` places further; what is rolled over the end never counts.
        distribution, token = jnp.roll(p, -draft, axis=1), jnp.roll(teacher.token, -draft, axis=1)
        parts = (
            jnp.sum(distribution * (jnp.log(distribution) - jnp.log(q)), axis=-1),
            1 - jnp.minimum(distribution, q).sum(axis=-1),
            -jnp.log(jnp.take_along_axis(q, token[:, :, None], axis=-1)[:, :, 0]),
        )
        sums = jnp.stack([jnp.where(counted[draft], part, 0.0).sum() for part in parts])
        total += weights[draft] * jnp.dot(sums, jnp.array([weight for _, weight in PARTS]))
        losses.append(sums)
        right.append(counted[draft] & (q.argmax(axis=-1) == distribution.argmax(axis=-1)))
    return total, (jnp.stack(losses), jnp.stack(right))


@pytest.mark.parametrize(("block", "shared"), [(7, True), (4, False), (512, False)])
def test_blocks_change_nothing(block, shared, case, monkeypatch):
    monkeypatch.setattr(draft_losses, "_BLOCK", block)
    states, kernel, teacher, counted, weights = case
    kernel = kernel[0] if shared else kernel

    def blocked(states, kernel):
        return score_drafts(Scoring(PARTS, True), states, kernel, teacher, counted, weights)

    def slowly(states, kernel):
        return whole(states, kernel, teacher, counted, weights)

    (got, want) = (
        jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(states, kernel)
        for loss in (blocked, slowly)
    )
    (total, (losses, right)), grads = got
    (wanted, (wanted_losses, wanted_right)), wanted_grads = want
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    np.testing.assert_array_equal(right, wanted_right)
    assert 0 < right.sum() < counted.sum()
    for mine, theirs in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    # Without gradients the same numbers come out.
    np.testing.assert_allclose(jax.jit(blocked)(states, kernel)[0], total, rtol=1e-6)


def test_a_frozen_kernel_has_no_gradient(case):
    states, kernel, teacher, counted, weights = case

    def loss(trains, states, kernel, factor):
        plan = Scoring(PARTS[:1], trains)
        return factor * score_drafts(plan, states, kernel, teacher, counted, weights)[0]

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    to_states, to_kernel = gradient(True, states, kernel, 1.0)
    frozen, nothing = gradient(False, states, kernel, 3.0)
    # Whatever is made of the loss later on counts too.
    np.testing.assert_allclose(frozen, 3 * to_states, rtol=1e-5, atol=1e-6)
    assert not nothing.any()
    assert to_kernel.any()
    # A draft that does not count has no gradient, one that counts has.
    moved = np.abs(frozen).max(axis=-1) > 0
    np.testing.assert_array_equal(moved, counted)


def test_a_teacher_of_a_batch():
    tokens = jnp.array([[4, 8, 3, 5, 7, 3]])
    labels = jnp.array([[2, 3, 4, -1]])
    features = {"final_norm": jnp.arange(12.0).reshape(1, 6, 2)}
    batch = Batch(tokens, tokens, tokens, labels, features)
    teacher = Teacher.of(batch, jnp.ones((2, 3)), jnp.array([3, 5, 8]))
    np.testing.assert_array_equal(teacher.features[0, :3], [[2, 3], [4, 5], [6, 7]])
    np.testing.assert_array_equal(teacher.known[0, :3], [True, True, False])
    np.testing.assert_array_equal(teacher.token[0, :2], [0, 1])
    np.testing.assert_array_equal(
        teacher.counts(labels, 2)[:, 0], [[True, True, False, False], [True, False, False, False]]
    )
    whole = Teacher.of(batch, jnp.ones((2, 9)), None)
    assert whole.known.all()
    np.testing.assert_array_equal(whole.token[0, :3], [3, 5, 7])
