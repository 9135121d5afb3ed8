"""Checkpoints as tools write them: other names, parts twice or left out, counts that are wrong."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from model_files import (
    GOLDENS,
    changed,
    edit_head,
    gguf_metadata,
    gguf_tensors,
    without,
    write_gguf,
    written_head,
)
from safetensors.numpy import load_file
from tiny_models import VOCABULARY, draft_logits, eagle_head, noisy_medusa_head

from specjax.distributed import device_memory
from specjax.distributed.sharding import make_mesh
from specjax.errors import InputError
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import load_model
from specjax.methods.published_layouts import read_foreign

GLM, MIMO, GPT2 = (GOLDENS / "families" / name for name in ("glm4_moe", "mimo", "gpt2"))
TIED, LLAMA = GOLDENS / "grouped_tied", GOLDENS / "llama3"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def said(caplog):
    """The lines that loading says, as a function."""
    return lambda: [record.message for record in caplog.records if record.name == "specjax"]


def same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one.params, other.params))


def dropped_line(path, count):
    return (
        f"{path}: MTP modules are announced ({count}), and their tensors are not there; "
        "loaded without them"
    )


@pytest.mark.parametrize(
    ("source", "dropped"), [(GLM, "model.layers.3."), (MIMO, "model.mtp_layers.")]
)
def test_modules_that_a_tool_dropped(source, dropped, tmp_path, said):
    path = changed(source, tmp_path, without(dropped))
    model = load_model(path, dtype="float32")
    assert said() == [dropped_line(path, 1)]
    assert model.mtp is None
    assert same(model, load_model(source, dtype="float32"))


def test_what_transformers_writes_of_a_model_with_modules(said):
    load_model(GOLDENS / "variants" / "glm4_moe", dtype="float32")
    assert said() == [dropped_line(GOLDENS / "variants" / "glm4_moe", 1)]


@pytest.mark.parametrize("count", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_family_without_modules_that_announces_some(count, tmp_path, said):
    path = changed(TIED, tmp_path, **{count: 2})
    assert same(load_model(path, dtype="float32"), load_model(TIED, dtype="float32"))
    assert said() == [dropped_line(path, 2)]


WRAPPED = {
    "base class": ("", ""),
    "part of a multimodal model": ("language_model.model.", "language_model."),
    "the same in transformers 5": ("model.language_model.", ""),
    "data parallel": ("module.model.", "module."),
    "compiled": ("_orig_mod.model.", "_orig_mod."),
    "peft": ("base_model.model.model.", "base_model.model."),
    "fsdp": ("_fsdp_wrapped_module.model.", ""),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("source", [LLAMA, GPT2])
def test_names_in_other_modules(source, name, tmp_path):
    base = "transformer." if source == GPT2 else "model."
    inside, before_head = (part.replace("model.model.", f"model.{base}") for part in WRAPPED[name])

    def renamed(tensors):
        return {
            before_head + key if key == HEAD else inside + key.removeprefix(base): value
            for key, value in tensors.items()
        }

    path = changed(source, tmp_path, renamed)
    assert same(load_model(path, dtype="float32"), load_model(source, dtype="float32"))


def test_a_name_with_and_without_its_module(tmp_path):
    def twice(tensors):
        tensors = {f"module.{name}": value for name, value in tensors.items()}
        return {**tensors, HEAD: tensors[f"module.{EMBEDDING}"].copy()} | {
            f"module.{HEAD}": tensors[f"module.{EMBEDDING}"].copy()
        }

    with pytest.raises(InputError, match="have the same meaning; delete one of them"):
        load_model(changed(TIED, tmp_path, twice))


def stored_head(dtype=None, drop=False, change=0.0):
    def change_tensors(tensors):
        head = tensors[EMBEDDING].astype(np.float32) + np.float32(change)
        tensors[HEAD] = head.astype(dtype or tensors[EMBEDDING].dtype)
        return without(EMBEDDING)(tensors) if drop else tensors

    return change_tensors


@pytest.mark.parametrize(
    "tensors",
    [
        stored_head(),
        stored_head(np.float32),
        stored_head(ml_dtypes.bfloat16),
        stored_head(drop=True),
        stored_head(np.float32, drop=True),
    ],
)
def test_a_tied_head_that_is_stored(tensors, tmp_path):
    path = changed(TIED, tmp_path, tensors)
    assert same(load_model(path, dtype="float32"), load_model(TIED, dtype="float32"))


def extra(name, shape=(2, 2)):
    return lambda tensors: {**tensors, name: np.ones(shape, np.float32)}


def test_old_buffers_are_left_out(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb."
    path = changed(
        TIED,
        tmp_path,
        lambda tensors: extra(name + "inv_freq")(extra(name + "cos_cached")(tensors)),
    )
    assert same(load_model(path, dtype="float32"), load_model(TIED, dtype="float32"))


def test_what_auto_takes_is_said_before_loading(tmp_path, said, monkeypatch):
    model = load_model(TIED)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    (line,) = said()
    assert line == (
        f"{TIED}: the weights take {size / 1e9:.2g} GB in float32 (dtype=auto on a CPU); "
        f"dtype=bfloat16 takes {size / 2e9:.2g} GB"
    )
    for dtype in ("float32", "bfloat16"):
        load_model(TIED, dtype=dtype)
    assert len(said()) == 1
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), "F16")
    load_model(path)
    assert len(said()) == 1  # it stays in half precision
    load_model(path, weights="float")
    assert "(dtype=auto on a CPU); dtype=bfloat16 takes" in said()[1]
    save_checkpoint(load_model(TIED, dtype="bfloat16"), tmp_path / "orbax")
    load_model(tmp_path / "orbax")
    assert said()[2].startswith(f"{tmp_path / 'orbax'}: the weights take")
    # It is said before a weight is read.
    path = changed(TIED, tmp_path, without("model.norm"))
    with pytest.raises(InputError, match="missing"):
        load_model(path)
    assert "in float32 (dtype=auto on a CPU)" in said()[3]


def test_weights_that_do_not_fit_are_refused_before_reading(tmp_path, monkeypatch):
    """With what would: on devices other than one CPU kernels are rounded as they are read."""
    gguf = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors(), "F16")
    save_checkpoint(load_model(TIED), tmp_path / "orbax")
    broken, free = changed(TIED, tmp_path / "broken", without("model.norm")), [1 << 40]
    monkeypatch.setattr(device_memory, "free_bytes", lambda: free[0])
    free[0] = 1000
    with pytest.raises(InputError, match=r"take .* on each device \(weights=file\), and"):
        load_model(gguf)
    for path, like in ((TIED, TIED), (gguf, gguf), (tmp_path / "orbax", TIED), (broken, TIED)):
        free[0] = 1 << 40
        wide = load_model(like, weights="float")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(wide.params))
        free[0] = size * 2 // 3
        with pytest.raises(
            InputError,
            match=rf"{path}: memory: the weights take .* on each device \(dtype=float32\), and .* "
            "GiB are free; dtype=bfloat16 takes",
        ):
            load_model(path, weights="float")
        free[0] = 1000
        with pytest.raises(InputError, match="GiB are free; use more devices or memory"):
            load_model(path, dtype="bfloat16")
    free[0] = size - 1
    mesh = make_mesh(1, 2, jax.devices()[:2])
    with pytest.raises(InputError, match="dtype=bfloat16 takes .* and weights=int8 takes"):
        load_model(TIED, mesh=mesh)
    assert load_model(TIED, dtype="bfloat16").dtype == "bfloat16"


def test_an_eagle3_head_with_what_tools_add(tiny, tmp_path, said):
    """Another number of layers, fields of SpecForge and ModelOpt, names inside a module."""
    head = eagle_head(tiny, vocabulary=VOCABULARY)
    path = written_head(tmp_path, head, "eagle3", tiny)
    stored = load_file(path / "model.safetensors")
    config = {
        "num_hidden_layers": 40,
        "sliding_window": 512,
        "use_sliding_window": False,
        "max_window_layers": 48,
        "additional_fc": False,
        "reuse_target_lm_head": True,
        "target_model_type": "llama",
        "pretraining_tp": 1,
        "layer_types": ["full_attention"],
        "qkv_bias": False,
        "unsloth_version": "2025.3",
        "eagle_config": {
            **json.loads((path / "config.json").read_text())["eagle_config"],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }
    edit_head(path, config, {f"model.{name}": value for name, value in stored.items()}, drop=stored)
    again = read_foreign(path, tiny)
    np.testing.assert_array_equal(draft_logits(again, tiny), draft_logits(head, tiny))
    assert said() == [
        f"{path / 'config.json'}: num_hidden_layers=40, and the file has 1: these are used"
    ]


@pytest.mark.parametrize("stated", [2, 5])
def test_medusa_heads_of_another_number(stated, tiny, tmp_path, said):
    """With the fields of the base model, as FasterDecoding writes them."""
    head = noisy_medusa_head(tiny, VOCABULARY)
    path = written_head(tmp_path, head, "medusa", tiny)
    config = {
        "medusa_num_heads": stated,
        "num_heads": None,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_scaling": None,
        "medusa_decay_coefficient": 0.8,
        "tie_word_embeddings": False,
        "model_type": "llama",
    }
    edit_head(path, config)
    again = read_foreign(path, tiny)
    np.testing.assert_array_equal(draft_logits(again, tiny), draft_logits(head, tiny))
    assert [line for line in said() if f"medusa_num_heads={stated}, and the file has 3" in line]


def rewrite(path, change):
    """Another config in an export that is not specjax's any more."""
    edit_head(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(change(config)))


def as_vllm(config, **fields):
    """The config as vLLM's EAGLEConfig keeps it."""
    return {"model_type": "eagle", "model": config, **fields}


@pytest.mark.parametrize(
    "change",
    [
        lambda config: as_vllm({**config, "eagle_fc_bias": False}),
        lambda config: as_vllm(
            {**config, "skip_prenorm": True, "skip_output_norm": True, "add_para_norm": False},
            architectures=["EAGLEModel"],
            truncated_vocab_size=config["vocab_size"],
            method="eagle",
            num_lookahead_tokens=5,
        ),
    ],
)
def test_an_eagle_head_with_the_config_of_vllm(change, tiny, tmp_path):
    head = eagle_head(tiny, version=1)
    path = written_head(tmp_path, head, "eagle", tiny)
    rewrite(path, change)
    np.testing.assert_array_equal(
        draft_logits(read_foreign(path, tiny), tiny), draft_logits(head, tiny)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncated_vocab_size": 40}, "truncated_vocab_size=40: is not supported"),
        ({"add_para_norm": True}, "add_para_norm=True"),
        ({"skip_prenorm": False}, "skip_prenorm=False: is not supported"),
        ({"eagle_fc_bias": True}, "eagle_fc_bias=True: the file has no fc.bias"),
    ],
)
def test_what_only_vllm_can_do_is_named(fields, message, tiny, tmp_path):
    path = written_head(tmp_path, eagle_head(tiny, version=1), "eagle", tiny)
    rewrite(path, lambda config: as_vllm(config, **fields))
    with pytest.raises(InputError, match=message):
        read_foreign(path, tiny)


@pytest.mark.parametrize("biased", [False, True])
def test_an_eagle_head_of_qwen2(biased, tiny, tmp_path):
    """Its config is a copy of the target's, and the file tells whether there are biases."""
    path = written_head(tmp_path, eagle_head(tiny, version=1), "eagle", tiny)
    config = json.loads((path / "config.json").read_text())
    del config["attention_bias"]
    window = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    stored = load_file(path / "model.safetensors")
    biases = {
        f"layers.0.self_attn.{part}_proj.bias": np.ones(
            len(stored[f"layers.0.self_attn.{part}_proj.weight"]), np.float32
        )
        for part in "qkv"
    }
    edit_head(path, tensors=biases if biased else None)
    (path / "config.json").write_text(json.dumps({**config, "model_type": "qwen2", **window}))
    layer = read_foreign(path, tiny).params["layer"]["attention"]
    assert ("bias" in layer["qkv"]) == biased


def test_no_layer_ids_are_the_published_ones(tiny, tmp_path):
    """ModelOpt writes an empty list; the target here has too few layers for them."""
    path = written_head(tmp_path, eagle_head(tiny, vocabulary=VOCABULARY), "eagle3", tiny)
    edit_head(path, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}})
    with pytest.raises(InputError, match="must name layers of a target that has only 3"):
        read_foreign(path, tiny)
