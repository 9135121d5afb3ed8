"""What a run has finished is kept: full disks, texts that cannot be encoded, requests to end."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reports
from conftest import xla_flags

from specjax import bench, decode, report
from specjax.cli import bench_run, decode_run
from specjax.errors import InputError
from specjax.files.paths import output_file
from specjax.loading.load import save_model
from specjax.reporting import report_file
from specjax.reporting.read import read_report
from specjax.reporting.report_file import ReportFile, check_writable


@pytest.fixture(scope="module")
def folder(chatty, tmp_path_factory):
    """A model's folder beside a file of prompts, one of which no encoding can express."""
    path = tmp_path_factory.mktemp("survive")
    save_model(chatty, path / "model")
    questions = [
        {"question_id": f"\ud800{number}", "category": "qa\udfff", "turns": ["abc abc ab"]}
        for number in range(3)
    ]
    lines = [json.dumps(question) + "\n" for question in questions]
    (path / "prompts.jsonl").write_text("".join(lines))
    return path


def arguments(folder, path, *more):
    return [
        f"--config.target={folder / 'model'}",
        f"--config.prompts={folder / 'prompts.jsonl'}",
        f"--config.report={path}",
        "--config.drafter.name=none",
        "--config.sampling.max_new_tokens=6",
        *more,
    ]


def test_devices_and_pipes_stay_what_they_are(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in ("/dev/full", "/dev/null", tmp_path / "pipe", tmp_path / "link"):
        before = os.stat(path)
        assert decode.main([f"--config.report={path}"]) == 2
        output = capsys.readouterr().err
        assert output.startswith("error: report='")
        assert "is a device: name a file" in output or "is no regular file: name another" in output
        assert os.stat(path).st_mode == before.st_mode
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_what_is_no_report_is_not_replaced(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    shutil.copyfile(folder / "prompts.jsonl", tmp_path / "q.jsonl")
    (tmp_path / "one.jsonl").write_text('{"turns": ["abc"]}\n')
    (tmp_path / "config.py").write_text("x = 1\n")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "rows.json").write_text('{"rows": 3, "summary": {}}')
    (tmp_path / "bench.json").write_text('{"comparisons": []}')
    (tmp_path / "model" / "notes.json").write_text('{"rows": [], "summary": {}}')
    (tmp_path / "link").symlink_to("model/config.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path in before:
        if path.name in ("notes.json", "specjax_folder.json"):
            continue
        assert decode.main([f"--config.report={path}"]) == 2, path
        output = capsys.readouterr().err
        kept = path.parent.name == "model" or path.name == "link"
        says = "is a file that specjax reserves" if kept else "is a file that is no report"
        assert output.startswith("error: report='"), output
        assert says in output
        assert output.count("\n") == 1
    for name in ("specjax_folder.json", "specjax.lock", ".specjax-abcd1234.tmp"):
        for parent in (tmp_path, tmp_path / "model"):
            assert (
                bench.main(
                    ["--config=configs/bench_smollm2.py", f"--config.report={parent / name}"]
                )
                == 2
            )
            assert "is a file that specjax reserves" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    check_writable(tmp_path / "model" / "notes.json")
    # A folder's marker that cannot be read says nothing of the other files.
    (tmp_path / "specjax_folder.json").write_text("{")
    check_writable(tmp_path / "new.json")


def test_reports_and_empty_files_are_replaced(tmp_path):
    (tmp_path / "empty.json").touch()
    check_writable(tmp_path / "empty.json")
    for content in (
        {"rows": [], "summary": {}},
        bench.Measured().content(True),
        bench.Measured().content(False),
    ):
        report_file.write_json(tmp_path / "r.json", content)
        check_writable(tmp_path / "r.json")


def test_paths_that_are_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices").symlink_to("/dev")
    (tmp_path / "dangling.json").symlink_to("nowhere/r.json")
    for path, says in (
        ("/tmp/../dev/zz", "is a device: name a file"),
        ("devices/zz", "is a device: name a file"),
        ("/dev/shm/../zz", "is a device: name a file"),
        ("/dev/shm", "is a device: name a file"),
        ("/dev/stdout", "is a device: name a file"),
        ("newdir/", "'newdir/' is a folder: name a file in it"),
        ("newdir/.", "is a folder: name a file in it"),
        ("newdir/r.json", "'newdir/r.json': its folder does not exist; make it first"),
        (
            "dangling.json",
            f"leads to '{tmp_path}/nowhere/r.json': its folder does not exist; make it first",
        ),
    ):
        with pytest.raises(InputError, match=f"^report=.*{re.escape(says)}"):
            check_writable(path)
    assert output_file("report", "/dev/shm/specjax-r.json") == Path("/dev/shm/specjax-r.json")
    assert output_file("report", "/dev/../tmp/r.json") == Path("/tmp/r.json")


def test_numbers_that_are_not_finite_are_null(tmp_path, capsys, monkeypatch):
    nan, inf = float("nan"), float("inf")
    content = {"rows": [{"logprobs": [0.5, nan, -inf]}], "summary": {"a": inf, "b": (nan, 1)}}
    with ReportFile(tmp_path / "r.json", lambda interrupted: content) as file:
        file.grew()
        assert file.finish()
    expected = {"rows": [{"logprobs": [0.5, None, None]}], "summary": {"a": None, "b": [None, 1]}}
    assert json.loads((tmp_path / "r.json").read_text()) == expected

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report_file, "write_json", full)
    with pytest.raises(InputError, match="above, on stdout"):
        ReportFile(tmp_path / "r.json", lambda interrupted: content).finish()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [*expected["rows"], expected["summary"]]


def test_a_report_with_logprobs_that_are_null_is_read(tmp_path):
    given = reports.content()
    given["rows"][0]["logprobs"] = [None, -0.5]
    (tmp_path / "a.json").write_text(json.dumps(given))
    assert len(read_report(tmp_path / "a.json").rows) == len(given["rows"])


def test_the_trial_of_the_disk_is_small(tmp_path, monkeypatch):
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("not on this system")
    taken = []
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, start, size: taken.append(size))
    check_writable(tmp_path / "r.json", 200_000_000)
    assert taken == [64 << 20]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("there.json")
    with ReportFile(check_writable(tmp_path / "link"), lambda interrupted: {}) as file:
        assert file.finish()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there.json").read_text() == "{}\n"


def test_space_is_tried_before_the_work(tmp_path, monkeypatch):
    for supported in (True, False):
        if not supported:
            monkeypatch.delattr(os, "posix_fallocate")
        check_writable(tmp_path / "r.json", 10_000)
        with pytest.raises(InputError, match=r"report='.*r\.json': no space for a report of up to"):
            check_writable(tmp_path / "r.json", 1 << 60)
    assert os.listdir(tmp_path) == []


LIMITED = """
import resource, sys
# It would be cut off as well, and found by every later process.
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from specjax.cli import command
from specjax.reporting import report_file
from specjax.reporting.report_file import ReportFile, check_writable

report_file._SHARE = 1e9

def main(argv):
    path = check_writable(argv[0], int(argv[1]))
    rows = []
    with ReportFile(path, lambda interrupted: {"rows": rows, "summary": {"n": len(rows)}}) as file:
        for number in range(100):
            rows.append("\\ud800" * 100)
            file.grew()
        file.finish()
    return 0

raise SystemExit(command.run(main, sys.argv[1:]))
"""


def limited(path, size):
    """A run in a process that may write files of 20 kB, its report being larger."""
    command = [sys.executable, "-c", LIMITED, str(path), str(size)]
    return subprocess.run(command, capture_output=True, text=True)


def test_no_room_at_the_end_leaves_the_rows_on_stdout(tmp_path):
    ran = limited(tmp_path / "r.json", 100)
    assert ran.returncode == 2
    lines = ran.stderr.splitlines()
    assert "cannot be written now (File too large); the run continues" in lines[0]
    assert lines[1].startswith(f"error: report='{tmp_path / 'r.json'}' cannot be written (File too")
    assert "above, on stdout, as JSON lines" in lines[1]
    assert len(lines) == 2
    printed = [json.loads(line) for line in ran.stdout.splitlines()]
    assert printed == ["\ud800" * 100] * 100 + [{"n": 100}]
    # What fitted is there, and nothing else.
    assert os.listdir(tmp_path) in ([], ["r.json"])


def test_a_limit_is_found_out_before_the_work(tmp_path):
    ran = limited(tmp_path / "r.json", 1_000_000)
    assert ran.returncode == 2
    assert "no space for a report of up to 1000 kB (File too large)" in ran.stderr
    assert (ran.stdout, ran.stderr.count("\n")) == ("", 1)
    assert os.listdir(tmp_path) == []


def test_it_grows_but_takes_little_time(tmp_path, monkeypatch):
    now, writings = [0.0], []

    def writing(path, content):
        now[0] += 1.0
        writings.append(content)

    monkeypatch.setattr(report_file, "write_json", writing)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ReportFile(tmp_path / "r.json", lambda interrupted: interrupted) as file:
        for _ in range(200):
            now[0] += 0.5
            file.grew()
        # A second for each twenty.
        assert writings == [True] * 5
        file.finish()
    assert writings == [True] * 5 + [False]


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_whatever_ends_it_writes_what_waits(end, tmp_path):
    rows = []

    def run():
        with ReportFile(tmp_path / "r.json", lambda interrupted: [interrupted, *rows]) as file:
            for number in range(3):
                rows.append(number)
                file._next = float("inf") if number else 0.0
                file.grew()
            raise end

    with pytest.raises(end):
        run()
    assert json.loads((tmp_path / "r.json").read_text()) == [True, 0, 1, 2]


def test_no_signal_disturbs_the_last_report(tmp_path):
    def content(interrupted):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        return {"rows": [1], "interrupted": interrupted}

    with ReportFile(tmp_path / "r.json", content) as file:
        assert file.finish(interrupted=True)
    assert json.loads((tmp_path / "r.json").read_text()) == {"rows": [1], "interrupted": True}


class TestDecode:
    """Runs of a tiny model, in this process."""

    def test_a_text_that_cannot_be_encoded(self, folder, tmp_path, capsys):
        path = tmp_path / "r.json"
        assert decode.main(arguments(folder, path)) == 0
        assert "\\udfff: abc" in capsys.readouterr().out
        rows = json.loads(path.read_text())["rows"]
        assert [row["question_id"] for row in rows] == [f"\ud800{number}" for number in range(3)]
        assert report.main([str(path), f"--out={tmp_path / 'out'}"]) == 0
        assert "\\udfff" in capsys.readouterr().out
        lines = (tmp_path / "out" / "none.jsonl").read_text().splitlines()
        assert [json.loads(line)["category"] for line in lines] == ["qa\udfff"] * 3

    def test_the_room_follows_the_positions(self, folder, tmp_path, capsys, monkeypatch):
        asked = []

        def check_space(path, size, said):
            asked.append((size, said))
            raise InputError("enough")

        monkeypatch.setattr(decode, "check_space", check_space)
        for wish in (10**9, 6):
            more = f"--config.sampling.max_new_tokens={wish}"
            assert decode.main(arguments(folder, tmp_path / "r.json", more)) == 2
            assert capsys.readouterr().err == "error: enough\n"
        (large, said), (small, _) = asked
        assert said == f"report='{tmp_path / 'r.json'}'"
        assert small < large < 200_000

    def test_rows_are_there_as_they_finish(self, folder, tmp_path, monkeypatch, capsys):
        path, found = tmp_path / "r.json", []

        def looking(session, **options):
            found.append(len(read_report(path).rows) if path.exists() else 0)
            assert not path.exists() or read_report(path).interrupted
            return decode_session(session, **options)

        decode_session = decode_run.decode_session
        monkeypatch.setattr(decode_run, "decode_session", looking)
        monkeypatch.setattr(report_file, "_SHARE", 1e9)
        assert decode.main(arguments(folder, path)) == 0
        assert found == [0, 1, 2]
        assert not read_report(path).interrupted
        capsys.readouterr()

        # An unforeseen error, then one before the first row: what was finished stays.
        for after, rows in ((2, 2), (-1, 2)):
            calls = []

            def failing(session, calls=calls, after=after, **options):
                calls.append(options["index"])
                if len(calls) > max(after, 0):
                    raise KeyboardInterrupt if after < 0 else ZeroDivisionError
                return decode_session(session, **options)

            monkeypatch.setattr(decode_run, "decode_session", failing)
            if after < 0:
                assert decode.main(arguments(folder, path)) == 130
            else:
                with pytest.raises(ZeroDivisionError):
                    decode.main(arguments(folder, path))
            assert len(read_report(path).rows) == rows
            assert read_report(path).interrupted
        assert report.main([str(path), f"--out={tmp_path / 'out'}", "--nopictures"]) == 0
        assert "Interrupted: none (2 answers)." in capsys.readouterr().out

    def test_a_full_disk_at_the_end(self, folder, tmp_path, monkeypatch, capsys):
        path, write = tmp_path / "r.json", report_file.write_json

        def full(to, content):
            if to == path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(to, content)

        monkeypatch.setattr(report_file, "write_json", full)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert decode.main(arguments(folder, path)) == 2
        output = capsys.readouterr()
        assert "acceptance length" in output.out
        assert output.err.count("\n") == 1
        assert output.err.startswith(f"error: report='{path}' cannot be written (No space left on")
        kept = Path(output.err.partition("what was finished is in ")[2].partition(";")[0])
        assert len(json.loads(kept.read_text())["rows"]) == 3

    def test_the_benchmark_keeps_its_figures(self, folder, tmp_path, monkeypatch, capsys):
        path = tmp_path / "r.json"

        def compare(model, ids, drafter, label, **options):
            if label != "ngram":
                raise KeyboardInterrupt
            return bench_run.Comparison(label, 1, *[1.5] * 9, identical=True)

        monkeypatch.setattr(bench_run, "compare_with_plain", compare)
        monkeypatch.setattr(
            bench_run.costs, "widths_seconds", lambda *given, **_: dict.fromkeys(given[2], 0.1)
        )
        code = bench.main(
            [
                "--config=configs/bench_smollm2.py:debug",
                f"--config.target={folder / 'model'}",
                f"--config.prompts={folder / 'prompts.jsonl'}",
                f"--config.report={path}",
                "--config.batch_sizes=(1,)",
                "--config.capacities=(256,)",
                "--config.exit_layers=(1,)",
                "--config.auto.drafters=('ngram',)",
            ]
        )
        assert code == 130
        found = read_report(path)
        assert [one["drafter"] for one in found.comparisons] == ["ngram"]
        assert found.interrupted
        assert len(json.loads(path.read_text())["rounds"]) == 2
        assert report.main([str(path), f"--out={tmp_path / 'out'}"]) == 0
        assert "not everything was measured" in (tmp_path / "out" / "report.md").read_text()


def test_sigterm_leaves_what_was_finished(folder, tmp_path):
    path = tmp_path / "r.json"
    more = ["--config.sampling.max_new_tokens=60", "--config.sampling.ignore_eos=true"]
    question = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])
    lines = [json.dumps({**question, "question_id": f"\ud800{number}"}) for number in range(900)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    more += [f"--config.prompts={tmp_path / 'many.jsonl'}"]
    command = [sys.executable, "-m", "specjax.decode", *arguments(folder, path, *more)]
    environment = os.environ | {"XLA_FLAGS": xla_flags(devices=1)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        end = time.monotonic() + 120
        while not path.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        # `timeout` sends it twice.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    found = read_report(path)
    assert found.interrupted
    assert 0 < len(found.rows) < 900
    assert f"interrupted; {len(found.rows)} finished row" in output
