"""Stored features: those of each conversation alone, in parts that are kept on resuming."""

import os

import numpy as np
import pytest
from conftest import tiny_config
from test_decoder import one_pass
from test_responses import example

from specjax.distributed import folder_lock
from specjax.files.folder_checksums import LOCK, MARKER
from specjax.loading.load import random_model
from specjax.models.form import Form
from train import features
from train.data.combined_datasets import open_sources
from train.data.examples import target_metadata
from train.data.write_responses import write_responses

NAMES = ("layer_input:1", "final_norm")


@pytest.fixture(scope="module")
def target():
    return random_model(tiny_config(max_positions=200), 0, dtype="float32")


@pytest.fixture
def store(target, tmp_path, monkeypatch):
    """Writes seven conversations, and runs the command with further arguments."""

    def load(name, *, field, form, weights):
        assert (form, weights) == (Form.for_training("cpu"), "float")
        return target

    monkeypatch.setattr(features, "load_model", load)
    lengths = (20, 70, 33, 64, 100, 8, 21)
    said = [example(number, length, 5) for number, length in enumerate(lengths)]
    write_responses(tmp_path / "said", said, target_metadata(target), ())

    def run(*more, source="said"):
        places = [f"--input={tmp_path / source}", f"--output={tmp_path / 'out'}"]
        names = [f"--features={','.join(NAMES)}", "--part=3", "--tokens=256"]
        return features.main([*places, *names, *more])

    return said, run, tmp_path / "out"


def times(folder):
    """When each file was written; the lock is each run's own."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {path: path.stat().st_mtime_ns for path in files}


def test_features_are_those_of_each_conversation_alone(store, target):
    said, run, out = store
    assert run("--products=float32") == 0
    made = [f"part-0000{n}" for n in range(3)]
    assert sorted(path.name for path in out.iterdir()) == [*made, LOCK, MARKER]
    stored = open_sources([out], target_metadata(target))
    assert stored.feature_names == NAMES
    assert len(stored) == len(said)
    for index in range(len(stored)):
        got = stored[index]
        wanted = said[got.id]
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
        np.testing.assert_array_equal(got.loss_mask, wanted.loss_mask)
        size = len(got.tokens)
        padded = np.pad(got.tokens, (0, 100 - size))[None]
        alone = one_pass(target, padded, features=NAMES)
        for name in NAMES:
            np.testing.assert_allclose(
                got.features[name], alone.features[name][0, :size], rtol=2e-3, atol=2e-3
            )


def test_parts_that_are_there_are_kept(store, monkeypatch):
    _, run, out = store
    assert run("--products=float32", "--limit=6") == 0
    before = times(out)
    calls = []
    forward = features._forward
    monkeypatch.setattr(features, "_forward", lambda *args: calls.append(1) or forward(*args))
    assert run("--products=float32") == 0
    assert len(calls) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_second_run_is_refused(store, capsys):
    _, run, out = store
    with folder_lock.hold(out, "features", "output"):
        assert run("--products=float32") == 2
    assert f"out': another run is at work there (pid {os.getpid()} on " in capsys.readouterr().err
    assert not list(out.glob("part-*"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--products=bfloat16"], "products=float32, not bfloat16; pass --products=float32"),
        (["--products=float32", "--part=2"], "holds other conversations or features"),
        (["--products=float32", "--features=final_norm"], "holds other conversations or feat"),
        (["--products=float32", "--limit=3"], "is there already, and 3 conversations fill 1"),
        (["--part=0"], "part=0: use a whole number of at least 1"),
        (["--features=final"], "final"),
        (["--products=float16"], "products='float16' is unknown: use auto, float32, bfloat16"),
    ],
)
def test_what_does_not_go_together_is_refused(more, said, store, capsys):
    _, run, out = store
    assert run("--products=float32") == 0
    before = times(out)
    capsys.readouterr()
    assert run(*more) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
    assert times(out) == before
