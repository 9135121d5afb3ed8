"""`python -m specjax`: every command is listed, and runs by its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import refused_command

from specjax import __main__ as commands

ROOT = Path(__file__).parent.parent


def test_every_command_is_listed(capsys):
    """Those modules that `python -m` can run."""
    runnable = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for folder in ("specjax", "train")
        for path in (ROOT / folder).glob("*.py")
        if '__name__ == "__main__"' in path.read_text() and path.stem != "__main__"
    ]
    assert sorted(map(commands.module_of, commands.COMMANDS)) == sorted(runnable)
    assert commands.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in commands.COMMANDS:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.endswith(".")


def test_an_unknown_command(capsys):
    assert "no command 'decod': did you mean decode? use decode, bench" in refused_command(
        commands.main, ["decod"], capsys
    )


@pytest.mark.parametrize("command", ["report", "train.eagle"])
def test_a_command_by_its_name(command):
    """Its own help, without the others imported."""
    done = subprocess.run(
        [sys.executable, "-m", "specjax", command, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.startswith(("usage: ", commands.summary(command)))


def test_the_exit_code_is_the_commands_own():
    failed = subprocess.run(
        [sys.executable, "-m", "specjax", "report", "nowhere"], capture_output=True, cwd=ROOT
    )
    assert failed.returncode == 2


def test_a_file_that_hides_the_package_train(tmp_path):
    """The user's file is not run, and the remedy that is named works from the same folder."""
    (tmp_path / "train.py").write_text("raise SystemExit('ran')")
    path = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=path)

    listed = run("-m", "specjax")
    assert (listed.returncode, "train.eagle" in listed.stdout) == (0, True)
    assert f"Hidden by {tmp_path / 'train.py'}" in listed.stdout
    refused = run("-m", "specjax", "train.eagle")
    assert (refused.returncode, "run python -P -m train.eagle" in refused.stderr) == (2, True)
    assert len(refused.stderr.splitlines()) == 1
    assert run("-P", "-m", "train.eagle", "--help").returncode == 0
