"""Rates, clipping and decay of an update."""

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config
from tiny_models import block_config, eagle_config, medusa_config, mtp_config

from specjax.errors import InputError
from specjax.loading.compare_arrays import leaf_name
from specjax.models.config import Attention
from specjax.models.joined_kernels import in_parts
from specjax.models.parameter_table import parameter_table
from specjax.models.parameters import Parameter
from train.run.optimizer import Optimization, learning_rate, make_optimizer


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_the_rate_rises_and_falls(schedule):
    settings = Optimization(
        2.0, schedule, warmup=4, decay_steps=24, final_fraction=0.1, stable_fraction=0.5
    )
    rates = [float(rate) for rate in map(learning_rate(settings), range(40))]
    np.testing.assert_allclose(rates[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    middle = {"cosine": 1.1, "linear": 1.1, "constant": 2.0, "wsd": 1.7}[schedule]
    assert rates[14] == pytest.approx(middle)
    assert rates[24] == rates[39] == pytest.approx(2.0 if schedule == "constant" else 0.2)


def updates_of(settings, params, grads, layers=None):
    optimizer = make_optimizer(settings, params, layers)

    def first(params, grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    return jax.jit(first)(params, grads)


def test_rates_by_name():
    params = {"a": {"kernel": jnp.ones((2, 2)), "b": {"kernel": jnp.ones(2)}}, "c": jnp.ones(3)}
    settings = Optimization(1.0, "constant", clip=0.0)
    plain = updates_of(settings, params, params)
    scales = {"a": 2.0, "a.b": 5.0}
    scaled = updates_of(dataclasses.replace(settings, learning_rate_scales=scales), params, params)
    ratio = jax.tree.map(lambda one, other: float((one / other).mean()), scaled, plain)
    assert ratio == {"a": {"kernel": 2.0, "b": {"kernel": 5.0}}, "c": 1.0}
    with pytest.raises(
        InputError, match=r"learning_rate_scales\.d: no parameter .* there are a, c"
    ):
        make_optimizer(dataclasses.replace(settings, learning_rate_scales={"d": 1.0}), params)


def test_decay_leaves_scales_and_biases_alone():
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2), "bias": jnp.ones((2, 2))}
    settings = Optimization(1.0, "constant", weight_decay=0.1, clip=0.0)
    updates = updates_of(settings, params, jax.tree.map(jnp.zeros_like, params))
    assert float(updates["kernel"].max()) == pytest.approx(-0.1)
    assert not updates["scale"].any()
    assert not updates["bias"].any()


def test_gradients_are_clipped_by_their_global_norm():
    """Adam forgets a factor of its first gradient, but not of a later one."""
    params = {"kernel": jnp.zeros(4)}
    one, large = {"kernel": jnp.full(4, 0.5)}, {"kernel": jnp.full(4, 500.0)}

    def second(clip):
        optimizer = make_optimizer(Optimization(1.0, "constant", clip=clip), params)

        def both(params):
            _, state = optimizer.update(one, optimizer.init(params), params)
            return optimizer.update(large, state, params)[0]["kernel"]

        return jax.jit(both)(params)

    assert float(jnp.abs(second(1.0) + 1).max()) < 1e-3
    assert float(jnp.abs(second(0.0) + 1).max()) > 1e-2


def singular_values(updates, name):
    return np.linalg.svd(np.asarray(updates[name]["kernel"], np.float64), compute_uv=False)


def test_muon_makes_the_updates_of_kernels_orthogonal():
    """All directions of a gradient count alike; those over the vocabulary are left to Adam."""
    rng = np.random.default_rng(0)

    def steep(*shape):
        """A gradient with one direction a hundred times the others."""
        return {"kernel": jnp.asarray(rng.standard_normal(shape) + 100, jnp.float32)}

    params = {
        "mlp": steep(8, 16),
        "attention": {"qkv": steep(8, 16), "output": steep(8, 16)},
        "head": steep(8, 16),
        "norm": {"scale": jnp.ones(8)},
    }
    settings = Optimization(1.0, "constant", clip=0.0, optimizer="muon")
    updates = updates_of(settings, params, params)
    flat = {**updates["attention"], "mlp": updates["mlp"]}
    for name in ("mlp", "qkv", "output"):
        values = singular_values(flat, name)
        assert values[0] < 3 * values[-1]
        assert np.sqrt(np.mean(np.square(flat[name]["kernel"]))) == pytest.approx(0.2, rel=0.3)
        # It goes down the gradient.
        assert float(jnp.sum(flat[name]["kernel"])) < 0
    adam = updates_of(dataclasses.replace(settings, optimizer="adamw"), params, params)
    for leaf in jax.tree.leaves([updates["head"], updates["norm"]]):
        # Adam's first step is as large for every number, whatever its gradient.
        np.testing.assert_allclose(leaf, leaf.ravel()[0], rtol=1e-3)
    values = singular_values(adam, "mlp")
    assert values[0] > 5 * values[-1]


def test_muon_leaves_what_is_over_the_vocabulary_to_adam(tiny):
    """By the names of axes, for every kind of parameters that is trained."""
    block = functools.partial(block_config, tiny, vocabulary=50)
    tables = {
        "eagle3": eagle_config(tiny, vocabulary=50, own_embedding=True).parameter_table(),
        "medusa": medusa_config(tiny, original_lm_head=False).parameter_table(),
        "dspark": block(markov_rank=3).parameter_table(),
        "dflash2": block(selector_rank=3).parameter_table(),
        "mtp": mtp_config(tiny).parameter_table(),
        "target": parameter_table(tiny_config(tie_word_embeddings=False)),
    }
    entries = {
        leaf_name(path): entry
        for path, entry in jax.tree_util.tree_leaves_with_path(
            tables, is_leaf=lambda node: isinstance(node, Parameter)
        )
        if not {"layer", "layers", "modules"} & {step.key for step in path}
    }
    over_vocabulary = {name for name, entry in entries.items() if "vocab" in entry.axes}
    assert {"dspark.markov.projection.kernel", "medusa.head.kernel"} < over_vocabulary
    rng = np.random.default_rng(0)
    grads = flax.traverse_util.unflatten_dict(
        {
            tuple(name.split(".")): jnp.asarray(rng.uniform(1, 2, entry.shape), jnp.float32)
            for name, entry in entries.items()
        }
    )
    settings = Optimization(1.0, "constant", clip=0.0, optimizer="muon")
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates_of(settings, grads, grads)):
        name = leaf_name(path)
        is_matrix = name.endswith("kernel") and name not in over_vocabulary
        # Adam's first step is as large for every number.
        assert np.allclose(leaf, leaf.ravel()[0], rtol=1e-3) != is_matrix, name


def test_muon_takes_joined_kernels_part_by_part():
    """As many matrices as a layer has by name: together they would share their directions."""
    config = tiny_config(attention=Attention(qk_norm=True))
    table = {"layer": parameter_table(config, scan_layers=False)["layers"]["0"]}
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda entry: jnp.asarray(rng.random(entry.shape, np.float32)), table)
    settings = Optimization(1.0, "constant", clip=0.0, optimizer="muon")
    joined = updates_of(settings, grads, grads, config)
    apart = in_parts(grads, config)
    assert {"query", "key", "value"} < apart["layer"]["attention"].keys()
    wanted = updates_of(settings, apart, apart)
    near = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(near, in_parts(joined, config), wanted)
    together = updates_of(settings, grads, grads)["layer"]["attention"]["qkv"]["kernel"]
    assert not np.allclose(together, joined["layer"]["attention"]["qkv"]["kernel"], rtol=0.1)
