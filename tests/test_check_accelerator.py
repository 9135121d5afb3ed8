"""The check of an accelerator: stages that pass, fail and hang; each at its debug size."""

import json
import os
import subprocess
import sys

import pytest
from commands import SCRIPTS
from conftest import slow, xla_flags

sys.path.append(str(SCRIPTS))

from accelerator.stages import Stage, stages


def check(out, *arguments):
    command = [sys.executable, str(SCRIPTS / "check_accelerator.py"), f"--out={out}", *arguments]
    return subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices=1)},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run_stage():
    import check_accelerator

    return check_accelerator.run_stage


def test_stages_that_fail_or_hang_are_said(run_stage, tmp_path):
    def run(code, seconds=60.0):
        return run_stage(Stage("a stage", ("-c", code), seconds, (r"speed .*",)), tmp_path)

    fine = run("print('speed  1.5x'); print('speed  1.5x'); print('other')")
    assert (fine["status"], fine["summary"]) == ("passed", "speed 1.5x")
    broken = run("raise SystemExit('no memory')")
    assert (broken["status"], broken["end"]) == ("failed", "no memory")
    hanging = run("import time; print('speed 2x', flush=True); time.sleep(600)", 3.0)
    assert (hanging["status"], hanging["summary"]) == ("took too long", "speed 2x")


def test_a_cpu_and_unknown_stages_are_refused(tmp_path):
    found = check(tmp_path)
    assert (found.returncode, "no accelerator: JAX finds a CPU only" in found.stderr) == (2, True)
    found = check(tmp_path, "--size=debug", "--stages=kernel")
    assert (found.returncode, "stages='kernel': use kernels" in found.stderr) == (2, True)


def test_the_whole_check_ends_in_nine_minutes(tmp_path):
    assert sum(stage.seconds for stage in stages("full", tmp_path)) < 660
    assert stages("full", tmp_path)[0].seconds < 60


@pytest.mark.parametrize("name", slow("kernels", "decode fixed", "engine", "training", "compiling"))
def test_every_stage_runs_on_a_cpu(name, tmp_path):
    found = check(tmp_path, "--size=debug", f"--stages={name}")
    assert found.returncode == 0, found.stdout + found.stderr
    (result,) = map(json.loads, (tmp_path / "stages.jsonl").read_text().splitlines())
    assert result["summary"]
    again = check(tmp_path, "--size=debug", f"--stages={name}")
    assert "passed before" in again.stdout
