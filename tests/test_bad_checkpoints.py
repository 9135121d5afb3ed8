"""Checkpoints that are damaged, foreign or for something else: a clear error of one line."""

import dataclasses
import json
import os
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import refused
from conftest import slow
from safetensors.numpy import save_file
from test_checkpoints import CONFIG, assert_same, mesh_of
from tiny_models import with_modules

from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.loading.checkpoints import load_drafter, save_checkpoint, save_drafter
from specjax.loading.load import load_model, random_model, save_model
from specjax.loading.storage import orbax_checkpoint


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, 0, dtype="float32")


@pytest.fixture(scope="module")
def models(model, chatty):
    """A model without more, one with MTP modules, and one with a tokenizer."""
    return {"plain": model, "modules": with_modules(model), "tokenizer": chatty}


@pytest.fixture
def saved(model, tmp_path):
    save_checkpoint(model, tmp_path / "saved")
    return tmp_path / "saved"


def metadata_of(model):
    """What `save_checkpoint` writes beside the arrays."""
    metadata = {
        "config": dataclasses.asdict(model.config),
        "dtype": np.dtype(model.dtype).name,
        "scan_layers": True,
        "mtp": model.mtp and dataclasses.asdict(model.mtp.config),
        "ends": [],
    }
    return json.loads(json.dumps(metadata))


DELETED = object()

MISFITS = [
    # the model, fields of its metadata with dots, the value there, the error
    ("plain", "config.hidden_size", 36, r"mis-shaped: .*\[32, 64\], not .*\[36, 64\]"),
    ("plain", "config.hidden_size", 10**6, r"mis-shaped: .* and \d more"),
    ("plain", "config.hidden_size", 10**9, "hidden_size=1000000000: must be"),
    ("plain", "config.max_positions", 2**31 - 1, "max_positions=2147483647: must be"),
    ("plain", "config.num_layers", 60_000, "mis-shaped: .*layers.*"),
    ("plain", "config.hidden_size", 10**12, "hidden_size=1000000000000 is of no use"),
    ("plain", "config.hidden_size", "32", "hidden_size='32' is of no use"),
    ("plain", "config.hidden_size", True, "hidden_size=True is of no use"),
    ("plain", "config.hidden_size", 0, "hidden_size=0: must be a whole number"),
    ("plain", "config.num_heads", 3, "num_heads=3: must be a multiple of"),
    ("plain", "config.rope_theta", 1e300, "rope_theta=1e.300 is of no use"),
    ("plain", "config.rope_scaling", [1], r"rope_scaling=\[1\] is of no use"),
    ("plain", "config.rope_scaling", {"kind": "ntk"}, "kind='ntk' is of no use"),
    ("plain", "config.rope_scaling", {"kind": []}, r"kind=\[\] is of no use"),
    ("plain", "config.rope_scaling", {}, "rope_scaling: 'kind' is missing"),
    ("plain", "config.head_dim", DELETED, "config: 'head_dim' is missing"),
    ("plain", "config.surprise", 8, "config: 'surprise' is unknown"),
    ("plain", "config.attention_bias", True, "missing: .*qkv.bias.*"),
    ("plain", "config.tie_word_embeddings", True, "unexpected: embed.embedding"),
    ("plain", "config", DELETED, "metadata: 'config' is missing"),
    ("plain", "dtype", "bfloat16", r"mis-shaped: .*float32.*, not bfloat16"),
    ("plain", "dtype", "int8", "dtype='int8' is of no use"),
    ("plain", "scan_layers", False, "missing: layers.0"),
    (
        "plain",
        "scan_layers config.num_layers",
        (False, 60_000),
        "asks for 60000 layers, which are not there",
    ),
    ("plain", "scan_layers", 0, "scan_layers=0 is of no use"),
    ("modules", "mtp", None, "unexpected: mtp.modules"),
    ("modules", "mtp.num_modules", 2, r"missing: mtp.modules.1\S+, .* and \d more"),
    ("modules", "mtp.num_modules", 60, "missing: mtp.modules.1"),
    ("modules", "mtp.num_modules", 0, "num_modules=0: use a whole number from 1"),
    ("modules", "mtp.concat", "both", "concat='both' is of no use"),
    ("modules", "mtp.decoder.hidden_size", 36, "hidden_size=36, and the model has 32"),
    ("modules", "mtp.draft_vocab_size", 40, "draft_vocab_size=40, and the model has 64"),
    ("modules", "mtp.surprise", 40, "mtp: 'surprise' is unknown"),
]


def changed(metadata, names, values):
    """Metadata in which fields are set, or deleted."""
    several = " " in names
    for name, value in zip(names.split(), values if several else [values], strict=True):
        *above, last = name.split(".")
        node = metadata
        for key in above:
            node = node[key]
        if value is DELETED:
            del node[last]
        else:
            node[last] = value
    return metadata


@pytest.mark.parametrize(("which", "names", "values", "said"), MISFITS)
def test_metadata_that_do_not_fit_are_refused_before_arrays_are_read(
    which, names, values, said, models, tmp_path, monkeypatch
):
    model, folder = models[which], tmp_path / "odd"
    metadata = changed(metadata_of(model), names, values)
    orbax_checkpoint.save(folder, model.arrays, metadata, overwrite=False)
    monkeypatch.setattr(orbax_checkpoint, "restore", None)
    assert refused(lambda: load_model(folder), said).startswith(f"{folder}: ")


def test_modules_of_another_model_are_refused(models, tmp_path):
    metadata = {**metadata_of(models["plain"]), "mtp": metadata_of(models["modules"])["mtp"]}
    arrays = models["plain"].arrays
    orbax_checkpoint.save(tmp_path / "odd", arrays, metadata, overwrite=False)
    refused(lambda: load_model(tmp_path / "odd"), "missing: mtp.modules")


def test_a_tokenizer_of_another_model_is_refused(saved, models, tmp_path):
    save_checkpoint(models["tokenizer"], tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "tokenizer", saved / "tokenizer")
    refused(lambda: load_model(saved), "tokenizer/.* is not listed in specjax_folder.json")
    folder_checksums.seal(saved, "model")
    refused(lambda: load_model(saved), "vocab_size=64, but the tokenizer has 80 tokens")


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
        ("specjax_checkpoint", True, "damaged or truncated"),
        ("metadata", [], "damaged or truncated"),
        ("metadata", {"a": float("nan")}, "specjax_checkpoint.json is not JSON"),
    ],
)
def test_unknown_content_is_refused(key, value, said, saved):
    file = saved / "specjax_checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    folder_checksums.seal(file.parent, "model")
    refused(lambda: load_model(saved), said)


def test_directories_that_are_no_checkpoint_say_so(tmp_path, model, saved):
    from orbax.checkpoint import v1 as ocp

    save_model(model, tmp_path / "other")
    foreign, unlike = tmp_path / "foreign", tmp_path / "unlike"
    ocp.save(foreign, {"a": jnp.ones(3)}, checkpointable_name="params")
    ocp.save(unlike, {"a": jnp.ones(3)})
    for name, load, said in (
        ("nothing", load_drafter, "nothing: no such directory"),
        ("nothing", load_model, "no such file, directory or built-in model"),
        ("other", load_drafter, "other: holds no checkpoint; give a directory that"),
        ("foreign", load_model, "foreign: lacks specjax_folder.json, .*not saved"),
        ("unlike", load_drafter, "unlike: holds no checkpoint"),
    ):
        refused(lambda load=load, name=name: load(tmp_path / name), said)
    folder_checksums.seal(foreign, "model")
    refused(lambda: load_model(foreign), "is not listed in specjax_folder")


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
        ({"a": {}}, {}, "params is dict"),
        ({"a": [np.ones(2)]}, {}, "params..a...0. is ndarray"),
        ({"a": 1.0}, {}, "params..a.. is float"),
        ({"a": "text"}, {}, "params..a.. is str"),
        ({"a": np.zeros((0, 3))}, {}, r"params..a.. is ndarray\[0, 3\]: .* none empty"),
        ({"a": np.array(["x"])}, {}, "params..a.. is ndarray"),
        ({"a.b": np.ones(2)}, {}, "params..a.b.. is .* by names without dots"),
        ({"a": {1: np.ones(2)}}, {}, "params..a...1. is .* by names without dots"),
        ({"a": jnp.ones(2, jnp.float8_e4m3fn)}, {}, "a is float8_e4m3fn, .*; use bool, int8, "),
        ({"a": np.ones(2)}, {"f": {1, 2}}, "the metadata are not JSON .*set"),
        ({"a": np.ones(2)}, {"f": np.float32(1)}, "the metadata are not JSON .*float32"),
        ({"a": np.ones(2)}, {"f": float("inf")}, "the metadata are not JSON"),
    ],
)
def test_what_cannot_be_kept_is_refused(params, about, said, tmp_path):
    refused(lambda: save_drafter(tmp_path / "drafter", params, about), said)
    assert not (tmp_path / "drafter").exists()


def load_damaged(copy, load, saved, capfd, caplog):
    """The message of what refuses a damaged copy, or None if it is what was saved nevertheless."""
    said = None
    try:
        assert_same(load(copy), saved)
    except InputError as error:
        said = str(error)
        assert re.fullmatch(f"{re.escape(str(copy))}(: |/).{{20,400}}", said)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    return said


def damages(folder, tmp_path, kind, sealed):
    """Copies in which a file is deleted, emptied or halved, with the file's name and new size.

    With `sealed` the marker lists the files as they were, otherwise as they are after that.
    """
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        for size in (None, 0, file.stat().st_size // 2):
            copy = shutil.copytree(folder, tmp_path / "copy")
            name = file.relative_to(folder)
            (copy / name).unlink() if size is None else os.truncate(copy / name, size)
            if not sealed:
                folder_checksums.seal(copy, kind)
            yield copy, str(name), size
            shutil.rmtree(copy)


@pytest.mark.parametrize("sealed", [True, *slow(False)])
def test_damage_is_an_error_of_one_line(sealed, saved, model, tmp_path, capfd, caplog):
    """What still loads is what was saved; also where Orbax reads the files as they are."""
    noticed = set()
    load = lambda copy: load_model(copy, dtype="float32").params  # noqa: E731
    for copy, name, _ in damages(saved, tmp_path, "model", sealed):
        said = load_damaged(copy, load, model.params, capfd, caplog)
        if said is not None:
            assert said.startswith(f"{copy}: ") or not sealed
            noticed.add(re.sub("[0-9a-f]{32}", "*", name))
    assert {
        "specjax_checkpoint.json",
        "params/_METADATA",
        "params/manifest.ocdbt",
        "params/d/*",
        "params/ocdbt.process_0/d/*",
    } <= noticed


DRAFTER = {"a": {"kernel": jnp.ones((30, 40), jnp.bfloat16)}, "ids": jnp.arange(9)}


@pytest.mark.parametrize("sealed", [True, False])
def test_damage_of_a_drafter_is_an_error_of_one_line(sealed, tmp_path, capfd, caplog):
    save_drafter(tmp_path / "drafter", DRAFTER, {"kind": "mine"})
    noticed = []
    for copy, name, size in damages(tmp_path / "drafter", tmp_path, "drafter", sealed):
        said = load_damaged(copy, lambda copy: load_drafter(copy)[0], DRAFTER, capfd, caplog)
        if said is not None:
            assert name in said or (not sealed and "holds no checkpoint" in said)
            noticed.append((name, size is None or size > 0))
    names = {"specjax_checkpoint.json", "model.safetensors"}
    if sealed:
        names.add("specjax_folder.json")
    assert sorted(noticed) == sorted((name, there) for name in names for there in (1, 0, 1))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "model.safetensors holds no arrays"),
        ({"a": np.ones(2), "a.b": np.ones(2)}, "a.b is there twice, as a value and as a section"),
        (
            {"a.b.c": np.ones(2), "a.b": np.ones(2)},
            "a.b.c is there twice, as a value and as a section",
        ),
        ({"a": np.ones(2, jnp.float8_e5m2)}, "a is of the type F8_E5M2"),
    ],
)
def test_tensors_that_are_no_drafter_are_refused(tensors, said, tmp_path):
    save_drafter(tmp_path / "drafter", DRAFTER, {})
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    refused(lambda: load_drafter(tmp_path / "drafter"), r"model.safetensors (has|is not)")
    folder_checksums.seal(tmp_path / "drafter", "drafter")
    refused(lambda: load_drafter(tmp_path / "drafter"), rf"damaged or truncated \({said}\)")


def test_files_that_are_too_small_are_found_before_reading(saved, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "_WEIGHED_BYTES", 1000)
    monkeypatch.setattr(orbax_checkpoint, "restore", None)
    largest = max(saved.rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    folder_checksums.seal(saved, "model")
    with pytest.raises(InputError, match=r"truncated \(\d+ bytes are there, its arrays take \d+\)"):
        load_model(saved)
