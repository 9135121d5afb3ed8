"""Folders that specjax makes: what is changed in them is found, what is not ours is left alone."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bad_input import refused, refused_command
from commands import ROOT
from rich.console import Console
from safetensors.numpy import load_file, save_file
from tiny_models import eagle_head, save_with_orbax
from toy_training import get_config, read, toy_run

from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.files import folder_checksums, folders
from specjax.files.folder_checksums import LOCK, MARKER
from specjax.loading.checkpoints import load_drafter, save_checkpoint, save_drafter
from specjax.loading.load import load_model, save_model
from specjax.methods.heads.head import check_same
from specjax.methods.published_layouts import read_foreign, write_foreign
from specjax.methods.saved_heads import read_head, save_head
from train import features, generate
from train.data.examples import Example, target_metadata
from train.data.write_responses import write_responses
from train.run import run


@pytest.fixture(scope="module")
def model(tiny):
    return tiny


def save_dataset(model, path):
    tokens = np.arange(9, dtype=np.int32)
    example = Example(tokens=tokens, loss_mask=tokens > 3)
    write_responses(path, [example], target_metadata(model), overwrite=True)


SAVE = {
    "orbax model": lambda model, path: save_checkpoint(model, path, overwrite=True),
    "own head": lambda model, path: save_head(eagle_head(model), path, overwrite=True),
    "safetensors model": lambda model, path: save_model(model, path),
    "safetensors head": lambda model, path: write_foreign(eagle_head(model), path, "eagle3", model),
    "dataset": save_dataset,
}
LOAD = {
    "orbax model": lambda model, path: load_model(path),
    "own head": lambda model, path: read_head(path),
    "orbax head": lambda model, path: read_head(path),
    "safetensors model": lambda model, path: load_model(path),
    "safetensors head": lambda model, path: read_foreign(path, model),
}


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A folder of each kind, by its name, not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    for kind, save in SAVE.items():
        save(model, folder / kind)
    save_with_orbax(folder / "orbax head", *load_drafter(folder / "own head"))
    return folder


def flip_four_bytes(folder):
    """Change the middle of the largest file below a folder; returns the file's relative path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4] = bytes(byte ^ 0xFF for byte in content[middle : middle + 4])
    largest.write_bytes(content)
    return largest.relative_to(folder).as_posix()


def contents(folder):
    """All files below a folder, and what is in them."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def edited(**changes):
    """Damage: the marker's fields are others."""
    return lambda folder, marker: marker.write_text(
        json.dumps({**json.loads(marker.read_text()), **changes})
    )


def unlisted(*suffixes):
    """Damage: the marker does not list files that end so."""

    def damage(folder, marker):
        files = json.loads(marker.read_text())["files"]
        edited(files={name: files[name] for name in files if not name.endswith(suffixes)})(
            folder, marker
        )

    return damage


UNLISTED = f"is not listed in {MARKER}"
DAMAGES = {
    "flipped bytes": (
        lambda folder, marker: flip_four_bytes(folder),
        "{0} is not as it was written",
    ),
    "no marker": (
        lambda folder, marker: marker.unlink(),
        f"{MARKER}.*copy .* again, whole, or save elsewhere",
    ),
    "half a marker": (
        lambda folder, marker: os.truncate(marker, marker.stat().st_size // 2),
        f"{MARKER} is not JSON",
    ),
    "another format": (edited(specjax_folder=2), f"{MARKER}: format 2, and only 1 is known"),
    "another kind": (edited(kind="answers"), "answers|another folder"),
    "no files": (edited(files={}), UNLISTED),
    "a part not listed": (unlisted("manifest.ocdbt", "model.safetensors"), UNLISTED),
    "the config not listed": (unlisted("specjax_checkpoint.json", "config.json"), UNLISTED),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", LOAD)
def test_damage_is_found_and_named(kind, damage, saved, model, tmp_path):
    folder = shutil.copytree(saved / kind, tmp_path / "saved")
    change, said = DAMAGES[damage]
    (marker,) = folder.rglob(MARKER)
    said = said.format(change(folder, marker))
    assert str(folder) in refused(lambda: LOAD[kind](model, folder), said)


@pytest.mark.parametrize("kind", LOAD)
def test_what_is_not_damaged_loads(kind, saved, model):
    LOAD[kind](model, saved / kind)


@pytest.mark.parametrize("kind", SAVE)
def test_all_files_have_the_permissions_of_new_files(kind, saved, tmp_path):
    (tmp_path / "new").touch()
    files = [path for path in (saved / kind).rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}


def test_models_of_others_need_no_marker(saved, model, tmp_path):
    shutil.copytree(saved / "safetensors model", tmp_path / "theirs")
    (tmp_path / "theirs" / MARKER).unlink()
    weights = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(weights), weights)
    assert load_model(tmp_path / "theirs", dtype="float32").config == model.config


@pytest.mark.parametrize("name", ["../other/file", "/etc/hosts", "a/../../b", "", "a\0b"])
def test_a_marker_cannot_list_files_outside(name, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    folder = tmp_path / "saved"
    folder.mkdir()
    files = {name: {"bytes": 4, "sha256": "0" * 64}}
    content = {"specjax_folder": 1, "kind": "model", "files": files}
    (folder / MARKER).write_text(json.dumps(content))
    refused(
        lambda: folders.check_replaceable(folder, "model", "m"), "not listed as specjax lists files"
    )
    assert (tmp_path / "other" / "file").read_text() == "mine"


def test_each_file_is_read_by_one_of_the_shares(tmp_path):
    for name, size in (("a", 5), ("b", 0), ("c/d", 90), ("c/e", 7), ("f", 40)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    folder_checksums.seal(tmp_path, "model")
    marker = folder_checksums.read_marker(tmp_path)
    assert sorted(marker.files) == ["a", "b", "c/d", "c/e", "f"]
    for name in ("a", "c/d", "c/e", "f"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"y" * len(kept))
        assert folder_checksums.find_damage(tmp_path, marker, share=None) is None
        found = [folder_checksums.find_damage(tmp_path, marker, (part, 3)) for part in range(3)]
        assert sorted(filter(None, found)) == [
            f"{name} is not as it was written: its SHA-256 differs"
        ]
        (tmp_path / name).write_bytes(kept)
    (tmp_path / "f").unlink()
    assert folder_checksums.find_damage(tmp_path, marker) == "f: no such file or directory"


def beside(where):
    """A user's change: a file of his own in a folder."""

    def change(folder, marker):
        deepest = max(folder.rglob("*"), key=lambda path: len(path.parts)).parent
        inside = {"root": folder, "marker": marker.parent, "deepest": deepest}[where]
        (inside / "notes.txt").write_text("mine")

    return change


def appended(folder, marker):
    with (marker.parent / min(json.loads(marker.read_text())["files"])).open("ab") as file:
        file.write(b" ")


CHANGES = {
    "a file in the folder": (beside("root"), "saved.*: holds '.*notes.txt', which"),
    "a file beside the marker": (beside("marker"), "saved.*: holds '.*notes.txt', which"),
    "a file far inside": (beside("deepest"), "saved.*: holds '.*notes.txt', which"),
    "a longer file": (appended, "has .* bytes, .* were written; move it away"),
    "flipped bytes": (lambda folder, marker: flip_four_bytes(folder), "is not as it was .*move it"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [*SAVE, "orbax head"])
def test_what_a_user_put_or_changed_is_not_replaced(kind, change, saved, model, tmp_path):
    folder = shutil.copytree(saved / kind, tmp_path / "saved")
    put, said = CHANGES[change]
    put(folder, *folder.rglob(MARKER))
    before = contents(tmp_path)
    refused(lambda: SAVE.get(kind, SAVE["own head"])(model, folder), said)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", SAVE)
def test_what_specjax_wrote_is_replaced(kind, saved, model, tmp_path):
    folder = shutil.copytree(saved / kind, tmp_path / "saved")
    (marker,) = folder.rglob(MARKER)
    name = min(json.loads(marker.read_text())["files"])
    (marker.parent / name).unlink()  # what is gone is no loss
    SAVE[kind](model, folder)
    assert len(list(folder.rglob(name))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert [path.name for path in folder.iterdir() if path.name[0] == "."] == []


def test_a_head_that_orbax_stored_is_replaced_by_safetensors(saved, model, tmp_path):
    folder = shutil.copytree(saved / "orbax head", tmp_path / "saved")
    save_head(read_head(folder), folder, overwrite=True)
    assert contents(folder).keys() == {"model.safetensors", "specjax_checkpoint.json", MARKER}
    check_same(eagle_head(model), read_head(folder), "replaced")


@pytest.mark.parametrize(
    ("kind", "there", "said"),
    [
        ("safetensors head", "safetensors model", "for: model, not head; give a new or empty"),
        ("safetensors model", "safetensors head", "for: head, not model; give a new or empty"),
        ("dataset", "safetensors head", "for: head, not dataset"),
        ("own head", "orbax model", "for: model, not drafter"),
        ("own head", "safetensors head", "for: head, not drafter"),
        ("safetensors head", "own head", "for: drafter, not head"),
        ("orbax model", "own head", "for: drafter, not model"),
        ("orbax model", "orbax head", "for: drafter, not model"),
    ],
)
def test_what_another_kind_of_save_wrote_is_not_replaced(kind, there, said, saved, model, tmp_path):
    folder = shutil.copytree(saved / there, tmp_path / "saved")
    before = contents(tmp_path)
    refused(lambda: SAVE[kind](model, folder), f"saved.*: is a folder of specjax {said}")
    assert contents(tmp_path) == before


SAVES = """
import sys
from pathlib import Path
from specjax.files import folders

def stop_after(moment):
    if moment == sys.argv[2]:
        print(moment, flush=True)
        sys.stdin.read()

def rename(left, right, given=Path.rename):
    given(left, right)
    if right.name == "earlier":
        stop_after("moved")

Path.rename = rename
with folders.replacing(Path(sys.argv[1]), "model") as new:
    (new / "file").write_text("new")
    stop_after("written")
"""


def write_folder(folder, text):
    with folders.replacing(folder, "model") as new:
        (new / "file").write_text(text)


@pytest.mark.parametrize("stage", ["written", "moved"])
def test_what_a_killed_save_left_is_cleared_away(stage, tmp_path):
    write_folder(tmp_path / "m", "old")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVES, str(tmp_path / "m"), stage]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **streams) as process:
        assert process.stdout.readline() == f"{stage}\n"
        process.kill()
    assert (tmp_path / "m").exists() == (stage == "written")
    with pytest.raises(ZeroDivisionError), folders.replacing(tmp_path / "m", "model"):
        raise ZeroDivisionError
    assert (tmp_path / "m" / "file").read_text() == "old"
    write_folder(tmp_path / "m", "last")
    assert contents(tmp_path).keys() == {"m/file", f"m/{MARKER}"}
    assert (tmp_path / "m" / "file").read_text() == "last"


def test_saves_of_one_folder_at_once_all_succeed(tmp_path):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: write_folder(tmp_path / "thr", str(number)), range(6)))
    assert (tmp_path / "thr" / "file").read_text() in map(str, range(6))
    assert [path.name for path in tmp_path.iterdir()] == ["thr"]
    marker = folder_checksums.read_marker(tmp_path / "thr")
    assert folder_checksums.find_damage(tmp_path / "thr", marker) is None


def test_names_of_any_length_that_a_disk_takes(tmp_path):
    for name in ("n" * 240, "n" * 255):
        write_folder(tmp_path / name, "x")
        write_folder(tmp_path / name, "x")
        assert folder_checksums.read_marker(tmp_path / name).kind == "model"
    with pytest.raises(InputError, match=r"nn: cannot be written \(File name too long\)"):
        write_folder(tmp_path / ("n" * 256), "x")
    assert sorted(len(path.name) for path in tmp_path.iterdir()) == [240, 255]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["specjax-1", "2024", "params"])
def test_folders_with_others_in_them_are_not_checkpoints(name, overwrite, tmp_path):
    (tmp_path / "o" / name).mkdir(parents=True)
    (tmp_path / "o" / name / "thesis.txt").write_text("mine")
    save = lambda: save_drafter(tmp_path / "o", {"a": np.ones(9)}, {}, overwrite=overwrite)  # noqa: E731
    refused(save, f"o: holds '{name}/thesis.txt', which specjax has no record of writing")
    assert contents(tmp_path) == {f"o/{name}/thesis.txt": b"mine"}


def test_a_file_that_was_put_beside_a_model_is_not_read(saved, tmp_path):
    shutil.copytree(saved / "safetensors model", tmp_path / "model")
    assert not (tmp_path / "model" / "generation_config.json").exists()
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    with pytest.raises(InputError, match="generation_config.json is not listed"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("name", [".specjax-notes.tmp", ".specjax-notes123.tmp"])
def test_a_claim_deletes_nothing_in_a_folder_that_is_not_yet_ours(name, tmp_path):
    claim = lambda: folders.claim(tmp_path / name, "training run", "workdir='w'")  # noqa: E731
    left, notes = (tmp_path / name / file for file in (".specjax-notes123.tmp", ".specjax-n.tmp"))
    left.parent.mkdir()
    left.write_text("mine")
    with contextlib.suppress(InputError):
        claim()
    assert left.read_text() == "mine"
    # Of a folder that is ours, it is what a killed process left.
    notes.write_text("mine")
    claim()
    assert (left.exists(), notes.exists()) == (False, True)


LOCKS = {
    "a link": lambda lock: lock.symlink_to("../precious.txt"),
    "a link to nothing": lambda lock: lock.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_that_is_not_ours_stays_as_it_is(kind, marked, tmp_path):
    folder, lock = tmp_path / "w", tmp_path / "w" / LOCK
    folder.mkdir()
    (tmp_path / "precious.txt").write_text("mine")
    if marked:
        folders.claim(folder, "training run", "w")
    LOCKS[kind](lock)
    taken = folder_lock.lock(folder, "training run", "workdir='w'")
    refused(taken.__enter__, "^workdir='w': holds .*specjax.lock")
    if not marked:
        said = "holds 'specjax.lock', which specjax has no"
        refused(lambda: write_folder(folder, "x"), said)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious.txt", "w"]


def test_a_killed_claim_does_not_make_a_folder_foreign(tmp_path):
    (tmp_path / ".specjax-abcd_123.tmp").write_text("{")
    (tmp_path / LOCK).touch()
    folders.claim(tmp_path, "training run", "workdir='w'")
    assert folder_checksums.read_marker(tmp_path) == folder_checksums.Marker("training run", None)
    with pytest.raises(
        InputError, match="^workdir='w': is a folder of specjax for: training run, not answers"
    ):
        folders.claim(tmp_path, "answers", "workdir='w'")


HOLDS = """
import sys, time
from pathlib import Path
from specjax.distributed import folder_lock

with folder_lock.hold(Path(sys.argv[1]), "training run", "workdir"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_run_at_a_time(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = tmp_path / "w"
    command = [sys.executable, "-c", HOLDS, str(folder)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        hold = folder_lock.hold(folder, "training run", "workdir='w'")
        said = refused(hold.__enter__, "another run")
        assert said.startswith(f"workdir='w': another run is at work there (pid {first.pid} on ")
        assert (folder / LOCK).read_text().strip() in said
        assert " -c " in said
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    for _ in range(2):
        with folder_lock.hold(folder, "training run", "workdir"):
            assert (folder / LOCK).read_text().startswith(f"pid {os.getpid()} on ")


@pytest.mark.parametrize("marked", [True, False])
def test_no_run_takes_a_folder_that_holds_a_model(marked, saved, tmp_path, monkeypatch, capsys):
    """Refused before anything is loaded; the model stays as it is, byte for byte."""
    monkeypatch.chdir(tmp_path)
    model = shutil.copytree(saved / "safetensors model", tmp_path / "model")
    said = "is a folder of specjax for: model, not "
    if not marked:
        (model / MARKER).unlink()
        said = "holds 'config.json', and no "
    before = contents(tmp_path)
    config = get_config()
    config.data, config.workdir = str(tmp_path / "nothing"), str(model)
    make = lambda target, data, config: pytest.fail("to be refused earlier")  # noqa: E731
    refused(
        lambda: run.run(read(config), make, Console(quiet=True)),
        f"workdir='.*model': {said}training run",
    )
    config_file = ROOT / "configs" / "generate_smollm2.py"
    generation = [f"--config={config_file}", "--config.target=nothing"]
    store = [f"--input={tmp_path}", "--target=nothing"]
    for main, given, words in (
        (generate.main, [*generation, f"--config.workdir={model}"], f"model': {said}answers"),
        (
            generate.main,
            [*generation, f"--config.workdir={tmp_path / 'w'}", f"--config.output={model}"],
            f"model: {said.removesuffix(', and no ')}",
        ),
        (features.main, [*store, f"--output={model}"], f"model': {said}features"),
        # as it was typed
        (features.main, [*store, "--output=./model"], f"output='./model': {said}features"),
    ):
        assert words in refused_command(main, given, capsys)
    assert contents(tmp_path) == before


def test_an_output_is_not_the_work_folder(tmp_path, capsys):
    for name in ("w", "."):
        argv = [
            "--config=configs/generate_smollm2.py",
            f"--config.workdir={tmp_path / 'w'}",
            f"--config.output={tmp_path / name}",
        ]
        assert "the work folder is in it" in refused_command(generate.main, argv, capsys)
    assert not list(tmp_path.iterdir())


def test_a_second_run_in_a_workdir_is_refused(tmp_path):
    with folder_lock.hold(tmp_path / "w", "training run", "workdir"):
        refused(
            lambda: toy_run(tmp_path), rf"w': another run is at work there \(pid {os.getpid()} on"
        )
    assert sorted(contents(tmp_path / "w")) == sorted([LOCK, MARKER])


def test_a_run_asks_first_whether_it_can_export(tmp_path):
    folders.claim(tmp_path / "w", "training run", "workdir")
    (tmp_path / "w" / "export").mkdir()
    (tmp_path / "w" / "export" / "notes.txt").write_text("mine")
    refused(lambda: toy_run(tmp_path), "w/export: holds 'notes.txt', which specjax has no record")
    assert not (tmp_path / "w" / "checkpoints").exists()
    assert not (tmp_path / "w" / "metrics.jsonl").exists()
    # The lock ended with the run that was refused.
    with folder_lock.hold(tmp_path / "w", "training run", "workdir"):
        pass
