"""`python -m specjax.export`: writes, reads again, and refuses on one line."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny_models import eagle_head, mtp_head

from specjax.apps import export
from specjax.loading.load import load_model, save_model
from specjax.methods.heads.head import check_same
from specjax.methods.heads.published_layout import PublishedLayout
from specjax.methods.published_layouts import read_foreign
from specjax.methods.saved_heads import compacted, read_head, save_head
from train.methods.distill import DistillLoss, distill_method


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    """The tiny target as a directory, and a head for it as it is named there."""
    path = tmp_path_factory.mktemp("target") / "model"
    save_model(tiny, path)
    return path, load_model(path, dtype="float32")


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    head = eagle_head(target[1], vocabulary=40)
    path = tmp_path_factory.mktemp("heads") / "eagle3"
    save_head(head, path)
    return path, head


def run(*flags):
    return export.main([str(flag) for flag in flags])


def test_formats_there_and_back(target, saved, tmp_path, capsys):
    path, model = target
    for form in ("eagle3", "speculators"):
        out = tmp_path / form
        assert (
            run(f"--head={saved[0]}", f"--format={form}", f"--output={out}", f"--target={path}")
            == 0
        )
        said = capsys.readouterr().out
        assert f"eagle3 for {path} as {form}, 40 of 61 tokens" in said
        check_same(saved[1], read_foreign(out, model), form)
    # From one tool's layout to ours, and to another's.
    flags = [f"--head={tmp_path / 'eagle3'}", f"--target={path}"]
    assert run(*flags, "--format=specjax", f"--output={tmp_path / 'own'}") == 0
    check_same(saved[1], read_head(tmp_path / "own"), "own")
    assert run(*flags, "--format=compact", f"--output={tmp_path / 'compact'}") == 0
    assert "eagle3 for" in capsys.readouterr().out
    check_same(compacted(saved[1]), read_head(tmp_path / "compact"), "compact")
    assert run(*flags, "--format=speculators", f"--output={tmp_path / 'other'}") == 0
    check_same(saved[1], read_foreign(tmp_path / "other", model), "other")


def test_a_draft_models_vocabulary_is_widened(target, tmp_path, capsys):
    """The only format that holds a draft model is our own."""
    path, model = target
    method = distill_method(model, (0, 2), np.arange(0, 40, dtype=np.int32), DistillLoss())
    save_head(method.head(method.init(jax.random.key(0)), {}), tmp_path / "head")
    flags = [f"--head={tmp_path / 'head'}", "--format=specjax", f"--target={path}"]
    assert run(*flags, f"--output={tmp_path / 'out'}", "--whole_vocabulary") == 0
    assert "61 of 61 tokens; read again" in capsys.readouterr().out
    assert read_head(tmp_path / "out").draft_ids is None


def test_modules_have_no_other_layout(target, tmp_path, capsys):
    path, model = target
    save_head(mtp_head(model, 2, vocabulary=40), tmp_path / "head")
    flags = [f"--head={tmp_path / 'head'}", f"--target={path}"]
    assert run(*flags, "--format=eagle3", f"--output={tmp_path / 'other'}") == 2
    said = capsys.readouterr().err
    assert "format='eagle3': this head is mtp; no other tool has a layout for it" in said
    flags += ["--format=specjax", f"--output={tmp_path / 'out'}"]
    assert run(*flags, "--whole_vocabulary") == 0
    assert "mtp for" in capsys.readouterr().out
    assert read_head(tmp_path / "out").draft_ids is None


def test_layer_ids(target, saved, tmp_path):
    flags = [f"--head={saved[0]}", f"--target={target[0]}", f"--output={tmp_path / 'out'}"]
    assert run(*flags, "--format=speculators") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    # The first tap is the embedding, which is the output of no layer.
    assert run(*flags, "--format=speculators", "--layer_ids=output") == 2


def test_whole_vocabulary(target, tmp_path, capsys):
    path, model = target
    save_head(eagle_head(model, version=1, vocabulary=40), tmp_path / "head")
    flags = [f"--head={tmp_path / 'head'}", "--format=eagle", f"--target={path}"]
    assert run(*flags, f"--output={tmp_path / 'out'}") == 2
    assert "whole_vocabulary" in capsys.readouterr().err
    assert run(*flags, f"--output={tmp_path / 'out'}", "--whole_vocabulary") == 0
    assert "61 of 61 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "head is missing: pass --head=VALUE; format is missing"),
        (["--format=gguf"], "format='gguf' is unknown: use medusa, eagle, eagle3, "),
        (["--format=eagle"], "format='eagle': this head is eagle3; use eagle3 or speculators"),
        (["--head=/nowhere"], "head='/nowhere': no such directory"),
        (["--head=eagle3"], "no eagle3 comes with specjax for"),
        (["--output=./mine"], "output='./mine': holds 'notes', which specjax has no record"),
        (
            ["--format=specjax", "--output=./mine", "--target=nothing"],
            "output='./mine': holds 'notes', which specjax has no record",
        ),
        (["--target=nothing"], "target='nothing': no such file"),
        (["--dtype=int8"], "dtype='int8'"),
        (["--heads=1"], "unrecognized arguments: --heads=1"),
    ],
)
def test_refusals_take_one_line(flags, message, target, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    given = {
        "--head": saved[0],
        "--format": "eagle3",
        "--output": tmp_path / "out",
        "--target": target[0],
    }
    given |= dict(flag.split("=", 1) for flag in flags)
    line = [f"{name}={value}" for name, value in given.items()] if flags else []
    assert run(*line) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not (tmp_path / "out").exists()


def test_a_model_is_no_head(target, tmp_path, capsys):
    flags = [f"--head={target[0]}", f"--target={target[0]}", f"--output={tmp_path / 'out'}"]
    assert run(*flags, "--format=eagle3") == 2
    said = capsys.readouterr().err
    assert f"{target[0]}: holds a model, not a head; give that of a head" in said
    assert "copy the folder" not in said


def test_an_export_that_reads_back_differently_is_refused(
    target, saved, tmp_path, monkeypatch, capsys
):
    """The comparison is on: a writer with its halves swapped does not get through."""
    right = PublishedLayout.write

    def wrong(*arguments):
        config, tensors = right(*arguments)
        gate, up = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return config, tensors

    monkeypatch.setattr(PublishedLayout, "write", wrong)
    flags = [f"--head={saved[0]}", "--format=eagle3", f"--target={target[0]}"]
    assert run(*flags, f"--output={tmp_path / 'out'}") == 2
    assert "read again, it is another head" in capsys.readouterr().err


def test_help_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "specjax.export", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--whole_vocabulary" in done.stdout
