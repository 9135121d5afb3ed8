"""LayerSkip training: dropout, curricula and the loss of early exits are the published ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from toy_training import two_rows, with_features

from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.models.config import Experts
from specjax.models.features import LAYER_INPUTS
from train.methods.layerskip import LayerSkipLoss, layerskip_loss, layerskip_method
from train.methods.packed_rows import at_rows, visible
from train.run.metrics import scalars, sums_of

KEY = jax.random.key(0)
LATE = jnp.int32(10**6)


@pytest.fixture(scope="module")
def deep():
    return random_model(tiny_config(num_layers=5), 0, dtype="float32")


@pytest.fixture(scope="module")
def batch(deep):
    return two_rows(deep.config.vocab_size)


def forward(model, batch, **options):
    """A pass over the batch without cache."""
    return model.architecture.extend(
        model.params,
        batch.tokens,
        batch.positions,
        None,
        None,
        0,
        visible(batch.segments),
        **options,
    )


def test_dropout_rises_with_depth_and_from_scratch_with_time():
    """D(l) = exp(l ln 2 / (L - 1)) - 1; S(t) = exp(t ln 2 / (T - 1)) - 1."""
    loss = LayerSkipLoss(max_dropout=0.3, num_layers=5, steps=11)
    depth = 2 ** (np.arange(5) / 4) - 1
    np.testing.assert_allclose(loss.dropout(jnp.int32(0)), 0.3 * depth, atol=1e-6)
    rising = dataclasses.replace(loss, dropout_schedule="exponential")
    for step, share in ((0, 0.0), (5, 2**0.5 - 1), (10, 1.0), (50, 1.0)):
        np.testing.assert_allclose(rising.dropout(jnp.int32(step)), share * 0.3 * depth, atol=1e-6)


def enabled(loss, step):
    exits, on = loss.trained(jnp.int32(step))
    return sorted(np.asarray(exits)[np.asarray(on)].tolist())


def test_the_rotational_curriculum_has_every_exit_once_a_rotation():
    loss = LayerSkipLoss(rotation=3, num_layers=9, steps=30)
    steps = [enabled(loss, step) for step in range(3)]
    assert steps == [[1, 4, 7], [2, 5, 8], [3, 6]]
    assert enabled(loss, 4) == steps[1]


def test_the_gradual_curriculum_adds_exits_from_the_last_one_down():
    """One every T / 2L steps: all in the first half of the run."""
    loss = LayerSkipLoss(curriculum="gradual", num_layers=5, steps=40)
    assert [enabled(loss, step) for step in (0, 3, 4, 8, 15, 16, 39)] == [
        *([], [], [4], [3, 4], [2, 3, 4]),
        *([1, 2, 3, 4], [1, 2, 3, 4]),
    ]


def test_the_decoded_exit_may_be_the_only_one_in_the_loss():
    loss = LayerSkipLoss(curriculum="decoded", exit_layer=3, num_layers=9, steps=30)
    assert [enabled(loss, step) for step in (0, 1, 29)] == [[3]] * 3


def test_weights_are_the_published_ones():
    loss = LayerSkipLoss(e_scale=0.2, num_layers=5)
    exits = jnp.arange(1, 5)
    early = np.array([0, 0.2, 0.6, 1.2])  # 0.2 * (0 + .. + l)
    last = 4 + 0.2 * (0 + 1 + 2 + 3)
    every = np.array([*early, last])
    np.testing.assert_allclose(loss.weights(exits, exits > 0), every / every.sum(), rtol=1e-6)
    some = np.array([0, 0.2, 0, 1.2, last])
    only = loss.weights(exits, exits % 2 == 0)
    np.testing.assert_allclose(only, some / some.sum(), rtol=1e-6)


def losses_by_hand(model, batch, exits, teacher=None):
    """Each exit's summed loss: from logits of a pass of so many layers; its likeliest tokens."""
    labels, there = np.asarray(batch.labels), np.asarray(batch.labels) >= 0
    sums, choices = [], []
    for exit in exits:
        logits = forward(model, batch, num_layers=exit).logits
        logq = np.asarray(jax.nn.log_softmax(at_rows(logits, batch.labels - 1)), np.float64)
        choices.append(logq.argmax(axis=-1))
        if teacher is None:
            token = np.asarray(at_rows(batch.tokens, batch.labels))
            each = -np.take_along_axis(logq, token[:, :, None], axis=2)[:, :, 0]
        else:
            logp = at_rows(forward(teacher, batch).logits, batch.labels - 1)
            logp = np.asarray(jax.nn.log_softmax(logp), np.float64)
            each = (np.exp(logp) * (logp - logq)).sum(axis=-1)
        sums.append(each[there].sum())
    return np.array(sums), np.array(choices), labels


@pytest.mark.parametrize("labels", ["tokens", *slow("distributions")])
def test_an_evaluation_is_its_definition(labels, deep, batch):
    other = random_model(tiny_config(num_layers=5), 3, dtype="float32")
    loss = LayerSkipLoss(labels=labels, exits=(1, 2, 4), exit_layer=2, depths=3, num_layers=5)
    filled = with_features(other, batch) if labels == "distributions" else batch
    total, measures = jax.jit(
        lambda params, frozen: layerskip_loss(
            deep.architecture, params, frozen, filled, None, LATE, loss
        )
    )(deep.params, other.params)
    teacher = other if labels == "distributions" else None
    sums, choices, rows = losses_by_hand(deep, batch, (1, 2, 4, 5), teacher)
    weights = np.asarray(loss.weights(jnp.array([1, 2, 4]), jnp.ones(3, bool)))
    np.testing.assert_allclose(total, (weights * sums).sum(), rtol=1e-5)
    numbers = scalars(sums_of(total, measures), "eval")
    count = (rows >= 0).sum()
    for name, wanted in zip(("exit_1", "exit_2", "exit_4", "last"), sums, strict=True):
        assert numbers[f"eval/loss_{name}"] == pytest.approx(wanted / count, rel=1e-4)
    for exit, chosen in zip((1, 2, 4), choices[:-1], strict=True):
        agrees = (chosen == choices[-1]) & (rows >= 0)
        accepted = numbers[f"eval/exit_accept_{exit}"]
        assert accepted == pytest.approx(agrees.sum() / count, abs=1e-6)
        lengths = []
        for row in range(2):
            for index in range(rows.shape[1] - 2):
                if rows[row, index] >= 0 and rows[row, index + 2] == rows[row, index] + 2:
                    run = agrees[row, index : index + 3]
                    lengths.append(1 + (3 if run.all() else int(run.argmin())))
        assert numbers[f"eval/exit_tau_{exit}"] == pytest.approx(np.mean(lengths), abs=1e-6)
        if exit == 2:
            assert numbers["eval/acc_pos_0"] == pytest.approx(accepted, abs=1e-6)
    assert ("eval/loss_last_tokens" in numbers) == (labels == "distributions")


def test_a_step_without_dropout_has_the_loss_of_its_exits(deep, batch):
    loss = LayerSkipLoss(max_dropout=0.0, rotation=2, num_layers=5, steps=20)
    total, measures = jax.jit(
        lambda step: layerskip_loss(
            deep.architecture, deep.params, deep.params, batch, KEY, step, loss
        )
    )(jnp.int32(1))
    sums, choices, rows = losses_by_hand(deep, batch, (2, 4, 5))
    weights = np.asarray(loss.weights(jnp.array([2, 4]), jnp.ones(2, bool)))
    np.testing.assert_allclose(total, (weights * sums).sum(), rtol=1e-5)
    np.testing.assert_allclose(measures.losses["last"], sums[-1], rtol=1e-5)
    agree = ((choices[:-1] == choices[-1]) & (rows >= 0)).sum()
    assert measures.rates["exit_accept_now"].tolist() == [agree, 2 * (rows >= 0).sum()]


def test_a_row_leaves_out_a_layer(deep, batch):
    """Its states pass by; the other row is as without dropout."""
    run = jax.jit(functools.partial(forward, deep, features=(LAYER_INPUTS, "pre_norm")))
    kept = jnp.ones((5, 2), bool).at[1:4, 0].set(False)
    whole, some = run(batch).features, run(batch, kept=kept).features
    inputs = np.concatenate([some[LAYER_INPUTS], some["pre_norm"][None]])
    every = np.concatenate([whole[LAYER_INPUTS], whole["pre_norm"][None]])
    np.testing.assert_array_equal(inputs[2:5, 0], inputs[[1, 1, 1], 0])
    assert np.abs(inputs[5, 0] - inputs[4, 0]).max() > 1e-3
    np.testing.assert_allclose(inputs[:, 1], every[:, 1], atol=1e-6)


def test_dropout_is_drawn_from_the_key(deep, batch):
    loss = LayerSkipLoss(max_dropout=0.9, e_scale=1.0, rotation=1, num_layers=5, steps=20)

    @jax.jit
    def gradient(params, key):
        def value(params):
            return layerskip_loss(
                deep.architecture, params, params, batch, key, jnp.int32(0), loss
            )[0]

        return jax.grad(value)(params)

    first, again, other = (gradient(deep.params, jax.random.key(n)) for n in (0, 0, 1))
    kernels = [np.asarray(g["layers"]["mlp"]["down"]["kernel"]) for g in (first, again, other)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).any()
    assert np.abs(kernels[0][0]).max() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(exit_layer=5), "layerskip.exit_layer=5: .* has 5 layers; use exits after 1 to 4"),
        (dict(exits=(1, 7)), "layerskip.exits=7: .* has 5 layers"),
        (dict(rotation=5), "layerskip.rotation=5: .* has 4 early exits"),
        (dict(curriculum="decoded", exit_layer=1), "curriculum='decoded': .*, after 1 of 5 layers"),
        (
            dict(curriculum="decoded", exit_layer=2, e_scale=0.0),
            "curriculum='decoded': .* weight 0",
        ),
        (dict(curriculum="gradual", steps=9), "curriculum='gradual': adds an exit every decay_s"),
    ],
)
def test_options_that_do_not_fit_the_model(options, said, deep):
    with pytest.raises(InputError, match=said):
        layerskip_method(
            deep, LayerSkipLoss(**{"num_layers": 5, "steps": 20, "rotation": 2} | options)
        )


def test_models_with_experts_are_refused():
    experts = Experts(num_experts=4, per_token=2, intermediate_size=8)
    sparse = random_model(tiny_config(experts=experts), 0, dtype="float32")
    with pytest.raises(InputError, match="has experts, whose loads are not balanced"):
        layerskip_method(sparse, LayerSkipLoss(num_layers=3, rotation=2))
