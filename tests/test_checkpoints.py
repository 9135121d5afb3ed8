"""Checkpoints: what is saved comes back, on any mesh; a save that fails loses nothing."""

import dataclasses
import json
import signal
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import files_limited_to, finish, free_port, start
from conftest import slow, tiny_config
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tiny_models import save_with_orbax, with_modules

from specjax.distributed import sharding
from specjax.engine.generate import generate
from specjax.errors import InputError
from specjax.loading import dataclass_json
from specjax.loading.checkpoints import load_drafter, save_checkpoint, save_drafter
from specjax.loading.formats import build_parameters
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.loading.storage import orbax_checkpoint
from specjax.loading.storage.orbax_saver import Numbered, Saver
from specjax.models.config import DecoderConfig, RopeScaling
from specjax.models.form import Form

CONFIG = tiny_config(
    vocab_size=64, hidden_size=32, num_layers=2, num_kv_heads=4, head_dim=8, intermediate_size=64
)


def mesh_of(shape):
    if shape is None:
        return None
    data, model = shape
    return sharding.make_mesh(data, model, devices=jax.devices()[: data * model])


def assert_same(params, other):
    assert jax.tree.structure(params) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", factor=4.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
    "factors": RopeScaling("factors", factors=(1.0, 1.5, 2.25, 1 / 3), short_factors=(1.0,) * 4),
    "yarn": RopeScaling("yarn", factor=4.0, attention_factor=1.1, beta_fast=9.5, truncate=False),
}


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, 0, dtype="float32")


@pytest.fixture
def saved(model, tmp_path):
    save_checkpoint(model, tmp_path / "saved")
    return tmp_path / "saved"


def test_a_checkpoint_does_not_say_where_it_was_made(saved):
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert str(saved).encode() not in path.read_bytes(), path.name


def test_a_model_comes_back_with_its_tokenizer(chatty, tmp_path):
    save_checkpoint(chatty, tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype="float32")
    assert_same(loaded.params, chatty.params)
    assert (loaded.config, loaded.dtype) == (chatty.config, chatty.dtype)
    ours, theirs = loaded.tokenizer, chatty.tokenizer
    for field in ("bos_id", "eos_ids", "chat_template", "special_tokens"):
        assert getattr(ours, field) == getattr(theirs, field)
    for text in ("Name three rivers.", " naïve \n\t日本 <|im_end|>", ""):
        assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "Name three rivers."}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    options = dict(sampling=dict(max_new_tokens=8, temperature=0.8))
    prompts = ["one two three one two", messages]
    again = generate(loaded, prompts, **options)
    first = generate(chatty, prompts, **options)
    assert (again.token_ids, again.texts) == (first.token_ids, first.texts)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_field_of_a_config_comes_back(scaling):
    config = dataclasses.replace(
        CONFIG,
        rope_scaling=SCALINGS[scaling],
        rms_norm_eps=1.1e-6,
        rope_theta=500000.1,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    text = json.dumps(dataclasses.asdict(config))
    assert dataclass_json.read_dataclass("config", DecoderConfig, json.loads(text)) == config


def assert_placed(model, mesh, shards):
    if mesh is None:
        assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(model.params))
        return
    wanted = build_parameters.parameter_shardings(model.config, mesh, shards, model.form.stacked)
    matches = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, model.params, wanted)
    assert jax.tree.all(matches)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 2), (2, 2)),
        ((1, 4), None),
        (None, (2, 4)),
        *slow(((1, 2), (1, 4)), ((1, 4), (2, 1)), ((2, 2), (1, 2))),
    ],
)
def test_any_mesh_reads_what_another_saved(before, after, model, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(orbax_checkpoint, "_READ_BYTES", 1)
    save_checkpoint(place_model(model, mesh_of(before)), tmp_path / "model")
    mesh = mesh_of(after)
    loaded = load_model(tmp_path / "model", dtype="float32", mesh=mesh)
    assert_same(loaded.params, model.params)
    assert_placed(loaded, mesh, loaded.shards)
    assert (loaded.mesh, loaded.shards) == (mesh, after[1] if after else 1)


def test_a_replica_is_whole_on_each_device(saved, model):
    mesh = mesh_of((1, 4))
    loaded = load_model(saved, dtype="float32", mesh=mesh, replicated=True)
    assert_same(loaded.params, model.params)
    assert_placed(loaded, mesh, 1)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(loaded.params))


@pytest.mark.parametrize("shape", [(2, 2), *slow(None)])
def test_bfloat16_comes_back_and_float32_is_rounded_to_it(shape, model, saved, tmp_path):
    rounded = load_model(saved, dtype="bfloat16", mesh=mesh_of(shape))
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    assert rounded.dtype == jnp.bfloat16
    assert_same(rounded.params, expected)
    save_checkpoint(rounded, tmp_path / "half")
    assert_same(load_model(tmp_path / "half", dtype="bfloat16").params, expected)
    assert_same(
        load_model(tmp_path / "half", dtype="float32").params,
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), expected),
    )


@pytest.mark.parametrize(
    ("layers", "other", "shape"),
    [
        ("stacked", "apart", None),
        ("apart", "stacked", (2, 2)),
        *slow(("apart", "stacked", None), ("stacked", "unrolled", (2, 2))),
    ],
)
def test_layers_are_stacked_or_apart_as_the_reader_asks(layers, other, shape, tmp_path):
    forms = Form(layers), Form(other)
    config = dataclasses.replace(CONFIG, num_layers=11)
    model, other = (random_model(config, 0, dtype="float32", form=form) for form in forms)
    mesh = mesh_of(shape)
    save_checkpoint(place_model(model, mesh), tmp_path / "model")
    for want, form in zip((model, other), forms, strict=True):
        loaded = load_model(tmp_path / "model", dtype="float32", mesh=mesh, form=form)
        assert_same(loaded.params, want.params)
        assert_placed(loaded, mesh, loaded.shards)


@pytest.mark.parametrize(
    ("layers", "after"),
    [
        ("stacked", (2, 2)),
        ("apart", None),
        *slow(("unrolled", (2, 2)), ("stacked", None)),
    ],
)
def test_modules_come_back_with_their_model(layers, after, tmp_path):
    form = Form(layers)
    model = random_model(CONFIG, 0, dtype="float32", form=form)
    model = with_modules(model, 2, concat="hidden_first", zero_first_embedding=True)
    own = model.num_params - dataclasses.replace(model, mtp=None).num_params
    assert own == sum(leaf.size for leaf in jax.tree.leaves(model.mtp.params)) > 0
    save_checkpoint(place_model(model, mesh_of((1, 2))), tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype="float32", mesh=mesh_of(after))
    assert_same(loaded.mtp.params, model.mtp.params)
    assert (loaded.mtp.config, loaded.num_params) == (model.mtp.config, model.num_params)
    rounded = load_model(tmp_path / "model", dtype="bfloat16")
    assert_same(
        rounded.mtp.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.mtp.params)
    )
    qkv = loaded.mtp.params["modules"]["0"]["layer"]["attention"]["qkv"]["kernel"]
    heads = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) // (after[1] if after else 1)
    assert qkv.addressable_shards[0].data.shape[1] == heads * CONFIG.head_dim


def test_a_layout_without_modules_says_so(model, tmp_path):
    with pytest.raises(InputError, match="has MTP modules, .* use specjax.save_checkpoint"):
        save_model(with_modules(model), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_is_replaced_only_when_asked_for(saved, tiny):
    with pytest.raises(InputError, match="holds a model already; delete it, or write elsewhere"):
        save_checkpoint(tiny, saved)
    save_checkpoint(tiny, saved, overwrite=True)
    assert_same(load_model(saved, dtype="float32").params, tiny.params)


DIES = """
import os, signal, sys
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import load_model

def die(event, arguments):
    # A folder gets its name when everything is written.
    if event == "os.rename" and os.fspath(arguments[1]) == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

model = load_model(sys.argv[1], dtype="float32")
sys.addaudithook(die)
save_checkpoint(model, sys.argv[2], overwrite=True)
"""


def test_a_save_that_dies_leaves_the_earlier_checkpoint(saved, model, tiny, tmp_path):
    save_checkpoint(tiny, tmp_path / "other")
    fresh = tmp_path / "fresh"
    for directory in (saved, fresh):
        arguments = ["-c", DIES, str(tmp_path / "other"), str(directory)]
        code, _, error = finish(start(arguments, program=()))
        assert code == -signal.SIGKILL, error
    with pytest.raises(InputError, match="holds a model already"):
        save_checkpoint(tiny, saved)  # the earlier one, which has its name again
    assert_same(load_model(saved, dtype="float32").params, model.params)
    assert not fresh.exists()
    for directory in (saved, fresh):
        save_checkpoint(tiny, directory, overwrite=True)
        assert_same(load_model(directory, dtype="float32").params, tiny.params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "other", "saved"]


def test_a_save_that_fails_leaves_the_earlier_checkpoint(saved, model, capfd, caplog):
    large = random_model(dataclasses.replace(CONFIG, vocab_size=20_000), 1, dtype="float32")
    with (
        files_limited_to(500_000),
        pytest.raises(InputError, match="saved: the checkpoint cannot be written") as caught,
    ):
        save_checkpoint(large, saved, overwrite=True)
    assert "\n" not in str(caught.value)
    assert_same(load_model(saved, dtype="float32").params, model.params)
    assert [entry.name for entry in saved.parent.iterdir()] == ["saved"]
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


HEADS = {
    "head_0": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.ones(4)},
    "head_1": {"kernel": jnp.ones((3, 4), jnp.bfloat16), "step": jnp.int32(7)},
}


def test_a_drafter_comes_back_with_its_metadata(tmp_path):
    params = jax.tree.map(jnp.asarray, HEADS)
    about = {"method": "medusa", "heads": (2, [1, 2.5, None]), "target": {"name": "é", "ok": True}}
    save_drafter(tmp_path / "drafter", params, about)
    loaded, metadata = load_drafter(tmp_path / "drafter")
    assert metadata == {**about, "heads": [2, [1, 2.5, None]]}
    assert_same(loaded, params)
    mesh = mesh_of((2, 2))
    spread, _ = load_drafter(tmp_path / "drafter", mesh)
    assert_same(spread, params)
    whole = NamedSharding(mesh, PartitionSpec())
    assert {leaf.sharding for leaf in jax.tree.leaves(spread)} == {whole}


def test_a_drafter_is_safetensors_and_json(tmp_path):
    save_drafter(tmp_path / "drafter", HEADS, {"method": "mine"})
    weights, content, marker = sorted((tmp_path / "drafter").iterdir())
    assert (weights.name, content.name) == ("model.safetensors", "specjax_checkpoint.json")
    assert marker.name == "specjax_folder.json"
    tensors = load_file(weights)
    assert tensors.keys() == {"head_0.bias", "head_0.kernel", "head_1.kernel", "head_1.step"}
    assert tensors["head_1.kernel"].dtype == jnp.bfloat16
    assert tensors["head_1.step"].shape == ()
    np.testing.assert_array_equal(tensors["head_0.kernel"], HEADS["head_0"]["kernel"])
    assert json.loads(content.read_text())["metadata"] == {"method": "mine"}


@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_a_drafter_that_orbax_stored_is_read(shape, tmp_path):
    params, mesh = jax.tree.map(jnp.asarray, HEADS), mesh_of(shape)
    save_with_orbax(tmp_path / "old", params, {"method": "medusa"})
    assert (tmp_path / "old" / "params" / "manifest.ocdbt").is_file()
    loaded, metadata = load_drafter(tmp_path / "old", mesh)
    assert metadata == {"method": "medusa"}
    assert_same(loaded, params)
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        assert {leaf.sharding for leaf in jax.tree.leaves(loaded)} == {whole}


def test_a_drafter_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    save_drafter(tmp_path / "drafter", {"a": jnp.ones(3)}, {})
    with (
        files_limited_to(50_000),
        pytest.raises(InputError, match="drafter: cannot be written .*; free space") as caught,
    ):
        save_drafter(tmp_path / "drafter", {"a": jnp.ones(30_000)}, {}, overwrite=True)
    assert "\n" not in str(caught.value)
    assert_same(load_drafter(tmp_path / "drafter")[0], {"a": jnp.ones(3)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["drafter"]


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    overwrite = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    names = Numbered("step")
    with Saver(tmp_path / "saves", "drafter", names, kept=2) as saver:
        for number in (1, 2, 3):
            array = number + jnp.arange(1e6, dtype=jnp.float32)
            saver.save(number, {"array": array}, {"number": number})
            jax.block_until_ready(overwrite(array))
    assert names.numbers(tmp_path / "saves") == [2, 3]
    for number in (2, 3):
        params, metadata = load_drafter(names.path(tmp_path / "saves", number))
        np.testing.assert_array_equal(params["array"], number + np.arange(1e6, dtype=np.float32))
        assert metadata == {"number": number}


IN_TWO = """
import sys
from specjax.distributed import processes, sharding
from specjax.loading.checkpoints import load_drafter, save_checkpoint, save_drafter
from specjax.errors import InputError
from specjax.loading.load import load_model, save_model
import jax.numpy as jnp
import numpy as np

alone, shared, address, number = sys.argv[1:]
processes.join(coordinator_address=address, num_processes=2, process_id=int(number), timeout_s=60)
model = load_model(alone, dtype="float32", mesh=sharding.make_mesh(1, 4))
save_checkpoint(model, shared + "/split")
save_checkpoint(load_model(shared + "/split", dtype="float32"), shared + "/whole")
embedding = model.params["embed"]
assert not embedding["embedding"].is_fully_addressable
save_drafter(shared + "/drafter", {"a": jnp.ones(3), "embed": embedding}, {"process": 0})
arrays, _ = load_drafter(shared + "/drafter", model.mesh)
assert arrays["embed"]["embedding"].is_fully_replicated
refusals = []
for what in (
    lambda: save_checkpoint(model, shared + "/split"),
    lambda: save_checkpoint(model, f"{shared}/{number}"),
    lambda: save_model(model, f"{shared}/{number}"),
):
    try:
        what()
    except InputError as error:
        refusals.append(str(error))
with open(f"{shared}_refusals_{number}", "w") as file:
    file.write("\\n".join(refusals))
"""


def test_two_processes_write_what_one_reads_and_the_reverse(saved, model, tmp_path):
    address, shared = f"127.0.0.1:{free_port()}", tmp_path / "shared"
    ran = [
        start(["-c", IN_TWO, str(saved), str(shared), address, number], program=(), devices=2)
        for number in "01"
    ]
    for number, (code, _, error) in enumerate([finish(process) for process in ran]):
        assert code == 0, error
        lines = (tmp_path / f"shared_refusals_{number}").read_text().splitlines()
        assert len(lines) == 3
        assert "split: holds a model already" in lines[0]
        assert "the checkpoint's directory=" in lines[1]
        assert "on process 0" in lines[1]
        assert "spread over processes" in lines[2]
    for name in ("split", "whole"):
        assert_same(load_model(shared / name, dtype="float32").params, model.params)
    mesh = mesh_of((2, 2))
    loaded = load_model(shared / "split", dtype="float32", mesh=mesh)
    assert_same(loaded.params, model.params)
    assert_placed(loaded, mesh, 2)
    arrays, metadata = load_drafter(shared / "drafter")
    assert metadata == {"process": 0}
    assert_same(arrays["embed"], model.params["embed"])


def test_the_host_holds_a_tensor_at_a_time_over_a_mesh(tmp_path):
    """What NumPy allocates while a directory is loaded; without a mesh that is the whole model."""
    config = tiny_config(
        vocab_size=1000,
        hidden_size=256,
        num_layers=6,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1024,
    )
    save_model(random_model(config, 0, dtype="float32"), tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    largest = 256 * 1024 * 4
    assert size > 20 * largest

    def peak(shape):
        # What tracing and compiling allocate is allocated the first time.
        load_model(tmp_path / "model", dtype="float32", mesh=mesh_of(shape))
        tracemalloc.start()
        loaded = load_model(tmp_path / "model", dtype="float32", mesh=mesh_of(shape))
        jax.block_until_ready(loaded.params)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    assert peak(None) > size
    assert peak((2, 2)) < 8 * largest


def test_a_folder_of_such_a_name_is_not_deleted(tmp_path):
    """Only what a save that was killed has left."""
    others = tmp_path / "mine.orbax-checkpoint-tmp", tmp_path / "step-7.orbax-checkpoint-tmp"
    for folder in others:
        folder.mkdir()
        (folder / "chapter.txt").write_text("mine")
    left = tmp_path / "step-000000005.orbax-checkpoint-tmp" / "params"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    with Saver(tmp_path, "drafter", Numbered("step", digits=9), 2) as saver:
        saver.save(1, {"a": jnp.ones(3)}, {})
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["mine.orbax-checkpoint-tmp", "step-000000001", "step-7.orbax-checkpoint-tmp"]
    assert all((folder / "chapter.txt").read_text() == "mine" for folder in others)
