"""The check of an accelerator: stages that pass, fail and hang; each at its debug size."""

import json
import os
import subprocess
import sys

import pytest
from commands import SCRIPTS, script_module
from conftest import slow, tiny_config, xla_flags

from specjax.loading.load import random_model

sys.path.append(str(SCRIPTS))

from accelerator import transformers_beside
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
    with script_module("check_accelerator") as module:
        yield module.run_stage


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


PEER = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    count = json.loads(line)["max_new_tokens"]
    print(json.dumps({"ids": [7] * count, "total_s": 0.5}), flush=True)
"""


def test_transformers_beside_it(capsys, monkeypatch):
    """Here another process answers in its place; where it is not installed that is said."""
    tiny = random_model(tiny_config(), 0, dtype="float32")
    monkeypatch.setattr(transformers_beside.specjax, "load_model", lambda *_, **options: tiny)
    monkeypatch.setattr(transformers_beside, "BUILT_IN", ([1, 2, 3], [4, 5]))
    transformers_beside.compare([sys.executable, "-c", PEER], "float32", 4)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("plain: transformers 8.0 tokens/s, specjax ")
    assert second.startswith("prompt lookup: transformers 8.0 tokens/s, specjax ")
    monkeypatch.setattr(transformers_beside, "_NEEDED", ("no_such_package",))
    assert transformers_beside.main() == 0
    assert capsys.readouterr().out == "not installed: no_such_package\n"


@pytest.mark.parametrize(
    "name", slow("kernels", "decode fixed", "engine", "training", "compiling", "tests")
)
def test_every_stage_runs_on_a_cpu(name, tmp_path):
    found = check(tmp_path, "--size=debug", f"--stages={name}")
    assert found.returncode == 0, found.stdout + found.stderr
    (result,) = map(json.loads, (tmp_path / "stages.jsonl").read_text().splitlines())
    assert result["summary"]
    again = check(tmp_path, "--size=debug", f"--stages={name}")
    assert "passed before" in again.stdout
