"""`scripts/reproduce_heads.py`: its commands, what stops them, and the heads it exports."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from bad_input import refused_command
from commands import SCRIPTS, script_module
from conftest import slow
from tiny_models import eagle_head

from specjax.files import folders
from specjax.loading.checkpoints import load_drafter
from specjax.methods import find_head
from specjax.methods.saved_heads import read_head, save_head


@pytest.fixture(scope="module")
def script():
    with script_module("reproduce_heads") as module:
        yield module


def wait_for(path, process):
    for _ in range(1200):
        if path.exists():
            return path.read_text()
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} is not written")


def has_ended(pid):
    for _ in range(1200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


CHILD = """
import os, pathlib, sys, time
root = pathlib.Path(sys.argv[1])
try:
    assert os.getsid(0) == os.getpid()
    (root / "starting").write_text(str(os.getpid()))
    (root / "starting").rename(root / "ready")
    time.sleep(120)
except KeyboardInterrupt:
    (root / "saved").write_text("")
    sys.exit(130)
"""
"""Waits to be stopped, and saves."""

DEAF = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
(pathlib.Path(sys.argv[1]) / "ready").write_text(str(os.getpid()))
time.sleep(120)
"""
"""Does not listen to Ctrl-C."""

PARENT = """
import signal, sys
if {hears}:
    # The tests themselves may run where Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {scripts!r})
from lib import child_processes
from specjax.apps.command_line import command
child_processes.GRACE_S = {grace}
run = lambda argv: child_processes.run_child([sys.executable, "-c", {child!r}, {root!r}])
sys.exit(command.run(run, [], interrupted=child_processes.INTERRUPTED))
"""


def started(tmp_path, child, grace=120.0, before=()):
    """A process that runs a child by `run_child`, and the child's process number."""
    parent = PARENT.format(
        hears=not before, scripts=str(SCRIPTS), grace=grace, child=child, root=str(tmp_path)
    )
    process = subprocess.Popen(
        [*before, sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, int(wait_for(tmp_path / "ready", process))


@pytest.mark.parametrize(
    ("number", "before"),
    [
        pytest.param(signal.SIGINT, (), id="ctrl-c"),
        # As shells start commands that end in &: the child must receive Ctrl-C all the same.
        pytest.param(
            signal.SIGTERM, ("sh", "-c", 'trap "" INT; exec "$@"', "sh"), id="background job"
        ),
    ],
)
def test_a_signal_is_passed_on_and_waited_for(number, before, tmp_path):
    process, child = started(tmp_path, CHILD, before=before)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert error == "interrupted; the same command resumes it\n"
    assert (tmp_path / "saved").exists()
    assert has_ended(child)


@pytest.mark.parametrize(
    ("grace", "times"), [(1, 1), *slow((100, 2))], ids=["after its grace", "asked twice"]
)
def test_what_does_not_end_is_killed(grace, times, tmp_path):
    process, child = started(tmp_path, DEAF, grace)
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert has_ended(child)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--kinds=eagle3,nosuch"],
            "kinds='nosuch' is unknown: use draft_model, medusa, eagle, eagle3",
        ),
        (["--nogenerate"], "--nogenerate needs --responses=DIRECTORY"),
        (["--size=huge"], "size"),
        (["what"], "unrecognized arguments: what"),
    ],
)
def test_bad_input(argv, said, script, tmp_path, capsys):
    error = refused_command(script.main, [*argv, f"--workdir={tmp_path / 'w'}"], capsys)
    assert said in error
    assert not (tmp_path / "w").exists()


def test_by_default_it_makes_all_kinds_that_are_included(script):
    default = script.Flags().kinds.split(",")
    assert set(default) == {kind for kinds in find_head.shipped_heads().values() for kind in kinds}


def test_from_the_target_to_an_installed_head(script, tiny, tmp_path, monkeypatch, capsys):
    root, shipped, commands = tmp_path / "w", tmp_path / "shipped", []
    codes = [0, 0, 0, 0, 0, 3]

    def run_child(command):
        commands.append(" ".join(command[1:]))
        return codes.pop(0)

    monkeypatch.setattr(script, "run_child", run_child)
    monkeypatch.setattr(find_head, "SHIPPED", shipped)
    head = eagle_head(tiny, vocabulary=40)
    root.mkdir()
    folders.claim(root, "recipe", "workdir")
    save_head(dataclasses.replace(head, training={"step": 9}), root / "eagle3" / "export")
    argv = ["--responses=there", "--kinds=eagle3", "--size=debug", "--install"]
    argv.append(f"--workdir={root}")
    assert script.main(argv) == 1
    assert "train.eagle ended with code 3; the same command resumes it" in capsys.readouterr().err
    assert not shipped.exists()

    commands.clear()
    codes += [0, 0, 0, 0, 0, 0]
    assert script.main(argv) == 0
    assert commands == [
        f"-m train.generate --config=configs/generate_smollm2.py:debug "
        f"--config.workdir={root}/generate --config.output={root}/responses",
        f"-m train.generate --config=configs/generate_smollm2.py:debug "
        f"--config.prompts=target_questions "
        f"--config.workdir={root}/ask --config.output={root}/self_asked",
        f"-m train.features --input=there --output={root}/features/0",
        f"-m train.features --input={root}/responses --output={root}/features/1",
        f"-m train.features --input={root}/self_asked --output={root}/features/2",
        f"-m train.eagle --config=configs/train_eagle3.py:debug "
        f"--config.data={root}/features/0,{root}/features/1,{root}/features/2 "
        f"--config.workdir={root}/eagle3",
    ]
    installed = shipped / head.target.name / "eagle3"
    assert f"wrote {installed}: " in capsys.readouterr().out
    for folder in (root / "heads" / "eagle3", installed):
        arrays = load_drafter(folder)[0]
        del arrays["draft_ids"]
        # Kernels of 24, 40 and 72 inputs are not rounded to 8 bits.
        assert {leaf.dtype for leaf in jax.tree.leaves(arrays)} == {np.dtype("float16")}
        assert read_head(folder).training == {"step": 9}
