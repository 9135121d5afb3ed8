"""Drafts by the target without some of its layers, and the choice of layers that draft."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    decode,
    greedy,
)
from test_loop_cache import fresh

import specjax
from specjax.core.causal_mask import causal
from specjax.distributed import sharding
from specjax.loading.load import place_model, random_model
from specjax.methods import layer_choice
from specjax.methods.layer_choice import choose, exit_acceptance, leave_out
from specjax.methods.layer_skip import LayerSkip
from specjax.models.config import Experts, SlidingWindow
from specjax.models.form import Form

NEW = 24


@pytest.mark.parametrize("name", ["early_exit", *slow("layer_skip")])
def test_a_mesh_and_a_cache_in_8_bits_change_no_token(name):
    shape = dict(num_heads=8, num_kv_heads=8, hidden_size=48, intermediate_size=64, head_dim=8)
    model = random_model(tiny_config(**shape), 0, dtype="float32")
    model = dataclasses.replace(model, kv_cache_dtype="int8")
    request = dict(sampling=greedy(max_new_tokens=12), num_speculative_tokens=3)
    plain = decode(model, PROMPTS[:4], **request)
    mesh = sharding.make_mesh(2, 2, jax.devices()[:4])
    split = place_model(model, mesh)
    options = {"skip_layers": 1} if name == "layer_skip" else {"exit_layer": "auto"}
    loaded = specjax.make_drafter(name, split, **options)
    assert loaded == specjax.make_drafter(name, model, **options)
    got = decode(split, PROMPTS[:4], drafter=loaded, **request)
    assert got.token_ids == plain.token_ids


FORMS = {
    "stacked": (Form(), {}),
    "apart": (Form("apart"), {}),
    "unrolled": (Form("unrolled", "blocks"), {}),
    "experts": (Form(), dict(experts=Experts(4, 2, 8, num_dense=2))),
    "window": (Form(), dict(sliding_window=SlidingWindow(4, (True, False)))),
}


def model_of(name, **more):
    form, changes = FORMS[name]
    config = tiny_config(num_layers=5, **changes, **more)
    return random_model(config, 0, dtype="float32", form=form)


def without_effect(model, layers):
    """The model, whose layers of these numbers add nothing to the states."""

    def changed(kernel):
        return kernel.at[jnp.asarray(layers)].set(0.0)

    params = jax.tree.map(lambda leaf: leaf, model.params)
    for part, name in (("attention", "output"), ("mlp", "down")):
        entry = params["layers"][part][name]
        entry["kernel"] = changed(entry["kernel"])
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize("name", ["stacked", "unrolled", *slow("apart", "experts", "window")])
def test_acceptance_is_that_of_the_first_token_of_drafts(name):
    """After each prefix of the text, by a pass over one token and a cache of the others."""
    model = model_of(name, max_positions=20)
    tokens = layer_choice._Reader(model)._tokens
    count = tokens.shape[1]
    assert count == 20
    rows = jnp.repeat(tokens, count, axis=0)
    lengths = jnp.arange(count, dtype=jnp.int32)
    cache = fresh(model.architecture, model.params, rows, lengths, 32)

    def choices(skipped=(), num_layers=None):
        decoder = dataclasses.replace(model.architecture, skipped=skipped)
        result = jax.jit(
            lambda: decoder.extend(
                model.params,
                tokens.T,
                lengths[:, None],
                cache,
                decoder.make_window(count, 1),
                0,
                causal(jnp.zeros(1, jnp.int32), 1),
                num_layers=num_layers,
            )
        )()
        for layer in skipped:
            assert not result.window.k[layer].any()
        return np.asarray(result.logits[:, 0].argmax(axis=-1))

    own = choices()
    exits = exit_acceptance(model)
    assert exits == [float((choices(num_layers=exit) == own).mean()) for exit in range(1, 5)]
    for number, left in enumerate(leave_out(model, 3), start=1):
        assert len(left.layers) == number
        assert left.acceptance == float((choices(left.layers) == own).mean())


def test_layers_without_effect_are_found():
    model = without_effect(model_of("stacked"), [1, 3])
    one, two, three = leave_out(model, 3)
    assert two.layers == (1, 3)
    assert set(one.layers) < {1, 3} < set(three.layers)
    assert one.acceptance == two.acceptance == 1.0
    assert three.acceptance < 1.0
    drafter = specjax.make_drafter("layer_skip", model).drafter
    assert drafter.skipped == (1, 3)
    exits = exit_acceptance(without_effect(model_of("stacked"), [3, 4]))
    assert exits[2:] == [1.0, 1.0]
    assert exits[1] < 1.0


def test_of_exits_the_one_that_pays_most_is_chosen(caplog):
    model = without_effect(model_of("stacked"), [2, 3, 4])
    drafter = specjax.make_drafter("early_exit", model, exit_layer="auto").drafter
    assert drafter.exit_layer == 2
    (line,) = caplog.messages
    assert line.startswith("early_exit: exit_layer=2 of 5 is best on a short text; 100% of draft")
    assert "estimated" in line


def test_the_choice_is_that_of_the_theory():
    best = choose([0.9, 0.9, 0.2], [0.5, 0.1, 0.01], 8)
    assert (best.index, best.length) == (1, 8)
    assert best.speedup == pytest.approx(specjax.theory.speedup(0.9, 8, 0.1))
    assert choose([0.1, 0.2], [0.9, 0.9], 8)[:2] == (1, 1)
    assert "plain decoding is faster" in str(choose([0.1], [0.9], 8))


def test_every_subset_is_a_model_of_its_own(tiny):
    """Equal drafters share their programs, and others do not."""
    sets = list(itertools.combinations(range(3), 2))
    drafters = [LayerSkip(3, skipped=some) for some in sets]
    assert len({*drafters, *(LayerSkip(3, skipped=some[::-1]) for some in sets)}) == 3
