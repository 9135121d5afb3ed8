"""Damaged model files are refused or loaded: no other exception, no hang, no flood of memory."""

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path

import gguf_files
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.errors import InputError
from specjax.models import gguf
from specjax.models.gguf_header import open_gguf
from specjax.models.huggingface import read_params
from specjax.models.huggingface_config import read_config
from specjax.models.tokenizer_files import read_tokenizer as read_directory_tokenizer
from specjax.models.tokenizer_gguf import read_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
CONFIG = dataclasses.replace(
    gguf_files.CONFIG, hidden_size=16, intermediate_size=16, num_layers=1, head_dim=4
)
RELAXED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FEWER = settings(RELAXED, max_examples=30)
INTERESTING = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The bytes of a small intact file, and where its header ends."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf_files.write(path, gguf_files.metadata(CONFIG), gguf_files.tensors(CONFIG))
    with open_gguf(path) as file:
        end = min(tensor.offset for tensor in file.tensors.values())
    return path.read_bytes(), end


def load_gguf(path):
    """What `load_model` does with a file, without placing the weights on a device."""
    with open_gguf(path) as file:
        gguf.check_architecture(file)
        tokenizer = read_tokenizer(str(path), file.metadata)
        config = gguf.read_config(file, tokenizer.vocab_size)
        gguf.read_params(file, config, np.dtype(np.float32))


def outcome(load, path, limit):
    """Load a file; only an InputError may come out, and Python may take `limit` bytes."""
    message = ""
    tracemalloc.start()
    try:
        load(path)
    except InputError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < limit, f"{peak} bytes for a file of {path.stat().st_size}"


def test_the_undamaged_file_loads(pristine, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(pristine[0])
    load_gguf(path)


@RELAXED
@given(data=st.data())
def test_truncated_gguf_files(pristine, tmp_path, data):
    content, end = pristine
    path = tmp_path / "a.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, end + 100))])
    with pytest.raises(InputError):
        load_gguf(path)
    outcome(load_gguf, path, 4_000_000)


@RELAXED
@given(data=st.data())
def test_gguf_files_with_flipped_header_bytes(pristine, tmp_path, data):
    content, end = pristine
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.gguf"
    path.write_bytes(damaged)
    outcome(load_gguf, path, 4_000_000)


@RELAXED
@given(data=st.data())
def test_gguf_files_with_hostile_numbers(pristine, tmp_path, data):
    """Every count, length and offset is some aligned or unaligned 8 bytes of the header."""
    content, end = pristine
    at = data.draw(st.integers(0, end - 8))
    damaged = bytearray(content)
    damaged[at : at + 8] = data.draw(INTERESTING).to_bytes(8, "little")
    path = tmp_path / "a.gguf"
    path.write_bytes(damaged)
    outcome(load_gguf, path, 4_000_000)


@RELAXED
@given(tail=st.binary(max_size=400), tensors=INTERESTING, keys=INTERESTING)
def test_random_bytes_after_a_gguf_preamble(tmp_path, tail, tensors, keys):
    path = tmp_path / "a.gguf"
    counts = tensors.to_bytes(8, "little") + keys.to_bytes(8, "little")
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + counts + tail)
    outcome(load_gguf, path, 1_000_000)


def load_directory(path):
    tokenizer = read_directory_tokenizer(path)
    config = read_config(path, None if tokenizer is None else tokenizer.vocab_size)
    read_params(path, config, np.dtype(np.float32))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=5)
    | INTERESTING
    | st.sampled_from([10**400, "llama3", "linear", "longrope", "factor", "rope_type"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"],
)
@FEWER
@given(data=st.data())
def test_json_files_with_foreign_values(tmp_path, name, data):
    directory = tmp_path / "model"
    shutil.copytree(GOLDENS / "grouped_tied", directory, dirs_exist_ok=True)
    path = directory / name
    fields = json.loads(path.read_text())
    place = fields
    field = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[field], dict) and place[field] and data.draw(st.booleans()):
        place = place[field]
        field = data.draw(st.sampled_from(sorted(place)))
    place[field] = data.draw(VALUES)
    path.write_text(json.dumps(fields))
    outcome(load_directory, path.parent, 8_000_000)


@FEWER
@given(data=st.data())
def test_safetensors_files_with_flipped_header_bytes(tmp_path, data):
    directory = tmp_path / "model"
    shutil.copytree(GOLDENS / "grouped_tied", directory, dirs_exist_ok=True)
    path = directory / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    outcome(load_directory, directory, 8_000_000)
