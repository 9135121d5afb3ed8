"""GGUF files: what was written is what is loaded, and bad files are one-line errors."""

import contextlib
import dataclasses
import struct
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import (
    GGUF_CONFIG,
    GGUF_TABLE,
    GGUF_TOKENS,
    gguf_metadata,
    gguf_tensors,
    refusal,
    write_gguf,
)

from specjax.loading.formats import parameter_names, tensor_layout
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
        leaf = parameter_names.lookup(model.params, location.entry.path)
        value = leaf if location.layer is None else leaf[location.layer]
        np.testing.assert_array_equal(value, tensor_layout.from_stored(stored, location))


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
    assert kernel[0, 0].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    assert kernel[0, 1].tolist() == [*range(16, 32, 2), *range(17, 32, 2)]
    np.testing.assert_array_equal(tensor_layout.to_stored(kernel, location), rows)


def test_rows_beyond_the_vocabulary_are_truncated(tmp_path):
    arrays = gguf_tensors()
    padding = np.full((7, GGUF_CONFIG.hidden_size), 9, np.float32)
    padded = arrays | {"token_embd.weight": np.vstack([arrays["token_embd.weight"], padding])}
    plain = write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays)
    wide = write_gguf(tmp_path / "b.gguf", gguf_metadata(), padded)
    first, second = (load_model(path) for path in (plain, wide))
    assert first.config == second.config
    np.testing.assert_array_equal(first.params["head"]["kernel"], second.params["head"]["kernel"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(tmp_path, dtype):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), "Q8_0")
    wide, narrow = load_model(path, dtype="float32"), load_model(path, dtype=dtype)
    for part in ("query", "output"):
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.expert_count": np.uint32(8)}, "expert_used_count=None: must be a whole number"),
        ({"llama.attention.sliding_window": np.uint32(64)}, "sliding_window=64"),
        ({"llama.rope.dimension_count": np.uint32(8)}, "rope.dimension_count=8"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.surprise": np.uint32(1)}, "llama.surprise"),
        ({"llama.block_count": np.uint32(60_000)}, "60000 layers"),
        ({"llama.block_count": np.uint32(2**32 - 1)}, "num_layers=4294967295: must be"),
        ({"llama.context_length": np.uint32(2**32 - 1)}, "max_positions=4294967295: must be"),
        ({"llama.rope.freq_base": np.float32(1e30)}, "rope.freq_base=1e+30: must be"),
        ({"tokenizer.chat_template": np.uint32(5)}, "tokenizer.chat_template=5: use a text"),
        ({"tokenizer.chat_template": True}, "tokenizer.chat_template=True: use a text"),
        ({"tokenizer.chat_template": ["x"]}, "tokenizer.chat_template=['x']: use a text"),
        ({"llama.block_count": np.uint32(3)}, "missing: blk.2.attn_norm.weight"),
        ({"llama.block_count": np.uint32(1)}, "unexpected: blk.1."),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.embedding_length": np.uint32(0)}, "hidden_size=0"),
        ({"llama.embedding_length": np.uint32(128)}, "mis-shaped"),
        ({"llama.attention.head_count": np.uint32(3)}, "num_heads=3"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": np.float32("nan")}, "epsilon=nan: must be"),
        ({"llama.context_length": None}, "llama.context_length=None: must be a whole number"),
        ({"general.alignment": np.uint32(0)}, "general.alignment=0"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre='klingon'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens=None: must be"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": ["x y"]}, "inconsistent"),
        ({"tokenizer.ggml.merges": ["in"]}, "not two tokens"),
        ({"tokenizer.ggml.eos_token_id": np.uint32(10**6)}, "eos_token_id=1000000"),
        ({"tokenizer.ggml.tokens": ["a", *GGUF_TOKENS[1:]]}, "'a' appears twice"),
    ],
)
def test_unsupported_and_contradictory_metadata_are_refused_by_name(tmp_path, change, words):
    keys = gguf_metadata() | change
    keys = {key: value for key, value in keys.items() if value is not None}
    path = write_gguf(tmp_path / "a.gguf", keys, gguf_tensors())
    assert words in refusal(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf",
        gguf_metadata(),
        gguf_tensors(),
        architecture="mamba",
    )
    message = refusal(path)
    assert "'mamba'" in message
    assert "'llama'" in message


def test_tensors_that_do_not_fit_are_listed_together(tmp_path):
    arrays = gguf_tensors()
    del arrays["blk.0.attn_q.weight"]
    arrays["blk.0.surprise.weight"] = np.zeros(32, np.float32)
    arrays["blk.1.ffn_norm.weight"] = np.zeros(63, np.float32)
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays))
    assert "missing: blk.0.attn_q.weight" in message
    assert "unexpected: blk.0.surprise.weight" in message
    assert "mis-shaped: blk.1.ffn_norm.weight [63], not [64]" in message


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path):
    arrays = gguf_tensors()
    arrays["output_norm.weight"] = np.zeros(64, np.int32)
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata(), arrays))
    assert "output_norm.weight has the ggml type I32" in message


def header(version=3, tensors=0, keys=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


def array_key(kind, count):
    return text(b"key") + struct.pack("<IIQ", 9, kind, count)


def tensor(shape, kind=0, offset=0):
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(b"t") + axes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"GG", "no GGUF magic"),
        (b"PK\x03\x04 a zip file", "no GGUF magic"),
        (b"GGUF\x03\x00", "truncated"),
        (header(version=1), "version 1"),
        (header(version=99), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (header(tensors=2**63), "claims 9223372036854775808 tensors"),
        (header(keys=2**40), "claims 1099511627776 keys"),
        (header(keys=1, rest=struct.pack("<Q", 2**62) + b"x" * 20), "truncated"),
        (header(keys=1, rest=array_key(4, 2**61)), "truncated"),
        (header(keys=1, rest=array_key(8, 2**61)), "claims 2305843009213693952 strings"),
        (
            header(keys=1, rest=array_key(8, 1) + struct.pack("<Q", 99)),
            "truncated: a string of the key",
        ),
        (header(keys=1, rest=array_key(9, 1) + b"x" * 40), "unknown value type 9"),
        (header(keys=1, rest=text(b"key") + struct.pack("<I", 77)), "unknown value type 77"),
        (header(keys=1, rest=text(b"\xff\xfe") + b"x" * 8), "not UTF-8"),
        (header(keys=2, rest=(text(b"k") + struct.pack("<IB", 0, 1)) * 2), "appears twice"),
        (header(tensors=1, rest=tensor((2**40, 2**40))), "truncated"),
        (header(tensors=1, rest=tensor((2**63, 2**63, 2**63, 2**63))), "truncated"),
        (header(tensors=1, rest=tensor((1,) * 5)), "has 5 axes"),
        (header(tensors=1, rest=tensor((32,), kind=999)), "unknown ggml type 999"),
        (header(tensors=1, rest=tensor((33,), kind=2)), "rows of 33 values"),
        (header(tensors=1, rest=tensor((8,), offset=2**62)), "truncated"),
        (header(tensors=1, rest=tensor((8,), offset=3) + b"x" * 99), "truncated"),
        (header(tensors=2, rest=tensor((0,)) * 2 + b"x" * 99), "appears twice"),
    ],
)
def test_a_damaged_header_is_an_error(tmp_path, content, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert words in refusal(path)


def test_a_file_truncated_in_its_weights_says_where_it_ends(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors())
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    message = refusal(path)
    assert "truncated" in message
    assert str(len(whole) - 100) in message


def write_parts(folder, arrays=None, size=8):
    """The paths of the parts of a small model, `size` tensors in each; three by default."""
    folder.mkdir()
    arrays = arrays or gguf_tensors()
    write_gguf(folder / "a.gguf", gguf_metadata(), arrays, split_max_tensors=size)
    return sorted(folder.iterdir())


def open_files(folder):
    """The files in a folder that this process has open."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(descriptor.readlink())
    return [path for path in opened if path.is_relative_to(folder)]


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


def remove(parts, folder):
    parts[1].unlink()


def swap(index, other_index, **options):
    """A part in the place of one of another split of the model, or of the model in one file."""

    def damage(parts, folder):
        others = write_parts(folder / "other", **options)
        parts[index].write_bytes(others[other_index].read_bytes())

    return damage


def put_a_whole_file(parts, folder):
    write_gguf(parts[1], gguf_metadata(), gguf_tensors())


def truncate(parts, folder):
    parts[2].write_bytes(parts[2].read_bytes()[:-100])


ARRAYS = gguf_tensors()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "its part a-00002-of-00003.gguf is missing"),
        (swap(1, 2), "a-00002-of-00003.gguf has split.no=2 and split.count=3, not 1 and 3"),
        (swap(1, 1, size=4), "a-00002-of-00003.gguf has split.no=1 and split.count=5, not 1 and 3"),
        (
            swap(2, 2, arrays=dict(reversed(ARRAYS.items()))),
            "is in a-00003-of-00003.gguf and in a part before it",
        ),
        (
            swap(2, 2, arrays=dict(list(ARRAYS.items())[:-1])),
            "hold 19 tensors, not split.tensors.count=20",
        ),
        (put_a_whole_file, "a-00002-of-00003.gguf: split.no=None: must be a whole number"),
        (truncate, "a-00003-of-00003.gguf: GGUF truncated"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, damage, words):
    parts = write_parts(tmp_path / "model")
    damage(parts, tmp_path)
    assert words in refusal(parts[0])
    assert not open_files(tmp_path)


def test_another_part_than_the_first_names_the_first(tmp_path):
    parts = write_parts(tmp_path / "model")
    assert "split.no=1, so it is not the first part; load a-00001-of-" in refusal(parts[1])


def test_a_part_of_another_name_is_refused(tmp_path):
    renamed = write_parts(tmp_path / "model")[0].rename(tmp_path / "a.gguf")
    assert "its name does not end in -00001-of-00003.gguf" in refusal(renamed)
