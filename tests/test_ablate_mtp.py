"""`scripts/ablate_mtp.py`: its runs, which are resumed and not repeated, and its table."""

import json
import re
import sys

import pytest
from conftest import slow
from script_modules import script_module
from text_tokens import write_text_tokens

from train import mtp


@pytest.fixture(scope="module")
def script():
    # Its runs are measured by the other.
    with script_module("ablate_mtp") as module, script_module("training.report_mtp"):
        yield module


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_text_tokens(tmp_path_factory.mktemp("text"))


def flag(command, name):
    """The last value of a flag in a command."""
    return [one.partition("=")[2] for one in command if one.startswith(f"--{name}=")][-1]


@pytest.fixture
def commands(script, monkeypatch):
    """Commands that only write what is read of them; the list has those that were run."""
    found = []

    def run_child(command, **rest):
        found.append(command)
        if "train.mtp" not in command:
            loss = 3.0 + len(found)
            content = {"model": "export", "lm_loss": loss, "tau_sim": 1.5, "held_out_tokens": 7}
            with open(flag(command, "out"), "w") as file:
                json.dump(content, file)
            return 0
        folder = script.Path(flag(command, "config.workdir"))
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 4, "train/tokens": 500.0}\n')
        return 0

    monkeypatch.setattr(sys.modules["lib.stages"], "run_child", run_child)
    return found


def test_every_variant_with_every_seed(script, commands, tokens, tmp_path, capsys):
    argv = [f"--data={tokens}", f"--workdir={tmp_path / 'w'}", "--size=debug", "--tokens=512"]
    argv += ["--config.model.hidden_size=16", "--config.warmup=1"]
    assert script.main([*argv, "--seeds=2"]) == 0
    assert len(commands) == 2 * 2 * len(script.VARIANTS)
    trained = commands[::2]
    assert {flag(one, "config.steps") for one in trained} == {"4"}
    assert {flag(one, "config.warmup") for one in trained} == {"1"}
    assert {flag(one, "config.model.hidden_size") for one in trained} == {"16"}
    assert {flag(one, "config.eval.prompts") for one in trained} == {"0"}
    assert [flag(one, "config.seed") for one in trained] == ["0"] * 6 + ["1"] * 6
    told = [
        tuple(
            flag(one, f"config.mtp.{name}")
            for name in ("num_modules", "loss_weight", "late_loss_weight")
        )
        for one in trained[:6]
    ]
    assert told == [
        *(("0", "0.3", "0.3"), ("1", "0.3", "0.3"), ("2", "0.3", "0.3")),
        *(("1", "0.1", "0.1"), ("1", "0.3", "0.1"), ("1", "0.3", "0.3")),
    ]
    recursion = [one for one in trained if any("mtp.steps" in part for part in one)]
    assert {flag(one, "config.mtp.steps") for one in recursion} == {"2"}
    assert len(recursion) == 2
    assert not any(part.startswith("--depths") for part in commands[1])
    assert flag(commands[3], "depths") == "2"
    assert flag(commands[3], "row_tokens") == "64"

    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "w" / "ablation.json").read_text())
    (first, second) = content["variants"]["lambda_0.1"]["numbers"]["lm_loss"]["values"]
    loss = content["variants"]["lambda_0.1"]["numbers"]["lm_loss"]
    assert loss["mean"] == pytest.approx((first + second) / 2)
    assert loss["spread"] == pytest.approx(abs(second - first) / 2**0.5)
    assert f"{loss['mean']:.4f} ± {loss['spread']:.4f}" in shown
    assert content["variants"]["recursion_2"]["numbers"]["trained_tokens"]["mean"] == 500

    # More seeds, fewer variants: the runs that are there are not repeated.
    commands.clear()
    assert script.main([*argv, "--seeds=3", "--variants=modules_2,modules_0"]) == 0
    names = [script.Path(flag(one, "config.workdir")).name for one in commands[::2]]
    assert names == ["modules_2-seed2", "modules_0-seed2"]
    content = json.loads((tmp_path / "w" / "ablation.json").read_text())
    assert list(content["variants"]) == ["modules_2", "modules_0"]
    assert len(content["variants"]["modules_0"]["numbers"]["lm_loss"]["values"]) == 3

    # Others are not those.
    assert script.main([*argv, "--tokens=1024"]) == 2
    assert "modules_0-seed0 was done there with another command" in capsys.readouterr().err


@pytest.mark.parametrize("variants", ["recursion_2", *slow("modules_0,modules_2,lambda_0.3_0.1")])
def test_runs_are_trained_and_measured(variants, script, tokens, tmp_path, monkeypatch, capsys):
    def run_child(command, **rest):
        """In this process."""
        if command[1] == "-m":
            return mtp.main(command[3:])
        return sys.modules["training.report_mtp"].main(command[2:])

    monkeypatch.setattr(sys.modules["lib.stages"], "run_child", run_child)
    argv = [f"--data={tokens}", f"--workdir={tmp_path / 'w'}", "--size=debug", "--tokens=256"]
    argv += ["--seeds=1", f"--variants={variants}", "--config.model.num_layers=1"]
    argv += ["--config.eval.batches=0", "--held_out_tokens=100"]
    assert script.main(argv) == 0
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "w" / "ablation.json").read_text())
    for name in variants.split(","):
        numbers = content["variants"][name]["numbers"]
        assert 3 < numbers["lm_loss"]["mean"] < 12
        assert 100 < numbers["trained_tokens"]["mean"] <= 256
        drafts = {"tau_sim", "mtp_0_agrees_with_model", "mtp_1_agrees_with_model"} & numbers.keys()
        assert len(drafts) == (0 if name == "modules_0" else 3)
        assert re.search(rf"{name} .* {numbers['lm_loss']['mean']:.4f}", shown)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--variants=modules_3"], "variants='modules_3' is unknown: use modules_0, modules_1"),
        (["--config.seed=3"], "config.seed: each run has its own; leave it out"),
        (["--config.mtp.num_modules=3"], "config.mtp.num_modules: each run has its own"),
        (["--config.nosuch=3"], "config.nosuch='3': there is no such field"),
        (["--config.mtp.decay=-1"], "mtp.decay=-1.0"),
        (["--config.row_tokens=2"], "row_tokens=2"),
        (["--depths=1"], "depths=1"),
        (["--seeds=0"], "seeds=0"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_bad_input(argv, said, script, tokens, tmp_path, capsys):
    assert script.main([f"--data={tokens}", f"--workdir={tmp_path / 'w'}", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "w").exists()
