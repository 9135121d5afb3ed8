"""Damaged model files are refused or loaded: no other exception, no hang, no flood of memory."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bad_input import TEXTS, changed, examples, outcome
from hypothesis import given
from hypothesis import strategies as st
from model_files import GGUF_CONFIG, gguf_metadata, gguf_tensors, write_gguf
from tiny_models import eagle_head, noisy_medusa_head

from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.loading.formats import gguf
from specjax.loading.formats.families import registry
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.formats.gguf_parts import open_parts
from specjax.loading.formats.huggingface import read_headers, read_params
from specjax.loading.formats.huggingface_config import read_config
from specjax.loading.tokenizers.gguf_tokenizer import read_tokenizer
from specjax.loading.tokenizers.huggingface_tokenizer import (
    read_tokenizer as read_directory_tokenizer,
)
from specjax.methods.published_layouts import read_foreign, write_foreign
from specjax.methods.saved_heads import read_head, save_head

GOLDENS = Path(__file__).parent / "goldens"
CONFIG = dataclasses.replace(
    GGUF_CONFIG, hidden_size=16, intermediate_size=16, num_layers=1, head_dim=4
)
INTERESTING = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The bytes of a small intact file, and where its header ends."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, gguf_metadata(CONFIG), gguf_tensors(CONFIG))
    with open_gguf(path) as file:
        end = min(tensor.offset for tensor in file.tensors.values())
    return path.read_bytes(), end


def load_gguf(path):
    """What `load_model` does with a file, without placing the weights on a device."""
    with open_parts(path) as file:
        gguf.family_of(file)
        tokenizer = read_tokenizer(str(path), file.metadata)
        config, modules = gguf.read_config(file, tokenizer.vocab_size)
        gguf.read_params(file, config, np.dtype(np.float32), mtp=modules)


def test_the_undamaged_file_loads(pristine, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(pristine[0])
    load_gguf(path)


@examples(80)
@given(data=st.data())
def test_truncated_gguf_files(pristine, tmp_path, data):
    content, end = pristine
    path = tmp_path / "a.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, end + 100))])
    with pytest.raises(InputError):
        load_gguf(path)
    outcome(lambda: load_gguf(path), memory=4_000_000)


@examples(80)
@given(data=st.data())
def test_gguf_files_with_flipped_header_bytes(pristine, tmp_path, data):
    content, end = pristine
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.gguf"
    path.write_bytes(damaged)
    outcome(lambda: load_gguf(path), memory=4_000_000)


@examples(80)
@given(data=st.data())
def test_gguf_files_with_hostile_numbers(pristine, tmp_path, data):
    """Every count, length and offset is some aligned or unaligned 8 bytes of the header."""
    content, end = pristine
    at = data.draw(st.integers(0, end - 8))
    damaged = bytearray(content)
    damaged[at : at + 8] = data.draw(INTERESTING).to_bytes(8, "little")
    path = tmp_path / "a.gguf"
    path.write_bytes(damaged)
    outcome(lambda: load_gguf(path), memory=4_000_000)


@examples(80)
@given(tail=st.binary(max_size=400), tensors=INTERESTING, keys=INTERESTING)
def test_random_bytes_after_a_gguf_preamble(tmp_path, tail, tensors, keys):
    path = tmp_path / "a.gguf"
    counts = tensors.to_bytes(8, "little") + keys.to_bytes(8, "little")
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + counts + tail)
    outcome(lambda: load_gguf(path), memory=1_000_000)


def load_directory(path):
    tokenizer = read_directory_tokenizer(path)
    config, _ = read_config(path, None if tokenizer is None else tokenizer.vocab_size)
    stored = read_headers(path, registry.family(config.family))
    read_params(path, stored, config, np.dtype(np.float32))
    return tokenizer


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(GOLDENS / "grouped_tied", tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"],
)
@examples(20)
@given(data=st.data())
def test_changed_json_files(directory, name, data):
    path = directory / name
    content = json.loads((GOLDENS / "grouped_tied" / name).read_text())
    path.write_text(json.dumps(data.draw(changed(content))))
    tokenizer = outcome(lambda: load_directory(directory), memory=8_000_000)
    if tokenizer is not None:
        outcome(lambda: use(tokenizer), memory=8_000_000)


def use(tokenizer):
    ids = tokenizer.encode("Hello, wörld  42 \n<|im_end|> x")
    return tokenizer.decode([*ids, 0, tokenizer.vocab_size - 1])


@examples(20)
@given(data=st.data())
def test_changed_safetensors_headers(directory, data):
    raw = (GOLDENS / "grouped_tied" / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(data.draw(changed(json.loads(raw[8:end])))).encode()
    size = data.draw(st.just(len(header)) | INTERESTING)
    path = directory / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + header + raw[end:])
    outcome(lambda: load_directory(directory), memory=8_000_000)


@examples(20)
@given(data=st.data())
def test_changed_indices_of_shards(tmp_path, data):
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(GOLDENS / "biased_untied", directory)
    name = "model.safetensors.index.json"
    content = json.loads((GOLDENS / "biased_untied" / name).read_text())
    (directory / name).write_text(json.dumps(data.draw(changed(content))))
    outcome(lambda: load_directory(directory), memory=8_000_000)


@examples(20)
@given(data=st.data())
def test_safetensors_files_with_flipped_header_bytes(directory, data):
    path = directory / "model.safetensors"
    damaged = bytearray((GOLDENS / "grouped_tied" / path.name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    outcome(lambda: load_directory(directory), memory=8_000_000)


KINDS = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", None, None, "u8", "i8", "f8")
"""NumPy's name of each type of a GGUF value; 8 is a string and 9 an array."""


def encoded(value):
    """A GGUF value, its type in front; of NumPy's types, str, bool, and lists of str or numbers."""
    if isinstance(value, list):
        items = [encoded(item) for item in value]
        # The type of the first item is that of all; others are then damage.
        kind = items[0][:4] if items else (4).to_bytes(4, "little")
        content = b"".join(item[4:] for item in items)
        return (9).to_bytes(4, "little") + kind + len(items).to_bytes(8, "little") + content
    if isinstance(value, str):
        content = value.encode("utf-8", "surrogatepass")
        return (8).to_bytes(4, "little") + len(content).to_bytes(8, "little") + content
    if type(value) is int:
        value = np.int64(value)
    value = np.asarray(value)
    kind = KINDS.index("?" if value.dtype == bool else value.dtype.str[1:])
    return kind.to_bytes(4, "little") + value.tobytes()


def write_keys(path, keys):
    """A file without tensors: what is read before the weights is what the keys are for."""
    pairs = b"".join(encoded(key)[4:] + encoded(value) for key, value in keys.items())
    preamble = b"GGUF\x03\x00\x00\x00" + bytes(8) + len(keys).to_bytes(8, "little")
    path.write_bytes(preamble + pairs)


@pytest.mark.parametrize("value", [[], ["llama"], np.uint32(1), "llama2"])
def test_an_architecture_that_is_none(tmp_path, value):
    path = tmp_path / "a.gguf"
    write_keys(path, {"general.architecture": value, **gguf_metadata(CONFIG)})
    with pytest.raises(InputError, match=r"general\.architecture="):
        load_gguf(path)


SCALARS = st.one_of(
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, 80, 2**31, 2**40, 2**63 - 1, -1]).map(np.int64),
    st.sampled_from([0, 1, 2, 64, 2**32 - 1]).map(np.uint32),
    st.sampled_from([2**64 - 1, 2**40]).map(np.uint64),
    st.sampled_from([0.0, 1e-5, 1e30, -1.0, float("inf"), float("nan")]).map(np.float32),
    st.sampled_from([1e300, 1e-300, float("nan")]).map(np.float64),
    TEXTS,
    st.sampled_from(["gpt2", "llama", "default", "qwen2", "linear", "none", "{{ 1 }}"]),
)


@examples(40)
@given(data=st.data())
def test_gguf_metadata_of_any_type(tmp_path, data):
    """Every key is there with its type, but for a few that are of another, missing or new."""
    path = tmp_path / "a.gguf"
    keys = {"general.architecture": "llama", **gguf_metadata(CONFIG)}
    optional = ["llama.rope.scaling.factor", "llama.rope.scaling.type", "tokenizer.chat_template"]
    optional += ["llama.expert_count", "tokenizer.ggml.add_bos_token", "general.alignment"]
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*keys, *optional]))
        value = data.draw(st.none() | SCALARS | st.lists(SCALARS, max_size=3))
        keys.pop(key, None)
        if value is not None:
            keys[key] = value
    write_keys(path, keys)
    outcome(lambda: load_gguf(path), memory=4_000_000)


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """A drafter in each layout of other tools, as it should be."""
    folder = tmp_path_factory.mktemp("heads")
    for form in ("eagle3", "speculators", "medusa"):
        head = noisy_medusa_head(tiny) if form == "medusa" else eagle_head(tiny)
        write_foreign(head, folder / form, form, tiny)
    return folder


@examples(20)
@given(data=st.data())
def test_changed_configs_of_heads(exported, tiny, tmp_path, data):
    form = data.draw(st.sampled_from(["eagle3", "speculators", "medusa"]))
    directory = shutil.copytree(exported / form, tmp_path / form, dirs_exist_ok=True)
    content = json.loads((exported / form / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data.draw(changed(content))))
    outcome(lambda: read_foreign(directory, tiny))


@pytest.fixture(scope="module")
def own_heads(tiny, tmp_path_factory):
    """A head as specjax saves it, and one in 8 bits."""
    folder = tmp_path_factory.mktemp("own heads")
    save_head(eagle_head(tiny), folder / "float")
    save_head(eagle_head(tiny, vocabulary=40), folder / "compact", compact=True)
    return folder


@pytest.mark.parametrize("kind", ["float", "compact"])
@examples(20)
@given(data=st.data())
def test_changed_heads_with_checksums_to_match(own_heads, kind, tmp_path, data):
    directory = shutil.copytree(own_heads / kind, tmp_path / kind, dirs_exist_ok=True)
    if data.draw(st.booleans()):
        path = directory / "specjax_checkpoint.json"
        path.write_text(json.dumps(data.draw(changed(json.loads(path.read_text())))))
    else:
        path = directory / "model.safetensors"
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.dumps(data.draw(changed(json.loads(raw[8:end])))).encode()
        size = data.draw(st.just(len(header)) | INTERESTING)
        path.write_bytes(size.to_bytes(8, "little") + header + raw[end:])
    folder_checksums.seal(directory, "drafter")
    outcome(lambda: read_head(directory))
