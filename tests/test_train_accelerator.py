"""`scripts/train_accelerator.py`: stopped calls, carried to new folders, and continued."""

import os
import shutil
from pathlib import Path

import pytest
from bad_input import refused_command
from commands import script_module

COUNTING = """
import os, pathlib, sys, time
work = pathlib.Path(sys.argv[1]) / "checkpoints"
found = sorted(work.glob("step-*"))
step, state = 0, ""
if found:
    step, state = int(found[-1].name[5:]), (found[-1] / "state").read_text()
try:
    while step < 9:
        step, state = step + 1, state + f"{step} "
        time.sleep(60 * (str(step) == os.environ.get("PAUSE")))
except KeyboardInterrupt:
    pass
(last := work / f"step-{step:09d}").mkdir(parents=True)
(last / "state").write_text(state)
(last / "more").write_bytes(os.urandom(2_500_000))
sys.exit(130 * (step < 9))
"""
"""A trainer that counts to 9, rests at PAUSE, and saves when it is stopped."""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, whose stages are two such trainers."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with script_module("train_accelerator") as module:
        stages = [
            module.Stage(Path(name), Path(name) / "export", ["counting", name])
            for name in ("first", "second")
        ]
        monkeypatch.setattr(module, "stages", lambda *_, **options: stages)
        yield module


def state(work, name):
    *_, last = sorted((work / name / "checkpoints").glob("step-*"))
    return (last / "state").read_text()


def test_calls_continue_each_other_on_new_machines(script, tmp_path, capsys, monkeypatch):
    def call(number, work, seconds, *more):
        argv = [f"--out={tmp_path / f'out{number}'}", f"--work={tmp_path / work}", *more]
        code = script.main([*argv, f"--minutes={seconds / 60}", "--part_mb=1", "--carry_mb=2"])
        return code, capsys.readouterr()

    assert call(0, "whole", 60)[0] == 0
    assert "all stages are finished" in (tmp_path / "out0" / "report.txt").read_text()
    argv = [f"--out={tmp_path / 'q'}", f"--work={tmp_path / 'w'}", f"--input={tmp_path / 'out0'}"]
    assert "says that none need follow" in refused_command(script.main, argv, capsys)

    monkeypatch.setenv("PAUSE", "4")
    code, said = call(1, "a", 4)
    monkeypatch.delenv("PAUSE")
    assert (code, "first: stopped after" in said.out) == (0, True), said
    parts = sorted(path.name for path in (tmp_path / "out1").glob("state.*"))
    assert len(parts) == 3
    assert all((tmp_path / "out1" / name).stat().st_size <= 10**6 for name in parts)
    assert said.out.count("more than --carry_mb") == 2
    assert len(list((tmp_path / "a/first/checkpoints").iterdir())) == 1

    # Its parts come in two calls to a second machine.
    for name, ours in (("x", parts[:2]), ("y", parts[2:])):
        (tmp_path / name).mkdir()
        for file in ["parts.json", *ours]:
            shutil.copy(tmp_path / "out1" / file, tmp_path / name)
    code, said = call(2, "b", 60, f"--input={tmp_path / 'x'}")
    assert (code, f"calls on this machine must still bring {parts[2]}" in said.out) == (0, 1)
    assert not (tmp_path / "b" / "first").exists()
    code, said = call(3, "b", 60, f"--input={tmp_path / 'y'}")
    assert code == 0
    assert "call 2, 1 minutes" in said.out
    assert "all stages are finished" in said.out
    for name in ("first", "second"):
        assert state(tmp_path / "b", name) == state(tmp_path / "whole", name)
    assert len(list((tmp_path / "b/first/checkpoints").iterdir())) == 2

    # The first machine is of an earlier call than what the second one wrote.
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "parts.json").write_text('{"call": 2, "parts": {}}')
    argv = [f"--out={tmp_path / 'out4'}", f"--work={tmp_path / 'a'}", f"--input={tmp_path / 'z'}"]
    assert "delete that folder" in refused_command(script.main, argv, capsys)


def test_what_fails_is_said_and_damage_found(script, tmp_path, capsys):
    argv = [f"--work={tmp_path / 'w'}", "--minutes=0.04"]
    (tmp_path / "counting.py").write_text("raise SystemExit(3)")
    assert script.main([*argv, f"--out={tmp_path / 'o'}"]) == 1
    assert "first: counting failed with code 3" in capsys.readouterr().out
    error = refused_command(script.main, [*argv, f"--out={tmp_path / 'o'}"], capsys)
    assert "holds files already" in error
    for more, said in (
        (["--size=debug"], "size='debug': earlier calls had None"),
        ([f"--responses={tmp_path}"], "responses: only the first call reads them"),
        (["--train_options=--config.minutes=5"], "train_options: --config.minutes is set by"),
    ):
        assert said in refused_command(
            script.main, [*argv, f"--out={tmp_path / 'q'}", *more], capsys
        )
    (part,) = (tmp_path / "o").glob("state.*")
    part.write_bytes(part.read_bytes()[:-1])
    argv = [f"--work={tmp_path / 'v'}", f"--out={tmp_path / 'p'}", f"--input={tmp_path / 'o'}"]
    assert "damaged; copy it again" in refused_command(script.main, argv, capsys)
    assert os.listdir(tmp_path / "v" / "incoming") == []
