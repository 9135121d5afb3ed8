"""Losses by blocks of labels are the losses by definition, and so are their gradients."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from test_distill import shaken
from tiny_models import SOME, eagle_config, medusa_config, mtp_config
from toy_training import two_rows, with_features

from specjax.apps.command_line.config_file import read_config
from train.data.batches import Batch
from train.methods import blockwise_loss
from train.methods.blockwise_loss import Scoring, Teacher, score_drafts
from train.methods.distill import DistillLoss, distill_method
from train.methods.eagle import EagleLoss, eagle_method
from train.methods.losses import cross_entropy, dpace_weights, kl_divergence, variation
from train.methods.medusa import MedusaLoss, medusa_method
from train.methods.medusa2 import JointLoss, medusa2_method
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.run.config import read_training_config

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
    # A draft never counts where there is no label that far after.
    within = np.arange(A)[None, None, :] + np.arange(K)[:, None, None] < A
    counted = jnp.asarray((rng.random((K, B, A)) < 0.7) & within)
    weights = jnp.asarray(np.array([1, 0.8, 2], np.float32))
    return normal(K, B, A, D), normal(K, D, V), teacher, counted, weights


def whole(states, kernel, teacher, counted, weights):
    """Every logit at once, by the definitions."""
    p = jax.nn.softmax(jnp.einsum("bad,dv->bav", teacher.features, teacher.columns))
    total, losses, right, choices = 0.0, [], [], []
    for draft in range(K):
        own = kernel if kernel.ndim == 2 else kernel[draft]
        q = jax.nn.softmax(jnp.einsum("bad,dv->bav", states[draft], own))
        # The truth of the label `draft` positions after; what is rolled over the end never counts.
        distribution, token = jnp.roll(p, -draft, axis=1), jnp.roll(teacher.token, -draft, axis=1)
        parts = (
            jnp.sum(distribution * (jnp.log(distribution) - jnp.log(q)), axis=-1),
            1 - jnp.minimum(distribution, q).sum(axis=-1),
            -jnp.log(jnp.take_along_axis(q, token[:, :, None], axis=-1)[:, :, 0]),
        )
        sums = jnp.stack([jnp.where(counted[draft], part, 0.0).sum() for part in parts])
        total += weights[draft] * jnp.dot(sums, jnp.array([weight for _, weight in PARTS]))
        losses.append(sums)
        choices.append(q.argmax(axis=-1))
        right.append(counted[draft] & (choices[-1] == distribution.argmax(axis=-1)))
    return total, (jnp.stack(losses), jnp.stack(right), jnp.stack(choices))


@pytest.mark.parametrize(("block", "shared"), [(7, True), (4, False), *slow((512, False))])
def test_blocks_change_nothing(block, shared, case, monkeypatch):
    monkeypatch.setattr(blockwise_loss, "_BLOCK", block)
    states, kernel, teacher, counted, weights = case
    kernel = kernel[0] if shared else kernel

    # Weights of drafts, or of each draft and label.
    each = weights if shared else jnp.broadcast_to(weights[:, None, None], counted.shape)

    def blocked(states, kernel):
        plan = Scoring(PARTS, True, overlaps=True)
        return score_drafts(plan, states, kernel, teacher, counted, each)

    def slowly(states, kernel):
        return whole(states, kernel, teacher, counted, weights)

    (got, want) = (
        jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(states, kernel)
        for loss in (blocked, slowly)
    )
    (total, (losses, right, choices, overlaps)), grads = got
    (wanted, (wanted_losses, wanted_right, wanted_choices)), wanted_grads = want
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    np.testing.assert_array_equal(right, wanted_right)
    np.testing.assert_array_equal(choices, wanted_choices)
    missed = jnp.where(counted, 1 - overlaps, 0.0).sum(axis=(1, 2))
    np.testing.assert_allclose(missed, wanted_losses[:, 1], rtol=1e-5)
    assert 0 < right.sum() < counted.sum()
    for mine, theirs in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    # Without gradients the same numbers come out.
    np.testing.assert_allclose(jax.jit(blocked)(states, kernel)[0], total, rtol=1e-6)


def test_the_data_alone_can_teach(case):
    """The same cross-entropy, right where the data's token is the likeliest."""
    states, kernel, teacher, counted, weights = case
    plan = Scoring(((cross_entropy, 1.0),), True)

    def both(states):
        return [
            score_drafts(plan, states, kernel, one, counted, weights)
            for one in (teacher, teacher._replace(features=None, columns=None))
        ]

    (total, scores), (same, alone) = jax.jit(both)(states)
    np.testing.assert_allclose(same, total, rtol=1e-6)
    np.testing.assert_array_equal(alone.choices, scores.choices)
    tokens = jnp.stack([jnp.roll(teacher.token, -draft, axis=1) for draft in range(K)])
    np.testing.assert_array_equal(alone.right, counted & (alone.choices == tokens))
    assert (alone.right != scores.right).any()


def expected_length(chances):
    """The expected number of accepted tokens before the first refusal, summed over outcomes."""
    total = 0.0
    for outcome in itertools.product((False, True), repeat=len(chances)):
        odds = np.where(outcome, chances, 1 - np.array(chances))
        total += odds.prod() * np.cumprod(outcome).sum()
    return total


def test_dpace_weighs_what_the_expected_length_gains(case):
    """Where a draft has no label, or one that it cannot draft, its length ends."""
    states, kernel, teacher, counted, _ = case
    alpha, q = 0.3, np.zeros((K, B, A))
    for draft, row, label in np.argwhere(counted):
        logits = np.asarray(states[draft, row, label] @ kernel[draft], np.float64)
        q[draft, row, label] = np.exp(logits - np.logaddexp.reduce(logits))[
            teacher.token[row, label + draft]
        ]
    chances = np.where(counted, (1 - alpha) * q + alpha, 0.0)
    wanted = np.zeros_like(q)
    for draft, row, label in np.argwhere(counted):
        # The expected length is linear in the chance of each position.
        own = chances[:, row, label].copy()
        ends = [expected_length([*own[:draft], end, *own[draft + 1 :]]) for end in (0.0, 1.0)]
        wanted[draft, row, label] = own[draft] * (ends[1] - ends[0])
    np.testing.assert_allclose(dpace_weights(jnp.asarray(q), counted, alpha), wanted, atol=1e-6)
    assert (wanted[:, counted[0] & ~counted[1] & counted[2]][2] == 0).all()
    assert (counted[0] & ~counted[1] & counted[2]).any()
    plan = Scoring(((cross_entropy, 1.0),), True, alpha=alpha)
    total, _ = score_drafts(plan, states, kernel, teacher, counted, jnp.ones(K))
    logs = np.log(np.where(counted, q, 1.0))
    np.testing.assert_allclose(total, -(wanted * logs).sum(), rtol=1e-5)


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


def cross_entropy_to_target(logits, truth):
    """Written anew: the usual loss of EAGLE heads."""
    return -jnp.sum(jnp.exp(truth.log_probs) * jax.nn.log_softmax(logits), axis=-1)


def one_each(logits, truth):
    """A loss of 1 for each label, whatever the draft says."""
    return jnp.ones(truth.token.shape) + 0 * logits.sum(axis=-1)


def eagle(target, **loss):
    config = eagle_config(target, vocabulary=len(SOME))
    return eagle_method(target, config, SOME, EagleLoss(steps=2, decay=0.5, **loss))


def medusa(target, **loss):
    return medusa_method(target, medusa_config(target, ids=SOME), SOME, MedusaLoss(**loss))


def medusa2(target, **loss):
    config, joint = medusa_config(target, ids=SOME), JointLoss(heads=0.5, ramp=False)
    method = medusa2_method(target, config, SOME, MedusaLoss(**loss), joint)
    return method._replace(loss=lambda *given: method.loss(*given, jnp.int32(0)))


def mtp(target, **loss):
    config = mtp_config(target, 2)
    return mtp_method(target, config, None, MtpLoss(steps=2, labels="distributions", **loss))


def distill(target, **loss):
    return distill_method(target, (0, 2), SOME, DistillLoss(**loss))


@pytest.mark.parametrize(
    ("make", "usual"),
    [
        (mtp, kl_divergence),
        # Command lines of all take one, below.
        *slow(
            (eagle, cross_entropy_to_target),
            (medusa, kl_divergence),
            (medusa2, kl_divergence),
            (distill, kl_divergence),
        ),
    ],
)
def test_each_method_takes_a_loss_of_labels(make, usual, tiny):
    methods = [make(tiny), make(tiny, label_loss=usual), make(tiny, label_loss=one_each)]
    batch = with_features(tiny, two_rows(tiny.config.vocab_size), methods[0].features)
    params = shaken(methods[0].init(jax.random.key(0)))

    def both(params, target_params):
        return [
            jax.value_and_grad(method.loss, has_aux=True)(params, target_params, batch, None)
            for method in methods
        ]

    default, same, ones = jax.jit(both)(params, tiny.params)
    np.testing.assert_allclose(same[0][0], default[0][0], rtol=1e-5)
    for mine, theirs in zip(*map(jax.tree.leaves, (same[1], default[1])), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(default[1])) > 0.01
    assert abs(ones[0][0] - default[0][0]) > 1
    if make is not medusa2:
        # The method's own sums, and nothing else: its gradient is that of a constant.
        assert not any(leaf.any() for leaf in jax.tree.leaves(ones[1]))
    if make is distill:
        known = np.isin(batch.tokens, SOME)
        labels = [(row, label) for row in range(2) for label in batch.labels[row] if label >= 0]
        assert ones[0][0] == sum(known[position] for position in labels)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("eagle", {}),
        ("medusa", {}),
        ("distill", {"distill.layers": (0, 2)}),
        ("mtp", {"mtp.draft_vocab_size": len(SOME), "mtp.export": "head"}),
    ],
)
def test_command_lines_take_it_too(module, options, tiny):
    module = importlib.import_module(f"train.{module}")
    values = read_config([], module.Config.DEFAULT)
    values.update_from_flattened_dict(options)
    config = read_training_config(module.Config, values.to_dict())
    seen = []

    def noted(logits, truth):
        seen.append(logits.shape[-1])
        return one_each(logits, truth)

    method = module.make_method(tiny, lambda size: SOME, config, label_loss=noted)
    batch = with_features(tiny, two_rows(tiny.config.vocab_size), method.features)
    jax.eval_shape(method.loss, method.init(jax.random.key(0)), tiny.params, batch, None)
    assert set(seen) == {len(SOME)}
