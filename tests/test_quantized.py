"""Kernels of 4 and 8 bits: their products, models that have them, and the drafter made of them."""

import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import generate
from model_files import gguf_metadata, gguf_tensors, write_gguf
from test_decoder import extend
from test_experts import WIDE

import specjax
from specjax.apps.command_line.config_file import read_config
from specjax.apps.run.decode_config import DrafterConfig, make_config_drafter, read_decode_config
from specjax.core.cache import commit
from specjax.core.parameter_sizes import bytes_by_form, count_bytes, megabytes, weights_in_words
from specjax.distributed.sharding import make_mesh
from specjax.drafters import TreeOptions, make_drafter
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.engine.programs import compile_plan
from specjax.errors import InputError
from specjax.loading import quantize as quantize_models
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.loading.quantize import float_model, quantized_model
from specjax.models.cpu import library as cpu_library
from specjax.models.form import Form
from specjax.models.layers import grouped_product
from specjax.models.layers.quantized import quantize, round_activations
from specjax.models.layers.tiled_kernel import tiled

needs_library = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)
CONFIG = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=True)
PROMPTS = [[5], [3, 4, 5, 3, 4, 5, 3], [9, 8, 9, 8, 9]]
KINDS = ("Q4_0", "Q4_1", "Q8_0")


def random_kernel(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def clear_library():
    for cached in (cpu_library.available, cpu_library.loaded):
        cached.cache_clear()


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(cpu_library, "available", lambda: False)


@pytest.fixture(scope="module")
def target():
    return random_model(CONFIG, 0, dtype="float32", form=Form())


@pytest.fixture(scope="module")
def quantized(target):
    return {weights: quantized_model(target, weights) for weights in ("int8", "int4")}


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_kernels_are_rounded_as_they_are_read(weights, tmp_path, monkeypatch):
    """Onto accelerators and meshes, so that the whole of a kernel is never in memory."""
    wide = dataclasses.replace(CONFIG, intermediate_size=128)
    save_model(random_model(wide, 0, dtype="float32", form=Form()), tmp_path / "model")
    options = dict(dtype="float32", mesh=make_mesh(1, 2, jax.devices()[:2]))
    wanted = quantized_model(load_model(tmp_path / "model", **options), weights)
    monkeypatch.setattr(quantize_models, "_quantized", None)
    found = load_model(tmp_path / "model", weights=weights, **options)
    assert found.weights == wanted.weights
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    places = [jax.tree.map(lambda leaf: leaf.sharding, one.params) for one in (found, wanted)]
    assert places[0] == places[1]
    narrow = dataclasses.replace(CONFIG, hidden_size=32, intermediate_size=80)
    save_model(random_model(narrow, 0, dtype="float32", form=Form()), tmp_path / "narrow")
    with pytest.raises(InputError, match=r"down.kernel has 80 inputs, no multiple of 32 for each"):
        load_model(tmp_path / "narrow", weights=weights, **options)


@pytest.mark.parametrize(("bits", "largest"), [(8, 1 / 254), (4, 1 / 30)])
def test_weights_are_rounded_to_the_nearest_integer_of_their_group(bits, largest):
    kernel = random_kernel(2, 64, 5)
    back = quantize(kernel, bits).dequantized()
    groups = np.asarray(kernel).swapaxes(1, 2).reshape(2, 5, -1, 32)
    spread = np.ptp(groups, axis=-1) if bits == 4 else 2 * np.abs(groups).max(axis=-1)
    errors = np.abs(np.asarray(back - kernel)).swapaxes(1, 2).reshape(groups.shape).max(axis=-1)
    # Scales and minimums in half precision add a little.
    assert np.all(errors < (largest + 1e-3) * spread)
    again = quantize(back, bits).dequantized()
    np.testing.assert_allclose(again, back, atol=2e-3)
    np.testing.assert_array_equal(quantize(jnp.zeros((32, 3)), bits).dequantized(), 0)


@jax.jit
def products(kernel, x, layer):
    """The products of the first rows of x, for several numbers of rows."""
    return {
        tokens: kernel.at_layer(layer).multiply(x[:tokens])
        for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
    }


@needs_library
@pytest.mark.parametrize("in_tiles", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_dequantised_kernels(bits, in_tiles):
    assert cpu_library.available()
    kernel = quantize(random_kernel(3, 96, 77), bits)
    kernel = tiled(kernel) if in_tiles else kernel
    x = random_kernel(17, 96)
    for layer in range(3):
        expected = np.asarray(x, np.float64) @ np.asarray(kernel.dequantized()[layer])
        for tokens, found in products(kernel, x, layer).items():
            np.testing.assert_allclose(found, expected[:tokens], rtol=1e-5, atol=1e-4)


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
def test_an_output_has_the_same_bits_whatever_the_number_of_tokens(bits):
    kernel = tiled(quantize(random_kernel(96, 13), bits))
    x = random_kernel(20, 96)
    one_by_one = jnp.concatenate([kernel.multiply(row[None]) for row in x])
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 20):
        y = kernel.multiply(x[:tokens])
        np.testing.assert_array_equal(y, one_by_one[:tokens])


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_window(functions, width):
    return functions.make_window(1, width)


commit_all = jax.jit(commit)


def logits_in_passes(model, tokens, widths):
    """The logits after each token, in passes of these widths, each of them committed."""
    functions, cache, start, logits = model.architecture, None, 0, []
    cache = functions.make_cache(1, 256)
    tokens = np.asarray(tokens)
    for width in widths:
        stop = start + width
        result = extend(
            functions,
            model.params,
            tokens[:, start:stop],
            np.arange(start, stop, dtype=np.int32)[None],
            cache,
            make_window(functions, width),
            0,
            np.tril(np.ones((1, width, width), bool)),
        )
        logits.append(result.logits[0])
        slots, count = np.arange(width, dtype=np.int32)[None], np.full(1, width, np.int32)
        cache, start = commit_all(cache, result.window, slots, count), stop
    return np.concatenate(logits)


@needs_library
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_have_the_same_bits_in_passes_of_any_width(quantized, weights, kv_cache_dtype):
    """And whatever is committed: nothing about a round changes what the target says."""
    model = dataclasses.replace(quantized[weights], kv_cache_dtype=kv_cache_dtype)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 70)), jnp.int32)
    one_by_one = logits_in_passes(model, tokens, [1] * 70)
    for widths in ([5] * 14, [33, 37], [2, 8, 16, 44]):
        np.testing.assert_array_equal(logits_in_passes(model, tokens, widths), one_by_one)


@needs_library
@pytest.mark.parametrize("weights", ["int8", *slow("int4")])
def test_experts_have_the_same_bits_in_passes_of_any_width(weights):
    """Whichever experts the other tokens of a pass need."""
    model = quantized_model(random_model(WIDE, 0, dtype="float32", form=Form()), weights)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (1, 24)), jnp.int32)
    one_by_one = logits_in_passes(model, tokens, [1] * 24)
    for widths in ([3] * 8, [2, 8, 14]):
        np.testing.assert_array_equal(logits_in_passes(model, tokens, widths), one_by_one)


@needs_library
def test_logits_of_a_tree_have_the_bits_of_its_paths(quantized):
    model = quantized["int8"]
    functions, tokens = model.architecture, jnp.asarray([[5, 7, 8, 9, 3]])
    parents = (-1, 0, 0, 1, 2)  # two paths, whose nodes alternate
    ancestors = np.eye(5, dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[node] |= ancestors[parent]
    window, cache = functions.make_window(1, 5), functions.make_cache(1, 64)
    depths = jnp.asarray([[0, 1, 1, 2, 2]])
    tree = extend(
        functions, model.params, tokens, depths, cache, window, 0, jnp.asarray(ancestors)[None]
    ).logits[0]
    for path in ([0, 1, 3], [0, 2, 4]):
        alone = logits_in_passes(model, tokens[:, np.asarray(path)], [1, 1, 1])
        np.testing.assert_array_equal(np.asarray(tree)[path], alone)


@pytest.mark.parametrize("bits", [4, 8])
def test_without_the_library_xla_multiplies(bits, without_library):
    kernel = quantize(random_kernel(2, 64, 5), bits)
    x = random_kernel(3, 64)
    y = kernel.at_layer(1).multiply(x)
    np.testing.assert_allclose(y, x @ kernel.dequantized()[1], rtol=1e-5, atol=1e-5)


def held(model):
    """The forms of a model's weights but float32, which its norms have."""
    return bytes_by_form(model.params).keys() - {"float32"}


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_blocks_is_the_model_that_its_dequantised_weights_are(tmp_path, kind):
    arrays = gguf_tensors()
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays, kind)
    model, wide = load_model(path), load_model(path, weights="float", form=Form())
    assert held(model) == {kind}
    assert model.num_params == wide.num_params
    jax.tree.map(np.testing.assert_array_equal, float_model(model).params, wide.params)
    prompts = ["the thin", "in the"]
    outputs = [specjax.generate(one, prompts, max_new_tokens=20).token_ids for one in (model, wide)]
    assert outputs[0] == outputs[1]


@needs_library
def test_a_dtype_or_a_form_keeps_floating_point(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), "Q8_0")
    assert load_model(path, dtype="float32").weights == "float32"
    assert load_model(path, form=Form()).weights == "float32"
    assert held(load_model(path, dtype="float32", weights="file")) == {"Q8_0"}


def test_weights_are_named_by_form_and_size():
    kernel = quantize(random_kernel(256, 64), 4)
    wide = jnp.zeros((256, 64))
    assert weights_in_words({"a": wide, "b": wide}) == "float32"
    held_bytes = {"float32": 65536, "4-bit": 64 * 256 // 2 + 2 * 4 * 64 * 8}
    assert bytes_by_form({"a": kernel, "b": wide}) == held_bytes
    assert weights_in_words({"a": kernel, "b": wide}) == "float32 (0.0655 MB) and 4-bit (0.0123 MB)"
    half = wide.astype(jnp.bfloat16)
    words = "float32 (0.0655 MB), bfloat16 (0.0328 MB) and 4-bit (0.0123 MB)"
    assert weights_in_words([kernel, wide, half]) == words
    # The norms beside kernels are nothing to speak of.
    assert weights_in_words([kernel, wide[0]]) == "4-bit (0.0123 MB) and float32 (0.000256 MB)"
    assert weights_in_words([kernel, wide[0, :8]]) == "4-bit"
    assert [megabytes(size) for size in (1_234_567_890, 99_400_000)] == ["1,235 MB", "99.4 MB"]


@needs_library
def test_what_a_file_with_wide_kernels_takes_is_said(tmp_path, caplog):
    """A file whose types have products takes no line, whatever its weights are rounded to."""
    path = tmp_path / "a.gguf"
    kinds = {"blk.1.ffn_down.weight": "F32"}
    write_gguf(path, gguf_metadata(), gguf_tensors(), "Q5_0", kinds=kinds)
    model = load_model(path)
    down = model.params["layers"]["mlp"]["down"]["kernel"]
    total, floats = count_bytes(model.params), count_bytes(down)
    held = bytes_by_form(model.params)
    norms = held["float32"] - floats
    sizes = (megabytes(size) for size in (floats + norms, held["Q5_0"]))
    assert model.weights == "float32 ({}) and Q5_0 ({})".format(*sizes)
    assert f", {model.weights})" in repr(model)
    (line,) = caplog.messages
    assert line.startswith(
        f"{path}: the weights take {total / 1e9:.2g} GB since kernels of the type F32 have no "
        "products in few bits; weights=int8 takes "
    )
    caplog.clear()
    for kind in ("Q8_0", "Q4_0", "Q5_0"):
        load_model(write_gguf(tmp_path / kind, gguf_metadata(), gguf_tensors(), kind))
    for weights in ("int8", "int4"):
        load_model(path, weights=weights)
    assert not caplog.messages


@needs_library
def test_a_draft_model_has_few_bits_beside_a_quantized_target(tmp_path, caplog):
    """Of a file those of the file, and else 8: floats would cost what such a target saves."""
    wide, blocks = tmp_path / "wide.gguf", tmp_path / "blocks.gguf"
    write_gguf(wide, gguf_metadata(), gguf_tensors(), "F32")
    write_gguf(blocks, gguf_metadata(), gguf_tensors(), "Q4_0", kinds={"token_embd.weight": "Q8_0"})
    floats = load_model(blocks, weights="float", form=Form())
    as_loaded, rounded = load_model(wide), load_model(wide, weights="int8")
    config = read_decode_config(read_config([], "configs/decode_smollm2.py").to_dict())
    in_blocks = load_model(blocks)

    def forms(target, path, **options):
        """The same by name and on the command line."""
        loaded = make_drafter("draft_model", target, str(path), **options)
        entry = DrafterConfig("draft_model", str(path), options, False)
        made = make_config_drafter(config, entry, target).loaded
        assert bytes_by_form(made.params) == bytes_by_form(loaded.params)
        return bytes_by_form(loaded.params)

    for few in (in_blocks, quantized_model(floats, "int4")):
        caplog.clear()
        assert forms(few, wide) == bytes_by_form(rounded.params)
        assert not caplog.messages
        assert forms(few, blocks) == bytes_by_form(in_blocks.params)
        assert forms(few, wide, weights="float").keys() == {"float32"}
    assert forms(floats, wide) == bytes_by_form(as_loaded.params) != bytes_by_form(rounded.params)
    assert forms(floats, blocks) == bytes_by_form(in_blocks.params)


@needs_library
def test_a_model_in_few_bits_is_saved_in_floating_point(tmp_path, quantized):
    model = quantized["int8"]
    specjax.save_checkpoint(model, tmp_path / "model")
    again = load_model(tmp_path / "model", dtype="float32", form=Form())
    jax.tree.map(np.testing.assert_array_equal, again.params, float_model(model).params)


@needs_library
@pytest.mark.parametrize("weights", ["int8", *slow("int4")])
@pytest.mark.parametrize(("verify", "temperature"), [("coupled", 0.8), *slow(("rejection", 0.0))])
def test_tokens_are_those_of_plain_decoding_with_the_same_weights(
    quantized, weights, verify, temperature
):
    model = quantized[weights]
    sampling = {"temperature": temperature, "max_new_tokens": 24, "seed": 3}
    plain = generate(model, PROMPTS, verify=verify, **sampling)
    for drafter in ("ngram", make_drafter("early_exit", model, exit_layer=2)):
        result = generate(model, PROMPTS, drafter=drafter, verify=verify, length=3, **sampling)
        assert result.token_ids == plain.token_ids
    assert result.summary().acceptance_length > 1.1


@needs_library
@pytest.mark.parametrize(("verify", "temperature"), [("rejection", 0.0), *slow(("coupled", 0.8))])
@pytest.mark.parametrize(
    "tree",
    [None, *slow(TreeOptions(kind="dynamic", topk=2, depth=3, num_nodes=6))],
    ids=lambda tree: tree and tree.kind,
)
def test_the_target_in_fewer_bits_drafts_what_the_target_says(target, tree, verify, temperature):
    request = {"max_new_tokens": 24, "temperature": temperature, "verify": verify}
    plain = generate(target, PROMPTS, **request)
    drafter = make_drafter("quantized", target, weights="int8", tree=tree)
    result = generate(target, PROMPTS, drafter=drafter, **request)
    assert result.token_ids == plain.token_ids
    assert result.summary().acceptance_length > 2.5


def test_a_drafter_has_fewer_bits_than_its_target(target, quantized):
    assert make_drafter("quantized", target).drafter.weights == "int8"
    assert make_drafter("quantized", quantized["int8"]).drafter.weights == "int4"


def test_activations_are_rounded_to_the_nearest_integer_of_their_group():
    x = random_kernel(3, 64)
    for bits, largest in ((8, 127), (4, 7)):
        rounded = np.asarray(round_activations(x, bits)).reshape(3, 2, 32)
        groups = np.asarray(x).reshape(3, 2, 32)
        scales = np.abs(groups).max(-1, keepdims=True) / largest
        assert np.all(np.abs(rounded - groups) <= 0.501 * scales)
        np.testing.assert_allclose(rounded / scales, np.round(rounded / scales), atol=1e-4)
    np.testing.assert_array_equal(round_activations(jnp.zeros((2, 32)), 4), 0)


@pytest.mark.parametrize(("verify", "temperature"), [("coupled", 0.8), *slow(("rejection", 0.0))])
@pytest.mark.parametrize("weights", ["int4", *slow("float")])
def test_drafts_with_rounded_activations_are_the_targets(
    target, quantized, weights, verify, temperature
):
    model = quantized.get(weights, target)
    request = {"max_new_tokens": 24, "temperature": temperature, "verify": verify}
    plain = generate(model, PROMPTS, **request)
    lengths = {}
    for activations in ("8", "4"):
        drafter = make_drafter("quantized", model, activations=activations)
        result = generate(model, PROMPTS, drafter=drafter, **request)
        assert result.token_ids == plain.token_ids
        lengths[activations] = result.summary().acceptance_length
    assert lengths["8"] > max(2.0, lengths["4"])


@pytest.mark.parametrize("activations", ["4", None])
def test_rounded_activations_share_the_kernels_of_a_quantised_target(
    activations, quantized, caplog
):
    """By default, too, where there are no fewer bits for the weights; a line says so."""
    model, options = quantized["int4"], {} if activations is None else {"activations": activations}
    drafter = make_drafter("quantized", model, **options)
    kernel = drafter.params["layers"]["mlp"]["down"]["kernel"]
    assert kernel.data is model.params["layers"]["mlp"]["down"]["kernel"].data
    assert kernel.activation_bits == (4 if activations else 8)
    assert drafter.params["head"]["kernel"].activation_bits is None
    said = "already, so it drafts with them and activations of 8 bits"
    assert (said in caplog.text) == (activations is None)


@needs_library
def test_the_compiled_step_holds_no_kernel_in_floating_point(quantized):
    model = quantized["int8"]
    drafter = make_drafter("early_exit", model, exit_layer=1)
    plan, _ = plan_requests(model, [[1, 2]], drafter=drafter, options=DecodeOptions())
    text = compile_plan(plan).step.as_text()
    kernels = {(64, 64), (64, 32), (64, 96), (96, 64), (61, 64), (64, 61)}
    found = {tuple(map(int, sizes.split(","))) for sizes in re.findall(r"f32\[(\d+,\d+)\]", text)}
    assert sorted(found & kernels) == []
    assert cpu_library.TILE_PRODUCT in text


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_scale_per_channel_comes_after_the_product(tokens):
    """As on accelerators, where XLA then converts the integers within it."""
    kernel, x = random_kernel(2, 96, 13), random_kernel(tokens, 96, seed=1)
    stack = quantize(kernel, 8, per_channel=True)
    assert (stack.shape, stack.per_channel) == ((2, 96, 13), True)
    assert np.abs(stack.dequantized() - kernel).max() < np.abs(kernel).max() / 250
    product = jax.jit(lambda x, kernel: kernel.at_layer(1).multiply(x))
    np.testing.assert_allclose(product(x, stack), x @ stack.dequantized()[1], rtol=1e-5, atol=1e-4)
    program = product.lower(x.astype(jnp.bfloat16), stack).as_text()
    assert re.search(r"dot_general.*bf16.*bf16.*-> tensor<.*f32>", program)


@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_the_gpu_kernel_multiplies_by_the_dequantised_weights(tokens):
    kernel, x = quantize(random_kernel(256, 64), 4), random_kernel(tokens, 256, seed=1)
    assert grouped_product.takes(tokens, 256, 64)
    found = grouped_product.multiply(
        x, kernel.values, kernel.scales, kernel.minimums, interpret=True
    )
    np.testing.assert_allclose(found, x @ kernel.dequantized(), rtol=1e-5, atol=1e-4)


def devices(count):
    return make_mesh(1, count, jax.devices()[:count])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_kernels_are_split_over_devices(weights):
    config = tiny_config(hidden_size=64, intermediate_size=128, head_dim=16)
    model = random_model(config, 0, dtype="float32", form=Form())
    alone = quantized_model(model, weights)
    split = quantized_model(place_model(model, devices(2)), weights)
    kernel = split.params["layers"]["mlp"]["down"]["kernel"]
    shapes = [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(kernel)]
    assert shapes[0][-1] * 2 == kernel.values.shape[-1]
    assert shapes[1][-1] * 2 == kernel.scales.shape[-1]
    request = {"max_new_tokens": 12, "drafter": "ngram"}
    wanted = generate(alone, PROMPTS[:2], **request)
    assert generate(split, PROMPTS[:2], **request).token_ids == wanted.token_ids


BAD = {
    "weights": (
        lambda model, path: load_model("smollm2-135m-instruct", weights="int3"),
        "weights='int3'",
    ),
    "file of another format": (
        lambda model, path: load_model(path.with_name("model"), weights="file"),
        "weights='file' is for GGUF files; use weights='float' or 'int8'",
    ),
    "width on devices": (
        lambda model, path: quantized_model(place_model(model, devices(2)), "int8"),
        "has 96 inputs, no multiple of 32 for each of 2 devices; use weights='float'",
    ),
    "width": (
        lambda model, path: quantized_model(random_model(tiny_config(), 0, form=Form()), "int4"),
        "inputs, no multiple of 32; use weights='float'",
    ),
    "drafter": (
        lambda model, path: make_drafter(
            "quantized", quantized_model(model, "int4"), weights="int8"
        ),
        "drafter.weights=int8: the target's weights are Q4_1 (",
    ),
    "drafter of few bits": (
        lambda model, path: make_drafter(
            "quantized", quantized_model(model, "int4"), activations="float"
        ),
        "drafter.activations=float: the target's weights are Q4_1 (",
    ),
    "drafter's width": (
        lambda model, path: make_drafter("quantized", random_model(tiny_config(), 0, form=Form())),
        "drafter.weights='int8': head.kernel has 24 inputs, no multiple of 32; use another drafter",
    ),
    "draft model's width": (
        lambda model, path: make_drafter(
            "draft_model", model, random_model(tiny_config(), 0, form=Form()), weights="int4"
        ),
        "drafter.weights='int4': head.kernel has 24 inputs, no multiple of 32; use drafter.weights="
        "'float'",
    ),
    "width of few keys": (
        lambda model, path: make_drafter(
            "sparse_kv", random_model(tiny_config(), 0, form=Form()), weights="int4"
        ),
        "drafter.weights='int4': head.kernel has 24 inputs, no multiple of 32; use the target's",
    ),
    "option": (lambda model, path: make_drafter("quantized", model, weights="int2"), "int2"),
    "activations": (
        lambda model, path: make_drafter("quantized", model, activations="2"),
        "drafter.activations='2' is unknown: use float, 8, 4",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_named(case, target, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors())
    save_model(target, tmp_path / "model")
    call, message = BAD[case]
    with pytest.raises(InputError) as error:
        call(target, path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_compiler_a_line_says_so_and_weights_are_floats(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    clear_library()
    try:
        path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), "Q8_0")
        with caplog.at_level("INFO", "specjax"):
            assert load_model(path).weights == "float32"
        assert "no-such-compiler is not installed" in caplog.text
        with pytest.raises(InputError, match="weights='file': the CPU kernel is not there"):
            load_model(path, weights="file")
    finally:
        clear_library()


@needs_library
def test_a_library_that_others_may_write_is_refused(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "specjax" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clear_library()
    try:
        with caplog.at_level("INFO", "specjax"):
            assert not cpu_library.available()
        assert "may be written by other users" in caplog.text
    finally:
        clear_library()
