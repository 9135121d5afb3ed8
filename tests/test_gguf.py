"""GGUF files: what was written is what is loaded, and bad files are one-line errors."""

import collections
import dataclasses
import re
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import (
    GGUF_CONFIG,
    GGUF_TABLE,
    gguf_metadata,
    gguf_tensors,
    open_files,
    write_gguf,
)

from specjax.loading.formats import build_parameters, parameter_names, tensor_layout
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.formats.gguf_parts import open_parts
from specjax.loading.load import load_model
from specjax.models.config import RopeScaling

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_model_is_loaded_with_its_dequantised_weights(tmp_path, kind):
    arrays = gguf_tensors()
    path = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(), arrays, kind)
    model = load_model(path, dtype="float32")
    assert model.config == GGUF_CONFIG
    quantised = gguf.GGMLQuantizationType[kind]
    for location in parameter_names.locations(GGUF_TABLE, model.config):
        stored = arrays[location.name]
        if stored.ndim > 1:
            raw = gguf.quants.quantize(stored, quantised)
            stored = gguf.quants.dequantize(raw, quantised).reshape(stored.shape)
        path, index = location.within(scan_layers=True)
        leaf = np.asarray(parameter_names.lookup(model.params, path))[index]
        np.testing.assert_array_equal(tensor_layout.to_stored(leaf, location), stored)


@pytest.mark.parametrize(
    ("kind", "weights"), [("F32", "float"), ("Q8_0", "float"), ("Q4_1", "file")]
)
def test_rows_read_a_few_at_a_time_are_the_same(tmp_path, monkeypatch, kind, weights):
    """Of queries and keys whole heads, since theirs are in another order in the file."""
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), kind)
    whole = load_model(path, weights=weights)
    found, read = [], tensor_layout.from_stored

    def counted(stored, location):
        found.append(location)
        return read(stored, location)

    monkeypatch.setattr(build_parameters, "_PIECE_BYTES", 1)
    monkeypatch.setattr(tensor_layout, "from_stored", counted)
    pieces = load_model(path, weights=weights)
    jax.tree.map(np.testing.assert_array_equal, pieces.params, whole.params)
    for location, number in collections.Counter(found).items():
        # Those that are kept are read by tiles of 16 rows, where sections do not share them.
        section = location.section
        is_kept = weights == "file" and location.is_kernel
        in_tiles = is_kept and (section.width % 16 == 0 or section.size == 1)
        unit = location.head_dim if location.entry.paired else 16 if in_tiles else 1
        assert number == -(-location.rows[0] // unit), location


def test_what_was_read_of_a_file_is_no_memory_of_the_process(tmp_path):
    arrays = {"a": np.ones((64, 1 << 14), np.float32), "b": np.ones((4, 32), np.float32)}
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays)
    with open_gguf(path) as file:
        for _ in range(2):
            assert file.values(file.tensors["a"]).sum() == 1 << 20
            assert mapped_kilobytes(path) > 3_500
            file.release(file.tensors["a"])
            assert mapped_kilobytes(path) < 500


def mapped_kilobytes(path):
    """How much of a mapped file is in this process's memory."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text)
    assert found
    return sum(map(int, found))


def test_untied_biased_and_scaled_models_are_read(tmp_path):
    config = dataclasses.replace(
        GGUF_CONFIG,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("linear", factor=4.0),
    )
    keys = gguf_metadata(config) | {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": np.float32(4),
    }
    path = write_gguf(tmp_path / "a.gguf", keys, gguf_tensors(config))
    model = load_model(path, dtype="float32")
    assert model.config == config
    assert parameter_names.param_shapes(config).keys() == model.params.keys()


def test_yarn_is_read(tmp_path):
    """llama.cpp multiplies the factor that the file states by that of the paper."""
    keys = gguf_metadata() | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": np.float32(4),
        "llama.rope.scaling.original_context_length": np.uint32(16),
        "llama.rope.scaling.attn_factor": np.float32(1.5),
        "llama.rope.scaling.yarn_beta_fast": np.float32(8),
    }
    path = write_gguf(tmp_path / "a.gguf", keys, gguf_tensors())
    attention_factor = 1.5 * (0.1 * np.log(4) + 1)
    assert load_model(path).config.rope_scaling == RopeScaling(
        "yarn",
        factor=4.0,
        original_max_positions=16,
        attention_factor=attention_factor,
        beta_fast=8.0,
    )


def test_frequency_factors_are_read(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    arrays = gguf_tensors() | {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays)
    assert load_model(path).config.rope_scaling == RopeScaling(
        "factors", factors=tuple(map(float, factors))
    )


def test_query_rows_are_unpaired():
    """Rows (0, 1), (2, 3), ... of each head are the pairs; the tree keeps them half apart."""
    location = next(
        location
        for location in parameter_names.locations(GGUF_TABLE, GGUF_CONFIG)
        if "attn_k" in location.name
    )
    rows = np.arange(32.0).reshape(32, 1).repeat(64, 1)
    kernel = tensor_layout.from_stored(rows, location)
    assert kernel[:16, 0].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    assert kernel[16:, 0].tolist() == [*range(16, 32, 2), *range(17, 32, 2)]
    leaf = np.zeros(location.leaf_shape)
    location.section.of(leaf.T)[...] = kernel.reshape(2, 16, 64)
    np.testing.assert_array_equal(tensor_layout.to_stored(leaf, location), rows)


def test_rows_beyond_the_vocabulary_are_truncated(tmp_path):
    arrays = gguf_tensors()
    padding = np.full((7, GGUF_CONFIG.hidden_size), 9, np.float32)
    padded = arrays | {"token_embd.weight": np.vstack([arrays["token_embd.weight"], padding])}
    plain = write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays)
    wide = write_gguf(tmp_path / "b.gguf", gguf_metadata(), padded)
    first, second = (load_model(path) for path in (plain, wide))
    assert first.config == second.config
    np.testing.assert_array_equal(first.params["head"]["kernel"], second.params["head"]["kernel"])
    assert first.padding_embeddings is None
    np.testing.assert_array_equal(second.padding_embeddings, padding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(tmp_path, dtype):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), "Q8_0")
    wide, narrow = load_model(path, dtype="float32"), load_model(path, dtype=dtype)
    for part in ("qkv", "output"):
        kernel = narrow.params["layers"]["attention"][part]["kernel"]
        assert kernel.dtype == jnp.dtype(dtype) == narrow.dtype
        expected = wide.params["layers"]["attention"][part]["kernel"].astype(dtype)
        np.testing.assert_array_equal(kernel, expected)


def test_every_type_of_the_package_is_dequantised(tmp_path):
    rng = np.random.default_rng(0)
    kinds = []
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        raw = rng.integers(0, 60, (3, 512 // block * size), np.uint8)
        try:
            gguf.quants.dequantize(raw, kind)
        except NotImplementedError:
            continue
        kinds.append((kind, raw))
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(kinds) > 20
    with open_gguf(tmp_path / "a.gguf") as file:
        for kind, raw in kinds:
            tensor = file.tensors[kind.name]
            assert tensor.shape == (3, 512)
            expected = gguf.quants.dequantize(raw, kind)
            np.testing.assert_array_equal(file.values(tensor).reshape(3, 512), expected)


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_model_in_parts_is_the_whole_one(tmp_path, empty_first):
    split = {"split_max_tensors": 8, "small_first_shard": empty_first}
    content = gguf_metadata(), gguf_tensors(), "Q8_0"
    whole = load_model(write_gguf(tmp_path / "whole.gguf", *content))
    first = write_gguf(tmp_path / "a.gguf", *content, **split)
    with open_gguf(first) as file:
        assert len(file.tensors) == (0 if empty_first else 8)
    with open_parts(first) as file:
        assert len(file.tensors) == 20
        assert len(open_files(tmp_path)) == (4 if empty_first else 3)
    parts = load_model(first)
    assert not open_files(tmp_path)
    assert parts.config == whole.config
    assert parts.tokenizer.backend.to_str() == whole.tokenizer.backend.to_str()
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
