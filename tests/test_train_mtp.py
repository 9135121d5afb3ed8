"""MTP training: no label is visible to its own prediction, and the loss is its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from test_mtp import CONVENTIONS, reference, wide
from tiny_models import SOME, mtp_config, mtp_head
from toy_training import two_rows, with_features

from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.methods.heads.shared_parameters import share
from specjax.models.config import Attention, Experts
from specjax.models.mtp import Mtp
from train.methods import mtp_loss, target_loss
from train.methods.blockwise_loss import score_drafts
from train.methods.method import Measures
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.methods.unroll import unroll
from train.run.metrics import scalars, sums_of

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def batch(tiny):
    return two_rows(tiny.config.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def spoken(decoder, params, tokens):
    """The target's logits and features over one conversation, padded: it is causal."""
    count = len(tokens)
    result = decoder.extend(
        params,
        tokens[None],
        jnp.arange(count)[None],
        None,
        None,
        0,
        jnp.tril(jnp.ones((1, count, count), bool)),
        features=("final_norm", "pre_norm"),
    )
    return result.logits[0], jax.tree.map(lambda value: value[0], result.features)


@pytest.mark.parametrize(
    ("modules", "steps", "convention"),
    [
        *((1, 3, "raw"), (2, 4, "default")),
        *slow(*((1, 3, name) for name in CONVENTIONS), *((3, 4, name) for name in CONVENTIONS)),
    ],
)
def test_training_runs_what_decoding_runs(modules, steps, convention, tiny, batch):
    """The plain computation that drafts are compared with, on true tokens in place of drafts."""
    made = mtp_head(tiny, modules, **CONVENTIONS[convention])
    head = Mtp(made.config, jnp.dtype("float32"))
    params = {**made.params, "shared": share(tiny.params, None, head=True)}
    filled = with_features(tiny, batch, (made.config.hidden,))

    @jax.jit
    def unrolled(params):
        return [
            head.logits(head.module(params, min(index, modules - 1)), step.output)
            for index, step in enumerate(unroll(head, params, filled, filled.features, steps))
        ]

    got = unrolled(params)
    for row, column in ((0, 0), (0, 7), (1, 5)):
        label, segment = int(batch.labels[row, column]), np.asarray(batch.segments[row])
        where = np.flatnonzero(segment == segment[label])
        begin = label - where[0]
        known, features = (
            np.asarray(batch.tokens[row])[where],
            {made.config.hidden: np.asarray(filled.features[made.config.hidden][row])[where]},
        )
        features = {name: value[: begin - 1] for name, value in features.items()}
        for index in range(steps):
            every = reference(made.config, wide(params), known[: begin + index], features)
            wanted = every[min(index, modules - 1)][-1]
            np.testing.assert_allclose(got[index][row, column], wanted, atol=2e-4, rtol=1e-3)


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def slow_loss(config, modules, target_params, tiny, ids, batch, labels):
    """By the definition, conversation by conversation: sums of losses by depth, and what is right.

    Module k predicts x_{t+k+2} from row t where x_{t+2} .. x_{t+k+2} are labels, and known.
    """
    every = np.arange(tiny.config.vocab_size) if ids is None else np.asarray(ids)
    shared = share(target_params, None if ids is None else jnp.asarray(ids), head=True)
    depths = config.num_modules
    lm, weight, sums, right, counts = 0.0, 0, *np.zeros((3, depths))
    for row in range(2):
        there = set(np.asarray(batch.labels[row]).tolist()) - {-1}
        weight += len(there)
        for segment in {1, 2} & set(np.asarray(batch.segments[row]).tolist()):
            where = np.flatnonzero(np.asarray(batch.segments[row]) == segment)
            tokens = np.asarray(batch.tokens[row])[where]
            padded = np.pad(tokens, (0, 24 - len(tokens)))
            says, features = spoken(tiny.architecture, target_params, padded)
            says = np.asarray(says, np.float64)
            pairs = {name: np.asarray(value)[: len(tokens) - 1] for name, value in features.items()}
            drafts = reference(config, wide({**modules, "shared": shared}), tokens, pairs)
            for t in range(1, len(tokens)):
                if where[t] in there:
                    lm -= log_softmax(says[t - 1])[tokens[t]]
            for depth in range(depths):
                for t in range(len(tokens) - 2 - depth):
                    target = t + depth + 2
                    if not set(where[t + 2 : target + 1].tolist()) <= there:
                        continue
                    counts[depth] += 1
                    logq, p = log_softmax(drafts[depth][t]), says[target - 1]
                    right[depth] += every[logq.argmax()] == p.argmax()
                    if tokens[target] not in every:
                        continue
                    if labels == "tokens":
                        sums[depth] -= logq[np.searchsorted(every, tokens[target])]
                    else:
                        logp = log_softmax(p[every])
                        sums[depth] += (np.exp(logp) * (logp - logq)).sum()
    return lm, weight, sums, right, counts


def shares_of(decay, steps):
    shares = decay ** np.arange(steps)
    return shares / shares.sum()


@pytest.mark.parametrize(
    ("modules", "convention", "labels"),
    [
        (1, "hidden_first", "tokens"),
        (2, "default", "distributions"),
        *slow((1, "zero_first", "distributions"), (2, "raw", "tokens"), (3, "pre_norm", "tokens")),
    ],
)
def test_the_loss_of_modules_is_its_definition(modules, convention, labels, tiny, batch):
    ids = SOME if modules == 1 else None
    head = mtp_head(tiny, modules, None if ids is None else len(ids), **CONVENTIONS[convention])
    method = mtp_method(
        tiny, head.config, ids, MtpLoss(labels, steps=modules, decay=0.5), exports="head"
    )
    _, weight, sums, _, counts = slow_loss(
        head.config, head.params, tiny.params, tiny, ids, batch, labels
    )
    filled = with_features(tiny, batch, method.features)
    total, measures = jax.jit(method.loss)(head.params, tiny.params, filled, None)
    np.testing.assert_allclose(total, shares_of(0.5, modules) @ sums, rtol=1e-4)
    check_measures(measures, weight, sums, counts)


@pytest.mark.parametrize(
    ("modules", "convention", "labels"),
    [
        (1, "zero_first", "distributions"),
        (2, "raw", "tokens"),
        *slow(
            (3, "pre_norm", "tokens"),
            (2, "default", "distributions"),
            (1, "hidden_first", "tokens"),
        ),
    ],
)
def test_the_loss_of_both_is_its_definition(modules, convention, labels, tiny, batch):
    head = mtp_head(tiny, modules, **CONVENTIONS[convention])
    loss = MtpLoss(labels, steps=modules, loss_weight=0.25, late_loss_weight=0.1, schedule_steps=10)
    method = mtp_method(tiny, head.config, None, loss, trains="all")
    lm, weight, sums, right, counts = slow_loss(
        head.config, head.params, tiny.params, tiny, None, batch, labels
    )
    own = lm if labels == "tokens" else 0.0
    # A teacher that is frozen is read for its distributions alone.
    assert method.features == (() if labels == "tokens" else ("final_norm",))
    filled = with_features(tiny, batch, method.features)
    both = {"target": tiny.params, "mtp": head.params}
    summed = jax.jit(method.loss)
    for step, weighs in ((6, 0.25), (7, 0.1)):
        total, measures = summed(both, tiny.params, filled, None, jnp.int32(step))
        np.testing.assert_allclose(total, own + weighs * sums.mean(), rtol=1e-4)
    np.testing.assert_allclose(measures.losses["lm"], own, rtol=1e-4, atol=1e-3)
    check_measures(measures, weight, sums, counts)
    np.testing.assert_array_equal(measures.correct, right)


def check_measures(measures: Measures, weight, sums, counts):
    assert measures.weight == weight
    for depth, value in enumerate(sums):
        np.testing.assert_allclose(measures.losses[f"mtp_{depth}"], value, rtol=1e-4)
    np.testing.assert_array_equal(measures.counts, counts)


@pytest.mark.parametrize(("modules", "steps"), [(2, 2), *slow((1, 3), (3, 3), (2, 4))])
@pytest.mark.parametrize("leaks", [False, True])
def test_no_label_is_visible_to_its_own_prediction(leaks, modules, steps, tiny, batch, monkeypatch):
    """Broken variant, as published: a module's input shifted like its label, which it reads."""
    head = mtp_head(tiny, modules)
    method = mtp_method(tiny, head.config, None, MtpLoss(steps=steps), trains="all")
    params = {"target": tiny.params, "mtp": head.params}
    seen = []

    def noted(plan, states, *rest):
        seen.append(states)
        return score_drafts(plan, states, *rest)

    def shifted(head, params, batch, taps, steps):
        tokens = jnp.roll(batch.tokens, -1, axis=1)
        return unroll(head, params, batch.replace(tokens=tokens), taps, steps)

    monkeypatch.setattr(target_loss, "score_drafts", noted)
    monkeypatch.setattr(mtp_loss, "score_drafts", noted)
    if leaks:
        monkeypatch.setattr(mtp_loss, "unroll", shifted)

    def states_of(tokens):
        """[1 + K, B, A, D]: the target's for each label, and the modules' for those after it."""
        seen.clear()
        method.loss(params, tiny.params, batch.replace(tokens=tokens), None, jnp.int32(0))
        return jnp.concatenate(seen)

    @jax.jit
    def changed(row, position):
        """Which states change with a token."""
        other = batch.tokens.at[row, position].add(1) % tiny.config.vocab_size
        return jnp.abs(states_of(batch.tokens) - states_of(other)).max(axis=-1) > 1e-4

    depth = np.maximum(np.arange(1 + steps) - 1, 0)[:, None]
    leaked, felt = 0, 0
    for row, position in ((0, 6), (0, 16), (1, 5), (1, 20)):
        found = np.asarray(changed(row, position))
        assert not found[:, 1 - row].any()
        labels, segments = np.asarray(batch.labels[row]), np.asarray(batch.segments[row])
        predicted, found = labels[None, :] + depth, found[:, row] & (labels >= 0)
        leaked += (found & (predicted == position)).sum()
        felt += (found & (predicted > position)).sum()
        if not leaks:
            # Nor are later tokens, or those of another conversation.
            others = segments[labels] != segments[position]
            assert not (found & ((predicted < position) | others)).any()
    assert felt > 20
    assert bool(leaked) == leaks


def test_everything_learns(tiny, batch):
    """The MTP loss reaches the modules, and the whole target through them."""
    head = mtp_head(tiny, 2)
    params = {"target": tiny.params, "mtp": head.params}

    loss = MtpLoss(steps=2, loss_weight=0.5, late_loss_weight=0.0, schedule_steps=10)
    method = mtp_method(tiny, head.config, None, loss, trains="all")
    gradient = jax.jit(jax.value_and_grad(method.loss, has_aux=True))
    found = [gradient(params, tiny.params, batch, None, jnp.int32(step)) for step in (6, 7)]
    ((total, measures), grads), ((own, _), alone) = jax.device_get(found)
    for depth in range(2):
        assert measures.losses[f"mtp_{depth}"] > 10
    drafts = sum(measures.losses[f"mtp_{depth}"] for depth in range(2)) / 2
    np.testing.assert_allclose(total - own, 0.5 * drafts, rtol=1e-4)
    assert not any(leaf.any() for leaf in jax.tree.leaves(alone["mtp"]))
    assert all(leaf.any() for leaf in jax.tree.leaves(alone["target"]))
    more = jax.tree.map(np.subtract, grads, alone)
    for path, leaf in jax.tree_util.tree_leaves_with_path(more):
        assert np.abs(leaf).max() > 1e-4, jax.tree_util.keystr(path)


def test_experts_learn(batch):
    """Those of a GLM-shaped target and of its module, and their routers; biases choose alone."""
    experts = Experts(
        4, 2, 8, router="sigmoid", selection_bias=True, shared_size=8, num_dense=1, scale=1.5
    )
    config = tiny_config(
        family="glm4_moe", attention=Attention(output_bias=False, qk_norm=True), experts=experts
    )
    target = random_model(config, 0, dtype="float32")
    head = mtp_head(target, decoder=config.one_layer(experts=True))
    method = mtp_method(target, head.config, None, MtpLoss(), trains="all")
    params = {"target": target.params, "mtp": head.params}
    _, grads = jax.jit(jax.value_and_grad(method.loss, has_aux=True))(
        params, target.params, batch, None, jnp.int32(0)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert leaf.any() == (path[-1].key != "selection_bias"), jax.tree_util.keystr(path)


def test_without_modules_the_target_alone_learns(tiny, batch):
    method = mtp_method(tiny, None, None, MtpLoss(steps=0), trains="all")
    params = method.init(KEY)
    total, measures = jax.jit(method.loss)(params, tiny.params, batch, None, jnp.int32(0))
    assert (list(params), method.head, method.schedules) == (["target"], None, {})
    np.testing.assert_allclose(total, measures.losses["lm"])
    assert measures.weight == 30
    assert "train/tau_sim" not in scalars(sums_of(total, measures), "train")
    assert method.model(params).mtp is None


def test_lambda_is_a_schedule():
    constant = MtpLoss(loss_weight=0.3)
    late = MtpLoss(loss_weight=0.3, late_loss_weight=0.1, late_from=0.6, schedule_steps=10)
    steps = jnp.arange(12)
    np.testing.assert_allclose([*map(constant.weight, steps)], 0.3)
    np.testing.assert_allclose([*map(late.weight, steps)], [0.3] * 6 + [0.1] * 6)
    # The largest step there is, and a weight that begins with nothing.
    np.testing.assert_allclose(late.weight(jnp.int32(2**31 - 1)), 0.1)
    begins = dataclasses.replace(late, loss_weight=0.0)
    np.testing.assert_allclose(begins.weight(jnp.int32(6)), 0.1)
    np.testing.assert_allclose(
        MtpLoss(steps=3, decay=0.6).step_weights, [0.510, 0.306, 0.184], atol=1e-3
    )


def test_modules_start_from_the_target(tiny):
    for concat, half in (("embedding_first", slice(24, None)), ("hidden_first", slice(24))):
        config = mtp_config(tiny, 2, concat=concat)
        method = mtp_method(tiny, config, None, MtpLoss(steps=2))
        params = method.init(KEY)
        kernel = np.array(params["modules"]["1"]["projection"]["kernel"])
        kernel[half] -= np.eye(24)
        assert np.abs(kernel).max() < 0.1
        # A target that has modules goes on with them, and its model holds what was trained.
        own = method.model(jax.tree.map(lambda leaf: leaf + 1, params))
        again = mtp_method(own, config, None, MtpLoss(steps=2)).init(KEY)
        jax.tree.map(np.testing.assert_array_equal, again, own.mtp.params)
    with pytest.raises(InputError, match="mtp.recursion=raw: the target's own modules have normed"):
        mtp_method(own, dataclasses.replace(config, recursion="raw"), None, MtpLoss(steps=2))
    with pytest.raises(InputError, match="mtp.num_modules=0: the target's own modules have 2"):
        mtp_method(own, None, None, MtpLoss(steps=0), trains="all")


def test_modules_inside_a_model_draft_from_all_tokens(tiny):
    with pytest.raises(InputError, match="mtp.draft_vocab_size=40: modules inside a model draft"):
        mtp_method(tiny, mtp_config(tiny, 1, len(SOME)), SOME, MtpLoss())
