"""`scripts/kill_and_resume.py`: its comparison sees every change, and it survives its own kills."""

import json
import random
import shutil
import sys
import types

import numpy as np
import pytest
from bad_input import refused_command
from commands import script_module
from toy_training import SHAPE, conversations, toy_run, toy_target

from specjax.files import folders
from specjax.methods.saved_heads import read_head, save_head
from train.data.examples import target_metadata
from train.data.write_responses import write_responses
from train.generation.saved_answers import open_answers


@pytest.fixture(scope="module")
def script():
    with script_module("kill_and_resume") as module:
        yield module


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A toy's run, not to be changed."""
    root = tmp_path_factory.mktemp("trained")
    assert toy_run(root) == 0
    return root / "w"


def change_export(folder):
    head = read_head(folder / "export")
    kernel = np.array(head.params["head"]["kernel"])
    kernel[0, 0, 0] += 1e-7
    head.params["head"]["kernel"] = kernel
    save_head(head, folder / "export", overwrite=True)


def change_metrics(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"step": 8', '"step": 9'))


def add_a_line(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines, lines[-1]]))


def change_config(folder):
    content = json.loads((folder / "config.json").read_text())
    content["config"]["seed"] = 3
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_export, ["export head.kernel differs"]),
        (change_metrics, ["metrics, line 2 differs"]),
        (add_a_line, ["metrics, line 5 is additional"]),
        (change_config, ["config.json differs"]),
        (
            lambda folder: shutil.rmtree(folder / "checkpoints" / "step-000000010"),
            ["steps of checkpoints differs"],
        ),
        (
            lambda folder: (folder / ".specjax-x.tmp").touch(),
            ["the names of its files differs"],
        ),
    ],
)
def test_a_change_in_a_run_is_found(change, found, script, trained, tmp_path):
    reference = script.contents("medusa", trained)
    shutil.copytree(trained, tmp_path / "w")
    config = json.loads((tmp_path / "w" / "config.json").read_text())
    config["config"]["workdir"] = str(tmp_path / "w")
    (tmp_path / "w" / "config.json").write_text(json.dumps(config))
    assert script.differences(reference, script.contents("medusa", tmp_path / "w")) == []
    change(tmp_path / "w")
    assert script.differences(reference, script.contents("medusa", tmp_path / "w")) == found


def generated(folder, examples, names=(), workdir="w"):
    generation = {"config": {"workdir": workdir, "seed": 0}}
    metadata = target_metadata(toy_target())
    write_responses(folder, examples, metadata, names, generation=generation)


def test_a_change_in_answers_is_found(script, tmp_path):
    found = []
    for number, name in enumerate(("reference", "same", "other")):
        examples = conversations(3)
        folder = tmp_path / name
        folders.claim(folder, "answers", "workdir")
        saved = open_answers(folder, {"config": {"workdir": name}})
        if name == "other":
            examples[1].tokens[2] += 1
        saved.add({0: [1, 2], 1: [3 + number // 2]})
        generated(folder / "responses", examples, workdir=name)
        found.append(script.contents("generation", folder))
    assert script.differences(found[0], found[1]) == []
    changed = ["answer 1 differs", "conversation 1 tokens differs"]
    assert script.differences(found[0], found[2]) == changed


def test_a_change_in_features_is_found(script, tmp_path):
    found = []
    for name in ("reference", "same", "other"):
        examples = conversations(2, features=("final_norm",))
        if name == "other":
            examples[0].features["final_norm"][1, SHAPE["hidden_size"] - 1] += np.float16(0.01)
        generated(tmp_path / name / "part-00000", examples, ("final_norm",), workdir=name)
        found.append(script.contents("features", tmp_path / name))
    assert script.differences(found[0], found[1]) == []
    changed = ["part-00000 conversation 0 final_norm differs"]
    assert script.differences(found[0], found[2]) == changed
    shutil.rmtree(tmp_path / "other" / "part-00000")
    lost = script.differences(found[0], script.contents("features", tmp_path / "other"))
    assert "part-00000 conversation 1 tokens is missing" in lost


def test_kills_come_from_the_seed_and_cover_the_time(script):
    moments = script.spread(20, 10.0, random.Random("0 training"))
    assert moments == script.spread(20, 10.0, random.Random("0 training"))
    assert moments != script.spread(20, 10.0, random.Random("1 training"))
    assert [int(moment * 2) for moment in sorted(moments)] == list(range(20))


STAGE = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
done = len(list(folder.glob("step-*")))
for step in range(done, 6):
    time.sleep(0.1)
    (folder / f"step-{step}").write_text("%s" if done else "in one go")
"""


@pytest.mark.parametrize("resumed", ["in one go", "in two"])
def test_a_command_is_killed_and_compared(resumed, script, tmp_path, monkeypatch):
    """A command that leaves something else where it was resumed is found out."""
    (tmp_path / "stage.py").write_text(STAGE % resumed)
    monkeypatch.setattr(script, "contents", lambda what, folder: texts(folder))
    # `_start` runs modules.
    (tmp_path / "python").write_text(f'#!/bin/sh\nshift\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(tmp_path / "python"))
    options = types.SimpleNamespace(kills=2, seed=0)
    command = lambda folder: [str(tmp_path / "stage.py"), str(folder)]  # noqa: E731
    result = script.kill_and_compare("toy", command, tmp_path / "work", options)
    assert result.kills == 2
    assert result.starts >= result.runs + 2
    assert bool(result.different) == (resumed == "in two")


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "--what=mtp,baking",
            "what='baking' is unknown: use draft_model, layerskip, medusa, medusa2",
        ),
        ("--kills=-1", "kills"),
    ],
)
def test_bad_flags_are_refused(flag, said, script, capsys):
    error = refused_command(script.main, [flag], capsys)
    assert said in error
