"""The EAGLE losses: what they compute is what decoding will, and only labels count."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from flax.core import meta
from test_forms import products_of
from test_train_fields import of_file
from tiny_models import SOME, eagle_config, eagle_head
from toy_training import two_rows, with_features

from specjax.core.cache import commit
from specjax.core.causal_mask import causal
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.methods.eagle.head import Eagle
from specjax.methods.heads.shared_parameters import share
from specjax.models.features import check_features
from specjax.models.layers.decoder_layer import embed
from train import eagle as command
from train.methods import eagle as losses
from train.methods.eagle import EagleLoss, eagle_method, from_target
from train.methods.unroll import unroll

eagle_loss = jax.jit(losses.eagle_loss, static_argnums=(0, 6))

FLAGS = dict(
    norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True, vocabulary=50
)


def made(tiny, version=3, seed=0, **flags):
    head = eagle_head(tiny, version, seed=seed, **flags)
    ids = None if head.draft_ids is None else jnp.asarray(head.draft_ids)
    shared = share(tiny.params, ids, head=head.config.shares_output)
    params = {**head.params, "shared": shared}
    names = tuple(dict.fromkeys((*head.config.taps, "final_norm")))
    batch = with_features(tiny, two_rows(tiny.config.vocab_size), names)
    return Eagle(head.config, jnp.dtype("float32")), params, ids, batch


def taps_of(head, batch):
    return {name: batch.features[name] for name in head.config.taps}


@functools.partial(jax.jit, static_argnums=(0, 3))
def unrolled(head, params, batch, steps):
    """The outputs of training, compiled as one program."""
    taken = unroll(head, params, batch, taps_of(head, batch), steps)
    return [step.output for step in taken]


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5, 6))
def drafted(head, params, batch, row, label, first, steps):
    """The outputs of decoding that begins at a label, the true tokens fed in place of drafts."""
    count = label - 1 - first
    tokens = batch.tokens[row][None]
    taps = {name: value[row][None] for name, value in taps_of(head, batch).items()}
    here = slice(first, first + count)
    fused = head.fuse(params, {name: value[:, here] for name, value in taps.items()})
    output, window = head.extend(
        params,
        tokens[:, first + 1 : first + 1 + count],
        fused,
        jnp.arange(count)[None],
        head.make_cache(1, 32),
        head.make_window(1, count),
        0,
        causal(jnp.arange(count), count),
    )
    slots, most = jnp.arange(count)[None], jnp.array([count])
    cache = commit(head.make_cache(1, 32), window, slots, most)
    outputs, window = [output[:, -1:]], head.make_window(1, steps)
    for step in range(1, steps):
        output, window = head.extend(
            params,
            tokens[:, label - 1 + step : label + step],
            head.next_hidden(params, outputs[-1]),
            jnp.array([[count - 1 + step]]),
            cache,
            window,
            step - 1,
            causal(jnp.array([step - 1]), steps),
        )
        outputs.append(output)
    return [output[0, 0] for output in outputs]


@pytest.mark.parametrize(("version", "flags"), [(3, FLAGS), *slow((1, {}), (3, {}))])
def test_training_runs_what_decoding_runs(version, flags, tiny):
    head, params, _, batch = made(tiny, version, **flags)
    outputs = [np.asarray(output) for output in unrolled(head, params, batch, 3)]
    for row, column in ((0, 0), (0, 7), (1, 12)):
        label, segment = int(batch.labels[row, column]), np.asarray(batch.segments[row])
        first = int(np.argmax(segment == segment[label]))
        wanted = drafted(head, params, batch, row, label, first, 3)
        for got, want in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(got[row, column], want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("multiply", "expected"), [(None, "HIGHEST"), (jnp.dtype(jnp.bfloat16), "DEFAULT")]
)
def test_attention_is_rounded_where_products_are(multiply, expected, tiny):
    head, params, _, batch = made(tiny)
    head = dataclasses.replace(head, multiply=multiply)

    def outputs(params):
        return [step.state for step in unroll(head, params, batch, taps_of(head, batch), 2)]

    found = products_of(outputs, params)
    assert len(found) > 5
    assert set(found) == {(expected, expected)}


def slow_loss(head, params, tiny, ids, batch, loss):
    """The definition, label by label."""
    labels, tokens = np.asarray(batch.labels), np.asarray(batch.tokens)
    columns = np.asarray(tiny.params["head"]["kernel"], np.float64)
    every = np.arange(columns.shape[1]) if ids is None else np.asarray(ids)
    outputs = unrolled(head, params, batch, loss.steps)
    total, entropy, weight = 0.0, 0.0, 0
    prefix, counts = np.zeros(loss.steps), np.zeros(loss.steps)
    for row in range(2):
        there = set(labels[row].tolist()) - {-1}
        for column, label in enumerate(labels[row].tolist()):
            if label < 0:
                continue
            weight += 1
            all_right = True
            for step, output in enumerate(outputs):
                if label + step not in there:
                    break
                if not set(range(label, label + step + 1)) <= there:
                    break
                feature = np.asarray(
                    batch.features["final_norm"][row, label + step - 1], np.float64
                )
                teacher = feature @ columns[:, every]
                distribution = np.exp(teacher - teacher.max())
                distribution /= distribution.sum()
                logits = np.asarray(head.logits(params, output)[row, column], np.float64)
                logq = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                known = tokens[row, label + step] in every
                if known:
                    entropy -= (distribution * logq).sum()
                    total -= loss.decay**step * loss.cross_entropy * (distribution * logq).sum()
                if loss.feature:
                    apart = np.abs(np.asarray(output[row, column], np.float64) - feature)
                    huber = np.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                    total += loss.decay**step * loss.feature * huber
                all_right &= bool(known and logits.argmax() == teacher.argmax())
                prefix[step] += all_right
                counts[step] += 1
    return total, entropy, weight, prefix, counts


@pytest.mark.parametrize(
    ("version", "flags", "loss"),
    [
        (3, dict(vocabulary=50), EagleLoss(steps=3, decay=0.8)),
        (1, {}, EagleLoss(steps=1, cross_entropy=0.1, feature=1.0)),
        (3, dict(vocabulary=50, own_head=False, num_kv_heads=4), EagleLoss(steps=2)),
    ],
)
def test_the_loss_is_its_definition(version, flags, loss, tiny):
    head, params, ids, batch = made(tiny, version, **flags)
    total, measures = eagle_loss(head, params, tiny.params, ids, batch, jax.random.key(0), loss)
    wanted, entropy, weight, prefix, counts = slow_loss(head, params, tiny, ids, batch, loss)
    np.testing.assert_allclose(total, wanted, rtol=1e-4)
    np.testing.assert_allclose(measures.losses["cross_entropy"], entropy, rtol=1e-4)
    assert measures.weight == weight == 30
    np.testing.assert_array_equal(measures.prefix_correct, prefix)
    np.testing.assert_array_equal(measures.counts, counts)


def gradients(head, params, tiny, ids, batch, loss):
    def summed(params, features):
        return eagle_loss(
            head,
            params,
            tiny.params,
            ids,
            batch.replace(features=features),
            jax.random.key(0),
            loss,
        )[0]

    own = {name: value for name, value in params.items() if name != "shared"}
    with_shared = lambda own, features: summed({**own, "shared": params["shared"]}, features)  # noqa: E731
    return jax.jit(jax.grad(with_shared, argnums=(0, 1)))(own, batch.features)


def test_every_parameter_learns_and_masked_tokens_teach_nothing(tiny):
    head, params, ids, batch = made(tiny, 3, vocabulary=50, norm_before_fc=True, fc_norm=True)
    loss = EagleLoss(steps=2)
    learned, felt = gradients(head, params, tiny, ids, batch, loss)
    for path, leaf in jax.tree_util.tree_leaves_with_path(learned):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
    # Padding, and positions after the last one that a label is predicted from.
    for name in head.config.taps:
        moved = np.abs(np.asarray(felt[name])).max(axis=2) > 0
        assert not moved[0, 18:].any()
        assert moved[0, :8].all()
        assert moved[1, :10].all()


def test_changing_tokens_that_are_not_seen_changes_nothing(tiny):
    """Row 0's second conversation, seen from the first one's labels."""
    head, params, ids, batch = made(tiny, 3)
    first = batch.replace(labels=batch.labels.at[:, 6:].set(-1).at[1].set(-1))
    other = first.replace(
        tokens=first.tokens.at[0, 10:].set(0),
        features={name: value.at[0, 10:].add(3.0) for name, value in first.features.items()},
    )
    values = [
        eagle_loss(head, params, tiny.params, ids, one, jax.random.key(0), EagleLoss(steps=2))[0]
        for one in (first, other)
    ]
    np.testing.assert_array_equal(*values)
    nothing = batch.replace(labels=jnp.full_like(batch.labels, -1))
    total, measures = eagle_loss(
        head, params, tiny.params, ids, nothing, jax.random.key(0), EagleLoss()
    )
    assert total == measures.weight == 0


def test_noise_moves_the_loss_and_depends_on_the_key(tiny):
    head, params, ids, batch = made(tiny, 1)
    loss = EagleLoss(steps=1, cross_entropy=0.1, feature=1.0, noise=0.1)
    values = [
        float(eagle_loss(head, params, tiny.params, ids, batch, jax.random.key(seed), loss)[0])
        for seed in (0, 0, 1)
    ]
    assert values[0] == values[1] != values[2]
    quiet = dataclasses.replace(loss, noise=0.0)
    actual = eagle_loss(head, params, tiny.params, ids, batch, None, loss)[0]
    wanted = eagle_loss(head, params, tiny.params, ids, batch, jax.random.key(0), quiet)[0]
    np.testing.assert_allclose(actual, wanted, rtol=1e-6)


@pytest.mark.parametrize("version", [1, 3])
def test_it_starts_as_the_targets_last_layer(version, tiny):
    """With nothing read of the embedding, the head repeats the target's layer on its last tap."""
    config = eagle_config(tiny, version)
    head = Eagle(config, jnp.dtype("float32"))
    params = from_target(meta.unbox(head.init(jax.random.key(0))), tiny, config, None)
    last = jax.tree.map(lambda leaf: leaf[-1], tiny.params["layers"])
    np.testing.assert_array_equal(
        params["layer"]["mlp"]["gate_up"]["kernel"], last["mlp"]["gate_up"]["kernel"]
    )
    width = tiny.config.hidden_size
    np.testing.assert_array_equal(
        params["layer"]["attention"]["qkv"]["kernel"][-width:],
        last["attention"]["qkv"]["kernel"],
    )
    method = eagle_method(tiny, config, None, EagleLoss())
    assert method.features[-1] == "final_norm"
    assert method.head(params, {"tokens": 1}).training == {"tokens": 1}
    wider = dataclasses.replace(
        config, decoder=dataclasses.replace(config.decoder, intermediate_size=44)
    )
    with pytest.raises(InputError, match="use start=random"):
        from_target(params, tiny, wider, None)


@functools.partial(jax.jit, static_argnums=0)
def first_logits(head, params, batch):
    """The logits of the first draft step at each label."""
    (step,) = unroll(head, params, batch, taps_of(head, batch), 1)
    return head.logits(params, step.output)


@pytest.mark.parametrize(
    ("taps", "flags"),
    [((2, 0), {}), ((0, 1, 2), dict(vocabulary=len(SOME), own_head=False, num_kv_heads=4))],
)
def test_the_last_layer_alone_has_the_targets_logits(taps, flags, tiny):
    """Those at the label's row, though the embedding of the token after it is read as well."""
    config = dataclasses.replace(
        eagle_config(tiny, **flags), taps=tuple(f"layer_input:{layer}" for layer in taps)
    )
    head = Eagle(config, jnp.dtype("float32"))
    ids = SOME if flags else np.arange(61)
    batch = with_features(tiny, two_rows(61), (*config.taps, "final_norm"))
    rows = np.maximum(np.asarray(batch.labels) - 2, 0)
    features = np.take_along_axis(np.asarray(batch.features["final_norm"]), rows[..., None], 1)
    wanted = features @ np.asarray(tiny.params["head"]["kernel"])[:, ids]

    def logits(exactly):
        random = meta.unbox(head.init(jax.random.key(0)))
        params = from_target(random, tiny, config, ids if flags else None, exactly=exactly)
        params["shared"] = share(tiny.params, jnp.asarray(ids), head=config.shares_output)
        return first_logits(head, params, batch)

    np.testing.assert_allclose(logits(True), wanted, atol=2e-5, rtol=2e-4)
    # The weights that start=target leaves random are seen.
    assert np.abs(logits(False) - wanted).max() > 0.1


def test_what_a_start_from_the_target_refuses(tiny, caplog):
    config = eagle_config(tiny)

    def start(exactly=True, **changes):
        changed = dataclasses.replace(config, **changes)
        params = meta.unbox(Eagle(changed, jnp.dtype("float32")).init(jax.random.key(0)))
        return from_target(params, tiny, changed, None, exactly=exactly)

    for changes, said in (
        (dict(norm_before_residual=True), "norm_before_residual=True changes the layer's input"),
        (dict(version=1, taps=("final_norm",)), "no tap is the input of a layer; use start=target"),
        (
            dict(exactly=False, decoder=dataclasses.replace(config.decoder, num_kv_heads=1)),
            "num_kv_heads=1: start=target repeats the target's 2; use a multiple",
        ),
    ):
        with pytest.raises(InputError, match=said):
            start(**changes)
    with caplog.at_level(logging.WARNING):
        fc = np.asarray(start(taps=("layer_input:1", "layer_input:0"))["fc"]["kernel"])
    np.testing.assert_array_equal(fc, np.eye(48, 24))
    (line,) = caplog.messages
    assert "lack layer_input:2, the input of the last layer" in line


def test_key_value_heads_that_do_not_divide_the_query_heads(tiny):
    config = of_file("train_eagle3", command, **{"eagle.num_kv_heads": 3})
    said = "eagle.num_kv_heads=3: must divide the 4 query heads of random-0; use a divisor"
    with pytest.raises(InputError, match=said):
        command.make_method(tiny, lambda size: SOME, config)


def test_an_embedding_of_its_own_starts_as_the_targets(tiny):
    config = eagle_config(tiny, own_embedding=True)
    head = Eagle(config, jnp.dtype("float32"))
    params = from_target(meta.unbox(head.init(jax.random.key(0))), tiny, config, None)
    shared = share(tiny.params, None, head=False)
    tokens = jnp.arange(61)[None]
    own = embed(params, tokens, head.dtype)
    np.testing.assert_array_equal(own, embed(shared, tokens, head.dtype))


@pytest.mark.parametrize("tap", ["layer_input:3", "layer:1", "embedding"])
def test_taps_that_the_target_does_not_have(tap):
    with pytest.raises(InputError, match=f"feature '{tap}' is unknown: use final_norm"):
        check_features(("final_norm", tap), 3)


def test_a_target_with_layers_apart_and_a_table_of_its_own(tiny):
    from specjax.models.form import Form

    apart = random_model(tiny_config(), 0, dtype="float32", form=Form("apart"))
    config = eagle_config(apart)
    method = eagle_method(apart, config, None, EagleLoss(steps=1))
    params = method.init(jax.random.key(0))
    batch = with_features(apart, two_rows(apart.config.vocab_size), method.features)
    total, _ = jax.jit(method.loss)(params, apart.params, batch, jax.random.key(0))
    stacked = eagle_method(tiny, config, None, EagleLoss(steps=1))
    loss = jax.jit(stacked.loss)
    again = loss(stacked.init(jax.random.key(0)), tiny.params, batch, jax.random.key(0))
    np.testing.assert_allclose(total, again[0], rtol=1e-5)
