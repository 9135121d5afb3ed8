"""GGUF files of models with experts: merged tensors, defaults of keys, MTP modules, bad files."""

import dataclasses
import json

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from heads import noisy
from safetensors.numpy import load_file, save_file
from test_gguf_families import config_of, write

from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.loading.formats import mtp_layers, parameter_names, tensor_layout
from specjax.loading.formats.families import registry
from specjax.loading.load import load_model, random_model, save_model
from specjax.models.config import Experts
from specjax.models.decoder import Form

GLM = config_of("glm4_moe")


def tensors_of(config, seed=0):
    """A random model's tensors as its file has them."""
    params = random_model(config, seed, dtype="float32").params
    return tensor_layout.stored_tensors(registry.family(config.family).gguf.tensors, config, params)


@pytest.mark.parametrize("how", ["stacked", *slow("unrolled", "mesh")])
def test_each_expert_is_dequantised_into_its_place(tmp_path, how):
    config = dataclasses.replace(
        config_of("mixtral"), head_dim=16, intermediate_size=64, experts=Experts(4, 2, 64)
    )
    arrays = tensors_of(config)
    path = tmp_path / "a.gguf"
    keys = {"llama.expert_count": np.uint32(4)}
    write(path, config, arrays, keys, kind="Q8_0")
    options = {
        "stacked": {},
        "unrolled": {"form": Form("unrolled")},
        "mesh": {"mesh": sharding.make_mesh(1, 2, jax.devices()[:2])},
    }[how]
    layers = load_model(path, dtype="float32", **options).params["layers"]
    kind = gguf.GGMLQuantizationType.Q8_0
    for part in ("gate", "up", "down"):
        for layer in range(config.num_layers):
            stored = arrays[f"blk.{layer}.ffn_{part}_exps.weight"]
            expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
            kernel = (
                layers[str(layer)]["mlp"]["experts"][part]["kernel"]
                if how == "unrolled"
                else layers["mlp"]["experts"][part]["kernel"][layer]
            )
            assert expected.shape[0] == 4
            np.testing.assert_array_equal(kernel, expected.swapaxes(1, 2))


def test_keys_that_are_missing_mean_what_they_do_in_llama_cpp(tmp_path):
    """No division by the sum, no scale (nor by 0), no groups, no dense layers."""
    experts = dataclasses.replace(
        GLM.experts, normalize=False, scale=1.0, groups=1, groups_per_token=1, num_dense=0
    )
    config = dataclasses.replace(GLM, experts=experts)
    missing = (
        "expert_gating_func",
        "expert_weights_norm",
        "expert_group_count",
        "expert_group_used_count",
        "leading_dense_block_count",
    )
    change = {f"glm4moe.{name}": None for name in missing}
    change["glm4moe.expert_weights_scale"] = np.float32(0)
    assert load_model(write(tmp_path / "a.gguf", config, change=change)).config == config


@pytest.fixture(scope="module")
def announced(tmp_path_factory):
    """A directory of Hugging Face's layout with an MTP module, and its tensors."""
    folder = tmp_path_factory.mktemp("glm")
    family = registry.family("glm4_moe")
    save_model(random_model(GLM, 0, dtype="float32"), folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    modules = mtp_layers.module_config(GLM, 1, family.mtp)
    params = noisy(modules.parameter_table(), 1, 1.0)
    for location in mtp_layers.locations(GLM, modules, family.mtp, family.tensors):
        path, index = location.within(scan_layers=True)
        value = np.asarray(parameter_names.lookup(params, path))[index]
        tensors[location.name] = np.ascontiguousarray(tensor_layout.to_stored(value, location))
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"]
    (folder / "whole").mkdir()
    save_file(tensors, folder / "whole" / "model.safetensors")
    fields = json.loads((folder / "plain" / "config.json").read_text())
    text = json.dumps(fields | {"num_nextn_predict_layers": 1})
    (folder / "whole" / "config.json").write_text(text)
    return folder / "whole", gguf_files.converted(tensors, "glm4moe", GLM)


MODULES = {"glm4moe.block_count": np.uint32(5), "glm4moe.nextn_predict_layers": np.uint32(1)}


def module_layer(model):
    """The layer of its module."""
    return model.mtp.params["modules"]["0"]["layer"]


def test_modules_are_those_of_the_other_layout(announced, tmp_path):
    directory, arrays = announced
    theirs = load_model(directory, dtype="float32")
    mine = load_model(write(tmp_path / "a.gguf", GLM, arrays, MODULES), dtype="float32")
    assert mine.config == theirs.config == GLM
    assert mine.mtp.config == theirs.mtp.config
    jax.tree.map(np.testing.assert_array_equal, mine.arrays, theirs.arrays)
    half = load_model(tmp_path / "a.gguf", dtype="bfloat16")
    for one, other in (
        (half.params["layers"], mine.params["layers"]),
        (module_layer(half), module_layer(mine)),
    ):
        router, whole = one["mlp"]["router"], other["mlp"]["router"]
        assert router["kernel"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(router["selection_bias"], whole["selection_bias"])


def test_modules_are_whole_and_share_embedding_and_head(announced, tmp_path):
    _, arrays = announced
    name = "blk.4.nextn.shared_head_head.weight"
    with pytest.raises(InputError, match=f"{name} differs from output.weight"):
        load_model(write(tmp_path / "a.gguf", GLM, arrays | {name: arrays[name] + 1}, MODULES))
    without = {key: value for key, value in arrays.items() if key != "blk.4.nextn.eh_proj.weight"}
    with pytest.raises(InputError, match=r"missing: blk\.4\.nextn\.eh_proj\.weight\)"):
        load_model(write(tmp_path / "b.gguf", GLM, without, MODULES))
    with pytest.raises(InputError, match=r"unexpected: blk\.4\."):
        load_model(write(tmp_path / "c.gguf", GLM, arrays))


def test_modules_that_a_tool_dropped(announced, tmp_path, caplog):
    directory, arrays = announced
    without = {key: value for key, value in arrays.items() if not key.startswith("blk.4.")}
    path = write(tmp_path / "a.gguf", GLM, without, MODULES)
    model = load_model(path, dtype="float32")
    assert model.mtp is None
    (line,) = caplog.messages
    assert line.startswith(f"{path}: MTP modules are announced (1), and their tensors are not")
    theirs = load_model(directory, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, theirs.params)


def one_by_one(arrays):
    """As files were before llama.cpp merged experts."""
    merged = arrays.pop("blk.0.ffn_gate_exps.weight")
    return arrays | {
        f"blk.0.ffn_gate.{index}.weight": value.copy() for index, value in enumerate(merged)
    }


def without_up(arrays):
    return {name: value for name, value in arrays.items() if "ffn_up_exps" not in name}


def unchanged(arrays):
    return arrays


@pytest.mark.parametrize(
    ("name", "change", "edit", "words"),
    [
        ("mixtral", {}, one_by_one, "blk.0.ffn_gate.0.weight is of one expert"),
        ("mixtral", {}, without_up, "missing: blk.0.ffn_up_exps.weight, blk.1"),
        ("mixtral", {"expert_count": None}, unchanged, "unexpected: blk.0.ffn_down_exps.weight"),
        ("mixtral", {"expert_count": np.uint32(4)}, unchanged, "mis-shaped"),
        ("mixtral", {"expert_weights_scale": np.float32(2)}, unchanged, "is unknown"),
        ("qwen3_moe", {"expert_gating_func": np.uint32(2)}, unchanged, "gating_func=2: is not"),
        ("qwen3_moe", {"expert_count": np.uint32(0)}, unchanged, "experts.num_experts=0"),
        ("qwen3_moe", {"expert_used_count": np.uint32(7)}, unchanged, "experts.per_token=7"),
        ("qwen3_moe", {"expert_feed_forward_length": None}, unchanged, "length=None: must be"),
        ("qwen3_moe", {"nextn_predict_layers": np.uint32(1)}, unchanged, "is unknown"),
        ("glm4_moe", {"expert_gating_func": np.uint32(3)}, unchanged, "gating_func=3: is not"),
        ("glm4_moe", {"expert_group_count": np.uint32(3)}, unchanged, "experts.groups=3"),
        ("glm4_moe", {"nextn_predict_layers": np.uint32(4)}, unchanged, "num_layers=0"),
        ("glm4_moe", {"nextn_predict_layers": np.uint32(2)}, unchanged, "missing: blk.2.nextn."),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, change, edit, words):
    config = config_of(name)
    architecture = registry.family(name).gguf.architecture
    change = {f"{architecture}.{key}": value for key, value in change.items()}
    path = write(tmp_path / "a.gguf", config, edit(tensors_of(config)), change)
    with pytest.raises(InputError) as error:
        load_model(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
