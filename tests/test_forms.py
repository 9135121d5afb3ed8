"""The forms a decoder takes for different backends: the same function, up to rounding."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import PROMPTS, decode, draft_model, greedy, loop_arguments, make_call
from test_decoder import causal, extend
from tiny_models import eagle_drafter, medusa_head

from specjax.core import cached_entries, loop
from specjax.core.cache import KVCache, Window
from specjax.core.cached_entries import encode
from specjax.distributed import sharding
from specjax.drafters import head_drafter, make_drafter
from specjax.engine.programs import compile_plan
from specjax.errors import InputError
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.models.config import Attention, Experts, SlidingWindow
from specjax.models.form import Form
from specjax.models.kernels import tpu_attention
from specjax.models.kernels.attention_kernel import attend_window_and_cache
from specjax.models.layers.attention import (
    attend,
    attend_cache,
    attend_rows,
    cached_blocks,
    merge,
)
from specjax.models.layers.matmul import ChosenKernel, product

FORMS = {
    "apart": Form("apart"),
    "unrolled": Form("unrolled"),
    "blocks": Form(cache_attention="blocks"),
    "apart, blocks": Form("apart", cache_attention="blocks"),
    "kernel": Form("unrolled", "kernel"),
    "stacked, kernel": Form("stacked", "kernel"),
    "tpu_kernel": Form("stacked", "tpu_kernel"),
}
KERNEL_WIDTH = 16
"""Of heads that the GPU kernel supports; those of `tiny` are narrower."""


@pytest.fixture(scope="module")
def biased():
    """Every kind of parameter: biases, an untied head, grouped heads."""
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=KERNEL_WIDTH)
    return tiny_config(**sizes, attention_bias=True, mlp_bias=True)


def extended(model, tokens, lengths, capacity=512):
    """Logits and features of some tokens after a cache of random keys."""
    decoder = model.architecture
    rng = np.random.default_rng(0)
    batch = len(lengths)
    cache = decoder.make_cache(batch, capacity)
    filled = [jnp.asarray(rng.standard_normal(cache.k.shape), jnp.float32) for _ in range(2)]
    cache = cache.replace(k=filled[0], v=filled[1], length=jnp.asarray(lengths))
    ids = jnp.asarray(rng.integers(0, model.config.vocab_size, (batch, tokens)), jnp.int32)
    positions = cache.length[:, None] + jnp.arange(tokens)[None, :]
    return extend(
        decoder,
        model.params,
        ids,
        positions,
        cache,
        decoder.make_window(batch, tokens),
        0,
        causal(tokens),
        features=("final_norm", "layer_input:1"),
        num_layers=2,
    )


LARGE = dict(hidden_size=512, intermediate_size=1536)
"""Sizes whose kernels do not fit in a core's own cache."""


@pytest.mark.parametrize(
    ("platform", "sizes", "num_devices", "form"),
    [
        ("cpu", LARGE, 1, Form("apart", "rows")),
        ("cpu", LARGE, 2, Form("stacked", "rows")),
        ("cpu", {}, 1, Form("stacked", "rows")),
        ("cpu", {**LARGE, "experts": Experts(4, 2, 1536)}, 1, Form("stacked", "rows")),
        ("tpu", LARGE, 1, Form("stacked", "tpu_kernel")),
        ("cuda", LARGE, 1, Form("unrolled", "kernel")),
        ("cuda", {}, 4, Form("unrolled", "kernel")),
    ],
)
def test_the_form_of_a_model_follows_from_platform_size_and_devices(
    platform, sizes, num_devices, form
):
    assert Form.of(platform, tiny_config(**sizes), num_devices) == form


def test_a_large_model_is_loaded_and_placed_in_its_form(tmp_path):
    config = tiny_config(**LARGE)
    model = random_model(config, 0, dtype="float32")
    assert model.form == Form("apart")
    placed = place_model(model, sharding.make_mesh(1, 2, jax.devices()[:2]))
    assert placed.form == Form("stacked")
    for layer, apart in model.params["layers"].items():
        stacked = jax.tree.map(lambda leaf: leaf[int(layer)], placed.params["layers"])  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, stacked, apart)
    save_model(model, tmp_path / "model")
    save_checkpoint(model, tmp_path / "checkpoint")
    mesh = sharding.make_mesh(1, 2, jax.devices()[:2])
    for folder in ("model", "checkpoint"):
        loaded = load_model(tmp_path / folder, dtype="float32")
        assert loaded.form == Form("apart")
        assert set(loaded.params["layers"]) == {"0", "1", "2"}
        split = load_model(tmp_path / folder, dtype="float32", mesh=mesh)
        assert split.form == Form("stacked")


def kernel_sized(layers):
    """The instructions of a pass over five tokens that write an array of a kernel's size."""
    config = tiny_config(hidden_size=64, intermediate_size=320)
    model = random_model(config, 0, dtype="float32", form=Form(layers))
    decoder = model.architecture
    cache, window = decoder.make_cache(1, 128), decoder.make_window(1, 5)
    tokens = jnp.zeros((1, 5), jnp.int32)

    def run(params, cache, window):
        return decoder.extend(params, tokens, tokens, cache, window, 0, causal(5)).logits

    text = jax.jit(run).lower(model.params, cache, window).compile().as_text()
    made = re.findall(r"= f32\[(?:1,)?(?:64,320|320,64)\]\S* ([\w-]+)\(", text)
    return set(made) - {"parameter", "get-tuple-element", "bitcast"}


def test_layers_apart_copy_no_kernel():
    assert kernel_sized("stacked")
    assert not kernel_sized("apart")


OTHERS = (("bfloat16", None), ("float16", None), ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("rows", "dtype", "multiply"),
    [
        # Float32 is stored in another way for 2 to 7 rows, of which two are made three.
        *((rows, "float32", None) for rows in (1, 2, 5, 7, 8)),
        *slow(*((rows, "float32", None) for rows in (3, 4, 6))),
        *((rows, *other) for other in OTHERS for rows in (1, 5)),
        *slow(*((rows, *other) for other in OTHERS for rows in (2, 3, 4, 6, 7, 8))),
    ],
)
def test_products_with_a_chosen_kernel_are_those_with_the_kernel(rows, dtype, multiply):
    """However few rows there are, which are stored in another way, and their gradients too."""
    rng = np.random.default_rng(rows)

    def normal(*shape, dtype=multiply or dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x = normal(rows, 1, 16, dtype=dtype)
    kernels = tuple(normal(16, 24) for _ in range(3))
    times = functools.partial(product, multiply=multiply)

    @jax.jit
    def chosen(x, kernels, index):
        kernel = ChosenKernel(kernels, index)
        return [times("btd,df->btf", x, kernel, out=out) for out in (jnp.float32, None)]

    def alone(x, kernels, index):
        return [times("btd,df->btf", x, kernels[index], out=out) for out in (jnp.float32, None)]

    def total(function):
        return lambda x, kernels: sum(
            (y.astype(jnp.float32) ** 2).sum() for y in function(x, kernels, 2)
        )

    tolerance = 1e-5 if (multiply or dtype) == "float32" else 0.05
    same = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    for index in range(3):
        pairs = zip(chosen(x, kernels, index), alone(x, kernels, index), strict=True)
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            same(ours.astype(jnp.float32), theirs.astype(jnp.float32))
    if (multiply or dtype) == "float32" and rows in (2, 5):
        slopes = [jax.grad(total(each), argnums=(0, 1))(x, kernels) for each in (chosen, alone)]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *slopes)


def test_layers_apart_have_the_same_gradients():
    config = tiny_config()
    forms = [
        random_model(config, 0, dtype="float32", form=Form(name)) for name in ("stacked", "apart")
    ]

    def loss(params, decoder):
        tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
        positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
        out = decoder.extend(params, tokens, positions, None, None, 0, causal(6))
        return (out.logits**2).mean()

    slopes = jax.jit(jax.grad(loss), static_argnums=1)
    stacked, apart = (slopes(model.params, model.architecture) for model in forms)
    for layer in range(config.num_layers):
        wanted = jax.tree.map(lambda leaf: leaf[layer], stacked["layers"])  # noqa: B023
        close = functools.partial(np.testing.assert_allclose, atol=1e-5)
        jax.tree.map(close, apart["layers"][str(layer)], wanted)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tokens", [5, *slow(1)])
def test_every_form_is_the_same_function(name, tokens, biased):
    lengths = [0, 1, 300, 512]
    reference = extended(random_model(biased, 3, dtype="float32"), tokens, lengths)
    model = random_model(biased, 3, dtype="float32", form=FORMS[name])
    ours = extended(model, tokens, lengths)
    np.testing.assert_allclose(ours.logits, reference.logits, atol=2e-5)
    for feature, value in reference.features.items():
        np.testing.assert_allclose(ours.features[feature], value, atol=2e-5)
    np.testing.assert_allclose(ours.window.k, reference.window.k, atol=2e-5)


def products_of(function, *arguments, platform="cpu"):
    """The precisions of a function's products, lowered as JAX is by default."""
    with jax.default_matmul_precision("default"):
        traced = jax.jit(function).trace(*arguments)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"stablehlo.dot_general .*precision = \[(\w+), (\w+)\]", program)


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        *((name, "cpu") for name in ("stacked", *FORMS)),
        # A kernel for GPUs is not lowered for a TPU.
        *((name, "tpu") for name in ("stacked", *FORMS) if "kernel" not in name),
        ("tpu_kernel", "tpu"),
    ],
)
def test_no_product_of_float32_is_rounded(name, platform, biased):
    """Accelerators multiply float32 in fewer bits where a program does not forbid it."""
    model = random_model(biased, 0, dtype="float32", form=FORMS.get(name, Form()))
    decoder, tokens = model.architecture, jnp.zeros((2, 3), jnp.int32)
    after_a_cache = decoder.make_cache(2, 512), decoder.make_window(2, 3)
    for cache, window in (after_a_cache, (None, None)):

        def run(params, cache=cache, window=window):
            return decoder.extend(params, tokens, tokens, cache, window, 0, causal(3)).logits

        found = products_of(run, model.params, platform=platform)
        assert len(found) > 3
        assert set(found) == {("HIGHEST", "HIGHEST")}


def test_products_that_are_rounded_in_training_all_are(biased):
    model = random_model(biased, 0, dtype="float32")
    decoder = dataclasses.replace(model.architecture, multiply=jnp.dtype(jnp.bfloat16))
    tokens = jnp.zeros((2, 3), jnp.int32)

    def run(params):
        options = {"features": ("final_norm",), "logits": False}
        return decoder.extend(params, tokens, tokens, None, None, 0, causal(3), **options).features

    found = products_of(run, model.params)
    assert len(found) > 3
    assert set(found) == {("DEFAULT", "DEFAULT")}


def a_round(target, drafter):
    """The function of a round, and its arguments."""
    call = make_call(target, PROMPTS, drafter=drafter, sampling=greedy(max_new_tokens=4))
    return functools.partial(loop.run, call.plan.loop), *loop_arguments(call)


@pytest.mark.parametrize("make", [draft_model, eagle_drafter])
def test_no_product_of_a_round_is_rounded(make, tiny):
    """Neither the drafter's own, nor those of its caches."""
    found = products_of(*a_round(tiny, make(tiny)))
    assert len(found) > 10
    assert set(found) == {("HIGHEST", "HIGHEST")}


def dtypes_of_products(function, *arguments):
    """The dtypes of the operands and the result of a function's products."""
    program = jax.jit(function).lower(*arguments).as_text()
    dtype = r"tensor<(?:\d+x)*(\w+)>"
    return set(re.findall(rf"dot_general .*: \({dtype}, {dtype}\) -> {dtype}", program))


DRAFTERS = {
    "draft_model": draft_model,
    "eagle3": eagle_drafter,
    "medusa": lambda target: head_drafter(medusa_head(target), target),
}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *(("draft_model", "apart"), ("eagle3", "stacked")),
        *slow(("draft_model", "stacked"), ("eagle3", "apart"), ("medusa", "unrolled")),
    ],
)
def test_products_in_bfloat16_on_a_cpu_are_those_of_its_hardware(name, layers, tiny):
    """The target's and its heads': a result in bfloat16 would be that of a converted kernel."""
    config = dataclasses.replace(tiny.config, num_layers=2)
    target = random_model(config, 0, dtype="bfloat16", form=Form(layers))
    weights, attention = ("bf16", "bf16", "f32"), ("f32", "f32", "f32")
    run, params, *arguments = a_round(target, DRAFTERS[name](target))
    assert dtypes_of_products(run, params, *arguments) == {weights, attention}

    decoder = dataclasses.replace(target.architecture, dtype=jnp.dtype(jnp.bfloat16), multiply=None)
    cache, window = decoder.make_cache(2, 64), decoder.make_window(2, 3)
    tokens = jnp.zeros((2, 3), jnp.int32)
    found = dtypes_of_products(
        lambda params: decoder.extend(params, tokens, tokens, cache, window, 0, causal(3)).window.k,
        target.params,
    )
    assert ("bf16", "bf16", "bf16") in found


@pytest.mark.parametrize(
    ("queries", "dtype", "slots", "limits"),
    [
        (150, "int8", 3, {}),
        *slow((150, "float32", 3, {})),
        *slow(*((count, dtype, 3, {}) for count in (3, 40) for dtype in ("float32", "int8"))),
        (40, "float32", 70, {}),
        (40, "float32", 16, {"softcap": 2.0}),
        (70, "int8", 5, {"softcap": 2.0, "recent": 90}),
        (3, "float32", 3, {"width": 128}),
        (3, "int8", 5, {"recent": 20, "sinks": 140}),
        *slow((70, "float32", 5, {"recent": 90, "sinks": 3})),
    ],
)
def test_all_ways_agree_with_the_loop_over_blocks(queries, dtype, slots, limits):
    """With rows of every filling, and more queries than one program holds."""
    rng = np.random.default_rng(1)
    limits = dict(limits)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    layers, batch, heads, capacity, width = 2, 4, 2, 512, limits.pop("width", KERNEL_WIDTH)
    size = (layers, batch, heads, capacity, width)
    keys, values = (encode(normal(*size), jnp.dtype(dtype)) for _ in range(2))
    cache = KVCache(keys, values, jnp.array([0, 1, 300, 512]))
    query = normal(batch, heads, queries, width)
    window = Window(*(normal(layers, batch, heads, slots, width) for _ in range(2)))
    seen = rng.random((batch, 1, queries, slots)) < 0.5
    seen[:, :, :, 0] = True
    seen = jnp.asarray(seen)
    if recent := limits.pop("recent", None):
        ages = rng.integers(0, recent, (batch, queries))
        limits["oldest"] = cache.length[:, None] - jnp.asarray(ages)
    softcap = limits.get("softcap")
    start = attend(query, window.k[1], window.v[1], seen, softcap)

    @jax.jit
    def all_ways(cache):
        ways = [
            attend_cache(query, cache, 1, start, cached_blocks(cache), **limits),
            attend_rows(query, cache, 1, start, **limits),
            attend_window_and_cache(query, cache, window, 1, seen, **limits),
        ]
        ways.append(tpu_attention.attend_committed(query, cache, 1, start, **limits))
        return [way.weighted / way.denominator for way in ways]

    blocks, *others = all_ways(cache)
    for other in others:
        np.testing.assert_allclose(other, blocks, atol=1e-5)
    positions = np.arange(capacity)[None, None, :]
    committed = np.broadcast_to(positions < cache.length[:, None, None], (batch, queries, capacity))
    if "oldest" in limits:
        recent = positions >= limits["oldest"][:, :, None]
        committed = committed & (recent | (positions < limits.get("sinks", 0)))
    entries = (cached_entries.decode(array, query.dtype)[1] for array in (cache.k, cache.v))
    whole = merge(start, attend(query, *entries, jnp.asarray(committed)[:, None], softcap))
    np.testing.assert_allclose(whole.weighted / whole.denominator, blocks, atol=1e-5)

    # Rows in another order, among more: what is read into the slots of an engine.
    rows = jnp.array([4, 0, 3, 1])
    order = jnp.zeros(5, jnp.int32).at[rows].set(jnp.arange(batch))
    larger = cache.take(order)
    for other in all_ways(larger.lend(rows, cache.length)):
        np.testing.assert_allclose(other, blocks, atol=1e-5)


def with_ngram(target, new_tokens):
    """The tokens of greedy rows that n-grams draft for."""
    options = dict(sampling=greedy(max_new_tokens=new_tokens), num_speculative_tokens=3)
    return decode(target, PROMPTS, drafter=make_drafter("ngram", target), **options).token_ids


@functools.cache
def plain_tokens(config):
    target = random_model(config, 0, dtype="float32")
    return decode(target, PROMPTS, sampling=greedy(max_new_tokens=12)).token_ids


@functools.cache
def usual_form_with_ngram(config):
    return with_ngram(random_model(config, 0, dtype="float32", form=Form()), 8)


@pytest.mark.parametrize(
    ("name", "data", "model"),
    [
        ("kernel", 2, 2),
        ("tpu_kernel", 2, 2),
        ("apart", 1, 1),
        *slow(("apart", 2, 2)),
        *slow(("unrolled", 1, 1), ("apart, blocks", 1, 1), ("kernel", 1, 1)),
        *slow(("unrolled", 2, 2), ("apart, blocks", 2, 2), ("tpu_kernel", 1, 1)),
        *slow(("stacked, kernel", 1, 1), ("stacked, kernel", 2, 2)),
    ],
)
def test_every_form_decodes_the_same_tokens(name, data, model):
    config = tiny_config(head_dim=KERNEL_WIDTH)
    target = random_model(config, 0, dtype="float32", form=FORMS[name])
    if data * model > 1:
        target = place_model(target, sharding.make_mesh(data, model, jax.devices()[: data * model]))
    assert with_ngram(target, 12) == plain_tokens(config)


@pytest.mark.parametrize("name", ["kernel", "tpu_kernel", *slow("stacked, kernel")])
def test_every_form_has_the_same_sliding_windows_and_soft_caps(name):
    """In layers that alternate, over a prompt longer than the window and read in chunks."""
    sliding = SlidingWindow(6, pattern=(True, False))
    attention = Attention(softcap=3.0)
    config = tiny_config(head_dim=KERNEL_WIDTH, sliding_window=sliding, attention=attention)
    target = random_model(config, 0, dtype="float32", form=FORMS[name])
    assert with_ngram(target, 8) == usual_form_with_ngram(config)


@pytest.mark.usefixtures("every_pass")
def test_a_draft_model_whole_on_each_device_sends_nothing(tiny):
    """Whatever its form: the kernel's heads are split only where the model's are."""
    mesh = sharding.make_mesh(1, 2, jax.devices()[:2])
    target = place_model(random_model(tiny.config, 0, dtype="float32"), mesh)
    config = dataclasses.replace(tiny.config, num_layers=1, head_dim=KERNEL_WIDTH)
    small = random_model(config, 1, dtype="float32", form=FORMS["kernel"])
    drafter = make_drafter("draft_model", target, place_model(small, mesh, replicated=True))
    options = dict(sampling=greedy(max_new_tokens=4), num_speculative_tokens=1)
    call = make_call(target, PROMPTS, drafter=drafter, **options)
    assert "all-gather" not in compile_plan(call.plan).step.as_text()


# JAX 0.12 still compiles it, and will drop Pallas's Triton backend for Mosaic GPU.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("width", [16, 24, *slow(80, 128)])
def test_the_form_for_gpus_compiles_for_them_as_far_as_that_goes_without(width):
    """Triton takes powers of two only: other heads do without the kernel."""
    config = tiny_config(head_dim=width)
    form = Form.of("cuda", config)
    model = random_model(config, 0, dtype="float32", form=form)
    run, *arguments = a_round(model, None)
    traced = jax.jit(run).trace(*arguments)
    try:
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:
        if "No supported GPU devices" not in str(error):
            raise
        pytest.skip("this JAX lowers a GPU kernel only where a GPU is")
    assert ("triton" in text) == (width in (16, 128))


@pytest.mark.parametrize(
    ("dtype", "capacity", "in_kernel"),
    [
        ("bfloat16", 512, True),
        ("int8", 512, True),
        *slow(("float32", 512, True)),
        ("int8", 64, True),
        ("int8", 32, False),
    ],
)
def test_the_form_for_tpus_is_lowered_for_them(dtype, capacity, in_kernel):
    """In every storage of the cache; pages that are no multiple of 64 do without the kernel."""
    config = tiny_config(head_dim=64)
    model = random_model(config, 0, dtype="float32", form=Form.of("tpu", config))
    decoder = dataclasses.replace(model.architecture, cache_dtype=jnp.dtype(dtype))
    cache, tokens = decoder.make_cache(2, capacity), jnp.zeros((2, 3), jnp.int32)

    def run(params, cache, window):
        return decoder.extend(params, tokens, tokens, cache, window, 0, causal(3)).logits

    traced = jax.jit(run).trace(model.params, cache, decoder.make_window(2, 3))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == in_kernel


def test_layers_apart_are_saved_and_loaded_like_stacked_ones(tmp_path, tiny):
    apart = random_model(tiny.config, 0, dtype="float32", form=FORMS["apart"])
    save_model(apart, tmp_path / "model")
    stacked = load_model(tmp_path / "model", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, stacked.params, tiny.params)
    mesh = sharding.make_mesh(2, 2, jax.devices()[:4])
    again = load_model(tmp_path / "model", dtype="float32", mesh=mesh, form=FORMS["apart"])
    jax.tree.map(np.testing.assert_array_equal, again.params, apart.params)


def test_forms_that_do_not_exist_are_refused():
    for fields, says in (
        (("stacked", "flash"), "cache_attention='flash': use rows, blocks, kernel"),
        (("scanned",), "layers='scanned': use stacked, apart or unrolled"),
    ):
        with pytest.raises(InputError, match=says):
            Form(*fields)
    apart = random_model(tiny_config(), 0, dtype="float32", form=Form("apart"))
    decoder = dataclasses.replace(apart.architecture, multiply=jnp.dtype("bfloat16"))
    tokens = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(InputError, match="multiply=bfloat16: kernels of layers='apart' would be"):
        decoder.extend(apart.params, tokens, tokens, None, None, 0, causal(1))
    with pytest.raises(InputError, match="form: layers='apart' is not for experts; use stacked"):
        random_model(tiny_config(experts=Experts(4, 2, 32)), 0, form=Form("apart"))
