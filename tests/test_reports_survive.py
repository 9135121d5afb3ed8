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
from bad_input import refused_command
from conftest import xla_flags

from specjax.apps.report import report
from specjax.apps.rows.records import read_report
from specjax.apps.rows.report_file import ReportFile, check_writable
from specjax.apps.rows.speedups import Ratio, Speedup
from specjax.apps.run import bench, bench_run, decode, runner
from specjax.errors import InputError
from specjax.files.path_checks import output_file
from specjax.loading.load import save_model


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
        "--config.compare=false",
        "--config.sampling.max_new_tokens=6",
        *more,
    ]


def test_devices_and_pipes_stay_what_they_are(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in ("/dev/full", "/dev/null", tmp_path / "pipe", tmp_path / "link"):
        before = os.stat(path)
        output = refused_command(decode.main, [f"--config.report={path}"], capsys)
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
    (tmp_path / "rows.json").write_text('{"record": "row"}')
    (tmp_path / "model" / "notes.json").write_text('{"record": "run"}')
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
    path = tmp_path / "r.jsonl"
    for before in ("", '{"record": "run"}\n{"record', '{"record": "bench"}\n'):
        path.write_text(before)
        file = ReportFile(check_writable(path))
        assert path.read_text() == before
        file.add([{"record": "run"}])
        file.add([{"record": "row"}])
        assert file.finish([{"record": "summary"}])
        kinds = [json.loads(line)["record"] for line in path.read_text().splitlines()]
        assert kinds == ["run", "row", "summary"]


def test_paths_that_are_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices").symlink_to("/dev")
    for path, says in (
        ("/tmp/../dev/zz", "is a device: name a file"),
        ("devices/zz", "is a device: name a file"),
        ("/dev/shm/../zz", "is a device: name a file"),
        ("/dev/shm", "is a device: name a file"),
        ("/dev/stdout", "is a device: name a file"),
        ("newdir/", "'newdir/' is a folder: name a file in it"),
        ("newdir/.", "is a folder: name a file in it"),
    ):
        with pytest.raises(InputError, match=f"^report=.*{re.escape(says)}"):
            check_writable(path)
    assert output_file("report", "/dev/shm/specjax-r.json") == Path("/dev/shm/specjax-r.json")
    assert output_file("report", "/dev/../tmp/r.json") == Path("/tmp/r.json")


@pytest.mark.parametrize("there", ["there.jsonl", "a/new/folder/there.jsonl"])
def test_a_link_is_followed(there, tmp_path):
    (tmp_path / "link").symlink_to(there)
    assert ReportFile(check_writable(tmp_path / "link")).finish([{"a": 1}])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / there).read_text() == '{"a": 1}\n'


def test_a_last_line_that_was_not_finished_is_skipped(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(reports.as_lines(reports.content())[:-20])
    assert read_report(path).end.interrupted
    assert len(read_report(path).rows) == 3


LIMITED = """
import resource, sys
# It would be cut off as well, and found by every later process.
sys.dont_write_bytecode = True
from specjax.apps.command_line import command
from specjax.apps.rows.report_file import ReportFile, check_writable

def main(argv):
    file = ReportFile(check_writable(argv[0]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for number in range(100):
        file.add([{"row": number, "text": "\\ud800" * 100}])
    file.finish([{"n": 100}])
    return 0

raise SystemExit(command.run(main, sys.argv[1:]))
"""


def test_what_a_full_disk_does_not_take_is_on_stdout(tmp_path):
    """In a process that may write files of 20 kB, its report being larger."""
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", LIMITED, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    trouble, end = ran.stderr.splitlines()
    assert "cannot be written now (File too large); the run continues" in trouble
    assert end.startswith(f"error: report='{path}' cannot be written (File too")
    assert "above, on stdout, as JSON lines" in end
    kept, printed = path.read_text().splitlines(), ran.stdout.splitlines()
    assert min(len(kept), len(printed)) > 20
    found = [json.loads(line) for line in (*kept, *printed)]
    assert found == [{"row": number, "text": "\ud800" * 100} for number in range(100)] + [
        {"n": 100}
    ]
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_a_disk_without_space_is_found_out_before_the_work(tmp_path, monkeypatch):
    def full(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(InputError, match=r"^report='.*r\.jsonl': no space for a report"):
        check_writable(tmp_path / "r.jsonl")


def test_a_request_to_end_waits_for_the_line_that_is_being_written(tmp_path, monkeypatch):
    encode = json.dumps

    def interrupted(*values, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return encode(*values, **options)

    file = ReportFile(tmp_path / "r.jsonl")
    monkeypatch.setattr(json, "dumps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.add([{"a": 1}])
    # The last lines are written in any case.
    assert file.finish([{"b": 2}])
    assert (tmp_path / "r.jsonl").read_text() == '{"a": 1}\n{"b": 2}\n'


def test_a_request_to_end_loses_no_record_that_is_being_made(tmp_path):
    def records():
        yield {"a": 1}
        os.kill(os.getpid(), signal.SIGTERM)
        yield {"b": 2}

    file = ReportFile(tmp_path / "r.jsonl")
    with pytest.raises(KeyboardInterrupt):
        file.add(records())
    assert (tmp_path / "r.jsonl").read_text() == '{"a": 1}\n{"b": 2}\n'


class TestDecode:
    """Runs of a tiny model, in this process."""

    def test_a_text_that_cannot_be_encoded(self, folder, tmp_path, capsys):
        path = tmp_path / "r.jsonl"
        assert decode.main(arguments(folder, path)) == 0
        assert "\\udfff: abc" in capsys.readouterr().out
        rows = reports.read_one(path)["rows"]
        assert [row["question_id"] for row in rows] == [f"\ud800{number}" for number in range(3)]
        assert report.main([str(path), f"--out={tmp_path / 'out'}"]) == 0
        assert "\\udfff" in capsys.readouterr().out
        lines = (tmp_path / "out" / "none.jsonl").read_text().splitlines()
        assert [json.loads(line)["category"] for line in lines] == ["qa\udfff"] * 3

    def test_rows_are_there_as_they_finish(self, folder, tmp_path, monkeypatch, capsys):
        path, found = tmp_path / "r.jsonl", []

        def looking(plan, requests, **options):
            found.append(len(read_report(path).rows) if path.exists() else 0)
            assert not path.exists() or read_report(path).end.interrupted
            return decode_requests(plan, requests, **options)

        decode_requests = runner.decode_requests
        monkeypatch.setattr(runner, "decode_requests", looking)
        assert decode.main(arguments(folder, path)) == 0
        assert found == [0, 1, 2]
        assert not read_report(path).end.interrupted
        capsys.readouterr()

        # An unforeseen error, then one before the first row: what was finished stays.
        for after, rows in ((2, 2), (-1, 2)):
            calls = []

            def failing(plan, requests, calls=calls, after=after, **options):
                calls.append(requests)
                if len(calls) > max(after, 0):
                    raise KeyboardInterrupt if after < 0 else ZeroDivisionError
                return decode_requests(plan, requests, **options)

            monkeypatch.setattr(runner, "decode_requests", failing)
            if after < 0:
                assert decode.main(arguments(folder, path)) == 130
            else:
                with pytest.raises(ZeroDivisionError):
                    decode.main(arguments(folder, path))
            assert len(read_report(path).rows) == rows
            assert read_report(path).end.interrupted
        assert report.main([str(path), f"--out={tmp_path / 'out'}", "--nopictures"]) == 0
        assert "Interrupted: none (2 answers)." in capsys.readouterr().out

    def test_the_benchmark_keeps_its_figures(self, folder, tmp_path, monkeypatch, capsys):
        path = tmp_path / "r.jsonl"

        def measure(model, questions, drafters, options, *rest):
            if options.num_speculative_tokens != "auto":
                raise KeyboardInterrupt
            ratio = Ratio(1.5, 1.4, 1.6)
            numbers = (1, 1, 0.0, 1.5, 1.0, 1.0, 30.0, 20.0)
            return [Speedup("ngram", *numbers, ratio, ratio, True, 1.5, 0.1)]

        monkeypatch.setattr(bench_run, "measure_speedups", measure)
        monkeypatch.setattr(
            bench_run.measure_costs,
            "widths_seconds",
            lambda *given, **_: dict.fromkeys(given[2], 0.1),
        )
        code = bench.main(
            [
                "--config=configs/bench_smollm2.py:debug",
                f"--config.target={folder / 'model'}",
                f"--config.prompts={folder / 'prompts.jsonl'}",
                f"--config.report={path}",
                "--config.batch_sizes=(1,)",
                "--config.capacities=(256,)",
                "--config.drafters=('ngram',)",
            ]
        )
        assert code == 130
        records = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = [one["record"] for one in records]
        assert kinds == ["bench", "pass", "pass", "speedup"]
        assert (records[-1]["drafter"], records[-1]["efficiency"]) == ("ngram", 1.0)


def test_sigterm_leaves_what_was_finished(folder, tmp_path):
    path = tmp_path / "r.jsonl"
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
    assert found.end.interrupted
    assert 0 < len(found.rows) < 900
    assert f"interrupted; {len(found.rows)} finished row" in output
