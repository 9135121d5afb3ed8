"""`specjax.report` replaces what it wrote itself, and nothing else."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from reports import as_lines, content

from specjax import report
from specjax.errors import InputError
from specjax.files import folder_marker
from specjax.files.atomic_writes import work_folder
from specjax.files.folder_marker import MARKER
from specjax.files.written_files import WrittenFiles


def test_only_its_own_files_are_replaced(tmp_path):
    (tmp_path / "a.md").write_text("mine")
    files = WrittenFiles("out", tmp_path, "report")
    with pytest.raises(InputError, match=r"a\.md there was not written as part of a report"):
        files.check(["new.md", "a.md"])
    with pytest.raises(InputError, match=r"a\.md there was not written"):
        files.write("a.md", "ours")
    assert (tmp_path / "a.md").read_text() == "mine"
    assert not (tmp_path / MARKER).exists()
    files.write("b.md", "ours")
    again = WrittenFiles("out", tmp_path, "report")
    again.write("b.md", "ours again")
    (tmp_path / "b.md").write_text("edited by hand")
    with pytest.raises(InputError, match=r"b\.md there was changed since it was written"):
        WrittenFiles("out", tmp_path, "report").check(["b.md"])


def test_a_file_that_a_kill_abandoned_is_known(tmp_path, monkeypatch):
    files = WrittenFiles("out", tmp_path, "report")

    def killed(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_marker, "record_of", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write("b.md", "ours")
    assert (tmp_path / "b.md").read_text() == "ours"
    monkeypatch.undo()
    WrittenFiles("out", tmp_path, "report").check(["b.md"])


def test_two_reports_into_one_folder_are_both_listed(tmp_path):
    both = [WrittenFiles("out", tmp_path, "report") for _ in range(2)]
    both[0].write("a.md", "a")
    both[1].write("b.md", "b")
    with pytest.raises(InputError, match="holds a report, not a corpus"):
        WrittenFiles("out", tmp_path, "corpus")
    assert sorted(folder_marker.read_marker(tmp_path).files) == ["a.md", "b.md"]
    both[0].write("b.md", "c")

    def write(number):
        files = WrittenFiles("out", tmp_path, "report")
        for name in range(5):
            files.write(f"{number}-{name}.md", "x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    names = {path.name for path in tmp_path.iterdir()} - {MARKER}
    assert len(names) == 42
    assert folder_marker.read_marker(tmp_path).files.keys() == names


def test_links_and_folders_are_not_ours(tmp_path):
    files = WrittenFiles("out", tmp_path, "report")
    (tmp_path / "elsewhere").write_text("x")
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "folder"):
        with pytest.raises(InputError, match="was not written"):
            files.write(name, "x")


@pytest.mark.parametrize(
    ("listing", "says"),
    [
        ("[1]", "specjax_folder.json: not what specjax writes"),
        ('{"files": {}}', "specjax_folder.json: not what specjax writes"),
        ('{"specjax_folder": 1, "kind": "report", "files": 3}', "lists no files"),
        ('{"specjax_folder": 1, "kind": "dataset", "files": {}}', "holds a dataset, not a report"),
        ("{", "is not JSON"),
    ],
)
def test_another_listing(listing, says, tmp_path):
    (tmp_path / MARKER).write_text(listing)
    with pytest.raises(InputError, match=says):
        WrittenFiles("out", tmp_path, "report")


def test_a_report_says_so_before_the_work(tmp_path, capsys, monkeypatch):
    run, out = tmp_path / "a.json", tmp_path / "out"
    run.write_text(as_lines(content()))
    arguments = [str(run), f"--out={out}"]
    assert report.main(arguments) == 0
    capsys.readouterr()
    names = sorted(path.name for path in out.iterdir())
    listed = json.loads((out / MARKER).read_text())
    assert sorted([*listed["files"], MARKER]) == names
    # Once more, over its own files; then over other files.
    assert report.main(arguments) == 0
    for name in listed["files"]:
        (out / MARKER).unlink()
        for other in names:
            (out / other).unlink(missing_ok=True)
        (out / name).write_text("mine")
        capsys.readouterr()
        assert report.main(arguments) == 2
        assert f"{name} there was not written as part of a report" in capsys.readouterr().err
        assert [path.name for path in out.iterdir()] == [name]
        (out / MARKER).write_text(json.dumps(listed))
        (out / name).unlink()


def test_pictures_draw_any_text(tmp_path, capsys):
    rows = content()["rows"]
    for row, category in zip(rows, ("$x_{$ and $", "a\ud800b", "plain"), strict=True):
        row["category"] = category
    run = tmp_path / "a.json"
    run.write_text(as_lines(content(rows=rows)))
    assert report.main([str(run), f"--out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "tau_by_task.png").exists()
    # Markdown shows one of the two backslashes.
    assert "a\\\\ud800b" in (tmp_path / "out" / "report.md").read_text().lower()


def test_pictures_of_a_killed_report_are_cleared_away(tmp_path, monkeypatch):
    run, out = tmp_path / "a.json", tmp_path / "out"
    run.write_text(as_lines(content()))
    out.mkdir()
    with work_folder(out, "pictures") as left:
        pass
    left.mkdir()
    (left / "tau.png").write_text("half")
    theirs = out / ".specjax-notes123.tmp"
    theirs.mkdir()
    assert report.main([str(run), f"--out={out}"]) == 0
    assert theirs.exists()
    assert not left.exists()
    assert len(list(out.glob(".specjax-*"))) == 1
