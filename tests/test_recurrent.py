"""Recurrent layers: what a round moves of their states, and their share of the roofline."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.methods import LAYERS, RECURRENT, target, target_with
from conftest import slow, tiny_config
from tiny_models import SOME, medusa_config
from toy_training import two_rows, with_features

from specjax import SamplingParams, generate, make_drafter, theory
from specjax.core.cache import commit
from specjax.core.prefill import prefill
from specjax.distributed import device_memory
from specjax.engine import programs as programs_module
from specjax.engine.engine import Engine
from specjax.engine.programs import compile_plan, needed_memory
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.models.config import Recurrence
from specjax.models.decoder import Decoder
from specjax.models.layers import recurrence
from train.methods.medusa import MedusaLoss
from train.methods.medusa2 import JointLoss, medusa2_method
from train.methods.target_layers import some_layers

SIZES = 32, 64


def moved_bytes(kind, width, keys, values):
    """Return the bytes that a pass over `width` tokens and a commit access, as compiled."""
    sizes = dict(key_heads=1, value_heads=4, key_width=keys, value_width=values)
    config = tiny_config(
        vocab_size=16,
        num_layers=2,
        max_positions=64,
        recurrence=Recurrence(kind, **sizes),
        mixers=("recurrent", "attention"),
    )
    model = Decoder(config, jnp.dtype("float32"))

    def run(params, cache, tokens, visible, count):
        window, positions = model.make_window(1, width), jnp.zeros_like(tokens)
        out = model.extend(params, tokens, positions, cache, window, 0, visible)
        slots = jnp.arange(width)[None, :]
        return out.logits, commit(cache, out.window, slots, count)

    def shape(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    params = jax.eval_shape(model.init, jax.random.key(0))
    cache = jax.eval_shape(lambda: model.make_cache(1, 64))
    operands = shape(1, width), shape(1, width, width, dtype=bool), shape(1)
    compiled = jax.jit(run, donate_argnums=1).lower(params, cache, *operands).compile()
    return compiled.cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("kind", ["delta", *slow("mamba2")])
def test_a_wider_round_moves_little_more_of_a_state(as_shipped, kind):
    """Only states grow with the product of keys and values, all else with one of them."""
    moves = []
    for width in (1, 5):
        found = {
            sizes: moved_bytes(kind, width, *sizes) for sizes in itertools.product(SIZES, SIZES)
        }
        few, many = SIZES
        of_states = found[many, many] - found[many, few] - found[few, many] + found[few, few]
        moves.append(of_states / (4 * 4 * (many - few) ** 2))
    assert moves[0] < 8
    assert moves[1] <= 1.3 * moves[0]


@pytest.mark.parametrize("layers", RECURRENT)
def test_blocks_of_tokens_continue_each_other(monkeypatch, layers):
    """A pass over more tokens than a block has gives what one over fewer at a time gives."""
    config = tiny_config(vocab_size=16, max_positions=64, **LAYERS[layers])
    model = random_model(config, 0, dtype="float32")
    tokens = jax.random.randint(jax.random.key(1), (2, 21), 0, 16)

    def logits(block):
        monkeypatch.setattr(recurrence, "_BLOCK", block)
        positions = jnp.broadcast_to(jnp.arange(21), tokens.shape)
        causal = jnp.tril(jnp.ones((1, 21, 21), bool))
        return model.architecture.extend(model.params, tokens, positions, None, None, 0, causal)

    whole = logits(32).logits
    for block in (1, 8):
        assert jnp.abs(logits(block).logits - whole).max() < 2e-5


def test_the_roofline_counts_states():
    sizes = dict(num_layers=4, hidden_size=64, intermediate_size=128, num_heads=4)
    sizes |= dict(num_kv_heads=2, head_dim=16, vocab_size=100)
    states = theory.RecurrentShape(3, key_heads=2, value_heads=4, key_width=8, value_width=16)
    hybrid, plain = theory.ModelShape(**sizes, recurrent=states), theory.ModelShape(**sizes)
    assert states.channels == 2 * 2 * 8 + 4 * 16
    assert states.state_elements() == 3 * (4 * 8 * 16 + 3 * states.channels)
    assert states.num_weights(64) == 3 * 64 * (states.channels + 64 + 8 + 64)
    assert hybrid.kv_elements() == plain.kv_elements() / 4
    short, long = (
        theory.pass_seconds(hybrid, "h200", tokens=1, batch=1, context=context)
        for context in (0, 1_000_000)
    )
    far = theory.pass_seconds(plain, "h200", tokens=1, batch=1, context=1_000_000)
    assert short < long < far / 3
    moved = theory.pass_seconds(hybrid, "h200", tokens=1, batch=100_000, context=0)
    assert moved > 100_000 * states.moved_bytes() / theory.CHIPS["h200"].bandwidth
    kept = theory.memory(hybrid, batch=2, capacity=10)
    cache = 2 * 2 * 10 * hybrid.kv_elements()
    assert kept.target_cache == cache + 2 * 4 * states.state_elements()
    with pytest.raises(InputError, match="give fewer than num_layers"):
        theory.ModelShape(**sizes | {"num_layers": 3}, recurrent=states)


def test_a_pass_leaves_later_slots_of_a_window_alone():
    config = tiny_config(vocab_size=16, max_positions=64, **LAYERS["mamba2"])
    model = random_model(config, 0, dtype="float32")
    tokens = jax.random.randint(jax.random.key(1), (1, 60), 0, 16)
    cache, causal = model.architecture.make_cache(1, 64), jnp.tril(jnp.ones((1, 60, 60), bool))

    def window(before, count):
        arguments = tokens[:, :count], jnp.arange(count)[None], cache, before, 0, causal[:, :count]
        return model.architecture.extend(model.params, *arguments).window

    filled = window(model.architecture.make_window(1, 60), 60)
    again = window(filled, 40)
    for one, other in zip(*map(jax.tree.leaves, (filled, again)), strict=True):
        assert jnp.abs(one - other).max() < 1e-5


def test_keys_are_chosen_by_the_queries_of_layers_that_have_some():
    config = tiny_config(vocab_size=16, max_positions=128, **LAYERS["delta"])
    model = random_model(config, 0, dtype="float32")
    prompts = [jax.random.randint(jax.random.key(1), (70,), 0, 16).tolist(), [1, 2, 3]]
    drafter = make_drafter("sparse_kv", model, keep="scores", budget=40, refresh=8)
    options = dict(max_new_tokens=30, ignore_eos=True, temperature=0.0)
    found = generate(model, prompts, drafter=drafter, **options)
    assert found.token_ids == generate(model, prompts, **options).token_ids


@pytest.mark.parametrize("layers", RECURRENT)
def test_layers_are_chosen_among_recurrent_ones(layers):
    """By the target itself: to leave out, to exit after, and to start a draft model from."""
    with target_with(layers):
        model = target()
        assert make_drafter("layer_skip", model).drafter.skipped
        assert make_drafter("early_exit", model, exit_layer="auto").drafter.exit_layer
        draft_model, plain = model.config.some_layers((0, 1)), model.config.some_layers((1,))
        assert draft_model.mixers == ("recurrent", "attention")
        assert plain.recurrence is None
        for chosen, config in (((0, 1), draft_model), ((1,), plain), ((2,), None)):
            config = model.config.some_layers(chosen) if config is None else config
            params = some_layers(model, chosen)
            assert {run.name for run in config.runs} | {"final_norm"} == set(params)
            for run in config.runs:
                mixer = {"attention": "attention", "recurrent": "recurrence"}[run.mixer]
                kernel = params[run.name][mixer]["output"]["kernel"]
                assert len(kernel) == len(run.layers)


@pytest.fixture(scope="module", params=RECURRENT)
def long_model(request):
    """Return a random model of many positions; some of its layers have attention."""
    config = tiny_config(vocab_size=16, max_positions=2048, **LAYERS[request.param])
    return random_model(config, 0, dtype="float32")


def ids(seed, count):
    return np.random.default_rng(seed).integers(16, size=count).tolist()


def test_a_prompt_is_read_alike_in_chunks_of_any_size(long_model):
    decoder, params = long_model.architecture, long_model.params
    prompt, found = jnp.asarray([ids(0, 1100)], jnp.int32), []
    for chunks in ((1024, 64), (64,), (7,)):
        cache, _ = jax.jit(prefill, static_argnums=(0, 5))(
            decoder, params, prompt, jnp.array([1100]), decoder.make_cache(1, 1152), chunks
        )
        found.append(cache.recurrent)
    for other in found[1:]:
        for one, again in zip(*map(jax.tree.leaves, (found[0], other)), strict=True):
            assert jnp.abs(one - again).max() < 1e-4 * jnp.abs(one).max()


def test_a_prompt_read_again_after_another_gives_its_tokens_again(long_model):
    first, second = ids(0, 300), ids(1, 200)
    prompts = (first, second, first, [*first[:200], *second[:90]])
    params, outputs = SamplingParams(max_new_tokens=8, ignore_eos=True), []
    for pages in ({}, dict(kv_page_size=64, num_kv_pages=20, enable_prefix_caching=True)):
        engine = Engine(long_model, batch_size=2, max_length=512, **pages)
        for prompt in prompts:
            engine.add(prompt, params)
            (output,) = [delta.output for delta in engine if delta.output is not None]
            outputs.append(output.token_ids)
    assert outputs[:4] == outputs[4:]
    assert outputs[0] == outputs[2]
    # Of the last prompt 192 tokens are in pages, but no state was kept there.
    assert engine.statistics.shared_tokens == 256
    assert engine.statistics.reread_tokens == 192
    assert "192 found without a state after them" in str(engine.statistics.summary())


@pytest.mark.parametrize("number", [None, 3])
def test_kept_states_are_in_the_memory_that_is_planned(long_model, number, monkeypatch, caplog):
    pages = dict(kv_page_size=64, num_kv_pages=40, enable_prefix_caching=True)
    engine = Engine(long_model, batch_size=2, max_length=512, num_kept_states=number, **pages)
    plan, most = engine._rows.plan, number or 8
    programs = engine._rows.compile()
    planned = needed_memory(plan, programs).arrays
    (name,) = planned.keys() - programs.memory.arrays.keys()
    assert name == f"{most} kept states"
    for seed in range(most + 2):
        engine.add(ids(seed, 200), SamplingParams(max_new_tokens=4, ignore_eos=True))
        list(engine)
        (pool,) = engine._scheduler.pages.pools
        waiting = [held.states for held in pool._held.values()]
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves((pool._states, waiting)))
        assert kept <= planned[name]
    # Those of four more are for the prompt that is being read.
    assert len(pool._states) == most
    assert kept * (most + 4) == planned[name] * most

    monkeypatch.setattr(device_memory, "_GIB", 1)
    monkeypatch.setattr(programs_module, "_made", set())
    with caplog.at_level("INFO", "specjax"):
        compile_plan(plan)
    assert f"{name} {planned[name]}.00 GiB" in caplog.text
    arrays = sum(programs.memory.arrays.values()) + programs.memory.temporaries
    monkeypatch.setattr(device_memory, "free_bytes", lambda: arrays + planned[name] - 1)
    with pytest.raises(InputError, match="lower num_kv_pages, num_kept_states or num_spec"):
        compile_plan(plan)


def test_plans_that_keep_no_states_count_none(long_model):
    engine = Engine(long_model, batch_size=2, max_length=512, kv_page_size=64)
    programs = engine._rows.compile()
    assert needed_memory(engine._rows.plan, programs) == programs.memory


def test_a_model_without_attention_decodes():
    config = tiny_config(vocab_size=16, **LAYERS["delta"] | {"mixers": ("recurrent",)})
    model = random_model(config, 0, dtype="float32")
    options = dict(max_new_tokens=20, ignore_eos=True, temperature=0.0)
    plain = generate(model, [[1, 2, 1, 2, 1], [3, 4]], **options).token_ids
    for name in ("ngram", "early_exit"):
        drafter = make_drafter(name, model)
        found = generate(model, [[1, 2, 1, 2, 1], [3, 4]], drafter=drafter, **options)
        assert found.token_ids == plain


@pytest.mark.parametrize("layers", ["delta", *slow("mamba2")])
def test_heads_and_target_are_trained_through_recurrent_layers(layers):
    """Texts packed in one row see nothing of each other; every parameter has a gradient."""
    config = tiny_config(vocab_size=61, **LAYERS[layers])
    model = random_model(config, 0, dtype="float32")
    batch = with_features(model, two_rows(61))
    together = batch.features["final_norm"]
    alone = jax.tree.map(lambda leaf: leaf[:1, 10:21], (batch.tokens, batch.positions))
    causal = jnp.tril(jnp.ones((1, 11, 11), bool))
    second = model.architecture.extend(
        model.params, *alone, None, None, 0, causal, features=("final_norm",)
    ).features["final_norm"]
    assert jnp.abs(together[:1, 10:21] - second).max() < 1e-5

    heads = medusa_config(model, heads=2, ids=SOME)
    method = medusa2_method(model, heads, SOME, MedusaLoss(), JointLoss(steps=8))
    params = method.init(jax.random.key(0))
    moved = {**params, "target": jax.tree.map(lambda leaf: 1.1 * leaf, params["target"])}
    gradient = jax.jit(jax.grad(lambda *arguments: method.loss(*arguments)[0]))
    grads = gradient(moved, model.params, batch, jax.random.key(0), jnp.int32(7))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert leaf.any(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(recurrence=None), "if and only if"),
        (dict(recurrence=Recurrence("delta", key_heads=3, value_heads=4)), "must divide"),
        (dict(recurrence=Recurrence("conv", conv_width=0)), "conv_width=0"),
        (dict(recurrence=Recurrence("mamba2", step_limits=(1.0, 0.5))), "must ascend"),
        (dict(mixers=("recurrent", "attention", "absent"), mlps=(False,)), "neither a mixer"),
        (dict(mlps=(True, True, False)), "some have an MLP and some have none"),
    ],
)
def test_bad_configs_are_refused(changes, says):
    usual = dict(recurrence=Recurrence("delta"), mixers=("recurrent", "attention"))
    with pytest.raises(InputError, match=says):
        tiny_config(**usual | changes)
