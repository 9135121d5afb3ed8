"""Joined kernels: whose their outputs are, how they are split, and how often multiplied."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import PROMPTS, greedy, loop_arguments, make_call
from test_decoder import causal, one_pass
from tiny_models import eagle_drafter, eagle_head, mtp_head

from specjax.core import loop
from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.loading import checkpoints
from specjax.loading.load import load_model, place_model, random_model
from specjax.loading.model import array_table
from specjax.loading.storage import orbax_checkpoint
from specjax.methods.saved_heads import read_head, save_head
from specjax.models.config import Attention, Experts
from specjax.models.form import Form
from specjax.models.joined_kernels import in_parts, parts, with_joined
from specjax.models.layers.matmul import product
from specjax.models.parameters import Parameter

EVERY_PART = tiny_config(
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    hidden_size=24,
    intermediate_size=40,
    attention_bias=True,
    attention=Attention(qk_norm=True),
    experts=Experts(4, 2, 12, shared_size=24, num_dense=1),
    family="glm4_moe",
)


def test_every_output_belongs_to_one_part():
    table = array_table(EVERY_PART, None, scan_layers=True)
    covered = collections.defaultdict(set)
    for part in parts(table, EVERY_PART).values():
        shape = (
            part.path and functools.reduce(lambda node, name: node[name], part.path, table).shape
        )
        own = part.section.of(np.arange(shape[-1])).ravel().tolist()
        assert covered[part.path].isdisjoint(own)
        assert len(own) == part.shape[-1]
        covered[part.path].update(own)
    leaves = jax.tree_util.tree_leaves_with_path(
        table, is_leaf=lambda node: isinstance(node, Parameter)
    )
    assert len(covered) == len(leaves)
    for path, entry in leaves:
        assert len(covered[tuple(step.key for step in path)]) == entry.shape[-1]


def test_parts_are_joined_again():
    model = random_model(EVERY_PART, 0, dtype="float32")
    found = in_parts(model.params, EVERY_PART)
    assert found["layers"]["attention"]["key"]["kernel"].shape == (2, 24, 24)
    assert_same(with_joined(found, model.params, EVERY_PART), model.params)


@pytest.mark.parametrize("devices", [2, 4])
def test_each_device_holds_whole_heads_and_the_gates_of_its_part_of_up(devices):
    model = random_model(EVERY_PART, 0, dtype="float32")
    placed = place_model(model, sharding.make_mesh(1, devices, jax.devices()[:devices]))
    table = array_table(EVERY_PART, None, scan_layers=True)
    of_device = {}
    for path, part in parts(table, EVERY_PART).items():
        if path[-2] not in ("query", "key", "value", "gate", "up") or "experts" in path:
            continue
        group = part.section.width if "attention" in path else 1
        leaf = functools.reduce(lambda node, name: node[name], part.path, placed.params)
        count = leaf.shape[-1]
        own = part.section.of(np.arange(count)).ravel()
        for number, shard in enumerate(leaf.addressable_shards):
            columns = np.arange(count)[shard.index[-1]]
            held = np.flatnonzero(np.isin(own, columns))
            assert held.tolist() == list(range(held[0], held[0] + len(own) // devices))
            assert len(held) % group == 0
            of_device.setdefault((number, path[:-2]), []).append(held[0] * devices // len(own))
    # All parts of a device are those of the same heads, or of the same part of the MLP's width.
    assert len(of_device) > 2
    assert all(len(set(firsts)) == 1 for firsts in of_device.values())


@pytest.mark.parametrize("devices", [2, 4, *slow(8)])
def test_a_mesh_gives_the_numbers_of_one_device(devices):
    """Eight devices are more than key/value heads: their parts of the kernel are no whole heads."""
    model = random_model(EVERY_PART, 0, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 60, (1, 7))
    logits = one_pass(model, tokens).logits
    placed = place_model(model, sharding.make_mesh(1, devices, jax.devices()[:devices]))
    with sharding.use(placed.mesh):
        split = one_pass(placed, tokens).logits
    np.testing.assert_allclose(split, logits, atol=1e-5)


def as_before(params, config):
    """A tree as earlier versions saved it: a leaf for each part, and axes for heads."""

    def with_heads(path, leaf):
        names = [step.key for step in path]
        if names[-2] in ("query", "key", "value"):
            return leaf.reshape(*leaf.shape[:-1], -1, config.head_dim)
        if names[-3:] == ["attention", "output", "kernel"]:
            return leaf.reshape(*leaf.shape[:-2], -1, config.head_dim, leaf.shape[-1])
        return leaf

    return jax.tree_util.tree_map_with_path(with_heads, in_parts(params, config))


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("form", [Form(), Form("unrolled")])
def test_a_checkpoint_in_parts_is_joined(form, tmp_path, monkeypatch):
    model = random_model(EVERY_PART, 0, dtype="float32", form=form)
    save = orbax_checkpoint.save
    monkeypatch.setattr(
        orbax_checkpoint,
        "save",
        lambda path, params, *rest: save(path, as_before(params, EVERY_PART), *rest),
    )
    checkpoints.save_checkpoint(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype="float32", form=form)
    assert_same(loaded.params, model.params)
    rounded = load_model(tmp_path / "model", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded.params["head"])} == {
        np.dtype(jnp.bfloat16)
    }
    with pytest.raises(InputError, match="load it without a mesh, and save it again"):
        load_model(tmp_path / "model", mesh=sharding.make_mesh(1, 2, jax.devices()[:2]))


@pytest.mark.parametrize("make", [eagle_head, mtp_head])
def test_a_head_in_parts_is_joined(make, tiny, tmp_path, monkeypatch):
    head = make(tiny)
    older = dataclasses.replace(head)
    object.__setattr__(older, "params", as_before(head.params, head.config.decoder))
    save_head(older, tmp_path / "head")
    assert_same(read_head(tmp_path / "head").params, head.params)
    older.params["unknown"] = np.zeros(3, np.float32)
    save_head(older, tmp_path / "less")
    with pytest.raises(InputError, match="the parameters do not fit the config"):
        read_head(tmp_path / "less")


UNLIKE = dict(hidden_size=26, intermediate_size=42, head_dim=10, vocab_size=67)
"""No two kernels have outputs of one size: 80, 26 and 84; the heads' are as many."""


def products_by_outputs(text, rows):
    """How many products of that many rows a compiled program has, by their number of outputs."""
    found = re.findall(rf"= f32\[{rows},(\d+)\]\S* (?:dot|custom-call)\(", text)
    return collections.Counter(map(int, found))


def moved(text):
    """The shapes, in order of size, of what a compiled program copies or transposes."""
    found = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(", text)
    return {tuple(sorted(map(int, shape.split(",")))) for shape in found}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("layers", ["stacked", "apart", "unrolled"])
def test_a_layer_multiplies_four_times(layers):
    """Once by queries, keys and values, by gate and up, and by each of the other kernels."""
    config = tiny_config(**UNLIKE)
    model = random_model(config, 0, dtype="float32", form=Form(layers))
    decoder, tokens = model.architecture, jnp.zeros((1, 1), jnp.int32)

    def run(params, cache, window):
        return decoder.extend(params, tokens, tokens, cache, window, 0, causal(1)).logits

    cache, window = decoder.make_cache(1, 128), decoder.make_window(1, 1)
    text = jax.jit(run).lower(model.params, cache, window).compile().as_text()
    times = 1 if layers == "stacked" else config.num_layers
    assert products_by_outputs(text, 1) == {80: times, 26: 2 * times, 84: times, 67: 1}


@pytest.mark.parametrize("tokens", [1, 3])
def test_outputs_are_split_after_a_barrier(tokens):
    """On TPUs the layout of the parts would otherwise be that of the kernel, through the product.

    `scripts/inspect_compiled_round.py --platform=tpu` finds the copies of kernels without it.
    """
    config = tiny_config(**UNLIKE)
    model = random_model(config, 0, dtype="float32", form=Form("unrolled"))
    decoder, ids = model.architecture, jnp.zeros((1, tokens), jnp.int32)

    def run(params, cache, window):
        return decoder.extend(params, ids, ids, cache, window, 0, causal(tokens)).logits

    cache, window = decoder.make_cache(1, 128), decoder.make_window(1, tokens)
    text = jax.jit(run).lower(model.params, cache, window).as_text()
    name = r'@("[^"]*"|\S+?)'
    functions = {
        re.match(rf"(?:public|private) {name}\(", body)[1]: body
        for body in text.split("func.func ")[1:]
    }

    def barriers(function):
        """Those that a call of a function runs: layers of one structure share a function."""
        body = functions[function]
        found = re.findall(rf"optimization_barrier %\S+ : tensor<1x{tokens}x(\d+)xf32>", body)
        called = re.findall(rf"[^_]call {name}\(", body)
        return sum(map(barriers, called), collections.Counter(map(int, found)))

    assert barriers("main") == dict.fromkeys((80, 84), config.num_layers)


@pytest.mark.parametrize(("rows", "sums"), [(1, "f32"), (2, "bf16")])
def test_a_single_row_is_summed_in_float32(rows, sums):
    """XLA multiplies it by itself, on a TPU with sums in the type of the product's result."""
    x, kernel = jnp.ones((1, rows, 64), jnp.bfloat16), jnp.ones((64, 48), jnp.bfloat16)
    program = jax.jit(functools.partial(product, "btd,df->btf"))
    assert program(x, kernel).dtype == jnp.bfloat16
    assert f"-> tensor<1x{rows}x48x{sums}>" in program.lower(x, kernel).as_text()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("layers", ["stacked", *slow("unrolled")])
def test_a_round_of_eagle_moves_no_kernel(layers):
    """Its head multiplies as the target does, and neither transposes or copies a kernel."""
    target = random_model(tiny_config(**UNLIKE), 0, dtype="float32", form=Form(layers))
    call = make_call(
        target,
        PROMPTS[:1],
        drafter=eagle_drafter(target),
        sampling=greedy(max_new_tokens=4),
        num_speculative_tokens=2,
    )
    params, state, count = loop_arguments(call)
    run = jax.jit(loop.run, static_argnums=0, donate_argnums=2)
    text = run.lower(call.plan.loop, params, state, count).compile().as_text()
    kernels = {
        tuple(sorted(leaf.shape[-2:]))
        for path, leaf in jax.tree.leaves_with_path(call.plan.params)
        if path[-1].key == "kernel"
    }
    assert {(26, 80), (52, 80)} <= kernels
    for shape in moved(text):
        assert tuple(size for size in shape if size != 1) not in kernels, shape
