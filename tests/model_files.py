"""Files of models and heads in other tools' formats, intact or damaged."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from specjax.errors import InputError
from specjax.files.folder_checksums import MARKER
from specjax.loading.formats import tensor_layout
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.load import load_model, random_model
from specjax.methods.published_layouts import write_foreign
from specjax.models.config import DecoderConfig

GOLDENS = Path(__file__).parent / "goldens"
WEIGHTS = "model.safetensors"


def edit_json(path, **fields):
    """Merge fields into a JSON file; None removes a field."""
    content = json.loads(path.read_text()) | fields
    removed = {key for key, value in fields.items() if value is None}
    path.write_text(json.dumps({key: content[key] for key in content if key not in removed}))


def edit_tensors(path, change):
    """Replace the tensors of a safetensors file by the result of `change`."""
    save_file(change(dict(load_file(path))), path)


def changed(source, folder, tensors=None, **fields):
    """Return a copy of a golden model with its config and tensors changed."""
    path = Path(shutil.copytree(GOLDENS / source, folder / "model"))
    edit_json(path / "config.json", **fields)
    if tensors is not None:
        edit_tensors(path / WEIGHTS, tensors)
    return path


def without(*starts):
    """Return a change of tensors that drops those whose names begin with one of `starts`."""
    return lambda tensors: {
        name: value for name, value in tensors.items() if not name.startswith(starts)
    }


def refusal(source):
    """Return the message of the error that loading raises.

    It must be one printable line that names the source.
    """
    with pytest.raises(InputError) as caught:
        load_model(source)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert str(source) in message
    return message


def written_head(tmp_path, head, form, target, **options):
    path = tmp_path / "head"
    write_foreign(head, path, form, target, **options)
    return path


def edit_head(path, config=None, tensors=None, drop=()):
    """Change the config and tensors of an exported head, as another tool or an accident might."""
    values = json.loads((path / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps(values))
    (file,) = path.glob("*.safetensors")
    # Saving drops the notes of specjax, and it is no longer what specjax wrote.
    (path / MARKER).unlink(missing_ok=True)
    stored = {name: value for name, value in load_file(file).items() if name not in drop}
    stored |= {name: np.ascontiguousarray(value) for name, value in (tensors or {}).items()}
    save_file(stored, file)


GGUF_TABLE = LLAMA.gguf.tensors
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GGUF_TOKENS = [*_SPECIAL, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "in"]
_MERGES = ["Ġ t", "h e", "Ġt he", "i n"]
GGUF_CONFIG = DecoderConfig(
    vocab_size=len(GGUF_TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=128,
    tie_word_embeddings=True,
)


def gguf_metadata(config=GGUF_CONFIG):
    """Return the metadata of a plain GGUF file, without the architecture."""
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
        "tokenizer.ggml.tokens": GGUF_TOKENS,
        "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (len(GGUF_TOKENS) - len(_SPECIAL)),
        "tokenizer.ggml.merges": _MERGES,
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
    }


def gguf_tensors(config=GGUF_CONFIG, seed=0):
    """Return the tensors of a random model with the names and layout of a GGUF file."""
    params = random_model(config, seed, dtype="float32").params
    return tensor_layout.stored_tensors(GGUF_TABLE, config, params)


def gguf_converted(tensors, architecture, config):
    """Return tensors in Hugging Face's layout with the names and rows of llama.cpp's converter."""
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers + 1)
    whole, experts = {}, {}
    for name, value in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
        else:
            whole[name.replace("e_score_correction_bias", "e_score_correction.bias")] = value
    for name in [name for name in whole if "experts.gate_up_proj" in name]:
        value = whole.pop(name)
        whole[name.replace("gate_up_proj", "gate_proj")] = value[..., 0::2]
        whole[name.replace("gate_up_proj", "up_proj")] = value[..., 1::2]
    for name, parts in experts.items():
        whole[name] = np.stack([parts[expert] for expert in range(len(parts))])
    if config.recurrence is not None:
        whole = dict(_recurrent(whole, architecture, config))
    found = {}
    for name, value in whole.items():
        if "gemma" in architecture and name.endswith("norm.weight"):
            value = value + 1
        if architecture == "gpt2" and value.ndim == 2 and ".h." in name:
            value = value.T
        paired = architecture in ("llama", "smollm3", "granite")
        if paired and ("q_proj" in name or "k_proj" in name):
            # Of each head the rows 0, C/2, 1, C/2 + 1, ...
            halves = value.reshape(-1, 2, config.head_dim // 2, value.shape[-1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if architecture == "gpt-oss" and ".experts." in name:
            name = name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight"
            value = np.swapaxes(value, 1, 2) if value.ndim == 3 else value
        elif name.endswith(".sinks"):
            name += ".weight"
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return found


def _heads_apart(name, value, recurrence):
    """Return a tensor of Qwen3.5 with the value heads of all key heads in turn."""
    groups, keys = recurrence.key_heads, 2 * recurrence.key_heads * recurrence.key_width
    if ".in_proj_qkv." in name or ".conv1d." in name:
        values = _heads_apart("in_proj_z", value[keys:], recurrence)
        return np.concatenate([value[:keys], values])
    if ".out_proj." in name:
        return _heads_apart("in_proj_z", value.T, recurrence).T
    if name.endswith(".norm.weight"):
        return value
    heads = value.reshape(groups, recurrence.value_heads // groups, -1, *value.shape[1:])
    return heads.swapaxes(0, 1).reshape(value.shape)


def _recurrent(tensors, architecture, config):
    """Yield the tensors of a hybrid model with the names and shapes that the converter maps."""
    recurrence = config.recurrence
    is_qwen = architecture in ("qwen3next", "qwen35", "qwen35moe")
    groups, shared = recurrence.key_heads, recurrence.value_heads // recurrence.key_heads
    for name, value in tensors.items():
        if architecture == "nemotron_h":
            name = name.replace("model.", "backbone.")
        if architecture.startswith("qwen35") and "linear_attn." in name:
            value = _heads_apart(name, value, recurrence)
        if name.endswith(".A_log"):
            value = -np.exp(value)
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            value = value.squeeze(1)
        if is_qwen and name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + 1
        if not is_qwen and name.endswith((".A_log", ".D")):
            value = value[:, None]
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            value = value.reshape(groups, -1)
        if name.endswith("dt_bias"):
            name = name.removesuffix("_bias") + ("" if architecture == "nemotron_h" else "_proj")
            name += ".bias"
        start, _, last = name.rpartition(".in_proj_qkvz")
        if last and start:
            values = shared * recurrence.value_width
            ends = np.cumsum([recurrence.key_width, recurrence.key_width, values])
            blocks = np.split(value.reshape(groups, -1, value.shape[-1]), ends, axis=1)
            flat = [block.reshape(-1, value.shape[-1]) for block in blocks]
            yield f"{start}.in_proj_qkv{last}", np.concatenate(flat[:3])
            yield f"{start}.in_proj_z{last}", flat[3]
        elif "input_linear" in name:
            module = name.removesuffix(".input_linear.weight")
            gate, up = np.split(value, 2, axis=-2)
            kind = {"shared_mlp": "shared_experts", "block_sparse_moe": "experts"}
            start, _, last = module.rpartition(".")
            yield f"{start}.mlp.{kind[last]}.gate_proj.weight", gate
            yield f"{start}.mlp.{kind[last]}.up_proj.weight", up
        else:
            yield name, value


def write_gguf(path, keys, arrays, kind="F32", architecture="llama", kinds=None, **split):
    """Write a GGUF file with matrices quantized to `kind` and vectors in float32; return its path.

    `kinds` are those of some matrices, by name. `split` are options of the writer for several
    files, the first of which is returned.
    """
    writer = gguf.GGUFWriter(path, architecture, **split)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, array in arrays.items():
        if array.ndim == 1 or array.dtype != np.float32:
            writer.add_tensor(name, array)
        else:
            quantised = gguf.GGMLQuantizationType[(kinds or {}).get(name, kind)]
            raw = _quantized(array, quantised)
            writer.add_tensor(name, raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(Path(path))[0]


def _quantized(array, kind):
    """The blocks of an array or, for types that the package only reads, random ones."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        *lead, inputs = array.shape
        return random_blocks(kind.name, math.prod(lead), inputs, seed=inputs).reshape(*lead, -1)


_SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALES_AT |= {"Q4_1": (0, 2), "Q5_1": (0, 2)}


def random_blocks(kind, rows, inputs, seed):
    """Random blocks [rows, bytes] of a GGUF type, with weights of about one hundredth."""
    rng, floats = np.random.default_rng(seed), {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
    if kind in floats:
        return (rng.standard_normal((rows, inputs)) / 100).astype(floats[kind]).view(np.uint8)
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // size, block_bytes), np.uint8)
    for at in _SCALES_AT.get(kind, (0,)):
        scales = rng.uniform(0.5, 1, (*blocks.shape[:2], 1)) / (10_000 if size == 256 else 1000)
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


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


def open_files(folder):
    """Return the files in a folder that this process has open."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(descriptor.readlink())
    return [path for path in opened if path.is_relative_to(folder)]
