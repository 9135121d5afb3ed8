"""`scripts/reproduce_heads.py`: its stages, which are small commands here, and what stops them."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import slow
from heads import eagle_head
from script_modules import SCRIPTS, script_module

from specjax.distributed import folder_lock
from specjax.files import folders, text_files
from specjax.loading import find_head
from specjax.loading.heads.head import read_head, save_head

SLOW = """
import os, pathlib, sys, time
root = pathlib.Path(sys.argv[1])
try:
    assert os.getsid(0) == os.getpid()
    (root / "starting").write_text(str(os.getpid()))
    (root / "starting").rename(root / "ready")
    time.sleep(0 if (root / "saved").exists() else 120)
except KeyboardInterrupt:
    (root / "saved").write_text("")
    sys.exit(130)
"""
"""Waits to be stopped, and has nothing left to do the second time."""

DRIVER = """
import signal, sys
if {heard}:
    # The tests themselves may run where Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {scripts!r})
import reproduce_heads as script
script.recipe = lambda options, root: [
    script.Stage("slow", [sys.executable, "-c", {slow!r}, str(root)]),
    script.Stage("after", [sys.executable, "-c", ""]),
]
script.export = lambda options, root: print("exported")
sys.exit(script.main())
"""


@pytest.fixture(scope="module")
def script():
    with script_module("reproduce_heads") as module:
        yield module


@pytest.fixture
def main(script, monkeypatch, tmp_path):
    """The script with other stages, and nothing to export."""

    def call(*stages):
        monkeypatch.setattr(script, "recipe", lambda options, root: list(stages))
        monkeypatch.setattr(script, "export", lambda options, root: print("exported"))
        return script.main([f"--workdir={tmp_path}"])

    return call


def stage(script, name, code, *arguments):
    return script.Stage(name, [sys.executable, "-c", code, *map(str, arguments)])


def there(path, process=None):
    """Wait for a file; what is in it."""
    for _ in range(1200):
        if path.exists():
            return path.read_text()
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} does not come")


def started(tmp_path, *before):
    """The script as a process whose first stage is under way, and that stage's process."""
    driver = DRIVER.format(scripts=str(SCRIPTS), slow=SLOW, heard=not before)
    process = subprocess.Popen(
        [*before, sys.executable, "-c", driver, f"--workdir={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, int(there(tmp_path / "ready", process))


def gone(pid):
    for _ in range(1200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_the_same_command_resumes_after_a_stage_that_failed(script, main, tmp_path, capsys):
    count = "import sys; open(sys.argv[1], 'a').write('x')"
    one = stage(script, "one", count, tmp_path / "one")
    two = stage(script, "two", "import os, sys; sys.exit(0 if os.path.exists(sys.argv[1]) else 3)")
    two.command.append(str(tmp_path / "mended"))
    three = stage(script, "three", "")
    assert main(one, two, three) == 1
    shown = capsys.readouterr()
    assert shown.err == (
        "[two] ended with code 3; left: two, three, export. The same command resumes it\n"
    )
    assert "exported" not in shown.out
    assert list(json.loads((tmp_path / "finished.json").read_text())) == ["one"]

    (tmp_path / "mended").write_text("")
    assert main(one, two, three) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "[one] done earlier, " in shown.out
    assert "exported" in shown.out
    assert (tmp_path / "one").read_text() == "x"

    other = stage(script, "one", count, tmp_path / "other")
    assert main(other, two, three) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"workdir={str(tmp_path)!r}: one was done there with another command" in error


class UntilThere:
    """A time that is over as soon as a file is there."""

    def __init__(self, path):
        self.path = path

    def __gt__(self, now):
        return not self.path.exists()


def test_when_the_minutes_are_over_a_stage_saves_and_the_rest_is_listed(script, tmp_path, capsys):
    stages = [stage(script, "slow", SLOW, tmp_path), stage(script, "after", "")]
    assert script.run_stages(stages, tmp_path, "export", UntilThere(tmp_path / "ready")) == 0
    assert "the minutes are over; left: slow, after, export." in capsys.readouterr().out
    assert (tmp_path / "saved").exists()
    # They are over already: nothing is begun.
    assert script.run_stages(stages, tmp_path, "export", time.monotonic()) == 0
    assert not (tmp_path / "finished.json").exists()
    assert script.run_stages(stages, tmp_path, "export") is None


@pytest.mark.parametrize(
    ("number", "before"),
    [
        (signal.SIGINT, ()),
        # As shells start commands that end in &: the child must receive Ctrl-C all the same.
        (signal.SIGTERM, ("sh", "-c", 'trap "" INT; exec "$@"', "sh")),
        *slow((signal.SIGTERM, ())),
    ],
)
def test_a_signal_is_passed_on_and_waited_for(number, before, tmp_path):
    process, child = started(tmp_path, *before)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "interrupted; left: slow, after, export. The same command resumes it\n"
    assert "exported" not in out
    assert (tmp_path / "saved").exists()
    assert gone(child)


def test_one_run_at_a_time(script, main, tmp_path, capsys):
    process, child = started(tmp_path)
    after = stage(script, "after", "")
    said = f"workdir={str(tmp_path)!r}: another run is at work there (pid {process.pid} on "
    try:
        assert main(after) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error
        assert not (tmp_path / "finished.json").exists()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.communicate()
    assert gone(child)
    assert main(after) == 0


ASKED = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from lib import child_processes
child_processes.GRACE_S = float(sys.argv[3])
deaf = "import pathlib, signal, sys, time\\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\\n"
deaf += "pathlib.Path(sys.argv[1]).write_text('')\\ntime.sleep(120)"
try:
    child_processes.run_child([sys.executable, "-c", deaf, sys.argv[2]])
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("grace", "times"), [(1, 1), *slow((100, 2))])
def test_what_does_not_end_is_killed(grace, times, tmp_path):
    arguments = [str(SCRIPTS), str(tmp_path / "ready"), str(grace)]
    process = subprocess.Popen([sys.executable, "-c", ASKED, *arguments])
    there(tmp_path / "ready", process)
    begin = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
        # Those that come at once are one.
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)
    assert process.wait(60) == 130
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("text", ["{", "[]", '{"one": 3}', '{"one": {"command": "x"}}', "\0"])
def test_a_damaged_record_is_one_line(text, script, main, tmp_path, capsys):
    folders.claim(tmp_path, "recipe", "workdir")
    (tmp_path / "finished.json").write_text(text)
    assert main(stage(script, "one", "")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'finished.json'}: cannot be read; delete it")
    assert error.count("\n") == 1


def test_a_full_disk_is_one_line(script, main, tmp_path, monkeypatch, capsys):
    def full(*arguments, **rest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folders.claim(tmp_path, "recipe", "workdir")
    with monkeypatch.context() as patch:
        patch.setattr(text_files, "write_text", full)
        assert main(stage(script, "one", "")) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'finished.json'}: cannot be written (No space left" in error
    assert error.count("\n") == 1
    with monkeypatch.context() as patch:
        patch.setattr(folder_lock, "FileLock", full)
        assert main(stage(script, "one", "")) == 2
    assert "free space or write elsewhere" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert script.main([f"--workdir={tmp_path / 'file'}"]) == 2
    assert " is a file: name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--kinds=eagle3,nosuch"],
            "kinds='nosuch' is unknown: use eagle3, draft_model, medusa, eagle",
        ),
        (["--nogenerate"], "--nogenerate needs --responses=DIRECTORY"),
        (["--size=huge"], "size"),
        (["--minutes=0"], "minutes"),
        (["what"], "unrecognized arguments: what"),
    ],
)
def test_bad_input(argv, said, script, tmp_path, capsys):
    assert script.main([*argv, f"--workdir={tmp_path / 'w'}"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_from_the_target_to_an_installed_head(script, tiny, tmp_path, monkeypatch, capsys):
    root, shipped, commands = tmp_path / "w", tmp_path / "shipped", []

    def run_child(command, **rest):
        commands.append(" ".join(command[1:]))
        return 0

    monkeypatch.setattr(sys.modules["lib.stages"], "run_child", run_child)
    monkeypatch.setattr(find_head, "SHIPPED", shipped)
    data = {"conversations": 3, "tokens": 500, "labels": 200, "sources": ["0", "1"]}
    about = {"method": "eagle3", "data": data, "config": {"steps": 9}, "step": 9, "tokens": 100}
    head = dataclasses.replace(eagle_head(tiny, vocabulary=40), training=about)
    folders.claim(root, "recipe", "workdir")
    save_head(head, root / "eagle3" / "export")
    argv = ["--responses=there", "--kinds=eagle3", "--size=debug", "--install"]
    for _ in range(2):
        assert script.main([*argv, f"--workdir={root}"]) == 0
        assert len(commands) == 4
    assert commands == [
        f"-m train.generate --config=configs/generate_smollm2.py:debug "
        f"--config.workdir={root}/generate --config.output={root}/responses",
        f"-m train.features --input=there --output={root}/features/0",
        f"-m train.features --input={root}/responses --output={root}/features/1",
        f"-m train.eagle --config=configs/train_eagle3.py:debug "
        f"--config.data={root}/features/0,{root}/features/1 --config.workdir={root}/eagle3",
    ]
    installed = shipped / head.target.name / "eagle3"
    for folder in (root / "heads" / "eagle3", installed):
        leaves = jax.tree.leaves(read_head(folder).params)
        assert {np.asarray(leaf).dtype for leaf in leaves} == {np.dtype("float16")}
    card = installed.with_name("eagle3.md").read_text()
    assert card.startswith(f"# eagle3 for {head.target.name}\n")
    assert "--config.data=0,1" in card
    assert f"installed: {installed}" in capsys.readouterr().out
