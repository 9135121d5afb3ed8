"""Kernels in tiles: every type of GGUF, in fixed point and floats, on every kind of processor."""

import ctypes
import dataclasses
import functools
import shutil
import subprocess

import conftest
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from model_files import GGUF_CONFIG, gguf_metadata, gguf_tensors, random_blocks, write_gguf

import specjax
from specjax.core.parameter_sizes import bytes_by_form, is_quantized
from specjax.errors import InputError
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.load import load_model, random_model
from specjax.loading.quantize import float_model, quantized_model
from specjax.models.cpu import library, tiles
from specjax.models.form import Form
from specjax.models.layers.quantized import round_activations
from specjax.models.layers.tiled_kernel import Layout, empty_tiles

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"),
)
INPUTS, OUTPUTS = 512, 37
"""Two blocks of the widest types, and a tile that is not full."""


@functools.cache
def kernel_of(name, layers=1):
    """A kernel of a type, and its weights [L, D, F] according to the gguf package."""
    kernel = empty_tiles(Layout.of((layers,), INPUTS, [[(name, OUTPUTS)]] * layers))
    weights = []
    for layer in range(layers):
        blocks = random_blocks(name, OUTPUTS, INPUTS, seed=layer)
        # In pieces of whole tiles, as files are read.
        for first in (16, 0, 32):
            kernel.write(layer, first, blocks[first : first + 16])
        weights.append(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).T)
    return kernel.replace(data=jnp.asarray(kernel.data)), np.stack(weights)


def activations(tokens, seed=0):
    """Of very different magnitudes, as those of language models are."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((tokens, INPUTS)) * np.exp(2 * rng.standard_normal((tokens, INPUTS)))
    return jnp.asarray(wide, jnp.float32)


def errors(found, x, weights):
    """Deviations of a product, as shares of what its terms are without their signs."""
    x, weights = np.asarray(x, np.float64), weights.astype(np.float64)
    return np.abs(np.asarray(found, np.float64) - x @ weights) / (np.abs(x) @ np.abs(weights))


def test_the_types_are_those_of_the_library():
    assert set(tiles.formats()) == set(TYPES)
    assert len(TYPES) == library.NUM_FORMATS


@pytest.mark.parametrize("name", TYPES)
def test_weights_are_those_of_the_file(name):
    kernel, weights = kernel_of(name, layers=3)
    np.testing.assert_array_equal(kernel.dequantized(), weights)
    ids = jnp.array([[36, 0], [17, 17]])
    rows = jax.jit(lambda layer: kernel.at_layer(layer).columns(ids))(2)
    np.testing.assert_array_equal(rows, weights[2].T[np.asarray(ids)])
    kinds = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    size = OUTPUTS * INPUTS // kinds[0] * kinds[1]
    assert kernel.data.nbytes <= 1.1 * 3 * size * 48 / OUTPUTS  # 48 rows are three tiles


@pytest.mark.parametrize("name", TYPES)
def test_some_rows_are_taken(name):
    kernel, weights = kernel_of(name)
    kernel = kernel.replace(layout=Layout.of((), INPUTS, [[(name, OUTPUTS)]]))
    ids = np.array([30, 2, 2, 36, *range(20)], np.int32)
    taken = np.asarray(kernel.take(jnp.asarray(ids)).dequantized())
    np.testing.assert_array_equal(taken, weights[0][:, ids])
    more = np.asarray(kernel.resized(40).dequantized())
    np.testing.assert_array_equal(more[:, :OUTPUTS], weights[0])
    np.testing.assert_array_equal(more[:, OUTPUTS:], 0)


BITS = (32, 24, 16, 8)


@jax.jit
def products(kernel, x, layer):
    """The products with activations of each number of bits."""
    layers = {bits: kernel.replace(activation_bits=bits).at_layer(layer) for bits in BITS}
    return {bits: kernel.multiply(x) for bits, kernel in layers.items()}


@functools.cache
def products_of(name):
    """A type's weights of a layer, and their products."""
    kernel, weights = kernel_of(name, layers=2)
    return weights[1], products(kernel, activations(6), 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", TYPES)
def test_products_are_as_precise_as_their_bits(name, bits):
    """24 bits are as good as floats. Of 16-bit floats all products are in floats."""
    weights, by_bits = products_of(name)
    found, x = by_bits[bits], activations(6)
    exact = name in ("F16", "BF16") or bits >= 24
    assert errors(found, x, weights).max() < (1e-6 if exact else 2.0 ** (3 - bits))
    if bits == 8 and not exact:
        rounded = np.asarray(round_activations(x, 8))
        assert errors(found, rounded, weights).max() < 1e-6


@pytest.mark.parametrize("bits", [32, 24, 16, 8])
@pytest.mark.parametrize(
    "name", ["Q4_K", "Q6_K", *slow(*(name for name in TYPES if name not in ("Q4_K", "Q6_K")))]
)
def test_bits_do_not_depend_on_the_number_of_tokens(name, bits):
    kernel = kernel_of(name)[0].at_layer(0).replace(activation_bits=bits)
    x = activations(20)
    one_by_one = np.concatenate([kernel.multiply(row[None]) for row in x])
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20):
        np.testing.assert_array_equal(kernel.multiply(x[:tokens]), one_by_one[:tokens])


@pytest.mark.parametrize("bits", [32, 24, 16, 8])
def test_activations_that_are_no_numbers_stay_so(bits):
    kernel, _ = kernel_of("Q4_K")
    x = activations(6)
    for row, value in enumerate((np.inf, np.nan, 1e-38, 1e30), 1):
        x = x.at[row, 40:50].set(value)
    x = x.at[5].set(0)
    y = np.asarray(kernel.at_layer(0).replace(activation_bits=bits).multiply(x))
    assert np.isnan(y[1:3]).any(axis=1).all() or bits == 32
    assert not np.isfinite(y[1:3]).any()
    assert np.isfinite(y[[0, 3, 4, 5]]).all()
    np.testing.assert_array_equal(y[5], 0)


def product_of(level, kernel, x):
    """The product by the library that is compiled for a level."""
    loaded, name = ctypes.CDLL(str(library.build(level))), f"tile_product_{level.name}"
    handler = jax.ffi.pycapsule(getattr(loaded, library.TILE_PRODUCT))
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
    result = jax.ShapeDtypeStruct((len(x), OUTPUTS), jnp.float32)
    layout, layer = kernel.layout.encoded, jnp.zeros(1, jnp.int32)
    return {
        planes: np.asarray(
            jax.ffi.ffi_call(name, result)(
                x, layer, kernel.data, planes=np.int32(planes), layout=layout
            )
        )
        for planes in (1, 2, 3, 0)
    }


LEVELS = {level.name: level for levels in library.LEVELS.values() for level in levels}


@pytest.mark.parametrize(
    "name", ["portable", *slow(*(name for name in LEVELS if name != "portable"))]
)
def test_every_processor_computes_the_same_bits(name, monkeypatch):
    here, there = library.level(), LEVELS[name]
    if not there.needs <= library.features():
        pytest.skip("another processor")
    if there is here:
        pytest.skip("compared with the others")
    library.build(here)
    if not conftest.full:
        # Optimized less, kernels compile four times as fast; the flag makes them another library.
        there = there._replace(flags=(*there.flags, "-DLESS_OPTIMIZED"))
        units = [(source, ["-O1", *flags[1:]]) for source, flags in library._units()]
        monkeypatch.setattr(library, "_units", lambda: units)
    for format in TYPES:
        kernel, x = kernel_of(format)[0], activations(6)
        ours, theirs = (product_of(level, kernel, x) for level in (here, there))
        for planes, product in ours.items():
            np.testing.assert_array_equal(theirs[planes], product, err_msg=f"{format} {planes}")


def hashes(folder, compiler, level, runner=()):
    """What tests/tile_products.cc prints, compiled for a level."""
    sources, command = library.FOLDER, [compiler, "-std=c++17", "-w", "-O2", *level.flags]
    units = [("tiles.cc", []), ("../../../tests/tile_products.cc", [f"-I{sources}"])]
    units += [
        ("tile_product.cc", [f"-DSPECJAX_FORMAT={index}"]) for index in range(library.NUM_FORMATS)
    ]

    def compiled(number, source, flags):
        output = folder / f"{number}.o"
        subprocess.run([*command, *flags, "-c", sources / source, "-o", output], check=True)
        return output

    objects = [compiled(number, *unit) for number, unit in enumerate(units)]
    subprocess.run([*command, "-static", *objects, "-o", folder / "run"], check=True)
    return subprocess.run([*runner, folder / "run"], check=True, capture_output=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="no g++-aarch64-linux-gnu and qemu-user",
)
def test_arm_computes_the_same_bits(tmp_path):
    for level in library.LEVELS["aarch64"]:
        (tmp_path / level.name).mkdir()
    arm = {
        level.name: hashes(
            *(tmp_path / level.name, "aarch64-linux-gnu-g++", level),
            runner=("qemu-aarch64", "-cpu", "max"),
        )
        for level in library.LEVELS["aarch64"]
    }
    ours = hashes(tmp_path, "c++", library.level())
    assert ours.count(b"\n") == 5 * library.NUM_FORMATS
    assert arm == dict.fromkeys(arm, ours)


def test_a_level_is_the_best_that_a_processor_has(monkeypatch):
    found = []
    for features in (
        library.LEVELS["x86_64"][0].needs,
        library.LEVELS["x86_64"][0].needs - {"avx512_vnni"},
        {"avx2", "fma", "f16c", "bmi2", "avx_vnni"},
        {"avx2", "fma", "f16c", "bmi2"},
        {"sse2"},
    ):
        monkeypatch.setattr(library, "features", lambda features=features: frozenset(features))
        monkeypatch.setattr(library.platform, "machine", lambda: "AMD64")
        found.append(library.level.__wrapped__().name)
    assert found == ["avx512-vnni", "avx512", "avx-vnni", "avx2", "portable"]
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    assert library.level.__wrapped__().name == "portable"


CONFIG = dataclasses.replace(GGUF_CONFIG, hidden_size=256, intermediate_size=512, head_dim=64)
MIXED = {
    "blk.0.attn_v.weight": "Q6_K",
    "blk.1.attn_v.weight": "Q5_K",
    "blk.0.ffn_down.weight": "Q6_K",
    "blk.1.ffn_down.weight": "Q3_K",
    "blk.1.ffn_up.weight": "Q2_K",
    "token_embd.weight": "Q6_K",
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def mixed(tmp_path_factory, request):
    """A file of several types, as llama.cpp makes them: layers and joined kernels differ."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    config = dataclasses.replace(CONFIG, tie_word_embeddings=request.param)
    return write_gguf(path, gguf_metadata(config), gguf_tensors(config), "Q4_K", kinds=MIXED)


def test_a_file_of_several_types_is_as_it_is(mixed):
    model, wide = load_model(mixed), load_model(mixed, weights="float", form=Form())
    held = bytes_by_form(model.params)
    assert held.keys() == {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "float32"}
    assert held["float32"] < 0.02 * sum(held.values())
    assert model.num_params == wide.num_params
    jax.tree.map(np.testing.assert_array_equal, float_model(model).params, wide.params)
    prompts = ["the thin", "in the"]
    for drafter in (None, "ngram"):
        options = dict(drafter=drafter, max_new_tokens=20)
        outputs = [specjax.generate(one, prompts, **options).token_ids for one in (model, wide)]
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("activations", ["float", "24", "16", "8"])
def test_activations_are_rounded_to_the_bits_that_are_asked_for(mixed, activations):
    model = load_model(mixed, activations=activations)
    kernels = jax.tree.leaves(model.params, is_leaf=is_quantized)
    bits = {leaf.activation_bits for leaf in kernels if is_quantized(leaf)}
    assert bits == {32 if activations == "float" else int(activations)}
    assert load_model(mixed, activations=int(activations) if activations != "float" else "float")
    assert ("activations of 8 bits" in model.weights) == (activations == "8")


def test_what_does_not_round_activations_says_so(mixed):
    for options in (
        dict(weights="float", form=Form(), activations="8"),
        dict(dtype="float32", activations="24"),
    ):
        with pytest.raises(InputError, match="the weights are float32, and only kernels in few"):
            load_model(mixed, **options)
    with pytest.raises(InputError, match="activations='12' is unknown: use auto, float, 24, 16, 8"):
        load_model(mixed, activations="12")


def test_a_type_without_products_is_named(tmp_path, caplog):
    path = tmp_path / "a.gguf"
    kinds = {"blk.0.ffn_down.weight": "IQ3_S"}
    keys, arrays = gguf_metadata(CONFIG), gguf_tensors(CONFIG)
    model = load_model(write_gguf(path, keys, arrays, "Q4_K", kinds=kinds))
    (line,) = caplog.messages
    assert "since kernels of the type IQ3_S have no products in few bits" in line
    assert not is_quantized(model.params["layers"]["mlp"]["down"]["kernel"])
    assert is_quantized(model.params["layers"]["mlp"]["gate_up"]["kernel"])


def test_scales_that_are_not_finite_are_named(tmp_path):
    keys, arrays = gguf_metadata(CONFIG), gguf_tensors(CONFIG)
    path = write_gguf(tmp_path / "a.gguf", keys, arrays, "Q4_K")
    with open_gguf(path) as file:
        tensor = file.tensors["blk.1.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    assert load_model(path)
    content[tensor.offset + 144 * 100 : tensor.offset + 144 * 100 + 2] = b"\x00\x7c"
    path.write_bytes(content)
    with pytest.raises(InputError, match="a.gguf: the tensor blk.1.ffn_up.weight has scales that"):
        load_model(path)


def test_weights_beyond_half_precision_are_named():
    model = random_model(tiny_config(hidden_size=32, intermediate_size=32), 0, dtype="float32")
    params = jax.tree.map(lambda leaf: 1e8 * leaf, model.params)
    with pytest.raises(InputError, match="weights='int8': .* has weights beyond half precision"):
        quantized_model(dataclasses.replace(model, params=params, form=Form()), "int8")
