"""Small GGUF files for tests: a random model with a byte-level tokenizer, and damaged copies."""

import re
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from specjax.loading.formats import parameter_names, tensor_layout
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.load import random_model
from specjax.models.config import DecoderConfig

TABLE = LLAMA.gguf.tensors
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "in"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n"]
CONFIG = DecoderConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=128,
    tie_word_embeddings=True,
)


def metadata(config=CONFIG):
    """The keys of a plain file, but for the architecture."""
    return {
        "llama.block_count": np.uint32(config.num_layers),
        "llama.context_length": np.uint32(config.max_positions),
        "llama.embedding_length": np.uint32(config.hidden_size),
        "llama.feed_forward_length": np.uint32(config.intermediate_size),
        "llama.attention.head_count": np.uint32(config.num_heads),
        "llama.attention.head_count_kv": np.uint32(config.num_kv_heads),
        "llama.attention.key_length": np.uint32(config.head_dim),
        "llama.attention.layer_norm_rms_epsilon": np.float32(config.rms_norm_eps),
        "llama.rope.freq_base": np.float32(config.rope_theta),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
    }


def tensors(config=CONFIG, seed=0):
    """Every tensor of a random model, as the file names and lays them out."""
    params = random_model(config, seed, dtype="float32").params
    found = {}
    for location in parameter_names.locations(TABLE, config):
        leaf = np.asarray(parameter_names.lookup(params, location.entry.path))
        value = leaf if location.layer is None else leaf[location.layer]
        found[location.name] = np.ascontiguousarray(tensor_layout.to_stored(value, location))
    return found


def converted(tensors, architecture, config):
    """Tensors of Hugging Face's layout with the names and rows of llama.cpp's converter."""
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers + 1)
    whole, experts = {}, {}
    for name, value in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
        else:
            whole[name.replace("e_score_correction_bias", "e_score_correction.bias")] = value
    for name, parts in experts.items():
        whole[name] = np.stack([parts[expert] for expert in range(len(parts))])
    found = {}
    for name, value in whole.items():
        if "gemma" in architecture and name.endswith("norm.weight"):
            value = value + 1
        if architecture == "gpt2" and value.ndim == 2 and ".h." in name:
            value = value.T
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            # Of each head the rows 0, C/2, 1, C/2 + 1, ...
            halves = value.reshape(-1, 2, config.head_dim // 2, value.shape[-1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return found


def write(path, keys, arrays, kind="F32", architecture="llama", **split):
    """Write a file with the matrices quantised to `kind` and the vectors in float32.

    `split` says how the writer splits it into parts, and the path of the first comes out.
    """
    writer = gguf.GGUFWriter(path, architecture, **split)
    for key, value in keys.items():
        _add(writer, key, value)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, array in arrays.items():
        if array.ndim == 1 or array.dtype != np.float32:
            writer.add_tensor(name, array)
        else:
            raw = gguf.quants.quantize(array, quantised)
            writer.add_tensor(name, raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(Path(path))[0]


def _add(writer, key, value):
    match value:
        case np.uint32():
            writer.add_uint32(key, int(value))
        case np.float32():
            writer.add_float32(key, float(value))
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
