"""Experts in training: their loads are counted, and a bias that no gradient reaches evens them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from tiny_models import medusa_config, mtp_head
from toy_training import two_rows

from specjax.distributed import sharding
from specjax.loading.load import random_model
from specjax.models.config import Attention, Experts
from specjax.models.form import Form
from train.experts.balance import balanced, imbalance
from train.methods.medusa import MedusaLoss
from train.methods.medusa2 import JointLoss, medusa2_method
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.run.optimizer import Optimization
from train.run.step import make_program

NUM, PER_TOKEN = 8, 2
EXPERTS = Experts(
    NUM, PER_TOKEN, 8, router="sigmoid", selection_bias=True, shared_size=8, num_dense=1
)
CONFIG = tiny_config(
    family="glm4_moe",
    attention=Attention(output_bias=False, qk_norm=True),
    experts=EXPERTS,
)
LAYERS, MODULE = "target.layers.mlp.router", "mtp.modules.0.layer.mlp.router"


@pytest.fixture(scope="module")
def target():
    return random_model(CONFIG, 0, dtype="float32")


@pytest.fixture(scope="module")
def batch():
    return two_rows(CONFIG.vocab_size)


def method_of(target, trains="all", steps=1):
    head = mtp_head(target, decoder=CONFIG.one_layer(experts=True))
    loss = MtpLoss(steps=steps)
    return mtp_method(target, head.config, None, loss, trains=trains)


def program_of(target, mesh=None, method=None, fsdp=False, **options):
    settings = Optimization(**{"learning_rate": 1e-3, "weight_decay": 0.1, **options})
    method = method or method_of(target)
    return make_program(method, target.architecture, settings, mesh, seed=0, fsdp=fsdp)


def biases(params):
    found = {
        LAYERS: params["target"]["layers"]["mlp"]["router"]["selection_bias"],
        MODULE: params["mtp"]["modules"]["0"]["layer"]["mlp"]["router"]["selection_bias"],
    }
    return {name: np.asarray(bias) for name, bias in found.items()}


def micro_batches(batch, count):
    """A row each, or both in one."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)


def test_every_token_is_counted_and_no_padding(target, batch):
    """Of modules the labels', in each step that a module runs; layers apart as when stacked."""
    method = method_of(target, steps=2)
    params, loss = method.init(jax.random.key(0)), jax.jit(method.loss)
    _, measures = loss(params, target.params, batch, None, jnp.int32(0))
    tokens, labels = int((batch.segments > 0).sum()), int((batch.labels >= 0).sum())
    loads = measures.loads
    assert (loads[LAYERS].shape, loads[MODULE].shape) == ((2, NUM), (NUM,))
    np.testing.assert_array_equal(loads[LAYERS].sum(axis=1), [PER_TOKEN * tokens] * 2)
    assert loads[MODULE].sum() == 2 * PER_TOKEN * labels
    unrolled = random_model(CONFIG, 0, dtype="float32", form=Form("unrolled"))
    _, again = jax.jit(method_of(unrolled).loss)(
        {**params, "target": unrolled.params}, unrolled.params, batch, None, jnp.int32(0)
    )
    for layer in (1, 2):
        name = f"target.layers.{layer}.mlp.router"
        np.testing.assert_array_equal(again.loads[name], loads[LAYERS][layer - 1])
    # What is padding does not matter, nor which experts it has.
    other = batch.replace(tokens=jnp.where(batch.segments > 0, batch.tokens, 7))
    _, same = loss(params, target.params, other, None, jnp.int32(0))
    jax.tree.map(np.testing.assert_array_equal, same.loads, loads)


@pytest.mark.parametrize(("data", "fsdp"), [(2, True), *slow((2, False))])
def test_a_step_moves_each_bias_by_the_loads_of_the_whole_update(data, fsdp, batch):
    """By the rate, up or down: in micro-batches as at once on a mesh. Weights decay, it not."""
    experts = dataclasses.replace(EXPERTS, num_dense=0)
    config = dataclasses.replace(CONFIG, num_layers=2, experts=experts)
    target = random_model(config, 0, dtype="float32")
    given = {"balance_rate": 0.25}
    states, loads = [], None
    for mesh, micro in ((None, 2), (sharding.make_mesh(2, 1, jax.devices()[:2]), 1)):
        program = program_of(target, mesh, fsdp=fsdp and mesh is not None, **given)
        assert program.state.params["target"]["layers"]["mlp"]["router"]["selection_bias"].any()
        before = biases(program.state.params)
        params = sharding.spread(target.params, mesh)
        state, report = program.step(program.state, params, micro_batches(batch, micro))
        loads = jax.tree.map(np.asarray, report.measures.loads)
        states.append(biases(state.params))
    for name, load in loads.items():
        wanted = before[name] + 0.25 * np.sign(load.mean(axis=-1, keepdims=True) - load)
        for state in states:
            np.testing.assert_array_equal(state[name], wanted)


@pytest.mark.parametrize(("rate", "evens"), [(0.005, True), *slow((0.0, False))])
def test_the_bias_evens_the_load(rate, evens, target, batch):
    """Nothing else learns, at this rate of learning."""
    program = program_of(target, balance_rate=rate, learning_rate=1e-12, weight_decay=0.0)
    state, seen, before = program.state, [], biases(program.state.params)
    for _ in range(100):
        state, report = program.step(state, target.params, micro_batches(batch, 1))
        seen.append(imbalance(report.measures.loads))
    assert seen[0] > 2
    assert (np.mean(seen[-20:]) < 1.5) == evens, seen[::10]
    if not rate:
        jax.tree.map(np.testing.assert_array_equal, biases(state.params), before)


def test_of_a_frozen_target_the_modules_are_balanced(target, batch):
    method = method_of(target, trains="modules")
    params = jax.jit(method.init)(jax.random.key(0))
    features = {"final_norm": jnp.ones((*batch.tokens.shape, CONFIG.hidden_size))}
    batch = batch.replace(features=features)
    _, measures = jax.jit(method.loss)(params, target.params, batch, None)
    assert list(measures.loads) == [MODULE.removeprefix("mtp.")]
    moved = balanced(params, measures.loads, 0.5)
    bias = moved["modules"]["0"]["layer"]["mlp"]["router"]["selection_bias"]
    assert set(np.asarray(bias).tolist()) <= {-0.5, 0.0, 0.5}
    assert bias.any()


def test_medusa_2_balances_its_target_once_that_learns(target, batch):
    loss, joint = MedusaLoss(), JointLoss(target="tokens", warm_steps=1)
    config = medusa_config(target, heads=1)
    method = medusa2_method(target, config, None, loss, joint)
    batch = batch.replace(features={"final_norm": jnp.ones((*batch.tokens.shape, 24))})
    params = method.init(jax.random.key(0))
    for step, tokens in ((0, 0), (1, int((batch.segments > 0).sum()))):
        _, measures = method.loss(params, target.params, batch, None, jnp.int32(step))
        assert measures.loads[LAYERS].sum() == 2 * PER_TOKEN * tokens


def test_routers_without_the_bias_stay_as_they_are(batch):
    plain = dataclasses.replace(EXPERTS, router="softmax", selection_bias=False)
    params = {"layers": {"mlp": {"router": {"kernel": jnp.ones((2, 3))}}}}
    same = balanced(params, {"layers.mlp.router": jnp.ones((2, plain.num_experts))}, 0.1)
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_imbalance_is_the_largest_load_over_the_mean():
    assert imbalance({}) is None
    assert imbalance({"a": [[0.0, 0.0], [1.0, 3.0]], "b": [2.0, 2.0]}) == 1.25
