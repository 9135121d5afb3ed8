"""Mixtures of experts: only the chosen ones are read, and their sum is that of all, masked."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from test_sharding import collectives
from tiny_models import mtp_head

from specjax.distributed import sharding
from specjax.engine.length_control import time_steps
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.engine.programs import compile_plan
from specjax.errors import InputError
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.loading.quantize import float_model, is_quantized, quantized_model
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.make import make_drafter
from specjax.models.config import Attention, DecoderConfig, Experts
from specjax.models.form import Form
from specjax.models.layers import experts as expert_layers
from specjax.models.layers.experts import Routes, StackedExperts, mix, route
from specjax.models.mtp import MtpModules
from specjax.theory import ExpertShape
from specjax.tuning import measure_expert_use

NUM, PER_TOKEN, WIDTH, HIDDEN = 8, 2, 12, 10
CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=WIDTH,
    intermediate_size=14,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    experts=Experts(NUM, PER_TOKEN, HIDDEN, num_dense=1),
    family="glm4_moe",
)
GLM = dataclasses.replace(
    CONFIG,
    attention=Attention(output_bias=False, rotary_width=8),
    experts=dataclasses.replace(
        CONFIG.experts,
        router="sigmoid",
        selection_bias=True,
        groups=4,
        groups_per_token=2,
        shared_size=20,
    ),
)


def kernels(seed=0, layers=2):
    rng = np.random.default_rng(seed)

    def one(*shape):
        return jnp.asarray(rng.standard_normal((layers, NUM, *shape), np.float32))

    return one(WIDTH, HIDDEN), one(WIDTH, HIDDEN), one(HIDDEN, WIDTH)


def inputs(count, seed=1):
    rng = np.random.default_rng(seed)
    h = jnp.asarray(rng.standard_normal((count, WIDTH), np.float32))
    chosen = np.stack([rng.choice(NUM, PER_TOKEN, replace=False) for _ in range(count)])
    weights = jnp.asarray(rng.random((count, PER_TOKEN), np.float32))
    return h, Routes(jnp.asarray(chosen, jnp.int32), weights)


close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4)


def stacked_experts(gate, up, down):
    return StackedExperts(jnp.concatenate([gate, up], axis=-1), down, jnp.int32(1))


def gated(gate_up):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@functools.partial(jax.jit, static_argnums=3)
def mixed(h, routes, leaves, differentiable=False):
    """The experts of layer 1."""
    return mix(h, routes, stacked_experts(*leaves), gated, differentiable=differentiable)


@jax.jit
def masked(h, routes, gate, up, down):
    """Every expert of layer 1 for every token, those not chosen times zero."""
    share = jnp.zeros((len(h), NUM))
    rows = jnp.arange(len(h))[:, None]
    share = share.at[rows, routes.experts].set(routes.weights)
    hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", h, gate[1]))
    hidden = hidden * jnp.einsum("nd,edf->nef", h, up[1])
    return jnp.einsum("nef,efd,ne->nd", hidden, down[1], share)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_the_sum_is_that_of_all_experts_masked(count, differentiable):
    """One token, a few, and more than a tile of some expert."""
    (h, routes), own = inputs(count), kernels()
    got = mixed(h, routes, own, differentiable)
    close(got, masked(h, routes, *own), atol=2e-4)


@functools.partial(jax.jit, static_argnames="grouped")
def wide_sum(h, routes, gate_up, down, grouped):
    stacked = StackedExperts(gate_up, down, jnp.int32(1))
    return mix(h, routes, stacked, gated, grouped=grouped)


@pytest.mark.parametrize("count", [1, 5, 150])
def test_the_gpu_kernel_has_the_sum_of_the_loop(count):
    """With experts that are out of range, as on a mesh, some without tokens, and NaN in those."""
    rng = np.random.default_rng(count)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    h, gate_up, down = normal(count, 32), normal(2, NUM, 32, 96), normal(2, NUM, 48, 32)
    experts = jnp.asarray(rng.integers(-2, NUM, (count, 3)), jnp.int32).at[0, 0].set(NUM + 1)
    routes = Routes(experts, jnp.abs(normal(count, 3)))
    unused = np.setdiff1d(np.arange(NUM), experts)
    gate_up, down = (leaf.at[:, unused].set(jnp.nan).at[0].set(jnp.nan) for leaf in (gate_up, down))
    wanted, got = (wide_sum(h, routes, gate_up, down, grouped) for grouped in (False, True))
    assert np.isfinite(wanted).all()
    close(got, wanted, atol=2e-4)


def test_all_tokens_may_choose_the_same_experts():
    h, routes = inputs(150)
    routes = routes._replace(experts=jnp.broadcast_to(jnp.array([[6, 2]], jnp.int32), (150, 2)))
    own = kernels()
    got = mixed(h, routes, own)
    close(got, masked(h, routes, *own), atol=2e-4)


def test_gradients_are_those_of_the_masked_sum():
    (h, routes), own = inputs(9), kernels()

    def ours(h, weights, own):
        new = routes._replace(weights=weights)
        return jnp.sum(mix(h, new, stacked_experts(*own), gated, differentiable=True) ** 2)

    def theirs(h, weights, own):
        return jnp.sum(masked(h, routes._replace(weights=weights), *own) ** 2)

    found, expected = (
        jax.jit(jax.grad(one, argnums=(0, 1, 2)))(h, routes.weights, own) for one in (ours, theirs)
    )
    jax.tree.map(functools.partial(close, atol=1e-2, rtol=1e-3), found, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_a_token_reads_only_its_experts(count):
    """What the others hold does not matter, even where it is no number."""
    h, routes = inputs(count)
    own = kernels()
    unused = np.setdiff1d(np.arange(NUM), routes.experts)
    assert len(unused) >= 2
    poisoned = [leaf.at[:, unused].set(jnp.nan).at[0].set(jnp.nan) for leaf in own]
    clean, got = (mixed(h, routes, leaves) for leaves in (own, poisoned))
    np.testing.assert_array_equal(got, clean)


def compiled_pass(model, count):
    """The program of a pass over `count` tokens."""
    decoder, tokens = model.architecture, jnp.zeros((1, count), jnp.int32)

    @jax.jit
    def step(params, cache, window):
        seen = jnp.ones((1, count, count), bool)
        return decoder.extend(params, tokens, tokens, cache, window, 0, seen).logits

    with sharding.use(model.mesh):
        arguments = model.params, decoder.make_cache(1, 128), decoder.make_window(1, count)
        return step.lower(*arguments).compile()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("layers", ["stacked", *slow("unrolled")])
def test_no_program_takes_a_layers_experts_apart(layers, devices):
    """Nothing in a pass has the size of all of a device's experts of a layer, but parameters."""
    config = dataclasses.replace(GLM, hidden_size=24)
    mesh = sharding.make_mesh(1, 2, jax.devices()[:2]) if devices == 2 else None
    model = random_model(config, 0, dtype="float32", mesh=mesh, form=Form(layers))
    text = compiled_pass(model, 1).as_text()
    whole = re.compile(rf"= f32\[(1,)?{NUM // devices},(24,{2 * HIDDEN}|{HIDDEN},24)\]\S* (\S+)\(")
    made = {match[3] for match in whole.finditer(text)}
    assert made <= {"parameter", "bitcast", "get-tuple-element", "reshape", "opt-barrier"}, made


def plain_route(h, kernel, bias, config):
    """Groups, bias and scores as DeepSeek-V3 describes them, token by token."""
    chosen, weights = [], []
    for row in h @ kernel:
        scores = 1 / (1 + np.exp(-row))
        choice = (scores + bias).reshape(config.groups, -1)
        best = np.argsort(-np.sort(choice, axis=1)[:, -2:].sum(axis=1))[: config.groups_per_token]
        allowed = np.full_like(choice, -np.inf)
        allowed[best] = choice[best]
        experts = np.argsort(-allowed.reshape(-1))[: config.per_token]
        chosen.append(experts)
        weights.append(scores[experts] / scores[experts].sum() * config.scale)
    return np.array(chosen), np.array(weights)


def test_sigmoid_routes_are_those_of_a_plain_computation():
    """The bias selects experts and is in no weight."""
    config = dataclasses.replace(GLM.experts, scale=1.7)
    rng = np.random.default_rng(3)
    h, kernel = rng.standard_normal((50, WIDTH)), rng.standard_normal((WIDTH, NUM))
    bias = rng.standard_normal(NUM)
    router = {"kernel": jnp.asarray(kernel, jnp.float32), "selection_bias": jnp.asarray(bias)}
    routes = route(jnp.asarray(h, jnp.float32), router, config)
    experts, weights = plain_route(h, kernel, bias, config)
    np.testing.assert_array_equal(routes.experts, experts)
    np.testing.assert_allclose(routes.weights, weights, rtol=1e-4)


def causal(length):
    return jnp.tril(jnp.ones((1, length, length), bool))


def logits_of(model, length=20):
    decoder = model.architecture
    tokens = jnp.arange(2 * length).reshape(2, length) % 40
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)

    @jax.jit
    def both(params):
        cache, window = decoder.make_cache(2, 128), decoder.make_window(2, length)
        decoded = decoder.extend(
            params, tokens, positions, cache, window, 0, causal(length), num_layers=2
        )
        trained = decoder.extend(params, tokens, positions, None, None, 0, causal(length))
        return decoded.logits, trained.logits

    return both(model.params)


def with_experts(**changes):
    return dataclasses.replace(GLM, experts=dataclasses.replace(GLM.experts, **changes))


@pytest.fixture(scope="module")
def stacked():
    """A model with stacked layers, and its logits."""
    model = random_model(GLM, 0, dtype="float32", form=Form("stacked"))
    return model, logits_of(model)


@pytest.mark.parametrize(
    ("layers", "replicated"),
    [("stacked", False), ("stacked", True), ("unrolled", False), *slow(("unrolled", True))],
)
def test_layers_stacked_and_unrolled_and_on_a_mesh_agree(layers, replicated, stacked):
    """A dense layer before two with experts; an early exit between them; training's form."""
    model, expected = stacked
    assert model.params["dense_layers"]["mlp"]["gate_up"]["kernel"].shape[0] == 1
    found = []
    if layers == "unrolled":
        model = random_model(GLM, 0, dtype="float32", form=Form("unrolled"))
        found.append(logits_of(model))
    placed = place_model(model, sharding.make_mesh(2, 2, jax.devices()[:4]), replicated=replicated)
    with sharding.use(placed.mesh):
        found.append(logits_of(placed))
    for got in found:
        jax.tree.map(close, got, expected)


WIDE = dataclasses.replace(
    GLM,
    hidden_size=64,
    intermediate_size=64,
    head_dim=32,
    experts=dataclasses.replace(GLM.experts, intermediate_size=64, shared_size=128),
)


def decoded_logits(model):
    decoder, tokens = model.architecture, jnp.arange(40).reshape(2, 20)
    positions = jnp.broadcast_to(jnp.arange(20), tokens.shape)

    @jax.jit
    def run(params):
        cache, window = decoder.make_cache(2, 128), decoder.make_window(2, 20)
        return decoder.extend(params, tokens, positions, cache, window, 0, causal(20)).logits

    with sharding.use(model.mesh):
        return np.asarray(run(model.params))


@pytest.mark.parametrize(
    ("weights", "layers", "num_experts"),
    [("int8", "stacked", 8), ("int4", "unrolled", 8), *slow(("int4", "stacked", 7))],
)
def test_experts_in_few_bits_are_those_of_their_dequantised_weights(weights, layers, num_experts):
    """Alone, and on two devices that hold whole experts, or each a part of every expert."""
    groups = dict(groups=1, groups_per_token=1) if num_experts == 7 else {}
    experts = dataclasses.replace(WIDE.experts, num_experts=num_experts, **groups)
    config = dataclasses.replace(WIDE, experts=experts)
    model = random_model(config, 0, dtype="float32", form=Form(layers))
    few = quantized_model(model, weights)
    name = "2" if layers == "unrolled" else None
    of_layer = few.params["layers"] if name is None else few.params["layers"][name]
    assert is_quantized(of_layer["mlp"]["experts"]["down"]["kernel"])
    wanted = decoded_logits(float_model(few))
    assert np.abs(wanted - decoded_logits(model)).max() > 1e-3
    np.testing.assert_allclose(decoded_logits(few), wanted, atol=5e-4)
    placed = place_model(model, sharding.make_mesh(1, 2, jax.devices()[:2]))
    split = quantized_model(placed, weights)
    np.testing.assert_allclose(decoded_logits(split), wanted, atol=5e-4)


def kernel_specs(model):
    kernels = model.params["layers"]["mlp"]["experts"]
    return [tuple(kernels[name]["kernel"].sharding.spec) for name in ("gate_up", "down")]


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize(
    ("num_experts", "specs"),
    [
        (8, [(None, "model", None, None)] * 2),
        *slow((7, [(None, None, None, "model"), (None, None, "model", None)])),
    ],
)
def test_devices_exchange_one_sum_for_all_experts_of_a_layer(num_experts, specs):
    """Whole experts where their number divides, else each expert's width; no kernel travels."""
    config = dataclasses.replace(
        with_experts(num_experts=num_experts, groups=1, groups_per_token=1), hidden_size=24
    )
    alone = random_model(config, 0, dtype="float32")
    model = place_model(alone, sharding.make_mesh(1, 2, jax.devices()[:2]))
    assert kernel_specs(model) == specs
    with sharding.use(model.mesh):
        got = logits_of(model)
    jax.tree.map(close, got, logits_of(alone))
    program = compiled_pass(model, 3)
    # The embedding's; in the dense layer and in those with experts attention's, and the other.
    assert collectives(program) == sorted(
        [("all-reduce", "f32[1,3,24]")] * 4 + [("all-reduce", "f32[3,24]")]
    )
    parts = re.split(r"\n(?=\S)", program.as_text())
    width = 2 * HIDDEN if num_experts == 8 else HIDDEN
    reads = [part for part in parts if f"f32[1,1,24,{width}]" in part and "dynamic-slice(" in part]
    assert reads
    assert not any("all-reduce(" in part for part in reads)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 3}, "experts.groups=3: must divide num_experts=8"),
        ({"groups": 8, "per_token": 1}, "a group must have at least 2 experts"),
        ({"groups": 4, "per_token": 3}, "experts.per_token=3: must be at most the 2 experts"),
        ({"per_token": 9}, "experts.per_token=9: must be a whole number from 1 to 8"),
        ({"scale": 0.0}, "experts.scale=0.0: must be"),
    ],
)
def test_experts_that_do_not_fit_are_refused(change, words):
    with pytest.raises(InputError, match=re.escape(words)):
        dataclasses.replace(CONFIG, experts=dataclasses.replace(CONFIG.experts, **change))


def test_a_mesh_that_does_not_fit_the_experts_is_refused():
    mesh = sharding.make_mesh(2, 2, jax.devices()[:4])
    random_model(with_experts(intermediate_size=9), 0, mesh=mesh)
    config = with_experts(intermediate_size=9, num_experts=7, groups=1, groups_per_token=1)
    with pytest.raises(InputError, match="an MLP of 14 and .* and 7 experts of 9 cannot be split"):
        random_model(config, 0, mesh=mesh)


def test_the_bias_that_selects_experts_is_not_rounded(tmp_path):
    """In a model in bfloat16, however it was stored, laid out and placed; and in its modules."""
    model = random_model(GLM, 0, dtype="float32")
    bias = model.params["layers"]["mlp"]["router"]["selection_bias"]
    save_model(model, tmp_path / "a")
    modules = mtp_head(model, decoder=GLM.one_layer(experts=True))
    inside = MtpModules(modules.config, modules.params)
    save_checkpoint(dataclasses.replace(model, mtp=inside), tmp_path / "b")
    mesh = sharding.make_mesh(1, 2, jax.devices()[:2])
    for folder, more in (("a", {}), ("a", {"mesh": mesh}), ("b", {}), ("b", {"mesh": mesh})):
        loaded = load_model(tmp_path / folder, dtype="bfloat16", **more)
        layers = loaded.params["layers"]["mlp"]
        assert layers["router"]["kernel"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(layers["router"]["selection_bias"], bias)
    assert layers["router"]["selection_bias"].dtype == jnp.float32
    unrolled = load_model(tmp_path / "b", dtype="bfloat16", form=Form("unrolled"))
    of_layers = unrolled.params["layers"]
    np.testing.assert_array_equal(of_layers["2"]["mlp"]["router"]["selection_bias"], bias[1])
    save_checkpoint(unrolled, tmp_path / "c")
    again = load_model(tmp_path / "c", dtype="bfloat16")
    found = [
        again.mtp.params["modules"]["0"]["layer"]["mlp"]["router"],
        complete_parameters(modules, again)["modules"]["0"]["layer"]["mlp"]["router"],
    ]
    for router in found:
        assert router["kernel"].dtype == jnp.bfloat16
        wanted = modules.params["modules"]["0"]["layer"]["mlp"]["router"]["selection_bias"]
        np.testing.assert_array_equal(router["selection_bias"], wanted)
    np.testing.assert_array_equal(again.params["layers"]["mlp"]["router"]["selection_bias"], bias)


def test_what_a_config_cannot_say_is_not_saved(tmp_path):
    """GLM's routers are sigmoids."""
    model = random_model(CONFIG, 0, dtype="float32")
    with pytest.raises(InputError, match="attention=|experts="):
        save_model(model, tmp_path / "model")


def test_timed_passes_read_as_many_experts_as_drafts(monkeypatch):
    """Costs that a controller learns before the first token hold for rows and drafts that differ.

    Equal tokens would use the experts of one, and the pass seem cheaper than it ever is.
    """
    read = []

    def counted(h, routes, stacked, *rest, **more):
        used = jnp.zeros(stacked.down.shape[1], bool).at[routes.experts.reshape(-1)].set(True)
        jax.debug.callback(lambda used: read.append(int(used.sum())), used)
        return mix(h, routes, stacked, *rest, **more)

    monkeypatch.setattr(expert_layers, "mix", counted)
    sizes = Experts(64, 2, HIDDEN)
    model = random_model(dataclasses.replace(CONFIG, experts=sizes, vocab_size=509), 0)
    shape = ExpertShape(64, 2, HIDDEN)
    drafter = make_drafter("ngram", model, num_speculative_tokens=4)
    options = DecodeOptions(batch_size=4, num_speculative_tokens="auto")
    plan, _ = plan_requests(model, [[1, 2]] * 4, drafter=drafter, options=options)
    for record in time_steps(plan, compile_plan(plan)):
        jax.effects_barrier()
        if not any(record.limits.longest):
            width = plan.loop.widths[int(np.argmax(record.passes))]
            assert np.mean(read) > 0.7 * shape.distinct(4 * width), width
        read.clear()


def test_measured_use_is_that_of_the_routers():
    """The feature counts what passes choose; a run's first token uses K experts in each layer."""
    model = random_model(CONFIG, 0)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 40, count).tolist() for count in (30, 21, 3)]
    use = measure_expert_use(model, texts, longest=5)
    assert use.share.shape == (2, NUM, 5)
    assert use.distinct(1) == pytest.approx(PER_TOKEN)
    assert PER_TOKEN < use.distinct(5) <= NUM
    # A text's routes do not depend on what it is measured with.
    alone = [measure_expert_use(model, [text], longest=5).share for text in texts[:2]]
    np.testing.assert_allclose(use.share, (26 * alone[0] + 17 * alone[1]) / 43)
    dense = random_model(dataclasses.replace(CONFIG, experts=None, family="llama"), 0)
    with pytest.raises(InputError, match="it has no experts; use a model with experts"):
        measure_expert_use(dense, texts)
