"""Medusa's losses: their definition, what heads learn, and training the target with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_config
from decoding import decode, greedy
from tiny_models import SOME, medusa_config, medusa_head
from toy_training import two_rows, with_features

from specjax.drafters import head_drafter
from specjax.loading.load import random_model
from specjax.methods.medusa.head import Medusa
from train.data.batches import Batch
from train.methods.medusa import MedusaLoss, medusa_method
from train.methods.medusa2 import JointLoss, medusa2_method
from train.methods.method import Method

V = 61
KEY = jax.random.key(0)
FORMS = {
    "shared": dict(original_lm_head=True, ids=SOME),
    "own": dict(original_lm_head=False, num_layers=2),
    "projected": dict(projection=True, ids=SOME),
}


@pytest.fixture(scope="module")
def batch(tiny):
    return with_features(tiny, two_rows(V))


def method_of(target, labels="distributions", **options) -> Method:
    config = medusa_config(target, **options)
    loss = MedusaLoss(labels=labels, decay=0.5)
    return medusa_method(target, config, options.get("ids"), loss)


def silu(x):
    return x / (1 + np.exp(-x))


def slow_loss(params, target, batch, ids, own, labels):
    """The definition: label by label, head by head."""
    head = np.asarray(target.params["head"]["kernel"], np.float64)
    ids = np.arange(V) if ids is None else ids
    features = np.asarray(batch.features["final_norm"], np.float64)
    kernels, biases = (
        np.asarray(params["blocks"][name], np.float64) for name in ("kernel", "bias")
    )
    heads, weight = len(kernels), 0
    losses, correct, along, counts = np.zeros((4, heads))
    for row in range(2):
        there = {int(label) for label in batch.labels[row] if label >= 0}
        for label in there:
            weight += 1
            prefix = True
            for number in range(heads):
                if not set(range(label, label + number + 1)) <= there:
                    break
                x = features[row, label - 2]
                for kernel, bias in zip(kernels[number], biases[number], strict=True):
                    x = x + silu(x @ kernel + bias)
                if "projection" in params:
                    x = x @ np.asarray(params["projection"]["kernel"][number], np.float64)
                kernel = params["head"]["kernel"][number] if own else head[:, ids]
                q = np.exp(x @ np.asarray(kernel, np.float64))
                q /= q.sum()
                p = np.exp(features[row, label + number - 1] @ head[:, ids])
                p /= p.sum()
                counts[number] += 1
                token = int(batch.tokens[row, label + number])
                right = token in ids and p.argmax() == q.argmax()
                if token in ids and labels == "distributions":
                    losses[number] += np.sum(p * np.log(p / q))
                elif token in ids:
                    losses[number] -= np.log(q[ids.tolist().index(token)])
                prefix &= right
                correct[number] += right
                along[number] += prefix
    return np.dot(0.5 ** np.arange(heads), losses), losses, weight, correct, along, counts


@pytest.mark.parametrize(
    ("form", "labels"),
    [("shared", "distributions"), ("own", "tokens"), ("projected", "distributions")],
)
def test_the_loss_by_definition(form, labels, tiny, batch):
    options = FORMS[form]
    method = method_of(tiny, labels, **options)
    params = medusa_head(tiny, spread=0.2, **options).params
    arguments = (params, tiny.params, batch, KEY)
    total, measures = jax.jit(method.loss)(*arguments)
    own = not options.get("original_lm_head", True)
    wanted = slow_loss(params, tiny, batch, options.get("ids"), own, labels)
    np.testing.assert_allclose(total, wanted[0], rtol=1e-4)
    for number, loss in enumerate(wanted[1]):
        np.testing.assert_allclose(measures.losses[f"head_{number}"], loss, rtol=1e-4)
    assert measures.weight == wanted[2]
    for got, want in zip(
        (measures.correct, measures.prefix_correct, measures.counts), wanted[3:], strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert (measures.counts[:-1] > measures.counts[1:]).all()


@pytest.mark.parametrize("form", FORMS)
def test_heads_start_as_the_targets_own(form, tiny, batch):
    """At first each head repeats what the target itself says of the token before the label."""
    options = FORMS[form]
    method = method_of(tiny, **options)
    params = method.init(KEY)
    head = Medusa(medusa_config(tiny, **options), jnp.dtype("float32"))
    features = batch.features["final_norm"]
    kernel = tiny.params["head"]["kernel"]
    kernel = kernel if options.get("ids") is None else kernel[:, SOME]
    whole = {**params, "shared": {"draft_head": {"kernel": kernel}}}

    def every(params, features):
        states = head.states(params, features)
        return [head.logits(params, states[number], number) for number in range(3)]

    for got in jax.jit(every)(whole, features):
        np.testing.assert_allclose(got, jnp.einsum("btd,dv->btv", features, kernel), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form, tiny, batch):
    method = method_of(tiny, **FORMS[form])
    params = medusa_head(tiny, spread=0.2, **FORMS[form]).params
    both = jax.value_and_grad(method.loss, has_aux=True)
    gradient = jax.jit(both)
    (total, _), grads = gradient(params, tiny.params, batch, KEY)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        # Every head, and every block of it.
        assert np.abs(leaf).reshape(3, -1).max(axis=1).all(), jax.tree_util.keystr(path)
    labels = np.asarray(batch.labels)
    tokens = np.ones((2, 24), bool)
    rows = np.zeros((2, 24), bool)
    for row in range(2):
        there = labels[row][labels[row] >= 0]
        tokens[row, there] = False
        rows[row, np.union1d(there - 1, there - 2)] = True
    features = jnp.where(rows[:, :, None], batch.features["final_norm"], 7.0)
    other = batch.replace(
        tokens=jnp.where(tokens, 0, batch.tokens), features={"final_norm": features}
    )
    (again, _), theirs = gradient(params, tiny.params, other, KEY)
    np.testing.assert_allclose(again, total, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, theirs)
    # One label less, and it is another gradient.
    less = batch.replace(labels=batch.labels.at[1, 0].set(-1))
    assert gradient(params, tiny.params, less, KEY)[0][0] < total


def cycling():
    """A target that only counts: after x comes x + 7, whatever was before."""
    config = tiny_config(num_layers=1)
    target = random_model(config, 0, dtype="float32")
    params = jax.tree.map(jnp.zeros_like, target.params)
    table = np.random.default_rng(0).standard_normal((V, config.hidden_size)).astype(np.float32)
    table /= np.sqrt((table**2).mean(axis=1, keepdims=True))
    params["embed"] = {"embedding": jnp.asarray(table)}
    params["final_norm"] = {"scale": jnp.ones(config.hidden_size)}
    params["head"] = {"kernel": jnp.asarray(np.roll(table, 7, axis=0).T)}
    return dataclasses.replace(target, params=params)


def trainer(method, target, batch, steps=60, rate=3e-2):
    """A function from a batch to parameters after a few steps of Adam, and the last measures."""
    optimizer = optax.adam(rate)

    def step(params, state, number, batch):
        more = (number,) if method.takes_step else ()
        grads, measures = jax.grad(method.loss, has_aux=True)(
            params, target.params, batch, KEY, *more
        )
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, measures

    first = method.init(KEY)
    begin = (first, optimizer.init(first))
    compiled = jax.jit(step)

    def train(batch):
        params, state = begin
        for number in range(steps):
            params, state, measures = compiled(params, state, jnp.int32(number), batch)
        return params, measures

    return train


def counting_batch(target, late=0):
    """Every token of the cycle, followed by what the target says; `late` breaks the alignment."""
    tokens = (7 * np.arange(64)[None, :] + np.arange(2)[:, None]).astype(np.int32) % V
    every = np.ones((2, 64), np.int32)
    labels = np.tile(np.arange(2, 64, dtype=np.int32), (2, 1))
    batch = Batch(
        *map(jnp.asarray, (tokens, every * np.arange(64, dtype=np.int32), every, labels)), {}
    )
    batch = with_features(target, batch)
    features = jnp.roll(batch.features["final_norm"], late, axis=1)
    return batch.replace(features={"final_norm": features})


PAIRS = [[start, (start + 7) % V] for start in range(0, V, 5)]


def after_pairs(count):
    return [[(start + 7 * i) % V for i in range(2, count + 2)] for start, _ in PAIRS]


def test_trained_heads_are_right_and_those_a_row_off_are_not():
    target = cycling()
    method = method_of(target, "tokens", original_lm_head=False, heads=2)
    drafter = head_drafter(method.head(method.init(KEY), {}), target)
    train = trainer(method, target, counting_batch(target))
    for late in (0, 1):
        params, measures = train(counting_batch(target, late))
        drafter = drafter._replace(params={**drafter.params, **params})
        got = decode(target, PAIRS, drafter=drafter, sampling=greedy(max_new_tokens=9))
        assert got.token_ids == after_pairs(9)
        participated = got.emitted > 0
        if late:
            # It learned just as well, but what decoding does not ask for.
            assert measures.losses["head_0"] < 0.5 * measures.weight
            assert got.accepted[participated].mean() < 0.2
        else:
            np.testing.assert_array_equal(measures.correct, measures.counts)
            assert (got.accepted == got.drafted).all()


def test_the_target_learns_too(tiny, batch):
    """Two stages: the heads alone, then both, and the target stays close to what it said."""
    config = medusa_config(tiny, heads=2, ids=SOME)
    joint = JointLoss(heads=0.1, warm_steps=3, steps=10)
    method = medusa2_method(tiny, config, SOME, MedusaLoss(), joint)
    params = method.init(KEY)
    params["heads"] = medusa_head(tiny, heads=2, ids=SOME, spread=0.2).params
    both = jax.value_and_grad(method.loss, has_aux=True)
    gradient = jax.jit(both)

    (alone, _), grads = gradient(params, tiny.params, batch, KEY, jnp.int32(2))
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads["target"]))
    assert all(leaf.any() for leaf in jax.tree.leaves(grads["heads"]))
    first = medusa_method(tiny, config, SOME, MedusaLoss())
    arguments = (params["heads"], tiny.params, batch, KEY)
    wanted, _ = jax.jit(first.loss)(*arguments)
    np.testing.assert_allclose(alone, wanted, rtol=1e-5)

    for step, share in ((3, np.sin(np.pi / 14)), (9, 1.0), (2**31 - 1, 1.0)):
        (total, measures), grads = gradient(params, tiny.params, batch, KEY, jnp.int32(step))
        # The target is still what it was: its own loss is zero.
        np.testing.assert_allclose(measures.losses["target"], 0, atol=1e-3)
        np.testing.assert_allclose(total, 0.1 * share * wanted, rtol=1e-3, atol=1e-3)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert leaf.any(), jax.tree_util.keystr(path)

    moved = {**params, "target": jax.tree.map(lambda leaf: 1.1 * leaf, params["target"])}
    (_, measures), _ = gradient(moved, tiny.params, batch, KEY, jnp.int32(9))
    assert measures.losses["target"] > 1
    np.testing.assert_array_equal(
        method.model(moved).params["final_norm"]["scale"], moved["target"]["final_norm"]["scale"]
    )


@pytest.mark.parametrize("warm", [0, 3])
def test_the_weight_of_the_heads_grows_to_the_end_and_stays(warm):
    joint = JointLoss(heads=0.1, warm_steps=warm, steps=warm + 10)
    # The last one is the largest step there is.
    steps = jnp.asarray([warm, warm + 4, warm + 9, warm + 10, 2**31 - 1], jnp.int32)
    wanted = 0.1 * np.sin(np.pi / 20 * np.array([1, 5, 10, 10, 10]))
    np.testing.assert_allclose([*map(joint.weight, steps)], wanted, rtol=1e-6)


def test_medusa_2_on_a_cycle():
    """The tuned target and its heads decode together, exactly."""
    target = cycling()
    config = medusa_config(target, heads=2, original_lm_head=False)
    joint = JointLoss(target="tokens", heads=0.2, ramp=False, warm_steps=40, steps=60)
    method = medusa2_method(target, config, None, MedusaLoss(labels="tokens"), joint)
    batch = counting_batch(target)
    params, measures = trainer(method, target, batch)(batch)
    assert measures.losses["target"] / measures.weight < 0.1
    tuned, head = method.model(params), method.head(params, {})
    drafter = head_drafter(head, tuned)
    got = decode(tuned, PAIRS, drafter=drafter, sampling=greedy(max_new_tokens=9))
    assert got.token_ids == after_pairs(9)
    assert (got.accepted == got.drafted).all()
