"""scripts/training/draw_training.py: how a run learned, as a picture."""

import json

import pytest
from script_modules import script_module

with script_module("training.draw_training") as script:
    pass


@pytest.fixture
def run(tmp_path):
    rows = [
        {"step": 1, "train/tokens": 1e6, "train/loss_lm": 5.0, "train/loss": 6.0},
        {"step": 1, "eval/loss_lm": 4.5, "eval/loss_mtp_0": 4.0, "eval/acc_pos_0": 0.5},
        {"step": 2, "train/tokens": 2e6, "train/loss_lm": 4.0, "train/acc_pos_0": 0.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows, tmp_path


def test_curves_are_over_tokens(run):
    rows, _ = run
    assert script.curves(rows, script.LOSS) == {
        ("train", "lm"): ([1.0, 2.0], [5.0, 4.0]),
        ("eval", "lm"): ([1.0], [4.5]),
        ("eval", "mtp_0"): ([1.0], [4.0]),
    }
    assert script.curves(rows, script.AGREES) == {
        ("eval", "0"): ([1.0], [0.5]),
        ("train", "0"): ([2.0], [0.25]),
    }


def test_a_picture(run):
    _, folder = run
    for name in ("a.svg", "b.svg"):
        assert script.main([f"--workdir={folder}", f"--out={folder / name}", "--bigram=4.9"]) == 0
    assert (folder / "a.svg").read_bytes() == (folder / "b.svg").read_bytes()


def test_bad_input(run, capsys):
    _, folder = run
    assert script.main([f"--workdir={folder}", f"--out={folder / 'a.gif'}"]) == 2
    assert "use one of the endings .svg, .png, .pdf" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("")
    assert script.main([f"--workdir={folder}", f"--out={folder / 'a.svg'}"]) == 2
    assert "has no losses of train.mtp" in capsys.readouterr().err
