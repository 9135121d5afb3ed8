"""MTP training: no label is visible to its own prediction, and the loss is its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from heads import SOME, mtp_config, mtp_head
from rows import two_rows, with_features
from test_mtp import CONVENTIONS, reference

from specjax.errors import InputError
from specjax.models.heads.mtp import Mtp
from specjax.models.heads.shared_parameters import share
from train.methods import mtp_loss as losses
from train.methods.method import Measures
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.methods.packed_rows import features_of

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def batch(tiny):
    return two_rows(tiny.config.vocab_size)


def spoken(params, tiny, tokens):
    """The target's logits and features over one conversation."""
    count = len(tokens)
    result = tiny.architecture.extend(
        params,
        jnp.asarray(tokens, jnp.int32)[None],
        jnp.arange(count)[None],
        None,
        None,
        0,
        jnp.tril(jnp.ones((1, count, count), bool)),
        features=("final_norm", "pre_norm"),
    )
    return np.asarray(result.logits[0], np.float64), {
        name: np.asarray(value[0]) for name, value in result.features.items()
    }


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
            says, features = spoken(target_params, tiny, tokens)
            pairs = {name: value[:-1] for name, value in features.items()}
            drafts = reference(config, {**modules, "shared": shared}, tokens, pairs)
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


@pytest.mark.parametrize("labels", ["tokens", "distributions"])
@pytest.mark.parametrize(
    ("modules", "convention"),
    [(2, "default"), (1, "hidden_first"), (2, "raw"), (1, "zero_first"), (3, "pre_norm")],
)
def test_the_loss_is_its_definition(modules, convention, labels, tiny, batch):
    ids = SOME if modules == 1 else None
    config = mtp_config(tiny, modules, len(SOME) if modules == 1 else None, **CONVENTIONS[convention])
    params = mtp_head(tiny, modules, config.draft_vocab_size if ids is not None else None,
                      **CONVENTIONS[convention]).params
    loss = MtpLoss(labels=labels, steps=modules, decay=0.5, loss_weight=0.25)
    lm, weight, sums, right, counts = slow_loss(
        config, params, tiny.params, tiny, ids, batch, labels
    )
    shares = 0.5 ** np.arange(modules)
    shares /= shares.sum()

    frozen = mtp_method(tiny, config, ids, loss)
    filled = with_features(tiny, batch, frozen.features)
    total, measures = jax.jit(frozen.loss)(params, tiny.params, filled, None)
    np.testing.assert_allclose(total, shares @ sums, rtol=1e-4)
    check_measures(measures, weight, sums, counts)

    joint = mtp_method(tiny, config, ids, loss, trains="all")
    assert joint.features == (("final_norm",) if labels == "distributions" else ())
    filled = with_features(tiny, batch, joint.features) if joint.features else batch
    both = {"target": tiny.params, "mtp": params}
    total, measures = jax.jit(joint.loss)(both, tiny.params, filled, None, jnp.int32(0))
    own = lm if labels == "tokens" else 0.0
    np.testing.assert_allclose(total, own + 0.25 * shares @ sums, rtol=1e-4)
    np.testing.assert_allclose(measures.losses["lm"], own, rtol=1e-4, atol=1e-3)
    check_measures(measures, weight, sums, counts)
    np.testing.assert_array_equal(measures.correct, right)
    assert right.sum() > 0


def check_measures(measures: Measures, weight, sums, counts):
    assert measures.weight == weight
    for depth, value in enumerate(sums):
        np.testing.assert_allclose(measures.losses[f"mtp_{depth}"], value, rtol=1e-4)
    np.testing.assert_array_equal(measures.counts, counts)
