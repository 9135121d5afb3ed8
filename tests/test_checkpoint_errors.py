"""Checkpoints that are damaged, foreign or for something else: a clear error of one line."""

import dataclasses
import json
import os
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import CONFIG, assert_same, mesh_of
from conftest import slow
from heads import with_modules

from specjax.errors import InputError
from specjax.files import folder_marker
from specjax.loading import model_metadata, orbax_checkpoint
from specjax.loading.checkpoints import load_drafter, save_checkpoint, save_drafter
from specjax.loading.load import load_model, random_model, save_model


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, 0, dtype="float32")


@pytest.fixture
def saved(model, tmp_path):
    save_checkpoint(model, tmp_path / "saved")
    return tmp_path / "saved"


def metadata_of(model):
    config, dtype = model_metadata.config_metadata(model.config), np.dtype(model.dtype).name
    return {"config": config, "dtype": dtype, "scan_layers": True, "tokenizer": None}


def many_layers_apart(content):
    content["scan_layers"] = False
    content["config"]["num_layers"] = 60_000


def changed(*path, to):
    def change(content):
        node = content
        for key in path[:-1]:
            node = node[key]
        if to is None:
            del node[path[-1]]
        else:
            node[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("config", "hidden_size", to=36), r"another shape: .*\[32, 64\], not .*\[36, 64\]"),
        (changed("config", "hidden_size", to=10**6), r"another shape: .* and \d more"),
        (changed("config", "hidden_size", to=10**9), "hidden_size=1000000000: must be"),
        (changed("config", "max_positions", to=2**31 - 1), "max_positions=2147483647: must be"),
        (changed("config", "num_layers", to=60_000), "another shape: .*layers.*"),
        (changed("config", "hidden_size", to=10**12), "hidden_size=1000000000000 is of no use"),
        (changed("config", "hidden_size", to="32"), "hidden_size='32' is of no use"),
        (changed("config", "hidden_size", to=True), "hidden_size=True is of no use"),
        (changed("config", "hidden_size", to=0), "hidden_size=0: must be a whole number"),
        (changed("config", "num_heads", to=3), "num_heads=3: must be a multiple of"),
        (changed("config", "rope_theta", to=1e300), "rope_theta=1e.300 is of no use"),
        (changed("config", "rope_scaling", to=[1]), r"rope_scaling=\[1\] is of no use"),
        (changed("config", "rope_scaling", to={"kind": "yarn"}), "kind='yarn' is of no use"),
        (changed("config", "rope_scaling", to={"kind": []}), r"kind=\[\] is of no use"),
        (changed("config", "rope_scaling", to={}), "rope_scaling: 'kind' is missing"),
        (changed("config", "head_dim", to=None), "config: 'head_dim' is missing"),
        (changed("config", "surprise", to=8), "config: 'surprise' is unknown"),
        (changed("config", "attention_bias", to=True), "missing: .*query.bias.*"),
        (changed("config", "tie_word_embeddings", to=True), "unexpected: embed.embedding"),
        (changed("dtype", to="bfloat16"), r"another shape: .*float32.*, not bfloat16"),
        (changed("dtype", to="int8"), "dtype='int8': use a checkpoint in float32"),
        (changed("scan_layers", to=False), "missing: layers.0"),
        (many_layers_apart, "asks for 60000 layers, which are not there"),
        (changed("scan_layers", to=0), "scan_layers=0 is of no use"),
        (changed("config", to=None), "metadata: 'config' is missing"),
        (changed("tokenizer", to={}), "tokenizer: 'backend' is missing"),
        (changed("tokenizer", to="x"), "tokenizer='x' is of no use"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change, said, model, tmp_path, monkeypatch):
    content = metadata_of(model)
    change(content)
    orbax_checkpoint.save(tmp_path / "odd", "model", model.params, content, overwrite=False)
    monkeypatch.setattr(orbax_checkpoint, "restore", None)
    with pytest.raises(InputError, match=said) as caught:
        load_model(tmp_path / "odd")
    assert str(caught.value).startswith(f"{tmp_path / 'odd'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            changed("mtp", to=None),
            "holds arrays of MTP modules, which its metadata do not",
        ),
        (changed("mtp", "num_modules", to=2), r"missing: mtp.modules.1\S+, .* and \d more"),
        (changed("mtp", "num_modules", to=60), "num_modules=60, which are not there"),
        (changed("mtp", "num_modules", to=0), "num_modules=0: use a whole number from 1"),
        (changed("mtp", "concat", to="both"), "concat='both' is of no use"),
        (changed("mtp", "decoder", "hidden_size", to=36), "hidden_size=36, and the model has 32"),
        (changed("mtp", "draft_vocab_size", to=40), "draft_vocab_size=40, and the model has 64"),
        (changed("mtp", "surprise", to=40), "mtp: 'surprise' is unknown"),
    ],
)
def test_modules_that_do_not_fit_are_refused(change, said, model, tmp_path, monkeypatch):
    whole = with_modules(model)
    content = {**metadata_of(model), "mtp": model_metadata.head_metadata(whole.mtp.config)}
    content = json.loads(json.dumps(content))
    change(content)
    orbax_checkpoint.save(tmp_path / "odd", "model", whole.arrays, content, overwrite=False)
    monkeypatch.setattr(orbax_checkpoint, "restore", None)
    with pytest.raises(InputError, match=said) as caught:
        load_model(tmp_path / "odd")
    assert str(caught.value).startswith(f"{tmp_path / 'odd'}: ")
    assert "\n" not in str(caught.value)


def test_modules_that_are_announced_and_not_there(model, tmp_path):
    content = {
        **metadata_of(model),
        "mtp": model_metadata.head_metadata(with_modules(model).mtp.config),
    }
    orbax_checkpoint.save(tmp_path / "odd", "model", model.params, content, overwrite=False)
    with pytest.raises(InputError, match="lacks the arrays of MTP modules, which its metadata ann"):
        load_model(tmp_path / "odd")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("tokenizer", "backend", to="{"), "tokenizer: not one that can be read"),
        (changed("tokenizer", "bos_id", to=10**6), "bos_id=1000000 is outside the vocabulary"),
        (changed("tokenizer", "eos_ids", to=[-1]), "eos_ids=-1 is outside"),
        (changed("tokenizer", "eos_ids", to=[1.5]), r"eos_ids=\[1.5\] is of no use"),
        (changed("tokenizer", "special_tokens", to={"a": 1}), "special_tokens=.* is of no use"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(change, said, chatty, tmp_path):
    content = {
        **metadata_of(chatty),
        "tokenizer": model_metadata.tokenizer_metadata(chatty.tokenizer),
    }
    change(content)
    orbax_checkpoint.save(tmp_path / "odd", "model", chatty.params, content, overwrite=False)
    with pytest.raises(InputError, match=said):
        load_model(tmp_path / "odd")


def test_a_tokenizer_of_a_larger_model_is_refused(model, chatty, tmp_path):
    content = {
        **metadata_of(model),
        "tokenizer": model_metadata.tokenizer_metadata(chatty.tokenizer),
    }
    orbax_checkpoint.save(tmp_path / "odd", "model", model.params, content, overwrite=False)
    with pytest.raises(InputError, match="vocab_size=64, but the tokenizer has 80 tokens"):
        load_model(tmp_path / "odd")


def test_parameters_that_do_not_fit_are_not_saved(model, tmp_path):
    params = {**model.params, "extra": jnp.zeros(3)}
    del params["final_norm"]
    with pytest.raises(InputError, match=r"missing: final_norm.scale; unexpected: extra"):
        save_checkpoint(dataclasses.replace(model, params=params), tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_a_mesh_that_does_not_fit_is_refused_before_reading(saved, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "restore", None)
    with pytest.raises(InputError, match="mesh.model=8: 4 heads"):
        load_model(saved, mesh=mesh_of((1, 8)))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("specjax_checkpoint", 2, "checkpoint format 2, and only 1 is known; use the version"),
        ("specjax_checkpoint", True, "checkpoint format True, and only 1 is known"),
        ("kind", "elephant", "damaged or truncated"),
        ("kind", ["model"], "damaged or truncated"),
        ("metadata", [], "damaged or truncated"),
        ("metadata", {"a": float("nan")}, "the metadata are not JSON"),
        ("metadata", {"a": "\ud800"}, "the metadata are not JSON"),
    ],
)
def test_an_unknown_envelope_is_refused(key, value, said, saved):
    file = saved / "specjax-1" / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    content["custom_metadata"][key] = value
    file.write_text(json.dumps(content))
    folder_marker.seal(file.parent, "model")
    with pytest.raises(InputError, match=said):
        load_model(saved)


def test_directories_that_are_no_checkpoint_say_so(tmp_path, model, saved):
    with pytest.raises(InputError, match="nothing: no such directory"):
        load_drafter(tmp_path / "nothing")
    with pytest.raises(InputError, match="no such file, directory or built-in model"):
        load_model(tmp_path / "nothing")
    save_model(model, tmp_path / "other")
    with pytest.raises(InputError, match="other: holds no checkpoint; give a directory that"):
        load_drafter(tmp_path / "other")
    from orbax.checkpoint import v1 as ocp

    ocp.save(tmp_path / "foreign" / "specjax-7", {"a": jnp.ones(3)}, checkpointable_name="params")
    with pytest.raises(InputError, match="foreign: specjax-7 lacks its commit marker, .*not saved"):
        load_model(tmp_path / "foreign")
    folder_marker.seal(tmp_path / "foreign" / "specjax-7", "model")
    with pytest.raises(InputError, match="foreign: not saved by specjax, or damaged"):
        load_model(tmp_path / "foreign")
    ocp.save(tmp_path / "unlike" / "specjax-7", {"a": jnp.ones(3)})
    folder_marker.seal(tmp_path / "unlike" / "specjax-7", "model")
    with pytest.raises(InputError, match="unlike: the checkpoint is damaged"):
        load_model(tmp_path / "unlike")


def test_one_kind_is_not_taken_for_the_other(saved, tmp_path):
    save_drafter(tmp_path / "drafter", {"a": jnp.ones(3)}, {})
    with pytest.raises(InputError, match="holds a drafter, not a model; .*load_drafter"):
        load_model(tmp_path / "drafter")
    with pytest.raises(InputError, match="holds a model, not a drafter; .*load_model"):
        load_drafter(saved)


@pytest.mark.parametrize(
    ("params", "about", "said"),
    [
        ({}, {}, "params is dict.*a nested dict of arrays of numbers"),
        ({"a": {}}, {}, "params.a is dict"),
        ({"a": [np.ones(2)]}, {}, "params.a is list"),
        ({"a": 1.0}, {}, "params.a is float"),
        ({"a": "text"}, {}, "params.a is str"),
        ({"a": np.zeros((0, 3))}, {}, r"params.a is ndarray\[0, 3\]: .* none empty"),
        ({"a": np.array(["x"])}, {}, "params.a is ndarray"),
        ({"a.b": np.ones(2)}, {}, "'a.b' in params: parameters are named by text without dots"),
        ({"a": {1: np.ones(2)}}, {}, "1 in params.a: parameters are named"),
        ({"a": {"\ud800": np.ones(2)}}, {}, r"'\\ud800' in params.a: parameters are named by text"),
        ({"a": np.ones(2)}, {"f": {1, 2}}, "the metadata are not JSON .*set"),
        ({"a": np.ones(2)}, {"f": np.float32(1)}, "the metadata are not JSON .*float32"),
        ({"a": np.ones(2)}, {"f": float("inf")}, "the metadata are not JSON"),
    ],
)
def test_what_cannot_be_kept_is_refused(params, about, said, tmp_path):
    with pytest.raises(InputError, match=said):
        save_drafter(tmp_path / "drafter", params, about)
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("sealed", [True, *slow(False)])
def test_damage_is_an_error_of_one_line(sealed, saved, model, tmp_path, capfd, caplog):
    """Each file is deleted, emptied and halved in turn; what still loads is what was saved.

    Also where the marker lists the files as they are after that, so that Orbax reads them.
    """
    noticed = set()
    for file in sorted(path for path in saved.rglob("*") if path.is_file()):
        for size in (None, 0, file.stat().st_size // 2):
            copy = tmp_path / "copy"
            shutil.copytree(saved, copy)
            target = copy / file.relative_to(saved)
            target.unlink() if size is None else os.truncate(target, size)
            if not sealed:
                folder_marker.seal(copy / "specjax-1", "model")
            said = None
            try:
                loaded = load_model(copy, dtype="float32")
            except InputError as error:
                said = str(error)
            if said is None:
                assert_same(loaded.params, model.params)
            else:
                assert re.fullmatch(re.escape(f"{copy}: ") + ".{20,400}", said)
                noticed.add(re.sub("[0-9a-f]{32}", "*", str(file.relative_to(saved / "specjax-1"))))
            shutil.rmtree(copy)
    assert {
        "_CHECKPOINT_METADATA",
        "params/_METADATA",
        "params/manifest.ocdbt",
        "params/d/*",
        "params/ocdbt.process_0/d/*",
    } <= noticed
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_files_that_are_too_small_are_found_before_reading(saved, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "_WEIGHED_BYTES", 1000)
    monkeypatch.setattr(orbax_checkpoint, "restore", None)
    largest = max(saved.rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    folder_marker.seal(saved / "specjax-1", "model")
    with pytest.raises(InputError, match=r"truncated \(\d+ bytes are there, its arrays take \d+\)"):
        load_model(saved)


def test_the_marker_of_another_kind_is_damage(saved):
    folder_marker.seal(saved / "specjax-1", "drafter")
    with pytest.raises(InputError, match="specjax-1/specjax_folder.json is of a drafter"):
        load_model(saved)
