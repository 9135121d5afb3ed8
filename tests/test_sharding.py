"""The loop on meshes of fake devices: the same tokens, and no collective that is not needed."""

import collections
import dataclasses
import functools
import math
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    decode,
    draft_model,
    empty_state,
    first_state,
    greedy,
    make_call,
    mixed,
)
from tiny_models import block_drafter, eagle_drafter, eagle_head, medusa_head, with_modules

from specjax.core import loop
from specjax.core.cache import KVCache, Window
from specjax.core.top_tokens import likeliest
from specjax.distributed import sharding
from specjax.drafters import TreeOptions, head_drafter, make_drafter
from specjax.engine import programs
from specjax.engine.engine import Engine
from specjax.engine.generate import decode_requests, generate
from specjax.engine.programs import compile_plan, row_arguments
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.loading.formats import build_parameters, parameter_names
from specjax.loading.formats.families import registry
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.models.config import Attention, Recurrence

EIGHT_HEADS = dict(
    num_heads=8, num_kv_heads=8, head_dim=6, hidden_size=24, intermediate_size=40, vocab_size=72
)
"""Every axis divides by 8."""


def mesh_of(data, model):
    return sharding.make_mesh(data, model, jax.devices()[: data * model])


@pytest.fixture(scope="module")
def eight():
    return random_model(tiny_config(**EIGHT_HEADS), 0, dtype="float32")


@pytest.fixture(scope="module")
def draft():
    shape = {**EIGHT_HEADS, "num_layers": 2}
    return random_model(tiny_config(**shape), 1, dtype="float32")


SETTINGS = {
    "ngram, greedy": (
        "ngram",
        dict(verify="rejection", sampling=greedy(max_new_tokens=14, logprobs=True)),
    ),
    "draft_model, coupled": (
        "draft_model",
        dict(verify="coupled", sampling=mixed(max_new_tokens=14, logprobs=True)),
    ),
    "ngram, auto": (
        "ngram",
        dict(sampling=greedy(max_new_tokens=14), num_speculative_tokens="auto"),
    ),
}


def run_on(target, draft, name, options, batch_size=8):
    drafter = make_drafter(name, target, **({"path": draft} if name == "draft_model" else {}))
    options = {"num_speculative_tokens": 3, **options}
    return decode(target, PROMPTS, drafter=drafter, batch_size=batch_size, **options)


@pytest.fixture(scope="module")
def alone(eight, draft):
    """What one device gives, by the settings' name."""

    @functools.cache
    def run(label):
        name, options = SETTINGS[label]
        return run_on(eight, draft, name, options)

    return run


@pytest.mark.parametrize(
    "label",
    # Lookups on a mesh are in the tests below: generate's, padding's, copied heads'.
    ["draft_model, coupled", *slow("ngram, greedy", "ngram, auto")],
)
@pytest.mark.parametrize(("data", "model"), [(2, 4), *slow((1, 1), (2, 1), (1, 2), (1, 8))])
def test_a_mesh_gives_the_tokens_of_one_device(data, model, label, eight, draft, alone):
    mesh = mesh_of(data, model)
    name, options = SETTINGS[label]
    result = run_on(place_model(eight, mesh), place_model(draft, mesh), name, options)
    assert result.token_ids == alone(label).token_ids
    if options.get("num_speculative_tokens") != "auto":  # lengths then follow the clock
        assert (result.accepted == alone(label).accepted).all()
    assert_near_logprobs(result, alone(label))


def assert_near_logprobs(result, alone):
    for mine, other in zip(result.logprobs, alone.logprobs, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            np.testing.assert_allclose(mine, other, atol=1e-4)


def test_another_seed_gives_other_tokens(eight, draft, alone):
    """The comparison of meshes is not vacuous."""
    name, options = SETTINGS["draft_model, coupled"]
    other = run_on(eight, draft, name, {**options, "seed": 1})
    assert other.token_ids != alone("draft_model, coupled").token_ids


# A random rule beside a vocabulary that is not split is below.
@pytest.mark.parametrize("rule", slow("rejection", "block"))
def test_random_rules_draw_the_same_on_a_mesh(rule, eight, draft):
    options = dict(verify=rule, sampling=mixed(max_new_tokens=10))
    on_mesh = run_on(place_model(eight, mesh_of(2, 2)), draft, "early_exit", options)
    assert on_mesh.token_ids == run_on(eight, draft, "early_exit", options).token_ids


@pytest.fixture(scope="module")
def uneven():
    """A model with fewer key/value heads than devices and a vocabulary that does not divide.

    On one device, and on meshes with `model` devices for each row's weights: the model, and what is
    decoded with it.
    """
    config = tiny_config(**{**EIGHT_HEADS, "num_kv_heads": 2, "vocab_size": 67})
    target = random_model(config, 0, dtype="float32")

    @functools.cache
    def run(model):
        placed = target if model is None else place_model(target, mesh_of(8 // model, model))
        return placed, run_on(placed, None, "ngram", UNEVEN)

    return run


UNEVEN = dict(sampling=mixed(max_new_tokens=12), verify="rejection")


@pytest.mark.parametrize("model", [4, *slow(8)])
def test_key_value_heads_are_copied_where_there_are_more_devices(model, uneven):
    split, ours = uneven(model)
    assert split.architecture.cached_heads == model
    assert ours.token_ids == uneven(None)[1].token_ids
    drafter = make_drafter("ngram", split)
    options = dict(UNEVEN, num_speculative_tokens=3, batch_size=8)
    call = make_call(split, PROMPTS, drafter=drafter, **options)
    state = empty_state(call)
    parts = [shard.data.shape for shard in state.cache.k.addressable_shards]
    assert set(parts) == {(3, model, 1, call.plan.loop.capacity, 6)}


@pytest.mark.slow  # what such a one exchanges is in test_forms
def test_a_draft_model_may_be_whole_on_each_device(eight, draft, alone):
    mesh = mesh_of(2, 4)
    replicated = place_model(draft, mesh, replicated=True)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(replicated.params))
    name, options = SETTINGS["draft_model, coupled"]
    result = run_on(place_model(eight, mesh), replicated, name, options)
    assert result.token_ids == alone("draft_model, coupled").token_ids


def test_generate_takes_a_mesh(eight, alone):
    sampling = greedy(max_new_tokens=14, logprobs=True)
    options = dict(drafter="ngram", num_speculative_tokens=3, batch_size=3, mesh=mesh_of(2, 2))
    result = generate(eight, PROMPTS, sampling=sampling, **options)
    assert result.token_ids == alone("ngram, greedy").token_ids
    assert None not in result.logprobs
    assert_near_logprobs(result, alone("ngram, greedy"))


# An early exit's random rows are compared above.
@pytest.mark.parametrize("name", ["lookahead", *slow("early_exit", "simulated", "lookup")])
def test_the_other_drafters_run_on_a_mesh(name, eight, alone):
    options = {"early_exit": {"exit_layer": 2}, "simulated": {"acceptance": 0.7}}.get(name, {})
    if name == "simulated":
        options = {**options, "continuations": alone("ngram, greedy").token_ids}
    split = place_model(eight, mesh_of(2, 2))
    drafter, sampling = make_drafter(name, split, **options), greedy(max_new_tokens=14)
    result = decode(split, PROMPTS, drafter=drafter, sampling=sampling, num_speculative_tokens=3)
    assert result.token_ids == alone("ngram, greedy").token_ids


@pytest.mark.parametrize(
    ("name", "model"), [("mtp", 2), *slow(("mtp", 8), ("eagle3", 2), ("dspark", 2))]
)
def test_a_heads_cache_is_split_as_the_targets(name, model, eight, alone):
    """Weights of the target's own modules as well; a head that was loaded is whole."""
    target = with_modules(eight, 2) if name == "mtp" else eight
    split = place_model(target, mesh_of(8 // model, model))
    if name == "mtp":
        gate_up = split.mtp.params["modules"]["1"]["layer"]["mlp"]["gate_up"]["kernel"]
        assert gate_up.addressable_shards[0].data.shape == (24, 80 // model)
        drafter = make_drafter("mtp", split)
    elif name == "dspark":
        drafter = block_drafter(split, markov_rank=3, conv_kernel_size=2, conv_group_size=6)
    else:
        drafter = eagle_drafter(split)
    options = dict(sampling=greedy(max_new_tokens=14), num_speculative_tokens=3)
    result = decode(split, PROMPTS, drafter=drafter, **options)
    assert result.token_ids == alone("ngram, greedy").token_ids
    state = empty_state(make_call(split, PROMPTS, drafter=drafter, **options))
    heads_state = state.drafter[0].drafter
    for cache in (heads_state.cache,) if name == "dspark" else heads_state.caches:
        batch, heads = cache.k.addressable_shards[0].data.shape[1:3]
        assert (batch, heads) == (model, 8 // model)


def test_every_drafters_state_says_how_it_is_split(eight):
    """From the first round on, and not only where the compiler finds out by itself."""
    mesh = mesh_of(2, 2)
    split = place_model(with_modules(eight, 2), mesh)
    drafters = (
        eagle_drafter(split),
        block_drafter(split),
        make_drafter("mtp", split),
        head_drafter(medusa_head(split), split),
        draft_model(split),
    )
    for drafter, params in drafters:
        with sharding.use(mesh):
            state = jax.jit(drafter.init, static_argnums=(1, 2))(params, 8, 256)
        for leaf in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache | Window)):
            if isinstance(leaf, KVCache | Window):
                assert leaf.k.addressable_shards[0].data.shape[1:3] == (4, 4)
                assert leaf.v.addressable_shards[0].data.shape[1:3] == (4, 4)
            leaf = getattr(leaf, "length", leaf)
            if not isinstance(leaf, Window):
                assert leaf.addressable_shards[0].data.shape[0] == 4


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("early_exit", dict(kind="static", depth=2, num_nodes=5)),
        *slow(
            ("draft_model", dict(kind="dynamic", topk=3, depth=3, num_nodes=9)),
            ("eagle3", dict(kind="dynamic", topk=3, depth=3, num_nodes=9)),
            ("medusa", dict(kind="static", num_nodes=9)),
        ),
    ],
)
def test_trees_on_a_mesh(name, tree):
    """2 x 3 devices draw and verify what one does."""
    shape = dict(EIGHT_HEADS, num_heads=6, num_kv_heads=3, intermediate_size=42)
    target = random_model(tiny_config(**shape), 0, dtype="float32")
    sampling = [SamplingParams(temperature=t, max_new_tokens=10) for t in (0.0, 0.8, 1.3, 0.8) * 2]
    options = dict(verify="rejection", sampling=sampling)

    def run(target):
        if name in ("eagle3", "medusa"):
            make = eagle_head if name == "eagle3" else medusa_head
            drafter = head_drafter(make(target), target, tree=TreeOptions(**tree))
        else:
            path = dict(path=target) if name == "draft_model" else {}
            drafter = make_drafter(name, target, **path, tree=tree)
        return decode(target, PROMPTS, drafter=drafter, batch_size=8, **options)

    got, alone = run(place_model(target, mesh_of(2, 3))), run(target)
    assert got.token_ids == alone.token_ids
    assert (got.accepted == alone.accepted).all()
    assert got.drafted.max() == tree["num_nodes"]


@pytest.mark.parametrize("batch_size", [3, *slow(1, 5)])
def test_a_batch_that_does_not_divide_is_padded(batch_size, eight, draft, alone):
    name, options = SETTINGS["ngram, greedy"]
    result = run_on(place_model(eight, mesh_of(2, 2)), draft, name, options, batch_size)
    assert result.token_ids == alone("ngram, greedy").token_ids
    # No more rows decode together than were asked for.
    rounds = (result.emitted > 0).sum(axis=1)
    begun = result.first_round[:, None] + np.arange(rounds.max())[None, :]
    together = np.bincount(begun[result.emitted > 0])
    assert together.max() == batch_size


def test_a_vocabulary_that_does_not_divide_stays_whole(uneven):
    split, ours = uneven(4)
    assert split.params["head"]["kernel"].sharding.is_fully_replicated
    assert ours.token_ids == uneven(None)[1].token_ids


@pytest.mark.parametrize("how", ["moved", *slow("loaded there", "mesh")])
def test_a_model_on_another_device_runs_there(how, chatty):
    """What is not there yet follows it: the rows, and a drafter's parameters."""
    device = jax.devices()[1]
    if how == "moved":
        model = dataclasses.replace(chatty, params=jax.device_put(chatty.params, device))
    elif how == "mesh":
        model = place_model(chatty, sharding.make_mesh(devices=[device]))
    else:
        with jax.default_device(device):
            model = dataclasses.replace(chatty, params=jax.tree.map(jnp.array, chatty.params))
    options = dict(sampling=greedy(max_new_tokens=14, stop=("\0",), logprobs=True))
    plain = decode(chatty, PROMPTS[:3], **options)
    stop = plain.texts[1][2:4]
    options = dict(sampling=greedy(max_new_tokens=14, stop=(stop,), logprobs=True))
    options_with_draft = dict(drafter=draft_model(chatty), num_speculative_tokens=1, **options)
    call = make_call(model, PROMPTS[:3], **options_with_draft)
    leaves = jax.tree.leaves((call.plan.params, empty_state(call)))
    assert set().union(*(leaf.devices() for leaf in leaves)) == {device}
    wanted = decode(chatty, PROMPTS[:3], **options)
    assert wanted.finish_reasons[1] == "stop"
    assert decode_requests(*call).token_ids == wanted.token_ids


def collectives(program):
    """The kind and shape of every collective of a compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    # Several of a kind may be one instruction, whose result is a tuple.
    found = re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", program.as_text())
    return sorted(
        (kind, shape) for result, kind in found for shape in re.findall(r"\w+\[[\d,]*\]", result)
    )


@pytest.mark.parametrize("vocab", [60000, 60001])
def test_each_device_looks_for_the_likeliest_tokens_in_its_part(vocab):
    """A few blocks of it are gathered; a vocabulary that does not divide is whole everywhere."""
    values = np.random.default_rng(0).integers(0, 40, (4, 2, vocab)).astype(np.float32)
    values[0, 0, : vocab - 3] = -np.inf
    mesh = mesh_of(2, 3)
    logits = sharding.place(values, ("batch", None, "vocab"), mesh)
    with sharding.use(mesh):
        program = jax.jit(likeliest, static_argnums=1).lower(logits, 5).compile()
    for found, wanted in zip(program(logits), jax.lax.top_k(values, 5), strict=True):
        np.testing.assert_array_equal(found, wanted)
    sizes = [re.search(r"\[(.*)\]", shape)[1].split(",") for _, shape in collectives(program)]
    most = max((math.prod(map(int, size)) for size in sizes), default=0)
    assert most < values.size // 10


def loop_program(call):
    """The loop alone: what an engine's step hands to the host comes after it."""
    arguments = row_arguments(call.plan, [], call.plan.num_rows)
    with sharding.use(call.plan.mesh):
        made = programs.make_empty().lower(call.plan.loop, call.plan.params, *arguments)
        _, state, placed = programs.compile_placed(made, call.plan.mesh)
        run = jax.jit(
            loop.run, static_argnums=0, donate_argnums=2, out_shardings=(placed, *[None] * 2)
        )
        return run.lower(call.plan.loop, call.plan.params, state, jnp.int32(4)).compile()


def round_call(target, draft, name, sampling):
    drafter = make_drafter(name, target, **({"path": draft} if name == "draft_model" else {}))
    options = dict(num_speculative_tokens=1, sampling=sampling, every_width=True)
    call = make_call(target, PROMPTS, drafter=drafter, **options)
    assert call.plan.loop.widths == (1, 2)
    return call


@pytest.mark.usefixtures("every_pass")
def test_the_greedy_round_sums_twice_a_layer_and_gathers_nothing(eight, draft):
    """Tensor parallelism's two sums, one of the embedding, and the argmax of the parts."""
    call = round_call(place_model(eight, mesh_of(1, 4)), draft, "ngram", greedy())
    expected = []
    for width in (1, 2):
        # The loop over layers is one body: two sums a layer, and the embedding's before it.
        expected += [("all-reduce", f"f32[8,{width},24]")] * 3
        expected += [("all-reduce", f"f32[8,{width}]"), ("all-reduce", f"s32[8,{width}]")]
    assert collectives(loop_program(call)) == sorted(expected)


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("filtered", [True, False])
def test_the_sampled_round_gathers_a_slot_or_nothing(filtered, eight, draft):
    """Top-k and top-p need a row's whole distribution, at the slots that are visited."""
    call = round_call(place_model(eight, mesh_of(1, 4)), draft, "ngram", mixed())
    if not filtered:
        flags = dataclasses.replace(call.plan.loop.flags, top_k=False, top_p=False)
        call = call.with_loop(flags=flags)
    found = collectives(loop_program(call))
    gathers = [shape for kind, shape in found if kind == "all-gather"]
    assert set(gathers) == ({"f32[8,1,72]"} if filtered else set())
    wide = [shape for kind, shape in found if kind == "all-reduce" and shape.endswith(",24]")]
    assert sorted(wide) == sorted(f"f32[8,{width},24]" for width in (1, 2) for _ in range(3))
    others = {shape for kind, shape in found if kind == "all-reduce"} - set(wide)
    most = [math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2]))) for shape in others]
    assert max(most, default=0) <= 16
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce"}


@pytest.mark.usefixtures("every_pass")
def test_rows_on_other_devices_exchange_only_whether_they_are_done(eight, draft):
    """Over `data` a number a decision: the width, the blocks of each width, who is finished.

    And what a length controller learns from: which nodes were drafted, and which accepted.
    """
    call = round_call(place_model(eight, mesh_of(2, 1)), draft, "ngram", mixed())
    found = collections.Counter(shape for _, shape in collectives(loop_program(call)))
    assert found.keys() <= {"s32[]", "pred[]", "pred[1,1]", "s32[1,1]"}
    assert (found["pred[1,1]"], found["s32[1,1]"]) == (1, 1)


STATES = dict(value_heads=8, key_width=6, value_width=5)
RECURRENT = {
    "delta": ("qwen3_5_text", Recurrence("delta", key_heads=4, **STATES)),
    "mamba2": ("bamba", Recurrence("mamba2", key_heads=4, conv_bias=True, bias=True, **STATES)),
    "mamba2, few groups": ("bamba", Recurrence("mamba2", key_heads=2, **STATES)),
    "conv": ("lfm2", Recurrence("conv", conv_width=3, value_heads=8, value_width=3)),
    # Four devices cannot share out these heads.
    "delta, uneven": ("qwen3_5_text", Recurrence("delta", key_heads=2, **STATES)),
    "mamba2, uneven": ("bamba", Recurrence("mamba2", **{**STATES, "value_heads": 6})),
}
"""Families with recurrent layers, and the sizes of these."""


@functools.cache
def hybrid(kind):
    """A model in which every other layer is recurrent."""
    family, recurrence = RECURRENT[kind]
    config = tiny_config(
        **EIGHT_HEADS | {"num_layers": 4},
        family=family,
        recurrence=recurrence,
        mixers=("recurrent", "attention"),
        attention=Attention(qk_norm=family != "bamba"),
    )
    return random_model(config, 0, dtype="float32")


@functools.cache
def decoded_by_hybrid(kind, mesh=None):
    target = hybrid(kind) if mesh is None else place_model(hybrid(kind), mesh_of(*mesh))
    options = dict(num_speculative_tokens=3, verify="rejection")
    drafter = make_drafter("ngram", target)
    return decode(
        target, PROMPTS, drafter=drafter, batch_size=8, sampling=SETTINGS_OF_ROWS, **options
    )


SETTINGS_OF_ROWS = mixed(max_new_tokens=10, logprobs=True)


@functools.cache
def logits_of_hybrid(kind, mesh=None):
    target = hybrid(kind) if mesh is None else place_model(hybrid(kind), mesh_of(*mesh))
    tokens = np.random.default_rng(0).integers(72, size=(4, 40)).astype(np.int32)

    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
        causal = jnp.tril(jnp.ones((1, 40, 40), bool))
        return target.architecture.extend(params, tokens, positions, None, None, 0, causal).logits

    with sharding.use(target.mesh):
        return np.asarray(jax.jit(run)(target.params, tokens))


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        # Of the others, logits are compared below.
        ("delta", (2, 2)),
        ("mamba2, few groups", (1, 4)),
        *slow(*((kind, (2, 2)) for kind in RECURRENT if kind != "delta")),
        *slow(*((kind, (1, 4)) for kind in RECURRENT if kind != "mamba2, few groups")),
    ],
)
def test_recurrent_layers_on_a_mesh_give_what_one_device_gives(kind, mesh):
    alone, split = decoded_by_hybrid(kind), decoded_by_hybrid(kind, mesh)
    assert split.token_ids == alone.token_ids
    assert_near_logprobs(split, alone)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        *((kind, (1, 4)) for kind in RECURRENT),
        ("delta", (2, 2)),
        *slow(*((kind, (2, 2)) for kind in RECURRENT if kind != "delta")),
    ],
)
def test_logits_of_recurrent_layers_on_a_mesh(kind, mesh):
    np.testing.assert_allclose(logits_of_hybrid(kind, mesh), logits_of_hybrid(kind), atol=1e-4)


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("kind", ["mamba2, few groups", "conv", *slow("delta", "mamba2")])
def test_a_round_sums_twice_in_a_recurrent_layer_too(kind):
    """As in one with attention; states, windows and weights are read and written where they are."""
    target = place_model(hybrid(kind), mesh_of(1, 4))
    call = round_call(target, None, "ngram", greedy())
    expected = []
    for width in (1, 2):
        # The loop over layers has a branch for either kind of layer.
        expected += [("all-reduce", f"f32[8,{width},24]")] * 5
        expected += [("all-reduce", f"f32[8,{width}]"), ("all-reduce", f"s32[8,{width}]")]
        if kind == "mamba2, few groups":  # The norm of a group is over two devices.
            expected.append(("all-reduce", f"f32[8,{width},1]"))
    assert collectives(loop_program(call)) == sorted(expected)
    reads = [("all-reduce", f"f32[1,{call.plan.loop.chunks[-1]},24]")] * 5
    found = collectives(compile_plan(call.plan).read)
    assert [one for one in found if not one[1].endswith(",1]")] == reads


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_device_has_the_weights_and_states_of_its_heads(kind):
    """A part of each array, but of the queries and keys that are fewer than the devices."""
    target = place_model(hybrid(kind), mesh_of(1, 4))
    recurrence = target.config.recurrence
    parts = 1 if "uneven" in kind else 4
    with sharding.use(target.mesh):
        made = jax.jit(lambda: (target.architecture.make_cache(8, 64).recurrent,))()
        made += jax.jit(lambda: (target.architecture.make_window(8, 3).recurrent,))()
    groups = {"mamba2, few groups": 4}.get(kind, recurrence.key_heads)
    assert made[0].inputs.shape[3] == (4 if kind == "conv" else groups)
    for state in jax.tree.leaves(made):
        assert parts * state.addressable_shards[0].data.nbytes == state.nbytes
    own = target.params["recurrent_layers"]["recurrence"]
    for path, leaf in jax.tree.leaves_with_path(own):
        names = {entry.key for entry in path}
        whole = names & {"query", "key", "query_key"} and kind == "mamba2, few groups"
        whole = whole or {"output", "bias"} <= names or (names >= {"norm"} and "delta" in kind)
        share = leaf.addressable_shards[0].data.nbytes
        assert (1 if whole else parts) * share == leaf.nbytes, path


def test_states_that_are_kept_stay_on_their_devices():
    target = place_model(hybrid("delta"), mesh_of(1, 4))
    prompt = np.random.default_rng(0).integers(72, size=100).tolist()
    pages = dict(kv_page_size=64, num_kv_pages=8, enable_prefix_caching=True)
    engine = Engine(target, batch_size=2, max_length=128, **pages)
    outputs = []
    for _ in range(2):
        engine.add(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.0))
        outputs += [delta.output.token_ids for delta in engine if delta.output is not None]
    assert outputs[0] == outputs[1]
    assert engine.statistics.shared_tokens == 64
    (pool,) = engine._scheduler.pages.pools
    (kept,) = pool._states.values()
    for state in jax.tree.leaves([cache.recurrent for cache in kept]):
        assert 4 * state.addressable_shards[0].data.nbytes == state.nbytes


@pytest.mark.slow  # of a target alone these are the three above
@pytest.mark.usefixtures("every_pass")
def test_no_weight_and_no_cache_travels(eight, draft):
    """With a draft model beside the target: only sums of activations, and gathered logits."""
    target, draft = (place_model(model, mesh_of(2, 4)) for model in (eight, draft))
    call = round_call(target, draft, "draft_model", mixed())
    # Prompts are read one on each device along `data`.
    for program, rows in ((compile_plan(call.plan).read, 1), (loop_program(call), 4)):
        for kind, shape in collectives(program):
            sizes = [int(size) for size in re.findall(r"\d+", shape.partition("[")[2])]
            if kind == "all-gather":
                assert (sizes[0], sizes[-1], len(sizes) <= 3) == (rows, 72, True), shape
            else:
                assert kind == "all-reduce", (kind, shape)
                is_sum = (sizes[:1], sizes[-1:], len(sizes)) == ([rows], [24], 3)
                assert is_sum or math.prod(sizes) <= 2 * rows, shape


@pytest.mark.usefixtures("every_pass")
def test_the_state_is_updated_in_place_on_a_mesh(eight, draft):
    target = place_model(eight, mesh_of(2, 4))
    call = make_call(target, PROMPTS, sampling=greedy(), num_speculative_tokens=0)
    program = compile_plan(call.plan).step
    cache = empty_state(call).cache.k.addressable_shards[0].data
    assert program.memory_analysis().alias_size_in_bytes >= 2 * cache.nbytes
    copies = re.findall(r"= \w+\[([\d,]*)\][^=\n]*? copy(?:-start)?\(", program.as_text())
    assert ",".join(map(str, cache.shape)) not in copies


def test_the_loop_exports_for_every_platform_on_a_mesh(eight, draft):
    target = place_model(eight, mesh_of(2, 4))
    call = make_call(target, PROMPTS, sampling=mixed()[:1] * 8, num_speculative_tokens=0)

    def shape(leaf):
        placed = None if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    params, state = jax.tree.map(shape, (call.plan.params, first_state(call)))
    program = jax.jit(functools.partial(loop.run, call.plan.loop))
    with sharding.use(target.mesh):
        exported = jax.export.export(program, platforms=("cpu", "cuda", "tpu"))(
            params, state, jax.ShapeDtypeStruct((), jnp.int32)
        )
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert exported.nr_devices == 8


@pytest.mark.parametrize("model", [2, 4])
def test_tensors_go_straight_into_their_parts(model, eight, tmp_path):
    save_model(eight, tmp_path / "model")
    mesh = mesh_of(2, model)
    loaded = load_model(tmp_path / "model", dtype="float32", mesh=mesh)
    wanted = build_parameters.parameter_shardings(eight.config, mesh, model)
    for path, leaf in jax.tree.leaves_with_path(loaded.params):
        keys = tuple(entry.key for entry in path)
        assert leaf.sharding == parameter_names.lookup(wanted, keys)
        np.testing.assert_array_equal(leaf, parameter_names.lookup(eight.params, keys))
    qkv = loaded.params["layers"]["attention"]["qkv"]["kernel"]
    assert qkv.addressable_shards[0].data.shape == (3, 24, 3 * 8 // model * 6)


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_the_host_never_holds_the_model_and_reads_each_number_once(mesh, eight, monkeypatch):
    """Wherever the device is not the host: a layer's leaf is gone when the next but one is read."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    alive, most, count = [], [], collections.Counter()

    def read(location, rows, inputs):
        numbers = np.full(location.rows, 1, np.float32)[(rows, inputs)[: len(location.rows)]]
        count[location] += numbers.size
        alive.append(weakref.ref(numbers))
        most.append(sum(part() is not None for part in alive))
        return numbers

    put = build_parameters._put

    def copied(slot, target, rows):
        """On other devices; the CPU adopts it."""
        alive.extend(map(weakref.ref, rows.values()))
        return put(slot, target, {part: own + 0 for part, own in rows.items()})

    monkeypatch.setattr(build_parameters, "_put", copied)
    config = eight.config
    locations = list(parameter_names.locations(registry.tensors(config), config))
    shape = mesh and mesh_of(*mesh)
    params = build_parameters.build(
        config, None, np.dtype("float32"), locations, read, shape, 2 if mesh else 1
    )
    assert max(most) <= 8 < len(locations)
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(params))
    assert all(count[location] == math.prod(location.rows) for location in locations)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sharding.make_mesh(3, 2), r"mesh.data=3, mesh.model=2: 6 devices .* 8 available"),
        (lambda: sharding.make_mesh(0, 8), "mesh.data=0: use a whole number from 1 to"),
        (
            lambda: random_model(tiny_config(), 0, mesh=mesh_of(1, 8)),
            "mesh.model=8: 4 heads, 2 key/value heads and an MLP of 40 .* use 1 or 2 or 4",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call()
