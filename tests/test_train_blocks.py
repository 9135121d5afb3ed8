"""The loss of block drafters: what it computes is what decoding will, and only labels count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from flax.core import meta
from tiny_models import block_config, block_head
from toy_training import two_rows, with_features

from specjax.core.cache import commit
from specjax.errors import InputError
from specjax.methods.block.head import BlockHead
from specjax.methods.heads.calibration import calibration_error, fit_temperature
from specjax.methods.heads.shared_parameters import share
from train.methods.blocks import block as losses
from train.methods.blocks.anchors import Blocks, choose_blocks, run_blocks
from train.methods.blocks.block import BlockLoss, block_method, from_target
from train.methods.losses import LossNames, NamedLosses, parts_of

block_loss = jax.jit(losses.block_loss, static_argnums=(0, 6))
run = jax.jit(run_blocks, static_argnums=0)
DSPARK = dict(markov_rank=3, sample_from_anchor=True, confidence=True)
DFLASH2 = dict(conv_kernel_size=2, conv_group_size=6, selector_rank=3, selector_top_k=5)
ALL = 20
"""More blocks than there are labels, so that all labels follow an anchor."""


def made(tiny, seed=0, **options):
    head = block_head(tiny, seed=seed, **options)
    ids = None if head.draft_ids is None else jnp.asarray(head.draft_ids)
    params = {**head.params, "shared": share(tiny.params, ids, head=True)}
    names = (*head.config.taps, "final_norm")
    batch = with_features(tiny, two_rows(tiny.config.vocab_size), names)
    return BlockHead(head.config, jnp.dtype("float32")), params, ids, batch


def states_of(head, params, batch, labels):
    """The states of training for blocks at the given labels."""
    drafts = head.config.longest_draft
    blocks = Blocks(labels, jnp.ones((drafts, *labels.shape), bool))
    taps = {name: batch.features[name] for name in head.config.taps}
    return run(head, params, batch, taps, blocks)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def drafted(head, params, batch, row, label, first):
    """The states of decoding whose root is the token before a label; the segment starts at first.

    The cache has the features of the tokens before the root.
    """
    count = label - 1 - first
    taps = {
        name: batch.features[name][row, None, first : first + count] for name in head.config.taps
    }
    cache = head.make_cache(1, 32)
    if count:
        window = head.context(params, head.fuse(params, taps), jnp.arange(count)[None])
        cache = commit(cache, window, jnp.arange(count)[None], jnp.array([count]))
    slots = head.config.block_size
    masks = jnp.full((1, slots - 1), head.config.mask_token_id)
    tokens = jnp.concatenate([batch.tokens[row, label - 1][None, None], masks], axis=1)
    states = head.extend(params, tokens, count + jnp.arange(slots)[None], cache)
    return states[0, slots - head.config.longest_draft :]


@pytest.mark.parametrize("options", [dict(causal=True, **DFLASH2), *slow(DSPARK)])
def test_training_runs_what_decoding_runs(options, tiny):
    head, params, _, batch = made(tiny, **options)
    states = states_of(head, params, batch, batch.labels)
    for row, column in ((0, 0), (0, 7), (1, 12)):
        label, segment = int(batch.labels[row, column]), np.asarray(batch.segments[row])
        first = int(np.argmax(segment == segment[label]))
        wanted = drafted(head, params, batch, row, label, first)
        np.testing.assert_allclose(states[row, column], wanted, atol=2e-5, rtol=2e-4)


def test_a_block_reads_nothing_from_its_anchor_on(tiny):
    """A broken variant, whose context includes the anchor's future, is told apart."""
    head, params, _, batch = made(tiny)
    labels = jnp.full((2, 1), 8)
    wanted = states_of(head, params, batch, labels)
    for first, same in ((7, True), (6, False)):
        features = {name: value.at[:, first:].add(3.0) for name, value in batch.features.items()}
        changed = batch.replace(features=features, tokens=batch.tokens.at[:, 8:].set(0))
        got = states_of(head, params, changed, labels)
        assert np.array_equal(got, wanted) == same


def test_blocks_are_chosen_among_labels_without_repetition(tiny):
    labels = two_rows(61).labels
    for count, most in ((5, [5, 5]), (ALL, [12, 18])):
        blocks = choose_blocks(labels, count, 3, jax.random.key(1))
        for row, chosen in enumerate(np.asarray(blocks.labels)):
            found = chosen[chosen >= 0].tolist()
            assert len(found) == len(set(found)) == most[row]
            there = set(labels[row].tolist()) - {-1}
            assert set(found) <= there
            for draft in range(3):
                want = [label >= 0 and label + draft in there for label in chosen.tolist()]
                assert np.asarray(blocks.scored)[draft, row].tolist() == want


def slow_loss(head, params, tiny, ids, batch, loss):
    """The definition, block by block, for cross-entropy and total variation."""
    labels, tokens = np.asarray(batch.labels), np.asarray(batch.tokens)
    columns = np.asarray(tiny.params["head"]["kernel"], np.float64)
    every = np.arange(columns.shape[1]) if ids is None else np.asarray(ids)
    states = states_of(head, params, batch, batch.labels)
    kernel, config = columns[:, every], head.config
    entropy = variation = confidence = total = 0.0
    prefix = np.zeros(config.longest_draft)
    for row in range(2):
        there = set(labels[row].tolist()) - {-1}
        for column, label in enumerate(labels[row].tolist()):
            all_right = label >= 0
            for draft in range(config.longest_draft):
                position = label + draft
                if label < 0 or position not in there:
                    break
                state = np.asarray(states[row, column, draft], np.float64)
                logits, weight = state @ kernel, np.exp(-draft / loss.gamma)
                embedded = np.zeros(0)
                if config.markov_rank:
                    markov = jax.tree.map(
                        lambda leaf: np.asarray(leaf, np.float64), params["markov"]
                    )
                    embedded = markov["embed"]["embedding"][tokens[row, position - 1]]
                    logits = logits + embedded @ markov["projection"]["kernel"]
                feature = np.asarray(batch.features["final_norm"][row, position - 1], np.float64)
                p, q = (
                    np.exp(x - x.max()) / np.exp(x - x.max()).sum()
                    for x in (feature @ kernel, logits)
                )
                known = tokens[row, position] in every
                all_right &= bool(known and q.argmax() == p.argmax())
                prefix[draft] += all_right
                if not known:
                    continue
                index = np.searchsorted(every, tokens[row, position])
                entropy -= np.log(q[index])
                distance = np.abs(p - q).sum() / 2
                variation += distance
                value = -0.1 * np.log(q[index]) + 1.8 * distance
                if config.confidence:
                    scale, bias = (
                        np.asarray(params["confidence"][name], np.float64)
                        for name in ("scale", "bias")
                    )
                    logit = np.concatenate([state, embedded]) @ scale + bias[0]
                    error = np.logaddexp(0, logit) - (1 - distance) * logit
                    confidence += error
                    value += loss.confidence * error
                total += weight * value
    return total, entropy, variation, confidence, prefix


@pytest.mark.parametrize("options", [dict(vocabulary=50, **DSPARK), *slow(dict(vocabulary=50))])
def test_the_loss_is_its_definition(options, tiny):
    head, params, ids, batch = made(tiny, **options)
    losses = LossNames().check("loss", "ce:0.1,tv:1.8")
    loss = BlockLoss(anchors=ALL, gamma=2.0, label_loss=losses, confidence=0.7)
    total, measures = block_loss(head, params, tiny.params, ids, batch, jax.random.key(0), loss)
    wanted, *parts, prefix = slow_loss(head, params, tiny, ids, batch, loss)
    np.testing.assert_allclose(total, wanted, rtol=1e-4)
    names = ("ce", "tv", "confidence")[: len(measures.losses)]
    for name, part in zip(names, parts, strict=False):
        np.testing.assert_allclose(measures.losses[name], part, rtol=1e-4)
    assert measures.weight == 30
    np.testing.assert_array_equal(measures.prefix_correct, prefix)


@pytest.mark.parametrize("options", [DFLASH2, *slow(DSPARK)])
def test_every_parameter_learns_and_padding_teaches_nothing(options, tiny):
    head, params, ids, batch = made(tiny, vocabulary=50, **options)
    own = {name: value for name, value in params.items() if name != "shared"}

    def summed(own, features):
        changed = batch.replace(features=features)
        loss = BlockLoss(anchors=ALL, label_loss=NamedLosses((("tv", 1.0),)))
        return losses.block_loss(head, own, tiny.params, ids, changed, jax.random.key(0), loss)[0]

    learned, felt = jax.jit(jax.grad(summed, argnums=(0, 1)))(own, batch.features)
    for path, leaf in jax.tree_util.tree_leaves_with_path(learned):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
    for name in head.config.taps:
        moved = np.abs(np.asarray(felt[name])).max(axis=2) > 0
        # Padding, and the last anchors.
        assert not moved[0, 18:].any()
        assert moved[0, :8].all()


def test_anchors_depend_on_the_key(tiny):
    head, params, ids, batch = made(tiny)
    loss = BlockLoss(anchors=3)
    values = [
        float(block_loss(head, params, tiny.params, ids, batch, key, loss)[0])
        for key in (jax.random.key(0), jax.random.key(1), jax.random.key(1), None)
    ]
    assert values[0] == values[3] != values[1] == values[2]
    nothing = batch.replace(labels=jnp.full_like(batch.labels, -1))
    total, measures = block_loss(head, params, tiny.params, ids, nothing, jax.random.key(0), loss)
    assert total == measures.weight == 0


def test_confidence_is_calibrated_by_a_temperature(tiny):
    """Logits that are three times too large are found, and other parameters stay."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=20_000)
    accepted = 1 / (1 + np.exp(-logits))
    assert fit_temperature(3 * logits, accepted) == pytest.approx(3.0, rel=1e-3)
    assert calibration_error(logits, accepted) < 1e-9
    assert calibration_error(3 * logits, accepted) > 0.1
    assert fit_temperature(logits[:0], accepted[:0]) == 1.0
    head, params, _, batch = made(tiny, **DSPARK)
    loss = BlockLoss(anchors=ALL)
    _, measures = block_loss(head, params, tiny.params, None, batch, None, loss)
    overlap, count = measures.rates["overlap"].tolist()
    # The same estimate everywhere, twice as far from even odds as it should be.
    scale, odds = params["confidence"]["scale"], np.log(overlap / (count - overlap))
    confidence = {"scale": 1e-4 * scale, "bias": jnp.full(1, 2 * odds)}
    own = {name: value for name, value in params.items() if name != "shared"}
    own["confidence"] = confidence
    method = block_method(tiny, head.config, None, loss)
    once, numbers = method.calibrate(own, tiny.params, [batch])
    assert numbers["temperature"] == pytest.approx(2.0, rel=0.01)
    np.testing.assert_allclose(
        once["confidence"]["scale"] * numbers["temperature"], own["confidence"]["scale"], rtol=1e-5
    )
    again, numbers = method.calibrate(once, tiny.params, [batch])
    assert numbers["temperature"] == pytest.approx(1.0, rel=1e-3)
    assert numbers["error"] < 0.05
    assert again["fc"] is own["fc"]
    plain = block_config(tiny)
    assert block_method(tiny, plain, None, BlockLoss()).calibrate is None


def test_weights_by_probabilities(tiny):
    """D-PACE against its definition, and at what it weighs in the loss."""
    head, params, ids, batch = made(tiny, vocabulary=50, **DSPARK)
    loss = BlockLoss(anchors=ALL, weights="dpace", alpha=0.3, confidence=0.0)
    total, _ = block_loss(head, params, tiny.params, ids, batch, jax.random.key(0), loss)
    states = np.asarray(states_of(head, params, batch, batch.labels), np.float64)
    kernel = np.asarray(tiny.params["head"]["kernel"], np.float64)[:, np.asarray(ids)]
    markov = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["markov"])
    wanted = 0.0
    for row, column in zip(*np.nonzero(np.asarray(batch.labels) >= 0), strict=True):
        label, there = int(batch.labels[row, column]), set(batch.labels[row].tolist())
        q = []
        for draft in range(head.config.longest_draft):
            if label + draft not in there:
                break
            token, before = (int(batch.tokens[row, label + draft - back]) for back in (0, 1))
            logits = states[row, column, draft] @ kernel
            logits += markov["embed"]["embedding"][before] @ markov["projection"]["kernel"]
            every = np.exp(logits - logits.max())
            chosen = np.flatnonzero(np.asarray(ids) == token)
            q.append(float((every / every.sum())[chosen].sum()))
        # A token outside the draft vocabulary is never accepted.
        reached = np.cumprod([0.7 * one + 0.3 if one else 0.0 for one in q])
        for draft, probability in enumerate(q):
            if probability:
                wanted -= reached[draft:].sum() * np.log(probability)
    np.testing.assert_allclose(total, wanted, rtol=1e-4)


def test_the_selectors_loss_is_its_definition(tiny):
    head, params, ids, batch = made(tiny, vocabulary=50, **DFLASH2)
    loss = BlockLoss(anchors=ALL, gamma=2.0, selector=0.5)
    total, measures = block_loss(head, params, tiny.params, ids, batch, jax.random.key(0), loss)
    without = BlockLoss(anchors=ALL, gamma=2.0, selector=0.0)
    plain, _ = block_loss(head, params, tiny.params, ids, batch, jax.random.key(0), without)
    states = np.asarray(states_of(head, params, batch, batch.labels), np.float64)
    kernel = np.asarray(tiny.params["head"]["kernel"], np.float64)[:, np.asarray(ids)]
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["selector"])
    wanted, recalled, count = 0.0, 0, 0
    for row, column in zip(*np.nonzero(np.asarray(batch.labels) >= 0), strict=True):
        label, there = int(batch.labels[row, column]), set(batch.labels[row].tolist())
        for draft in range(head.config.longest_draft):
            if label + draft not in there:
                break
            token, before = (int(batch.tokens[row, label + draft - back]) for back in (0, 1))
            (own,) = np.flatnonzero(np.asarray(ids) == token).tolist() or [None]
            if own is None:
                continue
            state = states[row, column, draft]
            unary = state @ kernel
            best = np.argsort(-unary)[:5].tolist()
            recalled, count = recalled + (own in best), count + 1
            if own not in best:
                best[-1] = own
            gate = weights["predecessors"]["embedding"][before]
            gate = gate * (state @ weights["projection"]["kernel"])
            scores = unary[best] + weights["successors"]["embedding"][best] @ gate
            wanted += np.exp(-draft / 2) * (np.logaddexp.reduce(scores) - scores[best.index(own)])
    np.testing.assert_allclose(total - plain, 0.5 * wanted, rtol=1e-3)
    assert measures.rates["candidate_recall"].tolist() == [recalled, count]


def test_it_starts_as_the_targets_last_layers(tiny):
    config = block_config(tiny, **DFLASH2)
    params = meta.unbox(BlockHead(config, jnp.dtype("float32")).init(jax.random.key(0)))
    started = from_target(params, tiny, config)
    assert jax.tree.structure(started) == jax.tree.structure(params)
    for name, index in (("0", 1), ("1", 2)):
        np.testing.assert_array_equal(
            started["layers"][name]["attention"]["qkv"]["kernel"],
            tiny.params["layers"]["attention"]["qkv"]["kernel"][index],
        )
    beyond = block_config(tiny, mask_token_id=61)
    with pytest.raises(InputError, match=r"mask_token_id=61: the target has the tokens 0\.\.60"):
        block_method(tiny, beyond, None, BlockLoss())
    method = block_method(tiny, config, None, BlockLoss())
    assert method.head(started, {"tokens": 1}).training == {"tokens": 1}
    with pytest.raises(InputError, match=r"num_layers=4: the target has 3 to start from"):
        from_target(params, tiny, block_config(tiny, num_layers=4))


def test_losses_by_name(tiny):
    """Each against its definition, on distributions of two tokens."""
    from train.methods.losses import LOSSES, Truth

    p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
    truth = Truth(jnp.log(p)[None, None], jnp.zeros((1, 1), jnp.int32))
    wanted = {
        "ce": -np.log(0.4),
        "kl": (p * np.log(p / q)).sum(),
        "reverse_kl": (q * np.log(q / p)).sum(),
        "tv": 0.3,
        "lk": -np.log(0.7),
    }
    mix = np.exp(-3 * 0.7)
    wanted["lk_blend"] = mix * wanted["kl"] + (1 - mix) * 0.3
    assert wanted.keys() == LOSSES.keys()
    for name, value in wanted.items():
        got = LOSSES[name](jnp.log(q)[None, None], truth)
        np.testing.assert_allclose(got, [[value]], rtol=1e-5)
    check = LossNames().check
    assert check("loss", "kl") == NamedLosses((("kl", 1.0),))
    both = check("loss", "ce:0.1, tv:2")
    value = both(jnp.log(q)[None, None], truth)
    np.testing.assert_allclose(value, [[0.1 * wanted["ce"] + 0.6]], rtol=1e-5)
    assert parts_of(both) == {
        "ce": (LOSSES["ce"], 0.1),
        "tv": (LOSSES["tv"], 2.0),
    }
    for value, says in (
        ("kls", "use ce, kl"),
        ("ce:x", r"loss\.ce='x': use a number"),
        ("ce,ce", "use ce"),
    ):
        with pytest.raises(InputError, match=says):
            check("loss", value)
