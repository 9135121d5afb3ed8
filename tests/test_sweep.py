"""`scripts/sweep.py`: the grid, resuming, failures, and the report at its end."""

import subprocess
import sys

import pytest
from bad_input import refused_command
from commands import SCRIPTS, script_module
from reports import as_lines, content, read_one

from specjax import decode
from specjax.cli.config_file import read_config

pytest.importorskip("matplotlib")

SCRIPT = SCRIPTS / "sweep.py"
FIXED = ["--config.target=model", "--config.prompt=one two"]


@pytest.fixture(scope="module")
def sweep():
    with script_module("sweep") as module:
        yield module


@pytest.fixture
def cells_run(sweep, monkeypatch):
    """Cells only write the report of their config; the list says which have."""
    done = []

    def run_cell(cell):
        done.append(cell.values)
        config = read_config(list(cell.arguments), decode.CONFIG)
        assert config.compare
        cell.log.write_text("said before\nerror: this one fails\n")
        if config.max_length == 4:
            return 2
        report = content(prompts=config.prompt)
        report["run"] |= {"target": config.target, "config": config.to_dict()}
        cell.report.write_text(as_lines(report))
        return 0

    monkeypatch.setattr(sweep, "run_cell", run_cell)
    return done


GRID = ["config.seed=0,1", "config.num_speculative_tokens=1,3"]


def test_a_grid_is_decoded_resumed_and_reported(sweep, cells_run, tmp_path, capsys):
    argv = [*FIXED, *GRID, f"--out={tmp_path}"]
    assert sweep.main(argv) == 0
    assert cells_run == [
        f"seed={seed} num_speculative_tokens={length}" for seed in (0, 1) for length in (1, 3)
    ]
    shown = capsys.readouterr().out
    assert "4 cells, 0 of them finished" in shown
    assert "[4/4] seed=1 num_speculative_tokens=3 ..., ETA " in shown
    text = (tmp_path / "report-1" / "report.md").read_text()
    for label in (
        f"ngram, {k}, seed {n}" for k in ("1 draft token", "3 draft tokens") for n in "01"
    ):
        assert f"| {label} " in text
    assert (tmp_path / "report-1" / "speedup_by_length.png").exists()
    assert len(list((tmp_path / "cells").glob("*.jsonl"))) == 4

    # Nothing is left; then one cell is half written, which is said, and one was interrupted.
    cells_run.clear()
    assert sweep.main(argv) == 0
    assert cells_run == []
    first, second, *_ = sorted((tmp_path / "cells").glob("*.jsonl"))
    first.write_text(first.read_text()[:100])
    capsys.readouterr()
    assert f"{first.name}' is a file that is no report" in refused_command(sweep.main, argv, capsys)
    first.unlink()
    broken = read_one(second)
    broken["summary"]["interrupted"] = True
    second.write_text(as_lines(broken))
    assert sweep.main(argv) == 0
    assert len(cells_run) == 2
    assert read_one(first)["rows"]

    # Another value elsewhere makes another cell, and more values only those that are new.
    cells_run.clear()
    more = [*FIXED, "config.seed=1", "config.num_speculative_tokens=1,2"]
    assert sweep.main([*more, f"--out={tmp_path}", "--nopictures"]) == 0
    assert cells_run == ["seed=1 num_speculative_tokens=2"]
    assert (
        sweep.main([*more, "--config.sampling.top_k=3", f"--out={tmp_path}", "--nopictures"]) == 0
    )
    assert len(cells_run) == 3


def test_a_failed_cell_does_not_stop_the_others(sweep, cells_run, tmp_path, capsys):
    grid = ["config.max_length=4,64"]
    assert sweep.main([*FIXED, *grid, f"--out={tmp_path}", "--nopictures"]) == 1
    assert len(cells_run) == 2
    shown = capsys.readouterr().out
    assert "FAILED with exit code 2: error: this one fails" in shown
    assert "| ngram " in (tmp_path / "report-1" / "report.md").read_text()


def test_tokens_that_differ_are_an_error_on_resuming_too(sweep, cells_run, tmp_path, capsys):
    argv = [*FIXED, f"--out={tmp_path}", "--nopictures"]
    assert sweep.main(argv) == 0
    (path,) = (tmp_path / "cells").glob("*.jsonl")
    wrong = read_one(path)
    for margin, code in ((1e-6, 0), (0.5, 1)):
        near_tie = {"index": 3, "margin": margin, "resolution": 1e-4}
        wrong["rows"][0] |= {"identical": False, "near_ties": [near_tie]}
        path.write_text(as_lines(wrong))
        assert sweep.main(argv) == code
    assert len(cells_run) == 1


def test_other_prompts_are_reported_apart(sweep, cells_run, tmp_path):
    grid = ["config.prompt=one two,two one"]
    out = f"--out={tmp_path}"
    assert sweep.main([FIXED[0], *grid, out, "--nopictures"]) == 0
    assert (tmp_path / "report-1" / "report.md").exists()
    assert (tmp_path / "report-2" / "report.md").exists()


def test_values_are_split_between_brackets_only(sweep):
    assert list(sweep._split("1,2")) == ["1", "2"]
    assert list(sweep._split("((1,4,8),(5,16,2)),()")) == ["((1,4,8),(5,16,2))", "()"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["config.nosuch=1,2"], "cell nosuch=1: config.nosuch='1': there is no such field"),
        (["config.batch_size=1,x"], "cell batch_size=x: config.batch_size='x'"),
        (["config.limit=1,0"], "cell limit=0: "),
        (["config.drafter.name=ngram", "config.drafter.exit_layer=1"], "exit_layer"),
        (["--config.drafter.name=ngram,none"], "sweep config.drafter.name=ngram,none"),
        (["config.seed=1,1"], "a value is given twice"),
        (["config.seed=1", "config.seed=2"], "config.seed is given twice"),
        (["config.seed=1,2", "--config.seed=3"], "it is swept"),
        (["config.report=a,b"], "every cell has one of its own"),
        (["--config.report=a"], "every cell has one of its own"),
        (["seed=1"], "'seed=1' is not understood"),
        (["--config=configs/bench_smollm2.py"], "no config of specjax.decode"),
        (["--outer=3"], "is not understood"),
    ],
)
def test_bad_input_is_one_line_before_any_cell(argv, says, sweep, cells_run, tmp_path, capsys):
    assert sweep.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err
    assert cells_run == []
    assert not (tmp_path / "out").exists()


def test_out_is_needed_and_writable(sweep, cells_run, tmp_path, capsys):
    assert "out is missing: pass --out=" in refused_command(sweep.main, ["config.seed=1"], capsys)
    (tmp_path / "file").write_text("")
    assert "is a file: name a folder" in refused_command(
        sweep.main, ["config.seed=1", f"--out={tmp_path / 'file'}"], capsys
    )


def test_a_cell_is_a_process_of_its_own(tmp_path):
    # A folder without a model: the process starts, says so, and its words are kept.
    (tmp_path / "empty").mkdir()
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path / 'out'}", "--nopictures"]
    command += [f"--config.target={tmp_path / 'empty'}", "config.seed=1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result
    assert "FAILED with exit code 2: error: " in result.stdout
    (log,) = (tmp_path / "out" / "cells").glob("*.log")
    assert str(tmp_path / "empty") in log.read_text()
